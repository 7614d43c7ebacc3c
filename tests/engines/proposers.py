"""Proposers that are told what to say: strict about the protocol, so that losslessness is tested over any draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentspec.drafting import Draft, DraftLimits
from agentspec.memory import Context


class ScriptedProposer:
    """Drafts what `script(context ids, limits)` says: (tokens, parents or None), cut to the limits.

    Counts its calls; raises where the engine breaks the protocol.
    """

    name = "scripted"

    def __init__(self, script: Callable[[np.ndarray, DraftLimits], tuple[Sequence[int], Sequence[int] | None]]) -> None:
        self.script = script
        self.open: dict[int, int] = {}
        self.drafts: list[Draft] = []
        self.proposed = self.observed = 0

    def begin(self, context: Context) -> None:
        assert id(context) not in self.open
        self.open[id(context)] = len(context.tokens)

    def propose(self, context: Context, limits: DraftLimits) -> Draft:
        assert self.open[id(context)] == len(context.tokens), "propose without observing what came"
        self.proposed += 1
        tokens, parents = self.script(context.tokens, limits)
        if parents is None or not limits.tree:
            tokens = list(tokens)[: min(limits.max_tokens, limits.max_depth)]
            draft = Draft.chain(tokens) if tokens else Draft.empty()
        else:
            draft = cut_tree(list(tokens), list(parents), limits)
        self.drafts.append(draft)
        return draft

    def observe(self, context: Context, emitted: np.ndarray) -> None:
        assert len(emitted) >= 1
        assert context.tokens[-len(emitted) :].tolist() == emitted.tolist(), "observe before append"
        self.open[id(context)] += len(emitted)
        self.observed += 1

    def learn(self, context: Context) -> None:
        assert self.open[id(context)] == len(context.tokens)

    def end(self, context: Context) -> None:
        del self.open[id(context)]


def cut_tree(tokens: list[int], parents: list[int], limits: DraftLimits) -> Draft:
    """The tree without what the limits or the protocol forbid."""
    kept: dict[int, int] = {-1: -1}
    depth: dict[int, int] = {-1: 0}
    out: list[tuple[int, int]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent not in kept or depth[kept[parent]] >= limits.max_depth or len(out) >= limits.max_tokens:
            continue
        edge = (kept[parent], token)
        if edge in out:
            kept[node] = out.index(edge)
            continue
        kept[node] = len(out)
        depth[len(out)] = depth[edge[0]] + 1
        out.append(edge)
    n = len(out)
    if not n:
        return Draft.empty()
    return Draft(
        np.array([t for _, t in out], np.int32),
        np.array([p for p, _ in out], np.int32),
        np.full(n, 0.5, np.float32),
        np.zeros(n, np.int8),
    )


def nothing(context: np.ndarray, limits: DraftLimits) -> tuple[Sequence[int], None]:
    return (), None


def oracle(full: Sequence[int], width: int = 8) -> Callable[..., tuple[Sequence[int], None]]:
    """Always right: full is the prompt and what plain decoding gave after it."""
    return lambda context, limits: (list(full)[len(context) : len(context) + width], None)


def adversary(full: Sequence[int], vocabulary: int, width: int = 8) -> Callable[..., tuple[Sequence[int], None]]:
    """Right for a while, then wrong by one, each step at another place."""

    def script(context: np.ndarray, limits: DraftLimits) -> tuple[Sequence[int], None]:
        right = list(full)[len(context) : len(context) + width]
        wrong = len(context) % (width + 1)
        if wrong < len(right):
            right[wrong] = (right[wrong] + 1) % vocabulary
        return right, None

    return script


def noise(
    seed: int, vocabulary: int, full: Sequence[int] = (), tree: bool = False
) -> Callable[..., tuple[list[int], list[int] | None]]:
    """Random drafts of random width, each id the right one half of the time where `full` is known; chains or trees."""
    rng = np.random.default_rng(seed)

    def script(context: np.ndarray, limits: DraftLimits) -> tuple[list[int], list[int] | None]:
        n = int(rng.integers(0, 13))
        at = len(context)
        tokens: list[int] = []
        parents: list[int] = []
        depths = {-1: 0}
        for node in range(n):
            parent = int(rng.integers(-1, node)) if tree else node - 1
            depths[node] = depths[parent] + 1
            place = at + depths[node] - 1
            right = place < len(full) and rng.random() < 0.6
            tokens.append(int(full[place]) if right else int(rng.integers(0, vocabulary)))
            parents.append(parent)
        return tokens, parents if tree else None

    return script
