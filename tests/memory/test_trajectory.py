"""TrajectoryMemory: what a prompt adds, what an open call sees, what the prompt is said to hold."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from agentspec.errors import IntegrityError, InvalidRequestError, MemoryBudgetError
from agentspec.memory import Context, Place, Source, Span, TrajectoryMemory, index
from agentspec.memory.segments import as_tokens
from tests.memory.test_index import compare

pytestmark = pytest.mark.fast

START, END, NEWLINE = 50_000, 50_001, 50_002
ROLES = {"user": 50_010, "assistant": 50_011, "tool": 50_012, "system": 50_013}
THINK, UNTHINK = 50_020, 50_021
SOURCES = {"assistant": Source.OUTPUT, "tool": Source.TOOL}

Message = tuple[str, list[int]]


def words(random: np.random.Generator, count: int) -> list[int]:
    return random.integers(0, 40_000, count).tolist()


def render(chat: list[Message]) -> tuple[list[int], list[Span]]:
    """ChatML over ids. A message's span is its content; an assistant's ends with END."""
    ids: list[int] = []
    spans: list[Span] = []
    for role, content in chat:
        ids += [START, ROLES[role], NEWLINE]
        end = len(ids) + len(content) + (role == "assistant")
        spans.append(Span(len(ids), end, SOURCES.get(role, Source.PROMPT), role))
        ids += [*content, END, NEWLINE]
    return [*ids, START, ROLES["assistant"], NEWLINE], spans


def added(context: Context) -> int:
    return sum(segment.end - segment.start for segment in context.added)


def laid(context: Context) -> bool:
    """Every prompt token is held where the layout says."""
    at = 0
    for start, end, place in context.layout.tolist():
        assert start <= at
        at = max(at, end)
        assert context.tokens[start:end].tolist() == context.memory.tokens[place : place + end - start].tolist()
    return at == context.prompt_length


@pytest.mark.parametrize("with_spans", [True, False])
@pytest.mark.parametrize("strips", [True, False])
def test_a_chain_of_200_calls_stays_linear(with_spans: bool, strips: bool) -> None:
    """The template strips the thoughts from earlier turns: what is held grows by what is new, no more."""
    random = np.random.default_rng(1)
    memory = TrajectoryMemory()
    chat: list[Message] = [("system", words(random, 200)), ("user", words(random, 60))]
    new = 300
    prompts = 0
    for _ in range(200):
        ids, spans = render(chat)
        prompts += len(ids)
        context = memory.extend(ids, spans if with_spans else None)
        assert laid(context)
        thought, answer = words(random, 50), words(random, 30)
        output = [THINK, *thought, UNTHINK, *answer]
        memory.append(context, [*output, END])
        memory.close(context)
        result = words(random, 80)
        new += len(output) + len(result)
        chat += [("assistant", answer if strips else output), ("tool", result)]
    assert prompts > 20 * len(memory)
    overhead = 1.35 if strips and not with_spans else 1.25
    assert len(memory) < overhead * new
    assert memory.nbytes < 24 * overhead * new + 10_000 + 150 * 800
    assert sum(segment.source is Source.TOOL for segment in memory.segments) == (199 if with_spans else 0)
    memory.check()


@pytest.mark.parametrize("with_spans", [True, False])
@pytest.mark.parametrize("places", [[0], [1], [20], [-1], [-2], [10, 40], [5, 25, 45], [0, -1]])
def test_what_reads_otherwise_in_later_prompts_is_added_once(places: list[int], with_spans: bool) -> None:
    """A template that trims, or text that is tokenised anew: some tokens of each output differ when it comes back."""
    random = np.random.default_rng(8)
    memory = TrajectoryMemory()
    chat: list[Message] = [("system", words(random, 100)), ("user", words(random, 40))]
    new = 140
    sizes = []
    for _ in range(80):
        ids, spans = render(chat)
        context = memory.extend(ids, spans if with_spans else None)
        assert laid(context)
        output = [THINK, NEWLINE, *words(random, 70)]
        memory.append(context, [*output, END])
        memory.close(context)
        again = list(output)
        for place in places:
            again[place] = 45_000 + place
        result = [THINK, NEWLINE, START, *words(random, 60)]
        chat += [("assistant", again), ("tool", result)]
        new += len(output) + len(result) + 8
        sizes.append(len(memory))
    assert sizes[-1] < 2.05 * new, "some is added with every prompt"
    assert sizes[79] - sizes[59] < 1.15 * (sizes[39] - sizes[19]), "it grows faster than what is new"
    size = len(memory)
    for _ in range(3):  # nothing more comes of sending the same again
        memory.close(memory.extend(*(render(chat) if with_spans else (render(chat)[0],))))
        size, before = len(memory), size
    assert size == before
    memory.check()


def test_nothing_is_added_by_a_retry() -> None:
    random = np.random.default_rng(2)
    memory = TrajectoryMemory()
    ids, spans = render([("system", words(random, 50)), ("user", words(random, 20))])
    memory.close(memory.extend(ids, spans))
    size = len(memory)
    context = memory.extend(ids, spans)
    assert context.held == len(ids) and context.added == () and len(memory) == size
    assert laid(context)


def test_a_branch_adds_only_what_is_its_own() -> None:
    random = np.random.default_rng(3)
    memory = TrajectoryMemory()
    shared: list[Message] = [("system", words(random, 100)), ("user", words(random, 50))]
    for branch in range(5):
        task = words(random, 20)
        context = memory.extend(*render([*shared, ("user", task)]))
        if branch:
            assert added(context) <= 20
        assert laid(context)
        memory.append(context, words(random, 10))
        memory.close(context)
    memory.check()


def test_trimmed_and_summarised_history() -> None:
    random = np.random.default_rng(4)
    memory = TrajectoryMemory()
    chat: list[Message] = [("system", words(random, 100))]
    for number in range(12):
        chat += [("user", words(random, 40)), ("assistant", words(random, 30))]
        if number == 6:
            chat = [chat[0], ("user", words(random, 25)), *chat[-4:]]  # a summary for the oldest turns
            context = memory.extend(*render(chat))
            assert added(context) < 25 + 40 + 31 + 10
        else:
            if number == 9:
                chat = [chat[0], *chat[5:]]  # trimmed
            context = memory.extend(*render(chat))
            assert added(context) < 40 + 31 + 10 or number == 0
        assert laid(context)
        memory.close(context)
    memory.check()


def test_what_left_the_prompt_is_draft_material_and_not_claimed_to_be_in_it() -> None:
    memory = TrajectoryMemory()
    abandoned = [*range(100, 140)]
    context = memory.extend(*render([("system", [1, 2, 3]), ("user", abandoned)]))
    place = int(context.layout[context.layout[:, 0] == 8][0][2]) if False else memory.tokens.tolist().index(100)
    assert context.covers(place)
    memory.close(context)
    context = memory.extend(*render([("system", [1, 2, 3]), ("user", [7, 8, 9])]))
    memory.append(context, abandoned[:12])
    matches = memory.match(context, min_match=9)
    assert matches.copy(0, 5)[0].tolist() == abandoned[12:17]
    assert not context.covers(int(matches.positions[0]))
    assert context.covers(memory.tokens.tolist().index(7))


def test_an_output_without_its_end_is_held() -> None:
    memory = TrajectoryMemory()
    context = memory.extend(*render([("user", [*range(20)])]))
    output = [*range(300, 330)]
    memory.append(context, [*output, END])
    memory.close(context)
    start = context.prompt_length
    for held in (output, output[:10], output[4:], [*output, END], output[12:20]):
        again = memory.extend([*context.tokens[: context.prompt_length], *held], [Span(start, start + len(held))])
        assert added(again) == 0, held
        memory.close(again)


def test_a_message_that_grows_adds_what_it_grew_by() -> None:
    """An assistant's message continued call after call (prefill): linear, too."""
    random = np.random.default_rng(5)
    memory = TrajectoryMemory()
    head = [
        START,
        ROLES["user"],
        NEWLINE,
        *words(random, 30),
        END,
        NEWLINE,
        START,
        ROLES["assistant"],
        NEWLINE,
    ]
    said: list[int] = []
    for _ in range(100):
        ids = head + said
        spans = [
            Span(3, 33, role="user"),
            *([Span(len(head), len(ids), Source.OUTPUT, "assistant")] if said else []),
        ]
        context = memory.extend(ids, spans)
        assert laid(context)
        more = words(random, 40)
        memory.append(context, more)
        memory.close(context)
        said += more
    assert len(memory) < 4.5 * len(said)
    memory.check()


