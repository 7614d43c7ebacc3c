"""page(): a replay report as one self-contained HTML page with inline SVG. Called by replay.run.

No scripts from elsewhere, no fonts, no images: it can be mailed. Imports nothing but replay's Report."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentspec.replay import CallRow, Report

__all__ = ["page"]

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
_INK = ("#2f6fde", "#e07b39", "#3a9d6e", "#8a5cc2", "#c7443f", "#5b7083", "#b38b1d", "#2b9aa8")
_SOURCE_INK = {
    "prompt": _INK[5], "tool": _INK[2], "output": _INK[0], "current": _INK[7], "seed": _INK[6],
    "schema": _INK[4], "shared": _INK[1], "language": _INK[3], "bonus": "#d5dae1",
}  # fmt: skip
_SOURCE_TEXT = {
    "prompt": "prompt", "tool": "tool output", "output": "this run's outputs", "current": "this output",
    "seed": "seeds", "schema": "schemas", "shared": "earlier runs", "language": "general text",
    "bonus": "the model itself",
}  # fmt: skip
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #f5f7fa; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 8px; }
p.sub { color: #5a6878; margin: 0 0 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-bottom: 18px; }
.tile, .card { background: #fff; border: 1px solid #e1e6ed; border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.2; } .tile span { color: #5a6878; font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 14px; margin-bottom: 14px; }
.card { margin-bottom: 14px; } .grid .card { margin: 0; }
svg { display: block; width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: 5a6878; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #edf0f4; }
th:first-child, td:first-child { text-align: left; } th { color: #5a6878; font-weight: 600; font-size: 13px; }
.note { color: #5a6878; font-size: 13px; margin: 6px 0 0; }
.key { display: inline-block; margin-right: 14px; font-size: 13px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; } """


def page(report: Report) -> str:
    """The whole page, as text."""
    totals = report.totals()
    low, high = report.uncertainty()
    settings = report.settings
    tiles = [
        (_number(totals["speedup"], 2, "×"), "predicted speedup"
         + ("" if math.isnan(low) else f" (95 %: {low:.2f} to {high:.2f})")),
        (_number(totals["tokens_per_step"]), "tokens per step"),
        (_number(totals["conditional_acceptance"]), "conditional acceptance a"),
        (_number(totals["acceptance_rate"]), "accepted / proposed"),
        (_number(totals["break_even"]), "break-even, tokens per step"),
        (_number(totals["copy_oracle"]), "copy oracle, tokens per step"),
    ]  # fmt: skip
    families = report.by(lambda row: row.family)
    cards = [
        ("Acceptance by call", _by_call(report), "Conditional acceptance of the trajectories' first calls, second "
         "calls, and so on. Bars: how many calls there are."),
        ("Where accepted tokens came from", _by_source(report), "Share of all output tokens, by family. What no draft "
         "had is the model's own token of each step."),
        ("Speedup against width", _by_width(report), f"Replayed with a fixed number of drafted tokens at every step; "
         f"dashed: the width policy. Cost curve: {settings['curve']}."),
        ("Are the probabilities right?", _reliability(report), "Drafted edges by predicted probability, against how "
         f"often they came true. Expected calibration error {report.calibration_error:.4f}."),
    ]  # fmt: skip
    body = [
        "<h1>agentspec replay</h1>",
        f'<p class="sub">{len({(r.family, r.trajectory) for r in report.rows})} trajectories, {totals["calls"]} calls, '
        f"{totals['output_tokens']:,} output tokens · proposer {html.escape(str(settings['proposer']))}, at most "
        f"{settings['max_draft']} drafted · {'trees' if settings['tree'] else 'chains'} · "
        f"{'memory shared within a family' if settings['shared'] else 'each trajectory alone'}</p>",
        '<div class="tiles">',
        *(f'<div class="tile"><b>{value}</b><span>{html.escape(text)}</span></div>' for value, text in tiles),
        "</div>",
        '<div class="grid">',
        *(
            f'<div class="card"><h2>{title}</h2>{figure}<p class="note">{html.escape(note)}</p></div>'
            for title, figure, note in cards
            if figure
        ),
        "</div>",
        f'<div class="card"><h2>Timeline of calls</h2>{_timeline(report.rows)}'
        '<p class="note">Each row a trajectory, each block a call: its width is the cost of its steps relative to plain '
        "decoding of the same text (the outline), its colour how many tokens a step emitted. The longest "
        "trajectories are shown.</p></div>",
        f'<div class="card"><h2>By family</h2>{_table(families, totals)}</div>',
    ]
    if report.skipped:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in report.skipped[:20])
        body.append(f'<div class="card"><h2>{len(report.skipped)} records skipped</h2><ul>{items}</ul></div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>agentspec replay</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>"
    )


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


