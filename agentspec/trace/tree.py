"""A trace in a terminal: a tree, one line a span, each with its bar on the trace's time line.

A call's bar is light until its first token and full from there on; behind it stand the figures that say where
the time went: time to first token, ITL (mean), acceptance, tokens per step.
"""

from __future__ import annotations

from agentspec.telemetry import names as n
from agentspec.trace.reading import Node, Trace

__all__ = ["figures", "legend", "milliseconds", "summary", "tree"]

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def tree(trace: Trace, width: int = 120, plain: bool = False) -> str:
    """plain: ASCII only. Lines are at most `width` columns, but never under 60."""
    width = max(60, width)
    rows = [(prefix + node.name, node) for prefix, node in _prefixed(trace, plain)]
    behind = [figures(node) for _, node in rows]
    named = min(max(len(label) for label, _ in rows), max(20, width * 3 // 10))
    room = max(len(text) for text in behind)
    bar = max(10, width - named - 11 - min(room, width // 2))
    lines = [summary(trace)]
    for (label, node), text in zip(rows, behind, strict=True):
        left = f"{_fit(label, named):<{named}} {milliseconds(node.ms):>8} {_bar(node, trace.ms, bar, plain)} "
        lines.append(left + _fit(text, max(0, width - len(left))))
        if n.DRIFT in node.attributes and node.kind == "invoke_agent":
            lines.append(_fit(f"{'':{named}} drift: {node.attributes[n.DRIFT]}", width))
    return "\n".join(line.rstrip() for line in lines)


def summary(trace: Trace) -> str:
    """The trace in a line."""
    steps, tokens, saved = trace.total(n.STEPS), trace.total(n.OUTPUT_TOKENS), trace.total(n.SAVED_MS)
    calls = len(trace.calls)
    words = [
        f"trace {trace.id[:8]}",
        trace.service,
        milliseconds(trace.ms),
        f"{calls} call{'' if calls == 1 else 's'}",
    ]
    if steps:
        words += [f"{tokens:,.0f} tokens", f"{tokens / steps:.2f} tokens/step"]
    if proposed := trace.total(n.PROPOSED):
        words.append(f"{trace.total(n.ACCEPTED) / proposed:.0%} of drafts accepted")
    if saved:
        words.append(f"{milliseconds(abs(saved))} {'saved' if saved > 0 else 'lost'} (estimated)")
    return ", ".join(word for word in words if word)


def legend(traces: list[Trace]) -> str:
    """What the figures' words mean, those that stand there; "" where none does."""
    words = []
    if any(trace.total(n.SAVED_MS) for trace in traces):
        words.append("saved, lost: time against decoding the same tokens without drafts")
    if any(call.attributes.get(n.BELOW) for trace in traces for call in trace.calls):
        words.append("below break-even: the drafts brought fewer tokens a step than checking them cost")
    return "; ".join(words)


def figures(node: Node) -> str:
    """What a person wants to know of a span at a glance."""
    a, words = node.attributes, []
    if node.kind == "chat":
        if n.PREFILL_MS in a:
            words.append(f"ttft {milliseconds(a[n.PREFILL_MS])}")
        if n.ITL_MEAN in a:
            words.append(f"itl {a[n.ITL_MEAN]:.3g}")
        if n.TOKENS_PER_STEP in a:
            words.append(f"{a[n.TOKENS_PER_STEP]:.2f}/step")
            if n.ACCEPTANCE in a:
                words.append(f"acc {a[n.ACCEPTANCE]:.0%}")
            else:
                words.append("no draft")
        if a.get(n.BELOW):
            words.append("below break-even")
    if a.get(n.ABANDONED):
        words.append("abandoned")
    if node.failed:
        words.append(node.failed)
    return "  ".join(words)


def _prefixed(trace: Trace, plain: bool) -> list[tuple[str, Node]]:
    mid, last, down, none = ("|- ", "`- ", "|  ", "   ") if plain else ("├─ ", "└─ ", "│  ", "   ")
    rows: list[tuple[str, Node]] = []
    pending = [("", "", root) for root in reversed(trace.roots)]
    while pending:
        own, below, node = pending.pop()
        rows.append((own, node))
        for place, child in enumerate(reversed(node.children)):
            pending.append((below + (last if place == 0 else mid), below + (none if place == 0 else down), child))
    return rows


def _bar(node: Node, total_ms: float, width: int, plain: bool) -> str:
    """The span on the time line, in eighths of a column; at least one mark."""
    scale = width / total_ms if total_ms else 0.0
    begin = min(int(node.start_ms * scale), width - 1)
    length = min(node.ms * scale, width - begin)
    whole = int(length)
    light = 0
    if node.kind == "chat" and n.PREFILL_MS in node.attributes and node.ms:
        light = min(round(length * node.attributes[n.PREFILL_MS] / node.ms), whole)
    if plain:
        body = "." * light + "#" * (whole - light) or "|"
    else:
        body = "░" * light + "█" * (whole - light)
        part = int((length - whole) * 8)
        if begin + whole < width and (part or not body):
            body += _EIGHTHS[max(part, 1)]
    return (" " * begin + body)[:width].ljust(width)


def _fit(text: str, width: int) -> str:
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= width else text[: max(0, width - 1)] + ("…" if width > 0 else "")


def milliseconds(ms: float) -> str:
    """As a person reads it: 0.42 ms, 840 ms, 12.3 s."""
    if ms >= 10_000:
        return f"{ms / 1e3:.1f} s"
    if ms == 0:
        return "0"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"
