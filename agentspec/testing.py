"""check_proposer: the conformance kit for implementations of the Proposer protocol.

For authors of proposers, in their own tests:

    from agentspec.testing import check_proposer

    def test_conformance():
        check_proposer(lambda: MyProposer())

It drives the protocol the way engines do, over repetitive and over random text, with chains and trees,
narrow and
wide limits, aborted calls, two open calls of one trajectory, and a shared namespace, and raises ProposerError with
what was wrong. May import numpy, memory and drafting; no torch, no pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting.proposer import Draft, DraftLimits, Proposer
from agentspec.errors import ProposerError
from agentspec.memory import Context, Source, Span, TrajectoryMemory

__all__ = ["accept", "check_proposer", "scripted_calls"]

VOCABULARY = 500
_LIMITS = (
    DraftLimits(16, 16, True, np.zeros(17)),
    DraftLimits(16, 16, False, np.zeros(17)),
    DraftLimits(1, 1, True, np.zeros(2)),
    DraftLimits(12, 2, True, np.zeros(13)),
    DraftLimits(8, 3, False, np.zeros(9)),
    DraftLimits(0, 0, True, np.zeros(1)),
    DraftLimits(16, 0, True, np.zeros(17)),
    DraftLimits(16, 16, True, np.linspace(0.0, 0.8, 17)),
    DraftLimits(16, 16, True, np.linspace(0.0, 0.8, 17), np.linspace(1.0, 1.8, 17)),
    DraftLimits(16, 16, True, np.concatenate([[0.0], np.full(16, 1e9)])),
)


def accept(draft: Draft, following: NDArray[np.int32]) -> int:
    """How many of `following` a verification would accept: the length of the draft's path that agrees with
    it."""
    children: dict[tuple[int, int], int] = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    node, accepted = -1, 0
    for token in following.tolist():
        found = children.get((node, token))
        if found is None:
            break
        node, accepted = found, accepted + 1
    return accepted


def scripted_calls(calls: int = 6, seed: int = 0) -> list[tuple[NDArray[np.int32], list[Span], NDArray[np.int32]]]:
    """(prompt, spans, output) of each call of a made-up agent that reads, quotes what it read, and repeats
    itself."""
    random = np.random.default_rng(seed)
    phrase = random.integers(3, VOCABULARY, 24, dtype=np.int32)
    history = random.integers(3, VOCABULARY, 60, dtype=np.int32)
    spans = [Span(0, 60, Source.PROMPT, "system")]
    made = []
    for call in range(calls):
        read = random.integers(3, VOCABULARY, 40, dtype=np.int32)
        start = len(history)
        history = np.concatenate([history, read])
        spans.append(
            Span(
                start,
                len(history),
                Source.TOOL if call % 2 else Source.PROMPT,
                "tool" if call % 2 else "user",
            )
        )
        output = np.concatenate(
            [phrase, read[5:30], random.integers(3, VOCABULARY, 6, dtype=np.int32), phrase[:9], [2]]
        )
        made.append((history.astype(np.int32), list(spans), output.astype(np.int32)))
        spans.append(Span(len(history), len(history) + len(output), Source.OUTPUT, "assistant"))
        history = np.concatenate([history, output])
    return made


def check_proposer(make: Callable[[], Proposer], vocabulary: int = VOCABULARY) -> None:
    """Raise ProposerError if what `make` returns breaks the Proposer protocol.

    make: builds a fresh proposer; called several times
    vocabulary: ids that it may propose are 0..vocabulary-1
    """
    proposer = make()
    if not isinstance(proposer, Proposer):
        raise ProposerError(f"{type(proposer).__name__} lacks a name or a method of the Proposer protocol")
    if not isinstance(proposer.name, str) or not proposer.name:
        raise ProposerError(f"a proposer's name must be a non-empty string, not {proposer.name!r}")
    first = _drive(make(), vocabulary, deferred=False)
    second = _drive(make(), vocabulary, deferred=False)
    if first != second:
        raise ProposerError("two fresh proposers drafted differently in the same calls: drafting must be deterministic")
    _drive(make(), vocabulary, deferred=True)
    _check_repeatable(make(), vocabulary)
    _check_aborts(make())
    _check_two_calls(make(), vocabulary)
    _check_attachments(make())


def _checked(proposer: Proposer, context: Context, limits: DraftLimits, vocabulary: int) -> Draft:
    before = context.tokens.copy()
    draft = proposer.propose(context, limits)
    if not isinstance(draft, Draft):
        raise ProposerError(f"propose returned {type(draft).__name__}, not a Draft")
    draft.check(limits, vocabulary)
    for what, array, kind in (
        ("tokens", draft.tokens, np.int32), ("parents", draft.parents, np.int32),
        ("probabilities", draft.probabilities, np.float32), ("sources", draft.sources, np.int8),
    ):  # fmt: skip
        if array.dtype != kind:
            raise ProposerError(f"a draft's {what} must be {np.dtype(kind).name}, not {array.dtype}")
    p = draft.probabilities
    if len(p) and not (np.isfinite(p).all() and p.min() >= 0.0 and p.max() <= 1.0 + 1e-6):
        raise ProposerError(f"probabilities must lie in 0..1, got {p.min()}..{p.max()}")
    inner = draft.parents >= 0
    if bool((p[inner] > p[draft.parents[inner]] + 1e-6).any()):
        raise ProposerError("a node is accepted only if its parent is: its probability can't be the larger one")
    if not np.array_equal(context.tokens, before):
        raise ProposerError("propose changed the context")
    return draft


def _drive(proposer: Proposer, vocabulary: int, deferred: bool) -> list[list[int]]:
    """Whole trajectories, greedily verified against the script. Returns every draft, to compare runs."""
    drafts: list[list[int]] = []
    shared = TrajectoryMemory("shared")
    for trajectory in range(3):
        memory = TrajectoryMemory(str(trajectory), "kit", shared=shared if trajectory else None)
        for prompt, spans, output in scripted_calls(seed=trajectory):
            context = memory.extend(prompt, spans)
            proposer.begin(context)
            at = 0
            while at < len(output):
                limits = _LIMITS[len(drafts) % len(_LIMITS)]
                left = len(output) - at - 1
                limits = replace(limits, max_depth=min(limits.max_depth, left))
                draft = _checked(proposer, context, limits, vocabulary)
                if deferred:
                    proposer.learn(context)
                drafts.append([*draft.tokens.tolist(), *draft.parents.tolist()])
                emitted = output[at : at + accept(draft, output[at : len(output) - 1]) + 1]
                memory.append(context, emitted)
                proposer.observe(context, emitted)
                if not deferred:
                    proposer.learn(context)
                at += len(emitted)
            proposer.end(context)
            memory.close(context)
    return drafts


def _check_repeatable(proposer: Proposer, vocabulary: int) -> None:
    """Asking twice without anything in between gives the same draft (a retracted step is proposed again)."""
    memory = TrajectoryMemory("twice")
    for prompt, spans, output in scripted_calls(2):
        context = memory.extend(prompt, spans)
        proposer.begin(context)
        limits = _LIMITS[0]
        first = _checked(proposer, context, limits, vocabulary)
        again = _checked(proposer, context, limits, vocabulary)
        if first.tokens.tolist() != again.tokens.tolist() or first.parents.tolist() != again.parents.tolist():
            raise ProposerError("two proposals for the same context differ")
        memory.append(context, output)
        proposer.observe(context, output)
        proposer.end(context)
        memory.close(context)


def _check_aborts(proposer: Proposer) -> None:
    """A call may end at any point, and end twice; the next one must work."""
    memory = TrajectoryMemory("aborts")
    for stage, (prompt, spans, output) in enumerate(scripted_calls(6)):
        context = memory.extend(prompt, spans)
        proposer.begin(context)
        if stage > 0:
            proposer.propose(context, _LIMITS[0])
        if stage > 1:
            memory.append(context, output[:3])
            proposer.observe(context, output[:3])
        if stage > 2:
            proposer.propose(context, _LIMITS[1])
        if stage > 3:
            proposer.learn(context)
            proposer.learn(context)
        proposer.end(context)
        proposer.end(context)
        memory.close(context)


def _check_two_calls(proposer: Proposer, vocabulary: int) -> None:
    """Two open calls of one trajectory, step by step in turn."""
    memory = TrajectoryMemory("both")
    open_calls = []
    for prompt, spans, output in scripted_calls(2):
        context = memory.extend(prompt, spans)
        proposer.begin(context)
        open_calls.append((context, output))
    for at in range(0, 40, 2):
        for context, output in open_calls:
            _checked(proposer, context, _LIMITS[at % 2], vocabulary)
            memory.append(context, output[at : at + 2])
            proposer.observe(context, output[at : at + 2])
            proposer.learn(context)
    for context, _ in open_calls:
        proposer.end(context)
        memory.close(context)


def _check_attachments(proposer: Proposer) -> None:
    """What is kept with a trajectory counts in its budget."""
    memory = TrajectoryMemory("bytes", "kit", shared=TrajectoryMemory("shared"))
    prompt, spans, output = scripted_calls(1)[0]
    context = memory.extend(prompt, spans)
    proposer.begin(context)
    proposer.propose(context, _LIMITS[0])
    memory.append(context, output)
    proposer.observe(context, output)
    proposer.end(context)
    assert memory.shared is not None
    for held in (memory, memory.shared):
        for name, attachment in held.attachments.items():
            if not isinstance(getattr(attachment, "nbytes", None), int):
                raise ProposerError(f"attachment {name!r} has no nbytes (int): it would escape the memory's budget")
