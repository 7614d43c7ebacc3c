"""Recorded agent trajectories through the real scheduler: a model whose logits are scripted emits them.

The plugin's verify steps have to be those of a teacher-forced replay of the same calls with the same
library: the scheduler may add nothing and lose nothing. Beside it, in the same run, SGLang's NGRAM as
shipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_agentspec.drafter import Drafter
from sglang_agentspec.requests import RequestSettings
from sglang_agentspec.settings import PluginSettings

from tests.sglang.server import Server, body, models_path, steps
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
    path.write_text(
        json.dumps({"end": 0, "calls": [{"prompt": c.prompt, "output": c.output} for c in calls]})
    )
    return path


def request(call: Call) -> dict[str, Any]:
    return body(call.prompt, len(call.output), session_id=call.trajectory)


def replay(calls: list[Call]) -> list[tuple[int, int, int]]:
    """(steps, sent, accepted) of each call, teacher-forced: the plugin's own parts without a scheduler."""
    settings = PluginSettings(cost_curve={int(n): v for n, v in CURVE.items()})
    drafter = Drafter(
        settings, vocabulary=49152, curve=settings.curve("cpu"), widest=WIDEST, max_rows=1, trees=True
    )
    counts = []
    for call in calls:
        open_call = drafter.begin(
            RequestSettings(trajectory=f"session:{call.trajectory}"),
            np.array(call.prompt, np.int32),
            max_output=len(call.output),
        )
        at = count = sent = accepted = 0
        emitted = call.output[:1]
        while True:
            at += len(emitted)
            if at >= len(call.output):
                break
            drafter.take(open_call, emitted)
            step = drafter.draft([open_call])
            emitted = _verify(drafter, step, call.output[at:])
            count, sent, accepted = count + 1, sent + step.lengths[0] - 1, accepted + len(emitted) - 1
            drafter.learn([open_call])
        drafter.end(open_call, call.output)
        counts.append((count, sent, accepted))
    return counts


def _verify(drafter: Drafter, step: Any, truth: list[int]) -> list[int]:
    """Walk the packed tree along the recorded tokens."""
    emitted = [truth[0]]
    if step.width == 1:
        return emitted
    tree, node = drafter.tree, 0
    while True:
        child = int(tree.next_token[0, node])
        while child != -1 and tree.tokens[0, child] != truth[len(emitted) - 1]:
            child = int(tree.next_sibling[0, child])
        if child == -1:
            return emitted
        node = child
        emitted.append(truth[len(emitted)] if len(emitted) < len(truth) else 0)


@pytest.fixture(scope="module", params=["sync", "overlap"])
def answers(
    request: pytest.FixtureRequest, calls: list[Call], script: Path
) -> Iterator[list[dict[str, Any]]]:
    with Server(
        "scripted",
        overlap=request.param == "overlap",
        settings={"cost_curve": CURVE},
        variables={"AGENTSPEC_RIG_SCRIPT": str(script)},
        **OPTIONS,
    ) as server:
        yield [server.post("/generate", make(call)) for call in calls]


make = request


def test_the_scheduler_emits_what_was_recorded(answers: list[dict[str, Any]], calls: list[Call]) -> None:
    assert [a["output_ids"] for a in answers] == [c.output for c in calls]


def test_verify_steps_equal_replay(answers: list[dict[str, Any]], calls: list[Call]) -> None:
    assert [steps(a) for a in answers] == replay(calls)


def test_beside_ngram_as_shipped(
    answers: list[dict[str, Any]], calls: list[Call], script: Path, record_property: Any
) -> None:
    """Prints tokens per step of both, all steps counted, the prefill's token not."""
    with Server(
        "scripted",
        "NGRAM",
        plugin=False,
        variables={"AGENTSPEC_RIG_SCRIPT": str(script)},
        speculative_ngram_capacity=1_000_000,
        **OPTIONS,
    ) as server:
        theirs = [server.post("/generate", make(call)) for call in calls]
    assert [a["output_ids"] for a in theirs] == [c.output for c in calls]
    tokens = sum(len(c.output) - 1 for c in calls)
    ours = sum(steps(a)[0] for a in answers)
    ngram = sum(a["meta_info"]["spec_verify_ct"] for a in theirs)
    sent = sum(steps(a)[1] for a in answers)
    print(
        f"\n{tokens} tokens: AGENTSPEC {tokens / ours:.3f} tokens a step, {sent / ours:.1f} drafted; "
        f"NGRAM as shipped {tokens / ngram:.3f}, {WIDEST - 1} drafted"
    )
    record_property("agentspec_tokens_per_step", tokens / ours)
    record_property("ngram_tokens_per_step", tokens / ngram)
    assert ours < tokens
