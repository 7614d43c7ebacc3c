"""What the memory may cost: bytes, time and growth, measured where it is what would break a server.

The numbers are those of the issue with room for a busy machine; benchmarks/memory.py measures them exactly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentspec.memory import MemoryStore, TrajectoryMemory
from benchmarks import memory as benchmark

ROOT = Path(__file__).parents[2]


@pytest.mark.ci
@pytest.mark.parametrize("name", benchmark.inputs(True))
def test_bytes_and_time_on_every_input(name: str) -> None:
    tokens = benchmark.inputs(True)[name]
    memory = TrajectoryMemory()
    started = time.process_time()
    memory.close(memory.extend(tokens))
    assert (time.process_time() - started) / len(tokens) < 2e-6
    assert memory.nbytes / len(tokens) < 24
    context = memory.extend(tokens[:500])
    taken = []
    for token in tokens[500:1500]:
        started = time.perf_counter()
        memory.match(context)
        taken.append(time.perf_counter() - started)
        memory.append(context, [int(token)])
    assert statistics.median(taken) < 40e-6


@pytest.mark.ci
def test_appending_is_linear() -> None:
    def seconds(count: int) -> float:
        memory = TrajectoryMemory()
        tokens = benchmark.text(count)
        context = memory.extend([1])
        started = time.process_time()
        memory.append(context, tokens)
        return time.process_time() - started

    seconds(1000)
    assert seconds(800_000) < 40 * max(1e-4, statistics.median(seconds(50_000) for _ in range(5)))


@pytest.mark.ci
def test_a_token_takes_24_bytes_at_any_size() -> None:
    assert max(benchmark.most_bytes(argparse.Namespace(quick=True)).values()) < 24


@pytest.mark.ci
def test_the_accounts_are_within_a_tenth_of_what_the_process_holds() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "accounts", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)["accounts"]
    assert {shape: row["ratio"] for shape, row in result.items() if not 0.9 < row["ratio"] < 1.1} == {}
    assert all(result[shape]["bytes_per_token"] < 24 for shape in ("agents", "one large", "turned over"))


@pytest.mark.nightly
def test_ten_million_tokens() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "soak", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)["soak"]
    assert result["tokens"] >= 10_000_000
    assert result["most_counted"] <= result["budget"]
    assert result["resident_growth"] < 1.15 * result["budget"]


@pytest.mark.nightly
def test_a_single_trajectory_of_ten_million_tokens() -> None:
    """One agent that never ends: its memory forgets, stays exact, and keeps its bound."""
    store = MemoryStore(2**26)
    memory = store.open("one", "n")
    source = benchmark.text(500_000)
    random = np.random.default_rng(1)
    done = 0
    while done < 10_000_000:
        at = int(random.integers(0, 450_000))
        context = memory.extend(source[at : at + int(random.integers(1000, 40_000))])
        memory.append(context, random.integers(0, 40_000, 500).astype(np.int32))
        done += len(context.tokens)
        memory.close(context)
        assert store.nbytes <= store.budget_bytes
    assert memory.epoch > 0 or len(memory) < memory.max_tokens
    memory.check()
