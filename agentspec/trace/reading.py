"""OTLP JSON as trees of spans. Imports names only; used by tree.py and page.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.telemetry import names as n

__all__ = ["Node", "Trace", "read"]

_ERROR = 2


@dataclass(slots=True)
class Node:
    """A span and its children, in the order in which they began. Times in ms since the trace's start."""

    id: str
    parent: str
    name: str
    start_ms: float
    ms: float
    attributes: dict[str, Any]
    failed: str = ""  # the error in words
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """chat, invoke_agent, execute_tool, or "" for somebody else's span."""
        return str(self.attributes.get(n.OPERATION, ""))

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        # Not recursive: a long chain of spans is deeper than Python's stack.
        pending = [(depth, self)]
        while pending:
            level, node = pending.pop()
            yield level, node
            pending += [(level + 1, child) for child in reversed(node.children)]


@dataclass(slots=True)
class Trace:
    """roots: spans without a parent in the file; ms: from the first start to the last end."""

    id: str
    service: str
    roots: list[Node]
    ms: float

    @property
    def nodes(self) -> list[tuple[int, Node]]:
        return [item for root in self.roots for item in root.walk()]

    @property
    def calls(self) -> list[Node]:
        return [node for _, node in self.nodes if node.kind == "chat"]

    def total(self, key: str) -> float:
        return float(sum(call.attributes.get(key, 0) for call in self.calls))


def read(path: Path) -> list[Trace]:
    """The traces of a file, in the order in which they began. Raises InvalidRequestError for anything
    else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: can't be read: {error}") from error
    try:
        documents = [json.loads(text)]
    except ValueError:
        try:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InvalidRequestError(f"{path}: needed OTLP JSON, found no JSON: {error}") from error
    found: dict[str, tuple[str, list[tuple[int, int, dict[str, Any]]]]] = {}
    try:
        for document in documents:
            for resource in document["resourceSpans"]:
                about = _attributes(resource.get("resource", {}).get("attributes", []))
                service = str(about.get("service.name", ""))
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        times = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                        found.setdefault(span["traceId"], (service, []))[1].append((*times, span))
        traces = [_trace(id, service, spans) for id, (service, spans) in found.items()]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidRequestError(
            f"{path}: needed OTLP JSON (resourceSpans), as `agentspec trace record` writes it, found "
            f"something else: {type(error).__name__} {error}"
        ) from error
    if not traces:
        raise InvalidRequestError(f"{path}: has no spans")
    begins = {id: min(start for start, _, _ in spans) for id, (_, spans) in found.items()}
    return sorted(traces, key=lambda trace: begins[trace.id])


def _trace(id: str, service: str, spans: list[tuple[int, int, dict[str, Any]]]) -> Trace:
    began = min(start for start, _, _ in spans)
    nodes: dict[str, Node] = {}
    for start, end, span in sorted(spans, key=lambda item: (item[0], -item[1])):
        status = span.get("status", {})
        attributes = _attributes(span.get("attributes", []))
        failed = ""
        if status.get("code") in (_ERROR, "STATUS_CODE_ERROR"):
            failed = f"{attributes.get(n.ERROR_TYPE, 'error')}: {status.get('message', '')}".rstrip(": ")
        nodes[span["spanId"]] = Node(
            id=span["spanId"],
            parent=span.get("parentSpanId", ""),
            name=str(span["name"]),
            start_ms=(start - began) / 1e6,
            ms=(end - start) / 1e6,
            attributes=attributes,
            failed=failed,
            events=[
                ((int(e["timeUnixNano"]) - began) / 1e6, str(e["name"]), _attributes(e.get("attributes", [])))
                for e in span.get("events", [])
            ],
        )
    roots: list[Node] = []
    for node in nodes.values():
        parent = nodes.get(node.parent)
        (parent.children if parent is not None and parent is not node else roots).append(node)
    return Trace(id, service, roots, (max(end for _, end, _ in spans) - began) / 1e6)


def _attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    if "doubleValue" in value:
        return float(value["doubleValue"])
    if "arrayValue" in value:
        return [_value(item) for item in value["arrayValue"].get("values", [])]
    return next(iter(value.values()), None)
