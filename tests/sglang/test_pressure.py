"""SGLang takes running requests back and runs them again, as it does when KV memory runs short.

SGLang's own test switch forces it at every seventh forward, so that it surely happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sglang.mixed import prompt
from tests.sglang.server import Server, body, steps

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900), pytest.mark.usefixtures("sglang_ready")]


@pytest.fixture(scope="module", params=["sync", "overlap"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(
        "tiny",
        overlap=request.param == "overlap",
        chunked_prefill_size=64,
        variables={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
    ) as running:
        yield running


def test_retracted_requests_say_the_same(server: Server) -> None:
    requests: list[dict[str, Any]] = [body(prompt(200 + i, 90), 100, session_id=f"s{i}") for i in range(6)]
    plain = [{**r, "session_id": f"alone{i}"} for i, r in enumerate(requests)]
    alone = [server.post("/generate", request) for request in plain]
    retracted = 0
    for _ in range(2):
        together = server.together(requests)
        assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
        retracted += sum(a["meta_info"]["num_retractions"] for a in together)
    assert retracted > 0, "nothing was retracted: the test shows nothing"
    assert sum(steps(a)[0] for a in together) < sum(steps(a)[0] for a in alone)
    assert "IntegrityError" not in server.log


def test_memory_is_right_after_retraction(server: Server) -> None:
    """An output that was retracted is remembered once: its call is drafted in as few steps as ever."""
    ids = prompt(200, 90)
    again = server.generate(ids, 100, session_id="s0")
    assert again["meta_info"]["agentspec"][0]["held_tokens"] == len(ids)
    assert steps(again)[0] <= 30
