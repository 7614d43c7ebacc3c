"""SGLangEngine on the real SGLang 0.5.23 without the plugin, started with incremental streaming and llguidance: it works,
and what is lost is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from agentspec.doctor import examine
from agentspec.engines.local import LocalEngine
from agentspec.engines.sglang import SGLangEngine
from agentspec.loop import Trajectory
from tests.engines.engine_suite import EngineSuite, run
from tests.sglang.mixed import prompt
from tests.sglang.server import Server, models_path

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1200), pytest.mark.usefixtures("sglang_ready")]


@pytest.fixture(scope="module")
def server(sglang_ready: None) -> Iterator[Server]:
    options: dict[str, Any] = {"incremental_streaming_output": True, "grammar_backend": "llguidance"}
    with Server("tiny", None, plugin=False, **options) as running:
        yield running


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[SGLangEngine]:
    with SGLangEngine(server.url, tool_format="hermes") as made:
        yield made


class TestPlainSGLang(EngineSuite):
    @pytest.fixture
    def engine(self, shared: SGLangEngine) -> Any:
        return shared


def test_what_is_lost_is_said_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), SGLangEngine(server.url) as engine:
        mine = Trajectory()
        mine.seed("a text")
        got = [run(engine, trajectory=mine) for _ in range(3)]
    assert [n.subject for n in engine.notices] == ["plugin"]
    assert len([r for r in caplog.records if "AGENTSPEC" in r.getMessage()]) == 1
    stats = got[-1].stats
    assert stats.verify_steps == stats.output_tokens == 24 and stats.proposed == 0
    assert stats.not_drafted == {"off": 24} and stats.acceptance_rate is None


def test_the_doctor_says_it_too(server: Server) -> None:
    found = {f.subject: f for f in examine(server.url)}
    assert found["server"].state == "ok" and "sglang" in found["server"].text
    assert found["plugin"].state == "note" and "AGENTSPEC" in found["plugin"].remedy


def test_it_says_what_the_embedded_engine_says(shared: SGLangEngine) -> None:
    with LocalEngine(str(models_path() / "tiny"), max_draft=0) as local:
        ids = prompt(330, 60)
        assert run(shared, ids, max_tokens=32).token_ids == run(local, ids, max_tokens=32).token_ids
