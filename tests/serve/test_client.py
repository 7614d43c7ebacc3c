"""SGLangEngine before `agentspec serve`: an OpenAI-compatible server that drafts, and says what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import agentspec
from agentspec.engines.sglang import SGLangEngine
from agentspec.errors import InvalidRequestError
from tests import tiny

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Say it again and again."}
OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


def test_messages_are_drafted_there_and_counted(serving: Callable[..., Any]) -> None:
    running = serving()
    plain = running.engine.chat([USER], draft=False, **OPTIONS).result()
    with SGLangEngine(running.url) as engine:
        assert engine.info.kind == "agentspec" and [n.subject for n in engine.notices] == ["token ids"]
        with agentspec.trajectory("served"):
            first, again = (engine.chat([USER], **OPTIONS).result() for _ in range(2))
        alone = engine.chat([USER], draft=False, **OPTIONS).result()
        assert first.text == again.text == alone.text == plain.text
        stats = again.stats
        assert stats.output_tokens == 40 == sum(n for _, n in stats.arrivals) and stats.reused_tokens > 0
        assert 0 < stats.accepted <= stats.proposed and stats.verify_steps < 30
        assert stats.tokens_per_step == 40 / stats.verify_steps and stats.conditional_acceptance is not None
        assert sum(stats.accepted_by_source.values()) == stats.accepted
        assert alone.stats.proposed == 0 and alone.stats.verify_steps == 40
        with pytest.raises(InvalidRequestError):
            engine.chat([USER], logprobs=True)


def test_completions_take_ids(serving: Callable[..., Any]) -> None:
    running = serving()
    request = agentspec.GenerationRequest(input_ids=[5, 70, 130, 9, 200, 11, 5, 70], top_k=5, **OPTIONS)
    wanted = running.engine.generate(request).result()
    with SGLangEngine(running.url, api="completions", tokenizer=tiny.tokenizer()) as engine:
        got = engine.generate(request).result()
    assert got.text == wanted.text and got.stats.output_tokens == 40 and got.finish_reason == "length"
