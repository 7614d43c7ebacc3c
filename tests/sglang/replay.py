"""A teacher-forced replay of calls with the plugin's own parts, without a scheduler. Run in SGLang's
environment, so that both sides are compiled by the same numba:

    replay.py SCRIPT PROPOSER WIDEST CURVE      SCRIPT: the scripted model's; prints a JSON list of
                                                [verify steps, draft tokens sent, accepted] for each call
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from sglang_agentspec.drafter import Drafter, Step
from sglang_agentspec.requests import RequestSettings
from sglang_agentspec.settings import PluginSettings


def replay(calls: list[dict[str, Any]], drafter: Drafter) -> list[tuple[int, int, int]]:
    counts = []
    for call in calls:
        output = call["output"]
        running = drafter.begin(
            RequestSettings(trajectory=f"session:{call['trajectory']}"),
            np.array(call["prompt"], np.int32),
            max_output=len(output),
        )
        at = count = sent = accepted = 0
        emitted = output[:1]
        while True:
            at += len(emitted)
            if at >= len(output):
                break
            drafter.take(running, emitted)
            step = drafter.draft([running])
            emitted = verify(drafter, step, output[at:])
            count, sent, accepted = count + 1, sent + step.lengths[0] - 1, accepted + len(emitted) - 1
            drafter.learn([running])
        drafter.end(running, output)
        counts.append((count, sent, accepted))
    return counts


def verify(drafter: Drafter, step: Step, truth: list[int]) -> list[int]:
    """Walk the packed tree along the recorded tokens."""
    emitted, node = [truth[0]], 0
    if step.width == 1:
        return emitted
    tree = drafter.tree
    while len(emitted) < len(truth):
        child = int(tree.next_token[0, node])
        while child != -1 and tree.tokens[0, child] != emitted[-1]:
            child = int(tree.next_sibling[0, child])
        if child == -1:
            break
        node = child
        emitted.append(truth[len(emitted)])
    return emitted


def main(script: str, proposer: str, widest: str, curve: str, tokenizer_path: str) -> None:
    from transformers import AutoTokenizer

    with open(script) as file:
        calls = json.load(file)["calls"]
    settings = PluginSettings(proposer=proposer, cost_curve={int(n): v for n, v in json.loads(curve).items()})
    drafter = Drafter(
        settings,
        vocabulary=49152,
        curve=settings.curve("cpu"),
        widest=int(widest),
        max_rows=1,
        trees=True,
        tokenizer=AutoTokenizer.from_pretrained(tokenizer_path),
    )
    print("COUNTS" + json.dumps(replay(calls, drafter)))


if __name__ == "__main__":
    main(*sys.argv[1:])
