"""Chunks and messages made of an engine's deltas: tool calls, thoughts, malformed calls, usage."""

from __future__ import annotations

import functools
import json
import operator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_agentspec.reply import Reply, _spoil
from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from langchain_core.utils.json import parse_partial_json

from agentspec.chat.deltas import InvalidToolCall, MessageDelta, ToolCallDelta
from agentspec.engines.base import CallStats

pytestmark = pytest.mark.fast

STATS = CallStats(model="m", prompt_tokens=10, reused_tokens=4, output_tokens=7, finish_reason="stop")


def chunk(*, finish: str | None = None, **delta: Any) -> Any:
    return SimpleNamespace(
        token_ids=(1,),
        text="",
        finish_reason=finish,
        stop_reason=None,
        logprobs=(),
        index=0,
        delta=MessageDelta(**delta),
    )


def both(*chunks: Any, stats: CallStats = STATS) -> tuple[AIMessage, AIMessage]:
    """The message that is made at once, and the one that the stream's chunks add up to."""
    streamed, whole = Reply("id-1"), Reply("id-1")
    pieces: list[AIMessageChunk] = [m for c in chunks if (m := streamed.push(c)) is not None]
    for c in chunks:
        whole.push(c)
    added = functools.reduce(operator.add, [*pieces, streamed.last(stats)])
    return whole.message(stats), message_chunk_to_message(added)


def test_the_stream_adds_up_to_the_message() -> None:
    at_once, streamed = both(
        chunk(reasoning="I should "),
        chunk(reasoning="read."),
        chunk(content="Let me "),
        chunk(),
        chunk(content="see."),
        chunk(tool_calls=(ToolCallDelta(0, "call_1", "read", '{"pa'),)),
        chunk(tool_calls=(ToolCallDelta(0, "call_1", None, 'th": "x"}'), ToolCallDelta(1, "call_2", "list", ""))),
        chunk(tool_calls=(ToolCallDelta(1, "call_2", None, "{}"),), finish="stop"),
    )
    for message in (at_once, streamed):
        assert message.content == "Let me see."
        assert message.additional_kwargs == {"reasoning_content": "I should read."}
        assert [(c["id"], c["name"], c["args"]) for c in message.tool_calls] == [
            ("call_1", "read", {"path": "x"}),
            ("call_2", "list", {}),
        ]
        assert message.invalid_tool_calls == []
        assert [block["type"] for block in message.content_blocks] == [
            "reasoning",
            "text",
            "tool_call",
            "tool_call",
        ]
        assert message.response_metadata["finish_reason"] == "tool_calls"
    assert at_once.usage_metadata == streamed.usage_metadata
    assert at_once.id == streamed.id == "id-1"


def test_usage_comes_once() -> None:
    reply = Reply("id-1")
    pieces = [
        reply.push(chunk(content="a")),
        reply.push(chunk(content="b", finish="stop")),
        reply.last(STATS),
    ]
    assert [piece.usage_metadata is not None for piece in pieces if piece] == [False, False, True]
    added = functools.reduce(operator.add, pieces)
    assert added.usage_metadata == {
        "input_tokens": 10,
        "output_tokens": 7,
        "total_tokens": 17,
        "input_token_details": {"cache_read": 4},
    }
    assert added.response_metadata["call_stats"]["verify_steps"] == 0


def test_a_call_broken_off_in_its_arguments_is_invalid_with_its_raw_text() -> None:
    """langchain#33504; and LangChain's merging would close the quote and run the tool with half a path."""
    raw = '{"name": "delete", "arguments": {"path": "/home/a'
    at_once, streamed = both(
        chunk(tool_calls=(ToolCallDelta(0, "call_1", "delete", '{"path": "/home/a'),)),
        chunk(
            invalid_tool_calls=(InvalidToolCall(0, "call_1", "delete", raw, "the output ends inside the call"),),
            finish="length",
        ),
    )
    for message in (at_once, streamed):
        assert message.tool_calls == []
        assert [c["name"] for c in message.invalid_tool_calls] == ["delete"]
        assert message.additional_kwargs["invalid_tool_calls"] == [
            {"id": "call_1", "name": "delete", "args": raw, "error": "the output ends inside the call"}
        ]
        assert message.response_metadata["finish_reason"] == "length"
    assert at_once.invalid_tool_calls[0]["args"] == raw
    assert str(streamed.invalid_tool_calls[0]["args"]).startswith('{"path": "/home/a')


def test_a_call_that_never_got_a_name_is_invalid_with_its_raw_text() -> None:
    at_once, streamed = both(
        chunk(content="ok", invalid_tool_calls=(InvalidToolCall(0, "call_1", None, '{"a": 1}', "no name"),)),
        chunk(finish="stop"),
    )
    for message in (at_once, streamed):
        assert message.tool_calls == [] and len(message.invalid_tool_calls) == 1
        assert str(message.invalid_tool_calls[0]["args"]).startswith('{"a": 1}')
        assert message.response_metadata["finish_reason"] == "stop"


json_objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.none() | st.integers() | st.text(max_size=6), st.lists, max_leaves=4),
    max_size=3,
)


@settings(deadline=None)
@given(json_objects, st.integers(0, 80))
def test_no_beginning_of_arguments_is_repaired(value: dict[str, Any], cut: int) -> None:
    text = json.dumps(value)[:cut]
    spoilt = text + _spoil(text)
    try:
        parsed = parse_partial_json(spoilt) if spoilt else {}
    except ValueError:
        return
    assert not isinstance(parsed, dict), spoilt
