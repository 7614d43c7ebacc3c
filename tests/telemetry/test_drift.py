"""Drift: found where drafting stopped paying and only there, said once, with its cause in words."""

from __future__ import annotations

import logging

import pytest

import agentspec
from agentspec.engines.base import CallStats
from agentspec.telemetry.drift import LEAST_CALLS, Cause, DriftWatch
from tests.scripted import ScriptedEngine, Step

pytestmark = pytest.mark.fast

MATCHLESS = {"no match or not worth it": 40}


def call(tokens=40, steps=40, cost=1.1, **fields):
    return CallStats(output_tokens=tokens, verify_steps=steps, mean_cost=cost, **fields)


def gaining():
    return call(tokens=80, cost=1.3, proposed=60, accepted=40, mismatches=10)


def rejected(**fields):
    return call(tokens=44, cost=1.6, proposed=300, accepted=4, mismatches=38, **fields)


def observe(calls, trajectory=None, fingerprints=None, watch=None):
    watch, trajectory = watch or DriftWatch(), trajectory or agentspec.Trajectory("t", None, "agent")
    fingerprints = fingerprints or [None] * len(calls)
    return [watch.observe(trajectory, f, c) for c, f in zip(calls, fingerprints, strict=True)]


@pytest.mark.parametrize(
    ("stats", "cause", "words"),
    [
        (call(not_drafted=MATCHLESS), Cause.NOTHING_MATCHED, "120 of 120 steps found no text"),
        (rejected(), Cause.REJECTED, "12 of 900 draft tokens accepted"),
        (rejected(temperature=0.8), Cause.TEMPERATURE, "temperature 0.8"),
        (call(not_drafted={"load": 40}), Cause.LOAD, "because the batch was full"),
    ],
)
def test_the_cause_is_named(caplog, stats, cause, words):
    found = observe([stats] * LEAST_CALLS)
    assert found[:-1] == [None] * (LEAST_CALLS - 1), "one bad call is no drift"
    assert found[-1].cause is cause
    assert words in found[-1].words and "break-even" in found[-1].words
    assert len(caplog.records) == 1 and words in caplog.text and "trajectory t (agent)" in caplog.text


def test_a_changed_template_is_the_cause_where_it_changed():
    calls = [gaining()] * 3 + [rejected()] * 8
    found = observe(calls, fingerprints=["a"] * 3 + ["b"] * 8)
    causes = [d.cause for d in found if d]
    assert causes and causes[0] is Cause.TEMPLATE
    assert "template changed to b" in next(d for d in found if d).words


def test_a_template_that_changes_from_run_to_run_is_found_in_the_next_run():
    watch = DriftWatch()
    observe([gaining()] * 3, agentspec.Trajectory("1", "shared", "agent"), ["a"] * 3, watch)
    found = observe([rejected()] * 3, agentspec.Trajectory("2", "shared", "agent"), ["b"] * 3, watch)
    assert found[-1].cause is Cause.TEMPLATE


def test_other_agents_templates_are_no_change():
    watch = DriftWatch()
    observe([gaining()] * 3, agentspec.Trajectory("1", None, "agent"), ["a"] * 3, watch)
    found = observe([rejected()] * 3, agentspec.Trajectory("2", None, "agent"), ["b"] * 3, watch)
    assert found[-1].cause is Cause.REJECTED


def test_where_it_pays_nothing_is_said(caplog):
    assert observe([gaining()] * 20) == [None] * 20
    assert not caplog.records


def test_where_drafting_is_off_nothing_is_said(caplog):
    assert observe([call(cost=1.0, not_drafted={"off": 40})] * 20) == [None] * 20
    assert not caplog.records


def test_few_steps_are_not_judged():
    assert observe([call(tokens=3, steps=3, not_drafted={"no match": 3})] * 5) == [None] * 5


def test_it_is_said_once_and_again_after_a_recovery(caplog):
    observe([rejected()] * 10 + [gaining()] * 16 + [rejected()] * 16)
    assert len([r for r in caplog.records if "trajectory" in r.message]) == 2


def test_a_template_is_watched_over_its_trajectories(caplog):
    watch = DriftWatch()
    found = []
    for number in range(4):  # each too short to be judged by itself
        found += observe([rejected()], agentspec.Trajectory(str(number), None, "agent"), ["abc"], watch)
    assert found[-1] is not None and found[-1].cause is Cause.REJECTED
    assert "prompt template abc" in caplog.text
    assert len(caplog.records) == 1


def test_drift_is_on_the_spans_in_the_metric_and_in_one_line(spans, measured, caplog):
    engine = ScriptedEngine([[Step(1, 8)] * 20], break_even=1.7)
    with caplog.at_level(logging.WARNING), agentspec.trajectory("id-1", name="a"):
        for _ in range(5):
            engine.chat([{"role": "user", "content": "x"}]).result()
    root = spans.named("invoke_agent a").attributes
    assert root["agentspec.drift.cause"] == "matched and rejected"
    assert root["agentspec.drift"].startswith("matched and rejected: the memory offers text")
    assert root["agentspec.below_break_even"] is True
    calls = [s.attributes for s in spans.all() if s.name == "chat scripted-1"]
    assert ["agentspec.drift" in c for c in calls] == [False, False, True, True, True]
    (point,) = measured()["agentspec.drift.calls"].data.data_points
    assert point.value == 3 and point.attributes["agentspec.drift.cause"] == "matched and rejected"
    assert len([r for r in caplog.records if r.name == "agentspec.drift"]) == 1
