"""Decoder: the loop of one output. Called by LocalEngine's worker, for each choice of a request.

    step 1: the prompt's new tokens and a draft in one forward; later steps: the last token and a draft
    at each position the target's own choice (Sampler) is emitted; the walk goes on while the draft has it
    keys and values are cut to what was emitted

so whatever was drafted, each choice is the target's, with its own accepted prefix in view. Where forwards of different
widths round differently (Forward.row_invariant is False), a choice that this could turn is made again at n = 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentspec.chat import MessageParser
from agentspec.drafting import Draft, Proposer, WidthPolicy
from agentspec.engines.base import CallStats, Channel, TokenLogprob, now_ns
from agentspec.engines.conversations import common_prefix
from agentspec.engines.cost import CostMeter
from agentspec.engines.forward import Forward
from agentspec.engines.outputs import token_chunk
from agentspec.engines.request import GenerationRequest
from agentspec.engines.sampling import Sampler, logprob
from agentspec.engines.states import TrajectoryState
from agentspec.engines.stops import Stopper
from agentspec.errors import EngineClosedError
from agentspec.memory import Context, Source

__all__ = ["Decoder", "Output"]

MOST_FORCED = 64  # ids of a grammar's forced text a forward
_NAMES = {int(source): source.name.lower() for source in Source}
PREFILL_CHUNK = 256  # tokens a forward: an abort waits for no more, and attention scores stay small


@dataclass(slots=True)
class Output:
    """One choice under way.

    prompt:    int32, its ids
    pending:   int32, ids that are in the context but not in the cache: at the end always the last one
    parser:    of a chat's answer
    forced:    the draft in flight is what the grammar leaves no choice in
    """

    index: int
    request: GenerationRequest
    prompt: NDArray[np.int32]
    sampler: Sampler
    stopper: Stopper
    context: Context
    pending: NDArray[np.int32]
    emitted: int = 0
    aborted: bool = False
    costs: list[float] = field(default_factory=list)
    parser: MessageParser | None = None
    forced: bool = False


class Decoder:
    """Decodes outputs with one model, one after another. Not thread-safe.

    forward, proposer, meter: the model's forward, who drafts, and what a forward costs
    max_draft:  most draft tokens a step
    refine:     let the forwards that run correct the meter, and count the proposer's time
    """

    def __init__(
        self,
        forward: Forward,
        proposer: Proposer,
        meter: CostMeter,
        max_draft: int,
        vocabulary: int,
        refine: bool,
    ) -> None:
        self.forward = forward
        self.proposer = proposer
        self.meter = meter
        self.max_draft = max_draft
        self.vocabulary = vocabulary
        self.step_lock = threading.Lock()
        self.closed = threading.Event()  # the call under way ends after its step
        self._refine = refine
        self._proposer_ms = 0.0
        self._curve_version = -1

    @property
    def noise(self) -> float:
        """How far forwards of different widths may differ in a logit; 0: not at all."""
        return 0.0 if self.forward.row_invariant else self.forward.noise

    def reuse(self, state: TrajectoryState, prompt: NDArray[np.int32]) -> int:
        """Cut the trajectory's cache to what it has in common with the prompt; returns how many tokens that is.

        The prompt's last token always runs again: its logits choose the first output token.
        """
        if state.cache is None:
            state.cache = self.forward.new_cache()
        same = min(common_prefix(state.cached, prompt), len(prompt) - 1)
        if same < state.cache.length and not self.forward.supports_drafts:
            same = 0  # this cache can't go back: all of it is computed again
        state.cache.crop(same)
        state.cached = state.cached[:same]
        return same

    def run(
        self, state: TrajectoryState, output: Output, channel: Channel, stats: CallStats, submitted_ns: int
    ) -> None:
        """Decode to the end, or until the channel is aborted. Every forward is a step after which all is whole."""
        assert state.cache is not None
        if state.policy is None:
            state.policy = WidthPolicy(self.meter.curve, self.max_draft)
        self.proposer.begin(output.context)
        try:
            while not output.stopper.finish_reason and not output.aborted:
                with self.step_lock:
                    if self.closed.is_set():
                        raise EngineClosedError("the engine was closed while this call ran")
                    if channel.aborted.is_set():
                        output.aborted = True
                    elif len(output.pending) > PREFILL_CHUNK:
                        head, output.pending = output.pending[:PREFILL_CHUNK], output.pending[PREFILL_CHUNK:]
                        self._forward(state, head, 0, None, stats)
                        state.cached = np.concatenate([state.cached, head])
                    else:
                        self._step(state, output, channel, stats, submitted_ns)
        finally:
            self.proposer.end(output.context)

    # ---- one step -----------------------------------------------------------------------------

    def _step(
        self, state: TrajectoryState, output: Output, channel: Channel, stats: CallStats, submitted_ns: int
    ) -> None:
        policy = self._policy(state)
        before = stats.proposer_ms
        draft = self._propose(policy, output, stats)
        emitted, probabilities, accepted = self._verify(state, output, draft, stats)
        output.costs.append(policy.cost(len(draft)))
        stats.cost_by_width[len(draft)] = output.costs[-1]
        stats.drafts.append((len(draft), len(accepted)))
        if not output.forced:  # lambda is what the free steps gain; forced text would make drafts timid
            policy.record(len(emitted), len(draft))
        new = np.asarray(emitted, dtype=np.int32)
        output.context.memory.append(output.context, new)
        self._timed(stats, self.proposer.observe, output.context, new)
        self._timed(stats, self.proposer.learn, output.context)
        self._proposer_ms += (stats.proposer_ms - before - self._proposer_ms) / 32
        self._count(draft, accepted, stats)
        output.pending = new[-1:]
        output.emitted += len(emitted)
        state.cached = output.context.tokens[:-1]
        stamp = now_ns()
        stats.verify_steps += 1
        stats.output_tokens += len(emitted)
        stats.arrivals.append(((stamp - submitted_ns) / 1e6, len(emitted)))
        channel.put(token_chunk(output.stopper, output.parser, emitted, stamp, probabilities, output.index))

    def _policy(self, state: TrajectoryState) -> WidthPolicy:
        """The trajectory's, with the cost curve and the proposer's cost as known now.

        Widths may follow the clock, texts can't. Where v(n) was given, no clock decides anything: the run can be
        predicted (replay).
        """
        policy = state.policy
        assert policy is not None
        if not self._refine:
            return policy
        base = self.meter.base_ms
        policy.proposer_cost = self._proposer_ms / base if base else 0.0
        if policy.curve is not self.meter.curve:
            policy.use_curve(self.meter.curve)
        return policy

    def _propose(self, policy: WidthPolicy, output: Output, stats: CallStats) -> Draft:
        request = output.request
        remaining = output.stopper.remaining
        constraint = output.sampler.constraint
        reason = ""
        output.forced = False
        draft = Draft.empty()
        if not request.draft or self.max_draft == 0:
            reason = "off"
        elif not self.forward.supports_drafts:
            reason = self.forward.limits
        elif remaining <= 1:
            reason = "last token"
        else:
            limits = policy.limits(remaining, tree=self.forward.supports_trees)
            if constraint is not None:
                # certain to be accepted, so neither width rule nor proposer has a say
                forced = constraint.forced(min(MOST_FORCED, remaining - 1))
                if len(forced):
                    draft = Draft.chain(forced, np.ones(len(forced)), int(Source.SCHEMA))
                    output.forced = True
            if not output.forced:
                draft = self._timed(stats, self.proposer.propose, output.context, limits)
                draft.check(limits, self.vocabulary)
                if constraint is not None and len(draft):
                    draft = constraint.cut(draft)
            if not len(draft):
                reason = "no match or not worth it"
        if reason:
            stats.not_drafted[reason] = stats.not_drafted.get(reason, 0) + 1
        return draft

    def _verify(
        self, state: TrajectoryState, output: Output, draft: Draft, stats: CallStats
    ) -> tuple[list[int], list[TokenLogprob], list[int]]:
        """Run a draft; returns the emitted ids, their log probabilities, and the accepted nodes."""
        cache, sampler, request = state.cache, output.sampler, output.request
        assert cache is not None
        pending = output.pending
        base, start = len(pending), cache.length
        chain = not len(draft) or draft.is_chain
        parents = None
        children: dict[tuple[int, int], int] = {}
        parented: set[int] = set()
        ids = pending
        if len(draft):
            above, tokens = draft.parents.tolist(), draft.tokens.tolist()
            children = {(parent, token): node for node, (parent, token) in enumerate(zip(above, tokens, strict=True))}
            parented = set(above)
            ids = np.concatenate([pending, draft.tokens])
            if not chain:
                parents = [*range(-1, base - 1), *(base - 1 if parent < 0 else parent + base for parent in above)]
        logits = self._forward(state, ids, 1 + len(draft), parents, stats)
        rows = None if self._on_device(logits, sampler, request) else _numpy(logits)
        choices = logits.argmax(dim=-1).tolist() if rows is None else []
        emitted: list[int] = []
        probabilities: list[TokenLogprob] = []
        path: list[int] = []
        node = -1
        settled = False
        while True:
            row = None if rows is None else rows[node + 1]
            if row is None:
                token = choices[node + 1]
            else:
                token = sampler.choose(row)
                if sampler.close_call and base + len(draft) > 1 and self.forward.supports_drafts:
                    # The id that this row belongs to goes through alone, after the path before it.
                    last = int(draft.tokens[node]) if node >= 0 else int(pending[-1])
                    self._cut(state, chain, base, start, path, len(path) - 1)
                    row = _numpy(self._forward(state, np.array([last], np.int32), 1, None, stats))[0]
                    again = sampler.choose(row)
                    stats.near_ties += 1
                    stats.near_tie_flips += again != token
                    token, settled = again, True
            if row is not None and (request.logprobs or request.top_logprobs):
                probabilities.append(logprob(row, token, request.top_logprobs))
            emitted.append(token)
            sampler.advance(token)
            reason = output.stopper.push(token)
            child = children.get((node, token))
            if child is None:
                stats.mismatches = (stats.mismatches or 0) + (node in parented)
                break
            path.append(child)
            if reason or settled:
                break
            node = child
        if not settled and (len(draft) or base > 1):
            self._cut(state, chain, base, start, path, len(emitted) - 1)
        stats.proposed += len(draft)
        stats.proposed_depth += draft.depth
        return emitted, probabilities, path

    def _cut(self, state: TrajectoryState, chain: bool, base: int, start: int, path: list[int], nodes: int) -> None:
        """Keep of the last step's rows the pending ones and `nodes` of the path; -1: all pending ones but the last."""
        cache = state.cache
        assert cache is not None
        if chain:
            if start + base + nodes < cache.length:
                cache.crop(start + base + nodes)
        else:
            cache.keep([*range(base + min(nodes, 0)), *(base + node for node in path[: max(nodes, 0)])])

    @staticmethod
    def _on_device(logits: torch.Tensor, sampler: Sampler, request: GenerationRequest) -> bool:
        """Greedy choices are made where the logits are; everything else on the CPU."""
        return logits.is_cuda and sampler.plain and not sampler.noisy and not (request.logprobs or request.top_logprobs)

    def _forward(
        self,
        state: TrajectoryState,
        ids: NDArray[np.int32],
        rows: int,
        parents: list[int] | None,
        stats: CallStats,
    ) -> torch.Tensor:
        assert state.cache is not None
        before = time.perf_counter()
        logits = self.forward.step(state.cache, ids, rows, parents)
        taken = (time.perf_counter() - before) * 1e3
        stats.forward_ms += taken
        if self._refine and rows == len(ids) and not logits.is_cuda:
            self.meter.record(len(ids), taken)
        return logits

    @staticmethod
    def _count(draft: Draft, accepted: list[int], stats: CallStats) -> None:
        stats.accepted += len(accepted)
        sources = draft.sources.tolist()
        for node in accepted:
            name = _NAMES[sources[node]]
            stats.accepted_by_source[name] = stats.accepted_by_source.get(name, 0) + 1

    @staticmethod
    def _timed(stats: CallStats, function: Callable[..., Any], *args: Any) -> Any:
        before = time.perf_counter()
        value = function(*args)
        stats.proposer_ms += (time.perf_counter() - before) * 1e3
        return value


def _numpy(logits: torch.Tensor) -> NDArray[np.float32]:
    """Without torch's own indexing, whose every call costs tens of microseconds after a forward has used the caches."""
    rows: NDArray[np.float32] = (logits.cpu() if logits.is_cuda else logits).numpy()
    return rows
