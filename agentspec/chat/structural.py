"""structural_tag: a Grammar as xgrammar's structural tag, for servers whose grammars xgrammar enforces.

Reads the part of llguidance's Lark that this package itself writes (tools.py, formats/, grammar.py): texts, special
tokens <[id]>, %json, regular expressions, alternatives, groups, ? * +, lazy and suffix terminals. Used by the engines'
SGLang side. Imports nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agentspec.chat.grammar import Grammar
from agentspec.errors import GrammarError

__all__ = ["structural_tag"]

_RULE = re.compile(r"(\w+)(\[[^\]]*\])?\s*:\s*")
_NAME = re.compile(r"@?\w+")
_TOKEN = re.compile(r"<\[(\d+)\]>")
_PATTERN = re.compile(r"/((?:[^/\\]|\\.)*)/")
_LAZY = re.compile(r"\(\?s:\.\*\)(.+)", re.DOTALL)
_ANY_TEXT = re.compile(r"\(\?s:\.(?:\*|\{0,\})\)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_REMEDY = "start the server with --grammar-backend llguidance"

Format = dict[str, Any]


def structural_tag(grammar: Grammar) -> dict[str, Any]:
    """The JSON of the tag. Raises GrammarError for a grammar that xgrammar can't hold an output to."""
    return {"type": "structural_tag", "format": _format(grammar, {})}


def _format(grammar: Grammar, parts: dict[str, Grammar]) -> Format:
    if grammar.source is not None:
        kind, text = grammar.source
        if kind == "json_schema":
            return _json(json.loads(text), compact="x-guidance" in grammar.lark)
        if kind == "regex":
            return {"type": "regex", "pattern": text}
        return {"type": "grammar", "grammar": text}
    return _Reader(grammar.lark, {**parts, **dict(grammar.parts)}).read()


def _json(schema: Any, compact: bool) -> Format:
    """xgrammar can't be told json.dumps' own white space, but that there be no more than one in a place: without a
    limit a small model may write nothing else."""
    made: Format = {"type": "json_schema", "json_schema": schema}
    return {**made, "max_whitespace_cnt": 1} if compact else made


class _Reader:
    """parts: the grammars that @name stands for; one level, so what they name is found here too."""

    def __init__(self, lark: str, parts: dict[str, Grammar]) -> None:
        self._parts = parts
        self._rules: dict[str, tuple[str, str]] = {}
        for line in lark.splitlines():
            if not line.strip():
                continue
            head = _RULE.match(line)
            if head is None:
                raise GrammarError(f"grammar: xgrammar's structural tags have nothing for {line!r:.80}; {_REMEDY}")
            self._rules[head.group(1)] = (head.group(2) or "", line[head.end() :])
        self._open: list[str] = []

    def read(self) -> Format:
        if any(name.startswith("trigger") for name in self._rules):
            raise GrammarError(
                f"strict tools: xgrammar can't hold a free output to them; use tool_choice='required', or {_REMEDY}"
            )
        return self._rule("start")

    def _rule(self, name: str) -> Format:
        if name.startswith("@"):
            part = self._parts.get(name[1:])
            if part is not None:
                return _format(part, self._parts)
        if name not in self._rules:
            raise GrammarError(f"grammar: there is no rule {name!r}")
        if name in self._open:
            raise GrammarError(f"grammar: structural tags can't recur, and {name!r} does; {_REMEDY}")
        mark, text = self._rules[name]
        if mark:
            return self._terminal(mark, text)
        self._open.append(name)
        found, rest = self._either(text)
        self._open.pop()
        if rest.strip():
            raise GrammarError(f"grammar: xgrammar's structural tags have nothing for {rest!r:.80}; {_REMEDY}")
        return found

    def _terminal(self, mark: str, text: str) -> Format:
        """Free text up to a mark, the mark included."""
        pattern = _PATTERN.match(text)
        end: str | None = None
        if pattern is not None and mark == "[lazy]":
            lazy = _LAZY.fullmatch(pattern.group(1))
            end = _ESCAPE.sub(r"\1", lazy.group(1)) if lazy else None
        elif pattern is not None and mark.startswith("[suffix=") and _ANY_TEXT.fullmatch(pattern.group(1)):
            end = json.loads(mark[len("[suffix=") : -1])
        if not end:
            raise GrammarError(f"grammar: xgrammar's structural tags have nothing for {mark} {text!r:.60}; {_REMEDY}")
        return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}

    def _either(self, text: str) -> tuple[Format, str]:
        options: list[Format] = []
        while True:
            option, text = self._sequence(text)
            options.append(option)
            text = text.lstrip()
            if not text.startswith("|"):
                return (options[0] if len(options) == 1 else {"type": "or", "elements": options}), text
            text = text[1:]

    def _sequence(self, text: str) -> tuple[Format, str]:
        elements: list[Format] = []
        while True:
            text = text.lstrip()
            if not text or text[0] in "|)":
                break
            element, text = self._term(text)
            if text[:1] in ("*", "?", "+"):
                kind = {"*": "star", "?": "optional", "+": "plus"}[text[0]]
                element, text = {"type": kind, "content": element}, text[1:]
            elements.append(element)
        if not elements:
            return {"type": "const_string", "value": ""}, text
        return (elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}), text

    def _term(self, text: str) -> tuple[Format, str]:
        decoder = json.JSONDecoder()
        if text[0] == "(":
            inner, rest = self._either(text[1:])
            return inner, rest.lstrip()[1:]
        if text[0] == '"':
            value, end = decoder.raw_decode(text)
            return {"type": "const_string", "value": value}, text[end:]
        if text.startswith("%json"):
            body = text[len("%json") :].lstrip()
            schema, end = decoder.raw_decode(body)
            return _json(schema, compact=schema.pop("x-guidance", None) is not None), body[end:]
        token = _TOKEN.match(text)
        if token is not None:
            return {"type": "token", "token": int(token.group(1))}, text[token.end() :]
        pattern = _PATTERN.match(text)
        if pattern is not None:
            return {"type": "regex", "pattern": pattern.group(1)}, text[pattern.end() :]
        name = _NAME.match(text)
        if name is not None:
            return self._rule(name.group()), text[name.end() :]
        raise GrammarError(f"grammar: xgrammar's structural tags have nothing for {text!r:.80}; {_REMEDY}")
