"""Llama 3.x: a bare JSON object {"name": ..., "parameters": {...}}, or Python calls [f(a=1), g(b="x")].

Llama 3.1 and 3.3 write JSON, with or without <|python_tag|>, several with ";" between; 3.2 and 4 write
Python. Nothing else marks a call, so only the names of the offered tools make one; other JSON or lists are
content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from agentspec.chat.deltas import Collector
from agentspec.chat.formats.base import ToolFormat, Tools, call_in_json, properties_of
from agentspec.chat.grammar import json_rule
from agentspec.chat.scanner import Malformed, Scanner, Waiting, ignore
from agentspec.errors import GrammarError

__all__ = ["LlamaJson", "LlamaPythonic"]

_TAG = "<|python_tag|>"
_NAME = re.compile(r"[\w.\-]*")
_PLAIN = re.compile(r"[^\"'()\[\]{},\\]*")
_OPEN, _CLOSE = "([{", ")]}"


class LlamaJson(ToolFormat):
    name = "llama-json"
    markers = (_TAG, "<|eom_id|>")
    traits = ('"parameters": dictionary of argument name and its value',)
    bare = True
    between = "; "

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        if (yield from scanner.white(out.content)) == "{":
            yield from self._calls(scanner, out, tools)
        while (yield from scanner.until((_TAG,), out.content)):
            yield from self._calls(scanner, out, None)

    def _calls(self, scanner: Scanner, out: Collector, tools: Tools | None) -> Waiting:
        while True:
            try:
                yield from call_in_json(scanner, out, tools=tools)
            except Malformed:  # NotACall: content
                return
            if (yield from scanner.white()) != ";":
                return
            scanner.at += 1

    def write(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


class LlamaPythonic(ToolFormat):
    name = "llama-pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    traits = ("[func_name1(params_name1=params_value1",)
    bare = True
    json_arguments = False
    opening = "["
    between = ", "
    closing = "]"

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        yield from scanner.white(out.content)
        if (yield from scanner.starts(("<|python_start|>", "["))) == "<|python_start|>":
            scanner.at += len("<|python_start|>")
            yield from scanner.white()
        if (yield from scanner.peek()) == "[":
            yield from self._calls(scanner, out, tools)
        while (yield from scanner.until(("<|python_start|>", "<|python_end|>"), out.content)):
            if (yield from scanner.white()) == "[":
                yield from self._calls(scanner, out, tools)

    def _calls(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        start = begin = scanner.at
        number: int | None = None
        name = None
        scanner.at += 1
        try:
            while True:
                yield from scanner.white()
                begin = scanner.at
                name = yield from scanner.match(_NAME)
                if name not in tools or (yield from scanner.white()) != "(":
                    raise Malformed(f"no tool is called {name!r}")
                scanner.at += 1
                number = out.open(name)
                yield from self._arguments(scanner, out, number)
                out.close(number)
                number, name = None, None
                after = yield from scanner.white()
                if after not in (",", "]"):
                    raise Malformed(scanner.found("',' or ']'"))
                scanner.at += 1
                if after == "]" or (yield from scanner.white()) == "]":
                    scanner.at += after != "]"
                    return
        except Malformed as error:
            if begin == start or (number is None and not scanner.text[start + 1 : begin].strip()):
                scanner.at = start
                out.content(scanner.text[start])  # an ordinary list: content from here on
                scanner.at += 1
                return
            yield from scanner.until(("<|python_end|>",), ignore)
            out.invalid(number, scanner.text[begin : scanner.at].removesuffix("<|python_end|>"), str(error), name)

    def _arguments(self, scanner: Scanner, out: Collector, number: int) -> Waiting:
        """name=value, ...) as a JSON object, an argument at a time."""
        separator = "{"
        while (yield from scanner.white()) != ")":
            key = yield from scanner.match(_NAME)
            if not key.isidentifier() or (yield from scanner.white()) != "=":
                raise Malformed(f"expected an argument's name and '=', got {key!r}")
            scanner.at += 1
            yield from scanner.white()
            value = yield from _literal(scanner)
            out.arguments(number, f"{separator}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
            separator = ", "
            if (yield from scanner.white()) == ",":
                scanner.at += 1
            elif (yield from scanner.peek()) != ")":
                raise Malformed(scanner.found("',' or ')'"))
        scanner.at += 1
        out.arguments(number, "{}" if separator == "{" else "}")

    def rule(self, name: str, schema: Mapping[str, Any], terms: Callable[[str], str]) -> str:
        """Arguments as JSON, which `parse` reads in the place of Python's literals; those required come
        first.
        """
        needed: list[str] = []
        optional: list[str] = []
        for key, required, value in properties_of(schema):
            if not key.isidentifier():
                raise GrammarError(f"tool_choice: {key!r} is no name for a Python argument, which {self.name} writes")
            (needed if required else optional).append(f"{terms(key + '=')} {json_rule(value)}")
        comma = terms(", ")
        if needed:
            body = " ".join([f" {comma} ".join(needed), *(f"({comma} {o})?" for o in optional)])
        else:
            chains = (
                " ".join([first, *(f"({comma} {o})?" for o in optional[n + 1 :])]) for n, first in enumerate(optional)
            )
            body = f"({' | '.join(chains)})?" if optional else ""
        return f"{terms(name + '(')} {body} {terms(')')}"

    def write(self, name: str, arguments: str) -> str:
        values = json.loads(arguments)
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _literal(scanner: Scanner) -> Waiting:
    """A Python (or JSON) literal up to the "," or ")" after it."""
    start = scanner.at
    stack: list[str] = []
    while True:
        yield from scanner.match(_PLAIN)
        character = yield from scanner.peek()
        if not character:
            raise Malformed("the output ends inside an argument")
        if not stack and character in ",)":
            break
        scanner.at += 1
        if character in "\"'":
            while (yield from scanner.peek()) != character:
                if not (yield from scanner.peek()):
                    raise Malformed("the output ends inside a text")
                scanner.at += 1 + (scanner.text[scanner.at] == "\\")
            scanner.at += 1
        elif character in _OPEN:
            stack.append(_CLOSE[_OPEN.index(character)])
            if len(stack) > 64:
                raise Malformed("literals nested deeper than 64")
        elif character in _CLOSE and (not stack or stack.pop() != character):
            raise Malformed(f"unexpected {character!r}")
    raw = scanner.text[start : scanner.at].strip()
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(raw)
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise Malformed(f"not a literal: {raw[:40]!r}")
