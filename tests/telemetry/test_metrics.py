"""The metrics: names, units, the conventional buckets, attributes of low cardinality."""

from __future__ import annotations

import pytest

import agentspec
from agentspec.telemetry import names
from tests.scripted import ScriptedEngine, Step

pytestmark = pytest.mark.fast

MESSAGES = [{"role": "user", "content": "x"}]


def points(metric):
    return list(metric.data.data_points)


def test_a_call_is_measured_without_any_tracing(measured):
    engine = ScriptedEngine([[Step(1, wait_s=0.02), *[Step(4, 3, wait_s=0.005)] * 5]])
    with agentspec.trajectory("some-id", name="a"):
        engine.chat(MESSAGES).result()
        engine.chat(MESSAGES).result()
    found = measured()
    for metric in (m for m in names.METRICS.values() if m.instrument == "histogram"):
        seen = found[metric.name]
        assert (seen.unit, seen.description) == (metric.unit, metric.meaning)
        for point in points(seen):
            assert tuple(point.explicit_bounds) == metric.buckets
            assert "some-id" not in str(dict(point.attributes))
            assert point.attributes["gen_ai.operation.name"] == "chat"
            assert point.attributes["gen_ai.request.model"] == "scripted-1"
            assert point.attributes["gen_ai.provider.name"] == "agentspec"
    (duration,) = points(found["gen_ai.client.operation.duration"])
    assert duration.count == 2 and 0.08 < duration.sum < 5
    usage = {p.attributes["gen_ai.token.type"]: p.sum for p in points(found["gen_ai.client.token.usage"])}
    assert usage == {"input": 2 * 39, "output": 2 * 21}
    (first,) = points(found["gen_ai.server.time_to_first_token"])
    assert first.min >= 0.02
    (itl,) = points(found["gen_ai.server.time_per_output_token"])
    assert 0.001 < itl.min < 0.02, "25 ms over 20 tokens"
    (accepted,) = points(found["agentspec.acceptance_rate"])
    assert accepted.sum == pytest.approx(2.0) and accepted.attributes["gen_ai.agent.name"] == "a"
    (per_step,) = points(found["agentspec.tokens_per_step"])
    assert per_step.sum == pytest.approx(2 * 21 / 6)


def test_a_failed_call_has_a_duration_with_its_error_and_no_latencies(measured):
    engine = ScriptedEngine([[Step(2), Step(error=RuntimeError("x"))]])
    with pytest.raises(agentspec.AgentSpecError):
        engine.chat(MESSAGES).result()
    found = measured()
    (duration,) = points(found["gen_ai.client.operation.duration"])
    assert duration.attributes["error.type"] == "EngineError"
    assert "gen_ai.server.time_to_first_token" not in found
