"""benchmarks/gpu.py in small: its figures, its time budget, and that a part's failure costs that part only.

The server half with a real SGLang is tests/sglang/test_gpu_benchmark.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_server
from benchmarks.gpu_server import Answer, Call, Chain, from_prose, from_traces, summed
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]


def program(*arguments: str, limit: float = 280) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.fast
def test_a_part_that_fails_is_noted_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out.json"
    report = gpu.Report("trial", 60, str(out))
    kept: list[Any] = []

    def fails(found: dict[str, Any]) -> None:
        found["before"] = 1
        raise ValueError("no such thing")

    assert not report.part("bad", fails)
    kept.append(json.loads(out.read_text()))
    assert report.part("good", lambda found: found.update(answer=42))
    assert not report.part("long", lambda found: None, least_s=1000)
    assert report.close() == 1
    assert kept[0]["parts"]["bad"]["found"] == {"before": 1}, "what was found before the failure is kept"
    results = json.loads(out.read_text())
    assert results["parts"]["bad"]["error"] == "ValueError: no such thing"
    assert results["parts"]["good"]["found"] == {"answer": 42}
    assert "not started: needed 1000 s" in results["parts"]["long"]["error"]
    assert results["complete"] is False
    assert "bad: ValueError: no such thing" in capsys.readouterr().out


@pytest.mark.fast
def test_a_part_that_hangs_is_ended_and_the_others_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script = (
        "import time; from benchmarks.gpu import Report\n"
        f"report = Report('trial', 0.2, {str(out)!r}, grace_s=0.8)\n"
        "report.part('first', lambda found: found.update(answer=42))\n"
        "report.part('hangs', lambda found: time.sleep(120), least_s=-1e9)\n"
    )
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - before < 60 and done.returncode == 2
    assert "time is up in hangs" in done.stderr
    results = json.loads(out.read_text())
    assert results["parts"]["first"]["found"] == {"answer": 42}
    assert "still running" in results["parts"]["hangs"]["error"]


@pytest.mark.fast
def test_a_server_that_does_not_start_is_reported_for_each_algorithm(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    code, text = program(
        "server",
        "--model",
        str(tmp_path / "model"),
        "--python",
        "/bin/false",
        "--out",
        str(out),
        "--concurrency",
        "1",
        "2",
    )
    assert code == 1, text
    parts = json.loads(out.read_text())["parts"]
    assert parts["prompts"]["found"]["trajectories"] == 4
    for algorithm in gpu_server.ALGORITHMS:
        assert "SGLang ended with 1 before it was ready" in parts[algorithm]["error"]


@pytest.mark.fast
def test_prose_becomes_trajectories_whose_prompts_extend_each_other() -> None:
    tokenizer = tiny.tokenizer()
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    chains = from_prose(tokenizer, files, 64, 100_000, 64)
    assert len(chains) == 64 and len({chain.name for chain in chains}) == len(chains)
    for chain in chains:
        assert len(chain.calls) == 4
        for earlier, later in zip(chain.calls, chain.calls[1:], strict=False):
            common = [a for a, b in zip(earlier.ids, later.ids, strict=False) if a == b]
            assert len(common) >= len(earlier.ids) - 2 and len(later.ids) > len(earlier.ids)
    short = from_prose(tokenizer, files, 64, len(chains[0].calls[1].ids), 1)
    assert len(short[0].calls) == 2


@pytest.mark.fast
def test_recorded_trajectories_are_taken_in_turn(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 1)):
        lines = []
        for i in range(count):
            call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            steps = [
                {"messages_delta": [{"role": "user", "content": f"question {name}{i}"}],
                 "output": {"role": "assistant", "content": None, "tool_calls": [call]}},
                {"messages_delta": [{"role": "tool", "tool_call_id": "c", "content": "what was found"}],
                 "output": {"role": "assistant", "content": "answer"}},
            ]  # fmt: skip
            lines.append(json.dumps({"id": f"{name}{i}", "steps": steps}))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    tokenizer = tiny.tokenizer()
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    chains = from_traces(tokenizer, files, 32, 5000, 10)
    assert [chain.name for chain in chains] == ["a a0", "b b0", "a a1"]
    assert [len(chain.calls) for chain in chains] == [2, 2, 2]
    second = tokenizer.decode(chains[0].calls[1].ids)
    assert "question a0" in second and "look" in second and "what was found" in second


@pytest.mark.fast
def test_figures_are_those_of_the_definitions() -> None:
    """Two calls, worked by hand: 9 and 5 tokens in 3 and 2 verify steps after the prefill's token."""
    one = Answer(("a", 0), list(range(9)), [(0.5, 1), (0.6, 5), (0.7, 8), (0.9, 9)])
    # steps with drafts of 3, 3 and 0 tokens, of which 3, 2 and 0 were accepted
    one.meta = {"spec_verify_ct": 3, "spec_num_correct_drafts": 5, "spec_cap_lens_histogram": [0, 1, 0, 0, 2],
                "spec_correct_drafts_histogram": [1, 0, 1, 1], "cached_tokens": 7}  # fmt: skip
    two = Answer(("a", 1), list(range(5)), [(0.3, 1), (0.5, 3), (0.7, 5)])
    # drafts of 1 and 2, of which 1 and 1
    two.meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 2, "spec_cap_lens_histogram": [0, 0, 1, 1],
                "spec_correct_drafts_histogram": [0, 2]}  # fmt: skip
    bad = Answer(("b", 0), error="URLError: refused")
    found = summed([one, two, bad], 2.0, {("a", 0): list(range(9)), ("a", 1): [0, 1, 2, 3, 9]})
    assert (found["calls"], found["failed"], found["first_failure"]) == (2, 1, "URLError: refused")
    assert found["tokens"] == 14 and found["tokens_per_s"] == 7.0
    assert found["ttft_ms"]["median"] == pytest.approx(400)
    assert found["itl_ms"]["median"] == pytest.approx((50 + 100) / 2)
    assert found["tokens_per_step"] == pytest.approx(12 / 5)
    assert found["steps_with_a_draft"] == 4
    assert (found["proposed"], found["accepted"]) == (9, 7)
    assert found["acceptance_rate"] == pytest.approx(7 / 9, abs=1e-4)
    # Truly two steps outlived their drafts in full (3 of 3, 1 of 1): 7 / (7 + 2) lies between.
    low, high = found["conditional_acceptance"]
    assert low == pytest.approx(7 / 11, abs=1e-4) and low <= 7 / 9 <= high
    assert found["equal_to_plain"] == "1/2"
    plain = summed([Answer(("a", 0), [1, 2], [(0.1, 1), (0.2, 2)])], 1.0, {})
    assert plain["tokens_per_step"] == 1.0 and plain["equal_to_plain"] == "0/0"
    assert summed([bad], 1.0, {})["failed"] == 1


