"""Which trajectory a request joins, who is never merged, and the byte budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_agentspec.trajectories import TrajectoryBook

pytestmark = pytest.mark.fast


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def run_call(book: TrajectoryBook, prompt: np.ndarray, output: np.ndarray, scope: str = "", name: str | None = None):
    trajectory = book.open(scope, name, prompt)
    context = trajectory.memory.extend(prompt)
    trajectory.memory.append(context, output)
    trajectory.memory.close(context)
    book.close(trajectory, np.concatenate([prompt, output]))
    return trajectory


def test_a_prompt_that_extends_prompt_and_output_is_the_next_call() -> None:
    book = TrajectoryBook(10**8)
    first = run_call(book, tokens(1, 2, 3), tokens(4, 5))
    assert book.open("", None, tokens(1, 2, 3, 4, 5, 6)) is first


def test_a_prompt_that_leaves_the_output_out_is_another_trajectory() -> None:
    book = TrajectoryBook(10**8)
    first = run_call(book, tokens(1, 2, 3), tokens(4, 5))
    assert book.open("", None, tokens(1, 2, 3, 4, 6, 6)) is not first
    assert book.open("", None, tokens(1, 2, 3)) is not first


def test_a_trajectory_that_went_on_cannot_be_claimed_at_an_older_end() -> None:
    """Else a user who guesses somebody's first call would draft from the later ones."""
    book = TrajectoryBook(10**8)
    first = run_call(book, tokens(1, 2, 3), tokens(4, 5))
    second = run_call(book, tokens(1, 2, 3, 4, 5, 6), tokens(7))
    assert second is first
    assert book.open("", None, tokens(1, 2, 3, 4, 5, 8)) is not first


def test_two_users_with_the_same_first_call_stay_apart() -> None:
    book = TrajectoryBook(10**8)
    a = run_call(book, tokens(1, 2), tokens(3))
    b = run_call(book, tokens(1, 2), tokens(3))
    assert a is not b
    next_a = run_call(book, tokens(1, 2, 3, 10), tokens(11))
    next_b = run_call(book, tokens(1, 2, 3, 20), tokens(21))
    assert {id(next_a), id(next_b)} == {id(a), id(b)}
    assert 21 not in next_a.memory.tokens and 11 not in next_b.memory.tokens


def test_scopes_never_meet() -> None:
    book = TrajectoryBook(10**8)
    a = run_call(book, tokens(1, 2), tokens(3), scope="a", name="session:x")
    assert book.open("b", "session:x", tokens(1, 2)) is not a
    followed = run_call(book, tokens(1, 2), tokens(3), scope="a")
    assert book.open("b", None, tokens(1, 2, 3, 4)) is not followed


def test_a_name_cannot_be_forged_into_a_followed_one() -> None:
    book = TrajectoryBook(10**8)
    followed = run_call(book, tokens(1, 2), tokens(3))
    assert book.open("", f"custom:{followed.id}", tokens(9)) is not followed


def test_an_aborted_call_is_no_place_to_join() -> None:
    book = TrajectoryBook(10**8)
    trajectory = book.open("", None, tokens(1, 2))
    book.close(trajectory, None)
    assert book.open("", None, tokens(1, 2, 3)) is not trajectory


def test_named_trajectories_are_joined_by_name_only() -> None:
    book = TrajectoryBook(10**8)
    named = run_call(book, tokens(1, 2), tokens(3), name="session:x")
    assert book.open("", None, tokens(1, 2, 3, 4)) is not named
    assert book.open("", "session:x", tokens(8, 9)) is named


def test_the_budget_is_kept_and_running_calls_stay() -> None:
    book = TrajectoryBook(2_000_000)
    running = book.open("", "session:running", tokens(1))
    context = running.memory.extend(np.arange(5000, dtype=np.int32))
    for number in range(60):
        run_call(book, np.arange(5000, dtype=np.int32) + number, tokens(1, 2), name=f"session:{number}")
    assert book.store.evictions > 0 and book.nbytes <= 2_000_000
    assert book.open("", "session:running", tokens(2)) is running
    assert len(running.memory) >= 5000
    running.memory.close(context)


def test_an_evicted_trajectory_is_not_joined_and_leaves_nothing_behind() -> None:
    book = TrajectoryBook(2**20)
    first = run_call(book, np.arange(3000, dtype=np.int32), tokens(1))
    ends = []
    for number in range(300):
        prompt = np.arange(3000, dtype=np.int32) + 10 + number
        run_call(book, prompt, tokens(2))
        ends.append(prompt)
    assert first.key not in book.store
    again = book.open("", None, np.concatenate([np.arange(3000, dtype=np.int32), tokens(1, 5)]))
    assert again is not first
    assert len(book._trajectories) <= 64 + 2 * len(book.store) + 1
    assert len(book._ends) <= len(book._trajectories)
    book._ends.check()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=30))
def test_bookkeeping_balances(calls: list[tuple[int, int, bool]]) -> None:
    """Whatever order calls come in: what can be joined is counted right."""
    book = TrajectoryBook(10**8)
    last = {scope: tokens(scope) for scope in range(3)}
    for scope, output, abort in calls:
        prompt = last[scope]
        trajectory = book.open(str(scope), None, prompt)
        seen = np.concatenate([prompt, np.full(output + 1, output, dtype=np.int32)])
        book.close(trajectory, None if abort else seen)
        if not abort:
            last[scope] = seen
        book._ends.check()
    assert len(book._ends) <= len(book._trajectories)
