"""`agentspec trace record`: all spans of a command's processes in one OTLP JSON file, and the command's
exit code.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import time

import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentspec.telemetry.otlp_json import encode
from tests.trace.conftest import AN_AGENT, ROOT, agentspec

ID_KEYS = ("traceId", "spanId", "parentSpanId")


def as_protobuf(document):
    """OTLP JSON (ids in hex) as the collector's message; raises for an unknown field or a wrong type."""

    def in_base64(hexadecimal):
        return base64.b64encode(bytes.fromhex(hexadecimal)).decode()

    def base64_ids(value):
        if isinstance(value, dict):
            return {
                k: base64.b64encode(bytes.fromhex(v)).decode()
                if k in ("traceId", "spanId", "parentSpanId")
                else base64_ids(v)
                for k, v in value.items()
            }
        return [base64_ids(v) for v in value] if isinstance(value, list) else value

    return json_format.ParseDict(base64_ids(document), ExportTraceServiceRequest())


@pytest.mark.fast
def test_the_encoding_is_the_collectors_message_by_message():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "s", "n": 3, "list": ["a", "b"]}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("scope", "1.2")
    far = SpanContext(0x1234, 0x56, True, TraceFlags(1))
    with tracer.start_as_current_span("outer", kind=SpanKind.CLIENT) as outer:
        outer.set_attributes({"text": 'ünï\n"', "int": 2**53 + 1, "float": 0.1, "yes": True, "many": [1.5]})
        with tracer.start_as_current_span("inner", links=[Link(far, {"why": "because"})]) as inner:
            inner.add_event("seen", {"at": 1})
            inner.set_status(Status(StatusCode.ERROR, "broken"))
    with provider.get_tracer("other").start_as_current_span("bare"):
        pass
    spans = exporter.get_finished_spans()
    ours, theirs = as_protobuf(json.loads(json.dumps(encode(spans)))), encode_spans(spans)
    assert ours.resource_spans[0].scope_spans[0].spans[0].attributes == (
        theirs.resource_spans[0].scope_spans[0].spans[0].attributes
    )
    # OpenTelemetry's exporter leaves W3C's trace flags out of `flags`; the protocol wants them there.
    for span in (s for r in ours.resource_spans for scope in r.scope_spans for s in scope.spans):
        assert span.flags & 0xFF == 0x03, "sampled, random trace id"
        for flagged in (span, *span.links):
            flagged.flags &= ~0xFF
    assert json_format.MessageToDict(ours) == json_format.MessageToDict(theirs)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "NaN"), (float("inf"), "Infinity"), (float("-inf"), "-Infinity")]
)
def test_numbers_that_json_lacks(value, text):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("x").start_as_current_span("s") as span:
        span.set_attribute("v", value)
    document = encode(exporter.get_finished_spans())
    assert f'"{text}"' in json.dumps(document)
    as_protobuf(document)


@pytest.mark.fast
def test_a_recording_is_one_object_that_jaeger_takes(recording):
    document = json.loads(recording.read_text(encoding="utf-8"))
    assert list(document) == ["resourceSpans"], "Jaeger's upload looks for this key"
    message = as_protobuf(document)
    spans = [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert {s.name.split()[0] for s in spans} == {"invoke_agent", "chat", "execute_tool"}
    assert all(len(s.trace_id) == 16 and len(s.span_id) == 8 for s in spans)


@pytest.mark.fast
def test_the_commands_exit_code_is_passed_on(tmp_path):
    script = "import agentspec, sys\nwith agentspec.trajectory(): pass\nsys.exit(7)"
    done = agentspec("trace", "record", tmp_path / "x.json", "--", sys.executable, "-c", script)
    assert done.returncode == 7 and "1 spans" in done.stderr
    assert (tmp_path / "x.json").exists()


@pytest.mark.ci
def test_a_command_that_crashes_keeps_its_spans(tmp_path):
    script = "import agentspec\nwith agentspec.trajectory(name='a'): pass\nraise RuntimeError('x')"
    done = agentspec("trace", "record", tmp_path / "x.json", "--", sys.executable, "-c", script)
    assert done.returncode == 1 and "1 spans" in done.stderr and "RuntimeError" in done.stderr


@pytest.mark.ci
def test_no_spans_no_file(tmp_path):
    done = agentspec("trace", "record", tmp_path / "x.json", "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 1 and "made no spans" in done.stderr and not (tmp_path / "x.json").exists()


@pytest.mark.fast
def test_a_missing_command_and_a_missing_directory(tmp_path):
    done = agentspec("trace", "record", tmp_path / "x.json", "--", "no-such-program")
    assert done.returncode == 127 and "no-such-program" in done.stderr
    done = agentspec("trace", "record", tmp_path / "none" / "x.json", "--", "true")
    assert done.returncode == 2 and "directory that exists" in done.stderr
    assert agentspec("trace", "record", tmp_path / "x.json").returncode == 2


@pytest.mark.fast
def test_options_may_follow_the_file(tmp_path):
    path = tmp_path / "x.json"
    done = agentspec("trace", "record", path, "--content", "--steps", "--", *AN_AGENT, "trace")
    assert done.returncode == 0, done.stderr
    text = path.read_text(encoding="utf-8")
    assert "You are terse." in text and '"agentspec.verify_step"' in text
    for words in ([], ["--"], ["true"]):
        done = agentspec("trace", "record", path, "--contnet", *words)
        assert done.returncode == 2
        assert "unknown option '--contnet': known are --content, --steps; the command comes after" in done.stderr
    assert agentspec("trace", "record", path, "--content").returncode == 2


@pytest.mark.ci
def test_forked_children_and_threads_are_in_the_file(tmp_path):
    done = agentspec(
        "trace",
        "record",
        tmp_path / "x.json",
        "--",
        sys.executable,
        "-m",
        "tests.telemetry.agent",
        "multiprocessing",
    )
    assert done.returncode == 0
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "invoke_agent parent" in text and "invoke_agent child" in text


@pytest.mark.fast
def test_a_program_with_its_own_provider_keeps_it_and_is_recorded(tmp_path):
    done = agentspec(
        "trace",
        "record",
        tmp_path / "x.json",
        "--",
        sys.executable,
        "-m",
        "tests.telemetry.agent",
        "own-provider",
    )
    assert done.returncode == 0 and "Overriding" not in done.stderr
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert '"mine"' in text and "invoke_agent reader" in text


@pytest.mark.ci
def test_content_only_when_asked_for(tmp_path):
    agentspec("trace", "record", "--content", tmp_path / "with.json", "--", *AN_AGENT, "trace")
    assert "You are terse." in (tmp_path / "with.json").read_text(encoding="utf-8")


@pytest.mark.fast
def test_content_is_not_there_by_default(recording):
    assert "You are terse." not in recording.read_text(encoding="utf-8")


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM kills there")
def test_ended_from_outside_it_still_writes(tmp_path):
    script = (
        "import agentspec, time\n"
        "with agentspec.trajectory(name='first'): pass\n"
        "time.sleep(1.5)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "agentspec",
            "trace",
            "record",
            tmp_path / "x.json",
            "--",
            sys.executable,
            "-c",
            script,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20
    assert "invoke_agent first" in (tmp_path / "x.json").read_text(encoding="utf-8")
