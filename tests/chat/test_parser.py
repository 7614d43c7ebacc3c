"""Outputs to messages: every format, cut anywhere, whole or broken, gives the same message and consistent
deltas.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.chat import formats, joined
from agentspec.chat.formats.response_template import ResponseTemplate
from agentspec.chat.parser import MessageParser, Thoughts
from agentspec.errors import InvalidRequestError
from tests.chat import templates

pytestmark = pytest.mark.fast

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "with": {"type": "object"}},
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
FORMATS = formats.names()
MARKED = [name for name in FORMATS if not formats.get(name).bare]


def run(parser, text, cuts=()):
    """The deltas of a text pushed in pieces, the last with the end."""
    deltas, at = [], 0
    for cut in sorted(cut for cut in set(cuts) if 0 < cut < len(text)):
        deltas.append(parser.push(text[at:cut]))
        at = cut
    deltas.append(parser.finish(text[at:]))
    return deltas


def added_up(deltas):
    """The message that a consumer of the deltas puts together; checks what deltas promise."""
    message = {"role": "assistant", "content": "".join(d.content for d in deltas)}
    if reasoning := "".join(d.reasoning for d in deltas):
        message["reasoning_content"] = reasoning
    calls, invalid = {}, []
    for delta in deltas:
        for piece in delta.tool_calls:
            if piece.index not in calls:
                assert piece.name is not None, "the first delta names the tool"
                calls[piece.index] = {"id": piece.id, "name": piece.name, "arguments": ""}
            else:
                assert piece.name is None and piece.id == calls[piece.index]["id"]
            assert piece.id and isinstance(piece.arguments, str)
            calls[piece.index]["arguments"] += piece.arguments
        for broken in delta.invalid_tool_calls:
            begun = calls.pop(broken.index, None)
            assert begun is None or (begun["id"], begun["name"]) == (broken.id, broken.name)
            invalid.append({"id": broken.id, "name": broken.name, "args": broken.raw, "error": broken.error})
    if calls:
        assert len({c["id"] for c in calls.values()}) == len(calls)
        message["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for _, c in sorted(calls.items())
        ]
    if invalid:
        message["invalid_tool_calls"] = invalid
    return message


def parsed(format, text, cuts=(), tools=None, **options):
    """The message, the same from the deltas and from the parser, streamed and whole, ids aside."""
    format = formats.get(format) if isinstance(format, str) else format
    tools = TOOLS if tools is None else tools
    parser = MessageParser(format, tools, **options)
    deltas = run(parser, text, cuts)
    message = added_up(deltas)
    assert message == parser.message() == joined(deltas)
    at_once = MessageParser(format, tools, **options)
    at_once.finish(text)
    assert anonymous(at_once.message()) == anonymous(message)
    return message


def anonymous(message):
    return json.loads(json.dumps({**message}), object_hook=lambda o: {k: v for k, v in o.items() if k != "id"})


def calls_of(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


cuts = st.lists(st.integers(1, 400), max_size=12)
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20).filter(
    lambda s: "parameter>" not in s
)
weather = st.fixed_dictionaries(
    {"city": words},
    optional={
        "days": st.integers(-(10**6), 10**6),
        "with": st.dictionaries(
            words,
            st.recursive(st.none() | st.booleans() | st.integers(-99, 99) | words, lambda v: st.lists(v, max_size=3)),
        ),
    },
)
calls = st.lists(
    st.tuples(st.just("get_weather"), weather)
    | st.tuples(st.just("write_file"), st.fixed_dictionaries({"path": words, "text": words}))
    | st.tuples(st.just("now"), st.just({})),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", FORMATS)
@given(calls=calls, cuts=cuts, ascii=st.booleans())
@settings(max_examples=25, deadline=None)
def test_what_a_format_writes_it_reads_however_it_is_cut(name, calls, cuts, ascii):
    text = formats.get(name).write_all([(n, json.dumps(a, ensure_ascii=ascii)) for n, a in calls])
    message = parsed(name, text, cuts)
    assert calls_of(message) == calls
    assert message["content"] == "" and "invalid_tool_calls" not in message


@pytest.mark.parametrize("name", FORMATS)
def test_character_by_character(name):
    calls = [("get_weather", {"city": 'Köln "am" Rhein\n😀', "days": 3}), ("now", {})]
    text = formats.get(name).write_all([(n, json.dumps(a)) for n, a in calls])
    assert calls_of(parsed(name, text, range(len(text)))) == calls


@pytest.mark.parametrize("name", [n for n in MARKED if n != "harmony"])
def test_content_around_calls_is_kept_without_the_lines_between(name):
    call = formats.get(name).write_all([("now", "{}")])
    message = parsed(name, f"Let me look.\n\n{call}\n", range(0, 400, 3))
    assert message["content"] == "Let me look."
    assert calls_of(message) == [("now", {})]


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("llama-pythonic", "qwen-coder")])
def test_arguments_come_as_they_are_written(name):
    """A long argument isn't held back to the call's end: each push of it gives a delta."""
    format = formats.get(name)
    text = format.write_all([("write_file", json.dumps({"path": "a", "text": "x" * 300}))])
    parser = MessageParser(format, TOOLS)
    pieces = [p for i in range(0, len(text), 10) for p in parser.push(text[i : i + 10]).tool_calls]
    assert pieces[0].name == "write_file"
    assert len([p for p in pieces if p.arguments]) > 25
    assert len({p.id for p in pieces}) == 1


def test_a_string_parameter_of_qwen_coder_comes_as_it_is_written():
    format = formats.get("qwen-coder")
    text = format.write("write_file", json.dumps({"path": "a", "text": "x" * 300}))
    parser = MessageParser(format, TOOLS)
    pieces = [p for i in range(0, len(text), 10) for p in parser.push(text[i : i + 10]).tool_calls]
    assert len([p for p in pieces if p.arguments]) > 25


broken = {
    "hermes": [
        '<tool_call>\n{"name": "now", "arguments": {"a": }}\n</tool_call>',
        "<tool_call>now()</tool_call>",
    ],
    "llama-json": ['{"name": "now", "parameters": {"a": nope}}', '<|python_tag|>now.call("x")'],
    "llama-pythonic": ["[now(a=open('x'))]", "[now(1, 2)]"],
    "mistral": ['[TOOL_CALLS] [{"name": "now", "arguments": {"a": 01}}]', "[TOOL_CALLS] now"],
    "mistral-args": ["[TOOL_CALLS]now[ARGS]{'a': 1}", "[TOOL_CALLS][ARGS]{}"],
    "deepseek-v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{a}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now({})<｜tool▁call▁end｜>",
    ],
    "deepseek-v31": [
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{'a'}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁call▁end｜>",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{a}<|call|>",
        "<|channel|>commentary to=functions.now<|message|>[1]<|call|>",
    ],
    "qwen-coder": [
        "<tool_call>\n<function=now>\n<param>3</param>\n</function>\n</tool_call>",
        "<tool_call>\n{}\n</tool_call>",
    ],
}


@pytest.mark.parametrize("name, text", [(n, t) for n in FORMATS for t in broken[n]])
def test_a_malformed_call_is_kept_as_invalid_with_its_text(name, text):
    message = parsed(name, text, range(len(text)))
    assert "tool_calls" not in message and message["content"] == ""
    [invalid] = message["invalid_tool_calls"]
    assert invalid["args"] and invalid["args"] in text and invalid["error"] and invalid["id"]


@pytest.mark.parametrize("name", MARKED)
@given(calls=calls, keep=st.integers(1, 300), cuts=cuts)
@settings(max_examples=20, deadline=None)
def test_a_call_that_the_end_breaks_off_is_invalid_never_lost(name, calls, keep, cuts):
    """max_tokens, anywhere: the calls before are whole, and nothing raises."""
    format = formats.get(name)
    text = format.write_all([(n, json.dumps(a)) for n, a in calls])[:keep]
    message = parsed(name, text, cuts)
    found = calls_of(message)
    assert found == calls[: len(found)]
    assert len(message.get("invalid_tool_calls", ())) <= 1


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=st.text(st.sampled_from('{}[]()"\\:,;=<>/|abtool_caln \nu0123'), max_size=80),
    cuts=cuts,
    call=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_no_text_raises_and_none_is_read_differently_in_pieces(name, text, cuts, call):
    if call:
        written = formats.get(name).write_all([("get_weather", '{"city": "x"}')])
        place = len(text) // 2
        text = written[: len(written) - place] + text
    parsed(name, text, cuts)


@pytest.mark.parametrize("name", FORMATS)
def test_the_call_after_a_broken_one_is_read(name):
    if formats.get(name).bare or name == "mistral":
        pytest.skip("nothing marks where the next call of this format begins")
    format = formats.get(name)
    text = broken[name][0] + format.between + format.write_all([("now", '{"a": 1}')])
    message = parsed(name, text, range(0, len(text), 2))
    assert calls_of(message) == [("now", {"a": 1})] and len(message["invalid_tool_calls"]) == 1


@given(text=st.text(st.sampled_from("ab \n<>think/tool_call{}"), max_size=60), cuts=cuts)
@settings(max_examples=80, deadline=None)
def test_without_tools_and_thoughts_content_is_the_text_itself(text, cuts):
    for format in (None, formats.get("hermes")):
        assert parsed(format, text, cuts, tools={}) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "parameters": {}}',
        '{"answer": 42}',
        "[1, 2, 3]",
        "{ x }",
        "[",
        "{",
        "[]",
        "[ ]",
        "a [now()]",
    ],
)
@pytest.mark.parametrize("name", ["llama-json", "llama-pythonic"])
def test_bare_json_that_names_no_offered_tool_is_content(name, text):
    message = parsed(name, text, range(len(text)))
    assert message == {"role": "assistant", "content": text}


def test_one_object_in_the_function_form_and_arguments_as_text_are_read():
    text = '{"type": "function", "function": {"arguments": "{\\"a\\": 1}", "name": "now"}}'
    text = f"<tool_call>{text}</tool_call>"
    assert calls_of(parsed("hermes", text, range(len(text)))) == [("now", {"a": 1})]


def test_mistrals_call_ids_are_the_models_where_it_writes_them_and_nine_characters_else():
    message = parsed("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}", range(40))
    assert message["tool_calls"][0]["id"] == "abc123XYZ"
    message = parsed("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
    assert len(message["tool_calls"][0]["id"]) == 9 and message["tool_calls"][0]["id"].isalnum()


def test_json_nested_without_end_is_invalid():
    text = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000 + "</tool_call>"
    assert "nested" in parsed("hermes", text)["invalid_tool_calls"][0]["error"]


# ---- thoughts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
@given(cuts=cuts)
@settings(max_examples=30, deadline=None)
def test_thoughts_are_apart_from_content_and_calls(inside, cuts):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = ("" if inside else "<think>\n") + f"I <tool_call> the clock.\n</think>\n\nOne moment.\n{call}"
    message = parsed("hermes", text, cuts, thoughts=Thoughts(inside=inside))
    assert message["reasoning_content"] == "I <tool_call> the clock."
    assert message["content"] == "One moment."
    assert calls_of(message) == [("now", {})]


def test_thoughts_without_tools_and_without_an_end():
    thoughts = Thoughts()
    message = parsed(None, "<think>Hm", range(9), thoughts=thoughts)
    assert message == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    message = parsed(None, "<think>\n\n</think>\n\nHi <think>", range(40), thoughts=thoughts)
    assert message == {"role": "assistant", "content": "Hi <think>"}
    assert parsed(None, " <thin", range(9), thoughts=thoughts) == {"role": "assistant", "content": " <thin"}


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Ulm"}<|call|>'
    )
    message = parsed("harmony", text, range(len(text)))
    assert message["reasoning_content"] == "I look." and message["content"] == "Looking."
    assert calls_of(message) == [("get_weather", {"city": "Ulm"})]
    text = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>42 <b>"
    message = parsed("harmony", text, range(len(text)), tools={})
    assert message == {"role": "assistant", "content": "42 <b>", "reasoning_content": "Easy."}


# ---- a tokenizer's own response_template, read by transformers -----------------------------------

SPEC = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


@given(cuts=cuts)
@settings(max_examples=20, deadline=None)
def test_a_response_template_is_read_by_transformers_parser(cuts):
    format = ResponseTemplate(SPEC).at("<|im_start|>assistant\n<think>")
    text = 'Hm.</think>Look:<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    message = parsed(format, text, cuts)
    assert message["reasoning_content"] == "Hm." and message["content"] == "Look:"
    assert calls_of(message) == [("now", {"a": 1})]


@given(cuts=cuts)
@settings(max_examples=20, deadline=None)
def test_a_region_that_transformers_parser_cannot_read_is_an_invalid_call(cuts):
    text = '<tool_call>{"name": nope}</tool_call> and more'
    message = parsed(ResponseTemplate(SPEC).at(""), text, cuts)
    [invalid] = message["invalid_tool_calls"]
    assert invalid["args"] == '{"name": nope}' and invalid["error"]
    assert message["content"] == "and more"


# ---- which format a model has --------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, name",
    [
        (templates.QWEN3, "hermes"),
        (templates.MISTRAL, "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral-args"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama-json"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", "llama-pythonic"),
        ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek-v3"),
        ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek-v31"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen-coder"),
        (templates.CHATML, None),
    ],
)
def test_the_chat_template_gives_the_format_away(template, name):
    found = formats.detect(template)
    assert (found.name if found else None) == name


def test_a_format_of_ones_own_is_asked_first_and_an_unknown_name_is_refused():
    class Angle(formats.ToolFormat):
        name = "angle"
        traits = ("<<call",)

        def parse(self, scanner, out, tools):
            while (yield from scanner.until(("<<call ",), out.content)):
                yield from formats.call_in_json(scanner, out, closing=">>")

        def write(self, name, arguments):
            return f'<<call {{"name": "{name}", "arguments": {arguments}}}>>'

    from agentspec.chat.formats import registry

    before = list(registry._formats)
    try:
        formats.register(Angle())
        assert formats.detect("<<call <tool_call>").name == "angle"
        text = formats.get("angle").write_all([("now", '{"a": 1}')])
        assert calls_of(parsed("angle", text, range(len(text)))) == [("now", {"a": 1})]
    finally:
        registry._formats[:] = before
    with pytest.raises(InvalidRequestError, match=r"hermes.*'angle'"):
        formats.get("angle")
    with pytest.raises(InvalidRequestError):
        formats.register("angle")
