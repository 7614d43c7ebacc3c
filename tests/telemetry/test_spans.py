"""Hierarchy, context, and the end of spans: over functions, generators, tasks, threads and abandoned
streams.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import agentspec
from agentspec import telemetry
from agentspec.errors import EngineError
from tests.scripted import ScriptedEngine, Step

pytestmark = pytest.mark.fast

MESSAGES = [{"role": "user", "content": "hello"}]


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def parent_of(span):
    return span.parent.span_id if span.parent else None


def test_nothing_happens_without_a_provider():
    engine = ScriptedEngine()
    with agentspec.trajectory("t", name="agent") as t:
        generation = engine.chat(MESSAGES)
        assert generation.result().stats.output_tokens == 8
    assert t.context is None
    assert telemetry.chat(engine.target, generation.request, t) is telemetry.NO_CALL
    assert telemetry.agent(t) is telemetry.NOTHING


def test_a_loop_with_calls_and_tools_is_one_trace(spans):
    engine = ScriptedEngine()

    @agentspec.tool
    def read_file(path):
        """Read a file.

        More words."""
        return "contents of " + path

    @agentspec.agent_loop(name="triage")
    def triage(ticket):
        engine.chat(MESSAGES, max_tokens=8).result()
        read_file("a.py")
        return engine.chat(MESSAGES).result().text

    assert triage("x").startswith("word")
    root = spans.named("invoke_agent triage")
    first, second = (s for s in spans.all() if s.name == "chat scripted-1")
    tool = spans.named("execute_tool read_file")
    assert [s.kind for s in (root, first, tool)] == [SpanKind.INTERNAL] * 3
    assert parent_of(root) is None
    assert {parent_of(s) for s in (first, second, tool)} == {root.context.span_id}
    assert {s.context.trace_id for s in spans.all()} == {root.context.trace_id}
    assert tool.attributes["gen_ai.tool.description"] == "Read a file."
    assert root.attributes["gen_ai.agent.name"] == "triage"
    assert first.attributes["gen_ai.conversation.id"] == root.attributes["gen_ai.conversation.id"]
    assert [s.attributes["agentspec.call.index"] for s in (first, second)] == [0, 1]
    assert first.attributes["gen_ai.request.max_tokens"] == 8
    assert "gen_ai.request.max_tokens" not in second.attributes
    assert root.attributes["agentspec.calls"] == 2
    assert root.attributes["agentspec.accepted"] == 2 * (3 + 1)
    assert root.start_time <= first.start_time < first.end_time <= second.start_time
    assert second.start_time < second.end_time <= root.end_time


def test_a_remote_engine_is_a_client_and_passes_the_trace_on(spans):
    target = telemetry.Target("big", "sglang", "gpu.example", 30000)
    request = agentspec.GenerationRequest(input_ids=[1, 2, 3])
    with agentspec.trajectory() as t:
        call = telemetry.chat(target, request, t)
        headers = call.headers()
        call.finish()
    span = spans.named("chat big")
    assert span.kind is SpanKind.CLIENT
    assert span.attributes["server.address"] == "gpu.example" and span.attributes["server.port"] == 30000
    assert span.attributes["gen_ai.provider.name"] == "sglang"
    sampled_random = "03"
    ids = f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
    assert headers["traceparent"] == f"00-{ids}-{sampled_random}"


def test_nested_agents_nest_and_two_runs_are_two_traces(spans):
    engine = ScriptedEngine()

    @agentspec.agent_loop(name="inner")
    def inner():
        engine.chat(MESSAGES).result()

    @agentspec.agent_loop(name="outer")
    def outer():
        inner()

    outer()
    assert parent_of(spans.named("invoke_agent inner")) == spans.named("invoke_agent outer").context.span_id
    assert parent_of(spans.named("chat scripted-1")) == spans.named("invoke_agent inner").context.span_id
    outer()
    assert len({s.context.trace_id for s in spans.all()}) == 2


def test_a_call_is_a_child_of_whatever_span_is_current(spans):
    engine = ScriptedEngine()
    tracer = trace.get_tracer("somebody else")
    with tracer.start_as_current_span("chain"):
        engine.chat(MESSAGES).result()
    assert parent_of(spans.named("chat scripted-1")) == spans.named("chain").context.span_id


def test_a_failing_call_and_its_agent_say_so(spans):
    engine = ScriptedEngine([[Step(2), Step(error=RuntimeError("the card fell out"))]])
    with pytest.raises(EngineError), agentspec.trajectory(name="a"):
        engine.chat(MESSAGES).result()
    call, root = spans.named("chat scripted-1"), spans.named("invoke_agent a")
    assert call.status.status_code is root.status.status_code is StatusCode.ERROR
    assert call.attributes["error.type"] == root.attributes["error.type"] == "EngineError"
    assert "the card fell out" in call.status.description
    assert call.attributes["gen_ai.usage.output_tokens"] == 2, "what was measured until then"
    assert not call.events


def test_a_failing_tool(spans):
    @agentspec.tool
    def broken():
        raise KeyError("x")

    with pytest.raises(KeyError):
        broken()
    span = next(s for s in spans.all() if s.name.startswith("execute_tool"))
    assert span.attributes["error.type"] == "KeyError"
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("leave", ["close", "drop", "with"])
def test_an_abandoned_stream_ends_its_span_with_what_was_measured(spans, leave):
    engine = ScriptedEngine([[Step(2), *[Step(wait_s=0.02)] * 100]])
    generation = engine.chat(MESSAGES)
    if leave == "with":
        with generation:
            next(generation)
    else:
        next(generation)
    if leave == "close":
        generation.close()
    del generation
    gc.collect()
    within(2, lambda: "chat scripted-1" in spans.names())
    span = spans.named("chat scripted-1")
    assert span.attributes["agentspec.abandoned"] is True
    assert list(span.attributes["gen_ai.response.finish_reasons"]) == ["abort"]
    assert 2 <= span.attributes["gen_ai.usage.output_tokens"] < 20
    assert span.status.status_code is StatusCode.UNSET


def test_a_call_whose_engine_forgot_it_ends_on_collection(spans):
    request = agentspec.GenerationRequest(input_ids=[1])
    call = telemetry.chat(telemetry.Target("gone"), request, agentspec.Trajectory())
    del call, request
    gc.collect()
    assert spans.named("chat gone").attributes["agentspec.abandoned"] is True


def test_a_generator_agent_leaves_the_consumers_context_alone(spans, caplog):
    engine = ScriptedEngine()

    @agentspec.agent_loop(name="streamer")
    def streamer():
        for chunk in engine.chat(MESSAGES):
            yield chunk.text
        engine.chat(MESSAGES).result()

    with trace.get_tracer("app").start_as_current_span("request") as request:
        run = streamer()
        next(run)
        assert trace.get_current_span() is request
        next(run)
        assert agentspec.current_trajectory() is None
        list(run)
        assert trace.get_current_span() is request
    agent = spans.named("invoke_agent streamer")
    assert parent_of(agent) == request.get_span_context().span_id
    calls = [s for s in spans.all() if s.name == "chat scripted-1"]
    assert [parent_of(s) for s in calls] == [agent.context.span_id] * 2
    assert "detach" not in caplog.text


def test_an_abandoned_generator_ends_its_span_on_collection(spans, caplog):
    @agentspec.agent_loop(name="streamer")
    def streamer():
        yield 1
        yield 2

    run = streamer()
    next(run)
    assert spans.names() == []
    del run
    gc.collect()
    assert spans.named("invoke_agent streamer").attributes["agentspec.abandoned"] is True
    assert "detach" not in caplog.text


def test_an_abandoned_async_generator(spans, caplog):
    engine = ScriptedEngine([[*[Step(wait_s=0.01)] * 50]])

    @agentspec.agent_loop(name="streamer")
    async def streamer():
        async for chunk in engine.chat(MESSAGES):
            yield chunk.text

    async def main():
        with trace.get_tracer("app").start_as_current_span("request") as request:
            async for _ in streamer():
                break
            assert trace.get_current_span() is request
            gc.collect()
            await asyncio.sleep(0.05)
            assert trace.get_current_span() is request

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    within(2, lambda: "chat scripted-1" in spans.names())
    assert spans.named("invoke_agent streamer").attributes["agentspec.abandoned"] is True
    assert spans.named("chat scripted-1").attributes["agentspec.abandoned"] is True
    assert "Failed to detach" not in caplog.text
    assert len({s.context.trace_id for s in spans.all()}) == 1


def test_a_trajectory_block_inside_an_abandoned_async_generator(spans, caplog):
    async def stream():
        with agentspec.trajectory(name="inside"):
            yield 1
            yield 2

    async def main():
        async for _ in stream():
            break
        gc.collect()
        await asyncio.sleep(0.02)

    asyncio.run(main())
    assert "invoke_agent inside" in spans.names()
    assert "Failed to detach" not in caplog.text


def test_a_dropped_coroutine_agent_ends_quietly(spans, caplog, recwarn):
    @agentspec.agent_loop(name="waiter")
    async def waiter():
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    task = loop.create_task(waiter())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    del task, loop
    gc.collect()
    assert "invoke_agent waiter" in spans.names()
    assert "detach" not in caplog.text
    assert not [w for w in recwarn if "different Context" in str(w.message)]


def test_two_concurrent_tasks_do_not_mix(spans):
    engine = ScriptedEngine([[Step(wait_s=0.01), Step(3, 2)]])

    @agentspec.agent_loop(name="worker")
    async def worker(number):
        for _ in range(3):
            await engine.chat(MESSAGES).aresult()
            await asyncio.sleep(0)
        return agentspec.current_trajectory().id

    async def main():
        return await asyncio.gather(worker(1), worker(2))

    ids = asyncio.run(main())
    agents = [s for s in spans.all() if s.name == "invoke_agent worker"]
    roots = {s.attributes["gen_ai.conversation.id"]: s for s in agents}
    assert set(roots) == set(ids) and len(set(ids)) == 2
    calls = [s for s in spans.all() if s.name == "chat scripted-1"]
    assert len(calls) == 6
    for call in calls:
        assert parent_of(call) == roots[call.attributes["gen_ai.conversation.id"]].context.span_id


def test_threads_that_inherit_nothing_join_the_trace_by_their_trajectory(spans):
    engine = ScriptedEngine()
    with agentspec.trajectory(name="a") as t:
        threads = [
            threading.Thread(target=t.bind(lambda: engine.chat(MESSAGES).result())),
            threading.Thread(target=lambda: engine.chat(MESSAGES, trajectory=t).result()),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    root = spans.named("invoke_agent a")
    calls = [s for s in spans.all() if s.name == "chat scripted-1"]
    assert [parent_of(s) for s in calls] == [root.context.span_id] * 2


def test_telemetry_that_fails_does_not_fail_the_call(spans, monkeypatch, caplog):
    from agentspec.telemetry import calls

    monkeypatch.setattr(calls, "call_attributes", lambda stats: 1 / 0)
    engine = ScriptedEngine()
    assert engine.chat(MESSAGES).result().stats.output_tokens == 8
    assert "chat scripted-1" in spans.names()
    assert "could not be written" in caplog.text
