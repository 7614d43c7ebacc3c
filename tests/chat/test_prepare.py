"""Chat requests: tools reach the prompt, tool_choice is honoured or refused, arguments are rendered once."""

from __future__ import annotations

import pytest

from agentspec.chat import ChatTemplate, History, OutputRecord, formats
from agentspec.chat.grammar import Grammar
from agentspec.chat.prepare import prepare
from agentspec.errors import GrammarError, InvalidRequestError
from agentspec.memory import Source
from tests.chat import templates
from tests.chat.tokenizers import byte_level

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Weather in Paris?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
ALL = [templates.CHATML, templates.QWEN3, templates.MISTRAL, templates.TRIMMING]


def prepared(source=templates.QWEN3, messages=(USER,), **options):
    return prepare(ChatTemplate(byte_level(source)), list(messages), **options)


@pytest.mark.parametrize("source", ALL)
def test_offered_tools_reach_the_prompt_whatever_the_template_knows(source):
    text = prepared(source, tools=[WEATHER, NOW]).prompt.text
    assert "get_weather" in text and "The weather of a city." in text and '"kelvin"' in text and "now" in text
    assert "strict" not in text, "an option of the request, not of the tool"
    assert "get_weather" not in prepared(source).prompt.text


@pytest.mark.parametrize("name", formats.names())
def test_tools_are_told_and_seeded_in_every_format(name):
    template = ChatTemplate(byte_level(templates.CHATML), tool_format=name)
    chat_ready = prepare(template, [USER], tools=[WEATHER])
    assert "<function-name>" in chat_ready.prompt.text and "get_weather" in chat_ready.prompt.text
    assert bool(chat_ready.seeds) == formats.get(name).json_arguments


def test_a_template_without_tools_is_told_them_in_the_system_message_and_shown_the_calls():
    chat = [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "x"},
    ]
    chat_ready = prepared(templates.CHATML, chat, tools=[WEATHER])
    text = chat_ready.prompt.text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert text.count("<|im_start|>system") == 1
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert [s.source for s in chat_ready.prompt.spans][-2:] == [Source.OUTPUT, Source.TOOL]
    assert prepared(templates.CHATML, [USER], tools=[WEATHER]).prompt.text.startswith("<|im_start|>system\n# Tools")


def test_a_template_that_refuses_the_tool_role_gets_results_as_the_users():
    refusal = "{%- for m in messages if m.role == 'tool' %}{{ raise_exception('no') }}{% endfor %}"
    source = refusal + templates.CHATML
    chat_ready = prepared(source, [USER, {"role": "assistant", "content": "Hm"}, {"role": "tool", "content": "noon"}])
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in chat_ready.prompt.text
    assert chat_ready.prompt.spans[-1].source == Source.TOOL


def test_a_call_written_as_text_for_such_a_template_is_spliced_as_it_was_generated():
    tokenizer = byte_level(templates.CHATML)
    history = History()
    said = '<tool_call>\n{"name": "now", "arguments": {"a":1}}\n</tool_call>'
    ids = [*tokenizer(said[:9], add_special_tokens=False)["input_ids"]]
    ids += [*tokenizer(said[9:], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}],
    }
    history.add(OutputRecord.of(tokenizer, ids, frozenset({tokenizer.eos_token_id})), message)
    chat_ready = prepared(templates.CHATML, [USER, message, USER], tools=[NOW], history=history)
    assert chat_ready.prompt.spliced_tokens == len(ids) - 1


@pytest.mark.parametrize("arguments", ['{"city": "Ulm"}', {"city": "Ulm"}])
@pytest.mark.parametrize("source", [templates.QWEN3, templates.MISTRAL])
def test_arguments_are_rendered_as_json_once(source, arguments):
    source = source.replace(" if call.function.arguments is string else call.function.arguments | tojson", " | tojson")
    source = source.replace(
        "call.arguments if call.arguments is string else call.arguments | tojson", "call.arguments | tojson"
    )
    source = source.replace("call.function.arguments | tojson", "call.function.arguments | tojson")
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    chat = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    text = prepared(source, chat, tools=[WEATHER]).prompt.text
    assert '"arguments": {"city": "Ulm"}}' in text and '\\"city\\"' not in text
    assert call["function"]["arguments"] == arguments, "the caller's message stays as it is"


