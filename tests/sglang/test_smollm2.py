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


def chain(server: Server, template: ChatTemplate, said: list[Any] | None = None) -> list[Any]:
    """Four calls that quote one text after the other; each prompt holds what was said before, id for id.

    said: another server's answers, to be held instead of this one's: then both are asked the same in every call
    """
    paragraphs = [p for p in (ROOT / "README.md").read_text().split("\n\n") if len(p.split()) > 30 and p[0].isalpha()]
    history: list[int] = []
    answers = []
    for place, paragraph in enumerate([*paragraphs[:3], paragraphs[0]]):
        asked = [{"role": "user", "content": f"Repeat this text exactly:\n\n{paragraph[:600]}"}]
        history = history + list(template.render(asked).input_ids)
        answer = server.generate(
            history, TOKENS, session_id="documents", return_logprob=True, top_logprobs_num=2, ignore_eos=False
        )
        answers.append(answer)
        history = history + (answer if said is None else said[place])["output_ids"]
    return answers


def parted(ours: Any, theirs: Any) -> bool:
    """Whether an answer goes another way than plain decoding's: only ever where the model itself hardly decides, and
    then by the other id of the two (kernels of another width round otherwise). Up to there they are the same, and one
    that doesn't part is the same to its end."""
    a, b = ours["output_ids"], theirs["output_ids"]
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if place is None:
        assert a == b and ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]
        return False
    (first, best, *_), (second, other, *_) = theirs["meta_info"]["output_top_logprobs"][place]
    assert first - second < 1e-3 and (b[place], a[place]) == (best, other)
    return True


def test_a_chain_says_what_it_says_alone(loaded: models.LoadedModel) -> None:
    template = ChatTemplate(loaded.tokenizer)
    options: dict[str, Any] = {"context_length": 4096, "max_total_tokens": 8192}
    with Server(loaded.path, None, plugin=False, **options) as server:
        plain = chain(server, template)
    with Server(loaded.path, settings={"cost_curve": {"1": 1.0, "32": 1.2}}, **options) as server:
        drafted = chain(server, template, said=plain)
    assert sum(parted(ours, theirs) for ours, theirs in zip(drafted, plain, strict=True)) <= 1
    # However a call parted, what it says is mostly copied, and each step is one that the server counted.
    assert [steps(answer)[0] for answer in plain] == [0] * len(plain)
    tokens, count = sum(len(answer["output_ids"]) for answer in drafted), sum(steps(answer)[0] for answer in drafted)
    assert 0 < count < 0.5 * tokens, f"{count} steps for {tokens} tokens that are mostly copied"
    for answer in drafted:
        made, (count, sent, accepted) = len(answer["output_ids"]), steps(answer)
        assert 0 <= accepted <= sent and made <= 1 + count + accepted, (made, count, sent, accepted)
