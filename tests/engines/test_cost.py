"""CostMeter and measure: v(n) right on a machine that does other things too, within bounds, corrected while running."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
    times, worth_keeping = cost.measure(machine.run)
    found = {n: ms / times[1] for n, ms in times.items()}
    for n, v in TRUE.items():
        assert found[n] == pytest.approx(v, rel=0.01 if load == "none" else 0.1)
    assert machine.now < 10, "longer than ten seconds"
    assert worth_keeping or load != "none"


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


def test_one_disturbed_width_does_not_lift_the_wider_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen: v(4) = v(8) = v(16) = 2.74 on a busy machine, where v(16) is 1.8."""
    machine = Machine("none")
    inner = machine.run

    def run(n: int) -> None:
        inner(n)
        if n == 4:
            machine.now += 0.06 * 1.44

    monkeypatch.setattr(cost.time, "perf_counter", machine.perf_counter)
    times, _ = cost.measure(run)
    found = {n: times[n] / times[1] for n in times}
    assert found[4] == found[8] == found[16] == pytest.approx((2.74 + 1.5 + 1.8) / 3)
    assert found[32] == pytest.approx(2.2)


def test_a_slow_model_is_measured_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("none")
    monkeypatch.setattr(cost.time, "perf_counter", machine.perf_counter)
    times, worth_keeping = cost.measure(machine.run, budget_s=0.01)
    assert set(times) == set(TRUE)
    assert not worth_keeping
    assert machine.runs <= 6 + 6


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


IDENTITY = {"model": "m", "threads": 2}
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
_widths = st.sampled_from([str(n) for n in cost.WIDTHS]) | st.integers(-5, 40).map(str) | st.text(max_size=3)
_numbers = st.floats(1.0, 40.0) | st.floats() | st.sampled_from([0, -1, True, 10**400, "60", None, 60])
_nearly_times = st.dictionaries(_widths, _numbers, max_size=5) | st.fixed_dictionaries(
    {"1": _numbers}, optional={"2": _numbers}
)


def _heals(path: Path) -> None:
    """Whatever the file holds: no curve of it, or one to work with; and what is measured then is kept."""
    times = cost.stored(path, IDENTITY)
    if times is not None:
        curve = CostCurve.measured(times)
        v = curve.table(100)[1:]
        assert 1 in times and curve.base_ms is not None and 0 < curve.base_ms < math.inf
        assert v[0] == 1.0 and np.isfinite(v).all() and (np.diff(v) >= 0).all()
        assert all(curve(n) <= n * (1 + 1e-9) for n in times)
        cost.CostMeter(curve).record(2, 70.0)
    cost.store(path, IDENTITY, {1: 60.0, 2: 70.5})
    assert cost.stored(path, IDENTITY) == {1: 60.0, 2: 70.5}


@given(entry=_json | _nearly_times)
@example(entry={})
@example(entry={"1": math.nan, "2": 70.0})
@example(entry={"1": 60.0, "2": math.inf})
@example(entry={"1": math.inf, "2": math.inf})
@example(entry={"1": 60.0, "0": 60.0})
@example(entry={"1": 60.0, "-3": 60.0})
@example(entry={"1": 0.0, "2": 0.0})
@example(entry={"1": 60.0, "2": 0.0})
@example(entry={"1": -60.0, "2": -60.0})
@example(entry={"1": 60.0, "2": 10**400})
@example(entry={"1": 10**400, "2": 10**400})
@example(entry={"1": 60.0, "1" + 400 * "0": 60.0})
@example(entry={"2": 60.0})
@example(entry={"1": 1e308, "2": 1.5e308})
@example(entry={"1": 5e-324, "32": 1.6e-322})
def test_an_entry_that_no_measurement_made_is_measured_again(entry: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("cost") / "curves.json"
    path.write_text(json.dumps({json.dumps(IDENTITY, sort_keys=True): entry, "other": entry}), encoding="utf-8")
    _heals(path)


@given(content=st.binary(max_size=60) | _json.map(lambda value: json.dumps(value).encode()))
@example(content=b"[" * 100_000)
@example(content=b'{"a":' * 100_000)
@example(content=b'{"other": ' + b"9" * 5000 + b"}")
@example(content=b'{"other": {"1": "\\ud800"}}')
def test_whatever_the_file_holds_it_heals(content: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("cost") / "curves.json"
    path.write_bytes(content)
    _heals(path)


@pytest.mark.parametrize("load", ["none", "spikes", "phases"])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_measured_is_found_again(monkeypatch: Any, tmp_path: Path, load: str, seed: int) -> None:
    machine = Machine(load, seed)
    monkeypatch.setattr(cost.time, "perf_counter", machine.perf_counter)
    times, _ = cost.measure(machine.run, budget_s=0.5)
    cost.store(tmp_path / "curves.json", IDENTITY, times)
    assert cost.stored(tmp_path / "curves.json", IDENTITY) == times


def test_others_entries_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    cost.store(path, {"model": "other"}, {1: 5.0, 4: 9.0})
    broken = json.loads(path.read_text())
    path.write_text(json.dumps({**broken, "broken": {"1": 0}}))
    cost.store(path, IDENTITY, {1: 60.0})
    assert cost.stored(path, {"model": "other"}) == {1: 5.0, 4: 9.0}
    assert "broken" not in json.loads(path.read_text())


def test_engines_that_measure_at_the_same_time_keep_all(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    names = [[f"{thread}-{n}" for n in range(25)] for thread in range(4)]

    def keep(mine: list[str]) -> None:
        for name in mine:
            cost.store(path, {"model": name}, {1: 1.0, 2: 1.5})

    threads = [threading.Thread(target=keep, args=(mine,)) for mine in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cost.stored(path, {"model": name}) for mine in names for name in mine)


def test_a_place_that_cannot_be_written_is_no_error() -> None:
    cost.store(Path("/proc/nowhere/curves.json"), {"a": 1}, {1: 1.0})


def test_recording_costs_microseconds() -> None:
    meter = cost.CostMeter(CostCurve(TRUE, base_ms=60.0))
    started = time.perf_counter()
    for _ in range(2000):
        meter.record(9, 90.0)
    assert (time.perf_counter() - started) / 2000 < 2e-3
