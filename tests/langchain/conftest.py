"""What the chat model's tests share: models on tiny engines, and asyncio for langchain-tests' coroutines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(name: str, obj: Any) -> None:
    # langchain-tests expects asyncio_mode=auto; here the mode is strict for everything else's sake.
    if name.startswith("test_") and inspect.iscoroutinefunction(obj):
        pytest.mark.asyncio(obj)


@pytest.fixture
def chat(tiny_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ChatAgentSpec on a tiny engine: chat(max_tokens=8, ...); `engine=` to share one."""
    from langchain_agentspec import ChatAgentSpec

    def make(engine: Any = None, **options: Any) -> Any:
        options.setdefault("max_tokens", 12)
        return ChatAgentSpec(engine=engine or tiny_engine(), **options)

    return make
