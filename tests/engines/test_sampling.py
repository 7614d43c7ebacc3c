"""Sampler: transformers' own sets, one number per (seed, choice, position), each position's own prefix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentspec.engines.request import GenerationRequest
from agentspec.engines.sampling import Sampler, logprob, truncate

pytestmark = pytest.mark.fast

VOCABULARY = 300


def sampler(context: Any = (1, 2, 3), ending: Any = (), seed: int = 0, index: int = 0, **options: Any) -> Sampler:
    words = options.pop("bad_ids", ())
    noise = options.pop("noise", 0.0)
    constraint = options.pop("constraint", None)
    request = GenerationRequest(input_ids=list(context), **options)
    return Sampler(request, np.asarray(context, np.int32), ending, seed, index, words, constraint, noise)


def logits(seed: int, scale: float = 3.0, size: int = VOCABULARY) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, size).astype(np.float32))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(0.01, 10),
    size=st.sampled_from([2, 17, 300, 3000]),
    top_k=st.sampled_from([0, 1, 5, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.01, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    banned=st.integers(0, 5),
)
def test_truncation_leaves_what_transformers_leaves(
    seed: int, scale: float, size: int, top_k: int, top_p: float, min_p: float, banned: int
) -> None:
    row = logits(seed, scale, size)
    row[: min(banned, size - 1)] = -math.inf
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    # in float64, so that masses near the border fall on the same side
    wanted = warpers(torch.zeros(1, 1, dtype=torch.long), row.double()[None])[0]
    kept, weights, _ = truncate(row.numpy().astype(np.float64), top_k, top_p, min_p)
    expected = torch.softmax(wanted, -1).numpy()
    found = np.zeros(size)
    found[kept] = weights / weights.sum()
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_one_number_for_a_seed_a_choice_and_a_position() -> None:
    row = logits(1, 1.0)

    def drawn(seed: int, index: int, before: int) -> int:
        chooser = sampler(seed=seed, index=index, temperature=1.0)
        for token in range(before):
            chooser.advance(token)
        return chooser.choose(row.numpy())

    assert [drawn(3, 0, p) for p in range(30)] == [drawn(3, 0, p) for p in range(30)]
    assert [drawn(3, 0, p) for p in range(30)] != [drawn(4, 0, p) for p in range(30)]
    assert [drawn(3, 0, p) for p in range(30)] != [drawn(3, 1, p) for p in range(30)]
    assert len({drawn(3, 0, p) for p in range(30)}) > 10
    # asking twice gives the same
    chooser = sampler(seed=9, temperature=1.0)
    assert chooser.choose(row.numpy()) == chooser.choose(row.numpy())


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    from scipy.stats import chisquare

    row = logits(2, 1.5, 40)
    options = {"temperature": 1.0, **options}
    kept, weights, _ = truncate(
        row.numpy().astype(np.float64) / options["temperature"],
        options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0),
    )  # fmt: skip
    counts = np.zeros(40)
    for seed in range(20_000):
        counts[sampler(seed=seed, **options).choose(row.numpy())] += 1
    assert counts.sum() == counts[kept].sum(), "an id was drawn that the truncation forbids"
    assert chisquare(counts[kept], weights / weights.sum() * counts.sum()).pvalue > 1e-4


def test_zero_probability_is_never_drawn() -> None:
    row = torch.full((8,), -math.inf)
    row[3] = 0.0
    assert {sampler(seed=s, temperature=5.0).choose(row.numpy()) for s in range(50)} == {3}


def test_repetition_penalty_and_bad_words_are_transformers() -> None:
    row = logits(4)
    ids = [5, 9, 9, 17]
    for options, processor in (
        ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        ({"bad_ids": [[8], [9, 17, 200], [17, int(row.argmax())]]},
         NoBadWordsLogitsProcessor([[8], [9, 17, 200], [17, int(row.argmax())]])),
    ):  # fmt: skip
        chooser = sampler(ids, **options)  # type: ignore[arg-type]
        wanted = processor(torch.tensor([ids]), row[None].clone())[0]
        assert torch.equal(torch.from_numpy(chooser._processed(row.numpy())), wanted)
        assert chooser.choose(row.numpy()) == int(wanted.argmax())
        assert torch.equal(row, logits(4)), "the model's logits were changed"


def test_presence_and_frequency_count_the_output_only() -> None:
    row = logits(5)
    chooser = sampler([7, 7, 7], presence_penalty=0.5, frequency_penalty=0.25)
    for token in (4, 4, 6):
        chooser.advance(token)
    wanted = row.clone()
    wanted[4] -= 0.5 + 2 * 0.25
    wanted[6] -= 0.5 + 0.25
    assert torch.allclose(torch.from_numpy(chooser._processed(row.numpy())), wanted)


def test_bias_min_tokens_and_constraint() -> None:
    class Even:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def mask(self, scores: np.ndarray) -> None:
            scores[1::2] = -np.inf

        def advance(self, token: int) -> None:
            self.seen.append(token)

    row = torch.zeros(10)
    assert sampler(logit_bias={6: 1.0}).choose(row.numpy()) == 6
    assert sampler(logit_bias={6: 1.0, 3: -math.inf}).choose(row.numpy()) == 6
    late = sampler(ending=(6,), min_tokens=2, logit_bias={6: 9.0, 2: 1.0})
    assert late.choose(row.numpy()) == 2
    late.advance(2)
    assert late.choose(row.numpy()) == 2
    late.advance(2)
    assert late.choose(row.numpy()) == 6
    even = Even()
    bound = sampler(constraint=even, logit_bias={5: 9.0, 4: 1.0})
    assert bound.choose(row.numpy()) == 4
    bound.advance(4)
    assert even.seen == [4]


def test_context_grows_with_the_output() -> None:
    chooser = sampler([1, 2], repetition_penalty=2.0)
    for token in range(200):
        chooser.advance(token)
    assert chooser.context.tolist() == [1, 2, *range(200)]
    assert chooser.position == 200


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.4}])
def test_what_is_no_close_call_does_not_turn(options: dict[str, Any]) -> None:
    """Logits moved by up to `noise` choose the same wherever close_call says no; and it is said rarely."""
    noise = 2e-3
    rng = np.random.default_rng(0)
    said = 0
    for seed in range(400):
        temperature = 0.0 if seed % 2 and not {"top_p", "top_k", "min_p"} & set(options) else 0.8
        chooser = sampler(seed=seed, noise=noise, temperature=temperature, **options)
        row = logits(seed, 2.0)
        token = chooser.choose(row.numpy())
        if chooser.close_call:
            said += 1
            continue
        for _ in range(3):
            moved = row + torch.from_numpy(rng.uniform(-noise, noise, VOCABULARY).astype(np.float32))
            assert chooser.choose(moved.numpy()) == token
    assert said < (200 if options.get("top_p") else 100)


def test_close_call_at_a_tie() -> None:
    row = torch.zeros(5)
    row[1], row[3] = 2.0, 2.00001
    chooser = sampler(noise=1e-3)
    assert chooser.choose(row.numpy()) == 3
    assert chooser.close_call
    row[1] = 1.9
    chooser.choose(row.numpy())
    assert not chooser.close_call


def test_logprobs_are_the_models_own() -> None:
    row = logits(6)
    wanted = torch.log_softmax(row.double(), -1)
    found = logprob(row.numpy(), 17, 4)
    assert found.token_id == 17
    assert found.logprob == pytest.approx(float(wanted[17]), abs=1e-9)
    best = torch.topk(wanted, 4)
    assert [i for i, _ in found.top] == best.indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert logprob(row.numpy(), 17, 0).top == ()
    assert len(logprob(row.numpy(), 17, VOCABULARY).top) == VOCABULARY
