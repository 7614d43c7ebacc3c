"""LangChain's messages as the chat templates' messages."""

from __future__ import annotations

import pytest
from langchain_agentspec.messages import to_agentspec
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from agentspec.errors import InvalidRequestError

pytestmark = pytest.mark.fast


def test_every_kind_of_message_has_its_role() -> None:
    said = to_agentspec(
        [
            SystemMessage("be brief"),
            HumanMessage("hi", name="ada"),
            AIMessage("hello"),
            ToolMessage("3", tool_call_id="call_1", name="add"),
            FunctionMessage("4", name="add"),
            ChatMessage("note", role="critic"),
        ]
    )
    assert said == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ada"},
        {"role": "assistant", "content": "hello"},
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "critic", "content": "note"},
    ]


def test_an_assistants_calls_and_thoughts_are_kept_apart_from_its_words() -> None:
    call = {"name": "read", "args": {"path": "ä.txt"}, "id": "call_1", "type": "tool_call"}
    message = AIMessage(
        [
            {"type": "reasoning", "reasoning": "I should read."},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "ä.txt"}},
        ],
        tool_calls=[call],
    )
    assert to_agentspec([message]) == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I should read.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "ä.txt"}'},
                }
            ],
        }
    ]
    kept = AIMessage("x", additional_kwargs={"reasoning_content": "hm"})
    assert to_agentspec([kept])[0]["reasoning_content"] == "hm"


def test_a_malformed_call_goes_along_with_its_raw_text() -> None:
    invalid = {"id": "call_1", "name": "read", "args": '{"path": ', "error": "broken off"}
    message = AIMessage("", additional_kwargs={"invalid_tool_calls": [invalid]})
    assert to_agentspec([message])[0]["invalid_tool_calls"] == [invalid]


def test_text_parts_are_one_text_and_a_tools_json_is_written_as_json() -> None:
    said = to_agentspec(
        [
            HumanMessage(["a", {"type": "text", "text": "b"}]),
            ToolMessage([{"type": "text", "text": "x"}, {"type": "json", "json": {"n": 1}}], tool_call_id="1"),
        ]
    )
    assert [message["content"] for message in said] == ["ab", 'x{"n": 1}']


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "image", "base64": "AAAA", "mime_type": "image/png"}]),
        HumanMessage([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]),
        ToolMessage([{"type": "file", "base64": "AAAA", "mime_type": "application/pdf"}], tool_call_id="1"),
    ],
)
def test_what_is_no_text_is_refused_with_what_to_do(message: BaseMessage) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].*reads text only; say it in words"):
        to_agentspec([HumanMessage("hi"), message])


def test_what_is_no_message_of_a_chat_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="got RemoveMessage"):
        to_agentspec([RemoveMessage(id="1")])
