"""One run of a LangGraph agent is one trace: sync, async, streamed, nested, and beside OpenInference's
spans.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_agentspec import ChatAgentSpec, tracing
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from opentelemetry import trace
from opentelemetry.trace import StatusCode

import agentspec
from tests.langchain.text_engine import TextEngine
from tests.telemetry.conftest import spans  # noqa: F401

pytestmark = pytest.mark.fast

CHAT = "chat text-1"


@tool
@agentspec.tool
def look(question: str) -> str:
    """Look it up."""
    if question == "nonsense":
        raise ValueError("no such thing")
    return "found it"


def graph_of(model: Any, question: str = "why", name: str = "researcher") -> Any:
    """model, a (scripted) tool call, model again."""

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def aask(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def plan(state: MessagesState) -> Any:
        call = {"name": "look", "args": {"question": question}, "id": f"c{len(state['messages'])}"}
        return {"messages": [AIMessage("", tool_calls=[call])]}

    from langchain_core.runnables import RunnableLambda

    builder = StateGraph(MessagesState)
    builder.add_node("ask", RunnableLambda(ask, afunc=aask))
    builder.add_node("plan", plan)
    builder.add_node("tools", ToolNode([look]))
    builder.add_node("answer", RunnableLambda(ask, afunc=aask))
    order = (START, "ask", "plan", "tools", "answer", END)
    for before, after in itertools.pairwise(order):
        builder.add_edge(before, after)
    return builder.compile(name=name)


@pytest.fixture
def model(tiny_tokenizer: Any) -> Any:
    return ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "hello you"))


QUESTION = {"messages": [("user", "hi")]}
THREAD = {"configurable": {"thread_id": "thread-7"}}


def children(found: Any, parent: Any) -> list[str]:
    mine = [s for s in found.all() if s.parent and s.parent.span_id == parent.context.span_id]
    return [s.name for s in sorted(mine, key=lambda s: s.start_time)]


def assert_one_agent(found: Any, above: Any = None) -> None:
    agent = found.named("invoke_agent researcher")
    assert children(found, agent) == [CHAT, "execute_tool look", CHAT]
    assert len({s.context.trace_id for s in found.all()}) == 1
    assert (agent.parent.span_id if agent.parent else None) == (above.context.span_id if above else None)
    assert agent.attributes["agentspec.calls"] == 2
    for span in found.all():
        if span.name.startswith(("chat", "execute_tool", "invoke_agent researcher")):
            assert span.attributes["gen_ai.conversation.id"] == "thread-7"


def test_a_graph_is_one_trace(spans: Any, model: Any) -> None:  # noqa: F811
    graph_of(model).invoke(QUESTION, THREAD)
    assert_one_agent(spans)
    assert spans.named("execute_tool look").attributes["gen_ai.tool.description"].startswith("Look it up")


def test_async_too(spans: Any, model: Any) -> None:  # noqa: F811
    asyncio.run(graph_of(model).ainvoke(QUESTION, THREAD))
    assert_one_agent(spans)


def test_streamed_too(spans: Any, model: Any) -> None:  # noqa: F811
    async def run() -> None:
        async for _ in graph_of(model).astream(QUESTION, THREAD, stream_mode="messages"):
            pass

    list(graph_of(model).stream(QUESTION, THREAD, stream_mode="messages"))
    assert_one_agent(spans)
    asyncio.run(run())
    assert len({s.context.trace_id for s in spans.all()}) == 2, "the second run is the second trace"


def test_below_the_callers_span(spans: Any, model: Any) -> None:  # noqa: F811
    with trace.get_tracer("app").start_as_current_span("request"):
        graph_of(model).invoke(QUESTION, THREAD)
    assert_one_agent(spans, above=spans.named("request"))


def test_below_an_agent_loop(spans: Any, model: Any) -> None:  # noqa: F811
    @agentspec.agent_loop(name="outer")
    def outer() -> None:
        graph_of(model).invoke(QUESTION, THREAD)

    outer()
    assert_one_agent(spans, above=spans.named("invoke_agent outer"))


def test_a_span_that_a_node_opens_is_what_its_calls_are_below(spans: Any, model: Any) -> None:  # noqa: F811
    def ask(state: MessagesState) -> Any:
        with trace.get_tracer("app").start_as_current_span("mine"):
            return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile(name="g")
    graph.invoke(QUESTION)
    assert children(spans, spans.named("mine")) == [CHAT]


def test_runs_at_the_same_time_do_not_mix(spans: Any, model: Any) -> None:  # noqa: F811
    graph = graph_of(model)

    async def run() -> None:
        await asyncio.gather(*(graph.ainvoke(QUESTION, {"configurable": {"thread_id": str(i)}}) for i in range(4)))

    asyncio.run(run())
    agents = [s for s in spans.all() if s.name == "invoke_agent researcher"]
    assert len({s.context.trace_id for s in agents}) == 4
    for agent in agents:
        assert children(spans, agent) == [CHAT, "execute_tool look", CHAT]
        below = [s for s in spans.all() if s.context.trace_id == agent.context.trace_id]
        assert len({s.attributes["gen_ai.conversation.id"] for s in below}) == 1


def test_a_failing_tool_and_its_graph(spans: Any, model: Any) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="no such thing"):
        graph_of(model, "nonsense").invoke(QUESTION, THREAD)
    for name in ("execute_tool look", "invoke_agent researcher"):
        span = spans.named(name)
        assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == "ValueError"


def test_a_stream_that_is_left_ends_its_spans(spans: Any, tiny_tokenizer: Any) -> None:  # noqa: F811
    slow = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "one two three four five six seven", wait_s=0.02))
    stream = graph_of(slow).stream(QUESTION, THREAD, stream_mode="messages")
    next(stream)
    stream.close()
    del stream
    gc.collect()
    assert slow.engine.idle.wait(5)
    assert {CHAT, "invoke_agent researcher"} <= set(spans.names())
    assert len({s.context.trace_id for s in spans.all()}) == 1


def test_a_model_by_itself_is_a_call_by_itself(spans: Any, model: Any) -> None:  # noqa: F811
    model.invoke("hi")
    assert spans.names() == [CHAT] and spans.named(CHAT).parent is None


def test_nothing_is_held_after_a_run(spans: Any, model: Any) -> None:  # noqa: F811
    graph_of(model).invoke(QUESTION, THREAD)
    assert not tracing._RUNS._held


def test_nothing_happens_without_a_provider(model: Any) -> None:
    graph_of(model).invoke(QUESTION, THREAD)
    assert not tracing._RUNS._held


@pytest.fixture
def openinference(spans: Any) -> Iterator[Callable[[], None]]:  # noqa: F811
    if importlib.util.find_spec("openinference.instrumentation.langchain") is None:
        pytest.skip("openinference-instrumentation-langchain is not installed")
    from openinference.instrumentation.langchain import LangChainInstrumentor

    LangChainInstrumentor().instrument()
    yield
    LangChainInstrumentor().uninstrument()


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "model"])
def test_beside_openinference_it_is_one_trace_with_its_agent(
    spans: Any,  # noqa: F811
    openinference: Any,
    model: Any,
    way: str,
) -> None:
    if way == "model":
        model.invoke("hi")
    elif way == "invoke":
        graph_of(model).invoke(QUESTION, THREAD)
    else:
        asyncio.run(graph_of(model).ainvoke(QUESTION, THREAD))
    assert len({s.context.trace_id for s in spans.all()}) == 1
    mine = {s.name for s in spans.all() if s.instrumentation_scope.name == "agentspec"}
    assert mine <= {CHAT, "execute_tool look"}, "the agent's span is OpenInference's"
    calls = [s for s in spans.all() if s.name == CHAT]
    by_id = {s.context.span_id: s for s in spans.all()}
    assert len(calls) == (1 if way == "model" else 2)
    for call in calls:
        above = by_id[call.parent.span_id]
        assert (above.name, above.instrumentation_scope.name) == (
            "ChatAgentSpec",
            "openinference.instrumentation.langchain",
        )
