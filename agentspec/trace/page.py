"""A recording as one HTML page that needs nothing else: a time line, one row a span, a call's figures at a
glance.

Style and script are in page.css and page.js beside this file and are written into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from agentspec.telemetry import names as n
from agentspec.trace.reading import Node, Trace
from agentspec.trace.tree import milliseconds

__all__ = ["page"]

_HEAD = ("span", "time line", "time", "TTFT", "ITL p50 / p95", "acceptance", "per step (even)", "saved")


def page(traces: Sequence[Trace], title: str) -> str:
    """The page. title: shown on top, e.g. the file's name."""
    here = resources.files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    body = "\n".join(_section(trace) for trace in traces)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · agentspec trace</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<div class="controls" role="toolbar" aria-label="order and filter">
<label>order <select id="order">
<option value="time">as it ran</option>
<option value="slow">slowest call first</option>
<option value="acceptance">lowest acceptance first</option>
<option value="itl">slowest token (ITL p95) first</option>
</select></label>
<label><input type="checkbox" data-only="nodraft"> no draft</label>
<label><input type="checkbox" data-only="below"> below break-even</label>
<label><input type="checkbox" data-only="failed"> failed or abandoned</label>
<span class="key"><i class="light"></i> to the first token <i class="full"></i> decoding
<i class="tool"></i> tool <i class="agent"></i> agent</span>
</div>
</header>
{body}
<script>
{script}</script>
</body>
</html>
"""


def _section(trace: Trace) -> str:
    rows = "\n".join(_row(trace, depth, node, place) for place, (depth, node) in enumerate(trace.nodes))
    ticks = "".join(f'<span style="left:{k * 25}%">{milliseconds(trace.ms * k / 4)}</span>' for k in range(5))
    heads = "".join(
        f'<div class="axis">{ticks}</div>' if head == "time line" else f"<div>{head}</div>" for head in _HEAD
    )
    return f"""<section>
