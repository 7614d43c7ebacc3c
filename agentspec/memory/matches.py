"""Matches: what TrajectoryMemory.match returns, and the copies that can be made of it.

May import search.py and segments.py.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentspec.memory import search
from agentspec.memory.segments import Source

if TYPE_CHECKING:
    from agentspec.memory.trajectory import Context, TrajectoryMemory

__all__ = ["Copied", "Matches", "Place"]

Int32 = NDArray[np.int32]
Copied = tuple[Int32, int, int]  # tokens that are copied, how many before them agreed, their source


class Place(enum.IntEnum):
    """What a match's position counts in: the context's tokens, the memory's, or those of its namespace's
    memory.
    """

    OUTPUT = search.IN_OUTPUT
    MEMORY = search.IN_MEMORY
    SHARED = search.IN_SHARED


class Matches:
    """Earlier occurrences of a context's end, the longest agreement first, then the most recent.

    positions:  int32[m], the position of the token that FOLLOWED the occurrence, counted in its place
    lengths:    int32[m], how many of the context's last tokens stand right before that position
    places:     int32[m], Place
    sources:    int32[m], Source
    ends:       int32[m], where copying from positions stops; -1: nowhere, a copy of the call's own output
                goes on periodically over what it copied itself

    Valid until the memory changes; copy what has to live longer.
    """

    __slots__ = ("_context", "_memory", "_rows", "_shared")

    def __init__(
        self, context: Context, memory: TrajectoryMemory, shared: TrajectoryMemory | None, rows: Int32
    ) -> None:
        self._context = context
        self._memory = memory
        self._shared = shared
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def positions(self) -> Int32:
        return self._rows[:, search.POSITION]

    @property
    def lengths(self) -> Int32:
        return self._rows[:, search.AGREEMENT]

    @property
    def places(self) -> Int32:
        return self._rows[:, search.PLACE]

    @property
    def sources(self) -> Int32:
        return self._rows[:, search.SOURCE]

    @property
    def ends(self) -> Int32:
        return self._rows[:, search.END]

    def copy(self, row: int, count: int) -> tuple[Int32, Source]:
        """What followed occurrence `row`: int32[count or less], cut at the segment's end, and its source."""
        place, position, _, source, end = self._rows[row].tolist()
        if place == Place.OUTPUT:
            return _periodic(self._context.tokens, position, count), Source.CURRENT
        memory = self._memory if place == Place.MEMORY else self._shared
        assert memory is not None
        return memory.tokens[position : min(position + count, end)].copy(), Source(source)


def _periodic(tokens: Int32, position: int, count: int) -> Int32:
    """count tokens from `position` on; past the end they repeat what was copied, as the copy would."""
    tail = tokens[position:]
    repeated: Int32 = np.resize(tail, count)
    return repeated
