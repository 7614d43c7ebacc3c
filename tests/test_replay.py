"""replay and recordings: figures on hand-made cases, the formats, the command, the page."""

from __future__ import annotations

import argparse
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec import replay as replaying
from agentspec.drafting import CostCurve, MatchProposer, make_proposer
from agentspec.engines.base import CallStats
from agentspec.errors import InvalidRequestError
from agentspec.recordings import Problem, RecordedCall, Recording, read, record
from agentspec.replay import CopyOracle, Encoder, load_curve, replay
from agentspec.report import page

pytestmark = pytest.mark.fast


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())


CHAT = [
    {"role": "system", "content": "You list files."},
    {"role": "user", "content": "List alpha/beta/gamma.txt twice."},
    {"role": "assistant", "content": "alpha/beta/gamma.txt"},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "alpha/beta/gamma.txt alpha/beta/gamma.txt"},
]


def check_chat(recordings: list[Recording]) -> None:
    assert len(recordings) == 1
    calls = recordings[0].calls
    assert [call.output["content"] for call in calls if call.output] == [
        CHAT[2]["content"],
        CHAT[4]["content"],
    ]
    assert [[m["role"] for m in call.messages][-1] for call in calls] == ["user", "user"]
    assert len(calls[1].messages) == 4


def write(path: Path, *values: Any) -> Path:
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values) + "\n")
    return path