<div class="tiles">{_tiles(trace)}</div>
<div class="rows" role="table">
<div class="head" role="row">{heads}</div>
{rows}
</div>
</section>"""


def _tiles(trace: Trace) -> str:
    steps, tokens = trace.total(n.STEPS), trace.total(n.OUTPUT_TOKENS)
    proposed, saved = trace.total(n.PROPOSED), trace.total(n.SAVED_MS)
    models = sorted({str(call.attributes.get(n.REQUEST_MODEL, "")) for call in trace.calls} - {""})
    tiles = [
        (milliseconds(trace.ms), trace.service or "trace " + trace.id[:8]),
        (f"{len(trace.calls)}", "call" if len(trace.calls) == 1 else "calls"),
        (", ".join(models) or "-", "model"),
        (f"{tokens:,.0f}", "output tokens"),
        (f"{tokens / steps:.2f}" if steps else "-", "tokens a step"),
        (f"{trace.total(n.ACCEPTED) / proposed:.0%}" if proposed else "-", "of draft tokens accepted"),
        (milliseconds(abs(saved)), "saved (estimated)" if saved >= 0 else "lost (estimated)"),
    ]
    drifts = {str(node.attributes[n.DRIFT]) for _, node in trace.nodes if n.DRIFT in node.attributes}
    said = "".join(f'<p class="drift">{escape(words)}</p>' for words in sorted(drifts))
    return "".join(f"<div><b>{escape(big)}</b>{escape(small)}</div>" for big, small in tiles) + said


def _row(trace: Trace, depth: int, node: Node, place: int) -> str:
    a = node.attributes
    kind = {"chat": "call", "invoke_agent": "agent", "execute_tool": "tool"}.get(node.kind, "other")
    itl = a.get(f"{n.ITL_TOKEN}.p95_ms")
    marks = {
        "order": place,
        "kind": kind,
        "ms": f"{node.ms:.3f}",
        "acceptance": f"{a[n.ACCEPTANCE]:.4f}" if n.ACCEPTANCE in a else "",
        "itl": f"{itl:.3f}" if itl is not None else "",
        "nodraft": int(kind == "call" and bool(a.get(n.NO_DRAFT))),
        "below": int(kind == "call" and bool(a.get(n.BELOW))),
        "failed": int(bool(node.failed or a.get(n.ABANDONED))),
    }
    data = " ".join(f'data-{key}="{escape(str(value))}"' for key, value in marks.items())
    number = f" <em>#{a[n.CALL_INDEX]}</em>" if n.CALL_INDEX in a else ""
    wrong = node.failed or ("abandoned" if a.get(n.ABANDONED) else "")
    bad = f' <span class="bad" title="{escape(wrong)}">{escape(wrong[:40])}</span>' if wrong else ""
    cells = [
        f'<div class="name" style="--depth:{min(depth, 12)}">{escape(node.name)}{number}{bad}</div>',
        f'<div class="lane">{_bar(trace, node, kind)}</div>',
        f"<div>{milliseconds(node.ms)}</div>",
        *_figures(a, kind),
    ]
    return (
        f'<details class="row {kind}" {data}><summary role="row">{"".join(cells)}</summary>'
        f'<div class="more">{_attributes(node)}</div></details>'
    )


def _bar(trace: Trace, node: Node, kind: str) -> str:
    total = trace.ms or 1.0
    left, width = 100 * node.start_ms / total, 100 * node.ms / total
    first = node.attributes.get(n.PREFILL_MS) if kind == "call" else None
    light = min(100.0, 100 * first / node.ms) if first is not None and node.ms else 0.0
    return f'<i style="left:{left:.3f}%;width:max(2px,{width:.3f}%)"><u style="width:{light:.2f}%"></u></i>'


def _figures(a: dict[str, Any], kind: str) -> list[str]:
    if kind != "call":
        return ["<div></div>"] * 5
    p50, p95 = a.get(f"{n.ITL_TOKEN}.p50_ms"), a.get(f"{n.ITL_TOKEN}.p95_ms")
    rate, per_step, even = a.get(n.ACCEPTANCE), a.get(n.TOKENS_PER_STEP), a.get(n.BREAK_EVEN)
    saved = a.get(n.SAVED_MS)
    acceptance = "no draft"
    if rate is not None:
        acceptance = f'<span class="meter"><i style="width:{100 * rate:.0f}%"></i></span><b>{rate:.0%}</b>'
    paid = ""
    if per_step is not None and even is not None:
        paid = f' <small title="tokens a step from which drafting pays">({even:.2f})</small>'
    return [
        f"<div>{milliseconds(a[n.PREFILL_MS]) if n.PREFILL_MS in a else ''}</div>",
        f"<div>{'' if p50 is None or p95 is None else f'{p50:.3g} / {p95:.3g} ms'}</div>",
        f"<div>{acceptance}</div>",
        _cell("" if per_step is None else f"{per_step:.2f}{paid}", poor=bool(a.get(n.BELOW))),
        _cell("" if saved is None else _signed(saved), poor=(saved or 0) < 0),
    ]


def _cell(html: str, poor: bool) -> str:
    return f'<div class="poor">{html}</div>' if poor else f"<div>{html}</div>"


def _signed(ms: float) -> str:
    return ("−" if ms < 0 else "") + milliseconds(abs(ms))


def _attributes(node: Node) -> str:
    rows = []
    for key, value in sorted(node.attributes.items()):
        entry = n.known(key)
        meaning = f' title="{escape(entry.meaning)}"' if entry else ""
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        rows.append(f"<tr><th{meaning}>{escape(key)}</th><td>{escape(shown)}</td></tr>")
    told = "".join(
        f"<tr><th>{milliseconds(at)}</th><td>{escape(name)} {escape(_event(attributes))}</td></tr>"
        for at, name, attributes in node.events
    )
    return f"<table>{''.join(rows)}</table>" + (f"<h3>verify steps</h3><table>{told}</table>" if told else "")


def _event(attributes: dict[str, Any]) -> str:
    def short(key: str) -> str:
        return key.rpartition(".")[2]

    return ", ".join(
        f"{short(key)} {value:.3g}" if isinstance(value, float) else f"{short(key)} {value}"
        for key, value in attributes.items()
    )
