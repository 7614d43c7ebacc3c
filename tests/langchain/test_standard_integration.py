"""langchain-tests' integration class on LocalEngine with SmolLM2: real calls, streams, tools, schemas.

What SmolLM2 (135 M parameters) can't do by itself is marked with its reason; the capabilities are all
declared.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_agentspec import ChatAgentSpec, close_engines
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@functools.cache
def _other_model() -> str:
    """A second model to name in a call: a tiny one, saved where its name is a path."""
    from tests import tiny

    folder = tempfile.mkdtemp(prefix="agentspec-tiny-")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _engines() -> Iterator[None]:
    yield
    close_engines()


class TestChatAgentSpecIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatAgentSpec]:
        return ChatAgentSpec

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Left alone, SmolLM2 never stops calling tools.
        return {"model": "smollm2", "max_tokens": 64, "parallel_tool_calls": False}

    @pytest.fixture
    def model(self, request: Any) -> ChatAgentSpec:
        """As the base class makes it; where a joke is to be told with a penalty, since SmolLM2's go on for ever.
        (With it elsewhere, the numbers of a question are no longer repeated in the tool call.)
        """
        told = request.node.name.startswith(("test_json_mode", "test_structured_output"))
        return ChatAgentSpec(
            **{
                **self.standard_chat_model_params,
                **self.chat_model_params,
                **(getattr(request, "param", None) or {}),
                **({"repetition_penalty": 1.1} if told else {}),
            }
        )

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return _other_model()

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """A second call of a conversation: the first one's prompt and answer are read from the KV cache."""
        model = ChatAgentSpec(**self.chat_model_params, temperature=0)
        first = model.invoke([HumanMessage("Hello")], max_tokens=4)
        history = [HumanMessage("Hello"), first, HumanMessage("And now?")]
        if not stream:
            return model.invoke(history, max_tokens=4)
        chunks = list(model.stream(history, max_tokens=4))
        return functools.reduce(lambda a, b: a + b, chunks)  # type: ignore[return-value]

    @pytest.mark.xfail(reason="unasked, SmolLM2 answers in prose; it calls a tool only where tool_choice demands it")
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)
