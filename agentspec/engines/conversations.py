"""Conversation: what an engine holds for one trajectory's chat, wherever its model runs. Imports no torch.

LocalEngine's states.py adds memory, keys and values to it; a remote engine needs no more than this, since the rest is
the server's. Called by the engines.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentspec.chat import History
from agentspec.loop import Seed, Trajectory

__all__ = ["Conversation", "Conversations", "Key", "common_prefix", "divergence", "key_of"]

Key = tuple[str | None, str]


def key_of(trajectory: Trajectory) -> Key:
    """Which trajectory this is: ids are unique inside a namespace."""
    return trajectory.namespace, trajectory.id


@dataclass(slots=True)
class Conversation:
    """
    history:     the outputs, for exact history
    last:        int32, the last call's whole context
    calls:       how many calls began
    in_use:      calls under way
    seeds_taken: of each Trajectory object's seeds, how many were taken over
    """

    history: History = field(default_factory=History)
    last: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    calls: int = 0
    in_use: int = 0
    seeds_taken: weakref.WeakKeyDictionary[Trajectory, int] = field(default_factory=weakref.WeakKeyDictionary)

    def new_seeds(self, trajectory: Trajectory) -> list[Seed]:
        """The seeds that were offered and not taken yet."""
        return trajectory.seeds_from(self.seeds_taken.get(trajectory, 0))

    def take_seeds(self, trajectory: Trajectory, number: int) -> None:
        """So many of them are taken now; negative: given back."""
        self.seeds_taken[trajectory] = max(0, self.seeds_taken.get(trajectory, 0) + number)


class Conversations:
    """The conversations by trajectory, most recently used last; the oldest beyond `most` go. Thread-safe."""

    def __init__(self, most: int = 4096) -> None:
        self.lock = threading.Lock()
        self._most = most
        self._held: OrderedDict[Key, Conversation] = OrderedDict()

    def get(self, trajectory: Trajectory) -> Conversation:
        """The trajectory's conversation, made if there is none."""
        key = key_of(trajectory)
        with self.lock:
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = Conversation()
            self._held.move_to_end(key)
            surplus = len(self._held) - self._most
            if surplus > 0:
                for old in [k for k, c in self._held.items() if not c.in_use and c is not held][:surplus]:
                    del self._held[old]
            return held

    def forget(self, trajectory: Trajectory) -> None:
        with self.lock:
            self._held.pop(key_of(trajectory), None)

    def __len__(self) -> int:
        return len(self._held)


def common_prefix(held: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    """How many ids two sequences begin with in common."""
    n = min(len(held), len(prompt))
    differ = np.flatnonzero(held[:n] != prompt[:n])
    return int(differ[0]) if len(differ) else n


def divergence(last: NDArray[np.int32], prompt: NDArray[np.int32]) -> int | None:
    """The first position where a prompt departs from the last context; None where one continues the other."""
    same = common_prefix(last, prompt)
    return None if same == min(len(last), len(prompt)) else same
