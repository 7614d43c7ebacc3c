"""Which requests get no drafts; the reasons are checked against the real server in test_server.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_agentspec.lossless import REASONS, needs_plain_batch, reason_not_to_draft

pytestmark = pytest.mark.fast

ALL = 1 << 30  # SGLang's top_k for the whole vocabulary


def request(**changes: Any) -> SimpleNamespace:
    params = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "min_p": 0.0,
        "top_k": 1,
        "top_p": 1.0,
        "sampling_seed": None,
    }
    whole: dict[str, Any] = {
        "custom_logit_processor": None,
        "return_sampling_mask": False,
        "return_hidden_states": False,
        "return_logprob": False,
        "input_embeds": None,
    }
    for name, value in changes.items():
        (params if name in params else whole)[name] = value
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **whole)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"presence_penalty": -0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"min_new_tokens": 1}, "min_new_tokens"),
        ({"top_k": ALL}, None),
        ({"top_k": 20}, None),
        ({"top_k": ALL, "top_p": 0.9}, None),
        ({"top_k": 20, "top_p": 0.9}, "top_k_and_top_p"),
        ({"top_k": ALL, "min_p": 0.1}, "min_p"),
        ({"top_k": 1, "min_p": 0.1}, None),  # greedy: min-p keeps the most likely token
        ({"top_k": ALL, "sampling_seed": 3}, "seeded_sampling"),
        ({"sampling_seed": 3}, None),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"return_sampling_mask": True}, "sampling_mask"),
        ({"return_hidden_states": True}, "hidden_states"),
        ({"input_embeds": [[0.0]]}, "no_token_ids"),
    ],
)
def test_reasons_on_a_device_whose_verifier_samples(changes: dict[str, Any], reason: str | None) -> None:
    assert reason_not_to_draft(request(**changes), greedy_verifier=False) == reason
    assert reason is None or reason in REASONS


def test_a_greedy_verifier_gets_no_sampled_request() -> None:
    assert reason_not_to_draft(request(top_k=ALL), greedy_verifier=True) == "sampling_on_this_device"
    assert reason_not_to_draft(request(), greedy_verifier=True) is None


def test_what_only_a_plain_step_can_give() -> None:
    assert not needs_plain_batch(request(return_logprob=True))
    assert not needs_plain_batch(request(custom_logit_processor="x"))
    assert needs_plain_batch(request(custom_logit_processor="x", return_logprob=True))
    assert needs_plain_batch(request(return_hidden_states=True))
    assert needs_plain_batch(request(return_sampling_mask=True))