class TestFormats:
    def test_traces(self, tmp_path: Path) -> None:
        steps = [
            {"messages_delta": CHAT[:2], "output": {"content": CHAT[2]["content"]}},
            {"messages_delta": CHAT[3:4], "output": {"content": CHAT[4]["content"]}},
        ]
        check_chat(read(write(tmp_path / "x.jsonl", {"id": "a", "steps": steps})))

    def test_openai_conversation(self, tmp_path: Path) -> None:
        check_chat(read(write(tmp_path / "x.jsonl", {"messages": CHAT})))

    def test_openai_requests_are_joined(self, tmp_path: Path) -> None:
        answers = [{"choices": [{"message": CHAT[k]}]} for k in (2, 4)]
        lines = [
            {"request": {"messages": CHAT[:2]}, "response": {"choices": [{"message": CHAT[2]}]}},
            {"request": {"messages": [CHAT[0], {"role": "user", "content": "Else."}]}, "response": answers[0]},
            {"request": {"messages": CHAT[:4]}, "response": {"choices": [{"message": CHAT[4]}]}},
        ]  # fmt: skip
        recordings = read(write(tmp_path / "x.jsonl", *lines))
        assert sorted(len(r.calls) for r in recordings) == [1, 2]
        check_chat([max(recordings, key=lambda r: len(r.calls))])

    def test_otel(self, tmp_path: Path) -> None:
        def parts(message: dict[str, Any]) -> dict[str, Any]:
            return {"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]}

        spans = []
        for start, upto in ((200, 4), (100, 2)):
            values = {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": json.dumps([parts(m) for m in CHAT[:upto]]),
                "gen_ai.output.messages": json.dumps([parts(CHAT[upto])]),
            }
            attributes = [{"key": k, "value": {"stringValue": v}} for k, v in values.items()]
            spans.append({"traceId": "t", "startTimeUnixNano": str(start), "attributes": attributes})
        spans.append(
            {
                "traceId": "t",
                "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}],
            }
        )
        spans.append(
            {
                "traceId": "t",
                "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}],
            }
        )
        document = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
        problems: list[Problem] = []
        path = tmp_path / "x.json"
        path.write_text(json.dumps(document, indent=1))
        with pytest.raises(InvalidRequestError):
            read(write(tmp_path / "only-bad.jsonl", {"resourceSpans": [{"scopeSpans": [{"spans": spans[3:]}]}]}))
        document["resourceSpans"][0]["scopeSpans"][0]["spans"] = spans[:3]
        path.write_text(json.dumps(document, indent=1))
        check_chat(read(path, problems.append))
        assert not problems

    def test_langsmith(self, tmp_path: Path) -> None:
        kinds = {"system": "SystemMessage", "user": "HumanMessage", "assistant": "AIMessage"}

        def serialised(message: dict[str, Any]) -> dict[str, Any]:
            return {
                "lc": 1,
                "id": ["langchain", kinds[message["role"]]],
                "kwargs": {"content": message["content"]},
            }

        lines: list[Any] = [{"run_type": "chain", "id": "r"}]
        for start, upto in (("2026-01-01T00:00:02", 4), ("2026-01-01T00:00:01", 2)):
            lines.append({
                "run_type": "llm", "trace_id": "t", "start_time": start,
                "inputs": {"messages": [[serialised(m) for m in CHAT[:upto]]]},
                "outputs": {"generations": [[{"message": serialised(CHAT[upto])}]]},
            })  # fmt: skip
        check_chat(read(write(tmp_path / "x.jsonl", *lines)))

    def test_malformed_lines_are_named(self, tmp_path: Path) -> None:
        problems: list[Problem] = []
        path = write(tmp_path / "x.jsonl", {"messages": CHAT}, "{broken", {"hello": 1}, "[1, 2]", {"id": 3, "steps": 4})
        check_chat(read(path, problems.append))
        assert [problem.where for problem in problems] == [
            "x.jsonl:2",
            "x.jsonl:3",
            "x.jsonl:4[0]",
            "x.jsonl:4[1]",
            "x.jsonl:5",
        ]

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
            (b'{"messages": ' + b'[{"a": ' * 5_000 + b"1" + b"}]" * 5_000 + b"}", "nested too deeply"),
            (b'{"messages": "\xff"}', "not UTF-8"),
            (b"9" * 5_000, "not JSON"),
            (b'{"messages": [{"role": "user", "content": "\\ud800"}], "output": "a"}', "surrogates"),
            (b'{"messages": [{"role": "user", "content": "a"}], "output": "a", "tools": 5}', "tools: needed a list"),
            (b'{"agentspec": 1, "input_ids": [Infinity], "output_ids": [1]}', "whole number .* got inf"),
            (b'{"agentspec": 1, "input_ids": [1e30, 2], "output_ids": [1]}', "whole number .* got 1e.30"),
            (b'{"agentspec": 1, "input_ids": [1099511627776], "output_ids": [1]}', "whole number .* got 1099511627776"),
            (b'{"agentspec": 1, "input_ids": [1], "output_ids": [1.5]}', r"output_ids\[0\]: .* got 1.5"),
            (b'{"agentspec": 1, "input_ids": [true], "output_ids": [1]}', "whole number .* got True"),
            (b'{"agentspec": 1, "input_ids": [-1], "output_ids": [1]}', "whole number .* got -1"),
            (b'{"agentspec": 1, "input_ids": [], "output_ids": [1]}', "at least one"),
            (b'{"agentspec": 1, "input_ids": [1], "output_ids": [1], "spans": [[0, 2, 0, ""]]}', "spans"),
            (b'{"agentspec": 1, "input_ids": [1], "output_ids": [1], "spans": [[0, 1, 99, ""]]}', "spans"),
            (b'{"agentspec": 1, "input_ids": [1], "output_ids": [1], "steps": 5}', "steps: needed a list"),
            (b'{"agentspec": 1, "input_ids": [1], "output_ids": [1], "max_tokens": "5"}', "max_tokens"),
        ],
        ids=lambda value: value[:40] if isinstance(value, str) else "",
    )
    @pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
    def test_one_bad_line_costs_that_line(self, tmp_path: Path, line: bytes, words: str, first: bool) -> None:
        good = json.dumps({"agentspec": 1, "trajectory": "t", "input_ids": [1, 2], "output_ids": [3]}).encode()
        path = tmp_path / "x.jsonl"
        path.write_bytes(b"\n".join([line, good, good] if first else [good, good, line]))
        problems: list[Problem] = []
        (recording,) = read(path, problems.append)
        assert len(recording.calls) == 2
        (problem,) = problems
        assert problem.where == f"x.jsonl:{1 if first else 3}" and re.search(words, problem.reason), problem
        replay([recording], Encoder(None), MatchProposer)

    def test_nothing_readable(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match="no trajectory"):
            read(write(tmp_path / "x.jsonl", {"hello": 1}))
        with pytest.raises(InvalidRequestError, match="can't be read"):
            read(tmp_path / "absent.jsonl")

    def test_our_own(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        stats = CallStats(trajectory_id="t", call_index=0)
        with record(path, content=True) as recorder:
            recorder.write(stats, [1, 2, 3], [4, 5], [2])
        recording = read(path)[0]
        assert (recording.id, recording.calls[0].input_ids, recording.calls[0].steps) == ("t", [1, 2, 3], [2])

    def test_content_is_opt_in(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        with record(path) as recorder:
            recorder.write(CallStats(trajectory_id="t"), [1, 2, 3], [4, 5], [2])
        assert json.loads(path.read_text())["output_ids"] is None
        with pytest.raises(InvalidRequestError, match="content=True"):
            read(path)


def ids(*calls: tuple[list[int], list[int]], name: str = "t", family: str = "f") -> Recording:
    return Recording(name, family, [RecordedCall(input_ids=a, output_ids=b) for a, b in calls])


class TestFigures:
    def test_a_copy_is_counted_by_hand(self) -> None:
        # The prompt ends in 1; 1 was followed by 2 3 4 5 6 7 8: all but the first miss is copied.
        recording = ids(([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], [2, 3, 4, 5, 6, 7, 50]))
        report = replay([recording], Encoder(None), MatchProposer, fixed=True, tree=False, max_draft=4,
                        curve=CostCurve({1: 1.0, 5: 3.0}))  # fmt: skip
        row = report.rows[0]
        # Step 1 drafts 2 3 4 5 and gets 6 with it; step 2 drafts 7 8 (9 is too deep), 7 holds, then 50.
        assert (row.verify_steps, row.accepted, row.output_tokens) == (2, 5, 7)
        assert row.mismatches == 0 or row.mismatches == 1
        totals = report.totals()
        assert totals["tokens_per_step"] == 3.5
        assert totals["speedup"] == pytest.approx(7 / row.cost)

    def test_nothing_to_copy_costs_nothing(self) -> None:
        report = replay([ids(([1, 2, 3], [4, 5, 6, 7]))], Encoder(None), MatchProposer, fixed=True)
        assert report.totals()["tokens_per_step"] == 1.0
        assert report.totals()["speedup"] == 1.0

    def test_own_and_shared(self) -> None:
        output = list(range(20, 60))
        recordings = [ids(([1, 2, 3], output), name="a"), ids(([4, 5, 3], output), name="b")]

        def rate(shared: bool) -> float:
            def make() -> Any:
                return make_proposer("mixture", trajectory_bytes=1 << 19, namespace_bytes=1 << 20)

            report = replay(recordings, Encoder(None), make, fixed=True, shared=shared)
            return report.by(lambda row: row.trajectory)["b"]["tokens_per_step"]

        assert rate(True) > 5.0
        assert rate(False) < 1.5

    def test_copy_oracle(self) -> None:
        oracle = CopyOracle(shared=True)
        oracle.new_trajectory()
        # After 3 copy 4 5 and get 9 with it; 9 has no earlier occurrence: 8 alone.
        assert oracle.steps(np.array([3, 4, 5, 6, 3], np.int32), np.array([4, 5, 9, 8], np.int32)) == 2
        oracle.new_trajectory()
        assert oracle.steps(np.array([7, 9], np.int32), np.array([8, 1], np.int32)) == 1
        assert CopyOracle(False).steps(np.array([1, 1], np.int32), np.array([1] * 50, np.int32)) == 1

    def test_the_bootstrap_covers_the_estimate(self) -> None:
        recordings = [ids(([1, 2, 3, 4, 1], [2, 3, 4, 9 + k] * (1 + k % 3)), name=str(k)) for k in range(12)]
        report = replay(recordings, Encoder(None), MatchProposer)
        low, high = report.uncertainty()
        speedup = report.totals()["speedup"]
        assert low <= speedup <= high
        assert np.isnan(replay(recordings[:1], Encoder(None), MatchProposer).uncertainty()[0])

    def test_history_is_exact(self) -> None:
        """An assistant message is encoded in later prompts as it was put out."""
        calls = Encoder(Bytes()).calls(
            Recording("t", "f", [RecordedCall(CHAT[:2], CHAT[2]), RecordedCall(CHAT[:4], CHAT[4])])
        )
        first = np.concatenate([calls[0].prompt, calls[0].output])
        assert calls[1].prompt[: len(first)].tolist() == first.tolist()
        for call in calls:
            assert call.spans is not None
            assert all(0 <= s.start < s.end <= len(call.prompt) for s in call.spans)


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    replaying.add_arguments(parser)
    return replaying.run(parser.parse_args([*words, "--quiet"]))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    with record(path, content=True) as recorder:
        for k in range(4):
            stats = CallStats(trajectory_id=f"t{k // 2}", call_index=k % 2)
            recorder.write(stats, [1, 2, 3, 4, 5, 1], [2, 3, 4, 5, 9], [4, 1])
    with path.open("a") as file:
        file.write("nonsense\n")
    code = command(
        str(path),
        "--proposer",
        "match",
        "--json",
        str(tmp_path / "x.json"),
        "--html",
        str(tmp_path / "x.html"),
    )
    assert code == 1  # a record was skipped
    said = capsys.readouterr()
    assert "runs.jsonl:5" in said.err
    assert "predicted speedup" in said.out and "v(n) = 1 + 0.005 (n - 1) (--curve FILE" in said.out
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["totals"]["output_tokens"] == 20
    assert figures["widths"]["16"]["speedup"] > 0
    text = (tmp_path / "x.html").read_text()
    html.parser.HTMLParser().feed(text)
    assert "http://" not in text and "https://" not in text and "<script" not in text


def test_the_prior_is_the_mixtures(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"id": "t", "calls": []}) + "\n")
    with pytest.raises(InvalidRequestError, match="only the mixture"):
        command(str(path), "--proposer", "match", "--prior", "x.npz")


