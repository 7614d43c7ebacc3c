"""Grammars as masks: what they allow, how drafts are cut, what is forced; on a real tokenizer, without a
model.
"""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.chat import formats
from agentspec.chat.compiled import GrammarCompiler
from agentspec.chat.grammar import Grammar
from agentspec.chat.parser import MessageParser
from agentspec.chat.tools import ToolChoice, Tools, call_grammar
from agentspec.drafting import Draft
from agentspec.errors import GrammarError
from tests import tiny
from tests.chat.schemas import documents, schemas

pytestmark = pytest.mark.fast

TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id
SIZE = len(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER, SIZE, [EOS])


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def allowed(constraint):
    logits = np.zeros(SIZE, dtype=np.float32)
    constraint.mask(logits)
    return np.flatnonzero(np.isfinite(logits)).tolist()


def accepts(grammar, text, whole=True):
    """The grammar allows the text's ids, and, if whole, EOS after them."""
    constraint = COMPILER.compile(grammar)()
    for token in ids_of(text):
        if token not in allowed(constraint):
            return False
        constraint.advance(token)
    return not whole or EOS in allowed(constraint)


def walk(grammar, seed, most=400):
    """A random output: each id drawn from those allowed, short documents preferred. (text, ended by
    itself)
    """
    constraint, draw, ids = COMPILER.compile(grammar)(), random.Random(seed), []
    while len(ids) < most:
        may = allowed(constraint)
        assert may, "a state that allows nothing"
        closing = [i for i in may if i == EOS or TOKENIZER.decode([i]) in '"}],0123456789'] or may
        token = draw.choice(closing if len(ids) > 40 else may)
        constraint.advance(token)
        if token == EOS:
            return TOKENIZER.decode(ids), True
        ids.append(token)
    return TOKENIZER.decode(ids), False


# ---- what is allowed -----------------------------------------------------------------------------


@given(schema=schemas(), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_random_walk_through_a_random_schema_is_a_valid_document(schema, seed):
    try:
        text, ended = walk(Grammar.json_schema(schema), seed)
    except GrammarError:
        return
    if ended:
        jsonschema.validate(json.loads(text), schema)


@given(data=st.data(), schema=schemas(closed=True))
@settings(max_examples=30, deadline=None)
def test_documents_of_a_schema_are_allowed(data, schema):
    document = data.draw(documents(schema))
    jsonschema.validate(document, schema)
    try:
        COMPILER.compile(Grammar.json_schema(schema))
    except GrammarError:
        return
    text = json.dumps(document, ensure_ascii=False)
    assert accepts(Grammar.json_schema(schema), text), text


@pytest.mark.parametrize(
    "grammar, good, bad",
    [
        (Grammar.regex(r"\d{3}-[a-z]+"), ["123-ab"], ["12-ab", "123-", "123-aB"]),
        (Grammar.regex("a/b|c"), ["a/b", "c"], ["a", "a/"]),
        (Grammar.choice(["yes", 'no "way"\n']), ["yes", 'no "way"\n'], ["ye", "yes!"]),
        (Grammar.json_object(), ['{"a": [1, {"b": null}]}', "{}"], ["[]", "{", '{"a":1}']),
        (Grammar.json_schema({}, whitespace=True), ['{"a":1}', '{\n  "a": 1\n}'], ["{a}"]),
        (Grammar.json_schema(True), ["3", '"x"'], ["x"]),
        (Grammar.json_schema('{"const": 3}'), ["3"], ["4"]),
        (Grammar.lark_grammar('start: "(" start ")" | NAME\nNAME: /[a-z]+/'), ["((ab))", "x"], ["(ab", "()"]),
        (Grammar.ebnf('root ::= "(" root ")" | [a-z]+\n'), ["((ab))", "x"], ["(ab", "()"]),
        (
            Grammar.json_schema({"const": 1}).after_thoughts("<think>", "</think>", False),
            ["<think>so?</think>\n\n1", "1", "<think></think>1"],
            ["<think>1", "so 1"],
        ),
        (Grammar.regex("x").after_thoughts("<think>", "</think>", True), ["so?</think>\nx"], ["x"]),
        (Grammar.regex("x").either(Grammar.json_schema({"const": 1})), ["x", "1"], ["x1", "2"]),
        (
            Grammar.regex("x").either(Grammar.regex("y")).after_thoughts("<t>", "</t>", False),
            ["x", "<t>a</t>y"],
            ["z"],
        ),
        (Grammar.json_schema({"type": "string", "format": "password"}), ['"x"'], ["x"]),
    ],
)
def test_grammars(grammar, good, bad):
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "[Uu]nsatisfiable"),
        (lambda: Grammar.json_schema(False), "."),
        (lambda: Grammar.json_schema({"$ref": "#/nowhere"}), "."),
        (lambda: Grammar.json_schema("{"), "no JSON"),
        (lambda: Grammar.json_schema([1]), "mapping"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "plain JSON"),
        (lambda: Grammar.json_schema({"enum": [1, 2**53 + 1]}), "9007199254740993"),
        (lambda: Grammar.regex("(?=a)"), "look"),
        (lambda: Grammar.regex("["), "unclosed"),
        (lambda: Grammar.regex(""), "empty"),
        (lambda: Grammar.lark_grammar("start: nowhere"), "nowhere"),
        (lambda: Grammar.ebnf("root ::= ("), "."),
        (lambda: Grammar.choice([]), "list"),
        (lambda: Grammar.choice("yes"), "list"),
    ],
)
def test_what_cannot_be_honoured_is_told(make, says):
    with pytest.raises(GrammarError, match=says):
        COMPILER.compile(make())


