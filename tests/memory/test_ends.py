"""Which item a prompt continues: the longest end, the oldest of equals, never one that has gone on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.memory import Ends

pytestmark = pytest.mark.fast


def test_the_longest_end_comes_first_and_equals_by_age() -> None:
    ends: Ends[str] = Ends()
    ends.hold("short", "", b"ab")
    ends.hold("long", "", b"abc")
    ends.hold("younger", "", b"abc")
    ends.hold("other scope", "x", b"abcd")
    assert list(ends.continued("", b"abcde")) == ["long", "younger", "short"]
    assert list(ends.continued("", b"ab")) == ["short"]
    assert list(ends.continued("", b"a")) == []
    assert ends.oldest() == "short"


def test_what_is_forgotten_can_be_restored() -> None:
    ends: Ends[str] = Ends()
    ends.hold("a", "", b"one")
    ends.hold("a", "", b"two")
    gone = ends.forget("a")
    assert len(ends) == 0 and list(ends.continued("", b"one!")) == []
    ends.restore("a", gone)
    assert list(ends.continued("", b"one!")) == list(ends.continued("", b"two!")) == ["a"]
    assert ends.forget("unknown") == []


@given(st.lists(st.tuples(st.sampled_from("hfr"), st.integers(0, 3), st.text("ab", max_size=4)), max_size=40))
def test_against_plain_search(calls: list[tuple[str, int, str]]) -> None:
    ends: Ends[int] = Ends()
    held: list[tuple[int, bytes]] = []
    for kind, item, text in calls:
        seen = text.encode()
        if kind == "h":
            ends.hold(item, "", seen)
            held.append((item, seen))
        elif kind == "f":
            ends.forget(item)
            held = [(i, s) for i, s in held if i != item]
        ends.check()
        prompt = seen + b"a"
        expected = sorted(((i, s) for i, s in held if prompt.startswith(s)), key=lambda pair: -len(pair[1]))
        assert list(ends.continued("", prompt)) == [i for i, _ in expected]
