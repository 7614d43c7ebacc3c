"""A consumer that waits for the end: woken once, and otherwise as one that takes every chunk at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentspec.engines.base import CallStats, Channel, Generation, GenerationRequest, TokenChunk
from agentspec.engines.local import LocalEngine
from agentspec.errors import RequestAbortedError

pytestmark = pytest.mark.fast

REQUEST = GenerationRequest(input_ids=[5, 70, 130, 9, 200, 11, 5, 70, 130], max_tokens=24, ignore_eos=True)


def chunk(*ids: int, index: int = 0) -> TokenChunk:
    return TokenChunk(ids, "x" * len(ids), time.perf_counter_ns(), index=index)


def waiting(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that does the work, and what came of it."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(work())
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_who_waits_for_the_end_is_woken_once(
    tiny_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    streamed = [i for part in engine.generate(REQUEST) for i in part.token_ids]
    looks: list[bool] = []
    right = Channel.end_or_wake
    monkeypatch.setattr(Channel, "end_or_wake", lambda self, wake: looks.append(ended := right(self, wake)) or ended)
    result = asyncio.run(engine.generate(REQUEST).aresult())
    assert list(result.token_ids) == streamed and result.stats.verify_steps > 3
    assert looks in ([False, True], [True])


def test_what_came_before_an_abort_was_taken() -> None:
    channel = Channel()
    channel.put(chunk(1, 2))
    generation = Generation(REQUEST, channel)
    thread, came = waiting(generation.result)
    until(lambda: channel.delivered == {0: 2})
    channel.put(chunk(3))
    channel.put(chunk(4, 5, index=1))
    generation.abort()
    assert channel.seal() == {0: 3, 1: 2}
    channel.put(chunk(6))  # after the end: nobody gets it
    channel.put(RequestAbortedError("aborted", CallStats(finish_reason="abort")))
    thread.join(30)
    assert isinstance(came[0], RequestAbortedError) and came[0].partial.token_ids == (1, 2, 3)
    assert channel.delivered == {0: 3, 1: 2}


def test_an_interrupted_wait_leaves_the_chunks_to_be_read() -> None:
    channel = Channel()
    generation = Generation(REQUEST, channel)

    def interrupt(timeout: float | None = None) -> bool:
        channel._events.append(chunk(1, 2))
        channel._count(channel._events[-1], 1)  # as `put` does
        raise KeyboardInterrupt

    wait, channel._ready.wait = channel._ready.wait, interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        generation.result()
    channel._ready.wait = wait  # type: ignore[method-assign]
    assert channel.delivered == {0: 0}
    assert next(generation).token_ids == (1, 2) and channel.delivered == {0: 2}
    channel.put(chunk(3))
    assert channel.seal() == {0: 2}, "what was not read is dropped"
    channel.put(CallStats(finish_reason="stop"))
    assert generation.result().token_ids == (1, 2)
    assert generation.result().token_ids == (1, 2), "and again"


def test_an_error_is_told_each_time() -> None:
    channel = Channel()
    generation = Generation(REQUEST, channel)
    thread, came = waiting(generation.results)
    channel.put(ValueError("no"))
    thread.join(30)
    assert isinstance(came[0], ValueError)
    with pytest.raises(ValueError, match="no"):
        generation.result()
