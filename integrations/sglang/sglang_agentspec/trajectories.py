"""Which trajectory a request belongs to, and the memories of all of them within one byte budget.

A request that names its trajectory gets that one, inside its scope. One that names none is followed by its prompt:
if the prompt begins with everything that an unnamed trajectory of the same scope has seen (its last prompt and its
last output, its final end-of-sequence token aside), it is that trajectory's next call. Nothing leaks by that: all
that is joined is in the prompt already. So two users with the same first prompt are never merged, a common system
prompt joins nobody, and a trajectory that has gone on can't be claimed by an older prefix of it.

Deterministic: what is evicted depends on the order of calls and on sizes, never on a clock; under tensor
parallelism every rank decides alike. May import nothing from sglang.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from agentspec.drafting import WidthPolicy
from agentspec.memory import MemoryStore, TrajectoryMemory

__all__ = ["Trajectory", "TrajectoryBook"]


class Trajectory:
    """One trajectory: its memory, and how many of its calls are running."""

    __slots__ = ("end", "id", "memory", "named", "namespace", "open_calls", "policy", "scope", "size")

    def __init__(self, scope: str, id: str, memory: TrajectoryMemory, namespace: str | None, named: bool) -> None:
        self.scope = scope
        self.id = id
        self.memory = memory
        self.namespace = namespace
        self.named = named
        self.open_calls = 0
        self.policy: WidthPolicy | None = None  # shared by its calls: what drafting gained in the last one
        self.size = 0  # the memory's bytes when its last call closed
        self.end: tuple[str, int, bytes] | None = None  # where a next call can join: scope, length, digest


class TrajectoryBook:
    """All trajectories of one scheduler process, least recently used first. Not thread-safe: one thread schedules.

    budget: bytes that their memories may take. A trajectory with a running call is never evicted.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything (SGLang's flush_cache)."""
        self._store = MemoryStore()
        self._trajectories: OrderedDict[tuple[str, str, str | None], Trajectory] = OrderedDict()
        self._ends: dict[tuple[str, int, bytes], list[Trajectory]] = {}
        self._lengths: dict[str, dict[int, int]] = {}  # scope -> length of a joinable end -> how many
        self._made = 0
        self._total = 0  # of all sizes

    def __len__(self) -> int:
        return len(self._trajectories)

    @property
    def nbytes(self) -> int:
        return sum(t.memory.nbytes for t in self._trajectories.values())

    def open(
        self,
        scope: str,
        name: str | None,
        prompt: np.ndarray,
        namespace: str | None = None,
        follow: bool = True,
    ) -> Trajectory:
        """The trajectory of a call that begins with `prompt` (int32[n]); held until close().

        follow: whether a call without a name may join the trajectory that its prompt extends.
        """
        trajectory = None
        if name is None:
            trajectory = self._followed(scope, prompt) if follow else None
            if trajectory is None:
                self._made += 1
                name = f"followed:{self._made}"
        if trajectory is None:
            assert name is not None
            key = (scope, name, namespace)
            trajectory = self._trajectories.get(key)
            if trajectory is None:
                # The store's namespace carries the scope: two tenants never share one.
                shared = None if namespace is None else f"{scope}/{namespace}"
                memory = self._store.open(repr(key), shared)
                trajectory = Trajectory(scope, name, memory, namespace, not name.startswith("followed:"))
                self._trajectories[key] = trajectory
        self._trajectories.move_to_end((scope, trajectory.id, trajectory.namespace))
        self._forget_end(trajectory)
        trajectory.open_calls += 1
        return trajectory

    def close(self, trajectory: Trajectory, seen: np.ndarray | None) -> None:
        """A call is over. seen: its prompt and output (int32[n]), without a final end token; None if it was
        aborted, so that nobody can join there."""
        trajectory.open_calls -= 1
        if not trajectory.named and trajectory.open_calls == 0 and seen is not None and len(seen):
            trajectory.end = (trajectory.scope, len(seen), _digest(seen))
            self._ends.setdefault(trajectory.end, []).append(trajectory)
            lengths = self._lengths.setdefault(trajectory.scope, {})
            lengths[len(seen)] = lengths.get(len(seen), 0) + 1
        size = trajectory.memory.nbytes
        self._total += size - trajectory.size
        trajectory.size = size
        if self._total > self.budget:
            self._shrink()

    def _shrink(self) -> None:
        """Evict least recently used trajectories without running calls until the budget is kept."""
        for key, trajectory in list(self._trajectories.items()):
            if self._total <= self.budget:
                return
            if trajectory.open_calls:
                continue
            self._total -= trajectory.size
            self._forget_end(trajectory)
            del self._trajectories[key]
            self._store.forget(trajectory.memory.id, trajectory.memory.namespace)
            self.evicted += 1

    def _followed(self, scope: str, prompt: np.ndarray) -> Trajectory | None:
        """The longest joinable end that `prompt` begins with. One hash of the prompt for each length held that
        fits: a scope's lengths are few, and only calls that name no trajectory pay for it."""
        lengths: Iterable[int] = self._lengths.get(scope, ())
        fitting = sorted((n for n in lengths if n <= len(prompt)), reverse=True)
        if not fitting:
            return None
        digests = _prefix_digests(prompt, fitting)
        for length in fitting:
            found = self._ends.get((scope, length, digests[length]))
            if found:
                return found[0]  # the oldest of equals: what they hold is the same
        return None

    def _forget_end(self, trajectory: Trajectory) -> None:
        if trajectory.end is None:
            return
        scope, length, _ = trajectory.end
        ends = self._ends[trajectory.end]
        ends.remove(trajectory)
        if not ends:
            del self._ends[trajectory.end]
        lengths = self._lengths[scope]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[scope]
        trajectory.end = None


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


def _prefix_digests(tokens: np.ndarray, lengths: Iterable[int]) -> dict[int, bytes]:
    """The digests of tokens[:n] for all given n, in one pass over the tokens."""
    data = np.ascontiguousarray(tokens, dtype=np.int32)
    running = hashlib.blake2b(digest_size=16)
    digests, at = {}, 0
    for length in sorted(lengths):
        running.update(data[at:length].tobytes())
        digests[length] = running.copy().digest()
        at = length
    return digests
