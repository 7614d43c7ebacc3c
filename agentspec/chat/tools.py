"""Tools: what a request offers and demands, the grammar of its calls, and their skeletons as drafts.

Used by prepare.py. Imports the formats and grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from agentspec.chat.formats.base import ToolFormat
from agentspec.chat.grammar import Grammar, literal
from agentspec.errors import GrammarError, InvalidRequestError

__all__ = ["ToolChoice", "Tools", "call_grammar", "skeletons"]

_ARGUMENTS = "\ue000ARGUMENTS\ue001"


@dataclass(slots=True, frozen=True)
class Tools:
    """The offered tools.

    declared: as the chat template takes them: {"type": "function", "function": {"name", "description",
              "parameters"}}
    schemas:  name -> JSON schema of the arguments
    strict:   the names whose calls have to fit their schema, whatever the tool choice
    """

    declared: tuple[Mapping[str, Any], ...] = ()
    schemas: Mapping[str, Any] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None) -> Tools:
        """Raises InvalidRequestError for what isn't a tool, or a name used twice."""
        if tools is not None and (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence)):
            raise InvalidRequestError(f"tools: needed a list of tools, got {type(tools).__name__}")
        declared, schemas, strict = [], {}, set()
        for number, tool in enumerate(tools or ()):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                raise InvalidRequestError(
                    f"tools[{number}]: needed {{'type': 'function', 'function': {{'name': ...}}}}, got {tool!r:.120}"
                )
            if name in schemas:
                raise InvalidRequestError(f"tools[{number}]: {name!r} is offered twice")
            parameters = function.get("parameters")
            if parameters is None:
                parameters = {"type": "object", "properties": {}}
            if not isinstance(parameters, Mapping):
                raise InvalidRequestError(
                    f"tools[{number}] ({name}): needed a JSON schema of parameters, got {parameters!r:.60}"
                )
            schemas[name] = parameters
            if function.get("strict") or tool.get("strict"):
                strict.add(name)
            told = {key: value for key, value in function.items() if key != "strict"}
            declared.append({"type": "function", "function": {**told, "parameters": parameters}})
        return cls(tuple(declared), schemas, frozenset(strict))

    def __len__(self) -> int:
        return len(self.declared)


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """mode: "auto", "none", or "required"; name: the only tool that may be called; parallel: several calls
    are fine; plan: exactly these calls, in this order.
    """

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True
    plan: tuple[str, ...] = ()

    @classmethod
    def of(cls, choice: Any, tools: Tools, parallel: bool | None = None) -> ToolChoice:
        """From OpenAI's tool_choice: None, "auto", "none", "required" (or "any"), a tool's name, or
        {"type": "function", "function": {"name": ...}}; also a list of names: one call of each, in this order
        (what an agent's plan says comes next). Raises InvalidRequestError."""
        many = True if parallel is None else bool(parallel)
        if choice is None or choice == "auto":
            return cls("auto", None, many)
        if choice == "none":
            return cls("none", None, many)
        if isinstance(choice, (list, tuple)) and choice:
            plan = [cls.of(step, tools).name or "" for step in choice]
            if "" in plan:
                raise InvalidRequestError(f"tool_choice: a list needs names of tools, got {choice!r}")
            return cls("required", None, True, tuple(plan))
        if isinstance(choice, Mapping):
            named = choice.get("function", choice)
            choice = named.get("name") if isinstance(named, Mapping) else choice
        elif choice is True or choice in ("required", "any"):
            if not len(tools):
                raise InvalidRequestError("tool_choice: a call is required, but no tools are offered")
            return cls("required", None, many)
        if not isinstance(choice, str) or choice not in tools.schemas:
            names = ", ".join(sorted(tools.schemas)) or "none"
            raise InvalidRequestError(
                f"tool_choice: needed auto, none, required, or an offered tool's name ({names}), got {choice!r}"
            )
        return cls("required", choice, many)


def call_grammar(format: ToolFormat, tools: Tools, choice: ToolChoice, specials: Mapping[str, int]) -> Grammar | None:
    """What the calls have to look like; None where the model is free.

    required: one call or more of the tools (or the named one), nothing else. auto: free text; but a call of a
    strict tool fits its schema. specials: special tokens by their text, since a grammar's texts never match
    those. Raises GrammarError where the format can't be restricted so.
    """
    if choice.mode == "required":
        names = [choice.name] if choice.name else list(choice.plan) or list(tools.schemas)
        rules = [f"call_{number}: {_call(format, name, tools, specials)}" for number, name in enumerate(names)]
        call = "call: " + " | ".join(f"call_{number}" for number in range(len(names)))
        more = ""
        between = _terms(format.between, specials)
        if choice.plan:
            call = "call: " + f" {between} ".join(f"call_{number}" for number in range(len(names)))
        elif choice.parallel and not choice.name:
            more = f" ({between} call)*" if between else " call*"
        opening, closing = _terms(format.opening, specials), _terms(format.closing, specials)
        start = f"start: {opening} call{more} {closing}"
        return Grammar(_lines(start, call, *rules))
    if choice.mode == "auto" and tools.strict:
        return _strict(format, tools, specials)
    return None


