"""LocalEngine under threads, tasks, aborts, dropped streams, forks and budgets.

TORTURE.md's table "Streams, threads and failures", and its row on two calls of one trajectory at once.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.drafting import CostCurve
from agentspec.engines.base import GenerationRequest, GenerationResult
from agentspec.engines.local import LocalEngine
from agentspec.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    RequestAbortedError,
)
from agentspec.loop import Trajectory, trajectory
from tests import tiny

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., LocalEngine]
PROMPT = [5, 70, 130, 9, 200, 11, 5, 70, 130]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(prompt: list[int] | None = None, **options: Any) -> GenerationRequest:
    return GenerationRequest(**{"input_ids": prompt or PROMPT, "max_tokens": 24, "ignore_eos": True, **options})


def run(engine: LocalEngine, prompt: list[int] | None = None, **options: Any) -> GenerationResult:
    return engine.generate(request(prompt, **options)).result()


class Gate:
    """Stops the engine's forwards until it is opened, and counts them."""

    def __init__(self, engine: LocalEngine) -> None:
        self.steps = 0
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)
        inner = engine.forward.step

        def step(*args: Any, **options: Any) -> Any:
            self.steps += 1
            self.arrived.release()
            assert self.open.wait(30)
            return inner(*args, **options)

        engine.forward.step = step  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# ---- threads and tasks ---------------------------------------------------------------------------


def test_many_threads_get_their_own_results(tiny_engine: Make) -> None:
    engine = tiny_engine()
    prompts = [[i, 70, i + 1, 9, i + 2] for i in range(8)]
    wanted = [run(tiny_engine(max_draft=0), p).token_ids for p in prompts]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        with trajectory():
            found[i] = [run(engine, prompts[i]).token_ids for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [wanted[i]] * 3 for i in range(8)}


def test_lanes_are_served_in_turn(tiny_engine: Make) -> None:
    """Twenty calls queued by one trajectory delay another's by one."""
    engine = tiny_engine()
    gate = Gate(engine)
    order: list[str] = []
    busy, other = Trajectory("busy"), Trajectory("other")
    many = [engine.generate(request(max_tokens=2, trajectory=busy)) for _ in range(20)]
    gate.arrived.acquire()
    one = engine.generate(request(max_tokens=2, trajectory=other))

    def note(name: str, call: Any) -> None:
        call.result()
        order.append(name)

    threads = [threading.Thread(target=note, args=("busy", call)) for call in many]
    threads.append(threading.Thread(target=note, args=("other", one)))
    for thread in threads:
        thread.start()
    gate.open.set()
    for thread in threads:
        thread.join()
    assert other.calls and order.index("other") <= 4  # threads may note a little late
    assert other.calls[0].queue_ms < busy.calls[-1].queue_ms


def test_two_calls_of_one_trajectory_at_once(tiny_engine: Make) -> None:
    """Parallel tool calls: both right, nothing lost from the memory, no deadlock."""
    engine, shared = tiny_engine(), Trajectory("shared")
    prompts = [[*PROMPT, i] for i in range(6)]
    calls = [engine.generate(request(p, trajectory=shared)) for p in prompts]
    found = [call.result().token_ids for call in calls]
    assert found == [run(tiny_engine(max_draft=0), p).token_ids for p in prompts]
    assert len(shared.calls) == 6
    engine.memory(shared).check()
    assert {c.call_index for c in shared.calls} == set(range(6))


def test_async_for_and_gather(tiny_engine: Make) -> None:
    engine = tiny_engine()
    wanted = run(engine)

    async def stream() -> tuple[int, ...]:
        return tuple([i async for chunk in engine.generate(request()) for i in chunk.token_ids])

    async def main() -> Any:
        return await asyncio.gather(*(stream() for _ in range(5)), engine.generate(request()).aresult())

    *streamed, result = asyncio.run(main())
    assert streamed == [wanted.token_ids] * 5
    assert result.text == wanted.text


def test_two_engines_in_one_process(tiny_engine: Make) -> None:
    a, b = tiny_engine(seed=0), tiny_engine(seed=1)
    wanted = run(a).token_ids, run(b).token_ids
    assert wanted[0] != wanted[1]
    calls = [(a if i % 2 == 0 else b).generate(request()) for i in range(8)]
    assert [c.result().token_ids for c in calls] == [wanted[i % 2] for i in range(8)]


# ---- aborts: sglang#36333, #36475, langchain#38028 -----------------------------------------------


