"""Hermes, Qwen 2.5, Qwen 3 and many fine-tunes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json

from agentspec.chat.deltas import Collector
from agentspec.chat.formats.base import ToolFormat, Tools, call_in_json
from agentspec.chat.scanner import Scanner, Waiting

__all__ = ["Hermes"]


class Hermes(ToolFormat):
    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    traits = ("<tool_call>",)
    trigger = "<tool_call>"

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        while (yield from scanner.until(("<tool_call>",), out.content)):
            yield from call_in_json(scanner, out, closing="</tool_call>")

    def write(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
