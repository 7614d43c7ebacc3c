"""Calibrated acceptance of copied tokens, learned online. Called by MatchProposer. May import numpy.

The chance that a copy goes on depends on how long it has agreed already, on where it was copied from, and on
how often copies came true lately. A table over (agreement, source) of accepted and rejected counts, with a
prior and forgetting, gives it; an edge is scored whether or not it was sent, so learning costs no forward.
"""

from __future__ import annotations

import numpy as np

__all__ = ["AcceptanceTable"]

# Agreement lengths share a bucket from the upper bounds on: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25+.
_BOUNDS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24])
_SOURCES = 8
# What a copy's next token is worth before anything is known, by bucket: short agreements are coincidence.
_PRIOR = np.array([0.25, 0.40, 0.55, 0.65, 0.72, 0.78, 0.84, 0.88, 0.91, 0.94])
_PRIOR_WEIGHT = 4.0
_FORGET = 400.0  # a cell's counts are halved here: recent behaviour wins


# Bucket of an agreement length. Beyond the last bound all are alike: a copy is looked up from _FAR on then.
_LONGEST = 4096
_BUCKETS = np.searchsorted(_BOUNDS, np.arange(_LONGEST))
_FAR = int(_BOUNDS[-1]) + 1


class AcceptanceTable:
    """P(next copied token is accepted | agreement length, source). A few hundred bytes.

    Called once a step for each running call, so it keeps the quotients ready: chain() takes about 2 µs.
    """

    def __init__(self) -> None:
        buckets = len(_BOUNDS) + 1
        self._accepted = np.repeat((_PRIOR * _PRIOR_WEIGHT)[None, :], _SOURCES, axis=0)
        self._total = np.full((_SOURCES, buckets), _PRIOR_WEIGHT)
        self._edges = self._accepted / self._total

    @property
    def nbytes(self) -> int:
        return int(self._accepted.nbytes + self._total.nbytes + self._edges.nbytes)

    def chain(self, agreement: int, source: int, count: int) -> np.ndarray:
        """float64[count], count up to 4,000: the path probability of each of `count` copied tokens that
        follow `agreement` tokens."""
        start = min(agreement, _FAR)
        edges: np.ndarray = self._edges[source].take(_BUCKETS[start : start + count])
        return edges.cumprod()

    def learn(self, agreement: int, source: int, accepted: bool) -> None:
        """One copied token that followed `agreement` agreeing tokens came true, or did not."""
        cell = source, int(_BUCKETS[min(agreement, _FAR)])
        right, total = float(self._accepted[cell]) + accepted, float(self._total[cell]) + 1.0
        if total > _FORGET:
            right, total = 0.5 * right, 0.5 * total
        self._accepted[cell], self._total[cell], self._edges[cell] = right, total, right / total