def test_a_tokenizer_that_llguidance_cannot_read_is_told():
    with pytest.raises(GrammarError, match="fast tokenizer"):
        GrammarCompiler(object(), 10, [1]).compile(Grammar.regex("a"))
    with pytest.raises(GrammarError, match="EOS"):
        GrammarCompiler(TOKENIZER, SIZE, []).compile(Grammar.regex("a"))


def test_response_formats():
    make = Grammar.of_response_format
    assert make({"type": "text"}) is None
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    assert make(schema) == Grammar.json_schema({"const": 1}) and make(schema).source == ("json_schema", '{"const": 1}')
    assert make({"type": "json_object"}) == Grammar.json_object()
    assert make({"type": "regex", "regex": "a+"}).source == ("regex", "a+")
    assert make({"type": "choice", "choice": ["a"]}) == Grammar.choice(["a"])
    assert make({"type": "grammar", "grammar": "start: /a/"}) == Grammar("start: /a/")
    assert accepts(make({"type": "ebnf", "ebnf": 'root ::= "a"'}), "a")


def test_compiled_grammars_are_kept_and_outputs_of_one_do_not_meet():
    compiled = COMPILER.compile(Grammar.regex("ab"))
    assert COMPILER.compile(Grammar.regex("ab")) is compiled
    one, other = compiled(), compiled()
    one.advance(ids_of("a")[0])
    assert allowed(other) != allowed(one)


# ---- the engine's seam ---------------------------------------------------------------------------


@given(
    prefix=st.integers(0, 8),
    nodes=st.lists(st.tuples(st.integers(-1, 14), st.integers(0, SIZE - 1) | st.just(-1)), max_size=15),
    chain=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_cut_draft_is_what_the_grammar_allows_and_the_state_stays(prefix, nodes, chain):
    """Against the definition: a node stays if every id on its path is in the mask at its place."""
    grammar = Grammar.json_schema({"type": "object", "properties": {"fox": {"enum": ["quick", "lazy"]}}})
    right = [*ids_of('{"fox": "quick"}'), EOS]
    constraint = COMPILER.compile(grammar)()
    for token in right[:prefix]:
        constraint.advance(token)
    before = allowed(constraint)
    tokens, parents = [], []
    for number, (parent, token) in enumerate(nodes):
        parents.append(number - 1 if chain else min(parent, number - 1))
        depth, up = 0, parents[-1]
        while up >= 0:
            depth, up = depth + 1, parents[up]
        place = prefix + depth
        tokens.append(token if token >= 0 else right[place] if place < len(right) else EOS)
    draft = Draft(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.linspace(1, 0.1, len(nodes), dtype=np.float32),
        np.zeros(len(nodes), np.int8),
    )
    expected = {}
    for number, parent in enumerate(parents):
        if parent >= 0 and parent not in expected:
            continue
        path, up = [], number
        while up >= 0:
            path.insert(0, tokens[up])
            up = parents[up]
        other = COMPILER.compile(grammar)()
        for token in [*right[:prefix], *path[:-1]]:
            if not other.ended:
                other.advance(token)
        if EOS not in path[:-1] and path[-1] in allowed(other):
            expected[number] = len(expected)
    cut = constraint.cut(draft)
    assert cut.tokens.tolist() == [tokens[n] for n in expected]
    assert cut.parents.tolist() == [expected.get(parents[n], -1) for n in expected]
    assert allowed(constraint) == before


@given(schema=schemas(), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_forced_ids_are_those_whose_mask_allows_no_other(schema, seed):
    """At every place of a random walk; looking ahead changes nothing."""
    try:
        constraint = COMPILER.compile(Grammar.json_schema(schema))()
    except GrammarError:
        return
    draw = random.Random(seed)
    for _ in range(40):
        before = allowed(constraint)
        forced = list(constraint.forced(16))
        assert allowed(constraint) == before
        assert forced == list(constraint.forced(16)) and list(constraint.forced(1)) == forced[:1]
        assert bool(forced) == (len(before) == 1)
        for token in forced or [draw.choice(before)]:
            assert not forced or allowed(constraint) == [token]
            constraint.advance(token)
            if token == EOS:
                assert list(constraint.forced(16)) == []
                return


def test_the_end_is_forced_where_nothing_else_may_come():
    constraint = COMPILER.compile(Grammar.choice(["The quick brown fox"]))()
    forced = list(constraint.forced(16))
    while forced[-1] != EOS:
        constraint.advance(forced.pop(0))
        forced = list(constraint.forced(16))
        assert forced
    assert constraint.complete


def test_an_id_that_the_grammar_forbids_is_an_error_never_an_invalid_document():
    constraint = COMPILER.compile(Grammar.regex("a"))()
    with pytest.raises(GrammarError, match="forbids"):
        constraint.advance(ids_of("b")[0])
    constraint = COMPILER.compile(Grammar.regex("a"))()
    constraint.advance(ids_of("a")[0])
    with pytest.raises(GrammarError, match="forbids"):
        constraint.advance(ids_of("a")[0])


def test_ids_beyond_the_tokenizer_are_never_allowed():
    constraint = GrammarCompiler(TOKENIZER, SIZE + 100, [EOS]).compile(Grammar.json_schema({}))()
    logits = np.zeros(SIZE + 100, dtype=np.float32)
    constraint.mask(logits)
    assert np.isneginf(logits[SIZE:]).all()


# ---- tool calls ----------------------------------------------------------------------------------

TOOLS = Tools.of(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "maxLength": 12},
                        "days": {"type": "integer", "minimum": 0, "maximum": 99},
                        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                    },
                    "required": ["city", "unit"],
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)