def _call(format: ToolFormat, name: str, tools: Tools, specials: Mapping[str, int]) -> str:
    return format.rule(name, closed(tools.schemas[name]), lambda text: _terms(text, specials))


def _strict(format: ToolFormat, tools: Tools, specials: Mapping[str, int]) -> Grammar:
    """Free text, in which whatever the format opens as a call is one that fits."""
    shared = format.trigger
    if not shared:
        raise GrammarError(
            f"strict tools: in the format {format.name} nothing marks calls alone, so they can't be told "
            f"from free text before they are over; use tool_choice='required', or tools without strict"
        )
    begun = [shared]

    def terms(text: str) -> str:
        """The first text goes on where the trigger ends."""
        if begun and text.startswith(begun[0]):
            text = text[len(begun.pop()) :]
        return _terms(text, specials)

    opening = terms(format.opening)
    rules = []
    for number, name in enumerate(tools.schemas):
        if not format.opening:
            begun[:] = [shared]  # each call has a trigger of its own
        schema = closed(tools.schemas[name]) if name in tools.strict else {"type": "object"}
        rules.append(f"call_{number}: {format.rule(name, schema, terms)}")
    more = f" ({terms(format.between)} call)*" if format.opening else ""
    group = f"group: trigger {opening} call{more} {terms(format.closing)}\n"
    if shared in specials:
        trigger = f"trigger: TEXT <[{specials[shared]}]>"
    else:
        trigger = f"trigger[lazy]: /(?s:.*){re.escape(shared)}/"
    calls = "call: " + " | ".join(f"call_{number}" for number in range(len(rules)))
    return Grammar(_lines("start: group* TEXT", group, trigger, calls, *rules, "TEXT: /(?s:.*)/"))


def _lines(*rules: str) -> str:
    """The rules, each line once: calls may bring the same rules of their own."""
    return "\n".join(dict.fromkeys(line for rule in rules for line in rule.split("\n"))) + "\n"


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's schema without arguments that it doesn't name: a function has no others."""
    opening = {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    }
    if "properties" in schema and not opening & set(schema):
        return {**schema, "additionalProperties": False}
    return schema


def _terms(text: str, specials: Mapping[str, int]) -> str:
    """A text as Lark terms, its special tokens by their ids; "" for none."""
    if not text:
        return ""
    marks = [mark for mark in specials if mark and mark in text]
    if not marks:
        return literal(text)
    pieces = re.split("(" + "|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)) + ")", text)
    return " ".join(f"<[{specials[p]}]>" if p in specials else literal(p) for p in pieces if p)


def skeletons(format: ToolFormat, tools: Tools) -> tuple[list[str], list[str]]:
    """Texts that calls of the tools are likely to hold: how each call begins; and its keys, and its enums'
    values.
    """
    begins: list[str] = []
    texts: list[str] = []
    if not format.json_arguments:
        return begins, texts
    for name, schema in tools.schemas.items():
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        head, _, tail = format.write_all([(name, _ARGUMENTS)]).partition(_ARGUMENTS)
        keys = list(properties)
        begins.append(head + (f"{{{json.dumps(keys[0])}: {_begins(properties[keys[0]])}" if keys else "{}" + tail))
        for before, key in pairwise(keys):
            texts.append(f"{_ends(properties[before])}, {json.dumps(key)}: {_begins(properties[key])}")
        for key in keys:
            for value in _values(properties[key])[:64]:
                texts.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
        if keys:
            texts.append(f"{_ends(properties[keys[-1]])}}}{tail}")
    return begins, texts


def _begins(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {"string": '"', "array": "[", "object": "{"}.get(kind if isinstance(kind, str) else "", "")


def _ends(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {"string": '"', "array": "]", "object": "}"}.get(kind if isinstance(kind, str) else "", "")


def _values(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    if isinstance(values, Sequence) and not isinstance(values, str):
        return list(values)
    return [True, False] if schema.get("type") == "boolean" else []
