"""Message content: off unless opted into by OpenTelemetry's own variable, cut, and still JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentspec
from agentspec.telemetry import content
from agentspec.telemetry.options import CONTENT_LIMIT, OPTIONS
from tests.scripted import ScriptedEngine

pytestmark = pytest.mark.fast

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SECRET = "the secret is 4711"
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": SECRET},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": '{"q": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "found " + SECRET},
]


def run():
    @agentspec.tool
    def look(question, *, deep=False):
        return "found " + SECRET

    with agentspec.trajectory(name="a"):
        ScriptedEngine().chat(MESSAGES).result()
        look(SECRET, deep=True)


def everything(spans):
    return json.dumps([[s.name, dict(s.attributes), s.status.description] for s in spans.all()], default=str)


@pytest.mark.parametrize("value", [None, "", "false", "NO_CONTENT", "EVENT_ONLY"])
def test_nothing_by_default(spans, monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    run()
    assert SECRET not in everything(spans)


class Mute:
    def __str__(self):
        raise LookupError("no words")


def _deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("make", [Mute, _deep, lambda: 10**5000])
def test_what_cant_be_written_fails_no_tool(spans, monkeypatch, make):
    monkeypatch.setenv(VARIABLE, "true")
    value = make()

    @agentspec.tool(seed=False)
    def same(value):
        return value

    with agentspec.trajectory(name="a"):
        assert same(value) is value
    told = spans.named("execute_tool same").attributes
    for name in ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"):
        assert "can't be written" in json.loads(told[name])


class Odd(str):
    def __str__(self):
        raise LookupError("no words")

    __len__ = __getitem__ = encode = __str__


def test_a_text_is_written_as_the_text_it_is(spans, monkeypatch):
    monkeypatch.setenv(VARIABLE, "true")
    odd = Odd("found")

    @agentspec.tool
    def look():
        return odd

    with agentspec.trajectory(name="a"):
        assert look() is odd
    assert spans.named("execute_tool look").attributes["gen_ai.tool.call.result"] == "found"


@pytest.mark.parametrize("value", ["true", "SPAN_ONLY", "span_and_event"])
def test_on_opt_in_messages_as_the_conventions_schema_has_them(spans, monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    run()
    call = spans.named("chat scripted-1").attributes
    system, user, assistant, tool = json.loads(call["gen_ai.input.messages"])
    assert system == {"role": "system", "parts": [{"type": "text", "content": "You are terse."}]}
    assert user["parts"][0]["content"] == SECRET
    assert assistant["parts"] == [{"type": "tool_call", "id": "c1", "name": "look", "arguments": '{"q": 1}'}]
    assert tool["parts"] == [{"type": "tool_call_response", "id": "c1", "response": "found " + SECRET}]
    (output,) = json.loads(call["gen_ai.output.messages"])
    assert output["parts"][0]["content"] == "word " * 8 and output["finish_reason"] == "stop"
    look = spans.named("execute_tool look").attributes
    assert json.loads(look["gen_ai.tool.call.arguments"]) == {"question": SECRET, "deep": True}
    assert look["gen_ai.tool.call.result"] == "found " + SECRET


def test_configure_overrules_the_variable(spans, monkeypatch):
    monkeypatch.setenv(VARIABLE, "true")
    OPTIONS.content = False
    run()
    assert SECRET not in everything(spans)


def test_the_sdks_own_smaller_limit_is_kept(spans, monkeypatch):
    monkeypatch.setenv(VARIABLE, "true")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "200")
    run()
    written = spans.named("chat scripted-1").attributes["gen_ai.input.messages"]
    assert len(written) <= 200 and json.loads(written)


def test_a_long_chat_is_cut_and_keeps_its_system_words_and_its_newest_message(spans, monkeypatch):
    monkeypatch.setenv(VARIABLE, "true")
    long = [{"role": "system", "content": "Be terse."}]
    long += [{"role": "user", "content": f"{i} " + "x" * 5000} for i in range(2000)]
    ScriptedEngine().chat(long).result()
    written = spans.named("chat scripted-1").attributes["gen_ai.input.messages"]
    assert len(written) <= CONTENT_LIMIT
    read = json.loads(written)
    assert read[0]["parts"][0]["content"] == "Be terse."
    assert read[-1]["parts"][0]["content"].startswith("1999 ")
    assert "left out" in read[1]["parts"][0]["content"]


def test_one_long_message_is_cut_not_left_out(spans, monkeypatch):
    monkeypatch.setenv(VARIABLE, "true")
    ScriptedEngine().chat([{"role": "user", "content": "Dear agent, " + "x" * 100_000}]).result()
    written = spans.named("chat scripted-1").attributes["gen_ai.input.messages"]
    (user,) = json.loads(written)
    assert len(written) <= CONTENT_LIMIT
    assert user["parts"][0]["content"].startswith("Dear agent, xxx")
    assert user["parts"][0]["content"].endswith("[100012 characters]")


message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=400)}
)


@given(st.lists(message, max_size=30), st.integers(2, 2000))
def test_any_messages_are_json_within_any_limit(messages, limit):
    written = content.messages_json(messages, limit)
    assert len(written) <= limit and isinstance(json.loads(written), list)


@given(st.text(max_size=3000), st.integers(2, 1000))
def test_any_output_is_json_within_any_limit(text, limit):
    written = content.output_json(text, "stop", limit)
    assert len(written) <= limit and isinstance(json.loads(written), list)


@given(st.text(max_size=300), st.integers(0, 200))
def test_cut_text(text, limit):
    cut = content.text(text, limit)
    assert len(cut) <= limit or cut == text
    assert cut == text if len(text) <= limit else len(cut) <= limit
