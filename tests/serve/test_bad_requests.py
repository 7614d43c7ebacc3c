"""What the server refuses, each with a 400 that says what is wrong and what was needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.chat.template import ChatTemplate
from agentspec.errors import InvalidRequestError
from agentspec.serve.requests import Asked, ChatRequest
from tests import tiny
from tests.tiny import CHAT_TEMPLATE

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Hi"}


def asked(**fields: Any) -> Asked:
    return Asked.of(ChatRequest(**{"model": "tiny", "messages": [USER], **fields}))


def call(**function: Any) -> list[Any]:
    return [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"invalid_tool_calls": 5}, r"messages\[1\].invalid_tool_calls: needed a list of objects, got 5"),
        ({"reasoning_content": 5}, "reasoning_content: needed a text, got 5"),
        ({"name": {"a": 1}}, "name: needed a text, got"),
        ({"tool_call_id": 7}, "tool_call_id: needed a text, got 7"),
        ({"tool_calls": [{}]}, r"tool_calls\[0\].function: needed"),
        ({"tool_calls": [5]}, "tool_calls: needed a list of objects"),
        ({"tool_calls": call(name=5, arguments=7)}, "function.name: needed a text, got 5"),
        ({"tool_calls": call(arguments=7)}, "function.arguments: needed JSON text or an object, got 7"),
        ({"tool_calls": call(zz=1)}, "no field 'zz'"),
        ({"tool_calls": [{**call()[0], "type": "custom"}]}, "the type 'function'"),
        ({"tool_calls": [{**call()[0], "functoin": {}}]}, "did you mean function"),
        ({"contents": "a"}, "no field 'contents' there: did you mean content"),
        ({"content": 5}, "content: needed a text or a list"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\]: .* reads text only"),
        ({"content": [{"type": "text", "text": "a", "zz": 1}]}, "no field 'zz'"),
        ({"role": None}, "needed a 'role'"),
    ],
)
def test_a_message(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        asked(messages=[USER, {"role": "assistant", "content": "a", **message}])


def test_an_answer_of_ours_or_an_sdks_may_be_sent_again() -> None:
    dumped = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "reasoning_content": "well", "parsed": None,
        "tool_calls": [{**call(parsed_arguments={})[0], "index": 0}],
    }  # fmt: skip
    broken = {"role": "assistant", "content": None, "invalid_tool_calls": [{"name": "f"}]}
    messages = asked(messages=[USER, dumped, broken, {"role": "tool", "tool_call_id": "a", "content": "x"}]).messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"]["name"] == "f" and "annotations" not in messages[1]
    assert messages[2] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "content", "content": "a", "zz": 1}, "prediction: .* no field 'zz'"),
        ({"type": "text", "content": "a"}, "prediction: needed"),
        ({"type": "content"}, "prediction.content: needed"),
        ({"type": "content", "content": [{"text": 5}]}, r"prediction.content\[0\]"),
    ],
)
def test_a_prediction(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        asked(prediction=given)


class Tokenizer:
    def __init__(self, template: str) -> None:
        self.chat_template = template
        self.special_tokens_map = {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (CHAT_TEMPLATE, set()),
        ("{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}x{% endif %}", {"enable_thinking"}),
        ("{% if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}{{ date }}", {"date"}),
        ("{% set ns = namespace(a=1) %}{% for m in messages %}{{ m.e }}{{ loop.index }}{% endfor %}", set()),
        ("{% for m in messages %}{% generation %}{{ m.content + tail }}{% endgeneration %}{% break %}{% endfor %}", {"tail"}),
        ("{{ raise_exception('no') }}{{ tools }}{{ add_generation_prompt }}", set()),
        ("{% broken", set()),
    ],
)  # fmt: skip
def test_what_a_template_lets_be_set(template: str, variables: set[str]) -> None:
    assert ChatTemplate(Tokenizer(template)).variables == variables


def test_over_the_wire(serving: Callable[..., Any]) -> None:
    url = serving().url + "/v1/chat/completions"

    def refused(content: bytes) -> str:
        answer = httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=60)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    def said(**fields: Any) -> str:
        return refused(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode())

    for name in ("e", "role", "message", "messages", "tokenize", "tools", "add_generation_prompt", "chat_template"):
        assert said(chat_template_kwargs={name: 1}).startswith(
            f"{name}: this model's chat template has no such variable"
        )
    assert "unknown field 'zz'" in said(response_format={"type": "json_object", "zz": 1})
    schema = {"name": "a", "schema": {"type": "object"}, "zz": 1}
    assert "response_format.json_schema: unknown field" in said(
        response_format={"type": "json_schema", "json_schema": schema}
    )
    vocabulary = len(tiny.tokenizer())
    for ids in ([5, -1, vocabulary], [2**31 - 1]):
        told = said(custom_params={"agentspec_seed_ids": ids})
        assert told == f"custom_params.agentspec_seed_ids: this model's ids are 0..{vocabulary - 1}, got {ids[-1]}"
    biased = said(logit_bias={"5": 1e39})
    assert biased == "logit_bias of 5: needed -inf or a number from -1e+30 to 1e+30, got 1e+39"
    for name in ("seed", "n", "max_tokens", "temperature", "top_p", "presence_penalty"):
        told = said(**{name: 10**400})
        assert name in told and len(told) < 300
    for long in ({"model": "m" * 10**5}, {"custom_params": {"agentspec_" + "x" * 10**5: 1}}, {"z" * 10**5: 1}):
        answer = httpx.post(url, json={"model": "tiny", "messages": [USER], **long}, timeout=60)
        assert answer.status_code in (400, 404) and len(answer.content) < 2500
    assert "nested" in refused(b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert "nested" in refused(b"[" * 5_000)
    assert "UTF-8" in refused(b'{"model": "\xff"}')
    assert "numbers" in refused(b'{"max_tokens": ' + b"9" * 5_000 + b"}")
    assert "no JSON" in refused(b"{broken")
    for depth in range(100, 1_000, 100):  # whatever is too deep for what comes after the parser
        said(tools=[json.loads('{"a":' * depth + "1" + "}" * depth)])
