"""MixtureProposer: drafts trees by a log-linear mixture of many contexts, learned online.

Called by engines, the replay and the SGLang plugin through the Proposer protocol. May import numpy,
agentspec.memory and its neighbours in drafting. mixing.py has the arithmetic and says what the model is.

What it keeps, and where
    Ledger      per trajectory, in memory.attachments: the own table (trajectory_bytes), and without a
                namespace the lexical weights (those that know tokens)
    Namespace   per namespace, in memory.shared.attachments: the shared table (namespace_bytes), the weights,
                and the outputs that wait to enter the table
    _alone      the other weights of trajectories without a namespace: they say how far a context of some
                shape is to be trusted, and no text can be read out of them
A trajectory's outputs enter its namespace's table when a call of another trajectory begins there: until then
they are in its own table, and counting them twice would mislead the mixture.

When it works
    begin       inserts what the prompt added (1 to 2 µs a token)
    propose     reads the tables only
    observe     notes what came; the expensive part waits for learn, or else for the next observe or end
    learn       learns from what came and inserts it
"""

from __future__ import annotations

import threading
import zipfile
from collections import OrderedDict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting import mixing
from agentspec.drafting.contexts import CONTEXTS, STATE
from agentspec.drafting.mixing import FEATURES, LEXICAL, MAX_NODES, PAIRS, PRESENT, STRIDE
from agentspec.drafting.policy import NO_COST
from agentspec.drafting.proposer import Draft, DraftLimits
from agentspec.drafting.tables import UInt32, new_table
from agentspec.drafting.vocabulary import Vocabulary
from agentspec.errors import InvalidRequestError
from agentspec.memory import Context, Source

__all__ = ["MixtureProposer", "Prior", "plain_weights"]

RATE = 0.1  # AdaGrad's step
PLAIN = 0.3  # what a present successor is worth before anything is known
_ROLES = {"system": 1, "user": 2, "tool": 3, "assistant": 4}
_MOST_PENDING = 64  # outputs of one trajectory that wait to enter its namespace's table
_FIRST_TABLE = 4 * 2**20  # bytes of a namespace's first table
_Output = tuple[NDArray[np.int32], UInt32]  # an output's tokens, and the hashes of each one's contexts
_SETTLE = 64  # tokens from whose reading a call's state is had
# Where a candidate came from (mixing.KIND), as the memory names it.
_SOURCES = np.array(
    [Source.PROMPT, Source.TOOL, Source.OUTPUT, Source.SEED, 0, 0, 0, Source.SHARED, Source.LANGUAGE], np.int8
)
_NONE: UInt32 = np.zeros(1, np.uint32)


def plain_weights() -> NDArray[np.float32]:
    """float32[2 * FEATURES]: weights, then AdaGrad's sums of squares, before anything was
    learned anywhere."""
    weights = np.zeros(2 * FEATURES, np.float32)
    for pair in range(PAIRS):
        weights[pair * STRIDE : pair * STRIDE + PRESENT] = PLAIN
    return weights


class Prior:
    """Weights to start from: `alone` for trajectories without a namespace, `shared` for namespaces.

    Each is float32[2 * FEATURES] as plain_weights() makes them; the sums of squares are capped where they
    were made, so that the weights still move.
    """

    def __init__(self, alone: NDArray[np.float32], shared: NDArray[np.float32]) -> None:
        for weights in (alone, shared):
            if weights.shape != (2 * FEATURES,):
                raise InvalidRequestError(f"prior: needed {2 * FEATURES} numbers, got shape {weights.shape}")
        self.alone = np.ascontiguousarray(alone, dtype=np.float32)
        self.shared = np.ascontiguousarray(shared, dtype=np.float32)

    @classmethod
    def plain(cls) -> Prior:
        """Nothing learned anywhere."""
        return cls(plain_weights(), plain_weights())

    @classmethod
    def load(cls, path: str | Path | None = None) -> Prior:
        """A prior that benchmarks/make_prior.py saved; None: the one that ships with agentspec."""
        if path is None:
            with (files("agentspec.drafting") / "prior.npz").open("rb") as handle:
                return cls._read(handle)
        try:
            with open(path, "rb") as handle:
                return cls._read(handle)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InvalidRequestError(f"prior: needed a file that make_prior.py saved, got {path} ({error})") from error

    @classmethod
    def _read(cls, handle: Any) -> Prior:
        with np.load(handle, allow_pickle=False) as saved:
            return cls(saved["alone"].astype(np.float32), saved["shared"].astype(np.float32))

    def save(self, path: str | Path) -> None:
        """float16, compressed."""
        with open(path, "wb") as handle:
            np.savez_compressed(handle, alone=self.alone.astype(np.float16), shared=self.shared.astype(np.float16))


