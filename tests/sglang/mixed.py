"""Thirty mixed greedy requests: the suite compares what a server with and one without speculation answer to
them."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.sglang.server import body

VOCABULARY = 49152
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids with repetition in them, as agents' prompts have."""
    source = random.Random(seed)
    piece = [source.randrange(20, VOCABULARY) for _ in range(max(4, length // 4))]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += [*piece[: source.randrange(2, len(piece) + 1)], source.randrange(20, VOCABULARY)]
    return tokens[:length]


def mixed_requests() -> list[dict[str, Any]]:
    """name -> request, 30 of them: lengths from 1 to 1,500 tokens (over the chunk size of the servers),
    penalties, stops, grammars, log-probabilities, bias."""
    requests = [
        body(prompt(1, 40), 48),
        body(prompt(2, 200), 48),
        body(prompt(3, 1500), 40),
        body(prompt(4, 1), 24),
        body(prompt(5, 2), 24),
        body(prompt(6, 64), 1),
        body(prompt(7, 64), 2),
        body(prompt(8, 64), 3),
        body(prompt(9, 700), 64),
        body(prompt(10, 300) * 2, 48),
        body(prompt(11, 100), 48, frequency_penalty=0.7),
        body(prompt(12, 100), 48, presence_penalty=0.5),
        body(prompt(13, 100), 48, repetition_penalty=1.3),
        body(prompt(14, 100), 48, frequency_penalty=0.4, repetition_penalty=1.1),
        body(prompt(15, 100), 32, min_new_tokens=8, ignore_eos=False),
        body(prompt(16, 100), 48, ignore_eos=False),
        body(prompt(17, 100), 48, return_logprob=True, top_logprobs_num=3),
        body(prompt(18, 100), 40, return_logprob=True, frequency_penalty=0.5),
        body(prompt(19, 100), 40, return_logprob=True, token_ids_logprob=[5, 6, 7]),
        body(prompt(20, 60), 40, json_schema=SCHEMA, ignore_eos=False),
        body(prompt(21, 60), 24, regex="(ab|cd){3,6}", ignore_eos=False),
        body(prompt(22, 100), 40, logit_bias={"100": 5.0, "200": -5.0}),
        body(prompt(23, 100), 48, stop=["e"]),
        body(prompt(24, 100), 48, stop_token_ids=list(range(0, VOCABULARY, 40)), ignore_eos=False),
        body(prompt(25, 100), 48, session_id="one"),
        body(prompt(26, 100), 48, session_id="one", cache_salt="tenant"),
        body(prompt(27, 100), 48, custom_params={"agentspec_draft": False}),
        body(
            prompt(28, 100),
            48,
            custom_params={"agentspec_trajectory": "two", "agentspec_seed_ids": prompt(28, 100)},
        ),
        body(prompt(9, 700), 64),
        body(prompt(2, 200) + prompt(3, 50), 48),
    ]
    assert len(requests) == 30
    return requests


def outcome(answer: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal between servers."""
    meta = answer["meta_info"]
    kept = {
        "ids": answer["output_ids"],
        "text": answer["text"],
        "finish": meta["finish_reason"],
        "tokens": meta["completion_tokens"],
    }
    if meta.get("output_token_logprobs"):
        kept["logprob ids"] = [entry[1] for entry in meta["output_token_logprobs"]]
    return kept
