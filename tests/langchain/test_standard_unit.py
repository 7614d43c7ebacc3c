"""langchain-tests' unit class: what every LangChain chat model has to do without a call."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_agentspec import ChatAgentSpec
from langchain_tests.unit_tests import ChatModelUnitTests

pytestmark = pytest.mark.fast


class TestChatAgentSpecUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatAgentSpec]:
        return ChatAgentSpec

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {
            "AGENTSPEC_MODEL": "some-model",
            "AGENTSPEC_API_KEY": "key-1",
            "AGENTSPEC_BASE_URL": "http://127.0.0.1:30000",
        }
        expected = {"model": "some-model", "api_key": "key-1", "base_url": "http://127.0.0.1:30000"}
        return env, {}, expected

    @pytest.mark.xfail(
        reason="langchain-core loads only the classes of its own list with allowed_objects='all'; "
        "test_chat_model.py loads with allowed_objects=[ChatAgentSpec]",
        raises=ValueError,
        strict=True,
    )
    def test_serdes(self, model: Any, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)