@pytest.mark.fast
def test_a_server_that_is_not_there_costs_no_hang() -> None:
    chains = [Chain("a", [Call([1, 2], 4)] * 2)]
    answers, seconds = gpu_server.run_chains("http://127.0.0.1:9", chains, 2, 5, "t")
    assert len(answers) == 2 and all("Error" in a.error for a in answers) and seconds < 30


@pytest.mark.ci
def test_the_forward_half_in_small(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = program(
        "forward", "--shape", "tiny", "--device", "cpu", "--context", "40", "600", "--widths", "1", "2", "8",
        "--rounds", "3", "--tokens", "24", "--budget", "250", "--out", str(out),
    )  # fmt: skip
    assert code == 0, text
    results = json.loads(out.read_text())
    parts = {name: part["found"] for name, part in results["parts"].items()}
    assert results["complete"] and set(parts["v(n) after 600"]) == set(parts["ways"])
    for way in parts["ways"]:
        entry = parts["v(n) after 600"][way]
        assert entry["v"]["1"] == 1.0 and all(ms > 0 for ms in entry["ms"].values())
        assert entry["share_of_peak"] is None and 0 < entry["share_of_copy"] < 1
        for compared in parts["equality"][way].values():
            if isinstance(compared, dict):
                assert compared["furthest_apart"] < 1e-4 and compared["other_choices"] == 0
    assert parts["ways"]["one graph"]["row_invariant"] is True
    one = parts["equality"]["one graph"]
    assert all(entry["same_bits"] for name, entry in one.items() if name.startswith("steps"))
    engine = parts["engine"]
    assert engine["plain"]["steps"] == 24 and engine["right"]["steps"] <= 3
    assert engine["right"]["conditional_acceptance"] == 1.0
    assert engine["right for a while"]["steps"] < 24
    assert all(
        engine[way]["first_difference_from_plain"] is None for way in ("plain", "right", "right for a while", "trees")
    )
    assert "LocalEngine" in text and "of copy" in text
