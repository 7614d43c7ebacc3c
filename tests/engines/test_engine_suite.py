"""The common engine suite on LocalEngine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentspec.drafting import CostCurve
from agentspec.engines.local import LocalEngine
from tests import tiny
from tests.engines.engine_suite import EngineSuite

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tiny.model("llama", max_position_embeddings=4096)
    with LocalEngine(
        model, tokenizer=tiny.tokenizer(), cost_curve=CostCurve.linear(0.01), tool_format="hermes"
    ) as made:
        yield made
    torch.set_num_threads(before)


class TestLocalEngine(EngineSuite):
    @pytest.fixture
    def engine(self, local: LocalEngine) -> Any:
        return local
