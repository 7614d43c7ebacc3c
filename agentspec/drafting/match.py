"""MatchProposer: the small proposer that explains itself. It copies what followed the longest earlier match.

Called by engines, the replay and the SGLang plugin through the Proposer protocol. May import numpy,
agentspec.memory and its neighbours in drafting.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting.acceptance import AcceptanceTable, judge, widest_paying
from agentspec.drafting.policy import NO_COST
from agentspec.drafting.proposer import Draft, DraftLimits
from agentspec.errors import InvalidRequestError
from agentspec.memory import Context, Copied

__all__ = ["MatchProposer"]


class MatchProposer:
    """Copies what followed the most recent of the longest earlier occurrences of the context.

    min_match, max_match: fewest and most context tokens that a match is looked for with
    max_draft:            most tokens that a draft holds, whatever the limits allow

    Knows its own odds: how often copies came true, by agreement length and source (AcceptanceTable), learned from
    every token that comes, drafted or not. One table serves all trajectories of the proposer's owner.
    """

    name = "match"

    def __init__(self, min_match: int = 1, max_match: int = 32, max_draft: int = 64) -> None:
        if not 1 <= min_match <= max_match:
            raise InvalidRequestError(
                f"min_match, max_match: needed 1 <= min_match <= max_match, got {min_match}, {max_match}"
            )
        if max_draft < 0:
            raise InvalidRequestError(f"max_draft: needed >= 0, got {max_draft}")
        self.min_match = min_match
        self.max_match = max_match
        self.max_draft = max_draft
        self.acceptance = AcceptanceTable()
        self._parents = np.arange(-1, max_draft - 1, dtype=np.int32)
        self._copies: dict[int, Copied] = {}

    def begin(self, context: Context) -> None:
        self._copies.pop(id(context), None)

    def propose(self, context: Context, limits: DraftLimits) -> Draft:
        copied = self._copies.get(id(context))
        if copied is None:
            copied = context.memory.copy_longest(context, self.min_match, self.max_match, self.max_draft)
            self._copies[id(context)] = copied
        tokens, agreement, source = copied
        count = min(len(tokens), limits.max_tokens, limits.max_depth)
        if count <= 0:
            return Draft.empty()
        paths = np.empty(count, np.float32)
        cost = NO_COST if limits.cost is None else limits.cost
        width = widest_paying(self.acceptance.cells, agreement, source, count, limits.price, cost, paths)
        if width == 0:
            return Draft.empty()
        return Draft(tokens[:width], self._parents[:width].copy(), paths[:width], np.full(width, source, np.int8))

    def observe(self, context: Context, emitted: NDArray[np.int32]) -> None:
        copied = self._copies.pop(id(context), None)
        if copied is not None:
            tokens, agreement, source = copied
            came = context.tokens[-len(emitted) :]  # appended already, and of the type that the kernel takes
            judge(self.acceptance.cells, agreement, source, tokens, came)

    def learn(self, context: Context) -> None:
        pass

    def end(self, context: Context) -> None:
        self._copies.pop(id(context), None)
