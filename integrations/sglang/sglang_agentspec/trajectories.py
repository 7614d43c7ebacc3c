"""Which trajectory a request belongs to. Their memories lie in one MemoryStore, within its byte budget.

A request that names its trajectory gets that one, inside its scope. One that names none is followed by its
prompt (agentspec.memory.Ends): if the prompt begins with everything that an unnamed trajectory of the same
scope has seen (its last prompt and its last output, its final end-of-sequence token aside), it is that
trajectory's next call.

Deterministic: a function of the calls made, never of a clock; under tensor parallelism every rank decides
alike. May import nothing from sglang.
"""

from __future__ import annotations

import numpy as np

from agentspec.drafting import WidthPolicy
from agentspec.memory import Ends, MemoryStore, TrajectoryMemory

__all__ = ["Trajectory", "TrajectoryBook"]

Key = tuple[str | None, str]  # of the store: namespace, id


class Trajectory:
    """One trajectory: its memory, and how many of its calls are running."""

    __slots__ = ("id", "key", "memory", "named", "open_calls", "policy", "scope")

    def __init__(self, scope: str, id: str, key: Key, memory: TrajectoryMemory, named: bool) -> None:
        self.scope = scope
        self.id = id
        self.key = key
        self.memory = memory
        self.named = named
        self.open_calls = 0
        self.policy: WidthPolicy | None = None  # shared by its calls: what drafting gained in the last one


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
        self._ends: Ends[Trajectory] = Ends()

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
            self._ends.forget(trajectory)
            trajectory.memory = memory
        self._ends.forget(trajectory)
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
        self._ends.hold(trajectory, trajectory.scope, _bytes(seen))

    def _followed(self, scope: str, prompt: np.ndarray) -> Trajectory | None:
        """Whose next call the prompt is."""
        for trajectory in self._ends.continued(scope, _bytes(prompt)):
            if trajectory.key in self.store:  # the oldest of equals: what they hold is the same
                return trajectory
        return None

    def _prune(self) -> None:
        """Drop what the store has evicted, once that may be half of what is kept here."""
        if len(self._trajectories) < 64 + 2 * len(self.store):
            return
        for key, trajectory in list(self._trajectories.items()):
            if key not in self.store and not trajectory.open_calls:
                self._ends.forget(trajectory)
                del self._trajectories[key]


def _bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