@pytest.mark.parametrize("name", formats.names())
@given(seed=st.integers(0, 2**32), choice=st.sampled_from(["required", "get_weather", "now"]))
@settings(max_examples=6, deadline=None)
def test_a_required_call_is_a_call_whatever_is_drawn(name, seed, choice):
    """A random walk through the grammar, read by the format's own parser: valid calls of the chosen tools
    only.
    """
    format = formats.get(name)
    grammar = call_grammar(format, TOOLS, ToolChoice.of(choice, TOOLS), {})
    text, ended = walk(grammar, seed)
    parser = MessageParser(format, TOOLS.schemas)
    parser.finish(text)
    message = parser.message()
    if not ended:
        return
    assert message["content"] == "" and "invalid_tool_calls" not in message and message["tool_calls"]
    for call in message["tool_calls"]:
        function = call["function"]
        assert choice == "required" or function["name"] == choice
        arguments = json.loads(function["arguments"])
        jsonschema.validate(arguments, TOOLS.schemas[function["name"]])
        assert set(arguments) <= set(TOOLS.schemas[function["name"]]["properties"])
    assert choice == "required" or len(message["tool_calls"]) == 1


@pytest.mark.parametrize("name", formats.names())
def test_what_a_format_writes_is_what_its_grammar_demands(name):
    format = formats.get(name)
    write = [("get_weather", '{"city": "Ulm", "unit": "kelvin"}'), ("now", "{}")]
    text = format.write_all(write).replace("'", '"')  # Python texts in JSON's quotes
    one = format.write_all(write[:1]).replace("'", '"')
    required = call_grammar(format, TOOLS, ToolChoice.of("required", TOOLS), {})
    assert accepts(required, text) and accepts(required, one)
    assert not accepts(required, "Hello") and not accepts(required, "")
    single = call_grammar(format, TOOLS, ToolChoice.of("required", TOOLS, parallel=False), {})
    assert accepts(single, one) and not accepts(single, text)
    named = call_grammar(format, TOOLS, ToolChoice.of("now", TOOLS), {})
    assert not accepts(named, one)
    wrong = format.write_all([("get_weather", '{"city": "Ulm", "unit": "rankine"}')]).replace("'", '"')
    assert not accepts(required, wrong)


@pytest.mark.parametrize("name", [n for n in formats.names() if formats.get(n).trigger])
def test_strict_tools_leave_text_free_and_hold_calls(name):
    from dataclasses import replace

    format = formats.get(name)
    strict = replace(TOOLS, strict=frozenset({"get_weather"}))
    grammar = call_grammar(format, strict, ToolChoice(), {})
    good = format.write_all([("get_weather", '{"city": "Ulm", "unit": "kelvin"}')])
    assert accepts(grammar, "Hello { world }")
    assert accepts(grammar, f"Hello.\n{good}") and accepts(grammar, f"{good}\n{good} Done.")
    assert not accepts(grammar, format.write_all([("get_weather", '{"town": "Ulm"}')]))
    assert not accepts(grammar, format.write_all([("other", "{}")]))


def test_special_tokens_in_a_format_are_demanded_as_tokens():
    special = TOKENIZER.convert_tokens_to_ids("<|im_start|>")

    class Marked(formats.ToolFormat):
        name = "marked"
        markers = ("<|im_start|>",)

        def write(self, name, arguments):
            return f'<|im_start|>{{"name": "{name}", "arguments": {arguments}}}'

    grammar = call_grammar(Marked(), TOOLS, ToolChoice.of("now", TOOLS), {"<|im_start|>": special})
    assert allowed(COMPILER.compile(grammar)()) == [special]
