"""Stopper: text, ids and reason end at the same token, however the tokens come; held-back text is flushed once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.engines.stops import Stopper

pytestmark = pytest.mark.fast


def feed(stopper: Stopper, ids: list[int]) -> tuple[int, str, list[str]]:
    """(how many ids were taken, the text, the pieces)"""
    pieces = []
    for taken, token in enumerate(ids, 1):
        reason = stopper.push(token)
        pieces.append(stopper.take())
        if reason:
            return taken, "".join(pieces), pieces
    return len(ids), "".join(pieces), pieces


def test_eos_ends_and_shows_nothing(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("The fox").input_ids
    stopper = Stopper(tiny_tokenizer, {2}, 100)
    taken, text, _ = feed(stopper, [*ids, 2, *ids])
    assert (taken, text, stopper.finish_reason, stopper.stop_reason) == (
        len(ids) + 1,
        "The fox",
        "stop",
        None,
    )


def test_max_tokens_flushes_an_incomplete_character(tiny_tokenizer: Any) -> None:
    ids = [i for c in "é".encode() for i in tiny_tokenizer.convert_tokens_to_ids([chr_of(c)])]
    stopper = Stopper(tiny_tokenizer, {2}, 1)
    taken, text, _ = feed(stopper, ids)
    assert (taken, text, stopper.finish_reason) == (1, "\ufffd", "length")


def chr_of(byte: int) -> str:
    """How byte-level BPE writes a byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    text = bytes([byte]).decode("latin-1")
    if byte < 128:
        return ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def test_multibyte_characters_come_out_whole(tiny_tokenizer: Any) -> None:
    ids = [i for c in "a😀b".encode() for i in tiny_tokenizer.convert_tokens_to_ids([chr_of(c)])]
    assert len(ids) == 6
    _, text, pieces = feed(Stopper(tiny_tokenizer, {2}, 100), ids)
    assert text == "a😀b"
    assert pieces == ["a", "", "", "", "😀", "b"]


def test_stop_text_inside_a_token_cuts_the_text_not_the_token(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("The quick brown fox").input_ids
    stopper = Stopper(tiny_tokenizer, {2}, 100, texts=["ick b"])
    taken, text, _ = feed(stopper, ids)
    assert text == "The qu"
    assert tiny_tokenizer.decode(ids[:taken]).find("ick b") >= 0
    assert tiny_tokenizer.decode(ids[: taken - 1]).find("ick b") < 0
    assert stopper.stop_reason == "ick b"


def test_a_beginning_that_leads_nowhere_is_shown(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("aab aab aac").input_ids
    stopper = Stopper(tiny_tokenizer, {2}, len(ids), texts=["aac!"])
    _, text, _ = feed(stopper, ids)
    assert text == "aab aab aac"
    assert stopper.finish_reason == "length"


def test_stop_sequences_of_ids(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("The quick brown fox jumps over").input_ids
    for length in (1, 2, 3):
        for at in range(len(ids) - length):
            sequence = tuple(ids[at : at + length])
            stopper = Stopper(tiny_tokenizer, {2}, 100, sequences=[sequence])
            taken, text, _ = feed(stopper, ids)
            first = next(i for i in range(len(ids)) if tuple(ids[i : i + length]) == sequence)
            assert taken == first + length
            assert text == tiny_tokenizer.decode(ids[:first])
            assert stopper.stop_reason == sequence


def test_overlapping_sequences(tiny_tokenizer: Any) -> None:
    a, b = tiny_tokenizer("a").input_ids[0], tiny_tokenizer("b").input_ids[0]
    stopper = Stopper(tiny_tokenizer, {2}, 100, sequences=[(a, a, b)])
    assert feed(stopper, [a, a, a, b, b])[:2] == (4, "a")


def test_min_tokens_lets_early_stops_pass(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("x.y.z.").input_ids
    stopper = Stopper(tiny_tokenizer, {2}, 100, texts=["."], min_tokens=3)
    taken, text, _ = feed(stopper, ids)
    assert (taken, text) == (4, "x.y")


def test_of_two_stops_the_one_that_ends_first(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("abcdef").input_ids
    assert feed(Stopper(tiny_tokenizer, {2}, 99, texts=["def", "bc"]), ids)[1] == "a"
    assert feed(Stopper(tiny_tokenizer, {2}, 99, texts=["c", "bc", "abc"]), ids)[1] == ""


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_equals_the_definition(tiny_tokenizer: Any, data: st.DataObject) -> None:
    """Against brute force: the first token at which a stop is complete; the pieces join to the text before it; nothing
    is shown that a stop would have cut."""
    ids = data.draw(st.lists(st.sampled_from(tiny_tokenizer("ab aab é, abba\n😀 The quick").input_ids), max_size=30))
    whole = tiny_tokenizer.decode(ids)
    texts = data.draw(st.lists(st.text("ab é,T", min_size=1, max_size=4), max_size=3))
    if whole and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        texts.append(whole[at : at + data.draw(st.integers(1, 5))])
    limit = data.draw(st.integers(1, 30))
    stopper = Stopper(tiny_tokenizer, {2}, limit, texts=texts)
    taken, text, _ = feed(stopper, ids)

    plain = Stopper(tiny_tokenizer, {2}, limit)
    _, unstopped, parts = feed(plain, ids)
    so_far = ""
    for number, part in enumerate(parts, 1):
        old, so_far = len(so_far), so_far + part
        found = [
            (start + len(s), start)
            for s in texts
            for start in range(len(so_far))
            if so_far.startswith(s, start) and start + len(s) > old
        ]
        if found:
            assert (taken, text, stopper.finish_reason) == (number, so_far[: min(found)[1]], "stop")
            return
    assert taken == min(len(ids), limit)
    if stopper.finish_reason:
        assert text == unstopped
    else:
        assert unstopped.startswith(text)
        held = unstopped[len(text) :]
        assert not held or any(s.startswith(held) for s in texts)
