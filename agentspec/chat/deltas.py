"""MessageDelta: what a piece of output adds to the assistant's message; and the message that deltas add up
to.

The words are OpenAI's (content, tool_calls, arguments as JSON text), with reasoning apart. Imports nothing.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Collector", "InvalidToolCall", "MessageDelta", "ToolCallDelta", "joined", "new_id", "short_id"]


@dataclass(slots=True, frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    index:     which call of the message, from 0
    id:        the same in all of the call's deltas
    name:      the tool's name, in the call's first delta; else None
    arguments: more of the arguments' JSON text; joined over the deltas it is one JSON object
    """

    index: int
    id: str
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True, frozen=True)
class InvalidToolCall:
    """A tool call that can't be made, as the model wrote it.

    id, name: those of the deltas that came before, if any did; name None where it could not be read
    raw:      what the model wrote, the format's markers left out
    error:    what is wrong with it
    """

    index: int
    id: str
    name: str | None
    raw: str
    error: str


@dataclass(slots=True, frozen=True)
class MessageDelta:
    """What a piece of output adds to the message. False where it adds nothing.

    ended: the calls (their index) whose arguments are complete now
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()
    ended: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.invalid_tool_calls or self.ended)


def joined(deltas: Iterable[MessageDelta]) -> dict[str, Any]:
    """The assistant message that the deltas add up to. A call that was begun and neither ended nor found
    invalid (the output was broken off) is left out."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    invalid: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            function = calls.setdefault(
                piece.index,
                {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}},
            )["function"]
            function["arguments"] += piece.arguments
        for number in delta.ended:
            calls[number]["ended"] = True
        for broken in delta.invalid_tool_calls:
            calls.pop(broken.index, None)
            invalid[broken.index] = {
                "id": broken.id,
                "name": broken.name,
                "args": broken.raw,
                "error": broken.error,
            }
    return _message(
        "".join(content),
        "".join(reasoning),
        [call for _, call in sorted(calls.items()) if call.pop("ended", False)],
        [call for _, call in sorted(invalid.items())],
    )


def _message(
    content: str, reasoning: str, calls: list[dict[str, Any]], invalid: list[dict[str, Any]]
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if invalid:
        message["invalid_tool_calls"] = invalid
    return message


def new_id() -> str:
    """A tool call's id."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """A tool call's id as Mistral's templates demand it: nine letters or digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class _Call:
    index: int
    id: str
    name: str
    arguments: str = ""
    open: bool = True
    invalid: InvalidToolCall | None = None


class Collector:
    """Where a format's parser puts what it reads. Gathers the deltas between two `take`s, and the whole
    message.

    White space around tool calls is the format's, not content: content's trailing white space is held back
    until more content comes, and dropped where a call comes instead.
    """

    def __init__(self, make_id: Callable[[], str] = new_id) -> None:
        self._make_id = make_id
        self._calls: list[_Call] = []
        self._invalid: list[InvalidToolCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._space = ""  # content's or reasoning's trailing white space
        self._in_reasoning = False
        self._thought = False
        self._new_content = ""
        self._new_reasoning = ""
        self._new_calls: dict[int, tuple[str | None, list[str]]] = {}
        self._new_invalid: list[InvalidToolCall] = []
        self._new_ended: list[int] = []
        self.hold_space = False  # set where tool calls or reasoning may come

    # ---- what parsers say ---------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Text for the user."""
        self._text(text, False)

    def reasoning(self, text: str) -> None:
        """The model's thoughts."""
        self._thought = True
        self._text(text, True)

    def open(self, name: str, id: str | None = None) -> int:
        """A call of `name` has begun; returns its number, for the functions below."""
        self._space = ""
        call = _Call(len(self._calls), id or self._make_id(), name)
        self._calls.append(call)
        self._new_calls[call.index] = (name, [])
        return call.index

    def arguments(self, number: int, text: str) -> None:
        """More of a call's arguments, JSON text."""
        if text:
            self._calls[number].arguments += text
            self._new_calls.setdefault(number, (None, []))[1].append(text)

    def close(self, number: int) -> None:
        """The call is complete. One without arguments has none: {}."""
        call = self._calls[number]
        if not call.arguments:
            self.arguments(number, "{}")
        call.open = False
        self._new_ended.append(number)

    def invalid(self, number: int | None, raw: str, error: str, name: str | None = None) -> None:
        """A call can't be made: one that was opened (number), or one that never got so far (None)."""
        self._space = ""
        if number is None:
            number = self.open(name or "")
            del self._new_calls[number]
        call = self._calls[number]
        call.open = False
        call.invalid = InvalidToolCall(call.index, call.id, call.name or name, raw, error)
        self._new_invalid.append(call.invalid)

    # ---- what engines take --------------------------------------------------------------------

    def take(self, final: bool = False) -> MessageDelta:
        """What came since the last take. final: nothing more will come."""
        if final and self._space and not self._calls and not self._in_reasoning:
            space, self._space = self._space, ""
            self._content.append(space)
            self._new_content += space
        calls = tuple(
            ToolCallDelta(number, self._calls[number].id, name, "".join(pieces))
            for number, (name, pieces) in self._new_calls.items()
        )
        delta = MessageDelta(
            self._new_content, self._new_reasoning, calls, tuple(self._new_invalid), tuple(self._new_ended)
        )
        self._new_content = self._new_reasoning = ""
        self._new_calls, self._new_invalid, self._new_ended = {}, [], []
        return delta

    def message(self) -> dict[str, Any]:
        """The assistant message so far; a call still open is left out of it."""
        valid = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self._calls
            if c.invalid is None and not c.open
        ]
        invalid = [
            {"id": c.id, "name": c.invalid.name, "args": c.invalid.raw, "error": c.invalid.error}
            for c in self._calls
            if c.invalid is not None
        ]
        return _message("".join(self._content), "".join(self._reasoning), valid, invalid)

    @property
    def open_calls(self) -> Sequence[int]:
        return [call.index for call in self._calls if call.open]

    # ---- inside -------------------------------------------------------------------------------

    def _text(self, text: str, reasoning: bool) -> None:
        if reasoning != self._in_reasoning:
            self._space, self._in_reasoning = "", reasoning
        kept = self._reasoning if reasoning else self._content
        if self.hold_space:
            if not kept and (self._thought or self._calls):
                text = text.lstrip()  # the lines between marks and text
            text = self._space + text
            bare = text.rstrip()
            self._space = text[len(bare) :]
            text = bare
        if not text:
            return
        kept.append(text)
        if reasoning:
            self._new_reasoning += text
        else:
            self._new_content += text
