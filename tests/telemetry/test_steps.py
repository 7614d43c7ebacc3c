"""Verify-step events: off unless asked for, at most 64, and the right ones."""

from __future__ import annotations

import pytest

from agentspec.telemetry import names as n
from agentspec.telemetry.options import OPTIONS
from agentspec.telemetry.steps import MOST, worth_a_look
from tests.scripted import ScriptedEngine, Step

pytestmark = pytest.mark.fast


def test_off_by_default(spans):
    ScriptedEngine().chat([{"role": "user", "content": "x"}]).result()
    assert spans.named("chat scripted-1").events == ()


def test_at_most_64_of_300_steps_slowest_and_least_accepted(spans):
    OPTIONS.step_events = True
    script = [Step(2, 1)] * 150 + [Step(1, 12, wait_s=0.002)] * 20 + [Step(1, 3)] * 40 + [Step(2, 1)] * 90
    ScriptedEngine([script]).chat([{"role": "user", "content": "x"}]).result()
    span = spans.named("chat scripted-1")
    assert len(span.events) == 64 == MOST and span.dropped_events == 0
    chosen = {e.attributes[n.STEP_NUMBER]: e.attributes for e in span.events}
    assert set(range(150, 170)) <= set(chosen), "slow, and 12 proposed for nothing"
    rejected = [s for s, a in chosen.items() if a[n.STEP_PROPOSED] == 3]
    assert len(rejected) >= 20, "the next least accepted"
    for event in span.events:
        assert span.start_time <= event.timestamp <= span.end_time


@pytest.mark.parametrize("steps", [0, 1, 63, 64, 65, 500])
def test_never_more_than_there_are_nor_than_64(steps):
    chosen = worth_a_look([float(s % 7) for s in range(steps)], [(s % 5, 0) for s in range(steps)])
    assert len(chosen) == min(steps, MOST) and len({s for s, _ in chosen}) == len(chosen)
    assert chosen == sorted(chosen)


def test_without_drafts_the_slowest_are_taken():
    gaps = [1.0] * 200
    gaps[77] = gaps[150] = 50.0
    chosen = dict(worth_a_look(gaps, []))
    assert chosen[77] == chosen[150] == "slow" and len(chosen) == MOST
