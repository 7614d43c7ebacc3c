"""DeepSeek V3, R1 and V3.1: calls between marks of their own, arguments as JSON (in a code block before
V3.1).
"""

from __future__ import annotations

from agentspec.chat.deltas import Collector
from agentspec.chat.formats.base import OpenedCall, ToolFormat, Tools
from agentspec.chat.scanner import Malformed, Scanner, Waiting, ignore

__all__ = ["DeepSeekV3", "DeepSeekV31"]

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV3(ToolFormat):
    name = "deepseek-v3"
    markers = (_ALL, _ALL_END, _ONE, _ONE_END, _SEP)
    traits: tuple[str, ...] = (_ONE, "```json")
    trigger = _ALL
    opening = _ALL
    closing = _ALL_END

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        while marker := (yield from scanner.until((_ALL, _ONE, _ALL_END), out.content)):
            if marker == _ONE:
                yield from self._call(scanner, out)

    def _call(self, scanner: Scanner, out: Collector) -> Waiting:
        start = scanner.at
        call = OpenedCall(out)
        try:
            head: list[str] = []
            found = yield from scanner.until((_SEP, _ONE_END, "{"), head.append)
            if found != _SEP:
                raise Malformed(f"expected {_SEP} after the call's kind or name")
            name = "".join(head).strip()
            if name == "function" and (yield from scanner.peek()) not in (
                "{",
                "`",
            ):  # V3: function<sep>name\n```json
                rest: list[str] = []
                if (yield from scanner.until((_FENCE, "{", _ONE_END), rest.append)) != _FENCE:
                    raise Malformed(f"expected {_FENCE}json before the arguments")
                name = "".join(rest).strip()
                yield from scanner.expect("json")
            if not name:
                raise Malformed("a call without a name")
            call.open(name)
            if (yield from scanner.white()) == "`":
                yield from scanner.expect(_FENCE + "json")
                yield from scanner.white()
            if (yield from scanner.peek()) != "{":
                raise Malformed(scanner.found("a JSON object"))
            yield from scanner.json(call.arguments)
            after = yield from scanner.white()
            if after == "`":
                yield from scanner.expect(_FENCE)
                after = yield from scanner.white()
            if after:
                yield from scanner.expect(_ONE_END)
            call.close()
        except Malformed as error:
            found = yield from scanner.until((_ONE_END,), ignore)
            out.invalid(call.number, scanner.text[start : scanner.at - len(found)].strip(), str(error), call.name)

    def write(self, name: str, arguments: str) -> str:
        return f"{_ONE}function{_SEP}{name}\n```json\n{arguments}\n```{_ONE_END}"


class DeepSeekV31(DeepSeekV3):
    """The same parser; what it writes is V3.1's form."""

    name = "deepseek-v31"
    traits = (_ONE,)
    between = ""

    def write(self, name: str, arguments: str) -> str:
        return f"{_ONE}{name}{_SEP}{arguments}{_ONE_END}"