@pytest.mark.parametrize("how", ["abort", "with", "drop", "aclose"])
def test_abort_ends_within_a_step_and_rolls_back_to_what_was_delivered(tiny_engine: Make, how: str) -> None:
    engine, held = tiny_engine(), Trajectory("held")
    wanted = run(tiny_engine(max_draft=0), max_tokens=400)
    gate = Gate(engine)
    call = engine.generate(request(max_tokens=400, trajectory=held))
    gate.open.set()
    first = next(call)
    second = next(call)
    # let it run ahead of its consumer, then stop it in the middle of a step
    wait_until(lambda: gate.steps > 6)
    gate.open.clear()
    for _ in range(gate.steps):
        gate.arrived.acquire()
    wait_until(lambda: not gate.open.is_set())
    steps = gate.steps
    if how == "abort":
        call.abort()
    elif how == "with":
        with call:
            pass
    elif how == "aclose":
        asyncio.run(call.aclose())
    else:
        del call
        gc.collect()
    gate.open.set()
    wait_until(lambda: engine._states.get(held).in_use == 0)
    assert gate.steps <= steps + 1
    delivered = first.token_ids + second.token_ids
    assert delivered == wanted.token_ids[: len(delivered)]
    state = engine._states.get(held)
    assert state.last.tolist() == PROMPT + list(delivered)
    assert engine.memory(held).tokens.tolist().count(wanted.token_ids[len(delivered)]) <= wanted.token_ids[
        : len(delivered)
    ].count(wanted.token_ids[len(delivered)]) + PROMPT.count(wanted.token_ids[len(delivered)])
    assert state.cache.length <= len(PROMPT) + len(delivered)
    assert state.cached.tolist() == (PROMPT + list(delivered))[: state.cache.length]
    engine.memory(held).check()
    assert not held.calls, "an aborted call is no finished one"
    if how != "drop":
        with pytest.raises(RequestAbortedError) as caught:
            next(call)
        assert caught.value.partial.token_ids == delivered
        assert call.stats is not None and call.stats.finish_reason == "abort"
        with pytest.raises(RequestAbortedError):
            next(call)
    # the trajectory goes on from what was delivered
    follow = run(engine, PROMPT + list(delivered), trajectory=held)
    assert follow.token_ids == wanted.token_ids[len(delivered) : len(delivered) + 24]


def test_a_long_prefill_is_aborted_between_its_chunks(tiny_engine: Make) -> None:
    engine = tiny_engine(model={"max_position_embeddings": 4096})
    gate = Gate(engine)
    call = engine.generate(request(np.random.default_rng(0).integers(0, 400, 3000).tolist()))
    gate.arrived.acquire()
    call.abort()
    gate.open.set()
    with pytest.raises(RequestAbortedError):
        call.result()
    assert gate.steps <= 2


def test_abort_while_queued_is_told_at_once(tiny_engine: Make) -> None:
    engine = tiny_engine()
    gate = Gate(engine)
    running = engine.generate(request())
    gate.arrived.acquire()
    queued = engine.generate(request())
    queued.abort()
    with pytest.raises(RequestAbortedError) as caught:
        queued.result()  # while the other still runs
    assert caught.value.partial.token_ids == ()
    gate.open.set()
    assert len(running.result().token_ids) == 24
    steps = gate.steps
    run(engine, max_tokens=1)
    assert gate.steps == steps + 1, "the aborted call was run"


def test_a_dropped_stream_frees_its_cache(tiny_engine: Make) -> None:
    engine = tiny_engine()
    for _ in range(5):
        call = engine.generate(request(max_tokens=300))
        next(call)
        del call
        gc.collect()
    run(engine)
    wait_until(lambda: len(engine._states) == 0)
    assert engine.kv_bytes == 0
    assert len(engine.store) == 0


def test_calls_without_a_trajectory_leave_nothing(tiny_engine: Make) -> None:
    engine = tiny_engine()
    for i in range(10):
        run(engine, [i, 4, 5])
    assert len(engine._states) == 0 and engine.kv_bytes == 0 and len(engine.store) == 0


