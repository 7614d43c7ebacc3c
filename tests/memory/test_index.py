"""index.py against the oracle: random and degenerate input, every option."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agentspec.errors import IntegrityError, InvalidRequestError, MemoryBudgetError
from agentspec.memory import Context, Place, Source, Span, TrajectoryMemory
from agentspec.memory.index import LEAD, MAX_TOKENS, ORDERS, SEAM, MatchIndex
from tests.memory import oracle

pytestmark = pytest.mark.fast


def compare(
    memory: TrajectoryMemory, context: Context, min_match: int = 1, max_match: int = 32, recent: int = 4
) -> list[oracle.Row]:
    """Assert that match finds what the oracle finds; returns the rows."""

    def parts(held: TrajectoryMemory | None) -> tuple[list[int], list[tuple[int, int, int]]]:
        if held is None:
            return [], []
        return held.tokens.tolist(), [(s.start, s.end, int(s.source)) for s in held.segments]

    matches = memory.match(context, min_match, max_match, recent)
    columns = (matches.places, matches.positions, matches.lengths, matches.sources, matches.ends)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = oracle.find(
        context.tokens.tolist(),
        context.prompt_length,
        *parts(memory),
        *parts(memory.shared),
        min_match,
        max_match,
        recent,
    )
    assert found == expected
    return expected


def fibonacci_word(length: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


DEGENERATE = {
    "one token": [7],
    "equal": [7] * 300,
    "period two": [3, 4] * 150,
    "period nine": list(range(9)) * 40,
    "distinct": list(range(400)),
    "fibonacci": fibonacci_word(300),
    "largest ids": [2**31 - 1, 2**31 - 2] * 40 + [0, 2**31 - 1],
    "a run after a run": [1] * 50 + [2] + [1] * 50 + [3] + [1] * 50,
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_input(name: str) -> None:
    tokens = DEGENERATE[name]
    memory = TrajectoryMemory()
    memory.close(memory.extend(tokens))
    context = memory.extend(tokens[: len(tokens) // 2] or tokens)
    for token in tokens[len(tokens) // 2 :][:60]:
        memory.append(context, [token])
        compare(memory, context)
        compare(memory, context, min_match=3, max_match=9, recent=2)
    memory.check()


@pytest.mark.parametrize("seed", range(40))
def test_random_input(seed: int) -> None:
    random_ = random.Random(seed)
    vocabulary = random_.choice([1, 2, 3, 8, 50])
    memory = TrajectoryMemory(shared=TrajectoryMemory() if seed % 2 else None)
    context = memory.extend([0])
    for _ in range(25):
        tokens = [random_.randrange(vocabulary) for _ in range(random_.randint(1, 40))]
        if random_.random() < 0.6:
            memory.append(context, tokens)
        else:
            memory.close(context)
            context = memory.extend(tokens, [Span(0, len(tokens) // 2, Source.TOOL, "tool")])
        compare(
            memory,
            context,
            min_match=random_.choice([1, 2, 5]),
            max_match=random_.choice([5, 7, 8, 16, 32]),
            recent=random_.choice([1, 2, 5, 64]),
        )
    memory.check()


def test_the_table_grows_and_stays_exact() -> None:
    tokens = np.random.default_rng(1).integers(0, 400, 20_000).astype(np.int32)
    memory = TrajectoryMemory()
    memory.close(memory.extend(tokens))
    memory.check()
    context = memory.extend(tokens[:9000])
    expected = compare(memory, context)
    assert expected[0][1] == 9000 and expected[0][2] == 32


def test_the_longest_agreement_comes_first_then_the_most_recent() -> None:
    memory = TrajectoryMemory()
    memory.seed([9, 1, 2, 3, 50])
    memory.seed([8, 1, 2, 3, 51])
    memory.seed([7, 7, 2, 3, 52])
    context = memory.extend([4, 9, 1, 2, 3])
    rows = [(row[1], row[2]) for row in compare(memory, context)]
    assert [agreement for _, agreement in rows[:2]] == [4, 3]
    assert memory.match(context).copy(0, 5)[0].tolist() == [50]


def test_a_match_needs_a_token_that_followed() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([1, 2, 3])
    assert len(memory.match(context)) == 0


def test_copies_stop_at_the_end_of_a_segment() -> None:
    memory = TrajectoryMemory()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    context = memory.extend([*prompt, 1, 2], [Span(0, 5, Source.TOOL, "tool")])
    matches = memory.match(context)
    tokens, source = matches.copy(0, 10)
    assert tokens.tolist() == [3, 4, 5] and source is Source.TOOL
    assert memory.copy(2, 10)[0].tolist() == [3, 4, 5]


def test_a_copy_of_the_own_output_goes_on_periodically() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([100])
    memory.append(context, [1, 2, 3, 1, 2])
    matches = memory.match(context)
    assert matches.places[0] == Place.OUTPUT
    tokens, source = matches.copy(0, 8)
    assert tokens.tolist() == [3, 1, 2, 3, 1, 2, 3, 1] and source is Source.CURRENT
    memory.append(context, [2, 2])
    assert memory.match(context).copy(0, 4)[0].tolist() == [2, 2, 2, 2]


def test_matching_is_bounded_on_a_million_equal_tokens() -> None:
    memory = TrajectoryMemory()
    context = memory.extend(np.zeros(1_000_000, np.int32))
    matches = memory.match(context)
    assert matches.positions.tolist() == [999_999, 999_998, 999_997, 999_996]
    assert set(matches.lengths.tolist()) == {16}


def test_bad_options_are_refused() -> None:
    memory = TrajectoryMemory()
    context = memory.extend([1])
    for options in ({"min_match": 0}, {"min_match": 3, "max_match": 2}, {"recent": 0}, {"recent": 65}):
        with pytest.raises(InvalidRequestError, match="match: needed"):
            memory.match(context, **options)


def test_check_notices_a_broken_index() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 3] * 4

    def broken() -> MatchIndex:
        index = MatchIndex()
        index.append(np.array(tokens, np.int32))
        index.check([(0, len(tokens))])
        return index

    index = broken()
    index.links[20, 1] -= 1
    with pytest.raises(IntegrityError, match="link 1 of 20"):
        index.check([(0, len(tokens))])
    index = broken()
    index.table[np.flatnonzero(index.table >= 0)[0]] = -1
    with pytest.raises(IntegrityError):
        index.check([(0, len(tokens))])
    index = broken()
    index.tokens[3] = 9
    with pytest.raises(IntegrityError):
        index.check([(0, len(tokens))])
    index = broken()
    index.used[0] += 1
    with pytest.raises(IntegrityError, match="counted"):
        index.check([(0, len(tokens))])


def test_a_memory_beyond_the_position_bits_is_refused() -> None:
    index = MatchIndex()
    with pytest.raises(MemoryBudgetError, match="start a new trajectory"):
        index._reserve(MAX_TOKENS + 1)


def test_constants_agree() -> None:
    assert tuple(sorted(ORDERS)) == ORDERS and ORDERS[-1] <= LEAD and SEAM == -1