def test_a_price_is_what_a_node_has_to_bring() -> None:
    recording = ids(([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6, 1, 2, 3, 4, 5]))
    steps = [
        replay([recording], Encoder(None), MatchProposer, max_draft=4, price=price, oracle=False).rows[0].proposed
        for price in (0.0, 0.5, 1.01)
    ]
    assert steps[0] > steps[1] > steps[2] == 0


def test_page_escapes_names() -> None:
    recordings = [ids(([1, 2, 1], [2, 1]), name="<b>&x", family='"><script>')]
    assert "<script>" not in page(replay(recordings, Encoder(None), MatchProposer))


def test_curves(tmp_path: Path) -> None:
    assert load_curve("gpu")(17) == pytest.approx(1.08)
    assert load_curve("cpu")(16) == 2.7
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"1": 10.0, "8": 12.0}))
    assert load_curve(str(path))(8) == pytest.approx(1.2)
    with pytest.raises(InvalidRequestError):
        load_curve("nowhere")


@pytest.mark.parametrize("proposer", ["match", "mixture"])
def test_a_local_run_is_predicted_exactly(tiny_engine: Any, tmp_path: Path, proposer: str) -> None:
    """The same memory, proposer and width policy: replay takes the very verify steps that the engine took."""
    from agentspec.engines.base import GenerationRequest
    from agentspec.loop import trajectory

    curve = CostCurve({1: 1.0, 4: 1.2, 16: 1.6})
    made = make_proposer(proposer)
    path = tmp_path / "run.jsonl"
    engine = tiny_engine(proposer=made, cost_curve=curve, max_draft=8)
    random = np.random.default_rng(3)
    calls = []
    with record(path, content=True):
        prompt = random.integers(5, 60, 24).tolist()
        with trajectory("t") as run:
            for _ in range(4):
                result = engine.generate(GenerationRequest(input_ids=prompt, max_tokens=40, trajectory=run)).result()
                calls.append(result.stats)
                prompt = [*prompt, *result.token_ids, *random.integers(5, 60, 8).tolist()]
    report = replay(
        read(path), Encoder(None), lambda: make_proposer(proposer), curve=curve, max_draft=8,
        tree=engine.forward.supports_trees, shared=False,
    )  # fmt: skip
    assert [row.verify_steps for row in report.rows] == [stats.verify_steps for stats in calls]
    assert [row.proposed for row in report.rows] == [stats.proposed for stats in calls]
    assert [row.accepted for row in report.rows] == [stats.accepted for stats in calls]
    assert sum(row.recorded_steps or 0 for row in report.rows) == sum(row.verify_steps for row in report.rows)
    assert sum(row.accepted for row in report.rows) > 0