def test_async_cancellation_aborts(tiny_engine: Make) -> None:
    engine, held = tiny_engine(), Trajectory("held")
    gate = Gate(engine)

    async def consume() -> None:
        async for _ in engine.generate(request(max_tokens=400, trajectory=held)):
            pass

    async def main() -> None:
        task = asyncio.create_task(consume())
        while gate.steps == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gate.open.set()
    wait_until(lambda: engine._states.get(held).in_use == 0)
    assert gate.steps <= 2

    async def timed_out() -> None:
        gate.open.clear()
        await asyncio.wait_for(engine.generate(request(max_tokens=400, trajectory=held)).aresult(), 0.05)

    with pytest.raises((asyncio.TimeoutError, TimeoutError)):
        asyncio.run(timed_out())
    gate.open.set()
    wait_until(lambda: engine._states.get(held).in_use == 0)
    assert len(run(engine, trajectory=held).token_ids) == 24


def test_abort_after_the_end_changes_nothing(tiny_engine: Make) -> None:
    engine = tiny_engine()
    call = engine.generate(request())
    result = call.result()
    call.abort()
    assert call.result().token_ids == result.token_ids


def test_close_ends_what_runs_and_what_waits(tiny_engine: Make) -> None:
    engine = tiny_engine()
    gate = Gate(engine)
    running = engine.generate(request(max_tokens=300))
    gate.arrived.acquire()
    queued = engine.generate(request())
    closer = threading.Thread(target=engine.close)
    closer.start()
    time.sleep(0.05)
    gate.open.set()
    closer.join(20)
    assert not closer.is_alive()
    for call in (queued, running):
        with pytest.raises(EngineClosedError):
            call.result()
    assert gate.steps <= 2
    with pytest.raises(EngineClosedError):
        engine.generate(request())
    engine.close()


def test_an_engine_that_is_dropped_ends_its_thread(tiny_tokenizer: Any) -> None:
    engine = LocalEngine(tiny.model(), tokenizer=tiny_tokenizer, cost_curve=CostCurve.linear(0.01))
    run(engine)
    thread = engine._worker._thread
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_in_the_model_is_typed_and_the_next_call_is_right(tiny_engine: Make) -> None:
    engine, held = tiny_engine(), Trajectory("held")
    wanted = run(engine, trajectory=held)
    inner, count = engine.forward.step, 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            inner(*args, **options)  # the cache has grown already
            raise RuntimeError("out of memory, say")
        return inner(*args, **options)

    engine.forward.step = failing  # type: ignore[method-assign]
    call = engine.generate(request([*PROMPT, 3], trajectory=held))
    with pytest.raises(EngineError, match="out of memory, say"):
        call.result()
    assert run(engine, trajectory=held).token_ids == wanted.token_ids
    engine.memory(held).check()


# ---- budget --------------------------------------------------------------------------------------


def test_kv_budget_least_recently_used_goes_first(tiny_engine: Make) -> None:
    engine = tiny_engine()
    trajectories = [Trajectory(f"t{i}") for i in range(6)]
    prompt = np.random.default_rng(0).integers(0, 400, 100).tolist()
    run(engine, prompt, trajectory=trajectories[0])
    each = engine.kv_bytes
    assert each > 0
    engine = tiny_engine(kv_budget=3 * each + each // 2)
    firsts = {}
    for t in trajectories:
        firsts[t.id] = run(engine, prompt, trajectory=t).token_ids
        assert engine.kv_bytes <= engine._states.kv_budget
    assert engine._states.evicted == 3
    # the most recent is there, the oldest is computed again, and right
    last = run(engine, prompt + list(firsts["t5"]), trajectory=trajectories[5], max_tokens=2)
    assert last.stats.reused_tokens >= len(prompt)
    old = run(engine, prompt + list(firsts["t0"]), trajectory=trajectories[0], max_tokens=2)
    assert old.stats.reused_tokens == 0
    assert old.token_ids == last.token_ids
    # t3 was the least recently used of what was left
    assert [engine._states.get(t).cache is not None for t in trajectories] == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_budget_that_holds_nothing_is_refused_with_what_to_set(tiny_engine: Make) -> None:
    with pytest.raises(InvalidRequestError, match="allow at least"):
        tiny_engine(kv_budget=100)
    with pytest.raises(InvalidRequestError, match="kv_budget"):
        tiny_engine(kv_budget=0)
    small = tiny_engine(kv_budget=64 * 1024)
    with pytest.raises(ContextLengthError, match="kv_budget holds"):
        run(small, list(range(200)))


# ---- processes: opentelemetry-python#3307 --------------------------------------------------------


def _child(engine: LocalEngine, connection: Any) -> None:
    torch.set_num_threads(1)
    connection.send(run(engine).token_ids)
    connection.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_works_in_the_child(tiny_engine: Make) -> None:
    engine = tiny_engine()
    wanted = run(engine).token_ids
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(engine, there))
    process.start()
    assert here.poll(60), "the child hangs"
    assert here.recv() == wanted
    process.join(20)
    assert run(engine).token_ids == wanted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_during_a_call(tiny_engine: Make) -> None:
    """The parent's call goes on in the parent; in the child its stream says so, and new calls work."""
    engine, held = tiny_engine(), Trajectory("held")
    wanted = run(tiny_engine(max_draft=0), max_tokens=900).token_ids
    call = engine.generate(request(max_tokens=900, trajectory=held))
    next(call)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = b"?"
        try:
            try:
                call.result()
                status = b"no error"
            except EngineError as error:
                status = b"told" if "parent process" in str(error) else repr(error).encode()
            fresh = run(engine, max_tokens=900, trajectory=held).token_ids
            status += b" right" if fresh == wanted else b" wrong"
        except BaseException as error:
            status = repr(error).encode()
        finally:
            os.write(write, status)
            os._exit(0)
    os.close(write)
    assert call.result().token_ids == wanted
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"told right"
    os.waitpid(pid, 0)


