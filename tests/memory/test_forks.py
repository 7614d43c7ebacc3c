"""A forked child finds memories and stores whole and free, whatever other threads were doing to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from agentspec.memory import MemoryStore, TrajectoryMemory

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


def call(memory: TrajectoryMemory, prompt: np.ndarray, output: np.ndarray) -> None:
    context = memory.extend(prompt)
    for at in range(0, len(output), 100):
        memory.append(context, output[at : at + 100])
        memory.match(context)
    memory.close(context)


def in_a_child(work: object) -> int:
    """The exit status of a child that does the work, killed after ten seconds."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(10)
            work()  # type: ignore[operator]
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_while_other_threads_change_them() -> None:
    store = MemoryStore(2**20, namespace_tokens=4096)
    ended = threading.Event()

    def busy(number: int) -> None:
        random = np.random.default_rng(number)
        while not ended.is_set():
            memory = store.open(f"run {int(random.integers(3))}", "n")
            call(memory, random.integers(0, 50, 1500), random.integers(0, 50, 800))

    def work() -> None:
        for id in ("run 0", "run 1", "run 2", "new"):
            call(store.open(id, "n"), np.arange(300), np.arange(200))
        assert store.nbytes <= store.budget_bytes
        store.open("run 0", "n").check()

    threads = [threading.Thread(target=busy, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [in_a_child(work) for _ in range(8)] == [0] * 8
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
    work()
    store.check()


def test_two_threads_that_fork() -> None:
    store = MemoryStore()
    statuses: list[int] = []

    def fork() -> None:
        for number in range(5):
            call(store.open(f"run {number}", "n"), np.arange(300), np.arange(200))
            statuses.append(in_a_child(lambda: call(store.open("run 0", "n"), np.arange(300), np.arange(200))))

    threads = [threading.Thread(target=fork, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [0] * 10


def test_an_interrupt_while_a_fork_waits_leaves_no_lock_held() -> None:
    """Ctrl-C ends the wait for a memory's lock; what the fork had taken before is free again afterwards."""
    program = """
import os, signal, threading, time
from agentspec.engines.worker import Worker
from agentspec.memory import MemoryStore
store, step = MemoryStore(), threading.RLock()
memory = store.open("a", "n")
worker = Worker(lambda job: job.set(), lambda jobs: None, (threading.RLock(), step))
held = threading.Event()
def hold(lock):
    with lock:
        held.set()
        time.sleep(1)
for lock in (memory.lock, step):
    held.clear()
    holder = threading.Thread(target=hold, args=(lock,))
    holder.start()
    held.wait()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    except KeyboardInterrupt:
        pass
    holder.join()
    done = threading.Event()
    def work():
        job = threading.Event()
        store.open("b", "n")
        worker.submit("a", job)
        job.wait() and done.set()
    threading.Thread(target=work, daemon=True).start()
    print(done.wait(20), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert "release" not in done.stderr
