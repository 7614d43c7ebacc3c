"""Which trajectory a call belongs to, with nothing done by the user."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_agentspec import ChatAgentSpec, trajectories
from langchain_agentspec.messages import to_agentspec
from langchain_agentspec.trajectories import Origin, Trajectories, trajectories_of
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

import agentspec
from agentspec.errors import InvalidRequestError
from agentspec.loop import Trajectory
from tests.langchain.text_engine import TextEngine

pytestmark = pytest.mark.fast

NOWHERE = Origin()


def find(held: Trajectories, messages: list[Any], origin: Origin = NOWHERE, **options: Any) -> Trajectory:
    return held.find(messages, to_agentspec(messages), origin, **options)


def end(held: Trajectories, trajectory: Trajectory, messages: list[Any], output: AIMessage) -> None:
    ids = [output.id or "none", *(call["id"] or "" for call in output.tool_calls)]
    held.ended(trajectory, to_agentspec(messages), to_agentspec([output])[0], ids)


def test_a_thread_is_a_trajectory_whatever_step_or_branch_calls() -> None:
    held = Trajectories()
    one = find(held, [HumanMessage("a")], Origin("thread-1", "writer"))
    # A subagent in the same thread: another agent, another history.
    two = find(held, [SystemMessage("you search"), HumanMessage("b")], Origin("thread-1", "searcher"))
    other = find(held, [HumanMessage("a")], Origin("thread-2", "writer"))
    assert one is two and one.id == "thread-1" and one.namespace == "writer" and one.name == "writer"
    assert other is not one


def test_what_changes_in_each_step_is_not_looked_at() -> None:
    step = {
        "thread_id": "t",
        "checkpoint_ns": "model:1",
        "parent_run_id": "a",
        "langgraph_checkpoint_ns": "model:1",
    }
    later = {
        "thread_id": "t",
        "checkpoint_ns": "model:2",
        "parent_run_id": "b",
        "langgraph_checkpoint_ns": "model:2",
    }
    assert Origin.of(step) == Origin.of(later) == Origin("t")
    assert Origin.of({}, {"thread_id": 7}) == Origin("7")
    assert Origin.of({"checkpoint_ns": "x"}) == NOWHERE


def test_the_context_is_used_where_no_thread_is_named() -> None:
    held = Trajectories()
    with agentspec.trajectory("mine") as mine:
        assert find(held, [HumanMessage("a")]) is mine
        assert find(held, [HumanMessage("a")], Origin("thread-1")).id == "thread-1"


def test_seeds_of_the_context_reach_the_threads_trajectory_once() -> None:
    held = Trajectories()
    with agentspec.trajectory("mine") as mine:
        mine.seed("first")
        thread = find(held, [HumanMessage("a")], Origin("thread-1"))
        mine.seed("second", "tool")
        find(held, [HumanMessage("a")], Origin("thread-1"))
        find(held, [HumanMessage("a")], Origin("thread-1"))
    assert [(seed.content, seed.source) for seed in thread.seeds_from(0)] == [
        ("first", "seed"),
        ("second", "tool"),
    ]


def test_an_earlier_output_is_known_by_its_id_in_whatever_is_left_of_the_history() -> None:
    held = Trajectories()
    first = [SystemMessage("s"), HumanMessage("a")]
    mine = find(held, first)
    answer = AIMessage("x", id="agentspec-1")
    end(held, mine, first, answer)
    summarised = [SystemMessage("summary of before"), answer, HumanMessage("b")]
    assert find(held, summarised) is mine


def test_an_earlier_tool_call_is_known_by_its_id_when_message_ids_are_gone() -> None:
    held = Trajectories()
    first = [HumanMessage("a")]
    mine = find(held, first)
    call = {"name": "read", "args": {}, "id": "call_9", "type": "tool_call"}
    end(held, mine, first, AIMessage("", tool_calls=[call], id="agentspec-1"))
    assert find(held, [HumanMessage("other"), ToolMessage("r", tool_call_id="call_9")]) is mine
    assert find(held, [HumanMessage("other"), AIMessage("", tool_calls=[call])]) is mine


def test_a_history_without_ids_goes_on_from_the_longest_one_held() -> None:
    held = Trajectories()
    first = [SystemMessage("s"), HumanMessage("a")]
    mine = find(held, first)
    end(held, mine, first, AIMessage("x"))
    second = [*first, AIMessage("x"), HumanMessage("b")]
    assert find(held, second) is mine
    end(held, mine, second, AIMessage("y"))
    # Another conversation went through the same first answer.
    other = Trajectory("other")
    end(held, other, first, AIMessage("x"))
    held._new(other)
    assert find(held, [*second, AIMessage("y"), HumanMessage("c")]) is mine
    assert find(held, [*first, AIMessage("x"), HumanMessage("d")]) is other
    assert find(held, [*first, AIMessage("edited"), HumanMessage("b")]) not in (mine, other)


def test_common_beginnings_join_nobody() -> None:
    held = Trajectories()
    first = [SystemMessage("s", id="system-1"), HumanMessage("a", id="question-1")]
    mine = find(held, first)
    end(held, mine, first, AIMessage("x", id="agentspec-1"))
    assert find(held, first) is not mine
    assert find(held, [first[0], HumanMessage("b")]) is not mine
    few_shot = [HumanMessage("q"), AIMessage("example", id="example-1"), HumanMessage("b")]
    assert find(held, few_shot) is not find(held, few_shot)


def test_tool_results_and_raw_artifacts_are_seeds_once() -> None:
    held = Trajectories()
    trajectory = Trajectory("t")
    messages = [
        HumanMessage("a"),
        ToolMessage("short", tool_call_id="1", artifact="the whole file"),
        ToolMessage("rows", tool_call_id="2", artifact={"rows": [1, 2]}),
        ToolMessage("bytes", tool_call_id="3", artifact=b"\xc3\xa4"),
    ]
    held.seed(trajectory, messages)
    held.seed(trajectory, [*messages, ToolMessage("new", tool_call_id="4")])
    assert [seed.content for seed in trajectory.seeds_from(0)] == [
        "short",
        "the whole file",
        "rows",
        '{"rows": [1, 2]}',
        "bytes",
        "ä",
        "new",
    ]
    assert {seed.source for seed in trajectory.seeds_from(0)} == {"tool"}


def test_namespaces() -> None:
    held = Trajectories()
    assert find(held, [HumanMessage("a")]).namespace is None
    assert find(held, [HumanMessage("a")], Origin(None, "agent-1")).namespace == "agent-1"
    assert find(held, [HumanMessage("a")], Origin(None, "agent-1"), namespace="shared").namespace == "shared"
    assert find(held, [HumanMessage("a")], Origin(None, "agent-1"), namespace=False).namespace is None


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "_TRAJECTORIES", 3)
    monkeypatch.setattr(trajectories, "_MARKS", 5)
    held = Trajectories()
    for number in range(10):
        messages = [HumanMessage(str(number))]
        end(held, find(held, messages, Origin(f"t{number}")), messages, AIMessage("x", id=f"m{number}"))
    assert len(held) == 3 and len(held._marks) == 5
    assert find(held, [AIMessage("x", id="m0"), HumanMessage("go on")]).id != "t0"
    assert find(held, [AIMessage("x", id="m9"), HumanMessage("go on")]).id == "t9"


def test_threads_find_and_end_at_the_same_time() -> None:
    held = Trajectories()
    found: list[Trajectory] = []

    def work() -> None:
        for number in range(200):
            messages = [HumanMessage(str(number % 7))]
            trajectory = find(held, messages, Origin(f"t{number % 7}"))
            end(held, trajectory, messages, AIMessage("x", id=f"m{number % 7}"))
            found.append(trajectory)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({id(t) for t in found}) == 7


# ---- through the chat model ----------------------------------------------------------------------


def test_one_trajectory_per_thread_from_every_way_of_calling(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "hello there")
    model = ChatAgentSpec(engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    model.invoke("a", config)
    list(model.stream("b", config))
    list((model | (lambda m: m)).stream("c", config))
    model.bind(stop=["zzz"]).invoke("d", {"metadata": {"thread_id": "t"}})
    list(model.stream_events("e", {"metadata": {"thread_id": "t"}}, version="v3"))
    assert [trajectory.id for trajectory in engine.trajectories] == ["t"] * 5


def test_a_conversation_without_any_id_is_one_trajectory(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "hello there", "and again")
    model = ChatAgentSpec(engine=engine)
    history: list[Any] = [("system", "s"), ("user", "a")]
    first = model.invoke(history)
    history += [("assistant", first.content), ("user", "b")]
    model.invoke(history)
    model.invoke([("system", "s"), ("user", "a")])
    one, two, three = engine.trajectories
    assert one is two and three is not one


def test_batch_of_threads_keeps_them_apart(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, lambda messages: "to " + messages[-1]["content"])
    model = ChatAgentSpec(engine=engine)
    configs: Any = [{"configurable": {"thread_id": f"t{n}"}} for n in range(8)]
    answers = model.batch([f"question {n}" for n in range(8)], configs)
    assert [answer.content for answer in answers] == [f"to question {n}" for n in range(8)]
    ran_in = {asked[0][-1]["content"]: t.id for asked, t in zip(engine.asked, engine.trajectories, strict=True)}
    assert ran_in == {f"question {n}": f"t{n}" for n in range(8)}


def test_seed_tools_false_keeps_results_out(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "hello")
    history = [HumanMessage("a"), ToolMessage("secret", tool_call_id="1")]
    ChatAgentSpec(engine=engine, seed_tools=False).invoke(history)
    ChatAgentSpec(engine=engine).invoke(history)
    assert [len(t.seeds_from(0)) for t in engine.trajectories] == [0, 1]


def test_an_engines_trajectories_go_with_it(tiny_tokenizer: Any) -> None:
    engine: Any = type("Engine", (), {})()
    number = id(engine)
    assert trajectories_of(engine) is trajectories_of(engine) is trajectories._by_engine[number]
    del engine
    gc.collect()
    assert number not in trajectories._by_engine


def test_an_engines_held_caches_serve_the_thread(chat: Callable[..., Any]) -> None:
    """On the tiny model: the second call of a thread reuses the first one's KV, another thread's does not."""
    model = chat()
    config: Any = {"configurable": {"thread_id": "t"}}
    first = model.invoke([HumanMessage("Hello, what is this?")], config)
    history = [HumanMessage("Hello, what is this?"), first, HumanMessage("And this?")]
    second = model.invoke(history, config)
    stats = second.response_metadata["call_stats"]
    assert stats["call_index"] == 1 and stats["trajectory_id"] == "t"
    assert stats["reused_tokens"] >= first.usage_metadata["input_tokens"]
    other = model.invoke(history, {"configurable": {"thread_id": "u"}})
    assert other.response_metadata["call_stats"]["reused_tokens"] == 0


def test_a_bad_namespace_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="namespace"):
        ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "x"), namespace=True)
    assert issubclass(InvalidRequestError, ValueError)


def test_a_call_can_name_its_trajectory(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "x")
    model, mine = ChatAgentSpec(engine=engine), Trajectory("mine")
    model.invoke("a", {"configurable": {"thread_id": "t"}}, trajectory="other")
    list(model.bind(trajectory=mine).stream("a", {"configurable": {"thread_id": "t"}}))
    assert [t.id for t in engine.trajectories] == ["other", "mine"] and engine.trajectories[1] is mine
    with pytest.raises(InvalidRequestError, match=r"needed an id or an agentspec\.Trajectory, got int"):
        model.invoke("a", trajectory=3)
