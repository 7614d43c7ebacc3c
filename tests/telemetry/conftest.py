"""Providers of this process's own, put in place of OpenTelemetry's global ones for a test."""

from __future__ import annotations

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentspec.telemetry import calls
from agentspec.telemetry.drift import DriftWatch
from agentspec.telemetry.options import OPTIONS


class Spans:
    """What has ended so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        found = [span for span in self.all() if span.name == name]
        assert len(found) == 1, f"{name}: {len(found)} of {[span.name for span in self.all()]}"
        return found[0]

    def names(self) -> list[str]:
        return [span.name for span in self.all()]


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(calls, "_drift", DriftWatch())
    for name in ("content", "step_events", "content_limit"):
        monkeypatch.setattr(OPTIONS, name, getattr(OPTIONS, name))
    yield Spans(exporter)
    provider.shutdown()


@pytest.fixture
def measured(monkeypatch):
    """A function: metric name -> its data points."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", provider)
    monkeypatch.setattr(calls, "_drift", DriftWatch())

    def points():
        data = reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    yield points
    provider.shutdown()
