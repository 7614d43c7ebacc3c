"""`agentspec trace show`: the tree in the terminal and the page, from a real recording and from hand-made
ones.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from agentspec.cli import main
from agentspec.errors import InvalidRequestError
from agentspec.trace.page import page
from agentspec.trace.reading import read
from agentspec.trace.tree import tree
from tests.trace.conftest import agentspec

pytestmark = pytest.mark.fast

SECOND = 1_000_000_000


def attribute(key, value):
    kind = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}[type(value)]
    return {"key": key, "value": {kind: str(value) if kind == "intValue" else value}}


def span(id, name, start, end, parent="", trace="a" * 32, error="", **attributes):
    written = {
        "traceId": trace,
        "spanId": id * 8,
        "name": name,
        "startTimeUnixNano": str(int(start * SECOND)),
        "endTimeUnixNano": str(int(end * SECOND)),
        "attributes": [attribute(k.replace("__", "."), v) for k, v in attributes.items()],
        "status": {"code": 2, "message": error} if error else {},
    }
    return written | ({"parentSpanId": parent * 8} if parent else {})


def recording(tmp_path, *spans):
    resource = {"attributes": [attribute("service.name", "svc")]}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}))
    return path


def call(id, start, end, parent="", **more):
    chat = {
        "gen_ai__operation__name": "chat",
        "agentspec__first_token_ms": (end - start) * 1e3 / 2,
        "agentspec__tokens_per_step": 2.0,
        "agentspec__break_even": 1.5,
        "agentspec__acceptance_rate": 0.25,
        "agentspec__verify_steps": 10,
        "gen_ai__usage__output_tokens": 20,
        "agentspec__proposed": 40,
        "agentspec__accepted": 10,
        "agentspec__time_saved_ms": 500.0,
    }
    return span(id, "chat m", start, end, parent, **{**chat, **more})


def agent(id, start, end, parent="", **more):
    return span(id, "invoke_agent a", start, end, parent, gen_ai__operation__name="invoke_agent", **more)


def test_the_tree_by_hand(tmp_path):
    path = recording(
        tmp_path,
        agent("11", 0, 10),
        call("22", 0, 5, "11"),
        span("33", "execute_tool t", 5, 5.1, "11", error="no such file", error__type="OSError"),
        call("44", 6, 10, "11"),
    )
    (trace,) = read(path)
    lines = tree(trace, 100).splitlines()
    assert lines[0] == (
        "trace aaaaaaaa, svc, 10.0 s, 2 calls, 40 tokens, 2.00 tokens/step, 25% of drafts accepted, "
        "1000 ms saved (estimated)"
    )
    assert [re.split(r"\s{2,}", line)[0] for line in lines[1:]] == [
        "invoke_agent a",
        "├─ chat m",
        "├─ execute_tool t",
        "└─ chat m",
    ]
    bars = [re.search(r"ms |s ", line).end() for line in lines[1:]]
    assert len(set(bars)) == 1, "the bars stand in one column"
    first, last = lines[2], lines[4]
    assert first.count("░") == pytest.approx(first.count("█"), abs=1), "half of the call was its prefill"
    assert last.index("░") > first.rindex("█"), "it begins after the first has ended"
    assert "acc 25%" in first and "2.00/step" in first
    assert lines[3].endswith("OSError: no such file")
    assert all(len(line) <= 100 for line in lines[1:])


def test_plain_is_ascii(tmp_path):
    path = recording(tmp_path, agent("11", 0, 10), call("22", 0, 5, "11"), call("44", 6, 10, "11"))
    plain = tree(read(path)[0], 90, plain=True)
    assert plain.isascii() and "`- chat m" in plain and "..##" in plain


@pytest.mark.parametrize("width", [1, 40, 60, 80, 200])
def test_it_fits_the_terminal(tmp_path, width):
    path = recording(tmp_path, agent("11", 0, 10), call("22", 0, 5, "11", agentspec__below_break_even=True))
    for line in tree(read(path)[0], width).splitlines()[1:]:
        assert len(line) <= max(60, width)


def test_drift_is_shown_under_its_agent(tmp_path):
    path = recording(
        tmp_path, agent("11", 0, 1, agentspec__drift="nothing matched: 9 of 9 steps"), call("22", 0, 1, "11")
    )
    assert "drift: nothing matched" in tree(read(path)[0]).splitlines()[2]


def test_a_span_whose_parent_is_elsewhere_is_a_root_and_two_traces_are_two_trees(tmp_path):
    path = recording(
        tmp_path, call("22", 5, 6, "99"), span("77", "other", 1, 2, trace="b" * 32), call("44", 6, 7, "22")
    )
    first, second = read(path)
    assert (first.id[0], second.id[0]) == ("b", "a"), "in the order in which they began"
    assert [root.name for root in second.roots] == ["chat m"]
    assert [depth for depth, _ in second.nodes] == [0, 1]


def test_a_chain_deeper_than_pythons_stack(tmp_path):
    spans = [span(f"{i:02x}", "s", i, 300, f"{i - 1:02x}" if i else "") for i in range(256)]
    deep = [dict(s, spanId=f"{i:016x}", parentSpanId=f"{i - 1:016x}") for i, s in enumerate(spans * 12)]
    (trace,) = read(recording(tmp_path, *deep))
    assert len(tree(trace).splitlines()) == 1 + 256 * 12


def test_one_object_a_line_is_read_too(tmp_path):
    path = recording(tmp_path, call("22", 0, 1))
    path.write_text(path.read_text() + "\n" + path.read_text().replace("2222222222222222", "3333333333333333"))
    assert len(read(path)[0].calls) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no spans"),
        ("hello", "no JSON"),
        ("[]", "something else"),
        ("{}", "something else"),
        ('{"data": []}', "something else"),
        ('{"resourceSpans": []}', "has no spans"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "a"}]}]}]}', "something else"),
    ],
)
def test_other_files_are_refused_with_a_reason(tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        read(path)


GOOD = '{"resourceSpans": [{"scopeSpans": [{"spans": [%s]}]}]}'


def changed(**more):
    return GOOD % json.dumps(call("44", 1, 2) | more)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"resourceSpans": \xff}', "not UTF-8"),
        (b"{broken", "no JSON"),
        (changed(startTimeUnixNano=float("inf")).encode(), "OverflowError"),
        (changed(startTimeUnixNano="9" * 400).encode(), r"2\^64"),
        (changed(traceId=5).encode(), "traceId: needed a text"),
        (changed(spanId={}).encode(), "spanId: needed a text"),
        (changed(attributes=[attribute("agentspec.itl.mean_ms", float("nan"))]).encode(), "finite number, got nan"),
        (changed(attributes=[attribute("agentspec.accepted", "many")]).encode(), "finite number, got 'many'"),
        (changed(attributes=[{"key": "a", "value": {"intValue": "1" * 100}}]).encode(), "64 bits"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_one_bad_line_costs_that_line(tmp_path, capsys, line, words):
    path = tmp_path / "x.json"
    path.write_bytes(line + b"\n" + (GOOD % json.dumps(call("22", 0, 1))).encode() + b"\n")
    assert main(["trace", "show", str(path)]) == 1
    said = capsys.readouterr()
    assert "chat m" in said.out and re.search(f"skipped x.json:1.*{words}", said.err) and "1 skipped" in said.err
    assert main(["trace", "show", str(path), "--html", str(tmp_path / "x.html")]) == 1


def test_spans_that_are_each_others_parents_are_shown(tmp_path):
    ring = call("22", 0, 1, "44"), call("44", 0, 1, "55"), call("55", 0, 1, "22"), call("66", 0, 1, "66")
    (trace,) = read(recording(tmp_path, *ring, call("77", 0, 1, "55")))
    assert len(trace.nodes) == 5 and len(tree(trace).splitlines()) == 6


def test_the_words_are_explained_where_they_stand(tmp_path, capsys):
    lost = {"agentspec__time_saved_ms": -0.02, "agentspec__below_break_even": True}
    assert main(["trace", "show", str(recording(tmp_path, call("22", 0, 1, **lost)))]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("saved, lost: time against") and "below break-even: the drafts" in last
    assert main(["trace", "show", str(recording(tmp_path, span("22", "other", 0, 1)))]) == 0
    assert "break-even" not in capsys.readouterr().out


def test_the_command_on_a_recording(recording, tmp_path):
    done = agentspec("trace", "show", recording)
    assert done.returncode == 0, done.stderr
    assert "invoke_agent reader" in done.stdout and "└─" in done.stdout
    assert "EngineError: the engine failed: RuntimeError: out of memory" in done.stdout
    assert "abandoned" in done.stdout
    assert agentspec("trace", "show", tmp_path / "none.json").returncode == 2


class Page(HTMLParser):
    """Collects what a page would fetch, its rows, and whether its tags close."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, text):
        super().__init__()
        self.fetches, self.rows, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.fetches += [v for k, v in found.items() if k in ("src", "href", "action", "data")]
        if tag == "details":
            self.rows.append(found)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_has_a_row_a_span(recording, tmp_path):
    target = tmp_path / "run.html"
    done = agentspec("trace", "show", recording, "--html", target)
    assert done.returncode == 0, done.stderr
    text = target.read_text(encoding="utf-8")
    found = Page(text)
    assert found.open == [] and found.fetches == []
    assert not re.search(r"https?://|@import|url\(", text)
    traces = read(recording)
    assert len(found.rows) == sum(len(t.nodes) for t in traces)
    calls = [row for row in found.rows if row["data-kind"] == "call"]
    assert len(calls) == sum(len(t.calls) for t in traces)
    assert sum(row["data-failed"] == "1" for row in calls) == 2
    assert "verify steps" in text


def test_nothing_in_a_span_becomes_markup(tmp_path):
    evil = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
    path = recording(
        tmp_path,
        agent("11", 0, 1, agentspec__drift=evil, gen_ai__agent__name=evil),
        span("22", evil, 0, 1, "11", error=evil, gen_ai__operation__name="chat", gen_ai__request__model=evil),
    )
    text = page(read(path), evil)
    assert "<script>alert" not in text and "<img" not in text
    assert Page(text).fetches == []


def test_a_trace_of_no_length(tmp_path):
    path = recording(tmp_path, call("22", 1, 1))
    assert "chat m" in tree(read(path)[0]) and "chat m" in page(read(path), "x")
