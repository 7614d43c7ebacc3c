"""A tokenizer's own response_template, read by transformers' ResponseParser: takes precedence where there is
one.

Its regions become deltas: thoughts and content as they come, a call when its region closes (the parser reads
a call's arguments only then). A region that it can't read is an invalid call, and what follows is content.
"""

from __future__ import annotations

import json
from typing import Any

from agentspec.chat.deltas import Collector
from agentspec.chat.formats.base import ToolFormat, Tools
from agentspec.chat.scanner import Scanner, Waiting

__all__ = ["ResponseTemplate"]

_THOUGHTS = frozenset({"reasoning_content", "reasoning", "thinking"})


class ResponseTemplate(ToolFormat):
    """spec: the tokenizer's response_template; prefix: the rendered prompt, for what it says of the answer
    already.
    """

    name = "response-template"
    reasoning = True

    def __init__(self, spec: Any, markers: tuple[str, ...] = ()) -> None:
        self._spec = spec
        self.markers = markers
        self.prefix = ""

    def at(self, prefix: str) -> ResponseTemplate:
        """The same format for an answer to this prompt."""
        other = ResponseTemplate(self._spec, self.markers)
        other.prefix = prefix
        return other

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        from transformers.utils.chat_parsing import ResponseParser

        declared: list[Any] = [{"function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
        parser = ResponseParser(self._spec, prefix=self.prefix, tools=declared)
        raw: list[str] = []
        while True:
            # A character at a time: an error then belongs to the region that this character closes, and what
            # is read doesn't depend on how the text came.
            ending = scanner.at >= len(scanner.text)
            if ending and not scanner.final:
                yield
                continue
            try:
                events = parser.finalize()[1] if ending else parser.feed(scanner.text[scanner.at])
            except (ValueError, KeyError, TypeError) as error:
                out.invalid(None, "".join(raw).strip(), str(error).splitlines()[0])
                events = []
                parser = ResponseParser(self._spec, prefix="", tools=declared)
            for event in events:
                self._take(out, event, raw)
            if ending:
                return
            scanner.at += 1

    def _take(self, out: Collector, event: dict[str, Any], raw: list[str]) -> None:
        field, kind = event["field"], event["type"]
        if kind == "region_open":
            raw.clear()
        elif kind == "region_chunk":
            raw.append(event["text"])
            if field == "content":
                out.content(event["text"])
            elif field in _THOUGHTS:
                out.reasoning(event["text"])
        elif field == "tool_calls":
            self._calls(out, event["value"], "".join(raw).strip())

    @staticmethod
    def _calls(out: Collector, value: Any, raw: str) -> None:
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else {}
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                out.invalid(None, raw, "a call needs a name and an object of arguments", None)
                continue
            number = out.open(name)
            out.arguments(number, json.dumps(arguments, ensure_ascii=False))
            out.close(number)
