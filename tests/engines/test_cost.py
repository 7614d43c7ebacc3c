"""CostMeter and measure: v(n) right on a machine that does other things too, within bounds, corrected while running."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from agentspec.drafting import CostCurve
from agentspec.engines import cost

pytestmark = pytest.mark.fast

TRUE = {1: 1.0, 2: 1.2, 4: 1.3, 8: 1.5, 16: 1.8, 32: 2.2}


class Machine:
    """A clock that a forward advances by its true cost times the load of the moment."""

    def __init__(self, load: str, seed: int = 0) -> None:
        self.now = 0.0
        self.load = load
        self.rng = random.Random(seed)
        self.runs = 0

    def perf_counter(self) -> float:
        return self.now

    def run(self, n: int) -> None:
        self.runs += 1
        factor = 1.0
        if self.load == "spikes" and self.rng.random() < 0.2:
            factor = self.rng.uniform(2, 8)
        if self.load == "phases":  # another job comes and goes every two seconds
            factor = 3.0 if int(self.now / 2) % 2 else 1.0
        self.now += 0.06 * TRUE[n] * factor


@pytest.mark.parametrize("load", ["none", "spikes", "phases"])
@pytest.mark.parametrize("seed", range(5))
def test_v_is_right_whatever_else_runs(monkeypatch: pytest.MonkeyPatch, load: str, seed: int) -> None:
    machine = Machine(load, seed)
    monkeypatch.setattr(cost.time, "perf_counter", machine.perf_counter)
    times, steady = cost.measure(machine.run)
    found = {n: ms / times[1] for n, ms in times.items()}
    for n, v in TRUE.items():
        assert found[n] == pytest.approx(v, rel=0.01 if load == "none" else 0.35)
    assert machine.now < 10, "longer than ten seconds"
    assert steady or load != "none"


def test_a_single_slow_run_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen: v(2) = 6.8 from one run. Never more than n, never falling."""
    machine = Machine("none")
    inner = machine.run

    def run(n: int) -> None:
        inner(n)
        if n == 2:
            machine.now += 0.4

    monkeypatch.setattr(cost.time, "perf_counter", machine.perf_counter)
    times, _ = cost.measure(run)
    found = [times[n] / times[1] for n in sorted(times)]
    assert found[1] <= 2.0
    assert found == sorted(found)


def test_a_slow_model_is_measured_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("none")
    monkeypatch.setattr(cost.time, "perf_counter", machine.perf_counter)
    times, _ = cost.measure(machine.run, budget_s=0.01)
    assert set(times) == set(TRUE)
    assert machine.runs <= 6 + 11


def test_a_wrong_measurement_is_corrected_by_what_runs() -> None:
    meter = cost.CostMeter(CostCurve({1: 1.0, 2: 2.0, 4: 4.0, 8: 4.0, 16: 4.0, 32: 4.6}, base_ms=60.0))
    truth = CostCurve(TRUE)
    rng = random.Random(1)
    for _ in range(1500):
        n = rng.choice([1, 1, 5, 17])
        meter.record(n, 60.0 * truth(n) * rng.uniform(1.0, 1.15))
    assert meter.version > 0
    for n in (5, 17):
        assert meter.curve(n) == pytest.approx(truth(n), rel=0.2)
    assert meter.base_ms == pytest.approx(64, rel=0.15)


def test_load_that_slows_everything_changes_no_v() -> None:
    meter = cost.CostMeter(CostCurve(TRUE, base_ms=60.0))
    truth = CostCurve(TRUE)
    rng = random.Random(2)
    for step in range(1000):
        n = rng.choice([1, 3, 9, 17])
        meter.record(n, (60.0 if step % 400 < 200 else 180.0) * truth(n))
    for n in TRUE:
        assert meter.curve(n) == pytest.approx(truth(n), rel=0.12)


def test_v_stays_monotone_and_bounded_under_nonsense() -> None:
    meter = cost.CostMeter(CostCurve(TRUE, base_ms=60.0))
    rng = random.Random(3)
    for _ in range(2000):
        meter.record(rng.randint(1, 40), 10 ** rng.uniform(-2, 5))
    values = [meter.curve(n) for n in range(1, 40)]
    assert values == sorted(values) and values[0] == 1.0
    assert all(meter.curve(n) <= n for n in TRUE)


def test_kept_on_disk_and_a_broken_file_heals(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "curves.json"
    identity = {"model": "m", "threads": 2}
    assert cost.stored(path, identity) is None
    cost.store(path, identity, {1: 60.0, 2: 70.5})
    cost.store(path, {"model": "other"}, {1: 1.0})
    assert cost.stored(path, identity) == {1: 60.0, 2: 70.5}
    assert cost.stored(path, {"model": "m", "threads": 1}) is None
    for broken in ("", "[]", "{", '{"x": 3}', json.dumps({json.dumps(identity, sort_keys=True): "no"})):
        path.write_text(broken)
        assert cost.stored(path, identity) is None
        cost.store(path, identity, {1: 60.0})
        assert cost.stored(path, identity) == {1: 60.0}


def test_a_place_that_cannot_be_written_is_no_error() -> None:
    cost.store(Path("/proc/nowhere/curves.json"), {"a": 1}, {1: 1.0})


def test_recording_costs_microseconds() -> None:
    meter = cost.CostMeter(CostCurve(TRUE, base_ms=60.0))
    started = time.perf_counter()
    for _ in range(2000):
        meter.record(9, 90.0)
    assert (time.perf_counter() - started) / 2000 < 2e-3
