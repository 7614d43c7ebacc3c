"""MemoryStore: the budget, what is evicted and what never, namespaces, accounts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from agentspec.errors import InvalidRequestError, MemoryBudgetError
from agentspec.memory import MemoryStore, Source, TrajectoryMemory
from agentspec.memory.store import SHARED_ID

pytestmark = pytest.mark.fast
MIB = 2**20


def tokens(seed: int, count: int, low: int = 0, high: int = 40_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, count).astype(np.int32)


def call(memory: TrajectoryMemory, prompt: Any, output: Any) -> None:
    context = memory.extend(prompt)
    memory.append(context, output)
    memory.close(context)


def test_open_returns_the_same_memory() -> None:
    store = MemoryStore()
    memory = store.open("a")
    assert store.open("a") is memory
    assert store.open("a", "n") is not memory
    assert store.open("b", "n").shared is store.open("a", "n").shared is store.shared("n")
    assert memory.shared is None
    assert len(store) == 3 and store.namespaces == ("n",)
    store.check()


@pytest.mark.parametrize("budget", [0, -1, MIB - 1, 1.5 * MIB, "1GB", None, pytest.param(-(10**5000), id="long")])
def test_a_bad_budget_is_refused_with_what_to_set(budget: Any) -> None:
    with pytest.raises(InvalidRequestError, match="budget_bytes: needed at least 1048576"):
        MemoryStore(budget)


@pytest.mark.parametrize("most", [0, -5, 1023, 2000.5, "many", None, pytest.param(-(10**5000), id="long")])
def test_a_bad_size_of_what_is_shared_is_refused(most: Any) -> None:
    with pytest.raises(InvalidRequestError, match="namespace_tokens: needed at least 1024"):
        MemoryStore(namespace_tokens=most)


@pytest.mark.parametrize("value", [5, pytest.param(10**5000, id="long")])
def test_a_bad_fingerprint_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="fingerprint: needed text"):
        MemoryStore(fingerprint=value)


@pytest.mark.parametrize(
    "name", ["", "a\0b", 7, None, pytest.param("x\0" * 100_000, id="long name"), pytest.param(10**5000, id="long")]
)
def test_bad_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match="id") as refused:
        MemoryStore().open(name)
    assert len(str(refused.value)) < 300
    if name is not None:
        with pytest.raises(InvalidRequestError, match="namespace"):
            MemoryStore().open("a", name)


def test_the_budget_is_kept_and_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(MIB)
    for i in range(60):
        call(store.open(f"run {i}"), tokens(i, 2000), tokens(1000 + i, 50))
        store.open("run 0")  # kept warm
        assert store.nbytes <= MIB
    store.check()
    assert len(store.open("run 0")) > 2000  # as it was, not forgotten and made anew
    assert (None, "run 0") in store and (None, "run 1") not in store and (None, "run 59") in store
    assert store.evictions > 30


def test_what_is_in_use_is_never_evicted() -> None:
    store = MemoryStore(MIB)
    used = store.open("used")
    context = used.extend(tokens(1, 3000))
    with store.use("pinned") as pinned:
        call(pinned, tokens(2, 3000), [1])
        for i in range(60):
            call(store.open(f"run {i}"), tokens(10 + i, 2000), [1])
        assert (None, "used") in store and (None, "pinned") in store
        assert len(pinned) >= 3000 and len(used) >= 3000
        store.check()
    used.close(context)
    for i in range(60):
        call(store.open(f"run {i}"), tokens(100 + i, 2000), [1])
    assert (None, "used") not in store and (None, "pinned") not in store


def test_when_all_is_in_use_the_oldest_tokens_go_and_then_open_refuses() -> None:
    store = MemoryStore(MIB)
    contexts = []
    with pytest.raises(MemoryBudgetError, match="give budget_bytes at least"):
        for i in range(2000):
            memory = store.open(f"run {i}")
            contexts.append(memory.extend(tokens(i, 3000)))
    assert len(contexts) > 20
    for context in contexts:
        assert context.memory.match(context) is not None
        context.memory.check()
        context.memory.close(context)
    store.open("another")
    assert store.nbytes <= MIB


def test_a_prompt_that_can_never_fit_is_refused_before_anything_is_stored() -> None:
    store = MemoryStore(MIB)
    memory = store.open("a")
    with pytest.raises(MemoryBudgetError, match="allow at least"):
        memory.extend(tokens(1, 100_000))
    assert len(memory) == 0 and not memory.in_use


def test_an_evicted_memory_that_is_used_again_is_counted_again() -> None:
    store = MemoryStore(MIB)
    old = store.open("old", "n")
    call(old, tokens(1, 2000), [1])
    for i in range(60):
        call(store.open(f"run {i}"), tokens(10 + i, 2000), [1])
    assert ("n", "old") not in store and len(old) == 0
    call(old, tokens(1, 2000), [5, 6])
    assert ("n", "old") in store
    assert old.shared is store.shared("n")
    store.check()
    # Another one has taken its name meanwhile: both are counted.
    for i in range(60):
        call(store.open(f"run {i}"), tokens(100 + i, 2000), [1])
    other = store.open("old", "n")
    call(old, tokens(1, 2000), [5, 6])
    assert store.open("old", "n") is other and len(old) >= 2000
    store.check()


def test_outputs_are_shared_within_a_namespace_only() -> None:
    store = MemoryStore()
    secret = tokens(1, 40, 50_000, 60_000)
    call(store.open("a", "one"), [1, 2, 3], secret)
    for id, namespace, found in (
        ("b", "one", True),
        ("a", "two", False),
        ("a", None, False),
        ("c", None, False),
    ):
        memory = store.open(id, namespace)
        context = memory.extend([1, 2, 3, *secret[:10].tolist()])
        matches = memory.match(context, min_match=4)
        assert (len(matches) > 0) is found
        if found:
            copied, source = matches.copy(0, 5)
            assert copied.tolist() == secret[10:15].tolist() and source is Source.OUTPUT
        memory.close(context)
    store.check()


def test_the_first_token_of_an_output_is_matched_by_what_stood_before_it() -> None:
    store = MemoryStore()
    header = [900, 901, 902]
    call(store.open("a", "one"), [*range(20), *header], [7, 8, 9])
    memory = store.open("b", "one")
    context = memory.extend([*range(30, 50), *header])
    assert memory.match(context).copy(0, 5)[0].tolist() == [7, 8, 9]


def test_a_namespace_holds_an_output_once() -> None:
    store = MemoryStore()
    for i in range(10):
        call(store.open(f"{i}", "one"), tokens(i, 50), list(range(100, 140)))
    assert store.shared("one").segment_count == 1


def test_a_namespace_forgets_its_oldest_half() -> None:
    store = MemoryStore(namespace_tokens=4096)
    for i in range(100):
        call(store.open(f"{i}", "one"), [i], tokens(i, 100))
    shared = store.shared("one")
    assert 1024 < len(shared) <= 4096 and shared.epoch > 0
    assert shared.segments[-1].identity == store.open("99", "one").segments[-1].identity
    store.check()


def test_an_idle_namespace_is_evicted_and_a_busy_one_is_not() -> None:
    store = MemoryStore(MIB, namespace_tokens=8192)
    call(store.open("a", "idle"), [1], tokens(1, 2000))
    busy = store.open("a", "busy")
    call(busy, [1], tokens(2, 2000))
    context = busy.extend([1, 2])
    for i in range(100):
        call(store.open(f"run {i}"), tokens(10 + i, 2000), [1])
    assert ("idle", SHARED_ID) not in store and len(store.shared("busy")) >= 2000
    busy.close(context)
    store.check()


def test_forget() -> None:
    store = MemoryStore()
    memory = store.open("a", "one")
    call(memory, [1, 2, 3], [4, 5])
    store.forget("a", "one")
    store.forget("a", "one")
    store.forget("never seen")
    assert len(memory) == 0 and ("one", "a") not in store and store.shared("one").tokens.tolist() == [1, 2, 3, 4, 5]
    context = store.open("b", "one").extend([1, 2])
    store.forget_namespace("one")
    context.memory.append(context, [3])
    context.memory.close(context)
    assert store.namespaces == () and len(store) == 0 and store.nbytes == 0
    store.open("c")
    store.clear()
    assert len(store) == 0
    store.check()


def test_attachments_count_and_go_with_the_memory() -> None:
    class Learned:
        nbytes = 400_000

    store = MemoryStore(MIB)
    for i in range(8):
        memory = store.open(f"run {i}")
        context = memory.extend([1, 2, 3])
        memory.attachments["mixture"] = Learned()
        memory.close(context)
        assert store.nbytes <= MIB
    assert len(store) == 2 and memory.attachments
    assert store.open("run 0").attachments == {}


def test_tokens_are_not_forgotten_where_that_frees_too_little() -> None:
    class Learned:
        nbytes = 2 * MIB

    store = MemoryStore(MIB)
    memory = store.open("a")
    context = memory.extend(tokens(1, 5000))
    memory.attachments["mixture"] = Learned()
    memory.append(context, tokens(2, 1000))
    with pytest.raises(MemoryBudgetError, match="fewer calls at once"):
        store.open("b")
    assert len(memory) == 5000
    memory.close(context)
    store.open("b")
    assert (None, "a") not in store


def test_eviction_is_the_same_on_every_rank() -> None:
    def run() -> list[Any]:
        store = MemoryStore(MIB, namespace_tokens=4096)
        seen = []
        for i in range(80):
            memory = store.open(f"run {i % 23}", ["x", "y", None][i % 3])
            call(memory, tokens(i % 31, 700 + 50 * (i % 7)), tokens(i, 60))
            seen.append((list(store._memories), store.nbytes, store.evictions))
        return seen

    assert run() == run()


def test_threads() -> None:
    """Opened, matched, closed, evicted and forgotten from many threads: no deadlock, nothing torn."""
    store = MemoryStore(2 * MIB, namespace_tokens=8192)
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        random = np.random.default_rng(worker)
        try:
            for i in range(60):
                namespace = [None, "x", "y"][int(random.integers(3))]
                memory = store.open(f"run {int(random.integers(6))}", namespace)
                context = memory.extend(tokens(int(random.integers(20)), 400 + 10 * worker))
                output = random.integers(0, 50, 30).astype(np.int32)
                for j in range(0, 30, 3):
                    memory.append(context, output[j : j + 3])
                    for row in range(len(memory.match(context))):
                        assert row >= 0
                assert context.output.tolist() == output.tolist()
                memory.close(context)
                if i % 20 == 19:
                    store.forget(f"run {int(random.integers(6))}", namespace)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    store.check()
    assert store.nbytes <= 2 * MIB


@pytest.mark.parametrize("period", [1, 3, 5000])
def test_the_store_knows_what_an_open_call_holds_after_every_step(period: int) -> None:
    store = MemoryStore(4 * MIB)
    memory = store.open("a")
    context = memory.extend([1, 2, 3])
    output = np.arange(40_000, dtype=np.int32) % period
    for at in range(0, len(output), 16):
        memory.append(context, output[at : at + 16])
        assert store._total == store.nbytes
    assert store.nbytes > 16 * len(output)
    store.check()


def test_what_a_dropped_namespace_shared_is_not_held_again() -> None:
    """A call may end, and publish its output, while its memory and its namespace are evicted and made anew."""
    store = MemoryStore(MIB)
    memory = store.open("a", "n")
    call(memory, [1, 2, 3], [4, 5])
    old = store.shared("n")
    for i in range(60):
        call(store.open(f"run {i}"), tokens(i, 2000), [1])
    assert ("n", SHARED_ID) not in store
    new = store.shared("n")
    assert new is not old
    old.publish(np.arange(100, dtype=np.int32), 0, 100)
    store.check()
    held = len(store)
    call(memory, [1, 2, 3], [4, 5])
    assert memory.shared is new and len(new) == 5 and len(store) == held + 1
    store.check()


def test_a_call_that_is_about_to_tell_of_its_growth_brings_nothing_back() -> None:
    store = MemoryStore()
    with store.use("a", "n") as memory:
        tell = memory.on_growth
        assert tell is not None
        store.forget_namespace("n")
        tell(memory)  # as a thread does that had read it before
        call(memory, [1, 2, 3], [4, 5])
        assert len(store) == 0 and store.namespaces == () and store.nbytes == 0
    store.check()


def test_a_pin_of_a_forgotten_memory_is_not_the_new_ones() -> None:
    store = MemoryStore(MIB)
    with store.use("a") as old:
        store.forget("a")
        outer = store.use("a")
        new = outer.__enter__()
        assert new is not old
    call(new, tokens(1, 2000), [1])
    for i in range(60):
        call(store.open(f"run {i}"), tokens(10 + i, 2000), [1])
    assert (None, "a") in store and len(new) >= 2000
    outer.__exit__(None, None, None)
    store.check()


def test_a_memory_that_goes_before_it_is_pinned_is_opened_again() -> None:
    class Crowded(MemoryStore):
        left = 1

        def open(self, id: str, namespace: str | None = None) -> TrajectoryMemory:
            memory = super().open(id, namespace)
            if self.left:
                self.left -= 1
                self.forget(id, namespace)  # as another thread's call may evict it
            return memory

    store = Crowded()
    with store.use("a") as memory:
        store.check()
        assert store.open("a") is memory
    store.forget("a")
    store.check()
    assert not store._pins