class Namespace:
    """What the trajectories of one namespace share.

    The table starts small, so that a small namespace costs little memory and few cache misses, and is made
    again four times as large, from the outputs kept until then, when it fills up.
    """

    def __init__(self, nbytes: int, weights: NDArray[np.float32], pairs: int) -> None:
        self.budget = nbytes
        self.pairs = pairs
        self.table = new_table(min(nbytes, _FIRST_TABLE))
        self.weights = weights
        self.lexical = np.zeros(2 * LEXICAL, np.float32)
        self.lock = threading.Lock()
        self.pending: OrderedDict[int, list[_Output]] = OrderedDict()
        self.published: list[tuple[_Output, int]] | None = [] if self.table.nbytes * 2 < nbytes else None
        self.trajectories = 0

    @property
    def nbytes(self) -> int:
        with self.lock:
            outputs = [output for waiting in self.pending.values() for output in waiting]
            outputs += [output for output, _ in self.published or ()]
        held = sum(tokens.nbytes + hashed.nbytes for tokens, hashed in outputs)
        return int(self.table.nbytes + self.weights.nbytes + self.lexical.nbytes + held)

    def add(self, number: int, output: _Output) -> None:
        """An output of trajectory `number`; it waits to enter the table."""
        with self.lock:
            waiting = self.pending.setdefault(number, [])
            waiting.append(output)
            if len(waiting) > _MOST_PENDING:
                self._insert(waiting.pop(0), number)

    def publish(self, number: int) -> None:
        """Insert what trajectories other than `number` have put out."""
        with self.lock:
            for other in [n for n in self.pending if n != number]:
                for output in self.pending.pop(other):
                    self._insert(output, other)

    def _insert(self, output: _Output, number: int) -> None:
        tokens, hashed = output
        if self.published is not None:
            self.published.append((output, number))
            # Every token of an output may make an entry for each context.
            known = int(self.table[2]) + len(tokens)
            if known * CONTEXTS > 4 * int(self.table[0]):
                self.table = new_table(min(self.budget, 4 * self.table.nbytes))
                for (tokens, hashed), other in self.published:
                    mixing.publish(self.table, tokens, hashed, len(tokens), other & 7, self.pairs)
                if self.table.nbytes * 2 > self.budget:
                    self.published = None
                return
        mixing.publish(self.table, tokens, hashed, len(tokens), number & 7, self.pairs)


class Ledger:
    """What one trajectory's memory has taught."""

    def __init__(self, nbytes: int, weights: NDArray[np.float32], namespace: Namespace | None) -> None:
        self.table = new_table(nbytes)
        self.weights = weights
        self.number = 0
        self.lexical = np.zeros(2 * LEXICAL, np.float32) if namespace is None else namespace.lexical
        self.alone = namespace is None
        if namespace is not None:
            namespace.trajectories += 1
            self.number = namespace.trajectories
        self.segments = 0
        self.state = np.zeros(STATE, np.int64)
        self.state[6] = _ROLES["user"]

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes + (self.lexical.nbytes if self.alone else 0))


class _Call:
    """One open call."""

    __slots__ = (
        "drafted", "kept", "kept_tokens", "known", "learned", "learned_state", "most", "nodes", "paths",
        "state",
    )  # fmt: skip

    def __init__(self, state: NDArray[np.int64], size: int) -> None:
        self.state = state
        self.learned_state = state.copy()
        self.known = size
        self.learned = size
        self.nodes = np.full((mixing.TREE, MAX_NODES + 1), -1, np.int32)
        self.paths = np.zeros(MAX_NODES + 1, np.float64)
        self.most = 0
        self.drafted = 0
        self.kept: list[UInt32] = []
        self.kept_tokens: list[NDArray[np.int32]] = []