class _Plot:
    """Axes and marks of one figure."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int = _HEIGHT) -> None:
        self.x0, self.x1 = x
        self.y0, self.y1 = y
        self.height = height
        self.marks: list[str] = []

    def px(self, x: float) -> float:
        span = (self.x1 - self.x0) or 1.0
        return _LEFT + (x - self.x0) / span * (_WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        span = (self.y1 - self.y0) or 1.0
        return self.height - _BOTTOM - (y - self.y0) / span * (self.height - _TOP - _BOTTOM)

    def axes(self, xs: Sequence[float], ys: Sequence[float], x_title: str, y_title: str, percent: bool = False) -> None:
        for y in ys:
            at = self.py(y)
            label = f"{y:.0%}" if percent else f"{y:g}"
            self.marks.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e6eaf0"/>'
                f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
            )
        for x in xs:
            self.marks.append(
                f'<text x="{self.px(x):.1f}" y="{self.height - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
            )
        middle = (self.height - _BOTTOM + _TOP) / 2
        self.marks.append(
            f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{self.height - 6}" text-anchor="middle">{x_title}</text>'
            f'<text x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">{y_title}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], ink: str, dash: str = "", dots: bool = True) -> None:
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        self.marks.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2"{style}/>')
        if dots:
            for x, y in points:
                self.marks.append(
                    f'<circle cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="3.2" fill="{ink}"><title>{x:g}: {y:.3g}</title></circle>'
                )

    def svg(self) -> str:
        return f'<svg viewBox="0 0 {_WIDTH} {self.height}" role="img">{"".join(self.marks)}</svg>'


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span low..high."""
    raw = max(1e-9, (high - low) / count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def _by_call(report: Report) -> str:
    groups = report.by(lambda row: row.call)
    calls = sorted((int(k), v) for k, v in groups.items())
    points = [(k + 1.0, v["conditional_acceptance"]) for k, v in calls if v["conditional_acceptance"] is not None]
    # Beyond the call that fewer than three trajectories reach the mean says little.
    most = max((k for k, v in calls if v["calls"] >= 3), default=max(k for k, _ in calls)) + 1
    points = [point for point in points if point[0] <= most]
    if not points:
        return ""
    plot = _Plot((0.5, most + 0.5), (0.0, 1.0))
    crowd = max(v["calls"] for _, v in calls)
    bar = max(2.0, (_WIDTH - _LEFT - _RIGHT) / most * 0.7)
    for k, v in calls:
        if k + 1 > most:
            continue
        height = (plot.py(0.0) - plot.py(1.0)) * 0.3 * v["calls"] / crowd
        plot.marks.append(
            f'<rect x="{plot.px(k + 1) - bar / 2:.1f}" y="{plot.py(0.0) - height:.1f}" width="{bar:.1f}" '
            f'height="{height:.1f}" fill="#e3e9f2"><title>call {k + 1}: {v["calls"]} calls</title></rect>'
        )
    plot.axes([x for x in _ticks(1, most, 8) if 1 <= x <= most], [0, 0.25, 0.5, 0.75, 1.0], "call of the trajectory",
              "conditional acceptance", percent=True)  # fmt: skip
    plot.line(points, _INK[0])
    return plot.svg()


def _by_source(report: Report) -> str:
    families: dict[str, dict[str, int]] = {}
    tokens: dict[str, int] = {}
    for row in report.rows:
        counts = families.setdefault(row.family, {})
        tokens[row.family] = tokens.get(row.family, 0) + row.output_tokens
        for source, count in row.accepted_by_source.items():
            counts[source] = counts.get(source, 0) + count
    names = [name for name in _SOURCE_INK if name == "bonus" or any(name in c for c in families.values())]
    left, bar, gap = 84, 24, 10
    height = len(families) * (bar + gap) + 10
    marks = []
    for place, (family, counts) in enumerate(sorted(families.items())):
        y = place * (bar + gap) + 6
        marks.append(f'<text x="{left - 8}" y="{y + bar / 2 + 4}" text-anchor="end">{html.escape(family[:12])}</text>')
        x = float(left)
        total = max(1, tokens[family])
        shares = {**counts, "bonus": total - sum(counts.values())}
        for name in names:
            share = shares.get(name, 0) / total
            wide = share * (_WIDTH - left - 10)
            if wide > 0:
                marks.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{bar}" fill="{_SOURCE_INK[name]}">'
                    f"<title>{_SOURCE_TEXT[name]}: {share:.1%}</title></rect>"
                )
                if wide > 34:
                    ink = "#5a6878" if name == "bonus" else "#fff"
                    marks.append(
                        f'<text x="{x + wide / 2:.1f}" y="{y + bar / 2 + 4}" text-anchor="middle" style="fill:{ink}">{share:.0%}</text>'
                    )
            x += wide
    keys = "".join(
        f'<span class="key"><i style="background:{_SOURCE_INK[name]}"></i>{_SOURCE_TEXT[name]}</span>' for name in names
    )
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(marks)}</svg><div>{keys}</div>'


