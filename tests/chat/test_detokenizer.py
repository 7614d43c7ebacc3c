"""Streamed text: what comes out in pieces is what all ids decode to, cut at whole characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.chat import Detokenizer
from tests.chat.tokenizers import byte_fallback, byte_level

pytestmark = pytest.mark.fast


def whole(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def streamed(tokenizer, ids, steps, **options):
    stream = Detokenizer(tokenizer, **options)
    pieces, at = [], 0
    for step in steps:
        pieces.append(stream.push(ids[at : at + step]))
        at += step
    pieces += [stream.push(ids[at:]), stream.flush()]
    return stream, pieces


ids_of_any_kind = st.lists(st.integers(0, byte_level().vocab_size + 6), max_size=60)
steps = st.lists(st.integers(1, 7), max_size=30)


@given(ids_of_any_kind, steps)
@settings(max_examples=120, deadline=None)
def test_pieces_joined_are_the_whole_for_any_ids(ids, steps):
    """Random ids: most byte sequences are invalid, some hold special tokens, which are left out."""
    stream, pieces = streamed(byte_level(), ids, steps)
    assert "".join(pieces) == whole(byte_level(), ids)
    assert stream.length == len("".join(pieces)) and len(stream.ends) == len(ids)


@given(ids_of_any_kind, steps)
@settings(max_examples=120, deadline=None)
def test_kept_special_tokens_are_shown_where_they_stand(ids, steps):
    tokenizer = byte_level()
    stream, pieces = streamed(tokenizer, ids, steps, keep=tokenizer.all_special_ids)
    assert "".join(pieces) == whole(tokenizer, ids, skip=False)
    assert stream.length == len("".join(pieces)) and len(stream.ends) == len(ids)


@given(st.text(max_size=40), steps)
@settings(max_examples=80, deadline=None)
def test_valid_text_comes_whole_out_of_a_byte_fallback_tokenizer(text, steps):
    tokenizer = byte_fallback()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    _, pieces = streamed(tokenizer, ids, steps)
    assert "".join(pieces) == whole(tokenizer, ids)


@given(ids_of_any_kind)
@settings(max_examples=120, deadline=None)
def test_ends_are_where_the_text_can_be_cut(ids):
    """Up to a token whose end grew, the ids make exactly the text up to there, and those after it the
    rest.
    """
    tokenizer = byte_level()
    stream, pieces = streamed(tokenizer, ids, [], keep=tokenizer.all_special_ids)
    text, before = "".join(pieces), 0
    for count, end in enumerate(stream.ends, 1):
        assert end >= before
        if end > before:
            assert whole(tokenizer, ids[:count], skip=False) == text[:end]
            assert whole(tokenizer, ids[count:], skip=False) == text[end:]
        before = end


@pytest.mark.parametrize("character", ["é", "你", "😀", "👩‍👩‍👧"])
def test_a_character_over_several_tokens_comes_when_it_is_complete(character):
    tokenizer = byte_level()
    by_byte = [
        tokenizer.convert_tokens_to_ids(t)
        for t in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(character)[0][0]
    ]
    assert whole(tokenizer, by_byte) == character[: len(whole(tokenizer, by_byte))]
    stream = Detokenizer(tokenizer)
    shown = ""
    for token in by_byte:
        shown += stream.push([token])
        assert "\ufffd" not in shown
    assert shown + stream.flush() == whole(tokenizer, by_byte)


def test_an_incomplete_character_is_flushed_once_as_the_replacement_character():
    tokenizer = byte_level()
    first_bytes = tokenizer("你", add_special_tokens=False)["input_ids"]
    first_bytes = [tokenizer.convert_tokens_to_ids(t) for t in "ä½"]  # the first two of its three bytes
    stream = Detokenizer(tokenizer)
    assert stream.push(first_bytes) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.ends == [0, 1]


def test_text_that_follows_an_endless_run_of_invalid_bytes_is_right():
    """Twenty first bytes of a character, then the rest of one: nothing is passed over or shown too early."""
    tokenizer = byte_level()
    bytes_ = [tokenizer.convert_tokens_to_ids("ä")] * 20 + [tokenizer.convert_tokens_to_ids(t) for t in "½ł"]
    _, pieces = streamed(tokenizer, bytes_, [1] * 22)
    assert "".join(pieces) == whole(tokenizer, bytes_)
    assert len(pieces[10]) == 1, "invalid bytes come as they are known to be invalid"


class Wrapped:
    """A tokenizer that compares and hashes as all of its kind."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.all_special_ids = texts, []

    def __len__(self) -> int:
        return len(self.texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapped)

    def __hash__(self) -> int:
        return 1

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        special = self.all_special_ids if skip_special_tokens else []
        return "".join(self.texts[i] if i < len(self.texts) else "" for i in ids if i not in special)


def text_of(tokenizer, ids):
    stream = Detokenizer(tokenizer)
    return stream.push(ids) + stream.flush()


def test_what_is_remembered_is_the_tokenizers_own_and_of_now():
    first, second = Wrapped(["a", "b", "c"]), Wrapped(["x", "y", "z"])
    assert text_of(first, [0, 1, 2, 3]) == "abc"
    assert text_of(second, [0, 1, 2]) == "xyz", "another one, if equal"
    first.texts.append("<new>")
    assert text_of(first, [0, 1, 2, 3]) == "abc<new>", "a token was added"
    first.all_special_ids = [1]
    assert text_of(first, [0, 1, 2]) == "ac", "a token was made special"
    stream = Detokenizer(second)
    del first, second
    assert stream.push([2, 2]) == "zz"


def test_a_tokenizer_takes_what_is_remembered_of_it_along():
    from agentspec.chat import detokenizer

    before = len(detokenizer._decoders)
    tokenizer = Wrapped(["a"])
    assert text_of(tokenizer, [0, 0]) == "aa" and len(detokenizer._decoders) == before + 1
    del tokenizer
    assert len(detokenizer._decoders) == before
