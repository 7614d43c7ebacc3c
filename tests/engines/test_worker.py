"""FairQueue and Worker: lanes in turn, nothing lost, a thread that starts when needed and ends when told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from agentspec.engines.worker import FairQueue, Worker

pytestmark = pytest.mark.fast


def test_lanes_take_turns_and_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for job in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert queue.put(job[0], job)
    assert len(queue) == 6
    assert [queue.take() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    queue.put("z", "z1")
    assert queue.close() == ["z1"]
    assert queue.take() is None
    assert not queue.put("z", "z2")


def test_a_waiting_take_is_woken() -> None:
    queue: FairQueue[int] = FairQueue()
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(queue.take()))
    thread.start()
    time.sleep(0.02)
    queue.put("x", 7)
    thread.join(5)
    assert found == [7]


def test_worker_serves_all_and_stops() -> None:
    done: list[int] = []
    worker: Worker[int] = Worker(done.append, lambda jobs: None)

    def queue(lane: int) -> None:
        for _ in range(50):
            worker.submit(lane, lane)

    threads = [threading.Thread(target=queue, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.monotonic() + 20
    while len(done) < 400 and time.monotonic() < end:
        time.sleep(0.005)
    assert sorted(done) == sorted(list(range(8)) * 50)
    assert worker.stop() == []
    assert not worker.submit(0, 1)


def test_a_fork_finds_the_locks_free_and_is_told_the_parents_jobs() -> None:
    import os

    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    lock = threading.Lock()
    started, go = threading.Event(), threading.Event()
    told: list[list[int]] = []
    served: list[int] = []

    def serve(job: int) -> None:
        started.set()
        if job == 1:
            go.wait(20)
            with lock:
                pass
        served.append(job)

    worker: Worker[int] = Worker(serve, told.append, [lock])
    worker.submit("a", 1)
    worker.submit("b", 2)
    assert started.wait(10)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        ok = told == [[1, 2]] and not lock.locked() and len(worker) == 0
        worker.submit("c", 3)
        end = time.monotonic() + 10
        while served != [3] and time.monotonic() < end:
            time.sleep(0.005)
        os.write(write, b"ok" if ok and served == [3] else repr((told, served)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"ok"
    os.waitpid(pid, 0)
    go.set()
    end = time.monotonic() + 10
    while len(served) < 2 and time.monotonic() < end:
        time.sleep(0.005)
    assert served == [1, 2] and told == []
    worker.stop()


def test_a_fork_waits_for_steps_before_memories_whatever_is_imported_first() -> None:
    """A step holds its own lock when it asks for the memory's: a fork that took them the other way round would hang."""
    program = """
import os, threading
from agentspec.engines.worker import Worker
from agentspec.memory import TrajectoryMemory
memory, step, begun = TrajectoryMemory(), threading.RLock(), threading.Event()
def serve(job):
    for number in range(20000):
        with step:
            begun.set()
            memory.seed([number, number + 1])
        if job.is_set():
            return
job = threading.Event()
worker = Worker(serve, lambda jobs: None, (step,))
worker.submit("a", job)
begun.wait()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
job.set()
worker.stop()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["done"], done.stderr
