"""Random agents for minutes, larger than the state machine's: messages quoted, cut, edited, repeated and
branched.

Nightly. AGENTSPEC_FUZZ_SECONDS sets how long, AGENTSPEC_FUZZ_SEED where it starts; a failure names its seed.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from agentspec.memory import Context, Source, Span, TrajectoryMemory
from tests.memory.test_index import compare


def a_message(choose: random.Random, said: list[list[int]], vocabulary: int) -> list[int]:
    """A new text, or what somebody said before: whole, cut, or with an edit."""
    if said and choose.random() < 0.6:
        message = list(choose.choice(said))
        if choose.random() < 0.5:
            at = choose.randrange(len(message))
            message = message[at : at + choose.randint(1, 300)]
        if choose.random() < 0.3:
            at = choose.randrange(len(message))
            message[at : at + choose.randint(0, 5)] = [
                choose.randrange(vocabulary) for _ in range(choose.randint(1, 5))
            ]
    else:
        message = [choose.randrange(vocabulary) for _ in range(choose.randint(1, 200))]
        if choose.random() < 0.2:
            message = message[: choose.randint(1, 9)] * choose.randint(1, 40)
    said.append(message[:400])
    return message[:400]


def a_prompt(choose: random.Random, said: list[list[int]], vocabulary: int) -> tuple[list[int], list[Span]]:
    prompt: list[int] = []
    spans: list[Span] = []
    for _ in range(choose.randint(1, 6)):
        message = a_message(choose, said, vocabulary)
        if choose.random() < 0.7:
            end = len(prompt) + len(message)
            spans.append(Span(len(prompt), end, choose.choice(list(Source)[: Source.SHARED]), choose.choice("abc")))
        prompt += message
    return prompt, spans


def run(seed: int) -> None:
    choose = random.Random(seed)
    vocabulary = choose.choice([1, 2, 3, 10, 100, 40_000])
    shared = TrajectoryMemory(max_tokens=2048) if choose.random() < 0.5 else None
    memory = TrajectoryMemory(shared=shared, max_tokens=choose.choice([4096, 8192, 100_000]))
    said: list[list[int]] = []
    opened: list[Context] = []

    def close(context: Context) -> None:
        output = context.output.tolist()
        memory.close(context)
        assert (context.stored is None) == (not output)
        if context.stored is not None:
            held = memory.tokens[context.stored.start : context.stored.end].tolist()
            assert held == output[-memory.max_tokens // 2 :]
            said.append(output)

    for _ in range(choose.randint(3, 25)):
        what = choose.random()
        if what < 0.35 or not opened:
            prompt, spans = a_prompt(choose, said, vocabulary)
            context = memory.extend(prompt, spans)
            at = 0
            for start, end, place in context.layout.tolist():
                assert start <= at
                assert prompt[start:end] == memory.tokens[place : place + end - start].tolist()
                at = max(at, end)
            assert at == len(prompt)
            opened.append(context)
            if len(opened) > 4:
                close(opened.pop(0))
        elif what < 0.75:
            context = choose.choice(opened)
            matches = memory.match(context)
            if len(matches) and choose.random() < 0.7:
                row = choose.randrange(len(matches))
                memory.append(context, matches.copy(row, choose.randint(1, 40))[0])
            else:
                memory.append(context, [choose.randrange(vocabulary) for _ in range(choose.randint(1, 50))])
        elif what < 0.9:
            close(opened.pop(choose.randrange(len(opened))))
        elif what < 0.95:
            memory.seed(choose.choice(said))
        else:
            memory.forget_oldest(choose.randint(0, len(memory)))
        if choose.random() < 0.4:
            memory.check()
            if shared is not None:
                shared.check()
            for context in opened:
                compare(
                    memory,
                    context,
                    choose.choice([1, 2, 6]),
                    choose.choice([6, 16, 32]),
                    choose.choice([1, 4, 8]),
                )
    memory.check()
    again = TrajectoryMemory()
    again.restore(memory.snapshot())
    again.check()
    assert again.segments == memory.segments


@pytest.mark.fast
@pytest.mark.parametrize("seed", range(3))
def test_a_few(seed: int) -> None:
    run(seed)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_for_minutes() -> None:
    seed = int(os.environ.get("AGENTSPEC_FUZZ_SEED", "1000"))
    until = time.monotonic() + float(os.environ.get("AGENTSPEC_FUZZ_SECONDS", "600"))
    while time.monotonic() < until:
        try:
            run(seed)
        except Exception as failure:
            raise AssertionError(f"seed {seed}") from failure
        seed += 1