@pytest.mark.parametrize("with_spans", [True, False])
@pytest.mark.parametrize("period", [[7], [7, 8], [7, 7, 8, 9, 7]])
def test_a_prompt_that_repeats_itself_and_grows_stays_linear(with_spans: bool, period: list[int]) -> None:
    memory = TrajectoryMemory()
    for calls in range(1, 60):
        prompt = [1, 2, 3, *(period * 100)[: 40 * calls], 4]
        context = memory.extend(prompt, [Span(3, len(prompt) - 1, Source.TOOL, "tool")] if with_spans else None)
        assert laid(context)
        memory.close(context)
        assert len(memory) < 5 * (len(prompt) + 20 * calls)
    memory.check()


def test_a_file_read_again_after_an_edit_adds_the_edit() -> None:
    random = np.random.default_rng(6)
    memory = TrajectoryMemory()
    file = words(random, 2000)
    memory.close(memory.extend(*render([("tool", file)])))
    file[1000:1003] = [7, 8, 9, 10, 11]
    context = memory.extend(*render([("tool", file)]))
    assert added(context) < 50 and laid(context)
    # A copy goes from before the edit through it and on behind it.
    memory.append(context, file[980:1000])
    copied, source = memory.match(context, max_match=16).copy(0, 12)
    assert source is Source.TOOL
    assert copied.tolist() == file[1000:1012]
    # The copy of the edit takes some of what follows along; from there the old text goes on.
    memory.append(context, file[1000:1032])
    assert memory.match(context, max_match=16).copy(0, 30)[0].tolist() == file[1032:1062]


