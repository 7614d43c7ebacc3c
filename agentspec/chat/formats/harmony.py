"""gpt-oss (harmony): channels. analysis is reasoning, final is content, "to=functions.NAME" is a call.

Read from the text with its special tokens shown. openai-harmony has a parser of token ids, but it downloads
its vocabulary when it is first used, and takes no other model's ids.
"""

from __future__ import annotations

import re

from agentspec.chat.deltas import Collector
from agentspec.chat.formats.base import ToolFormat, Tools
from agentspec.chat.scanner import Malformed, Scanner, Waiting, ignore

__all__ = ["Harmony"]

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolFormat):
    name = "harmony"
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    traits = ("<|channel|>", "<|message|>")
    reasoning = True
    between = "<|call|><|start|>assistant"  # the last call's end is an EOS

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        while True:
            head: list[str] = []
            if not (yield from scanner.until((_MESSAGE,), head.append)):
                rest = "".join(head)
                if not any(marker in rest for marker in self.markers):
                    out.content(rest)  # no harmony at all: what a model says without its marks
                return
            header = "".join(head)
            channel = header.partition(_CHANNEL)[2].strip()
            to = _TO.search(header)
            if to:
                yield from self._call(scanner, out, to.group(1))
            else:
                say = out.reasoning if channel.startswith("analysis") else out.content
                yield from scanner.until(_ENDS, say)

    def _call(self, scanner: Scanner, out: Collector, name: str) -> Waiting:
        number = out.open(name)
        start = scanner.at
        try:
            if (yield from scanner.white()) != "{":
                raise Malformed(scanner.found("a JSON object"))
            yield from scanner.json(lambda text: out.arguments(number, text))
            if (yield from scanner.white()):
                if not (yield from scanner.starts(_ENDS)):
                    raise Malformed("text after the arguments")
                yield from scanner.until(_ENDS, ignore)
            out.close(number)
        except Malformed as error:
            found = yield from scanner.until(_ENDS, ignore)
            out.invalid(number, scanner.text[start : scanner.at - len(found)].strip(), str(error), name)

    def write(self, name: str, arguments: str) -> str:
        return f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}{arguments}"
