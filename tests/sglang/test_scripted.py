"""Recorded agent trajectories through the real scheduler: a model whose logits are scripted emits them.

The plugin's verify steps have to be those of a teacher-forced replay of the same calls with the same
library: the scheduler may add nothing and lose nothing. Beside it, in the same run, SGLang's NGRAM as
shipped.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import HERE, Server, body, environment, models_path, steps
from tests.sglang.setup_venv import python_path
from tests.sglang.traces import FAMILIES, Call, load_calls, traces_path

pytestmark = [
    pytest.mark.ci,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("sglang_ready"),
    pytest.mark.skipif(traces_path() is None, reason="../shared/traces is not here"),
]

WIDEST = 16
OPTIONS: dict[str, Any] = {
    "disable_radix_cache": True,  # the scripted model has to see whole prompts
    "load_format": "dummy",
    "chunked_prefill_size": 2048,
    "context_length": 16384,
    "speculative_num_draft_tokens": WIDEST,
}
# A GPU's curve, so that drafts are sent as they would be there.
CURVE = {"1": 1.0, "32": 1.155}


@pytest.fixture(scope="module")
def calls(sglang_ready: None) -> list[Call]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(models_path() / "scripted"))
    return [call for family in FAMILIES for call in load_calls(tokenizer, family, 2)]


@pytest.fixture(scope="module")
def script(calls: list[Call], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.json"
    made = [{"prompt": c.prompt, "output": c.output, "trajectory": c.trajectory} for c in calls]
    path.write_text(json.dumps({"end": 0, "calls": made}))
    return path


def request(call: Call) -> dict[str, Any]:
    return body(call.prompt, len(call.output), session_id=call.trajectory)


def replay(script: Path, proposer: str, folder: Path) -> list[tuple[int, int, int]]:
    """(steps, sent, accepted) of each call, teacher-forced: the plugin's own parts without a scheduler."""
    arguments = [str(script), proposer, str(WIDEST), json.dumps(CURVE), str(models_path() / "scripted")]
    done = subprocess.run(
        [str(python_path()), str(HERE / "replay.py"), *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
    )
    line = next((s for s in done.stdout.splitlines() if s.startswith("COUNTS")), None)
    assert line is not None, done.stderr[-3000:]
    return [tuple(counts) for counts in json.loads(line[len("COUNTS") :])]


Answers = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["match", "mixture"])
def proposer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["sync", "overlap"])
def answers(request: pytest.FixtureRequest, proposer: str, calls: list[Call], script: Path) -> Answers:
    with Server(
        "scripted",
        overlap=request.param == "overlap",
        settings={"cost_curve": CURVE, "proposer": proposer},
        variables={"AGENTSPEC_RIG_SCRIPT": str(script)},
        **OPTIONS,
    ) as server:
        return [server.post("/generate", make(call)) for call in calls]


@pytest.fixture(scope="module")
def ngram(calls: list[Call], script: Path) -> Answers:
    """SGLang's NGRAM as shipped, but for a capacity that leaves the machine some memory."""
    with Server(
        "scripted",
        "NGRAM",
        plugin=False,
        variables={"AGENTSPEC_RIG_SCRIPT": str(script)},
        speculative_ngram_capacity=1_000_000,
        **OPTIONS,
    ) as server:
        return [server.post("/generate", make(call)) for call in calls]


make = request


def test_the_scheduler_emits_what_was_recorded(answers: Answers, calls: list[Call]) -> None:
    assert [a["output_ids"] for a in answers] == [c.output for c in calls]


def test_verify_steps_equal_replay(answers: Answers, script: Path, proposer: str, tmp_path: Path) -> None:
    assert [steps(a) for a in answers] == replay(script, proposer, tmp_path)


def test_beside_ngram_as_shipped(answers: Answers, calls: list[Call], ngram: Answers, proposer: str) -> None:
    """Prints tokens per step of both, all steps counted, the prefill's token not. NGRAM keeps one trie for
    all requests, so it drafts from other trajectories too; AGENTSPEC shares nothing unasked."""
    assert [a["output_ids"] for a in ngram] == [c.output for c in calls]
    tokens = sum(len(c.output) - 1 for c in calls)
    ours, sent, _ = (sum(column) for column in zip(*(steps(a) for a in answers), strict=True))
    theirs = sum(a["meta_info"]["spec_verify_ct"] for a in ngram)
    print(
        f"\n{tokens} tokens: AGENTSPEC {proposer} {tokens / ours:.3f} tokens a step, "
        f"{sent / ours:.1f} drafted; NGRAM as shipped {tokens / theirs:.3f}, {WIDEST - 1} drafted"
    )
    assert ours < tokens / 1.5
