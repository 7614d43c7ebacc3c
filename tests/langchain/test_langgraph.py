"""Agents in LangGraph on a tiny engine: streams, events, batches, cancellation, subagents, a restart; one
trajectory each.

A tiny random model can't plan, so its tool calls are prescribed (`tool_choice` as a list of names); their
arguments are its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_agentspec import ChatAgentSpec
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from tests.langchain.text_engine import TextEngine

pytestmark = pytest.mark.fast
context_of_tasks = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="before Python 3.11 LangGraph hands no run's config to the calls of an async node",
)

CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'


class Plan(AgentMiddleware):
    """Each model call of a turn calls these tools; after that it answers."""

    def __init__(self, *steps: list[str]) -> None:
        super().__init__()
        self._steps = steps

    def _restricted(self, request: Any) -> Any:
        turn: list[Any] = []
        for message in request.messages:
            turn = [] if isinstance(message, HumanMessage) else [*turn, message]
        done = sum(isinstance(message, AIMessage) for message in turn)
        return request.override(tool_choice=self._steps[done] if done < len(self._steps) else "none")

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(self._restricted(request))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return await handler(self._restricted(request))


@tool
def look(where: Literal["here", "there"]) -> str:
    """Look somewhere."""
    return f"a fox is {where}"


@tool
def count(what: Literal["foxes", "dogs"]) -> str:
    """Count animals."""
    return f"3 {what}"


STEPS = (["look"], ["look", "count"], ["count"])


def agent_of(model: Any, *steps: list[str], **options: Any) -> Any:
    return create_agent(model, [look, count], middleware=[Plan(*(steps or STEPS))], **options)


def thread(name: str) -> Any:
    return {"configurable": {"thread_id": name}}


def ask(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


def said(messages: list[Any]) -> list[Any]:
    answers = [m for m in messages if isinstance(m, AIMessage)]
    return [(m.text, [(c["name"], c["args"]) for c in m.tool_calls]) for m in answers]


def stats_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [m.response_metadata["call_stats"] for m in messages if isinstance(m, AIMessage)]


@pytest.fixture
def model(tiny_engine: Callable[..., Any]) -> ChatAgentSpec:
    engine = tiny_engine(model={"max_position_embeddings": 8192})
    return ChatAgentSpec(engine=engine, max_tokens=80)


def test_an_agents_run_says_the_same_without_drafts_and_is_one_trajectory(model: ChatAgentSpec) -> None:
    drafted = agent_of(model).invoke(ask("Look around."))["messages"]
    plain = agent_of(model.model_copy(update={"draft": False})).invoke(ask("Look around."))["messages"]
    assert said(drafted) == said(plain)
    assert [[call["name"] for call in m.tool_calls] for m in drafted if isinstance(m, AIMessage)] == [
        *STEPS,
        [],
    ]
    stats = stats_of(drafted)
    assert len({s["trajectory_id"] for s in stats}) == 1  # found by the ids of earlier outputs: no thread here
    assert [s["call_index"] for s in stats] == [0, 1, 2, 3]
    assert sum(s["accepted"] for s in stats) > 0 and sum(s["verify_steps"] for s in stats) < sum(
        s["verify_steps"] for s in stats_of(plain)
    )
    # The prompt of a call goes on where the call before ended; only the answer's drops the tools.
    for number in (1, 2):
        assert stats[number]["reused_tokens"] >= stats[number - 1]["prompt_tokens"]


def test_messages_mode_streams_what_invoke_returns(model: ChatAgentSpec) -> None:
    agent = agent_of(model, checkpointer=InMemorySaver())
    whole = agent.invoke(ask("Look around."), thread("a"))["messages"]
    pieces: dict[str, AIMessageChunk] = {}
    for message, _ in agent.stream(ask("Look around."), thread("b"), stream_mode="messages"):
        if isinstance(message, AIMessageChunk):
            key = str(message.id)
            pieces[key] = pieces[key] + message if key in pieces else message
    assert said(list(pieces.values())) == said(whole)
    held = agent.get_state(thread("b")).values["messages"]
    assert said(held) == said(whole) and [m.id for m in held if isinstance(m, AIMessage)] == list(pieces)
    assert {s["trajectory_id"] for s in stats_of(held)} == {"b"}
    for message in pieces.values():
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == message.response_metadata["call_stats"]["output_tokens"]


@context_of_tasks
def test_events_tell_each_call_with_one_id_and_one_usage(model: ChatAgentSpec) -> None:
    agent = agent_of(model, checkpointer=InMemorySaver())

    async def run() -> tuple[dict[str, list[Any]], list[Any]]:
        streams: dict[str, list[Any]] = {}
        ends = []
        async for event in agent.astream_events(ask("Look around."), thread("a"), version="v2"):
            if event["event"] == "on_chat_model_stream":
                streams.setdefault(event["run_id"], []).append(event["data"]["chunk"])
            elif event["event"] == "on_chat_model_end":
                ends.append(event["data"]["output"])
        return streams, ends

    streams, ends = asyncio.run(run())
    assert len(streams) == len(ends) == len(STEPS) + 1
    for chunks, end in zip(streams.values(), ends, strict=True):
        assert {chunk.id for chunk in chunks} == {end.id}
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
        ids = [c["id"] for chunk in chunks for c in chunk.tool_call_chunks if c["id"]]
        assert ids == [call["id"] for call in end.tool_calls]
    held = agent.get_state(thread("a")).values["messages"]
    assert {s["trajectory_id"] for s in stats_of(held)} == {"a"}


def test_a_batch_of_eight_threads_is_eight_trajectories(model: ChatAgentSpec) -> None:
    agent = agent_of(model, ["look"], ["count"], checkpointer=InMemorySaver())
    alone = [agent.invoke(ask(f"Look {n}."), thread(f"alone-{n}"))["messages"] for n in range(8)]
    results = agent.batch([ask(f"Look {n}.") for n in range(8)], [thread(f"t{n}") for n in range(8)])
    for number, result in enumerate(results):
        assert said(result["messages"]) == said(alone[number])
        stats = stats_of(result["messages"])
        assert [(s["trajectory_id"], s["call_index"]) for s in stats] == [(f"t{number}", n) for n in range(3)]


@context_of_tasks
def test_a_cancelled_run_goes_on_from_its_checkpoint(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, CALL, "word " * 300, "done", wait_s=0.003)
    agent = create_agent(ChatAgentSpec(engine=engine), [look], checkpointer=InMemorySaver())

    async def run() -> None:
        task = asyncio.ensure_future(agent.ainvoke(ask("Look."), thread("a")))
        while len(engine.asked) < 2 or engine.idle.is_set():
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        taken = engine.steps
        assert await asyncio.to_thread(engine.idle.wait, 2)
        assert engine.steps <= taken + 1
        result = await agent.ainvoke(None, thread("a"))
        assert result["messages"][-1].content == "done"

    asyncio.run(run())
    assert [t.id for t in engine.trajectories] == ["a"] * 3 and len({id(t) for t in engine.trajectories}) == 1
    assert engine.asked[2][0] == engine.asked[1][0]


def test_an_agent_made_anew_over_the_same_checkpoints_goes_on_in_its_trajectory(model: ChatAgentSpec) -> None:
    saver = InMemorySaver()
    first = agent_of(model, ["look"], checkpointer=saver).invoke(ask("Look."), thread("a"))["messages"]
    again = ChatAgentSpec(engine=model.engine, max_tokens=80)
    second = agent_of(again, ["count"], checkpointer=saver).invoke(ask("And now?"), thread("a"))["messages"]
    stats = stats_of(second)
    assert [(s["trajectory_id"], s["call_index"]) for s in stats] == [("a", n) for n in range(4)]
    assert second[: len(first)] == first
    assert len(model.engine.history(_trajectory(model, "a"))) == 4


def _trajectory(model: ChatAgentSpec, id: str) -> Any:
    from langchain_agentspec.trajectories import trajectories_of

    return trajectories_of(model.engine)._held[id]


def test_subagents_share_the_threads_trajectory_and_its_namespace(tiny_tokenizer: Any) -> None:
    def answer(messages: Any) -> str:
        if messages[0]["role"] == "system" and "You search" in messages[0]["content"]:
            return "found it"
        return (
            '<tool_call>\n{"name": "research", "arguments": {"topic": "foxes"}}\n</tool_call>'
            if len(messages) < 4
            else "ok"
        )

    engine = TextEngine(tiny_tokenizer, answer)
    model = ChatAgentSpec(engine=engine)
    searcher = create_agent(model, [], system_prompt="You search.", name="searcher")

    @tool
    def research(topic: str) -> str:
        """Find out about a topic."""
        return str(searcher.invoke(ask(topic))["messages"][-1].content)

    agent = create_agent(model, [research], system_prompt="You lead.", name="leader", checkpointer=InMemorySaver())
    result = agent.invoke(ask("Go."), thread("a"))["messages"]
    assert result[-1].content == "ok" and len(engine.asked) == 3
    assert len({id(t) for t in engine.trajectories}) == 1
    assert engine.trajectories[0].id == "a" and engine.trajectories[0].namespace == "leader"


def test_a_tools_raw_artifact_is_draft_material_before_the_next_call(tiny_tokenizer: Any) -> None:
    @tool(response_format="content_and_artifact")
    def look(where: str) -> tuple[str, list[str]]:
        """Look somewhere."""
        return "three lines", ["one", "two", "three"]

    engine = TextEngine(tiny_tokenizer, CALL, "done")
    agent = create_agent(ChatAgentSpec(engine=engine), [look])
    result = agent.invoke(ask("Look."))["messages"]
    assert isinstance(result[2], ToolMessage)
    (trajectory,) = {id(t): t for t in engine.trajectories}.values()
    assert [seed.content for seed in trajectory.seeds_from(0)] == ["three lines", '["one", "two", "three"]']


def test_structured_output_of_an_agent_is_the_providers(tiny_tokenizer: Any) -> None:
    class Answer(BaseModel):
        """An answer."""

        animal: str

    engine = TextEngine(tiny_tokenizer, '{"animal": "fox"}')
    agent = create_agent(ChatAgentSpec(engine=engine), [look], response_format=Answer)
    assert agent.invoke(ask("Which?"))["structured_response"] == Answer(animal="fox")
    assert engine.asked[0][1]["response_format"]["type"] == "json_schema"
    assert [t["function"]["name"] for t in engine.asked[0][1]["tools"]] == ["look"]


def test_a_malformed_call_is_in_the_messages_with_its_raw_text(tiny_tokenizer: Any) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"where": "he\n</tool_call>'
    agent = create_agent(ChatAgentSpec(engine=TextEngine(tiny_tokenizer, broken)), [look])
    invoked = agent.invoke(ask("Look."))["messages"][-1]
    assert invoked.tool_calls == [] and '{"where": "he' in str(invoked.invalid_tool_calls[0]["args"])
    assert invoked.invalid_tool_calls[0]["name"] == "look"
    streamed = [m for m, _ in agent.stream(ask("Look."), stream_mode="messages") if isinstance(m, AIMessageChunk)]
    whole = streamed[0]
    for message in streamed[1:]:
        whole = whole + message
    assert whole.tool_calls == [] and [c["name"] for c in whole.invalid_tool_calls] == ["look"]
    assert '{"where": "he' in whole.additional_kwargs["invalid_tool_calls"][0]["args"]


def test_threads_of_a_pool_keep_their_calls_apart(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, lambda messages: "re " + messages[-1]["content"])
    agent = create_agent(ChatAgentSpec(engine=engine), [], checkpointer=InMemorySaver())
    answers: dict[str, list[str]] = {}

    def work(name: str) -> None:
        for n in range(3):
            result = agent.invoke(ask(f"{name} {n}"), thread(name))["messages"]
            answers.setdefault(name, []).append(result[-1].content)

    workers = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == {f"w{n}": [f"re w{n} {m}" for m in range(3)] for n in range(4)}
    assert {t.id for t in engine.trajectories} == set(answers)
