"""SGLangEngine on the real SGLang 0.5.23 with the plugin: the common suite, LocalEngine's text, and what the plugin tells.

One server, on two layers of random weights. OpenAI's routes are asked of the same server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentspec.engines.base import GenerationRequest
from agentspec.engines.local import LocalEngine
from agentspec.engines.sglang import SGLangEngine
from agentspec.errors import InvalidRequestError, ServerError
from agentspec.loop import Trajectory, trajectory
from tests.engines.engine_suite import TOOLS, USER, EngineSuite, consistent, request, run
from tests.sglang.mixed import prompt
from tests.sglang.server import Server, models_path

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1200), pytest.mark.usefixtures("sglang_ready")]


@pytest.fixture(scope="module")
def server(sglang_ready: None) -> Iterator[Server]:
    with Server("tiny") as running:
        yield running


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[SGLangEngine]:
    with SGLangEngine(server.url, tool_format="hermes") as made:
        yield made


class TestSGLangEngine(EngineSuite):
    @pytest.fixture
    def engine(self, shared: SGLangEngine) -> Any:
        return shared


def test_the_server_is_what_it_says(shared: SGLangEngine) -> None:
    assert shared.info.plugin and shared.info.grammar == "xgrammar" and not shared.info.seeded
    assert shared.context_length == 8192 and shared.vocabulary == 49152
    assert shared.eos_ids == {2}


def test_it_says_what_the_embedded_engine_says(shared: SGLangEngine) -> None:
    """The same weights in float32: the same ids, and the same log probabilities."""
    with LocalEngine(str(models_path() / "tiny"), max_draft=0) as local:
        for number in range(4):
            ids = prompt(300 + number, 60)
            ours, theirs = (run(e, ids, max_tokens=32, logprobs=True) for e in (shared, local))
            assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
            assert [p.logprob for p in ours.logprobs] == pytest.approx([p.logprob for p in theirs.logprobs], abs=1e-3)


def test_a_repeated_call_is_drafted_and_counted(shared: SGLangEngine) -> None:
    ids = prompt(310, 120)
    with trajectory("client-repeats"):
        first, again = (run(shared, ids, max_tokens=64) for _ in range(2))
    assert again.token_ids == first.token_ids
    stats = again.stats
    consistent(stats)
    assert stats.verify_steps < 32 and stats.accepted > 32
    # A step is an arrival, but for steps that a busy server puts into one.
    assert 1 < len(stats.arrivals) <= stats.verify_steps and sum(n for _, n in stats.arrivals) == stats.output_tokens
    assert stats.reused_tokens >= len(ids) - 16
    assert stats.engine == "sglang" and stats.acceptance_rate is not None


def test_seeds_reach_the_memory(shared: SGLangEngine) -> None:
    ids = prompt(311, 80)
    known = run(shared, ids, max_tokens=48).token_ids
    mine = Trajectory("client-seeded")
    mine.seed([*ids[-6:], *known])
    seeded = run(shared, ids, max_tokens=48, trajectory=mine)
    assert seeded.token_ids == known and seeded.stats.verify_steps <= 16


def test_tenants_are_kept_apart(server: Server) -> None:
    """Two tenants use one trajectory's name. What one remembers never drafts for the other."""
    name = Trajectory().id

    def steps(tenant: str, ids: list[int], trajectory: str) -> int:
        with SGLangEngine(server.url, tenant=tenant) as engine:
            return run(engine, ids, max_tokens=48, trajectory=Trajectory(trajectory)).stats.verify_steps

    # an output that doesn't repeat itself, so that memory is what makes it quick
    tried = [(steps(f"nobody-{number}", prompt(number, 100), name), number) for number in range(312, 322)]
    alone, number = max(tried)
    ids = prompt(number, 100)
    first, again, other = (steps(tenant, ids, name) for tenant in ("tenant-a", "tenant-a", "tenant-b"))
    # what the proposer has learned of acceptance in general may move a step or two
    assert again <= min(first, other) - 8 and abs(first - other) <= 3, (alone, first, again, other)


def test_dropping_a_call_frees_the_server(shared: SGLangEngine, server: Server) -> None:
    call = shared.generate(request(max_tokens=4000))
    next(call)
    call.abort()
    end = time.monotonic() + 60
    while server.get("/server_info")["internal_states"][0].get("num_running_reqs", 0):
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.2)


