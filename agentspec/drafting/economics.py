"""The formulas: expected tokens, speedup, break-even, the best k, and the verify-cost curve v(n).

a is the conditional acceptance (the chance that a drafted token is accepted given that all before it were),
k the drafted tokens per step, c the draft cost relative to one forward over one token, v(n) the cost of a
forward over n new tokens relative to n = 1.

Source of E(a, k) and of the speedup with a draft cost per token: Leviathan, Kalman, Matias, "Fast Inference
from Transformers via Speculative Decoding" (2023), equation (1) and theorem 3.8. Imports nothing but numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import InvalidRequestError

__all__ = [
    "CostCurve",
    "best_k",
    "break_even_acceptance",
    "chain_speedup",
    "expected_tokens",
    "speedup_curve",
    "speedup_per_step",
    "speedup_per_token",
]


_MOST_DRAFTED = 2**53  # beyond it a float holds no whole numbers one by one


def _acceptance(a: float) -> float:
    if not 0.0 <= a <= 1.0:
        raise InvalidRequestError(f"acceptance a: needed 0..1, got {a!r}")
    return float(a)


def _drafted(k: int) -> int:
    if isinstance(k, bool) or not 0 <= k <= _MOST_DRAFTED or int(k) != k:
        raise InvalidRequestError(f"drafted tokens k: needed a whole number from 0 to 2^53, got {k!r:.60}")
    return int(k)


def _cost(c: float) -> float:
    if not (c >= 0.0 and math.isfinite(c)):
        raise InvalidRequestError(f"draft cost c: needed a finite number >= 0, got {c!r}")
    return float(c)


def expected_tokens(a: float, k: int) -> float:
    """E(a, k) = 1 + a + a^2 + ... + a^k, tokens a step; the 1 is the bonus token."""
    a, k = _acceptance(a), _drafted(k)
    if k <= 64:
        return math.fsum(a**i for i in range(k + 1))
    if a in (0.0, 1.0):
        return 1.0 + a * k
    return -math.expm1((k + 1) * math.log(a)) / (1.0 - a)


def speedup_per_token(a: float, k: int, c: float) -> float:
    """S = E(a, k) / (1 + k c): every drafted token costs c (a draft model)."""
    return expected_tokens(a, k) / (1.0 + _drafted(k) * _cost(c))


def speedup_per_step(a: float, k: int, c: float) -> float:
    """S = E(a, k) / (1 + c): a step's whole draft costs c (a lookup)."""
    return expected_tokens(a, k) / (1.0 + _cost(c))


def speedup_curve(a: float, k: int, c: float, v: Callable[[int], float]) -> float:
    """S = E(a, k) / (v(k + 1) + c): what agentspec decides by; v(1) = 1."""
    return expected_tokens(a, k) / (v(_drafted(k) + 1) + _cost(c))


def chain_speedup(speedup: float, decode_share: float) -> float:
    """S_chain = 1 / (1 - f + f / S): a whole chain, of whose time decoding is the share f (0..1)."""
    if not 0.0 <= decode_share <= 1.0:
        raise InvalidRequestError(f"decode share f: needed 0..1, got {decode_share!r}")
    if not speedup > 0.0:
        raise InvalidRequestError(f"speedup S: needed a number > 0, got {speedup!r}")
    return 1.0 / (1.0 - decode_share + decode_share / speedup)


def break_even_acceptance(k: int, c: float, *, per: str = "token") -> float:
    """The a at which S = 1 for k drafted tokens of cost c each (`per="token"`) or together (`per="step"`).

    0.0 where drafting is free, math.inf where even a = 1 doesn't pay. Found by bisection to 1e-12.
    """
    k, c = _drafted(k), _cost(c)
    if per not in ("token", "step"):
        raise InvalidRequestError(f"per: needed 'token' or 'step', got {per!r}")
    target = 1.0 + (k * c if per == "token" else c)
    if k == 0:
        return 0.0 if target <= 1.0 else math.inf
    if k + 1 < target:
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = 0.5 * (low + high)
        if expected_tokens(middle, k) < target:
            low = middle
        else:
            high = middle
    return high if target > 1.0 else 0.0


