"""MemoryStore: the memories of one engine under one byte budget, and what a namespace shares.

Called by the engines and the SGLang plugin. May import numpy and its neighbours in memory.

    store = MemoryStore(budget_bytes=512 * 2**20, fingerprint=vocabulary_fingerprint(tokenizer))
    memory = store.open("run-17", namespace="research-agent")      # at the start of each call
    context = memory.extend(prompt, spans) ...

A namespace is a promise that its trajectories may see one another's text: outputs of each become draft
material of all. A trajectory opened with namespace=None shares nothing. Two namespaces share nothing,
whatever ids are used in them. Who may name which namespace is the caller's business (a server scopes it by
tenant or API key).

Eviction is a deterministic function of the calls made: least recently opened or grown first, no clock, so
that all ranks of a tensor-parallel server evict the same.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from agentspec.errors import IntegrityError, InvalidRequestError, MemoryBudgetError, VocabularyMismatchError, shown
from agentspec.memory import forks, saved
from agentspec.memory.trajectory import DEFAULT_MAX_TOKENS, SMALLEST_MEMORY, TrajectoryMemory

__all__ = ["MemoryStore"]

DEFAULT_BUDGET = 512 * 2**20
SMALLEST_BUDGET = 2**20
# What a token costs, all told, with the prompt's own copy while a call is open; for choosing bounds, not for
# accounts.
_BYTES_PER_TOKEN = 32
_LEAST_BYTES_PER_TOKEN = 16
_SHARED_TOKENS = 2**20

Key = tuple[str | None, str]
SHARED_ID = "\0shared"  # no trajectory may be called so


class MemoryStore:
    """The memories of one engine, one a trajectory, by (namespace, id). Thread-safe.

    budget_bytes:     most that is held, open calls and attachments included. What is in use is never evicted;
                      when that alone is too much, its oldest tokens are forgotten, and when that doesn't
                      suffice `open` raises MemoryBudgetError.
    fingerprint:      of the tokenizer whose ids are held (tokenizer.vocabulary_fingerprint); needed to save
                      and load
    namespace_tokens: most that a namespace's shared memory holds; beyond it the oldest half goes
    """

    def __init__(
        self,
        budget_bytes: int = DEFAULT_BUDGET,
        *,
        fingerprint: str | None = None,
        namespace_tokens: int = _SHARED_TOKENS,
    ) -> None:
        if not isinstance(budget_bytes, int) or budget_bytes < SMALLEST_BUDGET:
            raise InvalidRequestError(
                f"budget_bytes: needed at least {SMALLEST_BUDGET} (1 MiB), got {shown(budget_bytes)}; "
                f"a token takes about 24 bytes, so {DEFAULT_BUDGET} holds some 20 million"
            )
        if not isinstance(namespace_tokens, int) or namespace_tokens < SMALLEST_MEMORY:
            raise InvalidRequestError(
                f"namespace_tokens: needed at least {SMALLEST_MEMORY}, got {shown(namespace_tokens)}; "
                "open memories with namespace=None to share nothing"
            )
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise InvalidRequestError(
                f"fingerprint: needed text or None, got {shown(fingerprint)}; vocabulary_fingerprint(tokenizer) makes it"
            )
        self.budget_bytes = budget_bytes
        self.fingerprint = fingerprint
        fitting = max(SMALLEST_MEMORY, budget_bytes // _BYTES_PER_TOKEN)
        self.trajectory_tokens = min(DEFAULT_MAX_TOKENS, fitting)
        self.namespace_tokens = max(SMALLEST_MEMORY, min(namespace_tokens, fitting // 2))
        self.evictions = 0
        self._memories: OrderedDict[Key, TrajectoryMemory] = OrderedDict()  # least recently used first
        self._bytes: dict[Key, int] = {}
        self._kin: dict[str | None, int] = {}  # memories by namespace, the shared one included
        self._pins: dict[Key, int] = {}
        self._total = 0
        self.lock = threading.RLock()
        forks.guard_store(self)

    # ---- memories -----------------------------------------------------------------------------

    def open(self, id: str, namespace: str | None = None) -> TrajectoryMemory:
        """The memory of trajectory `id`, made if there is none; now the most recently used.

        Raises InvalidRequestError for names that can't be, MemoryBudgetError if what is in use leaves no
        room.
        """
        _check_name("id", id)
        if namespace is not None:
            _check_name("namespace", namespace)
        with self.lock:
            memory = self._memories.get((namespace, id))
            if memory is None:
                memory = TrajectoryMemory(
                    id, namespace, shared=self._shared(namespace), max_tokens=self.trajectory_tokens
                )
                self._register((namespace, id), memory)
        self._account(memory)
        with self.lock:
            if self._total > self.budget_bytes:
                raise MemoryBudgetError(
                    f"the memories in use hold {self._total} bytes, the budget is {self.budget_bytes}: "
                    f"give budget_bytes at least {self._total + self._total // 4}, or run fewer calls at once"
                )
        return memory

    @contextmanager
    def use(self, id: str, namespace: str | None = None) -> Iterator[TrajectoryMemory]:
        """The memory of trajectory `id`, not evicted while the block runs, whether or not a call is open."""
        key = namespace, id
        while True:
            memory = self.open(id, namespace)
            with self.lock:
                if self._memories.get(key) is memory:  # else another thread's call has evicted it already
                    self._pins[key] = self._pins.get(key, 0) + 1
                    break
        try:
            yield memory
        finally:
            with self.lock:
                if self._memories.get(key) is memory:  # else it was forgotten meanwhile, and its pins with it
                    left = self._pins.pop(key) - 1
                    if left:
                        self._pins[key] = left

    def shared(self, namespace: str) -> TrajectoryMemory:
        """What a namespace's trajectories share: a memory of their outputs, with attachments of its own."""
        _check_name("namespace", namespace)
        with self.lock:
            memory = self._shared(namespace)
            assert memory is not None
            return memory

    def forget(self, id: str, namespace: str | None = None) -> None:
        """Drop a memory; nothing happens if there is none. What its namespace has learned stays."""
        with self.lock:
            gone = [(namespace, id)] if (namespace, id) in self._memories else []
        self._drop(gone)

    def forget_namespace(self, namespace: str) -> None:
        """Drop all memories of a namespace and what they share; open calls go on with what they hold."""
        with self.lock:
            gone = [key for key in self._memories if key[0] == namespace]
        self._drop(gone)

    def clear(self) -> None:
        """Drop everything."""
        with self.lock:
            gone = list(self._memories)
        self._drop(gone)

    @property
    def nbytes(self) -> int:
        """Bytes held now: every memory's, shared ones included."""
        with self.lock:
            memories = list(self._memories.values())
        return sum(memory.nbytes for memory in memories)

    @property
    def namespaces(self) -> tuple[str, ...]:
        with self.lock:
            return tuple(sorted({key[0] for key in self._memories if key[0] is not None}))

    def __len__(self) -> int:
        """Trajectories held."""
        with self.lock:
            return sum(1 for key in self._memories if key[1] != SHARED_ID)

    def __contains__(self, key: object) -> bool:
        """Whether (namespace, id) is held."""
        with self.lock:
            return key in self._memories

    # ---- on disk ------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all memories (not open calls) to one file, atomically. Returns its bytes.

        Raises VocabularyMismatchError if the store has no fingerprint, OSError if the file can't be written.
        """
        if self.fingerprint is None:
            raise VocabularyMismatchError(
                "a memory is saved with its tokenizer's fingerprint: give MemoryStore(fingerprint=...)"
            )
        with self.lock:
            memories = [
                (namespace, None if id == SHARED_ID else id, memory)
                for (namespace, id), memory in self._memories.items()
                if id == SHARED_ID or "\0" not in id  # one whose name another has taken isn't kept
            ]
        return saved.write(path, self.fingerprint, memories)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Add the memories in a file that `save` wrote; those that the store holds already stay. Returns how
        many came.

        Nothing is added unless the whole file is good. Raises MemoryFormatError for a damaged or foreign
        file, VocabularyMismatchError for one written with another tokenizer, OSError if it can't be read.
        """
        if self.fingerprint is None:
            raise VocabularyMismatchError(
                "a memory can be loaded only for a known tokenizer: give MemoryStore(fingerprint=...)"
            )
        parts = saved.read(path, self.fingerprint)
        came = 0
        for part in parts:
            key = part.namespace, SHARED_ID if part.id is None else part.id
            with self.lock:
                memory = self._memories.get(key)
                if memory is not None and len(memory):
                    continue
                if memory is None:
                    if part.id is None:
                        assert part.namespace is not None
                        memory = self._shared(part.namespace)
                        assert memory is not None
                    else:
                        memory = TrajectoryMemory(
                            part.id,
                            part.namespace,
                            shared=self._shared(part.namespace),
                            max_tokens=self.trajectory_tokens,
                        )
                        self._register(key, memory)
            memory.restore(part)
            came += 1
            self._account(memory)
        return came

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the store or of a memory in it is broken."""
        with self.lock:
            memories = dict(self._memories)
            if self._total != sum(self._bytes.values()) or set(self._bytes) != set(memories):
                raise IntegrityError("the store's accounts don't add up")
            for key in self._pins:
                if key not in memories:
                    raise IntegrityError(f"{key} is pinned and not held")
            for (namespace, id), memory in memories.items():
                if memory.namespace != namespace or (id != SHARED_ID and memory.id != id.split("\0")[0]):
                    raise IntegrityError(f"{memory.namespace, memory.id} is held as {namespace, id}")
                shared = None if namespace is None or id == SHARED_ID else memories.get((namespace, SHARED_ID))
                if memory.shared is not shared:
                    raise IntegrityError(f"{namespace, id} shares with another namespace")
        for memory in memories.values():
            memory.check()

    # ---- inside -------------------------------------------------------------------------------
    # Locks: a memory calls _account after it has let go of its own lock; under the store's lock a memory's is
    # only tried, never waited for.

    def _drop(self, keys: list[Key]) -> None:
        """Forget memories for good: not even a call that is still open brings them back."""
        with self.lock:
            memories = [self._remove(key) for key in keys if key in self._memories]
            for memory in memories:
                memory.on_growth = None
                memory.shared = None
        for memory in memories:
            memory.clear()

    def _shared(self, namespace: str | None) -> TrajectoryMemory | None:
        if namespace is None:
            return None
        memory = self._memories.get((namespace, SHARED_ID))
        if memory is None:
            memory = TrajectoryMemory(SHARED_ID, namespace, max_tokens=self.namespace_tokens)
            self._register((namespace, SHARED_ID), memory)
        return memory

    def _register(self, key: Key, memory: TrajectoryMemory, size: int | None = None) -> None:
        self._memories[key] = memory
        self._bytes[key] = 0
        self._kin[key[0]] = self._kin.get(key[0], 0) + 1
        self._note(key, memory.nbytes if size is None else size)  # without a size: new, nobody else has it
        memory.on_growth = self._account

    def _note(self, key: Key, size: int) -> None:
        self._total += size - self._bytes[key]
        self._bytes[key] = size

    def _remove(self, key: Key) -> TrajectoryMemory:
        self._total -= self._bytes.pop(key)
        self._pins.pop(key, None)
        self._kin[key[0]] -= 1
        if not self._kin[key[0]]:
            del self._kin[key[0]]
        memory = self._memories.pop(key)
        if key[1] == SHARED_ID:
            memory.on_growth = None  # a namespace made anew shares another one
        return memory

    def _key_of(self, memory: TrajectoryMemory, size: int) -> Key:
        """The key under which a memory is held; one that was evicted and is used again is held again."""
        number = 0
        key: Key = memory.namespace, memory.id
        while True:
            held = self._memories.get(key)
            if held is memory:
                return key
            if held is None:
                if memory.id != SHARED_ID:
                    memory.shared = self._shared(memory.namespace)
                self._register(key, memory, size)
                return key
            number += 1
            key = memory.namespace, f"{memory.id}\0{number}"

    def _account(self, memory: TrajectoryMemory) -> None:
        """A memory was used or grew: note its size, and make room if the budget is exceeded."""
        size = memory.nbytes
        with self.lock:
            if memory.on_growth is None:
                return  # dropped while its thread was on the way here
            key = self._key_of(memory, size)
            self._note(key, size)
            self._memories.move_to_end(key)
            if memory.namespace is not None:
                self._memories.move_to_end((memory.namespace, SHARED_ID))
            if self._total > self.budget_bytes:
                self._make_room(memory)

    def _make_room(self, user: TrajectoryMemory) -> None:
        """Evict until a sixteenth of the budget is free (so that this isn't done at every token).

        `user` is what has just been used: it stays.
        """
        goal = self.budget_bytes - self.budget_bytes // 16
        busy = {memory.namespace for memory in self._memories.values() if memory.in_use}
        busy.update((namespace for namespace, _ in self._pins), (user.namespace,))
        for key in list(self._memories):
            if self._total <= goal:
                return
            memory = self._memories.get(key)
            if memory is None or memory is user or key in self._pins or memory.in_use:
                continue
            if key[1] == SHARED_ID and memory.namespace in busy:
                continue
            if not memory.lock.acquire(blocking=False):
                continue
            try:
                if not memory.in_use:
                    self._evict(key, memory)
            finally:
                memory.lock.release()
        # What is left is in use. Its oldest tokens go before anything is refused: the largest memory's first.
        # If what proposers hold is too much by itself, forgetting tokens doesn't help.
        tokens = sum(_LEAST_BYTES_PER_TOKEN * len(memory) for memory in self._memories.values())
        if self._total - tokens > self.budget_bytes:
            return
        for key in sorted(self._memories, key=lambda key: -self._bytes[key]):
            memory = self._memories[key]
            while self._total > self.budget_bytes and len(memory) >= 2048:
                if not memory.lock.acquire(blocking=False):
                    break
                try:
                    memory.forget_oldest(len(memory) // 2)
                    self._note(key, memory.nbytes)
                finally:
                    memory.lock.release()

    def _evict(self, key: Key, memory: TrajectoryMemory) -> None:
        memory.clear()
        self.evictions += 1
        namespace, id = key
        if id == SHARED_ID and self._kin[namespace] > 1:
            self._note(key, memory.nbytes)  # trajectories of the namespace are still held, and share it
            return
        self._remove(key)
        shared = self._memories.get((namespace, SHARED_ID))
        if shared is not None and self._kin[namespace] == 1 and not len(shared) and not shared.attachments:
            self._remove((namespace, SHARED_ID))


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidRequestError(f"{what}: needed a string without NUL, and not an empty one, got {shown(name)}")