def test_fifty_runs_of_one_agent_do_not_decay() -> None:
    """Each run reads new text and repeats its habits; the namespace grows, and recent wins."""
    from agentspec.testing import scripted_calls

    recordings = []
    for run in range(50):
        calls = [
            RecordedCall(
                input_ids=prompt.tolist(),
                output_ids=output.tolist(),
                spans=[[span.start, span.end, int(span.source), span.role] for span in spans],
            )
            for prompt, spans, output in scripted_calls(3, seed=run % 7 + 100 * (run // 7))
        ]
        recordings.append(Recording(str(run), "agent", calls))
    for proposer, options in (("match", {}), ("mixture", {"trajectory_bytes": 1 << 19, "namespace_bytes": 1 << 20})):
        report = replay(
            recordings, Encoder(None), lambda p=proposer, o=options: make_proposer(p, **o), fixed=True, oracle=False
        )
        rates = [group["tokens_per_step"] for group in report.by(lambda row: int(row.trajectory)).values()]
        assert np.mean(rates[-10:]) > 0.97 * np.mean(rates[2:12])


@pytest.mark.fast
@pytest.mark.parametrize("path", [None, "", 5, b""])
def test_recording_needs_a_path(path):
    with pytest.raises(InvalidRequestError, match="record: needed a path"):
        record(path)
