"""docs/tracing.md has the table of names as names.py has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.telemetry import names

pytestmark = pytest.mark.fast


def table() -> str:
    lines = ["| span attribute | type | meaning | source |", "|---|---|---|---|"]
    lines += [f"| `{a.key}` | {a.kind} | {a.meaning} | {a.source} |" for a in names.ATTRIBUTES.values()]
    lines += ["", "| metric | instrument, unit | meaning | source |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.instrument}, {m.unit} | {m.meaning} | {m.source} |" for m in names.METRICS.values()]
    return "\n".join(lines)


def test_the_table_in_the_docs_is_the_codes():
    text = (Path(__file__).resolve().parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- table -->\n")
    assert rest.partition("<!-- end -->")[0].strip() == table(), "names.py changed: write its table anew"
