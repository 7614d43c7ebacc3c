"""configure(): the SDK and an OTLP exporter, for a process that has no OpenTelemetry of its own.

The only module here that imports the SDK; spans are exported by its threads, never on the call path.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import metrics, trace

from agentspec.errors import InvalidRequestError, MissingExtraError
from agentspec.telemetry.guard import Guard, Listener
from agentspec.telemetry.options import OPTIONS

__all__ = ["Telemetry", "configure", "record_to"]

logger = logging.getLogger("agentspec.telemetry")

_EXIT_S = 1.2  # what a process waits for its last spans at exit, at most
_FILE_DELAY_MS = 500  # a killed process loses at most this much of a recording
_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
_made: Telemetry | None = None
_lock = threading.Lock()


class Telemetry:
    """What configure() set up. installed: False where the process had its own OpenTelemetry, or it is
    disabled.
    """

    def __init__(self, tracers: Any = None, meters: Any = None) -> None:
        self._tracers, self._meters = tracers, meters
        self._closed = False
        if self.installed:
            atexit.register(self.close)
            _close_in_children(self)

    @property
    def installed(self) -> bool:
        return self._tracers is not None or self._meters is not None

    def flush(self, within_s: float = 5.0) -> None:
        """Send what has ended so far. For tests and short scripts: nothing needs it, the exit flushes."""
        _bounded(lambda: [p.force_flush() for p in (self._tracers, self._meters) if p is not None], within_s)

    def close(self, within_s: float = _EXIT_S) -> None:
        """Send the rest and stop, within that time. Called at exit."""
        if self._closed:
            return
        self._closed = True
        _bounded(lambda: [p.shutdown() for p in (self._tracers, self._meters) if p is not None], within_s)


def configure(
    *,
    endpoint: str | None = None,
    protocol: str | None = None,
    headers: dict[str, str] | None = None,
    service_name: str | None = None,
    content: bool | None = None,
    content_limit: int | None = None,
    step_events: bool | None = None,
    readers: Sequence[Any] = (),
) -> Telemetry:
    """Send spans and metrics by OTLP. Safe to call again: what is set up stays.

    endpoint:      of a collector, e.g. "http://localhost:4318"; None: OTEL_EXPORTER_OTLP_ENDPOINT, else that
    protocol:      "http/protobuf" or "grpc"; None: OTEL_EXPORTER_OTLP_PROTOCOL, else "http/protobuf"
    headers:       for the collector; None: OTEL_EXPORTER_OTLP_HEADERS
    service_name:  None: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, else "agentspec"
    content:       write messages, tool arguments and results on the spans, cut at content_limit characters
                   each; None: as OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says
    step_events:   up to 64 verify-step events a call (the slowest, the least accepted); None: as
                   AGENTSPEC_STEP_EVENTS says
    readers:       more of the SDK's metric readers (a Prometheus page)

    A process that has a tracer or meter provider keeps it, and gets agentspec's spans and metrics there. The
    OTEL_* variables are respected (OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER as otlp,
    console or none, samplers, resource, batch sizes). Raises MissingExtraError without the otlp extra.
    """
    global _made
    OPTIONS.content = content if content is not None else OPTIONS.content
    OPTIONS.step_events = step_events if step_events is not None else OPTIONS.step_events
    if content_limit is not None:
        if content_limit < 2:
            raise InvalidRequestError(f"content_limit: needed at least 2 characters, got {content_limit}")
        OPTIONS.content_limit = content_limit
    with _lock:
        if _made is not None:
            return _made
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return Telemetry()
        if _has_tracers() or _has_meters():
            logger.info("the process has its own OpenTelemetry: agentspec's spans and metrics go there")
            return Telemetry()
        _made = _install(endpoint, protocol, headers, service_name, readers)
        return _made


def _install(
    endpoint: str | None,
    protocol: str | None,
    headers: dict[str, str] | None,
    service_name: str | None,
    more_readers: Sequence[Any],
) -> Telemetry:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        ConsoleMetricExporter,
        MetricExportResult,
        PeriodicExportingMetricReader,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExportResult

    listeners: dict[str, Listener] = {}

    def otlp(signal: str, kind: str, failure: Any) -> Any:
        exporter, at = _otlp(signal, kind, endpoint, protocol, headers)
        return Guard(exporter, listeners.setdefault(at, Listener(at)), signal, failure)

    made = resource(service_name)
    tracers = meters = None
    spans = _exporters("OTEL_TRACES_EXPORTER")
    if spans:
        tracers = TracerProvider(resource=made, shutdown_on_exit=False)
        for name in spans:
            exporter: Any = (
                ConsoleSpanExporter()
                if name == "console"
                else otlp("traces", "OTLPSpanExporter", SpanExportResult.FAILURE)
            )
            tracers.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(tracers)
    measured = _exporters("OTEL_METRICS_EXPORTER")
    if measured or more_readers:
        readers: list[Any] = [
            PeriodicExportingMetricReader(
                ConsoleMetricExporter()
                if name == "console"
                else otlp("metrics", "OTLPMetricExporter", MetricExportResult.FAILURE)
            )
            for name in measured
        ]
        readers += more_readers
        meters = MeterProvider(readers, resource=made, shutdown_on_exit=False)
        metrics.set_meter_provider(meters)
    return Telemetry(tracers, meters)


def record_to(folder: str) -> Telemetry:
    """Write all spans of this process into `folder` as OTLP JSON, beside what its own OpenTelemetry does."""
    global _made
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from agentspec.telemetry.otlp_json import FileSpanExporter

    processor = BatchSpanProcessor(FileSpanExporter(folder), schedule_delay_millis=_FILE_DELAY_MS)
    with _lock:
        if _has_tracers():
            provider: Any = trace.get_tracer_provider()
            if not hasattr(provider, "add_span_processor"):
                logger.warning("not recorded: the tracer provider %r takes no span processors", provider)
                return Telemetry()
            provider.add_span_processor(processor)
            # Its owner may not close it at exit; closing the processor twice does no harm.
            return Telemetry(processor)
        tracers = TracerProvider(resource=resource(None), shutdown_on_exit=False)
        tracers.add_span_processor(processor)
        trace.set_tracer_provider(tracers)
        _made = Telemetry(tracers)
        return _made


def _has_tracers() -> bool:
    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def _has_meters() -> bool:
    return not type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")


def resource(service_name: str | None) -> Any:
    """OpenTelemetry's resource; the service is called agentspec unless this or the environment names it."""
    from opentelemetry.sdk.resources import Resource

    environment = os.environ.get
    named = environment("OTEL_SERVICE_NAME") or "service.name=" in environment("OTEL_RESOURCE_ATTRIBUTES", "")
    if service_name is None and not named:
        service_name = "agentspec"
    return Resource.create({} if service_name is None else {"service.name": service_name})


