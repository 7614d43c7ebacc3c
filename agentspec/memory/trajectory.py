"""TrajectoryMemory: everything one trajectory has seen, as token ids cut into segments with sources.

May import numpy and the index. Engines, the replay and the SGLang plugin call it; one instance a trajectory.

A call goes like this:

    context = memory.extend(prompt, spans)     # lay the prompt against what is held; adds only what is new
    matches = memory.match(context)            # where the end of this context occurred before
    memory.append(context, emitted)            # accepted tokens, as they come
    memory.close(context)                      # the call is over: its output is now an earlier output

Several calls of one trajectory may be open at once; each has its own context.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import IntegrityError, InvalidRequestError
from agentspec.memory.index import Matches, find_longest

__all__ = ["Context", "Segment", "Source", "Span", "TrajectoryMemory", "as_tokens"]

Int32 = NDArray[np.int32]
Tokens = Sequence[int] | NDArray[Any]


class Source(enum.IntEnum):
    """Where a token in the memory came from. OUTPUT turns from current to earlier when its call closes."""

    PROMPT = 0
    TOOL = 1
    OUTPUT = 2
    CURRENT = 3
    SEED = 4
    SCHEMA = 5


@dataclass(slots=True, frozen=True)
class Span:
    """A part of a prompt, by its caller: tokens[start:end] are one message (or one part of it)."""

    start: int
    end: int
    source: Source = Source.PROMPT
    role: str = ""


@dataclass(slots=True, frozen=True)
class Segment:
    """tokens[start:end] of the memory, one piece of one origin. Copies never run across its end.

    identity is a hash of its tokens and role; two segments with the same identity are the same message.
    """

    start: int
    end: int
    source: Source
    role: str
    identity: int


class Context:
    """One open call: its own real context (prompt and output so far), whatever the memory holds besides.

    memory:         the trajectory's memory
    prompt_length:  tokens of the prompt
    held:           prompt tokens that the memory already had
    """

    __slots__ = ("_buffer", "_size", "closed", "held", "memory", "output_start", "prompt_length")

    def __init__(self, memory: TrajectoryMemory, prompt: Int32, held: int) -> None:
        self.memory = memory
        self.prompt_length = len(prompt)
        self.held = held
        self.closed = False
        self.output_start = -1
        self._size = len(prompt)
        self._buffer = np.empty(max(64, len(prompt) + 256), dtype=np.int32)
        self._buffer[: self._size] = prompt

    @property
    def tokens(self) -> Int32:
        """int32[prompt + output]: a view, valid until the next append."""
        return self._buffer[: self._size]

    @property
    def output(self) -> Int32:
        """int32[output so far]: a view."""
        return self._buffer[self.prompt_length : self._size]

    def _append(self, tokens: Int32) -> None:
        need = self._size + len(tokens)
        if need > len(self._buffer):
            grown = np.empty(max(need, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._size] = self._buffer[: self._size]
            self._buffer = grown
        self._buffer[self._size : need] = tokens
        self._size = need


def as_tokens(tokens: Iterable[int] | Tokens, what: str = "token ids") -> Int32:
    """Token ids as int32[n]. Raises InvalidRequestError for anything that isn't a flat list of ids >= 0."""
    try:
        wide = np.asarray(tokens if isinstance(tokens, (np.ndarray, list, tuple)) else list(tokens))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{what}: needed a flat sequence of integers, got {type(tokens).__name__}") from error
    if wide.size == 0:
        return np.empty(0, dtype=np.int32)
    if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
        raise InvalidRequestError(
            f"{what}: needed a flat sequence of integers, got shape {wide.shape} of {wide.dtype}"
        )
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > 2**31 - 1:
        raise InvalidRequestError(f"{what}: ids must be in 0..2^31-1, got {low}..{high}")
    return wide.astype(np.int32, copy=False)


