"""Mistral: [TOOL_CALLS] and a JSON list of calls; from Mistral Small 3.2 on, [TOOL_CALLS]name[ARGS]{...} for
each.
"""

from __future__ import annotations

import json
import re

from agentspec.chat.deltas import Collector, short_id
from agentspec.chat.formats.base import OpenedCall, ToolFormat, Tools, read_call
from agentspec.chat.scanner import Malformed, Scanner, Waiting, ignore

__all__ = ["Mistral", "MistralArgs"]

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\[\]{}\s]*")


class Mistral(ToolFormat):
    name = "mistral"
    markers = (_CALLS, _ID, _ARGS)
    traits = (_CALLS,)
    trigger = _CALLS
    opening = f"{_CALLS} ["
    between = ", "
    closing = "]"

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        while (yield from scanner.until((_CALLS,), out.content)):
            start = scanner.at
            call = OpenedCall(out)
            try:
                if (yield from scanner.white()) == "[":
                    scanner.at += 1
                    while (yield from scanner.white()) != "]":
                        start, call = scanner.at, OpenedCall(out)
                        yield from read_call(scanner, call)
                        call.close()
                        call = OpenedCall(out)
                        start = scanner.at
                        if (yield from scanner.white()) == ",":
                            scanner.at += 1
                        elif (yield from scanner.peek()) != "]":
                            raise Malformed(scanner.found("',' or ']'"))
                    scanner.at += 1
                else:
                    yield from self._named(scanner, call)
            except Malformed as error:
                found = yield from scanner.until((_CALLS,), ignore)
                scanner.at -= len(found)
                raw = scanner.text[start : scanner.at].strip()
                out.invalid(call.number, raw, str(error), call.name)

    def _named(self, scanner: Scanner, call: OpenedCall) -> Waiting:
        name = yield from scanner.match(_NAME)
        if not name:
            raise Malformed("a call without a name")
        id = None
        yield from scanner.white()
        if (yield from scanner.starts((_ID, _ARGS, "{"))) == _ID:
            scanner.at += len(_ID)
            id = yield from scanner.match(_NAME)
        call.open(name, id or None)
        if (yield from scanner.starts((_ARGS, "{"))) == _ARGS:
            scanner.at += len(_ARGS)
        if (yield from scanner.white()) != "{":
            raise Malformed(scanner.found("the arguments' JSON object"))
        yield from scanner.json(call.arguments)
        call.close()

    def write(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'

    def new_id(self) -> str:
        return short_id()


class MistralArgs(Mistral):
    """The same parser; what it writes is the newer form."""

    name = "mistral-args"
    traits = (_ARGS,)
    opening = between = closing = ""

    def write(self, name: str, arguments: str) -> str:
        return f"{_CALLS}{name}{_ARGS}{arguments}"
