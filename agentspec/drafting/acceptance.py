"""Calibrated acceptance of copied tokens, learned online. Called by MatchProposer. May import numpy and the
kernel decorator.

The chance that a copy goes on depends on how long it has agreed already, on where it was copied from, and on
how often copies came true lately. A table over (agreement, source) of accepted and rejected counts, with a
prior and forgetting, gives it; an edge is scored whether or not it was sent, so learning costs no forward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting.policy import NO_COST, widest
from agentspec.memory.kernels import kernel

__all__ = ["AcceptanceTable", "judge", "widest_paying"]

# Agreement lengths share a bucket from the upper bounds on: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25+.
_BOUNDS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24])
_SOURCES = 8
# What a copy's next token is worth before anything is known, by bucket: short agreements are coincidence.
_PRIOR = np.array([0.25, 0.40, 0.55, 0.65, 0.72, 0.78, 0.84, 0.88, 0.91, 0.94])
_PRIOR_WEIGHT = 4.0
_FORGET = 400.0  # a cell's counts are halved here: recent behaviour wins
_FAR = int(_BOUNDS[-1]) + 1  # from here on all agreements are alike
_BUCKETS = np.searchsorted(_BOUNDS, np.arange(_FAR + 1))


class AcceptanceTable:
    """P(next copied token is accepted | agreement length, source). A few hundred bytes.

    cells: float64[2, sources, buckets], accepted and all copied tokens, each with its prior. Kernels read and
    write it, so that a step costs a microsecond.
    """

    def __init__(self) -> None:
        self.cells = np.empty((2, _SOURCES, len(_BOUNDS) + 1))
        self.cells[0] = _PRIOR * _PRIOR_WEIGHT
        self.cells[1] = _PRIOR_WEIGHT

    @property
    def nbytes(self) -> int:
        return int(self.cells.nbytes)

    def chain(self, agreement: int, source: int, count: int) -> NDArray[np.float32]:
        """float32[count]: the path probability of each of `count` copied tokens that follow `agreement` tokens."""
        paths = np.empty(count, np.float32)
        widest_paying(self.cells, agreement, source, count, np.zeros(count + 1), NO_COST, paths)
        return paths


@kernel("int64(float64[:, :, ::1], int64, int64, int64, float64[::1], float64[::1], float32[::1])")
def widest_paying(
    cells: Any, agreement: Any, source: Any, count: Any, price: Any, cost: Any, paths: Any
) -> Any:  # fmt: skip
    """The length of the copied chain, at most `count`, that gains most; the shortest of equals, 0 for none.

    The copy has agreed in `agreement` tokens. paths[count] is filled with its path probabilities. price, cost: as in
    DraftLimits, cost empty where the price stands.
    """
    path = 1.0
    gains = np.zeros(count + 1)
    ratio = 1.0 / cost[0] if len(cost) > 0 else 0.0
    for n in range(count):
        bucket = _BUCKETS[min(agreement + n, _FAR)]
        path *= cells[0, source, bucket] / cells[1, source, bucket]
        paths[n] = path
        gains[n + 1] = gains[n] + path
        if len(cost) > 0:
            ratio = max(ratio, (1.0 + gains[n + 1]) / cost[n + 1])
    return widest(gains, count, price, cost, ratio)


@kernel("void(float64[:, :, ::1], int64, int64, int32[::1], int32[::1])")
def judge(cells: Any, agreement: Any, source: Any, copied: Any, emitted: Any) -> None:
    """Learn from what came: `copied` was what the copy said, as far as it agrees and one token more."""
    for n in range(min(len(copied), len(emitted))):
        bucket = _BUCKETS[min(agreement + n, _FAR)]
        hit = copied[n] == emitted[n]
        if hit:
            cells[0, source, bucket] += 1.0
        cells[1, source, bucket] += 1.0
        if cells[1, source, bucket] > _FORGET:
            cells[0, source, bucket] *= 0.5
            cells[1, source, bucket] *= 0.5
        if not hit:
            return
