"""Which trajectory a request belongs to. Their memories lie in one MemoryStore, within its byte budget.

A request that names its trajectory gets that one, inside its scope. One that names none is followed by its
prompt: if the prompt begins with everything that an unnamed trajectory of the same scope has seen (its last
prompt and its last output, its final end-of-sequence token aside), it is that trajectory's next call.
Nothing leaks by that: all that is joined is in the prompt already. So two users with the same first prompt
are never merged, a common system prompt joins nobody, and a trajectory that has gone on can't be claimed by
an older prefix of it.

Deterministic: a function of the calls made, never of a clock; under tensor parallelism every rank decides
alike. May import nothing from sglang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from agentspec.drafting import WidthPolicy
from agentspec.memory import MemoryStore, TrajectoryMemory

__all__ = ["Trajectory", "TrajectoryBook"]

Key = tuple[str | None, str]  # of the store: namespace, id
End = tuple[str, int, bytes]  # where a next call can join: scope, length, digest


class Trajectory:
    """One trajectory: its memory, and how many of its calls are running."""

    __slots__ = ("end", "id", "key", "memory", "named", "open_calls", "policy", "scope")

    def __init__(self, scope: str, id: str, key: Key, memory: TrajectoryMemory, named: bool) -> None:
        self.scope = scope
        self.id = id
        self.key = key
        self.memory = memory
        self.named = named
        self.open_calls = 0
        self.policy: WidthPolicy | None = None  # shared by its calls: what drafting gained in the last one
        self.end: End | None = None


class TrajectoryBook:
    """All trajectories of one scheduler process. Not thread-safe: one thread schedules.

    budget: bytes that their memories may take; MemoryStore evicts, least recently used first.
    """

    def __init__(self, budget: int) -> None:
        self.store = MemoryStore(budget)
        self._made = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything (SGLang's flush_cache)."""
        self.store.clear()
        self._trajectories: dict[Key, Trajectory] = {}
        self._ends: dict[End, list[Trajectory]] = {}
        self._lengths: dict[str, dict[int, int]] = {}  # scope -> length of a joinable end -> how many

    def __len__(self) -> int:
        return len(self.store)

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    def open(
        self,
        scope: str,
        name: str | None,
        prompt: np.ndarray,
        namespace: str | None = None,
        follow: bool = True,
    ) -> Trajectory:
        """The trajectory of a call that begins with `prompt` (int32[n]); extend its memory at once, close()
        it once.

        follow: whether a call without a name may join the trajectory that its prompt extends. Raises
        MemoryBudgetError if running calls leave no room.
        """
        found = self._followed(scope, prompt) if name is None and follow else None
        if found is not None:
            key, name = found.key, found.id
        else:
            if name is None:
                self._made += 1
                name = f"followed:{self._made}"
            # The scope is in both parts, so that two tenants never share a memory nor a namespace.
            key = None if namespace is None else repr((scope, namespace)), repr((scope, name))
        memory = self.store.open(key[1], key[0])
        trajectory = self._trajectories.get(key)
        if trajectory is None:
            self._prune()
            trajectory = Trajectory(scope, name, key, memory, named=not name.startswith("followed:"))
            self._trajectories[key] = trajectory
        elif trajectory.memory is not memory:  # evicted since its last call
            self._forget_end(trajectory)
            trajectory.memory = memory
        self._forget_end(trajectory)
        trajectory.open_calls += 1
        return trajectory

    def close(self, trajectory: Trajectory, seen: np.ndarray | None) -> None:
        """A call is over. seen: its prompt and output (int32[n]), without a final end token; None if it was
        aborted, so that nobody can join there."""
        trajectory.open_calls -= 1
        if trajectory.named or trajectory.open_calls or seen is None or not len(seen):
            return
        if self._trajectories.get(trajectory.key) is not trajectory:  # forgotten while the call ran
            return
        trajectory.end = (trajectory.scope, len(seen), _digest(seen))
        self._ends.setdefault(trajectory.end, []).append(trajectory)
        lengths = self._lengths.setdefault(trajectory.scope, {})
        lengths[len(seen)] = lengths.get(len(seen), 0) + 1

    def _followed(self, scope: str, prompt: np.ndarray) -> Trajectory | None:
        """The longest joinable end that `prompt` begins with: one pass over the prompt, whatever is held."""
        lengths: Iterable[int] = self._lengths.get(scope, ())
        fitting = [n for n in lengths if n <= len(prompt)]
        digests = _prefix_digests(prompt, fitting)
        for length in sorted(fitting, reverse=True):
            for trajectory in self._ends.get((scope, length, digests[length]), ()):
                if trajectory.key in self.store:  # the oldest of equals: what they hold is the same
                    return trajectory
        return None

    def _prune(self) -> None:
        """Drop what the store has evicted, once that may be half of what is kept here."""
        if len(self._trajectories) < 64 + 2 * len(self.store):
            return
        for key, trajectory in list(self._trajectories.items()):
            if key not in self.store and not trajectory.open_calls:
                self._forget_end(trajectory)
                del self._trajectories[key]

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
