"""ToolFormat: what a format has to say, and reading a call that is a JSON object. Formats build on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentspec.chat.deltas import Collector, new_id
from agentspec.chat.grammar import json_rule
from agentspec.chat.scanner import Malformed, Scanner, Waiting, ignore
from agentspec.errors import GrammarError

__all__ = ["NotACall", "OpenedCall", "ToolFormat", "Tools", "call_in_json", "properties_of", "read_call"]

Tools = Mapping[str, Any]  # the offered tools: name -> JSON schema of the arguments

_ANY = "\ue000any\ue001"  # stands for the arguments
_ARGUMENT_KEYS = ("arguments", "parameters")


class NotACall(Malformed):
    """What looked like the beginning of a call is none, and nothing was said about it yet."""


class ToolFormat:
    """How a model writes tool calls.

    name:      what the format is called
    markers:   texts that mark calls; those that are special tokens are shown to the parser instead of left
               out
    traits:    texts in a chat template that give the format away
    bare:      True: a call has no marker, so the output's beginning decides; only the tools' names make one
    trigger:   the marker that opens calls and nothing else; "": there is none, so `strict` tools are refused
    json_arguments: `write` puts the arguments' JSON text in as it is; False: one by one
    reasoning: True: `parse` itself tells thoughts from content (else <think> marks are read before it)
    opening, between, closing: what stands before, between and after the calls of one message that `write`
                               gives
    """

    name: str = ""
    markers: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    bare: bool = False
    trigger: str = ""
    json_arguments: bool = True
    reasoning: bool = False
    opening: str = ""
    between: str = "\n"
    closing: str = ""

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        """Read the whole output into `out`. A generator that yields where it needs more text.

        tools: the tools that were offered, name -> JSON schema of the arguments.
        """
        raise NotImplementedError

    def write(self, name: str, arguments: str) -> str:
        """One call as text, with its arguments' JSON text."""
        raise NotImplementedError

    def rule(self, name: str, schema: Mapping[str, Any], terms: Callable[[str], str]) -> str:
        """What `write` gives for any arguments that fit the schema, as Lark terms; rules that they refer to
        follow on lines of their own. terms: a text as such.

        Right for formats that write the arguments as JSON.
        """
        head, _, tail = self.write(name, _ANY).partition(_ANY)
        return f"{terms(head)} {json_rule(schema)} {terms(tail)}"

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        """Several calls of one message."""
        return self.opening + self.between.join(self.write(*call) for call in calls) + self.closing

    def new_id(self) -> str:
        return new_id()


def call_in_json(scanner: Scanner, out: Collector, *, closing: str = "", tools: Tools | None = None) -> Waiting:
    """Read one call as a JSON object with a name and arguments (or parameters), and the mark that closes it.

    closing: the mark; a complete object at the end of the output is a call without it too
    tools:   None: any name makes a call. Names: another name, or none, raises NotACall with nothing read
    A malformed call goes to out.invalid, with all that was written up to the closing mark.
    """
    yield from scanner.white()
    start = scanner.at
    call = OpenedCall(out)
    try:
        yield from read_call(scanner, call, tools)
        after = yield from scanner.white()
        if closing and after:
            yield from scanner.expect(closing)
        call.close()
    except NotACall:
        scanner.at = start
        raise
    except Malformed as error:
        found = ""
        if closing:
            found = yield from scanner.until((closing,), ignore)
        else:
            while not scanner.final:
                yield
            scanner.at = len(scanner.text)
        raw = scanner.text[start : scanner.at - len(found)].strip()
        out.invalid(call.number, raw, str(error), call.name)


class OpenedCall:
    """One call on its way to the collector: opened when its name is known, whatever came before the name."""

    def __init__(self, out: Collector) -> None:
        self._out = out
        self._early: list[str] = []
        self.name: str | None = None
        self.number: int | None = None

    def open(self, name: str, id: str | None = None) -> None:
        if self.number is not None:
            raise Malformed("a second name")
        self.name = name
        self.number = self._out.open(name, id)
        for text in self._early:
            self._out.arguments(self.number, text)

    def arguments(self, text: str) -> None:
        if self.number is None:
            self._early.append(text)
        else:
            self._out.arguments(self.number, text)

    def close(self) -> None:
        if self.number is None:
            raise Malformed("a call without a name")
        self._out.close(self.number)


def read_call(scanner: Scanner, call: Any, tools: Tools | None = None) -> Waiting:
    """Read a JSON object's members into `call` (open, arguments). Raises Malformed, and NotACall (see
    above).
    """
    try:
        yield from scanner.expect("{")
        yield from _members(scanner, call, tools, [])
        if call.name is None:
            raise Malformed("a call without a name")
    except NotACall:
        raise
    except Malformed as error:
        if tools is not None and call.name is None:
            raise NotACall(str(error)) from error
        raise


def _members(scanner: Scanner, call: Any, tools: Tools | None, seen: list[str]) -> Waiting:
    if (yield from scanner.white()) == "}":
        scanner.at += 1
        return
    while True:
        key = json.loads((yield from scanner.json_key()))
        value = yield from scanner.peek()
        if key == "function" and value == "{":  # {"type": "function", "function": {...}}
            scanner.at += 1
            yield from _members(scanner, call, tools, seen)
        elif key in ("name", "function"):
            start = scanner.at
            yield from scanner.json()
            name = json.loads(scanner.text[start : scanner.at])
            if not isinstance(name, str) or not name:
                raise Malformed("a call's name must be a text")
            if tools is not None and name not in tools:
                raise NotACall(f"no tool is called {name!r}")
            call.open(name)
        elif key in _ARGUMENT_KEYS:
            if seen:
                raise Malformed("arguments twice")
            seen.append(key)
            yield from _argument_value(scanner, call, value)
        else:
            yield from scanner.json()
        after = yield from scanner.white()
        if after not in (",", "}"):
            raise Malformed(scanner.found("',' or '}'"))
        scanner.at += 1
        if after == "}":
            return
        yield from scanner.white()


def _argument_value(scanner: Scanner, call: Any, first: str) -> Waiting:
    if first == "{":
        yield from scanner.json(call.arguments)
        return
    start = scanner.at
    yield from scanner.json()
    value = json.loads(scanner.text[start : scanner.at])
    if isinstance(value, str):  # JSON in a JSON text, as OpenAI's API has it
        try:
            if isinstance(json.loads(value), dict):
                call.arguments(value)
                return
        except ValueError:
            pass
        raise Malformed("a call's arguments must be a JSON object, got another text")
    if value is not None:
        raise Malformed(f"a call's arguments must be a JSON object, got {type(value).__name__}")


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, bool, Mapping[str, Any]]]:
    """A schema's (name, is it required, schema of its own) for formats that write arguments one by one.

    Raises GrammarError where the schema says more than that.
    """
    beyond = set(schema) & {"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not"}
    if beyond or schema.get("type", "object") != "object":
        raise GrammarError(
            f"tool_choice: this format writes arguments one by one, so a schema may only have properties; "
            f"got {', '.join(sorted(beyond)) or schema.get('type')}"
        )
    required = set(schema.get("required") or ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    declared = schema.get("properties") or {}
    return [
        (
            key,
            key in required,
            {**value, **shared} if isinstance(value, Mapping) else {"not": {}} if value is False else {},
        )
        for key, value in declared.items()
    ]
