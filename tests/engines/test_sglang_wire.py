"""What SGLang's own figures become: DESIGN.md's definitions, worked out by hand."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from agentspec.engines.background import Background
from agentspec.engines.base import CallStats
from agentspec.engines.conversations import Conversation, Conversations
from agentspec.engines.remote_call import _weighed
from agentspec.engines.sglang_wire import count, server_info
from agentspec.errors import EngineError
from agentspec.loop import Trajectory

pytestmark = pytest.mark.fast

END = {"finish_reason": {"type": "length"}}


def counted(tokens: int, arrivals: int = 3, **meta: Any) -> CallStats:
    stats = CallStats(output_tokens=tokens)
    count(stats, meta, tokens, arrivals)
    return stats


def test_the_prefills_token_is_a_step_too() -> None:
    """12 tokens: one by the prefill, eleven by one step that carried ten drafted ids, all right."""
    widths = [0] * 11 + [1]
    stats = counted(12, **END, spec_verify_ct=1, spec_cap_lens_histogram=widths, spec_num_correct_drafts=10)
    assert (stats.verify_steps, stats.proposed, stats.accepted) == (2, 10, 10)
    assert stats.tokens_per_step == 6.0 and stats.acceptance_rate == 1.0
    assert stats.mismatches is None and stats.conditional_acceptance is None
    assert stats.not_drafted == {}


def test_widths_count_not_the_widest_draft() -> None:
    """Five steps after the prefill: two plain, two with three ids, one with seven; six ids accepted, 12 tokens."""
    widths = [0, 2, 0, 0, 2, 0, 0, 0, 1]
    told = [{"drafts": True}]
    stats = counted(
        12,
        **END,
        spec_verify_ct=5,
        spec_cap_lens_histogram=widths,
        spec_num_correct_drafts=6,
        spec_num_proposed_drafts=75,
        agentspec=told,
    )
    assert (stats.verify_steps, stats.proposed, stats.accepted) == (6, 13, 6)
    assert stats.not_drafted == {"no match or not worth it": 2}


def test_what_comes_after_a_stop_was_not_accepted() -> None:
    """The prefill's token, then a step of eight right ids of which a stop leaves three."""
    stats = counted(4, **END, spec_verify_ct=1, spec_cap_lens_histogram=[0] * 9 + [1], spec_num_correct_drafts=8)
    assert (stats.verify_steps, stats.accepted) == (2, 3)


@pytest.mark.parametrize(("reason", "said"), [("switched_off", "off"), ("penalties", "penalties")])
def test_the_plugins_reason_is_kept(reason: str, said: str) -> None:
    told = [{"drafts": False, "reason": reason}]
    stats = counted(5, **END, spec_verify_ct=4, spec_cap_lens_histogram=[0, 4], agentspec=told)
    assert stats.not_drafted == {said: 4} and stats.verify_steps == 5 and stats.proposed == 0


def test_without_speculation_a_token_is_a_step() -> None:
    stats = counted(7, **END)
    assert stats.verify_steps == 7 and stats.not_drafted == {"off": 7}


def test_a_call_cut_short_has_its_arrivals_only() -> None:
    stats = counted(7, arrivals=4)
    assert stats.verify_steps == 4 and stats.not_drafted == {"not told by the server": 4}


def test_one_token_is_one_step() -> None:
    assert counted(1, **END, spec_verify_ct=0, spec_cap_lens_histogram=[]).verify_steps == 1


@pytest.mark.parametrize(
    ("given", "total", "expected"),
    [
        ([(1.0, 2), (2.0, 2)], 8, [(1.0, 4), (2.0, 4)]),
        ([(1.0, 10), (2.0, 30)], 4, [(1.0, 1), (2.0, 3)]),
        ([(1.0, 1), (2.0, 99)], 5, [(2.0, 5)]),
        ([], 5, []),
        ([(1.0, 3)], 0, []),
    ],
)
def test_stand_ins_are_weighed(given: Any, total: int, expected: Any) -> None:
    assert _weighed(given, total) == expected


def test_what_a_server_says_of_itself() -> None:
    info = server_info(
        {"model_path": "/models/a", "served_model_name": "a", "tokenizer_path": "/models/t"},
        {
            "speculative_algorithm": "AGENTSPEC",
            "context_length": None,
            "max_req_input_len": 4090,
            "grammar_backend": "xgrammar",
        },
    )
    assert (info.model, info.path, info.context_length, info.plugin) == ("a", "/models/t", 4090, True)
    assert info.notices == [] and not info.seeded
    bare = server_info({"model_path": "b"}, {})  # a router, or a version that tells less
    assert bare.model == bare.path == "b" and bare.context_length is None and bare.grammar == "xgrammar"
    assert [n.subject for n in bare.notices] == ["plugin"]


def test_conversations_keep_the_latest_and_those_in_use() -> None:
    held = Conversations(most=2)
    trajectories = [Trajectory(str(i)) for i in range(4)]
    first = held.get(trajectories[0])
    first.in_use = 1
    for trajectory in trajectories[1:]:
        held.get(trajectory)
    assert held.get(trajectories[0]) is first and len(held) == 2
    held.forget(trajectories[0])
    assert held.get(trajectories[0]) is not first


def test_seeds_are_taken_and_given_back() -> None:
    one, trajectory = Conversation(), Trajectory()
    trajectory.seed("a")
    trajectory.seed("b")
    assert (
        [s.content for s in one.new_seeds(trajectory)] == ["a", "b"] == [s.content for s in one.new_seeds(trajectory)]
    )
    one.take_seeds(trajectory, 2)
    assert one.new_seeds(trajectory) == []
    one.take_seeds(trajectory, -1)
    assert [s.content for s in one.new_seeds(trajectory)] == ["b"]


def test_the_background_runs_returns_raises_and_stops() -> None:
    background = Background()

    async def thread() -> str:
        return threading.current_thread().name

    async def broken() -> None:
        raise KeyError("x")

    async def waits_for_itself() -> None:
        background.run(thread())

    assert background.run(thread()) == "agentspec-client"
    with pytest.raises(KeyError):
        background.run(broken())
    with pytest.raises(EngineError, match="wait for itself"):
        background.run(waits_for_itself())
    background.stop()
    background.stop()
    with pytest.raises(EngineError, match="stopped"):
        background.run(thread())
    end = time.monotonic() + 5
    while any(t.name == "agentspec-client" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
