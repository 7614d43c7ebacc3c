"""Scanner: reads a text that is still coming. Parsers on it are plain generators that yield to wait for more.

    def parse(scanner, out):
        marker = yield from scanner.until(("<tool_call>",), out.content)   # passes text on up to a marker
        start = scanner.at
        yield from scanner.json(emit)                                      # passes one JSON value on, checked

So a format is written once, as if its text were all there, and runs on a stream. Imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

__all__ = ["Malformed", "Scanner", "Waiting", "ignore"]

Emit = Callable[[str], Any]
Waiting = Generator[None, None, Any]

_WHITE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DEPTH = 128


class Malformed(Exception):
    """The text isn't what the format demands. Caught by the parsers; never leaves chat/."""


def ignore(text: str) -> None:
    """An emit that drops the text."""


class Scanner:
    """The text so far, and how far it is read.

    text:  all of it
    at:    how far it is read
    final: nothing more will come
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False

    def peek(self) -> Waiting:
        """The next character, not read; "" at the end."""
        while self.at >= len(self.text):
            if self.final:
                return ""
            yield
        return self.text[self.at]

    def white(self, emit: Emit = ignore) -> Waiting:
        """Read white space; returns the character after it, as peek."""
        while True:
            match = _WHITE.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                emit(match.group())
                self.at = match.end()
            if self.at < len(self.text) or self.final:
                return self.text[self.at : self.at + 1]
            yield

    def starts(self, prefixes: Sequence[str]) -> Waiting:
        """The longest of the prefixes that comes next, not read; "" if none does."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, prefixes))]
            open_ = [p for p in prefixes if len(p) > len(rest) and p.startswith(rest)]
            if self.final or not open_:
                return max((p for p in prefixes if rest.startswith(p)), key=len, default="")
            yield

    def until(self, markers: Sequence[str], emit: Emit) -> Waiting:
        """Pass text on up to the first marker, read it too and return it; "" where the text ends without
        one.
        """
        while True:
            found, place = "", len(self.text)
            for marker in markers:
                here = self.text.find(marker, self.at)
                if here >= 0 and (here < place or (here == place and len(marker) > len(found))):
                    found, place = marker, here
            held = len(self.text) if self.final else self._incomplete(markers)
            if found and place < held:  # else a longer marker that begins no later may still come
                if self.at < place:
                    emit(self.text[self.at : place])
                self.at = place + len(found)
                return found
            if held > self.at:
                emit(self.text[self.at : held])
                self.at = held
            if self.final:
                return ""
            yield

    def _incomplete(self, markers: Sequence[str]) -> int:
        """Where the text ends in what may become a marker; its length if it doesn't."""
        longest = max(map(len, markers))
        for place in range(max(self.at, len(self.text) - longest + 1), len(self.text)):
            rest = self.text[place:]
            if any(len(marker) > len(rest) and marker.startswith(rest) for marker in markers):
                return place
        return len(self.text)

    def expect(self, marker: str) -> Waiting:
        """Read the marker. Raises Malformed where something else comes."""
        if (yield from self.starts((marker,))) != marker:
            raise Malformed(self.found(repr(marker)))
        self.at += len(marker)

    def match(self, pattern: re.Pattern[str]) -> Waiting:
        """Read the longest run that the pattern (of single characters) allows, and return it."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match else self.at
            if end < len(self.text) or self.final:
                run = self.text[self.at : end]
                self.at = end
                return run
            yield

    # ---- JSON ---------------------------------------------------------------------------------

    def json(self, emit: Emit = ignore, depth: int = 0) -> Waiting:
        """Pass one JSON value on as it comes; nothing is cut inside an escape or a number.

        Raises Malformed at the first character that makes it none. Lexed by RFC 8259.
        """
        if depth > _DEPTH:
            raise Malformed(f"JSON nested deeper than {_DEPTH}")
        first = yield from self.peek()
        if first == '"':
            yield from self.json_string(emit)
        elif first in ("{", "["):
            close = "}" if first == "{" else "]"
            self._take(emit)
            if (yield from self.white(emit)) == close:
                self._take(emit)
                return
            while True:
                if first == "{":
                    yield from self.json_key(emit)
                yield from self.json(emit, depth + 1)
                after = yield from self.white(emit)
                if after not in (close, ","):
                    raise Malformed(self.found(f"',' or {close!r}"))
                self._take(emit)
                if after == close:
                    return
                yield from self.white(emit)
        elif first and first in "-0123456789":
            number = yield from self.match(_NUMBER_CHARACTERS)
            if not _NUMBER.fullmatch(number):
                raise Malformed(f"not a JSON number: {number!r}")
            emit(number)
        else:
            for word in ("true", "false", "null"):
                if first and word.startswith(first):
                    yield from self.expect(word)
                    emit(word)
                    return
            raise Malformed(self.found("a JSON value"))

    def json_key(self, emit: Emit = ignore) -> Waiting:
        """Pass a key, the colon and the white space after it on; returns the key's JSON text."""
        start = self.at
        yield from self.json_string(emit)
        raw = self.text[start : self.at]
        if (yield from self.white(emit)) != ":":
            raise Malformed(self.found("':'"))
        self._take(emit)
        yield from self.white(emit)
        return raw

    def json_string(self, emit: Emit = ignore) -> Waiting:
        if (yield from self.peek()) != '"':
            raise Malformed(self.found("a JSON string"))
        self._take(emit)
        while True:
            match = _PLAIN.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                emit(match.group())
                self.at = match.end()
            next_ = yield from self.peek()
            if next_ == '"':
                self._take(emit)
                return
            if next_ == "\\":
                yield from self._escape(emit)
            elif not next_ or next_ < " ":
                raise Malformed(self.found("the rest of a JSON string"))

    def _escape(self, emit: Emit) -> Waiting:
        while True:
            match = _ESCAPE.match(self.text, self.at)
            if match:
                emit(match.group())
                self.at = match.end()
                return
            rest = self.text[self.at : self.at + 6]
            if self.final or not re.fullmatch(r"\\(?:u[0-9a-fA-F]{0,3})?", rest):
                raise Malformed(f"not a JSON escape: {rest[:2]!r}")
            yield

    def _take(self, emit: Emit) -> None:
        emit(self.text[self.at])
        self.at += 1

    def found(self, needed: str) -> str:
        """A Malformed's message: one character only, so that it doesn't depend on how much has come."""
        if self.at >= len(self.text):
            return f"expected {needed}, but the output ends"
        return f"expected {needed}, got {self.text[self.at]!r}"
