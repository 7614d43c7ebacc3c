"""structural_tag: what this package writes as Lark, said in xgrammar's words. That xgrammar holds outputs to it is tested
on the real server (tests/sglang/test_engine.py); here, that the two say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.chat import Grammar, formats
from agentspec.chat.structural import structural_tag
from agentspec.chat.tools import ToolChoice, Tools, call_grammar
from agentspec.errors import GrammarError

pytestmark = pytest.mark.fast

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = Tools.of(
    [
        {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}},
    ]
)
SPECIALS = {"<tool_call>": 5, "</tool_call>": 6, "[TOOL_CALLS]": 7, "<|channel|>": 8, "<|message|>": 9, "<|call|>": 10}


def texts(found: Any) -> list[str]:
    """All constant texts and tokens, in order."""
    if isinstance(found, list):
        return [text for item in found for text in texts(item)]
    if not isinstance(found, dict):
        return []
    kind = found.get("type")
    if kind == "const_string":
        return [found["value"]] if found["value"] else []
    if kind == "token":
        return [f"<[{found['token']}]>"]
    if kind == "tag":
        return [*texts(found["content"]), found["end"]]
    return texts(found.get("elements") or found.get("content") or found.get("format"))


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("choice", ["required", "ls", ["ls", "read_file"]])
def test_every_formats_required_calls_have_a_tag(name: str, choice: Any) -> None:
    grammar = call_grammar(formats.get(name), TOOLS, ToolChoice.of(choice, TOOLS), SPECIALS)
    assert grammar is not None
    made = structural_tag(grammar)
    assert json.loads(json.dumps(made)) == made and made["type"] == "structural_tag"
    said = "".join(texts(made["format"]))
    assert "ls" in said and ("read_file" in said) == (choice != "ls")
    assert "x-guidance" not in json.dumps(made)


def test_schemas_inside_keep_their_schema_and_bound_their_space() -> None:
    grammar = call_grammar(formats.get("hermes"), TOOLS, ToolChoice.of("read_file", TOOLS), SPECIALS)
    assert grammar is not None
    [element] = [e for e in structural_tag(grammar)["format"]["elements"] if e["type"] == "json_schema"]
    assert element["json_schema"] == {**SCHEMA, "additionalProperties": False}
    assert element["max_whitespace_cnt"] == 1


def test_choices_schemas_patterns_and_rules() -> None:
    assert structural_tag(Grammar.choice(["yes", 'no "x"']))["format"] == {
        "type": "or",
        "elements": [{"type": "const_string", "value": "yes"}, {"type": "const_string", "value": 'no "x"'}],
    }
    assert structural_tag(Grammar.regex("a/b+"))["format"] == {"type": "regex", "pattern": "a/b+"}
    assert structural_tag(Grammar.json_schema(SCHEMA, whitespace=True))["format"] == {
        "type": "json_schema",
        "json_schema": SCHEMA,
    }
    rules = 'root ::= "a" | "b"'
    assert structural_tag(Grammar.ebnf(rules))["format"] == {"type": "grammar", "grammar": rules}


@pytest.mark.parametrize("inside", [True, False])
def test_thoughts_come_before(inside: bool) -> None:
    grammar = Grammar.json_schema(SCHEMA).after_thoughts("<think>", "</think>", inside)
    found = structural_tag(grammar)["format"]
    said = texts(found)
    assert said[-1] == "</think>" and ("<think>" in said) != inside
    assert '"json_schema"' in json.dumps(found)


def test_either_a_call_or_a_document() -> None:
    call = call_grammar(formats.get("hermes"), TOOLS, ToolChoice.of("required", TOOLS), SPECIALS)
    assert call is not None
    found = structural_tag(call.either(Grammar.json_schema(SCHEMA)))["format"]
    assert found["type"] == "or" and found["elements"][1]["json_schema"] == SCHEMA


@pytest.mark.parametrize(
    "lark", ["start: a\na: a", "start: b", 'start: "x" ~ 3', "start: TEXT\nTEXT[lazy]: /abc/", "%ignore /x/"]
)
def test_what_has_no_tag_is_told(lark: str) -> None:
    with pytest.raises(GrammarError):
        structural_tag(Grammar(lark))


def test_strict_tools_under_a_free_choice_are_refused() -> None:
    strict = Tools.of([{"type": "function", "function": {"name": "ls", "strict": True, "parameters": SCHEMA}}])
    grammar = call_grammar(formats.get("hermes"), strict, ToolChoice.of(None, strict), SPECIALS)
    assert grammar is not None
    with pytest.raises(GrammarError, match="llguidance"):
        structural_tag(grammar)
