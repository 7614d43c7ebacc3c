"""MessageParser: an output's text, as it comes, to MessageDeltas and at the end the whole message.

The one state machine: engines feed it once per step, and what streams, sync or async, and what is read at
once are the same deltas. Imports the formats; engines make one per call (prepare.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.chat.deltas import Collector, MessageDelta, new_id
from agentspec.chat.formats.base import ToolFormat, Tools
from agentspec.chat.scanner import Scanner, Waiting

__all__ = ["MessageParser", "Thoughts"]


class Thoughts:
    """The marks around a model's thoughts.

    inside: the prompt has opened them already, so the output begins with thoughts
    """

    def __init__(self, opening: str = "<think>", closing: str = "</think>", inside: bool = False) -> None:
        self.opening, self.closing, self.inside = opening, closing, inside


class MessageParser:
    """Parses one output.

    format:   the tool-call format; None: nothing is a tool call
    tools:    the tools that were offered, name -> JSON schema of the arguments; none: nothing is a tool call
    thoughts: the marks around thoughts; None: this model has none
    """

    def __init__(
        self,
        format: ToolFormat | None = None,
        tools: Mapping[str, Any] | None = None,
        thoughts: Thoughts | None = None,
    ) -> None:
        self._format = format
        self._tools: Tools = tools or {}
        self._thoughts = thoughts if format is None or not format.reasoning else None
        self._scanner = Scanner()
        self._out = Collector(format.new_id if format else new_id)
        self._active = format is not None and (bool(self._tools) or format.reasoning)
        self._out.hold_space = self._active or self._thoughts is not None
        self._run: Waiting | None = self._parse()

    def push(self, text: str) -> MessageDelta:
        """More of the output's text; what it adds."""
        if text:
            self._scanner.text += text
            self._step()
        return self._out.take()

    def finish(self, text: str = "") -> MessageDelta:
        """The output has ended (with `text`); what was held back. Calls that it broke off are invalid."""
        self._scanner.text += text
        self._scanner.final = True
        self._step()
        for number in self._out.open_calls:
            self._out.invalid(number, "", "the output ends inside the call")
        return self._out.take(final=True)

    def message(self) -> dict[str, Any]:
        """The assistant message so far: content, and where there are any, reasoning_content, tool_calls and
        invalid_tool_calls."""
        return self._out.message()

    def _step(self) -> None:
        if self._run is None:
            return
        try:
            next(self._run)
        except StopIteration:
            self._run = None

    def _parse(self) -> Waiting:
        if self._thoughts is not None:
            yield from self._read_thoughts(self._thoughts)
        if self._active:
            assert self._format is not None
            yield from self._format.parse(self._scanner, self._out, self._tools)
        while True:  # no calls, or what follows the last of them
            self._out.content(self._scanner.text[self._scanner.at :])
            self._scanner.at = len(self._scanner.text)
            yield

    def _read_thoughts(self, marks: Thoughts) -> Waiting:
        """Thoughts stand before everything else, or there are none."""
        if not marks.inside:
            start = self._scanner.at
            yield from self._scanner.white()
            if (yield from self._scanner.starts((marks.opening,))) != marks.opening:
                self._scanner.at = start
                return
            self._scanner.at += len(marks.opening)
        self._out.reasoning("")
        yield from self._scanner.until((marks.closing,), self._out.reasoning)
