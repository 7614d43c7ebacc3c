"""A fork waits until no memory and no store is being changed, so that the child finds them whole and can go on
with them: else a lock that another thread held stays held in the child for ever.

Used by trajectory.py and store.py. Imports nothing of ours.

Locks are taken in the order in which threads take them: a store's before any, a memory's before that of its
namespace.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Protocol

__all__ = ["guard_memory", "guard_store"]


class _Guarded(Protocol):
    lock: Any


_adding = threading.Lock()
_stores: weakref.WeakSet[Any] = weakref.WeakSet()
_memories: weakref.WeakSet[Any] = weakref.WeakSet()


class _Fork(threading.local):
    """What the forking thread holds: each lock from when it is taken, as Ctrl-C can end the wait for the next."""

    def __init__(self) -> None:
        self.locks = contextlib.ExitStack()


_fork = _Fork()


def guard_store(store: _Guarded) -> None:
    """From now on a fork holds the store's lock."""
    with _adding:
        _stores.add(store)


def guard_memory(memory: _Guarded) -> None:
    """From now on a fork holds the memory's lock, after those of all memories that share it."""
    with _adding:
        _memories.add(memory)


def _before() -> None:
    take = _fork.locks.enter_context
    with _adding:
        stores = list(_stores)
    for store in stores:
        take(store.lock)
    # With the stores held nobody can make a memory in one.
    with _adding:
        memories = list(_memories)
    shared = {id(memory.shared) for memory in memories}
    for memory in sorted(memories, key=lambda memory: id(memory) in shared):
        take(memory.lock)
    take(_adding)


def _after() -> None:
    _fork.locks.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
