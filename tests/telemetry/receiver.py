"""An OTLP receiver: HTTP and gRPC, with the collector's own protobufs. Keeps what it gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Span:
    """A received span, its attributes as plain values, and its resource's."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    events: list[Any]
    flags: int


@dataclass
class Received:
    endpoint: str = ""
    requests: int = 0
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def named(self, prefix: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(prefix)]

    def wait(self, condition: Callable[[Received], Any], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition(self):
            got = [s.name for s in self.spans]
            assert time.monotonic() < end, f"received only {got} and {list(self.metrics)}"
            time.sleep(0.02)

    def take_traces(self, request: Any) -> None:
        self.requests += 1
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        s.name,
                        s.kind,
                        s.trace_id.hex(),
                        s.span_id.hex(),
                        s.parent_span_id.hex(),
                        s.start_time_unix_nano,
                        s.end_time_unix_nano,
                        s.status.code,
                        attributes(s.attributes),
                        attributes(resource.resource.attributes),
                        scope.scope.name,
                        list(s.events),
                        s.flags,
                    )
                    for s in scope.spans
                ]

    def take_metrics(self, request: Any) -> None:
        self.requests += 1
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in pairs}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


@contextmanager
def http_receiver(status: int = 200, delay_s: float = 0.0, refuse_metrics: int = 0) -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(delay_s)
            answer = status
            if self.path == "/v1/traces":
                received.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics" and not refuse_metrics:
                received.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            else:
                answer = refuse_metrics or 404
            self.send_response(answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    received.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    received = Received()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.take_traces(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None)
