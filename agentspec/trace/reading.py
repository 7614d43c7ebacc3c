"""OTLP JSON as trees of spans. Imports names only; used by tree.py and page.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
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


def read(path: Path, report: Callable[[str], None] | None = None) -> list[Trace]:
    """The traces of a file, in the order in which they began. A line or a span that can't be read is skipped, and
    `report` is told which and why.

    Raises InvalidRequestError if the file can't be read at all, or holds nothing readable."""
    problems: list[str] = []
    found: dict[str, tuple[str, list[_Span]]] = {}
    for where, document in _documents(path, problems):
        _sort_in(where, document, found, problems)
    if report is not None:
        for problem in problems:
            report(problem)
    if not found:
        if problems:
            raise InvalidRequestError(
                f"{path}: needed OTLP JSON (resourceSpans), as `agentspec trace record` writes it, found something "
                f"else: {'; '.join(problems[:3])}"
            )
        raise InvalidRequestError(f"{path}: has no spans")
    ordered = sorted(found.items(), key=lambda item: min(span.start for span in item[1][1]))
    return [_trace(id, service, spans) for id, (service, spans) in ordered]


def _documents(path: Path, problems: list[str]) -> list[tuple[str, Any]]:
    """(where, JSON value): the whole file, or its lines."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{path}: can't be read: {error}") from error
    try:
        return [(path.name, json.loads(raw.decode("utf-8-sig")))]
    except (ValueError, RecursionError):
        pass  # one document a line, or damaged
    documents = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            documents.append((f"{path.name}:{number}", json.loads(line.decode("utf-8-sig"))))
        except UnicodeDecodeError as error:
            problems.append(f"{path.name}:{number}: not UTF-8 ({error})")
        except ValueError as error:
            problems.append(f"{path.name}:{number}: no JSON ({error})")
        except RecursionError:
            problems.append(f"{path.name}:{number}: nested too deeply to be read")
    return documents


_UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


def _sort_in(where: str, document: Any, found: dict[str, tuple[str, list[_Span]]], problems: list[str]) -> None:
    """A document's spans into `found`, by trace."""
    number = 0
    try:
        for resource in document["resourceSpans"]:
            about = _attributes(resource.get("resource", {}).get("attributes", []))
            service = str(about.get("service.name", ""))
            for scope in resource["scopeSpans"]:
                for raw in scope["spans"]:
                    number += 1
                    try:
                        trace, span = _text(raw, "traceId"), _span(raw)
                    except _UNREADABLE as error:
                        problems.append(f"{where}, span {number}: not laid out as expected ({_said(error)})")
                    else:
                        found.setdefault(trace, (service, []))[1].append(span)
    except _UNREADABLE as error:
        problems.append(f"{where}: not laid out as expected ({_said(error)})")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, RecursionError) else "nested too deeply"


@dataclass(slots=True)
class _Span:
    """A span as it was written, checked. start, end: ns; events: (ns, name, attributes)."""

    id: str
    parent: str
    name: str
    start: int
    end: int
    attributes: dict[str, Any]
    failed: str
    events: list[tuple[int, str, dict[str, Any]]]


def _span(raw: dict[str, Any]) -> _Span:
    status, attributes, failed = raw.get("status", {}), _attributes(raw.get("attributes", [])), ""
    for key, value in attributes.items():
        entry = n.known(key)
        numeric = entry is not None and entry.kind in ("int", "float")
        if numeric and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"{key}: needed a finite number, got {value!r:.60}")
    if status.get("code") in (_ERROR, "STATUS_CODE_ERROR"):
        failed = f"{attributes.get(n.ERROR_TYPE, 'error')}: {status.get('message', '')}".rstrip(": ")
    return _Span(
        id=_text(raw, "spanId"),
        parent=_text(raw, "parentSpanId") if raw.get("parentSpanId") else "",
        name=str(raw["name"]),
        start=_time(raw["startTimeUnixNano"]),
        end=_time(raw["endTimeUnixNano"]),
        attributes=attributes,
        failed=failed,
        events=[
            (_time(e["timeUnixNano"]), str(e["name"]), _attributes(e.get("attributes", [])))
            for e in raw.get("events", [])
        ],
    )


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise TypeError(f"{key}: needed a text, got {value!r:.60}")
    return value


def _time(value: Any) -> int:
    """Nanoseconds, in 64 bits as OTLP has them."""
    time = int(value)
    if not 0 <= time < 1 << 64:
        raise ValueError(f"a time outside 0..2^64-1: {value!r:.60}")
    return time


def _trace(id: str, service: str, spans: list[_Span]) -> Trace:
    began = min(span.start for span in spans)
    nodes: dict[str, Node] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        nodes[span.id] = Node(
            id=span.id,
            parent=span.parent,
            name=span.name,
            start_ms=(span.start - began) / 1e6,
            ms=(span.end - span.start) / 1e6,
            attributes=span.attributes,
            failed=span.failed,
            events=[((at - began) / 1e6, name, attributes) for at, name, attributes in span.events],
        )
    roots: list[Node] = []
    rings = _rings(nodes)
    for node in nodes.values():
        if node.parent in nodes and node.id not in rings:
            nodes[node.parent].children.append(node)
        else:
            roots.append(node)
    return Trace(id, service, roots, (max(span.end for span in spans) - began) / 1e6)


def _rings(nodes: dict[str, Node]) -> set[str]:
    """One span of each ring of spans that are each other's parents (a damaged file's): where it is cut open."""
    found: set[str] = set()
    seen: dict[str, str] = {}  # id -> the walk that came by first
    for start in nodes:
        at = start
        while at in nodes and at not in seen:
            seen[at] = start
            at = nodes[at].parent
        if seen.get(at) == start:  # back at what this walk has seen
            found.add(at)
    return found


def _attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {str(pair["key"]): _value(pair["value"]) for pair in pairs}


def _whole(value: Any) -> int:
    """In 64 bits, as OTLP has them."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"a whole number outside 64 bits: {number!r:.60}")
    return number


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return _whole(value["intValue"])
    if "doubleValue" in value:
        return float(value["doubleValue"])
    if "arrayValue" in value:
        return [_value(item) for item in value["arrayValue"].get("values", [])]
    return next(iter(value.values()), None)
