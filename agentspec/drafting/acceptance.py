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


class AcceptanceTable:
    """P(next copied token is accepted | agreement length, source). float32 counts, a few hundred bytes."""

    def __init__(self) -> None:
        buckets = len(_BOUNDS) + 1
        self._accepted = np.repeat(_PRIOR[:, None] * _PRIOR_WEIGHT, _SOURCES, axis=1)
        self._total = np.full((buckets, _SOURCES), _PRIOR_WEIGHT)

    @property
    def nbytes(self) -> int:
        return int(self._accepted.nbytes + self._total.nbytes)

    def chain(self, agreement: int, source: int, count: int) -> np.ndarray:
        """float64[count]: the path probability of each of `count` copied tokens that follow `agreement` tokens."""
        buckets = np.searchsorted(_BOUNDS, agreement + np.arange(count))
        edges = self._accepted[buckets, source] / self._total[buckets, source]
        return np.cumprod(edges)

    def learn(self, agreement: int, source: int, accepted: bool) -> None:
        """One copied token that followed `agreement` agreeing tokens came true, or did not."""
        bucket = int(np.searchsorted(_BOUNDS, agreement))
        self._accepted[bucket, source] += accepted
        self._total[bucket, source] += 1.0
        if self._total[bucket, source] > _FORGET:
            self._accepted[bucket, source] *= 0.5
            self._total[bucket, source] *= 0.5
