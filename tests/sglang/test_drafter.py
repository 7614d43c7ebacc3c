"""The drafter without a scheduler: what it takes, drafts, tells and forgets; lossless for any draft it
sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sglang_agentspec.drafter import Call, Drafter, Step
from sglang_agentspec.requests import RequestSettings
from sglang_agentspec.settings import PluginSettings

from agentspec.drafting import Draft

pytestmark = pytest.mark.fast

VOCABULARY = 50
CHEAP = {1: 1.0, 64: 1.01}  # drafting always pays


def make(**settings: object) -> Drafter:
    chosen = PluginSettings(cost_curve=CHEAP, **settings)  # type: ignore[arg-type]
    return Drafter(chosen, vocabulary=VOCABULARY, curve=chosen.curve("cpu"), widest=8, max_rows=4, trees=True)


def verify(drafter: Drafter, step: Step, row: int, truth: list[int]) -> list[int]:
    """A strict verifier: emits truth along the tree as far as the tree goes with it."""
    emitted = [truth[0]]
    if step.width == 1:
        return emitted
    tree, node = drafter.tree, 0
    while len(emitted) < len(truth):
        child = int(tree.next_token[row, node])
        while child != -1 and tree.tokens[row, child] != emitted[-1]:
            child = int(tree.next_sibling[row, child])
        if child == -1:
            break
        node = child
        emitted.append(truth[len(emitted)])
    return emitted


def run(drafter: Drafter, call: Call, output: list[int]) -> tuple[list[int], int]:
    """Emit `output` through the drafter; returns what was emitted and the steps it took."""
    emitted, steps, new = output[:1], 0, output[:1]
    while len(emitted) < len(output):
        drafter.take(call, new)
        step = drafter.draft([call])
        new = verify(drafter, step, 0, output[len(emitted) :])
        emitted += new
        steps += 1
        drafter.learn([call])
    drafter.end(call, emitted)
    return emitted, steps


def begin(drafter: Drafter, prompt: list[int], **options: object) -> Call:
    settings = RequestSettings(**{"trajectory": "session:x", **options})  # type: ignore[arg-type]
    return drafter.begin(settings, np.array(prompt, np.int32), max_output=100)


@pytest.mark.parametrize("proposer", ["match", "mixture"])
def test_a_repeated_output_is_drafted(proposer: str) -> None:
    drafter = make(proposer=proposer)
    output = [i * 7 % 47 for i in range(40)]
    _, first = run(drafter, begin(drafter, [1, 2, 3]), output)
    emitted, again = run(drafter, begin(drafter, [1, 2, 3]), output)
    assert emitted == output and again < first / 2


@pytest.mark.parametrize("proposer", ["match", "mixture"])
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    output=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=40),
)
def test_whatever_is_drafted_the_output_is_the_targets(proposer: str, output: list[int], prompt: list[int]) -> None:
    drafter = make(proposer=proposer)
    for _ in range(2):
        call = begin(drafter, prompt)
        emitted, steps = run(drafter, call, output)
        assert emitted == output and steps <= len(output) - 1
        assert call.context.tokens.tolist() == prompt + output
        call.trajectory.memory.check()


def test_a_batch_shares_one_width_and_each_row_is_its_own() -> None:
    drafter = make(proposer="match")
    output = list(range(30))
    run(drafter, begin(drafter, [40, 41]), output)
    known = begin(drafter, [40, 41])
    unknown = begin(drafter, [45, 46], trajectory="session:y")
    drafter.take(known, output[:3])
    drafter.take(unknown, [48])
    step = drafter.draft([known, unknown])
    assert step.width in drafter.widths and step.lengths[1] == 1 and step.lengths[0] > 1
    assert verify(drafter, step, 0, output[3:]) == output[3 : 3 + step.lengths[0]]
    assert verify(drafter, step, 1, [9, 9, 9]) == [9]


def test_plain_steps_and_requests_that_are_not_drafted() -> None:
    drafter = make()
    output = list(range(30))
    run(drafter, begin(drafter, [40, 41]), output)
    call = begin(drafter, [40, 41])
    drafter.take(call, output[:3])
    assert drafter.draft([call], plain=True) == Step(1, [1])
    assert drafter.draft([call]).width > 1
    call.reason = "penalties"
    assert drafter.draft([call]) == Step(1, [1])


def test_no_draft_is_deeper_than_what_may_still_be_emitted() -> None:
    drafter = make(proposer="match")
    output = list(range(30))
    run(drafter, begin(drafter, [40, 41]), output)
    for limit in (4, 5, 6):
        call = drafter.begin(RequestSettings(trajectory="session:x"), np.array([40, 41], np.int32), max_output=limit)
        drafter.take(call, output[:3])
        assert drafter.draft([call]).lengths[0] - 1 <= limit - 3 - 1
        drafter.end(call, output[:3])


def test_nothing_after_an_end_token_is_remembered() -> None:
    drafter = make()
    call = drafter.begin(
        RequestSettings(trajectory="session:x"),
        np.array([1, 2], np.int32),
        max_output=50,
        ends=frozenset({9}),
    )
    drafter.take(call, [5, 9, 7, 7])
    assert call.stopped and drafter.draft([call]).width == 1
    drafter.take(call, [7])
    drafter.end(call, [5, 9])
    assert call.context.tokens.tolist() == [1, 2, 5, 9]


def test_output_that_was_not_delivered_is_taken_back() -> None:
    """Under overlap scheduling a stop string is seen one step after its tokens were taken."""
    drafter = make()
    call = begin(drafter, [1, 2])
    drafter.take(call, [5, 6])
    drafter.take(call, [7, 8])
    drafter.end(call, [5, 6, 7])
    held = call.trajectory.memory.tokens
    assert 7 in held and 8 not in held
    call.trajectory.memory.check()


def test_a_followed_call_leaves_its_end_token_out() -> None:
    drafter = make()
    settings = RequestSettings()
    prompt = [i * 7 % 31 + 10 for i in range(60)]
    call = drafter.begin(settings, np.array(prompt, np.int32), max_output=9, ends=frozenset({9}))
    drafter.end(call, [5, 9])
    again = drafter.begin(settings, np.array([*prompt, 5, 30, 31], np.int32), max_output=9)
    assert again.trajectory is call.trajectory and again.context.held >= 60


def test_a_draft_that_no_verifier_could_take_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    drafter = make()

    class Broken:
        name = "broken"
        begin = observe = learn = end = lambda self, *a: None

        def propose(self, context: object, limits: object) -> Draft:
            return Draft.chain([VOCABULARY + 5])

    drafter.proposer = Broken()  # type: ignore[assignment]
    call = begin(drafter, [1, 2])
    for _ in range(3):
        drafter.take(call, [3])
        step = drafter.draft([call])
        assert step.lengths == [1] and verify(drafter, step, 0, [4, 4]) == [4]
    assert caplog.text.count("broken") == 1 and "vocabulary" in caplog.text


def test_without_room_a_call_goes_on_without_drafts() -> None:
    drafter = make(memory_mb=1.1)
    call = drafter.begin(RequestSettings(), np.arange(200_000, dtype=np.int32) % 50, max_output=9)
    assert call.reason == "no_memory" and call.problems
    drafter.take(call, [3, 4])
    assert drafter.draft([call]).width == 1
    drafter.end(call, [3, 4])


def test_a_health_check_leaves_no_trace() -> None:
    """What is drafted after hundreds of them is what is drafted without any."""
    counts = []
    for checks in (0, 300):
        drafter = make(proposer="mixture")
        for _ in range(checks):
            call = drafter.begin_unseen(np.array([0], np.int32), 1, (), "health_check")
            assert call.reason == "health_check"
            drafter.end(call, [0])
        held = drafter.book.nbytes
        call = begin(drafter, [1, 2, 3, 4, 5, 6, 7, 8] * 4)
        counts.append((held, run(drafter, call, [5, 6, 7, 8, 1, 2, 3, 9, 9, 5, 6, 7, 8] * 3)))
    assert counts[0] == counts[1]


def test_seeds_serve_the_call_they_came_with_and_bad_ones_hurt_nobody() -> None:
    drafter = make()
    output = list(range(20, 40))
    seeded = begin(drafter, [1, 2, 3], seeds=(np.array([2, 3, *output], np.int32),))
    drafter.take(seeded, output[:1])
    step = drafter.draft([seeded])
    assert verify(drafter, step, 0, output[1:]) == output[1 : 1 + step.lengths[0]] and step.lengths[0] > 1


def test_flush_forgets_and_running_calls_go_on() -> None:
    drafter = make(proposer="match")
    output = list(range(30))
    run(drafter, begin(drafter, [40, 41]), output)
    running = begin(drafter, [40, 41])
    drafter.clear()
    drafter.take(running, output[:3])
    drafter.draft([running])
    drafter.end(running, output[:3])
    fresh = begin(drafter, [40, 41])
    drafter.take(fresh, output[:3])
    assert fresh.context.held == 0 and drafter.draft([fresh]).width == 1


def test_two_ranks_draft_alike() -> None:
    """Tensor parallelism: the same calls give the same drafts, evictions included."""
    source = np.random.default_rng(3)
    events = [
        (
            int(source.integers(0, 6)),
            source.integers(0, VOCABULARY, int(source.integers(5, 6000))).tolist(),
            source.integers(0, 5, 30).tolist(),
        )
        for _ in range(40)
    ]
    sent = []
    for _ in range(2):
        drafter = make(memory_mb=1.1)
        log = []
        for name, prompt, output in events:
            call = begin(drafter, prompt, trajectory=f"session:{name}" if name else None)
            emitted, new = output[:1], output[:1]
            while len(emitted) < len(output):
                drafter.take(call, new)
                step = drafter.draft([call])
                log.append(
                    (
                        step.width,
                        tuple(step.lengths),
                        drafter.tree.tokens.tolist() if step.width > 1 else None,
                    )
                )
                new = verify(drafter, step, 0, output[len(emitted) :])
                emitted += new
            drafter.end(call, emitted)
        log.append(drafter.book.store.evictions)
        sent.append(log)
    assert sent[0] == sent[1] and sent[0][-1] > 0


def test_load_switches_drafting_off() -> None:
    """At a batch where more tokens cost what they bring at most, nothing is proposed at all."""
    chosen = PluginSettings(cost_curve={1: 1.0, 4: 1.0, 8: 9.0, 64: 500.0})
    drafter = Drafter(chosen, vocabulary=VOCABULARY, curve=chosen.curve("cpu"), widest=4, max_rows=8, trees=True)
    output = list(range(30))
    run(drafter, begin(drafter, [40, 41]), output)
    calls = [begin(drafter, [40, 41], trajectory="session:x") for _ in range(4)]
    for call in calls:
        drafter.take(call, output[:3])
    assert drafter.draft(calls[:1]).width > 1
    asked = []
    propose = drafter.proposer.propose
    drafter.proposer.propose = lambda c, limits: asked.append(limits.max_tokens) or propose(c, limits)  # type: ignore
    assert drafter.draft(calls).width == 1 and set(asked) == {0}


def test_a_proposals_cost_grows_with_the_batch() -> None:
    drafter = make(proposer_cost=0.02)
    assert drafter._proposing(1) == pytest.approx(0.02)
    assert drafter._proposing(16) > 0.25
