"""Worker: one thread that serves jobs one after another, the lanes in turn. Used by LocalEngine. Imports no torch.

The thread starts with the first job, and again in a forked child. A fork waits for the step under way, so that the
child finds everything whole; the parent's calls go on in the parent only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

# A step takes its memory's lock, so a fork has to take the steps' locks before the memories'. What is registered last
# runs first: memory's handlers have to be there before those at the end of this file, whatever is imported first.
import agentspec.memory.forks  # noqa: F401

__all__ = ["FairQueue", "Worker"]

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """Jobs in lanes. Lanes are served in turn, a lane's jobs in order: who queues a hundred calls delays another
    lane's next call by one. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # closing may happen in a collection that this thread is interrupted by
        self._ready = threading.Condition(self.lock)
        self._lanes: OrderedDict[Hashable, deque[Job]] = OrderedDict()
        self._closed = False

    def put(self, lane: Hashable, job: Job) -> bool:
        """False: the queue is closed."""
        with self.lock:
            if self._closed:
                return False
            self._lanes.setdefault(lane, deque()).append(job)
            self._ready.notify()
            return True

    def take(self) -> Job | None:
        """The next job, waiting for it; None once the queue is closed."""
        with self.lock:
            self._ready.wait_for(lambda: self._lanes or self._closed)
            if self._closed:
                return None
            lane, jobs = next(iter(self._lanes.items()))
            job = jobs.popleft()
            if jobs:
                self._lanes.move_to_end(lane)
            else:
                del self._lanes[lane]
            return job

    def close(self) -> list[Job]:
        """No more jobs; returns those not taken."""
        with self.lock:
            self._closed = True
            left = [job for jobs in self._lanes.values() for job in jobs]
            self._lanes.clear()
            self._ready.notify_all()
            return left

    def drain(self) -> list[Job]:
        """In a forked child, lock held: the jobs of the parent."""
        left = [job for jobs in self._lanes.values() for job in jobs]
        self._lanes.clear()
        self._ready = threading.Condition(self.lock)
        return left

    def __len__(self) -> int:
        with self.lock:
            return sum(len(jobs) for jobs in self._lanes.values())


class Worker(Generic[Job]):
    """Runs `serve(job)` for each job in a thread of its own.

    serve:   must not raise. The thread lives as long as the queue is open, so it should not keep its owner alive
    on_fork: in a forked child, with the jobs that are the parent's: the one under way and those queued
    locks:   a fork holds them (in this order), so that the child finds them free and all that they guard whole
    """

    def __init__(
        self,
        serve: Callable[[Job], None],
        on_fork: Callable[[list[Job]], None],
        locks: Sequence[Any] = (),
        name: str = "agentspec-engine",
    ) -> None:
        self._queue: FairQueue[Job] = FairQueue()
        self._serve = serve
        self._on_fork = on_fork
        self._locks = tuple(locks)
        self._name = name
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running: Job | None = None
        _live.add(self)

    def submit(self, lane: Hashable, job: Job) -> bool:
        """Queue a job. False: the worker was stopped."""
        if not self._queue.put(lane, job):
            return False
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        return True

    def stop(self) -> list[Job]:
        """Stop after the job under way; returns the jobs not begun."""
        left = self._queue.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        return left

    def release(self) -> None:
        """Let the thread end when it has nothing to do; for an owner that is gone."""
        self._queue.close()

    def __len__(self) -> int:
        return len(self._queue)

    def _loop(self) -> None:
        while True:
            job = self._queue.take()
            if job is None:
                return
            self._running = job
            try:
                self._serve(job)
            finally:
                self._running = None
            del job

    def _before_fork(self, take: Callable[[Any], Any]) -> None:
        for lock in (*self._locks, self._start, self._queue.lock):
            take(lock)

    def _forked(self) -> list[Job]:
        """In the child: what was queued or ran when the parent forked. The locks are held."""
        self._thread = None
        jobs = self._queue.drain()
        if self._running is not None:
            jobs.insert(0, self._running)
            self._running = None
        return jobs


class _Fork(threading.local):
    """What the forking thread holds: each lock from when it is taken, as Ctrl-C can end the wait for the next."""

    def __init__(self) -> None:
        self.workers: list[Worker[Any]] = []
        self.locks = contextlib.ExitStack()


_live: weakref.WeakSet[Worker[Any]] = weakref.WeakSet()
_fork = _Fork()


def _before() -> None:
    _fork.workers = list(_live)
    for worker in _fork.workers:
        worker._before_fork(_fork.locks.enter_context)


def _after_in_parent() -> None:
    _fork.locks.close()
    _fork.workers = []


def _after_in_child() -> None:
    left = [(worker, worker._forked()) for worker in _fork.workers]
    _after_in_parent()
    for worker, jobs in left:
        worker._on_fork(jobs)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
