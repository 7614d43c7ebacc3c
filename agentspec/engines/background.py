"""Background: an asyncio loop in a thread of its own, in which a remote engine's calls run beside one another.

Calls come from any thread or loop and are answered through their Channel, so the consumer's own loop (or none) doesn't
matter. The thread starts with the first call, and again in a forked child. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from agentspec.errors import EngineError

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """Runs coroutines. Thread-safe.

    on_fork: called in a forked child: what the parent's thread served is lost there
    loop:    a loop to run on instead of one of its own; at the end it is stopped, and its tasks are left alone
    """

    def __init__(
        self,
        on_fork: Callable[[], None] = lambda: None,
        loop: asyncio.AbstractEventLoop | None = None,
        name: str = "agentspec-client",
    ) -> None:
        self._on_fork = on_fork
        self._given = loop
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._spawned: set[asyncio.Future[Any]] = set()  # a loop holds its tasks weakly
        _live.add(self)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine; returns at once. Raises EngineError where the loop has been stopped."""
        with self._lock:
            if self._closed:
                work.close()
                raise EngineError("this client's thread was stopped")
            if self._loop is None:
                self._start()
            assert self._loop is not None
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and wait for its result."""
        if threading.current_thread() is self._thread:
            work.close()
            raise EngineError("a client can't wait for itself in its own thread")
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError as error:
            raise EngineError("the client was closed while this ran") from error
        except BaseException:
            future.cancel()
            raise

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine that nobody waits for. From inside the loop only."""
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    @property
    def stopped(self) -> bool:
        return self._closed

    def stop(self) -> None:
        """Stop the loop (one of its own: cancel what runs) and end the thread. May be called twice, from anywhere."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(timeout=10)

    # ---- inside -------------------------------------------------------------------------------

    def _start(self) -> None:
        self._loop = self._given or asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop, self._given is None), name=self._name, daemon=True
        )
        self._thread.start()

    def _after_fork_in_child(self) -> None:
        if self._loop is not None:
            _lost.append(self._loop)  # its sockets are the parent's too: never closed from here
            self._closed = self._given is not None  # somebody else's loop can't be made again
        self._loop = self._thread = None
        self._lock = threading.Lock()


def _serve(loop: asyncio.AbstractEventLoop, own: bool) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop) if own else set()
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=5))
    finally:
        asyncio.set_event_loop(None)
        if own:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


_live: weakref.WeakSet[Background] = weakref.WeakSet()
_forking: list[Background] = []
_lost: list[asyncio.AbstractEventLoop] = []


def _before() -> None:
    _forking[:] = list(_live)
    for one in _forking:
        one._lock.acquire()


def _after_in_parent() -> None:
    for one in _forking:
        one._lock.release()
    _forking.clear()


def _after_in_child() -> None:
    forked = list(_forking)
    _forking.clear()
    for one in forked:
        one._after_fork_in_child()
        one._on_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