def _spawned(connection: Any) -> None:
    torch.set_num_threads(1)
    with LocalEngine(tiny.model(), tokenizer=tiny.tokenizer(), cost_curve=CostCurve.linear(0.01)) as engine:
        connection.send(run(engine).token_ids)


def test_spawn_makes_its_own(tiny_engine: Make) -> None:
    wanted = run(tiny_engine()).token_ids
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_spawned, args=(there,))
    process.start()
    assert here.poll(120), "the child hangs"
    assert here.recv() == wanted
    process.join(20)


def test_an_engine_is_not_pickled(tiny_engine: Make) -> None:
    with pytest.raises(TypeError, match="make one there"):
        pickle.dumps(tiny_engine())


# ---- KV across calls -----------------------------------------------------------------------------


def test_a_chain_prefills_only_what_is_new(tiny_engine: Make) -> None:
    """Ten calls, each the last context and a tool's answer: prefilled tokens = the sum of the new ones."""
    engine, chain = tiny_engine(), Trajectory("chain")
    rng = np.random.default_rng(1)
    context = rng.integers(0, 400, 60).tolist()
    prefilled = 0
    for number in range(10):
        result = run(engine, context, trajectory=chain, max_tokens=12)
        prefilled += result.stats.prompt_tokens - result.stats.reused_tokens
        # the last emitted id has no keys and values yet, so it runs again
        assert result.stats.reused_tokens == (0 if number == 0 else len(context) - 15 - 1)
        assert result.stats.first_divergence is None
        context = context + list(result.token_ids) + rng.integers(0, 400, 15).tolist()
    assert prefilled == 60 + 9 * 16
    fresh = run(tiny_engine(max_draft=0), context, max_tokens=12)
    assert run(engine, context, trajectory=chain, max_tokens=12).token_ids == fresh.token_ids


def test_a_rewritten_history_is_cut_at_its_first_divergence(tiny_engine: Make) -> None:
    engine, chain = tiny_engine(), Trajectory("chain")
    prompt = list(range(50))
    run(engine, prompt, trajectory=chain)
    changed = [*prompt[:30], 77, *prompt[31:]]
    result = run(engine, changed, trajectory=chain)
    assert result.stats.first_divergence == 30
    assert result.stats.reused_tokens == 30
    assert result.token_ids == run(tiny_engine(max_draft=0), changed).token_ids


@pytest.mark.parametrize(
    "stream", ["for chunk in engine.chat(M): break", "engine.chat(M)", "it = iter(engine.chat(M)); next(it)"]
)
def test_a_program_that_leaves_a_stream_ends_well(stream: str, tmp_path: Path) -> None:
    """The call still runs when the interpreter goes; it is ended, and what the program wrote is there."""
    program = f"""
from agentspec import LocalEngine
from agentspec.drafting import CostCurve
from tests import tiny
M = [dict(role="user", content="Hi")]
engine = LocalEngine(tiny.model(max_position_embeddings=65536), tokenizer=tiny.tokenizer(), cost_curve=CostCurve.linear(0.01))
kept = open({str(tmp_path / "written")!r}, "w")
kept.write("all of it")
{stream}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and (tmp_path / "written").read_text() == "all of it"
