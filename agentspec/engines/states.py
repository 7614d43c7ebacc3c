"""States: what LocalEngine holds for each trajectory, under a byte budget for keys and values.

The least recently used trajectory's cache goes first, never one in use; what it held is computed again when the
trajectory's next call comes. Memory (agentspec.memory) has its own budget. Called by LocalEngine.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting import WidthPolicy
from agentspec.engines.conversations import Conversation, Key, key_of
from agentspec.errors import InvalidRequestError
from agentspec.loop import Trajectory
from agentspec.memory import MemoryStore, TrajectoryMemory

if TYPE_CHECKING:
    from agentspec.engines.forward import KVCache

__all__ = ["States", "TrajectoryState"]


@dataclass(slots=True)
class TrajectoryState(Conversation):
    """What is held for one trajectory, its conversation included.

    cache:  its keys and values, or None: evicted, or not computed yet
    cached: int32[cache.length], the ids that they belong to
    """

    memory: TrajectoryMemory = field(kw_only=True)
    cache: KVCache | None = None
    cached: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    policy: WidthPolicy | None = None

    def drop_cache(self) -> None:
        self.cache = None
        self.cached = self.cached[:0]


class States:
    """The states by trajectory, most recently used last. Thread-safe.

    kv_budget: most bytes of keys and values, all trajectories together
    most:      most trajectories whose history is kept
    """

    def __init__(self, store: MemoryStore, kv_budget: int, most: int = 4096) -> None:
        if kv_budget < 1:
            raise InvalidRequestError(f"kv_budget: needed a number of bytes >= 1, got {kv_budget!r}")
        self.lock = threading.Lock()
        self.kv_budget = kv_budget
        self.evicted = 0  # caches that had to go so far
        self._store = store
        self._most = most
        self._states: OrderedDict[Key, TrajectoryState] = OrderedDict()

    def get(self, trajectory: Trajectory) -> TrajectoryState:
        """The trajectory's state, made if there is none; now the most recently used."""
        key = key_of(trajectory)
        with self.lock:
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = TrajectoryState(
                    memory=self._store.open(trajectory.id, trajectory.namespace)
                )
            self._states.move_to_end(key)
            return state

    def begin(self, trajectory: Trajectory) -> TrajectoryState:
        """As `get`, for a call: not evicted until `end`. Raises MemoryBudgetError."""
        state = self.get(trajectory)
        with self.lock:
            memory = self._store.open(trajectory.id, trajectory.namespace)
            if memory is not state.memory:  # evicted meanwhile: seeds have to be taken again
                state.memory = memory
                state.seeds_taken.clear()
            state.in_use += 1
        return state

    def end(self, state: TrajectoryState) -> None:
        with self.lock:
            state.in_use -= 1
        self.trim()

    def trim(self) -> None:
        """Bring the caches within the budget, as far as those not in use allow."""
        with self.lock:
            total = sum(s.cache.nbytes for s in self._states.values() if s.cache is not None)
            for state in self._states.values():
                if total <= self.kv_budget:
                    break
                if state.cache is not None and not state.in_use:
                    total -= state.cache.nbytes
                    state.drop_cache()
                    self.evicted += 1
            surplus = len(self._states) - self._most
            if surplus > 0:
                for key in [k for k, s in self._states.items() if not s.in_use][:surplus]:
                    del self._states[key]

    def forget(self, trajectory: Trajectory) -> None:
        """Drop all that is held for a trajectory, its memory too."""
        with self.lock:
            self._states.pop(key_of(trajectory), None)
        self._store.forget(trajectory.id, trajectory.namespace)

    def drop_broken(self) -> None:
        """In a forked child: the calls under way are the parent's; what they changed half is dropped."""
        for state in self._states.values():
            if state.in_use:
                state.in_use = 0
                state.drop_cache()

    def clear(self) -> None:
        with self.lock:
            self._states.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        with self.lock:
            return sum(s.cache.nbytes for s in self._states.values() if s.cache is not None)

    def __len__(self) -> int:
        return len(self._states)


def default_budget(device: str) -> int:
    """A quarter of the machine's memory, in bytes; on CUDA of what the model left free there: the forward's working
    space takes up to twice the longest context beside it."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0] // 4)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def token_bytes(config: Any, itemsize: int) -> int:
    """Of one token's keys and values in a cache that grows with every token. config: the model's."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * itemsize)
