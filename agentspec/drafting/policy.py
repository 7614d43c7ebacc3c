"""WidthPolicy: how much to draft at each step, from v(n), the load, and what the run has gained so far.

The width n of a step maximises

    1 + A(n) - lambda * (v(n + 1) + c)          over all n, 0 included,

A(n) the expected accepted tokens of the best n-node draft, c the proposer's cost, lambda the tokens per unit of cost
that text like this gives. Maximising tokens per time over a run is a fractional program; this is Dinkelbach's
parametric step (1967). Were all steps alike, lambda would be the run's tokens per unit of cost. They aren't: what is
hard to guess comes in stretches, and a token there is worth more, as it saves a step that would bring little. So lambda
is (1 - LOCAL) of the run's running rate and LOCAL of this very draft's best ratio (1 + A(n)) / (v(n + 1) + c).
May import numpy, memory's kernel decorator, economics and proposer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agentspec.drafting.economics import CostCurve
from agentspec.drafting.proposer import DraftLimits
from agentspec.errors import InvalidRequestError
from agentspec.memory.kernels import kernel

__all__ = ["LOCAL", "NO_COST", "WidthPolicy", "due", "widest"]

# Weight of the newest step in the run's rate: about the last 32 steps count. Long enough that one
# lucky draft doesn't make the next ones timid, short enough to follow a change of text within a call.
SMOOTHING = 1.0 / 32.0
LOCAL = 0.7  # of lambda is this draft's own ratio; 0.5 to 0.8 are alike (docs/drafting.md)
NO_COST = np.zeros(0)  # for kernels, where DraftLimits.cost is None


class WidthPolicy:
    """One run's width rule. Not thread-safe: one instance a call or a trajectory.

    curve:         v(n) of the engine at batch size 1
    max_draft:     most nodes that may be sent in a step
    proposer_cost: c, relative to a forward over one token
    """

    __slots__ = ("_batch", "_cost", "_table", "_tokens", "curve", "max_draft", "proposer_cost")

    def __init__(self, curve: CostCurve, max_draft: int = 16, proposer_cost: float = 0.0) -> None:
        if max_draft < 0:
            raise InvalidRequestError(f"max_draft: needed >= 0, got {max_draft!r}")
        self.curve = curve
        self.max_draft = max_draft
        self.proposer_cost = proposer_cost
        self._tokens = 1.0
        self._cost = 1.0
        self._batch = 1
        self._table = curve.table(max_draft)

    @property
    def rate(self) -> float:
        """The run's tokens per unit of cost, smoothed; 1 is what plain decoding gives."""
        return self._tokens / self._cost

    def use_curve(self, curve: CostCurve) -> None:
        """Decide by another v(n) from now on."""
        self.curve = curve
        self._table = curve.at_batch(self._batch).table(self.max_draft)

    def limits(self, remaining: int, batch_size: int = 1, tree: bool = False) -> DraftLimits:
        """The bounds and prices of the next draft. remaining: tokens that may still be emitted, this step's
        own included (so a draft deeper than remaining - 1 can't be used)."""
        if batch_size != self._batch:
            self._batch = batch_size
            self._table = self.curve.at_batch(batch_size).table(self.max_draft)
        nodes = max(0, self.max_draft if tree else min(self.max_draft, remaining - 1))
        table = self._table[1 : nodes + 2]
        price = self.rate * (table - table[0])
        return DraftLimits(nodes, max(0, min(nodes, remaining - 1)), tree, price, table + self.proposer_cost)

    def cost(self, proposed: int) -> float:
        """What a step with `proposed` draft tokens costs: v(proposed + 1) + c."""
        table = self._table if proposed + 1 < len(self._table) else self.curve.table(proposed)
        return float(table[proposed + 1]) + self.proposer_cost

    def record(self, emitted: int, proposed: int) -> None:
        """A step is done: `emitted` tokens for a forward over proposed + 1."""
        self._tokens += SMOOTHING * (emitted - self._tokens)
        self._cost += SMOOTHING * (self.cost(proposed) - self._cost)


@kernel("float64(float64[::1], float64[::1], float64, int64)")
def due(price: Any, cost: Any, ratio: Any, n: Any) -> Any:
    """What a draft of n nodes has to bring. price, cost: as in DraftLimits, cost empty where the price stands; ratio:
    the best (1 + A(m)) / cost[m]."""
    if len(cost) == 0:
        return price[n]
    return (1.0 - LOCAL) * price[n] + LOCAL * ratio * (cost[n] - cost[0])


@kernel("int64(float64[::1], int64, float64[::1], float64[::1], float64)")
def widest(gains: Any, most: Any, price: Any, cost: Any, ratio: Any) -> Any:
    """The n <= most that maximises gains[n] - due(n), the smallest of equals; gains[n] = A(n), gains[0] = 0."""
    best = 0
    best_gain = 0.0
    for n in range(1, most + 1):
        gain = gains[n] - due(price, cost, ratio, n)
        if gain > best_gain:
            best_gain = gain
            best = n
    return best
