"""MatchProposer and its acceptance table: copies, odds, widths."""

from __future__ import annotations

import numpy as np
import pytest

from agentspec.drafting import DraftLimits, MatchProposer
from agentspec.drafting.acceptance import AcceptanceTable, judge, widest_paying
from agentspec.drafting.policy import LOCAL, NO_COST
from agentspec.memory import TrajectoryMemory
from agentspec.testing import scripted_calls

pytestmark = pytest.mark.fast


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("shared", [False, True])
def test_the_copy_is_the_first_match_and_what_followed_it(shared: bool) -> None:
    random = np.random.default_rng(3)
    other = TrajectoryMemory("s") if shared else None
    memory = TrajectoryMemory("t", "n" if shared else None, shared=other)
    if other is not None:
        other.publish(random.integers(0, 6, 300, dtype=np.int32), 0, 300)
    seen = 0
    for prompt, spans, output in scripted_calls(3):
        context = memory.extend(np.concatenate([prompt, random.integers(0, 6, 40, dtype=np.int32)]), spans)
        for at in range(0, len(output), 3):
            memory.append(context, output[at : at + 3])
            memory.append(context, random.integers(0, 6, int(random.integers(1, 5)), dtype=np.int32))
            for least, most in ((1, 32), (2, 4), (6, 16)):
                matches = memory.match(context, least, most)
                tokens, agreement, source = memory.copy_longest(context, least, most, 20)
                if not len(matches):
                    assert (len(tokens), agreement, source) == (0, 0, 0)
                    continue
                expected, origin = matches.copy(0, 20)
                assert tokens.tolist() == expected.tolist()
                assert (agreement, source) == (int(matches.lengths[0]), int(origin))
                seen += 1
        memory.close(context)
    assert seen > 50


def test_a_copy_of_the_own_output_repeats_itself() -> None:
    memory = TrajectoryMemory("t")
    context = memory.extend(ids(1, 2))
    memory.append(context, ids(7, 8, 9, 7, 8, 9))
    assert memory.copy_longest(context, 1, 32, 8)[0].tolist() == [7, 8, 9, 7, 8, 9, 7, 8]


def test_the_width_is_the_shortest_that_gains_most() -> None:
    """Against the definition, written with numpy."""
    random = np.random.default_rng(5)
    table = AcceptanceTable()
    for _ in range(200):
        count = int(random.integers(1, 20))
        agreement, source = int(random.integers(1, 40)), int(random.integers(0, 8))
        price = np.concatenate([[0.0], np.cumsum(random.uniform(-0.05, 0.9, count))])
        paths = np.empty(count, np.float32)
        width = widest_paying(table.cells, agreement, source, count, price, NO_COST, paths)
        gains = np.concatenate([[0.0], np.cumsum(table.chain(agreement, source, count), dtype=np.float64)])
        assert (gains - price)[width] == pytest.approx(max((gains - price).max(), 0.0), abs=1e-6)
        assert np.all(np.diff(paths) <= 0.0)
        cost = 1.1 + np.concatenate([[0.0], np.cumsum(random.uniform(0.0, 0.9, count))])
        price = 1.5 * (cost - cost[0])
        width = widest_paying(table.cells, agreement, source, count, price, cost, paths)
        gains -= (1.0 - LOCAL) * price + LOCAL * ((1.0 + gains) / cost).max() * (cost - cost[0])
        assert gains[width] == pytest.approx(gains.max(), abs=1e-6)


def test_odds_follow_what_came() -> None:
    table = AcceptanceTable()
    before = table.chain(4, 1, 1)[0]
    for _ in range(50):
        judge(table.cells, 4, 1, ids(5, 6), ids(5, 6))
    assert table.chain(4, 1, 1)[0] > before
    for _ in range(2000):
        judge(table.cells, 4, 1, ids(5, 6), ids(9))
    assert table.chain(4, 1, 1)[0] < 0.02
    assert table.cells[1].max() <= 401.0
    assert table.chain(4, 2, 1)[0] == before  # another source's odds are its own


def test_after_a_mismatch_nothing_is_learned_of_what_follows() -> None:
    table = AcceptanceTable()
    judge(table.cells, 1, 0, ids(5, 6, 7), ids(5, 9, 7))
    assert (table.cells[1, 0] - AcceptanceTable().cells[1, 0]).tolist()[:4] == [1.0, 1.0, 0.0, 0.0]


def test_drafts_are_cut_by_every_limit() -> None:
    memory = TrajectoryMemory("t")
    context = memory.extend(np.tile(np.arange(3, 40, dtype=np.int32), 3))
    proposer = MatchProposer(max_draft=12)
    proposer.begin(context)
    for most, deepest, expected in ((64, 64, 12), (5, 64, 5), (64, 4, 4), (0, 0, 0)):
        draft = proposer.propose(context, DraftLimits(most, deepest, False, np.zeros(most + 1)))
        assert len(draft) == expected
        draft.check(DraftLimits(most, deepest, False, np.zeros(most + 1)), 100)
    dear = np.arange(65) * 2.0
    assert len(proposer.propose(context, DraftLimits(64, 64, False, dear))) == 0
