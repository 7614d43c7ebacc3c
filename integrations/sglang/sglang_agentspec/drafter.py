"""Drafter: the calls that are running, their memories, and one step's drafts for all of them.

The scheduler's worker (internals.py) calls it, on every tensor-parallel rank alike:

    call = drafter.begin(settings, prompt, ...)     once the prompt's forward is launched
    each step:
        drafter.take(call, tokens)                  what the last step emitted
        step = drafter.draft(calls)                 the drafts, and the verify width that holds them (1: none)
        drafter.learn(calls)                        once the forward is launched
    drafter.end(call, delivered)

A deterministic function of these calls: no clocks, no randomness. May import nothing from sglang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentspec.drafting import CostCurve, Draft, DraftLimits, Proposer, WidthPolicy, make_proposer
from agentspec.drafting.policy import widest
from agentspec.errors import AgentSpecError
from agentspec.memory import Context, TrajectoryMemory
from sglang_agentspec.requests import RequestSettings
from sglang_agentspec.settings import PluginSettings
from sglang_agentspec.trajectories import Trajectory, TrajectoryBook
from sglang_agentspec.tree import VerifyTree, pack

__all__ = ["Call", "Drafter", "Step"]

logger = logging.getLogger(__name__)


class Call:
    """One running request. taken: how many of its output tokens its memory has; reason: why it is not
    drafted; seen: whether the proposer knows of it."""

    __slots__ = (
        "context",
        "ends",
        "max_output",
        "policy",
        "problems",
        "prompt_length",
        "proposed",
        "reason",
        "seen",
        "stopped",
        "taken",
        "trajectory",
    )

    def __init__(
        self,
        trajectory: Trajectory,
        context: Context,
        policy: WidthPolicy,
        max_output: int,
        ends: Collection[int],
        reason: str | None,
        problems: Sequence[str] = (),
        seen: bool = True,
    ) -> None:
        self.problems = problems
        self.seen = seen
        self.trajectory = trajectory
        self.context = context
        self.policy = policy
        self.prompt_length = context.prompt_length
        self.max_output = max_output
        self.ends = ends
        self.reason = reason
        self.taken = 0
        self.proposed = 0  # draft tokens sent in the step under way
        self.stopped = False  # an end token came: what follows it is not delivered


@dataclass(slots=True)
class Step:
    """width: verify width, 1 for a step without drafts. lengths: draft tokens + 1 for each call."""

    width: int
    lengths: list[int]


class Drafter:
    """See the module's docstring.

    vocabulary: size of the target's; curve: its v(n); widest: the widest verify step; max_rows: the largest
    batch; trees: whether more than chains can be verified; tokenizer: the target's, with transformers'
    interface, for seeds given as text and for proposers that ask what a token is.
    """

    def __init__(
        self,
        settings: PluginSettings,
        *,
        vocabulary: int,
        curve: CostCurve,
        widest: int,
        max_rows: int,
        trees: bool,
        tokenizer: Any = None,
    ) -> None:
        self.settings = settings
        self.vocabulary = vocabulary
        self.trees = trees
        self.widths = settings.verify_widths(widest)
        self.curve = padded_curve(curve, self.widths)
        self._raw_curve = curve
        self._costs: dict[int, float] = {}
        self._counts = np.arange(0.0, widest)
        self._tokenizer = tokenizer
        self.proposer = self._make_proposer()
        self.book = TrajectoryBook(int(settings.memory_mb * 1e6))
        self.tree = VerifyTree(max_rows, widest)
        self._tokenize: Callable[[str], Sequence[int]] | None = None
        if tokenizer is not None:
            self._tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._refused = 0
        self._no_draft = Draft.empty()

    # ---- a call's life ----------------------------------------------------------------------------

    def begin(
        self,
        request: RequestSettings,
        prompt: np.ndarray,
        *,
        max_output: int,
        ends: Collection[int] = (),
        reason: str | None = None,
    ) -> Call:
        """Open a call on its trajectory: index the prompt (int32[n]) and its seeds. ends: ids that end the
        output.

        What the memory can't take is said in the call's `problems`; the call goes on without drafts then.
        """
        problems = list(request.problems)
        try:
            trajectory = self.book.open(
                request.scope, request.trajectory, prompt, request.namespace, follow=self.settings.follow
            )
        except AgentSpecError as error:
            problems.append(str(error))
            return self.begin_unseen(prompt, max_output, ends, "no_memory", problems)
        memory = trajectory.memory
        try:
            context = memory.extend(prompt, request.spans)
        except AgentSpecError as error:
            problems.append(str(error))
            self.book.close(trajectory, None)
            return self.begin_unseen(prompt, max_output, ends, "no_memory", problems)
        try:
            for piece in request.seeds:
                memory.seed(piece)
            for text in request.seed_texts:
                if self._tokenize is not None:
                    memory.seed_text(text, self._tokenize)
        except AgentSpecError as error:
            problems.append(f"seeds: {error}")
        self.proposer.begin(context)
        if trajectory.policy is None:
            trajectory.policy = WidthPolicy(self.curve, self.widths[-1] - 1)
        return Call(trajectory, context, trajectory.policy, max_output, ends, reason, problems)

    def begin_unseen(
        self, prompt: np.ndarray, max_output: int, ends: Collection[int], reason: str, problems: Sequence[str] = ()
    ) -> Call:
        """Open a call that no memory and no proposer is told of: it is not drafted, for that reason."""
        memory = TrajectoryMemory()
        context = memory.extend(np.maximum(prompt[-64:], 0))
        trajectory = Trajectory("", "", (None, ""), memory, named=True)
        trajectory.open_calls = 1
        return Call(trajectory, context, WidthPolicy(self.curve, 0), max_output, ends, reason, problems, seen=False)

    def take(self, call: Call, tokens: Sequence[int]) -> None:
        """Tokens that the last step emitted, in order. What comes after an end token is not part of the
        output."""
        ids = np.array(tokens, dtype=np.int32)
        call.taken += len(ids)
        if call.stopped:
            return
        if call.ends:
            for place, token in enumerate(tokens):
                if token in call.ends:
                    call.stopped = True
                    ids = ids[: place + 1]
                    break
        memory = call.trajectory.memory
        memory.append(call.context, ids)
        if call.seen:
            self.proposer.observe(call.context, ids)
        call.policy.record(len(ids), call.proposed)
        call.proposed = 0

    def draft(self, calls: Sequence[Call], plain: bool = False) -> Step:
        """Drafts for the next step of a batch, packed into self.tree if there are any. plain: send none."""
        rows = len(calls)
        drafts: list[Draft] = []
        longest = 0
        cost = self._proposing(rows)
        for call in calls:
            draft = self._no_draft
            if call.reason is None and not call.stopped:
                call.policy.proposer_cost = cost
                limits = call.policy.limits(call.max_output - call.taken, rows, self.trees)
                if plain or self._hopeless(limits):
                    limits = DraftLimits(0, 0, limits.tree, limits.price[:1])
                draft = self.proposer.propose(call.context, limits)
                longest = max(longest, len(draft))
            drafts.append(draft)
        if longest == 0:
            return Step(1, [1] * rows)
        width = next(w for w in self.widths if w > longest)
        roots = [int(call.context.tokens[-1]) for call in calls]
        for row, fault in pack(self.tree, roots, drafts, width, self.vocabulary):
            drafts[row] = self._no_draft
            self._report(fault)
        lengths = [len(d) + 1 for d in drafts]
        for call, length in zip(calls, lengths, strict=True):
            call.proposed = length - 1
        return Step(width, lengths)

    def pack_roots(self, calls: Sequence[Call], width: int) -> None:
        """A verify step without any draft."""
        roots = [int(call.context.tokens[-1]) for call in calls]
        pack(self.tree, roots, [self._no_draft] * len(calls), width, self.vocabulary)

    def learn(self, calls: Sequence[Call]) -> None:
        """Work that may wait until the forward is under way."""
        for call in calls:
            if call.reason is None:
                self.proposer.learn(call.context)

    def end(self, call: Call, delivered: Sequence[int] | None) -> None:
        """The call is over. delivered: its whole output as the client got it, or None if that isn't known
        any more.

        A call's last tokens may not have been taken yet; a final end token is no place to join at.
        """
        seen = None
        memory = call.trajectory.memory
        if delivered is not None and len(delivered) > call.taken:
            self.take(call, delivered[call.taken :])
        if call.seen:
            self.proposer.end(call.context)
        if delivered is not None:
            kept = len(delivered)
            if kept < len(call.context.output):  # under overlap, what came after a stop string was taken already
                memory.truncate(call.context, kept)
            if kept and delivered[kept - 1] in call.ends:
                kept -= 1
            seen = call.context.tokens[: call.prompt_length + kept]
        memory.close(call.context)
        self.book.close(call.trajectory, seen)

    def clear(self) -> None:
        """Forget all trajectories; calls that run keep theirs until they end."""
        self.book.clear()

    def warm_up(self) -> None:
        """Run every kernel once, so that nothing is compiled while a request waits. Leaves no trace."""
        request = RequestSettings(scope="warm-up", trajectory="warm-up")
        text = [i % 7 for i in range(64)]
        call = self.begin(request, np.array(text, dtype=np.int32), max_output=64)
        for token in (1, 2, 3):
            self.take(call, [token])
            self.draft([call])
            self.learn([call])
        chain = Draft.chain([0] * (self.widths[0] - 1))
        pack(self.tree, [1], [chain], self.widths[0], self.vocabulary)
        self.end(call, [1, 2, 3])
        self.clear()
        self.proposer = self._make_proposer()  # what it learned from this text is forgotten

    def _make_proposer(self) -> Proposer:
        settings = self.settings
        return make_proposer(settings.proposer, tokenizer=self._tokenizer, **settings.proposer_settings)

    # ---- inside -----------------------------------------------------------------------------------

    def _proposing(self, rows: int) -> float:
        """What the proposals of a batch take, relative to its forward over one token each: they run one after
        another, so they grow with the batch while the forward hardly does."""
        cost = self._costs.get(rows)
        if cost is None:
            cost = self._costs[rows] = self.settings.cost() * rows / self._raw_curve(rows)
        return cost

    def _hopeless(self, limits: DraftLimits) -> bool:
        """Whether no draft could pay, were all of it accepted: n tokens are worth n at most."""
        most = limits.max_tokens
        if most == 0 or limits.cost is None or limits.price[1] < 1.0:
            return False
        return widest(self._counts[: most + 1], most, limits.price, limits.cost, 1.0 / limits.cost[0]) == 0

    def _report(self, fault: str) -> None:
        self._refused += 1
        if self._refused == 1:
            logger.error(
                "agentspec: the proposer %r returned a draft with %s; it was not sent, nor are others like "
                "it (said once). The output is not affected.",
                self.proposer.name,
                fault,
            )


@dataclass(frozen=True)
class PaddedCurve(CostCurve):
    """v(n) where a step of n tokens runs as the narrowest verify width that holds it: no other is built."""

    raw: CostCurve | None = None
    widths: tuple[int, ...] = ()
    _batches: dict[int, CostCurve] = field(default_factory=dict, repr=False, compare=False)

    def at_batch(self, batch_size: int) -> CostCurve:
        if batch_size == 1:
            return self
        curve = self._batches.get(batch_size)
        if curve is None:  # tabulating takes about a millisecond, and batches change all the time
            assert self.raw is not None
            points = _padded(self.raw, self.widths, batch_size)
            curve = self._batches[batch_size] = CostCurve(points, name=self.name)
        return curve


def padded_curve(curve: CostCurve, widths: Sequence[int]) -> PaddedCurve:
    points = _padded(curve, widths, 1)
    return PaddedCurve(points, base_ms=curve.base_ms, name=curve.name, raw=curve, widths=tuple(widths))


def _padded(curve: CostCurve, widths: Sequence[int], batch_size: int) -> dict[int, float]:
    points, low = {1: 1.0}, 2
    for width in widths:
        points[low] = points[width] = curve(width * batch_size) / curve(batch_size)
        low = width + 1
    return points
