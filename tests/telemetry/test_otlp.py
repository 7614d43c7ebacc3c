"""Spans and metrics as a collector gets them, over HTTP and gRPC, from an agent in a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.telemetry import names
from tests import tiny
from tests.telemetry.receiver import grpc_receiver, http_receiver

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = 1
ERROR = 2
KINDS = {"str": str, "int": int, "float": float, "bool": bool, "str[]": list}


def run_agent(scenario, **environment):
    """(stdout, stderr, seconds that the exit handlers took, telemetry's among them)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")} | environment
    done = subprocess.run(
        [sys.executable, "-m", "tests.telemetry.agent", scenario],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, float(re.search(r"left after ([\d.]+)", done.stdout).group(1))


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def received(request):
    """The same run by both protocols."""
    with http_receiver() if request.param == "http/protobuf" else grpc_receiver() as receiver:
        run_agent(
            "scripted",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_EXPORTER_OTLP_PROTOCOL=request.param,
            OTEL_SERVICE_NAME="my-agents",
            OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
        )
        yield receiver


@pytest.mark.fast
def test_hierarchy_names_and_kinds(received):
    readers = received.named("invoke_agent reader")
    assert len(readers) == 2 and len({r.trace_id for r in readers}) == 2
    for reader in readers:
        children = [s for s in received.spans if s.parent_id == reader.span_id]
        assert sorted(s.name.split()[0] for s in children) == ["chat", "chat", "execute_tool", "execute_tool"]
        assert {s.trace_id for s in children} == {reader.trace_id}
        for child in children:
            assert reader.start <= child.start <= child.end <= reader.end
            assert child.attributes["gen_ai.conversation.id"] == reader.attributes["gen_ai.conversation.id"]
    assert {s.kind for s in received.spans} == {INTERNAL}
    assert {s.scope for s in received.spans} == {"agentspec"}
    by_id = {s.span_id: s for s in received.spans}
    assert len(by_id) == len(received.spans)
    assert all(s.parent_id in by_id for s in received.spans if s.parent_id)


@pytest.mark.fast
def test_attributes_are_the_tables_with_their_types(received):
    for span in received.spans:
        for key, value in span.attributes.items():
            entry = names.known(key)
            assert entry is not None and isinstance(value, KINDS[entry.kind]), f"{key} = {value!r}"
    call = received.named("chat")[0].attributes
    needed = {names.OPERATION, names.PROVIDER, names.REQUEST_MODEL, names.TOKENS_PER_STEP, names.FIRST_CHUNK}
    assert needed <= set(call)


@pytest.mark.fast
def test_the_resource(received):
    for span in received.spans:
        assert span.resource["service.name"] == "my-agents"
        assert span.resource["deployment.environment.name"] == "test"
        assert span.resource["telemetry.sdk.language"] == "python"


@pytest.mark.fast
def test_the_failing_and_the_abandoned_call(received):
    (unlucky,) = received.named("invoke_agent unlucky")
    (impatient,) = received.named("invoke_agent impatient")
    (failed,) = [s for s in received.spans if s.parent_id == unlucky.span_id]
    (left,) = [s for s in received.spans if s.parent_id == impatient.span_id]
    assert failed.status == unlucky.status == ERROR and failed.attributes["error.type"] == "EngineError"
    assert left.status != ERROR and left.attributes["agentspec.abandoned"] is True
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.fast
def test_the_metrics(received):
    assert {m for m in names.METRICS if m not in received.metrics} <= {
        "agentspec.drift.calls",
    }
    for name, metric in received.metrics.items():
        if names.METRICS[name].buckets:
            for point in metric.histogram.data_points:
                assert tuple(point.explicit_bounds) == names.METRICS[name].buckets
                assert sum(point.bucket_counts) == point.count


@pytest.mark.fast
def test_spans_come_in_few_batches_not_call_by_call(received):
    assert received.requests <= 4


@pytest.mark.ci
def test_the_demos_agent_and_its_plain_twin(tmp_path):
    """`agentspec demo --otlp`: two trajectories beside one another, each a trace with its calls and tools below it."""
    model = tiny.model(max_position_embeddings=16_384)
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.md").write_text("\n\n".join(" ".join([sentence] * 3) for sentence in tiny.CORPUS))
    with http_receiver() as receiver:
        done = subprocess.run(
            [sys.executable, "-m", "agentspec", "demo", "--json", "--otlp", receiver.endpoint,
             "--model", str(tmp_path / "model"), "--docs", str(tmp_path / "docs")],
            cwd=ROOT, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["calls"]
    agents = {s.name: s for s in receiver.named("invoke_agent")}
    assert set(agents) == {"invoke_agent demo", "invoke_agent demo (plain)"}
    assert len({a.trace_id for a in agents.values()}) == 2
    for name, side in (("invoke_agent demo", "agentspec"), ("invoke_agent demo (plain)", "plain")):
        below = [s for s in receiver.spans if s.parent_id == agents[name].span_id]
        calls = sorted((s for s in below if s.name.startswith("chat ")), key=lambda s: s.start)
        assert [c.attributes[names.OUTPUT_TOKENS] for c in calls] == [c[side]["output_tokens"] for c in told]
        assert [c.attributes[names.STEPS] for c in calls] == [c[side]["verify_steps"] for c in told]
        tools = [s.name for s in below if s.name.startswith("execute_tool ")]
        assert (len(tools) >= 6) == (side == "agentspec") and len(tools) + len(calls) == len(below)
    assert receiver.metrics["gen_ai.client.operation.duration"].histogram.data_points


@pytest.mark.fast
def test_nobody_listening_costs_one_line_and_no_time():
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        out, err, exit_s = run_agent(
            "calls",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{taken.getsockname()[1]}",
            OTEL_BSP_SCHEDULE_DELAY="20",
        )
    assert len(err.splitlines()) == 1 and "no OTLP collector answers at http://127.0.0.1" in err
    assert exit_s < 2.0
    assert float(re.search(r"slowest ([\d.]+)", out).group(1)) < 1.0


@pytest.mark.ci
def test_a_collector_that_hangs_does_not_hold_the_exit():
    with http_receiver(delay_s=30) as receiver:
        _, _, exit_s = run_agent("calls", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    assert exit_s < 2.0


@pytest.mark.ci
def test_a_collector_that_fails_is_said_once():
    with http_receiver(status=500) as receiver:
        _, err, exit_s = run_agent("calls", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_BSP_SCHEDULE_DELAY="20")
    assert len(err.splitlines()) == 1 and "500" in err
    assert exit_s < 2.0


@pytest.mark.fast
def test_a_backend_without_metrics_is_no_failure():
    with http_receiver(refuse_metrics=405) as receiver:  # as Phoenix answers; Jaeger says 404
        _, err, _ = run_agent("calls", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    assert err == "" and len(receiver.spans) == 20


@pytest.mark.ci
@pytest.mark.parametrize(
    "environment",
    [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}],
    ids=["disabled", "no exporters"],
)
def test_switched_off_by_opentelemetrys_variables(environment):
    with http_receiver() as receiver:
        out, err, _ = run_agent("calls", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, **environment)
    assert receiver.requests == 0 and err == "" and "installed False" in out


@pytest.mark.ci
def test_a_process_with_its_own_provider_keeps_it():
    with http_receiver() as receiver:
        out, err, _ = run_agent("own-provider", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    assert receiver.requests == 0 and err == "" and "installed False" in out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize(
    "scenario",
    [pytest.param("fork", marks=pytest.mark.fast), pytest.param("multiprocessing", marks=pytest.mark.ci)],
)
def test_a_forked_child_sends_its_own_spans_once(scenario):
    with http_receiver() as receiver:
        _, err, _ = run_agent(scenario, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    assert "Traceback" not in err
    assert len(receiver.named("invoke_agent parent")) == len(receiver.named("invoke_agent child")) == 1
    (parent,), (child,) = receiver.named("invoke_agent parent"), receiver.named("invoke_agent child")
    assert child.parent_id == parent.span_id and child.trace_id == parent.trace_id
    ids = [s.span_id for s in receiver.spans]
    assert len(ids) == len(set(ids))
    assert len(receiver.named("chat")) == (2 if scenario == "fork" else 1)