class MixtureProposer:
    """Drafts the tree with the most expected accepted tokens, by a mixture of contexts learned online.

    tokenizer:        the target's; without one it drafts by ids alone, some per cent less well
    max_draft:        most nodes of a draft (at most 64)
    trajectory_bytes: the own table of each live trajectory
    namespace_bytes:  the shared table of each namespace
    prior:            weights to start from, or a path to those that benchmarks/make_prior.py saved
    pairs:            bits of mixing.PAIR_NAMES that are used (for ablations)
    """

    name = "mixture"

    def __init__(
        self,
        tokenizer: Any = None,
        max_draft: int = MAX_NODES,
        trajectory_bytes: int = 4 * 2**20,
        namespace_bytes: int = 64 * 2**20,
        prior: Prior | str | Path | None = None,
        pairs: int = (1 << PAIRS) - 1,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if not 0 <= max_draft <= MAX_NODES:
            raise InvalidRequestError(f"max_draft: needed 0..{MAX_NODES}, got {max_draft!r}")
        self.max_draft = max_draft
        self.trajectory_bytes = trajectory_bytes
        self.namespace_bytes = namespace_bytes
        self.vocabulary = Vocabulary.of(tokenizer) if vocabulary is None else vocabulary
        self.pairs = pairs
        self.prior = prior if isinstance(prior, Prior) else Prior.load(prior)
        self._alone = self.prior.alone.copy()
        self._last: NDArray[np.float32] = self.prior.shared
        self.score = np.zeros(3, np.float64)  # log-loss in nats, tokens that were no candidate, tokens
        self._calls: dict[int, _Call] = {}

    # ---- the protocol -------------------------------------------------------------------------

    def begin(self, context: Context) -> None:
        memory = context.memory
        with memory.lock:
            namespace = self._namespace(context)
            ledger = self._ledger(context, namespace)
            if namespace is not None:
                namespace.publish(ledger.number)
            self._ingest(context, ledger)
            tokens = context.tokens
            state = ledger.state.copy()
            mixing.settle(state, tokens, max(0, len(tokens) - _SETTLE), len(tokens), self.vocabulary.classes)
            self._calls[id(context)] = _Call(state, len(tokens))

    def propose(self, context: Context, limits: DraftLimits) -> Draft:
        call = self._calls.get(id(context))
        if call is None:
            self.begin(context)
            call = self._calls[id(context)]
        namespace = self._namespace(context)
        ledger = self._ledger(context, namespace)
        most = min(limits.max_tokens, self.max_draft)
        call.most = most
        call.drafted = 0
        if most <= 0 or limits.max_depth <= 0:
            call.nodes[3, most] = -1
            return Draft.empty()
        buffer = context.tokens
        n = mixing.propose(
            ledger.table, _NONE if namespace is None else namespace.table, self.vocabulary.language,
            ledger.weights,
            ledger.lexical, self.pairs, buffer, context.prompt_length, len(buffer), call.state,
            self.vocabulary.classes, most,
            limits.max_depth, limits.tree, limits.price, NO_COST if limits.cost is None else limits.cost,
            call.nodes, call.paths,
        )  # fmt: skip
        call.drafted = n
        if n == 0:
            return Draft.empty()
        return Draft(
            call.nodes[0, :n].copy(),
            call.nodes[1, :n].copy(),
            call.paths[:n].astype(np.float32),
            _SOURCES[call.nodes[4, :n]],
        )

    def observe(self, context: Context, emitted: NDArray[np.int32]) -> None:
        call = self._calls.get(id(context))
        if call is None:
            return
        if call.learned < call.known:
            self.learn(context)
        buffer = context.tokens
        call.known = min(call.known, len(buffer))
        mixing.follow(
            call.state, buffer, call.known, len(buffer), call.most, call.nodes, call.drafted,
            self.vocabulary.classes,
        )  # fmt: skip
        call.known = len(buffer)
        call.drafted = 0
        call.most = 0
        call.nodes[3, 0] = -1

    def learn(self, context: Context) -> None:
        call = self._calls.get(id(context))
        if call is None:
            return
        # An aborted call's output may have been cut to what was delivered.
        call.known = min(call.known, len(context.tokens))
        if call.learned >= call.known:
            return
        namespace = self._namespace(context)
        ledger = self._ledger(context, namespace)
        count = call.known - call.learned
        kept = np.empty((count, CONTEXTS), np.uint32)
        kept_tokens = np.empty(count, np.int32)
        mixing.learn(
            ledger.table, _NONE if namespace is None else namespace.table, self.vocabulary.language,
            ledger.weights,
            ledger.lexical, self.pairs, RATE, context.tokens, context.prompt_length, call.learned,
            call.known, call.learned_state,
            self.vocabulary.classes, kept, kept_tokens, self.score,
        )  # fmt: skip
        call.learned = call.known
        call.state[:] = call.learned_state
        if namespace is not None:
            call.kept.append(kept)
            call.kept_tokens.append(kept_tokens)

    def end(self, context: Context) -> None:
        call = self._calls.get(id(context))
        if call is None:
            return
        self.learn(context)
        del self._calls[id(context)]
        namespace = self._namespace(context)
        ledger = self._ledger(context, namespace)
        ledger.state[:] = call.learned_state
        if namespace is not None and call.kept:
            delivered = len(context.output)
            tokens, hashed = np.concatenate(call.kept_tokens), np.concatenate(call.kept)
            namespace.add(ledger.number, (tokens[:delivered], hashed[:delivered]))

    @property
    def weights_alone(self) -> NDArray[np.float32]:
        """What trajectories without a namespace have taught (a view)."""
        weights: NDArray[np.float32] = self._alone
        return weights

    def weights_of_last_namespace(self) -> NDArray[np.float32]:
        """What the namespace that was made last has taught (a view); the prior's, if there was none."""
        return self._last

    # ---- inside -------------------------------------------------------------------------------

    def _namespace(self, context: Context) -> Namespace | None:
        shared = context.memory.shared
        if shared is None:
            return None
        found = shared.attachments.get(self.name)
        if found is None:
            self._last = self.prior.shared.copy()
            found = shared.attachments[self.name] = Namespace(self.namespace_bytes, self._last, self.pairs)
        return found

    def _ledger(self, context: Context, namespace: Namespace | None) -> Ledger:
        memory = context.memory
        ledger = memory.attachments.get(self.name)
        if ledger is None:
            weights = self._alone if namespace is None else namespace.weights
            ledger = Ledger(self.trajectory_bytes, weights, namespace)
            memory.attachments[self.name] = ledger
        return ledger

    def _ingest(self, context: Context, ledger: Ledger) -> None:
        """Insert what the memory holds and the own table doesn't: the prompt's new parts, and seeds."""
        memory = context.memory
        known = {segment.start for segment in context.added}
        first = min(ledger.segments, memory.segment_count)
        for segment in memory.segments_from(first):
            if segment.start in known or segment.source in (Source.OUTPUT, Source.CURRENT):
                continue
            state = np.zeros(STATE, np.int64)
            self._insert(ledger, memory.tokens, segment.start, segment.end, int(segment.source), state)
        ledger.segments = memory.segment_count
        for segment in context.added:
            if segment.role in _ROLES and segment.role != "assistant":
                ledger.state[6] = _ROLES[segment.role]
            elif segment.source is Source.TOOL:
                ledger.state[6] = _ROLES["tool"]
            for start, end, at in context.layout.tolist():
                low, high = max(at, segment.start), min(at + end - start, segment.end)
                if low < high:
                    low, high = low - at + start, high - at + start
                    self._insert(ledger, context.tokens, low, high, int(segment.source), ledger.state)

    def _insert(
        self,
        ledger: Ledger,
        tokens: NDArray[np.int32],
        start: int,
        end: int,
        source: int,
        state: NDArray[np.int64],
    ) -> None:
        kind = {Source.PROMPT: 0, Source.TOOL: 1, Source.OUTPUT: 2, Source.CURRENT: 2}.get(Source(source), 3)
        mixing.ingest(
            ledger.table, tokens, start, end, kind, self.pairs, state, self.vocabulary.classes
        )  # fmt: skip
