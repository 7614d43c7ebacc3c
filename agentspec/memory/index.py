"""The match index over one trajectory's token ids: append, and find where the current context occurred.

Called by TrajectoryMemory only. May import numpy and numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["Matches", "find_longest"]

Int32 = NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class Matches:
    """Earlier occurrences of a context, longest first, then most recent first.

    positions: int32[m], index into the memory's tokens of the token that FOLLOWED the occurrence.
    lengths:   int32[m], how many of the context's last tokens occur right before that position.
    """

    positions: Int32
    lengths: Int32

    def __len__(self) -> int:
        return len(self.positions)


@njit("Tuple((int64, int64))(int32[::1], int64, int32[::1], int64, int64, int64)", nogil=True, cache=True)
def find_longest(tokens: Any, size: int, context: Any, context_size: int, min_match: int, max_match: int) -> Any:
    """The most recent of the longest occurrences of a suffix of context[:context_size] in tokens[:size].

    Returns (position of the token that followed, match length), (-1, 0) if none has min_match tokens.
    The occurrence has to be followed by a token, so the context's own end in the memory never matches.
    """
    best_position = -1
    best_length = 0
    if context_size == 0:
        return best_position, best_length
    last = context[context_size - 1]
    limit = min(max_match, context_size)
    for end in range(size - 1, 0, -1):
        if tokens[end - 1] != last:
            continue
        length = 1
        while length < limit and end - 1 - length >= 0 and (
            tokens[end - 1 - length] == context[context_size - 1 - length]
        ):
            length += 1
        if length > best_length:
            best_length = length
            best_position = end
            if length == limit:
                break
    if best_length < min_match:
        return -1, 0
    return best_position, best_length
