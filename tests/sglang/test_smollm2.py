"""SmolLM2 on the real SGLang: a document agent's chain says what it says on a server without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.chat import ChatTemplate
from agentspec.engines import models
from tests.engines.test_local_smollm2 import needs_the_wheel
from tests.sglang.server import Server, steps

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1200), pytest.mark.usefixtures("sglang_ready")]

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 48


@pytest.fixture(scope="module")
def loaded() -> models.LoadedModel:
    needs_the_wheel()
    return models.load("smollm2", device="cpu", dtype=torch.float32)


def chain(server: Server, template: ChatTemplate) -> list[Any]:
    """Four calls that quote one text after the other; each prompt holds what was said before, id for id."""
    paragraphs = [p for p in (ROOT / "README.md").read_text().split("\n\n") if len(p.split()) > 30 and p[0].isalpha()]
    history: list[int] = []
    answers = []
    for paragraph in [*paragraphs[:3], paragraphs[0]]:
        asked = [{"role": "user", "content": f"Repeat this text exactly:\n\n{paragraph[:600]}"}]
        history = history + list(template.render(asked).input_ids)
        answer = server.generate(
            history, TOKENS, session_id="documents", return_logprob=True, top_logprobs_num=2, ignore_eos=False
        )
        answers.append(answer)
        history = history + answer["output_ids"]
    return answers


def test_a_chain_says_what_it_says_alone(loaded: models.LoadedModel) -> None:
    template = ChatTemplate(loaded.tokenizer)
    options: dict[str, Any] = {"context_length": 4096, "max_total_tokens": 8192}
    with Server(loaded.path, None, plugin=False, **options) as server:
        plain = chain(server, template)
    with Server(loaded.path, settings={"cost_curve": {"1": 1.0, "32": 1.2}}, **options) as server:
        drafted = chain(server, template)
    tokens = count = 0
    for ours, theirs in zip(drafted, plain, strict=True):
        for place, (a, b) in enumerate(zip(ours["output_ids"], theirs["output_ids"], strict=False)):
            if a != b:  # kernels of another width round otherwise: only where the model itself hardly decides
                (first, *_), (second, *_) = theirs["meta_info"]["output_top_logprobs"][place]
                assert first - second < 1e-3
                return
        assert len(ours["output_ids"]) == len(theirs["output_ids"])
        tokens, count = tokens + len(ours["output_ids"]), count + steps(ours)[0]
    assert count < 0.5 * tokens, f"{count} steps for {tokens} tokens that are mostly copied"