def _by_width(report: Report) -> str:
    if not report.widths:
        return ""
    points = [(0.0, 1.0), *sorted((float(w), v["speedup"]) for w, v in report.widths.items())]
    policy = report.totals()["speedup"] or 1.0
    high = max([y for _, y in points] + [policy])
    ys = _ticks(0, high * 1.05, 5)
    plot = _Plot((0.0, points[-1][0]), (0.0, ys[-1]))
    plot.axes([x for x, _ in points], ys, "drafted tokens a step", "predicted speedup")
    plot.line([(0.0, policy), (points[-1][0], policy)], _INK[1], dash="5 4", dots=False)
    plot.line(points, _INK[0])
    return plot.svg()


def _reliability(report: Report) -> str:
    cells = [(p / n, a / n, n) for n, p, a in report.reliability if n >= 20]
    if not cells:
        return ""
    plot = _Plot((0.0, 1.0), (0.0, 1.0))
    plot.axes([0, 0.25, 0.5, 0.75, 1.0], [0, 0.25, 0.5, 0.75, 1.0], "predicted", "came true")
    plot.line([(0.0, 0.0), (1.0, 1.0)], "#b7c1cd", dash="4 4", dots=False)
    most = max(n for _, _, n in cells)
    for p, a, n in cells:
        radius = 3.0 + 9.0 * math.sqrt(n / most)
        plot.marks.append(
            f'<circle cx="{plot.px(p):.1f}" cy="{plot.py(a):.1f}" r="{radius:.1f}" fill="{_INK[0]}" fill-opacity="0.55">'
            f"<title>predicted {p:.3f}, came true {a:.3f}, {n:.0f} edges</title></circle>"
        )
    return plot.svg()


def _colour(tokens_per_step: float) -> str:
    """From pale (1 token a step) to deep blue (6 and more)."""
    share = min(1.0, max(0.0, (tokens_per_step - 1.0) / 5.0))
    pale, deep = (214, 226, 246), (23, 73, 168)
    return "rgb(" + ",".join(str(round(a + (b - a) * share)) for a, b in zip(pale, deep, strict=True)) + ")"


def _timeline(rows: Sequence[CallRow]) -> str:
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.family, row.trajectory), []).append(row)
    shown = sorted(groups.items(), key=lambda item: -sum(row.output_tokens for row in item[1]))[:14]
    widest = max(sum(row.output_tokens for row in calls) for _, calls in shown)
    wide, left, bar, gap = 1040, 150, 20, 9
    marks = []
    for place, ((_, name), calls) in enumerate(shown):
        y = place * (bar + gap) + 4
        scale = (wide - left - 10) / widest
        plain = sum(row.output_tokens for row in calls) * scale
        marks.append(
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(name[:24])}</text>'
            f'<rect x="{left}" y="{y}" width="{plain:.1f}" height="{bar}" fill="none" stroke="#c9d2dd"/>'
        )
        x = float(left)
        for row in calls:
            block = row.cost * scale
            rate = row.output_tokens / max(1, row.verify_steps)
            marks.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.8, block - 0.6):.1f}" height="{bar}" fill="{_colour(rate)}">'
                f"<title>call {row.call + 1}: {row.output_tokens} tokens in {row.verify_steps} steps "
                f"({rate:.1f} a step)</title></rect>"
            )
            x += block
    return f'<svg viewBox="0 0 {wide} {len(shown) * (bar + gap) + 6}" role="img">{"".join(marks)}</svg>'


def _table(families: dict[str, dict[str, Any]], totals: dict[str, Any]) -> str:
    columns = [
        ("calls", "calls", 0), ("output_tokens", "tokens", 0), ("tokens_per_step", "tokens/step", 2),
        ("proposed_per_step", "drafted/step", 1), ("acceptance_rate", "accepted/proposed", 2),
        ("conditional_acceptance", "a", 2), ("break_even", "break-even", 2), ("copy_oracle", "copy oracle", 2),
        ("speedup", "speedup", 2),
    ]  # fmt: skip
    head = "<tr><th></th>" + "".join(f"<th>{title}</th>" for _, title, _ in columns) + "</tr>"
    lines = []
    for name, group in [*families.items(), ("all", totals)]:
        cells = "".join(
            f"<td>{'–' if group[key] is None else (f'{group[key]:,}' if digits == 0 else f'{group[key]:.{digits}f}')}</td>"
            for key, _, digits in columns
        )
        lines.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return f"<table>{head}{''.join(lines)}</table>"