def test_two_calls_at_once_keep_their_outputs_apart() -> None:
    memory = TrajectoryMemory()
    first = memory.extend([1, 2, 3])
    second = memory.extend([1, 2, 3, 4])
    for i in range(20):
        memory.append(first, [100 + i])
        memory.append(second, [200 + i, 300 + i])
        compare(memory, first)
        compare(memory, second)
    memory.check()
    # Neither sees the other's output before it is closed, whatever the order of the steps.
    assert len(memory.match(second, min_match=2)) == 0
    memory.close(first)
    assert memory.segments[-1].source is Source.OUTPUT
    memory.append(second, [100, 101])
    assert memory.match(second).copy(0, 3)[0].tolist() == [102, 103, 104]
    memory.close(second)
    held = {tuple(memory.tokens[s.start : s.end].tolist()) for s in memory.segments if s.source is Source.OUTPUT}
    assert held == {tuple(first.output.tolist()), tuple(second.output.tolist())}
    assert first.stored is not None and second.stored is not None
    memory.check()


def test_two_calls_from_two_threads() -> None:
    memory = TrajectoryMemory()
    contexts: dict[int, Context] = {}
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(20):
                context = memory.extend([*range(50), number, round_])
                for i in range(60):
                    memory.append(context, [1000 * number + i])
                    matches = memory.match(context)
                    for row in range(len(matches)):
                        if matches.places[row] == Place.OUTPUT:
                            assert set(matches.copy(row, 8)[0] // 1000) <= {number}
                memory.close(context)
                contexts[number * 100 + round_] = context
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for key, context in contexts.items():
        assert context.output.tolist() == [1000 * (key // 100) + i for i in range(60)]
    assert sum(s.source is Source.OUTPUT for s in memory.segments) == 80
    memory.check()


def test_truncate_takes_back_what_was_not_delivered() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([1, 2, 3])
    memory.append(context, [4, 5, 6, 7, 4, 5])
    memory.truncate(context, 3)
    assert context.output.tolist() == [4, 5, 6]
    memory.append(context, [4])
    compare(memory, context)
    assert memory.match(context).copy(0, 2)[0].tolist() == [5, 6]
    with pytest.raises(InvalidRequestError, match="4 tokens, 5 were to remain"):
        memory.truncate(context, 5)
    for length in ("a", None, 1.0, math.nan, 10**5000):
        with pytest.raises(InvalidRequestError, match="truncate: needed a whole number") as refused:
            memory.truncate(context, length)  # type: ignore[arg-type]
        assert len(str(refused.value)) < 300
    memory.truncate(context, np.int64(4))
    memory.close(context)
    assert memory.tokens.tolist() == [1, 2, 3, 4, 5, 6, 4]
    with pytest.raises(InvalidRequestError, match="closed"):
        memory.truncate(context, 0)
    memory.check()


def test_an_aborted_call_leaves_what_was_delivered() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([1, 2, 3])
    memory.close(context)
    memory.close(context)
    assert context.stored is None and memory.tokens.tolist() == [1, 2, 3] and not memory.in_use
    with pytest.raises(InvalidRequestError, match="closed"):
        memory.append(context, [1])
    other = TrajectoryMemory()
    for wrong in (lambda: other.close(context), lambda: other.append(context, [1])):
        with pytest.raises(InvalidRequestError, match="another memory"):
            wrong()


def test_sources_and_roles() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([1, 2, 3, 4, 5, 6], [Span(1, 3, Source.TOOL, "tool"), Span(3, 5, Source.SCHEMA)])
    memory.append(context, [7, 8])
    memory.close(context)
    memory.seed([20, 21, 22])
    assert [(s.source, s.role, s.end - s.start) for s in memory.segments] == [
        (Source.PROMPT, "", 1),
        (Source.TOOL, "tool", 2),
        (Source.SCHEMA, "", 2),
        (Source.PROMPT, "", 1),
        (Source.OUTPUT, "assistant", 2),
        (Source.SEED, "seed", 3),
    ]
    assert memory.source_at(2) is Source.TOOL and memory.source_at(7) is Source.OUTPUT
    assert memory.segments_from(5) == memory.segments[5:]


def test_seeds_are_held_raw_and_as_json() -> None:
    memory = TrajectoryMemory()

    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    assert memory.seed_text("plain", encode) == 5
    assert memory.seed_text('say "ü"\n', encode, Source.TOOL) == 8 + 11
    held = ["".join(chr(t) for t in memory.tokens[s.start : s.end]) for s in memory.segments]
    assert held == ["plain", 'say "ü"\n', 'say \\"ü\\"\\n']
    assert memory.seed_text("plain", encode) == 0 and memory.seed([]) == 0
    assert not memory.publish(np.array([1, 2, 3], np.int32), 1, 1)
    memory.check()


def test_forgetting_keeps_the_newest_and_what_calls_hold() -> None:
    memory = TrajectoryMemory(max_tokens=4096)
    random = np.random.default_rng(7)
    opened = memory.extend(words(random, 500))
    memory.append(opened, words(random, 50))
    for _ in range(30):
        context = memory.extend(words(random, 400))
        memory.append(context, words(random, 30))
        memory.close(context)
        assert len(memory) <= 4096
        compare(memory, opened, recent=2)
    assert memory.epoch > 0
    memory.check()
    memory.close(opened)
    assert memory.tokens[-50:].tolist() == opened.output.tolist()
    memory.check()
    with pytest.raises(MemoryBudgetError, match="allow at least"):
        memory.extend(words(random, 5000))
    memory.clear()
    assert len(memory) == 0 and memory.segments == ()
    memory.close(memory.extend([1, 2, 3]))
    memory.check()


def test_an_output_joins_its_prompt_only_if_that_still_stands_last() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([*range(100)])
    memory.append(context, [7, 8, 9])
    memory.forget_oldest(0)
    memory.seed([*range(500, 600)])  # as long as what was forgotten
    memory.close(context)
    assert memory.tokens.tolist() == [*range(500, 600), -1, *range(84, 100), 7, 8, 9]
    other = memory.extend([1000, 1001])
    memory.append(other, [1, 2])
    memory.close(other)
    assert memory.tokens.tolist()[-5:] == [-1, 1000, 1001, 1, 2]
    memory.check()


def test_of_an_output_that_does_not_fit_the_end_is_held() -> None:
    memory = TrajectoryMemory(max_tokens=1024, shared=TrajectoryMemory(max_tokens=1024))
    context = memory.extend([1, 2, 3])
    for i in range(30):
        memory.append(context, [*range(100 * i, 100 * i + 100)])
    compare(memory, context)
    memory.close(context)
    assert memory.tokens[-1] == 2999 and 500 < len(memory) <= 1024
    memory.check()


def test_growth_is_told_to_the_owner_outside_the_lock() -> None:
    memory = TrajectoryMemory()
    told: list[bool] = []

    def grown(which: TrajectoryMemory) -> None:
        free: list[bool] = []

        def take() -> None:
            free.append(which.lock.acquire(timeout=5))
            which.lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        told.append(free == [True])

    memory.on_growth = grown
    context = memory.extend([1, 2, 3])
    memory.append(context, [4] * 1000)
    memory.close(context)
    memory.seed([9, 9, 8])
    assert told == [True] * 4


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [-1],
        [2**31],
        [1.5],
        "ab",
        [[1, 2]],
        None,
        5,
        [True, None],
        np.zeros(3),
        np.zeros((2, 2), int),
        {1: 2}.values,
    ],
)
def test_bad_prompts_are_refused(prompt: Any) -> None:
    memory = TrajectoryMemory()
    with pytest.raises(InvalidRequestError, match="prompt"):
        memory.extend(prompt)
    assert len(memory) == 0 and not memory.in_use
    memory.check()


@pytest.mark.parametrize(
    "spans", [[Span(2, 1)], [Span(0, 5)], [Span(-1, 2)], [Span(0, 2), Span(1, 3)], [Span(2, 3), Span(0, 1)]]
)
def test_bad_spans_are_refused(spans: list[Span]) -> None:
    with pytest.raises(InvalidRequestError, match="spans must lie in order"):
        TrajectoryMemory().extend([1, 2, 3, 4], spans)


@pytest.mark.parametrize(
    "span",
    [
        Span(0.5, 2),  # type: ignore[arg-type]
        Span("a", "b"),  # type: ignore[arg-type]
        Span(0, 2, 77),  # type: ignore[arg-type]
        Span(0, 2, Source.SHARED),
        Span(0, 2, None),  # type: ignore[arg-type]
        Span(0, 2, role=None),  # type: ignore[arg-type]
        Span(0, 10**5000),
        Span(0, 2, 10**5000),  # type: ignore[arg-type]
        Span(0, 2, role=10**5000),  # type: ignore[arg-type]
    ],
)
def test_spans_that_can_not_be_are_refused_before_anything_is_held(span: Span) -> None:
    memory = TrajectoryMemory()
    with pytest.raises(InvalidRequestError, match=r"spans|source: needed one of PROMPT, .*") as refused:
        memory.extend([*range(100)], [span, Span(50, 60)])
    assert len(str(refused.value)) < 300
    with pytest.raises(InvalidRequestError, match="source: needed one of PROMPT"):
        memory.seed([1, 2, 3], Source.LANGUAGE)
    assert len(memory) == 0 and memory.segments == () and not memory.in_use
    memory.check()


@pytest.mark.parametrize("spans", [[(0, 1)], [Span(0, 1), None], (span for span in [Span(0, 1)]), "ab", 5])
def test_spans_are_spans(spans: Any) -> None:
    memory = TrajectoryMemory()
    with pytest.raises(InvalidRequestError, match=r"spans: needed a list of agentspec\.memory\.Span or None"):
        memory.extend([1, 2], spans)
    assert len(memory) == 0 and not memory.in_use


@pytest.mark.parametrize(
    "bounds",
    [{"recent": 1.5}, {"recent": 65}, {"recent": 10**5000}, {"min_match": "a"}, {"min_match": 0}, {"max_match": 10**5000},
     {"max_match": None}, {"min_match": 5, "max_match": 4}],
)  # fmt: skip
def test_bad_bounds_of_a_match_are_refused(bounds: dict[str, Any]) -> None:
    memory = TrajectoryMemory()
    context = memory.extend([1, 2, 1])
    with pytest.raises(InvalidRequestError, match="match: needed whole numbers") as refused:
        memory.match(context, **bounds)
    assert len(str(refused.value)) < 300
    assert len(memory.match(context, np.int64(1), np.int32(16), np.int8(4))) == 1


@pytest.mark.parametrize("after", [True, False])
def test_an_interrupt_leaves_whole_memories(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Ctrl-C during a kernel is raised when the kernel returns: before what it did has been noted."""
    memory = TrajectoryMemory()
    call = memory.extend([*range(100), *range(50)], [Span(0, 70), Span(70, 150)])
    memory.append(call, [1, 2, 3, 1, 2])
    pressed: list[bool] = []

    def interrupted(kernel: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if after or pressed:
                at = kernel(*arguments)
            if not pressed:
                pressed.append(True)
                raise KeyboardInterrupt
            return at

        return run

    tokens = memory.tokens.tolist()
    for work in (
        lambda: memory.seed([*range(200, 300), *range(40)]),
        lambda: memory.extend([*range(300, 400)]),
        lambda: memory.append(call, [3, 1, 2, 3] * 300),
        lambda: memory.publish(np.arange(1000, 1100, dtype=np.int32), 20, 100),
        lambda: memory.forget_oldest(100),
        lambda: memory.restore(memory.snapshot()),
    ):
        pressed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(index, "add", interrupted(index.add))
            patch.setattr(index, "insert", interrupted(index.insert))
            with pytest.raises(KeyboardInterrupt):
                work()
        assert memory.tokens.tolist() == tokens
        assert call.output.tolist() == [1, 2, 3, 1, 2]
        memory.check()
        compare(memory, call)
    assert memory.copy_longest(call, 1, 16, 4)[0].tolist() == [3, 1, 2, 3]
    memory.close(call)
    assert memory.seed([*range(200, 300)]) == 100
    memory.check()


@pytest.mark.parametrize("left", [0, 10**6])
def test_what_malloc_left_behind_is_never_read(left: int) -> None:
    """A namespace's memory begins with a lead-in, before any segment: nothing is held there."""
    dirt = [np.full((16, 4), left, np.int32) for _ in range(300)]
    del dirt  # what the memory's own arrays will be made of
    memory = TrajectoryMemory()
    ids = np.arange(100, 180, dtype=np.int32)
    assert memory.publish(ids, 40, 80)
    first = memory.segments[0].start
    assert first > 0
    assert memory.publish(np.concatenate([ids[:38], ids[38:70]]), 38, 70), "two of its tokens were only a lead-in"
    assert memory.source_at(0) is Source.OUTPUT
    assert memory.copy(0, 5)[0].tolist() == []
    for position in (-1, len(memory)):
        with pytest.raises(InvalidRequestError, match="needed a position"):
            memory.source_at(position)
    memory.check()


def test_of_a_seed_that_does_not_fit_the_end_is_held() -> None:
    memory = TrajectoryMemory(max_tokens=4096)
    assert memory.seed(np.arange(10_000, dtype=np.int32)) == 2048
    assert memory.tokens[-1] == 9999
    memory.check()


def test_token_ids_in_every_form() -> None:
    expected = [1, 2, 2**31 - 1]
    strided = np.array([1, 0, 2, 0, 2**31 - 1], np.int32)[::2]
    for form in (
        expected,
        tuple(expected),
        np.array(expected),
        np.array(expected, np.uint64),
        iter(expected),
        strided,
    ):
        ids = as_tokens(form)
        assert ids.tolist() == expected and ids.dtype == np.int32 and ids.flags.c_contiguous
    with pytest.raises(InvalidRequestError, match="got -1 at 1"):
        as_tokens(np.array([3, -1], np.int32))
    with pytest.raises(InvalidRequestError, match=r"got -1$"):
        as_tokens([-1])


def test_bad_options_are_refused() -> None:
    for most in (0, 1023, 2**26, 2000.5, 10**5000):
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            TrajectoryMemory(max_tokens=most)
    memory = TrajectoryMemory()
    for position in (-1, 0, "a", 10**5000):
        with pytest.raises(InvalidRequestError, match="copy"):
            memory.copy(position, 3)  # type: ignore[arg-type]


def test_check_notices_broken_segments() -> None:
    def fresh() -> TrajectoryMemory:
        memory = TrajectoryMemory()
        memory.close(memory.extend([1, 2, 3, 4], [Span(0, 2)]))
        memory.check()
        return memory

    for change in (
        lambda m: m._rows.__setitem__((0, 1), 3),
        lambda m: m._rows.__setitem__((1, 1), 3),
        lambda m: m._identities.__setitem__(0, 7),
        lambda m: m._index.tokens.__setitem__(3, -1),
        lambda m: m._held.__setitem__(5, 99),
        lambda m: m._index.write(np.array([5], np.int32)),
    ):
        memory = fresh()
        change(memory)
        with pytest.raises(IntegrityError):
            memory.check()


def test_identities_are_the_same_in_every_process() -> None:
    code = (
        "from agentspec.memory import TrajectoryMemory as T;"
        "m = T(); m.seed(range(5, 99)); print(m.segments[0].identity)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    memory = TrajectoryMemory()
    memory.seed(range(5, 99))
    assert printed == {f"{memory.segments[0].identity}\n"}