def _exporters(variable: str) -> list[str]:
    names = [name.strip() for name in os.environ.get(variable, "otlp").split(",") if name.strip()]
    if "none" in names:
        return []
    for name in names:
        if name not in ("otlp", "console"):
            raise InvalidRequestError(
                f"{variable}: agentspec.telemetry.configure knows otlp, console and none, got {name!r}; "
                f"set up other exporters with OpenTelemetry's own SDK, agentspec's spans then go there"
            )
    return names or ["otlp"]


def _otlp(
    signal: str, kind: str, endpoint: str | None, protocol: str | None, headers: dict[str, str] | None
) -> tuple[Any, str]:
    """(exporter, where it sends to)."""
    variables = os.environ.get
    asked = (
        protocol
        or variables(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        or variables("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    if asked not in _PROTOCOLS:
        raise InvalidRequestError(f"OTLP protocol: needed one of {', '.join(_PROTOCOLS)}, got {asked!r}")
    by = _PROTOCOLS[asked]
    package = f"opentelemetry-exporter-otlp-proto-{by}"
    module = "trace_exporter" if signal == "traces" else "metric_exporter"
    try:
        exporter = getattr(importlib.import_module(f"opentelemetry.exporter.otlp.proto.{by}.{module}"), kind)
    except ImportError as error:
        extra = "otlp" if by == "http" else "otlp-grpc"
        raise MissingExtraError(f"sending spans by OTLP ({asked})", package, extra) from error
    options: dict[str, Any] = {} if headers is None else {"headers": headers}
    default = "http://localhost:4318" if by == "http" else "http://localhost:4317"
    at = (
        endpoint
        or variables(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
        or variables("OTEL_EXPORTER_OTLP_ENDPOINT")
        or default
    )
    if endpoint is not None:
        options["endpoint"] = endpoint if by == "grpc" else f"{endpoint.rstrip('/')}/v1/{signal}"
        if by == "grpc":
            options["insecure"] = not endpoint.startswith("https")
    return exporter(**options), at


def _bounded(work: Callable[[], Any], within_s: float) -> None:
    """Run it in a thread and wait for at most so long: an exporter may hang in a connection for ten
    seconds.
    """
    thread = threading.Thread(target=work, name="agentspec-telemetry-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and .1 start no threads at exit
        work()
        return
    thread.join(within_s)


def _close_in_children(telemetry: Telemetry) -> None:
    """multiprocessing ends its forked children without atexit: let them send their spans too."""
    from multiprocessing import util

    util.register_after_fork(telemetry, lambda made: util.Finalize(None, made.close, exitpriority=10))
