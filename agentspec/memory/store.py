"""MemoryStore: many trajectory memories by id. Called by the engines and the SGLang plugin."""

from __future__ import annotations

import threading

from agentspec.memory.trajectory import TrajectoryMemory

__all__ = ["MemoryStore"]


class MemoryStore:
    """The memories of one engine, one a trajectory, by (namespace, id). Thread-safe."""

    def __init__(self) -> None:
        self._memories: dict[tuple[str | None, str], TrajectoryMemory] = {}
        self._lock = threading.Lock()

    def open(self, id: str, namespace: str | None = None) -> TrajectoryMemory:
        """The memory of trajectory `id`, made if there is none."""
        with self._lock:
            memory = self._memories.get((namespace, id))
            if memory is None:
                memory = self._memories[namespace, id] = TrajectoryMemory(id, namespace)
            return memory

    def forget(self, id: str, namespace: str | None = None) -> None:
        """Drop a memory; nothing happens if there is none."""
        with self._lock:
            self._memories.pop((namespace, id), None)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(memory.nbytes for memory in self._memories.values())

    def __len__(self) -> int:
        return len(self._memories)