def best_k(a: float, c: float, ks: Iterable[int] = (1, 2, 3, 4, 6, 8)) -> tuple[int, float]:
    """(k, S) with the largest speedup_per_token among ks; of equals the smallest k."""
    candidates = [(_drafted(k), speedup_per_token(a, k, c)) for k in ks]
    if not candidates:
        raise InvalidRequestError("ks: needed at least one k, got none")
    return max(candidates, key=lambda pair: (pair[1], -pair[0]))


@dataclass(frozen=True)
class CostCurve:
    """v(n): the cost of a forward over n new tokens relative to n = 1.

    points maps n to v(n), with v(1) = 1; between points v is linear, beyond the last it goes on with the last
    slope (never downwards). base_ms is what one forward over one token takes, if known.
    """

    points: Mapping[int, float]
    base_ms: float | None = None
    name: str = ""
    _table: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        widths = sorted(self.points)
        if not widths or widths[0] != 1 or abs(self.points[1] - 1.0) > 1e-9:
            raise InvalidRequestError(f"cost curve: needed points from n = 1 with v(1) = 1, got {dict(self.points)}")
        if any(not (math.isfinite(v) and v > 0) for v in self.points.values()):
            raise InvalidRequestError(f"cost curve: needed finite costs > 0, got {dict(self.points)}")
        object.__setattr__(self, "points", {int(n): float(self.points[n]) for n in widths})
        object.__setattr__(self, "_table", self._tabulate(256))

    @classmethod
    def linear(cls, slope: float, **kwargs: Any) -> CostCurve:
        """v(n) = 1 + slope (n - 1)."""
        return cls({1: 1.0, 2: 1.0 + slope}, **kwargs)

    @classmethod
    def measured(cls, milliseconds: Mapping[int, float], name: str = "") -> CostCurve:
        """From forward times in ms by n, n = 1 included. A measurement in which more tokens cost less is noise:
        v is made non-decreasing."""
        if 1 not in milliseconds:
            raise InvalidRequestError(f"cost curve: needed a time for n = 1, got {sorted(milliseconds)}")
        base = milliseconds[1]
        points: dict[int, float] = {}
        highest = 0.0
        for n in sorted(milliseconds):
            highest = max(highest, milliseconds[n] / base)
            points[n] = highest
        return cls(points, base_ms=base, name=name)

    def __call__(self, n: float) -> float:
        """v(n) for n >= 1; n may be fractional (a batch's mean width)."""
        if n < 1:
            raise InvalidRequestError(f"v(n): needed n >= 1, got {n!r}")
        if n < len(self._table) and n == int(n):
            return float(self._table[int(n)])
        return float(self._values(np.array([n]))[0])

    def at_batch(self, batch_size: int) -> CostCurve:
        """The curve of one sequence among batch_size that all take n tokens: v(B n) / v(B)."""
        if batch_size < 1:
            raise InvalidRequestError(f"batch size: needed >= 1, got {batch_size!r}")
        if batch_size == 1:
            return self
        base = self(batch_size)
        widths = sorted({1, *self.points, *(max(1, math.ceil(w / batch_size)) for w in self.points)})
        return CostCurve(
            {n: self(n * batch_size) / base for n in widths},
            base_ms=None if self.base_ms is None else self.base_ms * base,
            name=self.name,
        )

    def table(self, widest: int) -> NDArray[np.float64]:
        """float64[widest + 2]: v(n) at index n (index 0 unused, 0.0)."""
        if widest + 2 <= len(self._table):
            return self._table[: widest + 2]
        return self._tabulate(widest + 2)

    def _tabulate(self, size: int) -> NDArray[np.float64]:
        return np.concatenate([[0.0], self._values(np.arange(1, size))])

    def _values(self, n: NDArray[Any]) -> NDArray[np.float64]:
        widths, costs = list(self.points), list(self.points.values())
        slope = max(0.0, (costs[-1] - costs[-2]) / (widths[-1] - widths[-2])) if len(widths) > 1 else 0.0
        values: NDArray[np.float64] = np.interp(n, widths, costs) + slope * np.maximum(0, n - widths[-1])
        return values

    def best_width(self, acceptance: Sequence[float], cost: float = 0.0) -> int:
        """The n that maximises (1 + sum of the first n path probabilities) / (v(n + 1) + cost)."""
        gains = 1.0 + np.concatenate([[0.0], np.cumsum(np.asarray(acceptance, dtype=np.float64))])
        return int(np.argmax(gains / (self.table(len(acceptance))[1 : len(acceptance) + 2] + cost)))
