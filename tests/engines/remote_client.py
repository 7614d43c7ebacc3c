"""SGLangEngine on a server that misbehaves: the fixture and what its tests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentspec.engines.base import GenerationRequest
from agentspec.engines.sglang import SGLangEngine
from tests import tiny
from tests.engines.misbehaving import IDS, Answer, Behaviour, Misbehaving

PROMPT = [5, 70, 130, 9]


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    """client(*behaviours, **options) -> (engine, server)."""
    open_: list[Any] = []

    def make(*behaviours: Behaviour, info: dict[str, Any] | None = None, **options: Any) -> Any:
        server = Misbehaving(*behaviours, info=info)
        server.__enter__()
        open_.append(server)
        engine = SGLangEngine(server.url, tokenizer=tiny.tokenizer(), **options)
        open_.append(engine)
        return engine, server

    yield make
    for thing in reversed(open_):
        thing.__exit__(None, None, None)


def request(**options: Any) -> GenerationRequest:
    return GenerationRequest(**{"input_ids": PROMPT, "max_tokens": len(IDS), "ignore_eos": True, **options})


def works(engine: SGLangEngine) -> None:
    got = engine.generate(request()).result()
    assert list(got.token_ids) == IDS and got.finish_reason == "length"
    assert got.stats.output_tokens == sum(n for _, n in got.stats.arrivals) == len(IDS)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def begins(then: Behaviour) -> Behaviour:
    """Two tokens, then that."""

    def behaviour(answer: Answer) -> None:
        answer.begin()
        answer.tokens(IDS[:1], IDS[:1])
        answer.tokens(IDS[:2], IDS[:2])
        time.sleep(0.05)
        then(answer)

    return behaviour