def test_tool_choice():
    assert prepared(tools=[WEATHER]).grammar is None
    assert prepared(tools=[WEATHER], tool_choice="auto").grammar is None
    none = prepared(tools=[WEATHER], tool_choice="none")
    assert none.grammar is None and "get_weather" not in none.prompt.text
    assert none.parser().finish("<tool_call>").content == "<tool_call>"
    for choice in (
        "required",
        "any",
        "get_weather",
        {"type": "function", "function": {"name": "get_weather"}},
    ):
        assert prepared(tools=[WEATHER], tool_choice=choice).grammar is not None
    assert prepared(tools=[WEATHER, NOW]).grammar is not None, "a strict tool"
    both = prepared(tools=[WEATHER], response_format={"type": "json_object"}).grammar
    assert both is not None and both.parts


@pytest.mark.parametrize(
    "options, says",
    [
        ({"tools": [WEATHER], "tool_choice": "other"}, "get_weather"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": WEATHER}, "list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tools": [{"name": "f", "parameters": "x"}]}, "JSON schema"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"response_format": {"type": "text"}, "grammar": Grammar.regex("a")}, "both"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "exclude",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, says):
    with pytest.raises(InvalidRequestError, match=says):
        prepared(**options)


def test_a_template_that_does_not_tell_its_format_is_refused_with_the_remedy():
    source = templates.CHATML + "{{ tools | tojson if tools }}"
    with pytest.raises(InvalidRequestError, match="tool_format="):
        prepared(source, tools=[WEATHER])
    template = ChatTemplate(byte_level(source), tool_format="hermes")
    assert prepare(template, [USER], tools=[WEATHER]).parser() is not None


def test_strict_tools_of_a_format_without_marks_are_refused():
    template = ChatTemplate(byte_level(templates.QWEN3), tool_format="llama-json")
    with pytest.raises(GrammarError, match="tool_choice='required'"):
        prepare(template, [USER], tools=[NOW])


def test_thoughts_that_the_prompt_opens_are_read_as_thoughts():
    source = templates.QWEN3.replace("<think>\\n\\n</think>\\n\\n", "<think>\\n")
    chat_ready = prepared(source, template_options={"enable_thinking": False})
    assert chat_ready.prompt.text.endswith("<think>\n")
    parser = chat_ready.parser()
    assert parser.finish("Hm.\n</think>\n\nHi").content == "Hi"
    assert parser.message()["reasoning_content"] == "Hm."


def test_seeds_are_the_beginnings_keys_and_enums_of_the_calls():
    tokenizer = byte_level(templates.QWEN3)
    chat_ready = prepared(tools=[WEATHER, NOW])
    texts = [tokenizer.decode(list(seed), skip_special_tokens=False) for seed in chat_ready.seeds]
    assert texts[0].endswith('ant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "')
    assert texts[1].endswith('ant\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert chat_ready.seeds[0][:4] == chat_ready.prompt.input_ids[-4:]
    assert texts[2:] == ['", "unit": ', '"unit": "celsius"', '"unit": "kelvin"', "}}\n</tool_call>"]
    assert prepared().seeds == ()


def test_special_tokens_that_the_parser_needs_are_kept():
    tokenizer = byte_level(templates.MISTRAL)
    chat_ready = prepared(templates.MISTRAL, tools=[WEATHER])
    assert chat_ready.keep_ids == (tokenizer.convert_tokens_to_ids("[TOOL_CALLS]"),)
    assert prepared(templates.MISTRAL).keep_ids == ()
