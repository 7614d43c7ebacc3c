"""What tokens are and where they came from: sources, segments that are held, spans that a caller names.

Called by everything in memory, and by whoever cuts prompts into messages. May import the kernel decorator.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import InvalidRequestError, shown, spread
from agentspec.memory.kernels import kernel

__all__ = ["WHOLE", "Segment", "Source", "Span", "Tokens", "as_source", "as_tokens", "cover"]

Tokens = Sequence[int] | NDArray[Any]

WHOLE = (int, np.integer)


class Source(enum.IntEnum):
    """Where a token in the memory came from. CURRENT is a call's own output while the call is open.

    No memory holds tokens of the last two; a draft may come from them: SHARED, what other trajectories of the
    namespace put out, and LANGUAGE, what English and code look like in general (the standard library's text).
    """

    PROMPT = 0
    TOOL = 1
    OUTPUT = 2
    CURRENT = 3
    SEED = 4
    SCHEMA = 5
    SHARED = 6
    LANGUAGE = 7


_HELD_SOURCES = tuple(source for source in Source if source not in (Source.SHARED, Source.LANGUAGE))


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

    identity is a hash of its tokens (62 bits, the same in every process).
    """

    start: int
    end: int
    source: Source
    role: str
    identity: int


@kernel("int64(int32[::1])")
def first_negative(ids: Any) -> Any:
    """The place of the first id below 0, or -1."""
    for i in range(len(ids)):
        if ids[i] < 0:
            return i
    return -1


def as_source(source: Any) -> Source:
    """A source of tokens that a memory can hold. Raises InvalidRequestError for another."""
    if isinstance(source, WHOLE) and source in _HELD_SOURCES:
        return Source(int(source))
    raise InvalidRequestError(f"source: needed one of {', '.join(s.name for s in _HELD_SOURCES)}, got {shown(source)}")


def as_tokens(tokens: Iterable[int] | Tokens, what: str = "token ids") -> NDArray[np.int32]:
    """Token ids as int32[n]. Raises InvalidRequestError for anything that isn't a flat list of ids >= 0."""
    if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1:
        narrow = np.ascontiguousarray(tokens)
        place = int(first_negative(narrow))
        if place >= 0:
            raise InvalidRequestError(f"{what}: ids must be in 0..2^31-1, got {int(narrow[place])} at {place}")
        return narrow
    try:
        wide = np.asarray(tokens if isinstance(tokens, (np.ndarray, list, tuple)) else list(tokens))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{what}: needed a flat sequence of integers, got {type(tokens).__name__}") from error
    if wide.size == 0 and wide.ndim == 1:
        return np.empty(0, dtype=np.int32)
    if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
        raise InvalidRequestError(f"{what}: needed a flat sequence of integers, got shape {wide.shape} of {wide.dtype}")
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > 2**31 - 1:
        raise InvalidRequestError(f"{what}: ids must be in 0..2^31-1, got {spread(low, high)}")
    return np.ascontiguousarray(wide, dtype=np.int32)


def cover(length: int, spans: Sequence[Span] | None) -> list[tuple[Span, bool]]:
    """The spans with the gaps between them filled, so that they tile 0..length; False for what was a gap."""
    tiled: list[tuple[Span, bool]] = []
    at = 0
    spans = () if spans is None else spans
    if not isinstance(spans, Sequence) or not all(isinstance(span, Span) for span in spans):
        raise InvalidRequestError(f"spans: needed a list of agentspec.memory.Span or None, got {shown(spans)}")
    for span in spans:
        if not (isinstance(span.start, WHOLE) and isinstance(span.end, WHOLE) and isinstance(span.role, str)):
            raise InvalidRequestError(
                f"spans: needed whole numbers for start and end and text for the role, got {shown(span)}"
            )
        as_source(span.source)
        if span.start < at or span.end < span.start or span.end > length:
            raise InvalidRequestError(
                f"spans must lie in order, without overlap, inside the prompt of {length} tokens; got {shown(span)}"
            )
        if span.start > at:
            tiled.append((Span(at, span.start), False))
        if span.end > span.start:
            tiled.append((span, True))
        at = span.end
    if at < length:
        tiled.append((Span(at, length), False))
    return tiled
