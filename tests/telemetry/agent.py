"""An agent as a user writes it, run as a process of its own by the tests: python -m tests.telemetry.agent
SCENARIO.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import time

import agentspec
from agentspec.errors import EngineError
from tests.scripted import ScriptedEngine, Step

MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Read notes.txt."}]


@agentspec.tool
def read_file(path: str) -> str:
    """Read a file."""
    return "The quick brown fox jumps over the lazy dog. " * 3


@agentspec.agent_loop(name="reader")
async def reader(engine, number: int) -> None:
    history = list(MESSAGES)
    for _ in range(2):
        result = await engine.chat(history, max_tokens=24).aresult()
        history += [result.message, {"role": "user", "content": read_file("notes.txt")}]


def everything(engine, failing) -> None:
    """Two concurrent trajectories, a failing call and an abandoned one."""

    async def both():
        await asyncio.gather(reader(engine, 1), reader(engine, 2))

    asyncio.run(both())
    try:
        with agentspec.trajectory(name="unlucky"):
            failing.chat(MESSAGES).result()
    except EngineError:
        pass
    with agentspec.trajectory(name="impatient"):
        slow = ScriptedEngine([[Step(2), *[Step(wait_s=0.01)] * 200]])
        for _ in slow.chat(MESSAGES):
            break


leaving = [0.0]


def left() -> None:
    print(f"left after {time.monotonic() - leaving[0]:.3f}", flush=True)


def main() -> None:
    # Registered before telemetry's own exit handler, so called after it.
    atexit.register(left)
    scenario = sys.argv[1]
    failing = ScriptedEngine([[Step(1), Step(error=RuntimeError("out of memory"))]])
    if scenario == "own-provider":
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider(resource=Resource.create({"service.name": "mine"})))
    made = None if scenario == "trace" else agentspec.telemetry.configure()
    if scenario in ("scripted", "own-provider", "trace"):
        everything(ScriptedEngine(), failing)
    elif scenario == "calls":  # says how long the slowest of 20 calls took to be started and read
        engine, slowest = ScriptedEngine([[Step()] * 4]), 0.0
        for _ in range(20):
            began = time.perf_counter()
            engine.chat(MESSAGES).result()
            slowest = max(slowest, time.perf_counter() - began)
        print(f"slowest {slowest:.3f}")
    elif scenario == "fork":
        with agentspec.trajectory(name="parent"):
            engine = ScriptedEngine()
            engine.chat(MESSAGES).result()
            if os.fork() == 0:
                with agentspec.trajectory(name="child"):
                    ScriptedEngine().chat(MESSAGES).result()
                sys.exit(0)  # through the parent's `with`, whose span is not the child's to end
            os.wait()
    elif scenario == "multiprocessing":
        import multiprocessing

        with agentspec.trajectory(name="parent"):
            child = multiprocessing.get_context("fork").Process(target=_child)
            child.start()
            child.join()
    else:
        raise SystemExit(f"unknown scenario {scenario}")
    leaving[0] = time.monotonic()
    print(f"leaving, installed {made.installed if made else None}", flush=True)


def _child() -> None:
    with agentspec.trajectory(name="child"):
        ScriptedEngine().chat(MESSAGES).result()


if __name__ == "__main__":
    main()