class TrajectoryMemory:
    """What one trajectory has seen. Thread-safe: every method takes the memory's own lock.

    attachments holds what a proposer learned for this trajectory, by the proposer's name; an attachment
    has an `nbytes` attribute so that it counts in the memory's budget.
    """

    def __init__(self, id: str = "", namespace: str | None = None) -> None:
        self.id = id
        self.namespace = namespace
        self.attachments: dict[str, Any] = {}
        self.lock = threading.RLock()
        self._tokens = np.empty(1024, dtype=np.int32)
        self._size = 0
        self._segments: list[Segment] = []
        self._held: dict[int, int] = {}  # segment identity -> its place in _segments
        self._open: list[Context] = []

    # ---- what is held -------------------------------------------------------------------------

    @property
    def tokens(self) -> Int32:
        """int32[n], everything held, in the order in which it came: a view, valid until the next change."""
        return self._tokens[: self._size]

    @property
    def segments(self) -> tuple[Segment, ...]:
        with self.lock:
            return tuple(self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes held, attachments included."""
        return int(self._tokens.nbytes + 160 * len(self._segments)) + sum(
            int(getattr(a, "nbytes", 0)) for a in self.attachments.values()
        )

    def source_at(self, position: int) -> Source:
        """The source of the token at `position` of `tokens`."""
        with self.lock:
            return self._segment_at(position).source

    # ---- changes ------------------------------------------------------------------------------

    def extend(self, prompt: Tokens, spans: Sequence[Span] | None = None) -> Context:
        """Open a call: lay its prompt (int32[n]) against what is held and add what is new.

        spans cut the prompt into messages, in order and without overlap; what they leave uncovered counts as
        PROMPT. A span whose tokens are held already adds nothing. Raises InvalidRequestError for an empty prompt
        or spans that don't fit it.
        """
        ids = as_tokens(prompt, "prompt")
        if len(ids) == 0:
            raise InvalidRequestError("prompt: needed at least one token, got none")
        with self.lock:
            held = 0
            for span in _cover(len(ids), spans):
                piece = ids[span.start : span.end]
                if self._add(piece, span.source, span.role):
                    continue
                held += len(piece)
            context = Context(self, ids, held)
            self._open.append(context)
            return context

    def append(self, context: Context, tokens: Tokens) -> None:
        """Add emitted tokens (int32[m]) to an open call. Raises InvalidRequestError if the call is closed."""
        ids = as_tokens(tokens, "emitted tokens")
        with self.lock:
            if context.closed or context.memory is not self:
                raise InvalidRequestError("append: this call is closed, or belongs to another memory")
            context._append(ids)
            tail = self._segments[-1] if self._segments else None
            mine = tail is not None and tail.end == self._size and tail.start == context.output_start
            if tail is not None and mine:
                self._write(ids)
                self._segments[-1] = Segment(tail.start, self._size, Source.CURRENT, "assistant", 0)
            elif len(ids):
                context.output_start = self._size
                self._write(ids)
                self._segments.append(Segment(context.output_start, self._size, Source.CURRENT, "assistant", 0))

    def close(self, context: Context) -> None:
        """End a call: its output becomes an earlier output. Closing twice is allowed."""
        with self.lock:
            if context.closed:
                return
            context.closed = True
            self._open.remove(context)
            for place, segment in enumerate(self._segments):
                if segment.start == context.output_start and segment.source is Source.CURRENT:
                    identity = _identity(self._tokens[segment.start : segment.end], "assistant")
                    self._segments[place] = Segment(segment.start, segment.end, Source.OUTPUT, "assistant", identity)
                    self._held.setdefault(identity, place)

    def seed(self, tokens: Tokens, source: Source = Source.SEED) -> int:
        """Hold tokens (int32[n]) as draft material without claiming that they are in any prompt.

        Returns how many tokens were added: 0 if they are held already.
        """
        ids = as_tokens(tokens, "seed")
        with self.lock:
            return len(ids) if self._add(ids, source, "seed") else 0

    # ---- matching -----------------------------------------------------------------------------

    def match(self, context: Context, min_match: int = 1, max_match: int = 32) -> Matches:
        """Earlier occurrences of the end of the context (see Matches)."""
        with self.lock:
            position, length = find_longest(
                self._tokens, self._size, context._buffer, context._size, min_match, max_match
            )
        if position < 0:
            return Matches(np.empty(0, np.int32), np.empty(0, np.int32))
        return Matches(np.array([position], np.int32), np.array([length], np.int32))

    def copy(self, position: int, count: int) -> tuple[Int32, Source]:
        """What followed: up to count tokens (int32) from `position`, cut at its segment's end, and their source."""
        with self.lock:
            segment = self._segment_at(position)
            return self._tokens[position : min(position + count, segment.end)].copy(), segment.source

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise IntegrityError if an invariant is broken. Costs O(tokens); for tests and doctors."""
        with self.lock:
            at = 0
            for segment in self._segments:
                if segment.start != at or segment.end <= segment.start:
                    raise IntegrityError(f"segments don't tile the tokens: {segment} after {at}")
                at = segment.end
            if at != self._size:
                raise IntegrityError(f"segments end at {at}, tokens at {self._size}")
            for identity, place in self._held.items():
                if self._segments[place].identity != identity:
                    raise IntegrityError(f"identity table names segment {place}, which has another identity")
            for context in self._open:
                if context.closed:
                    raise IntegrityError("a closed call is listed as open")

    # ---- inside -------------------------------------------------------------------------------

    def _segment_at(self, position: int) -> Segment:
        low, high = 0, len(self._segments)
        while low < high:
            middle = (low + high) // 2
            if self._segments[middle].end <= position:
                low = middle + 1
            else:
                high = middle
        return self._segments[low]

    def _add(self, ids: Int32, source: Source, role: str) -> bool:
        if len(ids) == 0:
            return False
        identity = _identity(ids, role)
        for known in (identity, _identity(ids, "assistant")):
            place = self._held.get(known)
            if place is not None:
                segment = self._segments[place]
                if np.array_equal(self._tokens[segment.start : segment.end], ids):
                    return False
        start = self._size
        self._write(ids)
        self._held[identity] = len(self._segments)
        self._segments.append(Segment(start, self._size, source, role, identity))
        return True

    def _write(self, ids: Int32) -> None:
        need = self._size + len(ids)
        if need > len(self._tokens):
            grown = np.empty(max(need, 2 * len(self._tokens)), dtype=np.int32)
            grown[: self._size] = self._tokens[: self._size]
            self._tokens = grown
        self._tokens[self._size : need] = ids
        self._size = need


def _identity(ids: Int32, role: str) -> int:
    return hash((role, ids.tobytes()))


def _cover(length: int, spans: Sequence[Span] | None) -> list[Span]:
    """The spans with the gaps between them filled, so that they tile 0..length."""
    tiled: list[Span] = []
    at = 0
    for span in spans or ():
        if span.start < at or span.end < span.start or span.end > length:
            raise InvalidRequestError(
                f"spans must lie in order, without overlap, inside the prompt of {length} tokens; got {span}"
            )
        if span.start > at:
            tiled.append(Span(at, span.start))
        if span.end > span.start:
            tiled.append(span)
        at = span.end
    if at < length:
        tiled.append(Span(at, length))
    return tiled
