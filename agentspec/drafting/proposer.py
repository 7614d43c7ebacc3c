"""The Proposer protocol, the Draft it returns, and proposers by name.

Who calls what, for one call of a trajectory:

    proposer.begin(context)                       after memory.extend
    each step:
        draft = proposer.propose(context, limits) costs and bounds in, a draft out; may be empty
        ... the engine verifies, emits, and calls memory.append(context, emitted) ...
        proposer.observe(context, emitted)        what came; before the next propose, so keep it short
        proposer.learn(context)                   once the next forward is under way: the expensive part
    proposer.end(context)                         before memory.close

A proposer keeps what it learned about a trajectory in `context.memory.attachments[proposer.name]`, so that it
is counted in the memory's budget and dropped with it. Drafting is a deterministic function of the calls above:
no clocks, no randomness (under tensor parallelism every rank drafts by itself).
May import numpy, agentspec.memory, and its neighbours in drafting.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import InvalidRequestError, ProposerError
from agentspec.memory import Context

__all__ = ["Draft", "DraftLimits", "Proposer", "make_proposer"]

ENTRY_POINTS = "agentspec.proposers"


@dataclass(slots=True, frozen=True)
class DraftLimits:
    """What a draft may be, and what it costs.

    max_tokens: most nodes; 0: nothing may be drafted in this step
    max_depth:  longest path (a path deeper than this could not be emitted)
    tree:       False: only a chain can be verified
    price:      float64[max_tokens + 1], price[n] = lambda * (v(n + 1) - v(1)): expected accepted tokens that a draft
                of n nodes has to bring to pay; price[0] = 0
    cost:       float64[max_tokens + 1], cost[n] = v(n + 1) + c, what a step with n nodes costs, in plain steps: with
                it a proposer that knows its odds mixes what this very draft may gain into lambda (policy.py); None: the
                price stands
    """

    max_tokens: int
    max_depth: int
    tree: bool
    price: NDArray[np.float64]
    cost: NDArray[np.float64] | None = None


@dataclass(slots=True, frozen=True)
class Draft:
    """Proposed tokens: a tree (a chain is the tree in which each node hangs on the one before).

    tokens:        int32[n]
    parents:       int32[n], index of the parent node, always smaller than the node's own; -1: the last emitted token
    probabilities: float32[n], that the node is accepted (so: that its whole path is)
    sources:       int8[n], the memory's Source
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    sources: NDArray[np.int8]

    @classmethod
    def empty(cls) -> Draft:
        return _EMPTY

    @classmethod
    def chain(cls, tokens: Any, probabilities: Any = None, source: int = 0) -> Draft:
        """A chain of tokens (int32[n]); probabilities default to 0.5^depth."""
        ids = np.asarray(tokens, dtype=np.int32)
        n = len(ids)
        p = np.power(0.5, np.arange(1, n + 1)) if probabilities is None else probabilities
        return cls(
            ids,
            np.arange(-1, n - 1, dtype=np.int32),
            np.asarray(p, dtype=np.float32),
            np.full(n, source, dtype=np.int8),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return bool(self.parents.tolist() == list(range(-1, len(self.tokens) - 1)))

    @property
    def depths(self) -> NDArray[np.int32]:
        """int32[n]: 1 for a node that hangs on the last emitted token."""
        depths: list[int] = []  # lists: a step has some twenty nodes, and numpy's calls cost a microsecond each
        for parent in self.parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.array(depths, np.int32)

    @property
    def depth(self) -> int:
        """The longest path, in tokens."""
        return int(self.depths.max()) if len(self.tokens) else 0

    def check(self, limits: DraftLimits, vocabulary: int) -> None:
        """Raise ProposerError if this is no draft that `limits` allows over ids 0..vocabulary-1."""
        n = len(self.tokens)
        if not (len(self.parents) == len(self.probabilities) == len(self.sources) == n):
            raise ProposerError("a draft's tokens, parents, probabilities and sources must be equally long")
        if n > limits.max_tokens:
            raise ProposerError(f"a draft of {n} tokens where at most {limits.max_tokens} were allowed")
        if n == 0:
            return
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise ProposerError(f"a drafted id is outside the vocabulary of {vocabulary}")
        if min(parents) < -1 or any(parent >= node for node, parent in enumerate(parents)):
            raise ProposerError("a draft's parents must come before their children")
        if not limits.tree and not self.is_chain:
            raise ProposerError("a tree was drafted where only a chain can be verified")
        if self.depth > limits.max_depth:
            raise ProposerError(f"a draft of depth {self.depth} where at most {limits.max_depth} can be emitted")
        if len(set(zip(parents, tokens, strict=True))) != n:
            raise ProposerError("two children of one node propose the same token")


_EMPTY = Draft(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int8))


@runtime_checkable
class Proposer(Protocol):
    """Anything that guesses the next tokens. The module's docstring says who calls what, and when."""

    name: str

    def begin(self, context: Context) -> None:
        """A call has been opened on context.memory."""

    def propose(self, context: Context, limits: DraftLimits) -> Draft:
        """A draft for what follows context.tokens; empty where none is expected to pay."""

    def observe(self, context: Context, emitted: NDArray[np.int32]) -> None:
        """The tokens (int32[m], m >= 1) that the target emitted after the last propose; appended already."""

    def learn(self, context: Context) -> None:
        """Do the work that may wait until the next forward is under way."""

    def end(self, context: Context) -> None:
        """The call is over, finished or aborted."""


def make_proposer(name: str | Proposer, tokenizer: Any = None, **settings: Any) -> Proposer:
    """A proposer by name, with its settings; a Proposer passes through.

    tokenizer: the target's tokenizer, for proposers that look at what a token is (transformers' interface); such
    a proposer drafts without one too, only less well. Others ignore it.
    Other names are looked up among the installed entry points of the group `agentspec.proposers`; one is called
    as factory(tokenizer=..., **settings). Raises InvalidRequestError for names that nobody knows.
    """
    if not isinstance(name, str):
        if isinstance(name, Proposer):
            return name
        raise InvalidRequestError(f"proposer: needed a name or a Proposer, got {type(name).__name__}")
    if name == "match":
        from agentspec.drafting.match import MatchProposer

        return MatchProposer(**settings)
    if name == "mixture":
        from agentspec.drafting.mixture import MixtureProposer  # compiles kernels: only when asked for

        return MixtureProposer(tokenizer=tokenizer, **settings)
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ["match", "mixture", *sorted(found)]
        raise InvalidRequestError(f"proposer: needed one of {', '.join(known)}, got {name!r}")
    made = found[name].load()(tokenizer=tokenizer, **settings)
    if not isinstance(made, Proposer):
        raise ProposerError(f"entry point {name!r} of {ENTRY_POINTS} made a {type(made).__name__}, not a Proposer")
    return made