def test_what_the_server_refuses_is_typed(shared: SGLangEngine) -> None:
    from agentspec.chat import Grammar

    broken = Grammar("start: x", source=("regex", "(("))
    with pytest.raises(InvalidRequestError):
        run(shared, constraint=shared.compile(broken))
    assert run(shared).finish_reason == "length"


# ---- OpenAI's routes, of the same server ---------------------------------------------------------


def test_completions_say_the_same(server: Server, shared: SGLangEngine) -> None:
    ids = prompt(320, 40)
    wanted = run(shared, ids, max_tokens=20)
    with SGLangEngine(server.url, api="completions", tokenizer=str(models_path() / "tiny")) as engine:
        got = engine.generate(GenerationRequest(input_ids=ids, max_tokens=20, ignore_eos=True)).result()
        assert got.text == wanted.text and got.finish_reason == "length"
        assert got.stats.output_tokens == 20 == sum(n for _, n in got.stats.arrivals)
        assert got.stats.prompt_tokens == len(ids)
        assert "plugin" in [n.subject for n in engine.notices]
        chat = engine.chat([USER], max_tokens=8, ignore_eos=True).result()
        assert chat.text == shared.chat([USER], max_tokens=8, ignore_eos=True).result().text


def test_messages_say_the_same(server: Server, shared: SGLangEngine) -> None:
    wanted = shared.chat([USER], max_tokens=12, ignore_eos=True).result()
    with SGLangEngine(server.url, api="chat") as engine:
        got = engine.chat([USER], max_tokens=12, ignore_eos=True).result()
        assert got.text == wanted.text == got.message["content"]
        assert got.stats.output_tokens == 12 and got.stats.prompt_tokens == wanted.stats.prompt_tokens
        with pytest.raises(InvalidRequestError, match="messages"):
            engine.generate(request())
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        told = engine.chat([USER], response_format=asked, max_tokens=60).result()
        assert json.loads(told.text) in ("yes", "no") and told.finish_reason == "stop"


def test_a_wrong_model_is_told(server: Server) -> None:
    with pytest.raises(InvalidRequestError, match="serves"):
        SGLangEngine(server.url, api="chat", model="other")


# ---- LangChain -----------------------------------------------------------------------------------


def test_a_langchain_model_on_the_server(server: Server) -> None:
    from langchain_agentspec import ChatAgentSpec
    from langchain_agentspec.engines import close_engines

    try:
        model = ChatAgentSpec(
            base_url=server.url, model="", max_tokens=24, engine_options={"tool_format": "hermes"}, max_retries=0
        )
        said = model.invoke("Read notes.txt, please.")
        assert said.usage_metadata["output_tokens"] == 24
        streamed = list(model.stream("Read notes.txt, please."))
        assert "".join(str(chunk.content) for chunk in streamed) == said.content and len(streamed) > 2
        called = model.bind_tools(TOOLS, tool_choice="read_file").invoke("Read notes.txt, please.", max_tokens=120)
        assert called.tool_calls[0]["name"] == "read_file"
        assert called.tool_calls[0]["args"]["path"] in ("a.txt", "b.txt")
    finally:
        close_engines()


# ---- the benchmark, in miniature -----------------------------------------------------------------


def test_the_overhead_is_measured(server: Server) -> None:
    from benchmarks.client_overhead import measure

    found = measure(server.url, rounds=2, prompt=60, tokens=8, tokenizer=None)["clients"]
    assert {"socket", "agentspec"} <= set(found)
    for row in found.values():
        assert row["ttft_ms"] > 0 and row["itl_ms"] > 0 and row["ttft_ratio"] > 0 and row["itl_ratio"] > 0
    assert found["socket"]["ttft_ratio"] == 1.0


# ---- the end of the server -----------------------------------------------------------------------


def test_a_server_killed_mid_stream(server: Server) -> None:
    """Last: it takes the server with it."""
    with SGLangEngine(server.url, retries=0) as engine:
        call = engine.generate(request(max_tokens=6000))
        next(call)
        server.process.kill()
        with pytest.raises(ServerError) as told:
            list(call)
        assert told.value.partial.token_ids
        with pytest.raises(ServerError):
            engine.generate(request()).result()
