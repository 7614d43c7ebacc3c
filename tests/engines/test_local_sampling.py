"""LocalEngine samples from the target's distribution, drafts or not (transformers#32867, #47932)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentspec.engines.base import GenerationRequest
from agentspec.engines.local import LocalEngine
from agentspec.errors import InvalidRequestError
from tests import tiny
from tests.engines import proposers

Make = Callable[..., LocalEngine]
PROMPT = [5, 70, 130, 9, 200, 11]
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 12},
    "min-p": {"temperature": 1.0, "min_p": 0.08},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.6, "top_k": 40},
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(model: Any, context: list[int], options: dict[str, Any]) -> np.ndarray:
    """P(next) by transformers' processors over transformers' forward."""
    chain = LogitsProcessorList()
    if "repetition_penalty" in options:
        chain.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(float(options["temperature"])))
    if "top_k" in options:
        chain.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        chain.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(MinPLogitsWarper(options["min_p"]))
    ids = torch.tensor([context])
    with torch.inference_mode():
        scores = model(ids).logits[:, -1].float()
    return torch.softmax(chain(ids, scores)[0].double(), -1).numpy()


class Remembered:
    """The tiny model's logits by context, computed once each: twenty thousand draws in seconds. Trees and chains."""

    row_invariant, supports_drafts, supports_trees = True, True, True
    cache_kind, limits, description = "full", "", "remembered"

    class Cache:
        nbytes = 0

        def __init__(self) -> None:
            self.ids: list[int] = []
            self.start = 0

        @property
        def length(self) -> int:
            return len(self.ids)

        def crop(self, length: int) -> None:
            del self.ids[length:]

        def keep(self, rows: list[int]) -> None:
            self.ids[self.start :] = [self.ids[self.start + row] for row in rows]

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def new_cache(self, capacity: int = 0) -> Any:
        return self.Cache()

    def step(self, cache: Any, ids: Any, rows: int = 1, parents: Any = None) -> torch.Tensor:
        cache.start = cache.length
        held = tuple(cache.ids)
        paths: list[tuple[int, ...]] = []
        for i, token in enumerate(ids):
            parent = i - 1 if parents is None else parents[i]
            paths.append((*paths[parent], int(token)) if parent >= 0 else (*held, int(token)))
        cache.ids += [int(i) for i in ids]
        return torch.stack([self.logits(path) for path in paths[len(paths) - rows :]])

    def logits(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self.known:
            with torch.inference_mode():
                self.known[path] = self.model(torch.tensor([path])).logits[0, -1].float()
        return self.known[path]


def draws(engine: LocalEngine, count: int, options: dict[str, Any]) -> Counter[tuple[int, ...]]:
    """The first two ids of outputs of three, so that a draft may be two deep; without a seed, as a user draws them."""
    found: Counter[tuple[int, ...]] = Counter()
    request = GenerationRequest(input_ids=PROMPT, max_tokens=3, n=100, ignore_eos=True, **options)
    for _ in range(count // 100):
        for result in engine.generate(request).results():
            found[result.token_ids[:2]] += 1
    return found


def remembering(make: Make, model: Any, script: Any) -> LocalEngine:
    engine = make(proposer=proposers.ScriptedProposer(script))
    engine.forward = engine._decoder.forward = Remembered(model)  # type: ignore[assignment]
    return engine


def check_pairs(model: Any, found: Counter[tuple[int, ...]], options: dict[str, Any]) -> float:
    """Chi-square of the pairs (first, second id) against the reference; returns the p-value."""
    from scipy.stats import chi2

    total = sum(found.values())
    first = reference(model, PROMPT, options)
    statistic, freedom, rest_seen, rest_wanted = 0.0, 0, total, float(total)
    for a in np.argsort(-first)[:12]:
        if first[a] * total < 20:
            continue
        second = first[a] * reference(model, [*PROMPT, int(a)], options)
        for b in np.argsort(-second)[:12]:
            wanted = second[b] * total
            if wanted < 5:
                break
            seen = found[(int(a), int(b))]
            statistic += (seen - wanted) ** 2 / wanted
            freedom += 1
            rest_seen -= seen
            rest_wanted -= wanted
    if rest_wanted >= 5:
        statistic += (rest_seen - rest_wanted) ** 2 / rest_wanted
    else:
        freedom -= 1
    assert freedom >= 5, "too few cells to say anything"
    return float(chi2.sf(statistic, freedom))


def biased_draft(model: Any, options: dict[str, Any]) -> Any:
    """What a careless verifier would over- or under-sample: a draft of the second likeliest ids, then the likeliest."""
    first = np.argsort(-reference(model, PROMPT, options))
    second = {int(a): np.argsort(-reference(model, [*PROMPT, int(a)], options)) for a in first[:3]}
    tokens = [int(first[1]), int(second[int(first[1])][0]), int(first[0]), int(second[int(first[0])][1])]
    parents = [-1, 0, -1, 2]
    return lambda context, limits: (tokens, parents) if limits.tree and limits.max_depth > 1 else (tokens[:1], None)


def distribution_case(make: Make, name: str, count: int) -> None:
    options = CASES[name]
    model = tiny.model(seed=3)
    engine = remembering(make, model, biased_draft(model, options))
    found = draws(engine, count, options)
    assert check_pairs(model, found, options) > 1e-4
    assert sum(len(draft) for draft in engine.proposer.drafts) > count  # type: ignore[attr-defined]


@pytest.mark.fast
@pytest.mark.parametrize("name", list(CASES))
def test_same_distribution_as_without_drafts(tiny_engine: Make, name: str) -> None:
    """2,000 draws here; 20,000 in the suite `ci`."""
    distribution_case(tiny_engine, name, 2_000)


@pytest.mark.ci
@pytest.mark.parametrize("name", list(CASES))
def test_same_distribution_over_20000_draws(tiny_engine: Make, name: str) -> None:
    distribution_case(tiny_engine, name, 20_000)


@pytest.mark.fast
def test_the_check_sees_a_bias(tiny_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test fails for a sampler that prefers what was drafted."""
    from agentspec.engines import decoding

    options = CASES["temperature"]
    model = tiny.model(seed=3)
    script = biased_draft(model, options)
    favoured = script(None, type("L", (), {"tree": True, "max_depth": 2}))[0][0]
    honest = decoding.Sampler.choose

    def choose(self: Any, logits: torch.Tensor) -> int:
        token = honest(self, logits)
        if self.position == 0 and np.random.default_rng().random() < 0.15:
            return int(favoured)
        return token

    monkeypatch.setattr(decoding.Sampler, "choose", choose)
    engine = remembering(tiny_engine, model, script)
    assert check_pairs(model, draws(engine, 2_000, options), options) < 1e-4


@pytest.mark.fast
def test_the_same_seed_gives_the_same_text_and_no_seed_another(tiny_engine: Make) -> None:
    engine = tiny_engine()

    def text(**options: Any) -> str:
        return (
            engine.generate(GenerationRequest(input_ids=PROMPT, max_tokens=30, temperature=1.0, **options))
            .result()
            .text
        )

    assert text(seed=5) == text(seed=5)
    assert text(seed=5) != text(seed=6)
    assert text() != text()


@pytest.mark.fast
def test_the_seed_that_was_made_up_is_told(tiny_engine: Make) -> None:
    engine = tiny_engine()
    drawn = engine.generate(GenerationRequest(input_ids=PROMPT, max_tokens=30, temperature=1.0)).result()
    again = engine.generate(
        GenerationRequest(input_ids=PROMPT, max_tokens=30, temperature=1.0, seed=drawn.stats.seed)
    ).result()
    assert drawn.stats.seed is not None and again.token_ids == drawn.token_ids
    greedy = engine.generate(GenerationRequest(input_ids=PROMPT, max_tokens=3)).result()
    assert greedy.stats.seed is None


@pytest.mark.fast
def test_seeded_text_does_not_depend_on_v_or_the_proposer(tiny_engine: Make) -> None:
    from agentspec.drafting import CostCurve

    prompt = PROMPT * 8
    found = set()
    for options in (
        {"max_draft": 0},
        {"cost_curve": CostCurve.linear(0.001)},
        {"cost_curve": CostCurve({1: 1.0, 2: 2.0, 16: 2.5})},
        {"max_draft": 3},
    ):
        engine = tiny_engine(**options)
        request = GenerationRequest(input_ids=prompt, max_tokens=60, temperature=0.4, seed=8)
        found.add(engine.generate(request).result().token_ids)
    assert len(found) == 1


@pytest.mark.fast
def test_logprobs_equal_the_models(tiny_engine: Make) -> None:
    model = tiny.model()
    engine = tiny_engine()
    result = engine.generate(
        GenerationRequest(
            input_ids=PROMPT, max_tokens=12, temperature=1.0, seed=1, top_logprobs=3, repetition_penalty=1.5
        )
    ).result()
    assert len(result.logprobs) == len(result.token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + list(result.token_ids)])).logits[0].double()
    for place, entry in enumerate(result.logprobs):
        wanted = torch.log_softmax(logits[len(PROMPT) - 1 + place], -1)
        assert entry.token_id == result.token_ids[place]
        assert entry.logprob == pytest.approx(float(wanted[entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == torch.topk(wanted, 3).indices.tolist()


@pytest.mark.fast
def test_requests_are_checked_against_the_model(tiny_engine: Make) -> None:
    engine = tiny_engine()
    for options in (
        {"logit_bias": {10_000: 1.0}},
        {"stop_token_ids": [10_000]},
        {"bad_words": [[3, 10_000]]},
        {"top_logprobs": 10_000},
        {"input_ids": [10_000]},
        {"input_ids": []},
        {"input_ids": [[1, 2]]},
        {"input_ids": [1.5]},
    ):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            engine.generate(GenerationRequest(**{"input_ids": PROMPT, **options}))
