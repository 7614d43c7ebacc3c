"""Finished spans as OTLP JSON: one resourceSpans object a line, in a file of this process's own.

The format that the collector's file exporter writes and Jaeger's upload takes: ids in hex, 64-bit integers
as strings, enums as numbers. Imports the SDK's types only; used by `agentspec trace record`.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

# As protobuf's JSON spells what JSON lacks.
_NOT_IN_JSON = {math.inf: "Infinity", -math.inf: "-Infinity"}

__all__ = ["FileSpanExporter", "encode"]


class FileSpanExporter(SpanExporter):
    """Appends to `folder`/spans-<pid>.jsonl: a forked child writes its own file."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            line = json.dumps(encode(spans), ensure_ascii=False, separators=(",", ":"))
            with self._lock, (self.folder / f"spans-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def encode(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """The spans as an ExportTraceServiceRequest in OTLP's JSON encoding, grouped by resource and scope."""
    resources: dict[int, tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]] = {}
    for span in spans:
        resource, scope = span.resource, span.instrumentation_scope
        if id(resource) not in resources:
            entry: dict[str, Any] = {"resource": {"attributes": _attributes(resource.attributes)}}
            entry["scopeSpans"] = []
            if resource.schema_url:
                entry["schemaUrl"] = resource.schema_url
            resources[id(resource)] = entry, {}
        entry, scopes = resources[id(resource)]
        key = (scope.name, scope.version or "") if scope else ("", "")
        if key not in scopes:
            named = {"name": key[0], "version": key[1]}
            scopes[key] = {"scope": {k: v for k, v in named.items() if v}, "spans": []}
            entry["scopeSpans"].append(scopes[key])
        scopes[key]["spans"].append(_span(span))
    return {"resourceSpans": [entry for entry, _ in resources.values()]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    written: dict[str, Any] = {
        **_ids(context),
        "flags": int(context.trace_flags) | 0x100 | (0x200 if span.parent is not None and span.parent.is_remote else 0),
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "status": {"code": span.status.status_code.value},
    }
    if context.trace_state:
        written["traceState"] = context.trace_state.to_header()
    if span.parent is not None:
        written["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.status.description:
        written["status"]["message"] = span.status.description
    if span.events:
        written["events"] = [
            {"timeUnixNano": str(e.timestamp), "name": e.name, "attributes": _attributes(e.attributes)}
            for e in span.events
        ]
    if span.links:
        written["links"] = [
            {
                **_ids(link.context),
                "flags": int(link.context.trace_flags) | _remote_flags(link.context),
                "attributes": _attributes(link.attributes),
            }
            for link in span.links
        ]
    for key, dropped in (
        ("droppedAttributesCount", span.dropped_attributes),
        ("droppedEventsCount", span.dropped_events),
        ("droppedLinksCount", span.dropped_links),
    ):
        if dropped:
            written[key] = dropped
    return written


def _remote_flags(context: SpanContext | None) -> int:
    """OTLP's bits for "is remote is known" and "is remote"; below them stand W3C's trace flags."""
    return 0x100 | (0x200 if context is not None and context.is_remote else 0)


def _ids(context: SpanContext) -> dict[str, str]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _NOT_IN_JSON.get(value, "NaN")}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}
