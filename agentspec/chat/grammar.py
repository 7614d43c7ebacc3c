"""Grammar: what an output may be (JSON schema, regex, Lark, choice, tool calls), as text for llguidance.

llguidance was chosen over xgrammar by measurement (benchmarks/grammar.py libraries): it compiles a schema two to eight
times sooner (1 to 4 ms), its masks are slower (0.03 to 0.3 ms against 0.01 to 0.03) but far below a step; it takes
Lark, regex and JSON schema in one grammar, refuses what it can't honour (uniqueItems, not), and depends on nothing, where
xgrammar brings triton. A grammar here is only text; compiled.py turns it into masks and imports llguidance.

What `max_tokens` does: an output under a grammar ends by itself ("stop") only where the grammar is satisfied.
At max_tokens it ends as any other, with finish_reason "length"; its text is then the beginning of a valid
document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.chat.text import encodable
from agentspec.errors import GrammarError, InvalidRequestError

__all__ = ["Grammar", "json_rule"]

# As Python's json.dumps and the chat templates' tojson write it: what a model has seen, and what a template
# renders again, so that an output's own ids fit the next prompt.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(slots=True, frozen=True)
class Grammar:
    """A grammar in llguidance's Lark dialect. Equal grammars are compiled once.

    parts:  other grammars, which `lark` refers to as @name; one level
    source: what it was made of, for engines that take that: ("json_schema", JSON), ("regex",
            pattern) or ("ebnf", rules)

    Under a JSON schema, objects and lists are written in one line as json.dumps does, keys in the schema's
    order, texts without raw control characters (DEL is one to llguidance); whitespace=True allows any white
    space between tokens of JSON instead.
    """

    lark: str
    parts: tuple[tuple[str, Grammar], ...] = ()
    source: tuple[str, str] | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """As llguidance takes it: Lark, or JSON where there are parts."""
        if not self.parts:
            return self.lark
        grammars = [{"name": "whole", "lark_grammar": self.lark}]
        for name, part in self.parts:
            grammars += [{"name": name, "lark_grammar": part.lark}]
        return json.dumps({"grammars": grammars})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, whitespace: bool = False) -> Grammar:
        """A JSON document that the schema (a mapping, or its JSON text) describes."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise GrammarError(f"JSON schema: needed a schema, got text that is no JSON: {error}") from error
        rule = json_rule(schema, whitespace)
        return cls(f"start: {rule}\n", source=("json_schema", json.dumps(schema)))

    @classmethod
    def json_object(cls, *, whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """The whole output matches the pattern (Rust's regex syntax: no look-around, no back references)."""
        _text("regex", pattern)
        return cls(f"start: TEXT\nTEXT: /{_slashed(pattern)}/\n", source=("regex", pattern))

    @classmethod
    def lark_grammar(cls, lark: str) -> Grammar:
        """A Lark grammar with a `start` rule, as llguidance takes it (%json for schemas, <[id]> for special
        tokens)."""
        return cls(_text("grammar", lark))

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """A grammar of rules `name ::= ...` with a `root` rule, as xgrammar and llama.cpp (GBNF) take it."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return cls(any_to_lark(_text("ebnf", text)), source=("ebnf", text))
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(f"ebnf: {error}") from error

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """One of the texts."""
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise GrammarError(f"choice: needed a list of texts, got {options!r:.80}")
        return cls("start: " + " | ".join(literal(_text("choice", option)) for option in options) + "\n")

    @classmethod
    def of_response_format(cls, response_format: Mapping[str, Any]) -> Grammar | None:
        """OpenAI's response_format: text, json_object, json_schema; also regex, grammar, ebnf, choice. None:
        any text.
        """
        kind = response_format.get("type") if isinstance(response_format, Mapping) else None
        if isinstance(kind, str) and kind in _FORMAT_FIELDS:
            _known_fields("response_format", response_format, ("type", *_FORMAT_FIELDS[kind]))
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object()
        if kind == "json_schema":
            given = response_format.get("json_schema")
            if not isinstance(given, Mapping) or not isinstance(given.get("schema"), (Mapping, bool)):
                raise GrammarError(
                    "response_format: json_schema needed {'json_schema': {'name': ..., 'schema': {...}}}, "
                    f"got {given!r:.120}"
                )
            _known_fields("response_format.json_schema", given, ("name", "description", "schema", "strict"))
            return cls.json_schema(given["schema"])
        if kind == "regex":
            return cls.regex(response_format.get("regex", response_format.get("pattern", "")))
        if kind == "grammar":
            return cls.lark_grammar(response_format.get("grammar", ""))
        if kind == "ebnf":
            return cls.ebnf(response_format.get("ebnf", ""))
        if kind == "choice":
            return cls.choice(response_format.get("choice", ()))
        raise GrammarError(
            "response_format: needed a 'type' of text, json_object, json_schema, regex, grammar, ebnf or "
            f"choice, "
            f"got {kind!r}"
        )

    def either(self, other: Grammar) -> Grammar:
        """What this grammar or the other one allows."""
        return Grammar("start: @this | @other\n", (("this", self), ("other", other)))

    def after_thoughts(self, opening: str, closing: str, inside: bool) -> Grammar:
        """The same after thoughts, free text between the marks. inside: the prompt has opened them
        already.
        """
        parts = self.parts or (("rest", self),)
        rest = "@rest" if not self.parts else "(@this | @other)"
        start = f"thoughts space {rest}" if inside else f"({literal(opening)} thoughts space)? {rest}"
        return Grammar(f"start: {start}\nthoughts[lazy]: /(?s:.*){_escaped(closing)}/\nspace: /\\n{{0,2}}/\n", parts)


# response_format's types, and the fields that each has beside "type".
_FORMAT_FIELDS = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "regex": ("regex", "pattern"),
    "grammar": ("grammar",),
    "ebnf": ("ebnf",),
    "choice": ("choice",),
}


def _known_fields(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            raise GrammarError(f"{what}: unknown field {key!r:.80}; known are {', '.join(known)}")


def json_rule(schema: Any, whitespace: bool = False) -> str:
    """A JSON schema as a Lark term."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise GrammarError(f"JSON schema: needed a mapping, got {type(schema).__name__}")
    _exact_numbers(schema)
    guided = dict(schema) if whitespace else {**schema, "x-guidance": _COMPACT}
    try:
        return f"%json {json.dumps(guided)}"
    except (TypeError, ValueError) as error:
        raise GrammarError(f"JSON schema: needed plain JSON values: {error}") from error


def _exact_numbers(value: Any) -> None:
    """llguidance reads numbers as 64-bit floats: a constant beyond those would become another one."""
    if isinstance(value, Mapping):
        for inner in value.values():
            _exact_numbers(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _exact_numbers(inner)
    elif isinstance(value, int) and abs(value) > 2**53:
        raise GrammarError(f"JSON schema: whole numbers up to 2^53 can be kept exactly, got {value}")


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what}: needed a text that isn't empty, got {value!r:.80}")
    try:
        return encodable(what, value)
    except InvalidRequestError as error:
        raise GrammarError(str(error)) from error


def _slashed(pattern: str) -> str:
    """A pattern that can stand between slashes: each slash escaped once, line ends written out."""
    out, escaped = [], False
    for character in pattern:
        if character == "/" and not escaped:
            out.append("\\")
        escaped = character == "\\" and not escaped
        out.append(character)
    return "".join(out).replace("\n", "\\n").replace("\r", "\\r")


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\.+*?()|[]{}^$#&-~/" else c for c in text)
