"""Exact history's parts: which of an output's ids a rendered message still says, and which output it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.chat import History, OutputRecord
from agentspec.chat.history import align
from tests.chat.tokenizers import byte_level, split

pytestmark = pytest.mark.fast

EOS = frozenset({byte_level().eos_token_id})


def record(text, at=(), eos=True):
    tokenizer = byte_level()
    ids = split(tokenizer, text, [i for i in sorted(at) if i < len(text)])
    return OutputRecord.of(tokenizer, [*ids, *EOS] if eos else ids, EOS)


def decoded(pieces):
    tokenizer = byte_level()
    ids = []
    for piece in pieces:
        ids += list(piece) if isinstance(piece, tuple) else tokenizer(piece, add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def own(pieces):
    return sum(len(p) for p in pieces if isinstance(p, tuple))


texts = st.text(st.sampled_from('ab \n{}:"é你😀<>/think'), max_size=30)


@given(texts, texts, texts, texts, st.lists(st.integers(0, 60), max_size=8))
@settings(max_examples=150, deadline=None)
def test_the_pieces_are_the_rendered_span(shared, middle, other, tail, at):
    """Whatever the record says and the template made of it: joined, the pieces say what was rendered."""
    output = record(shared + middle + tail, at)
    rendered = shared + other + tail
    assert decoded(align(output, rendered)) == rendered


@given(
    st.lists(st.integers(0, byte_level().vocab_size + 6), max_size=40),
    texts,
    st.integers(0, 40),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_the_pieces_are_the_rendered_span_for_any_ids(ids, other, start, stop):
    """Outputs of random ids: invalid bytes, special tokens in the middle."""
    output = OutputRecord.of(byte_level(), ids, EOS)
    rendered = output.text[:start] + other + output.text[stop:]
    if "\ufffd" in rendered and rendered != output.text:
        # Bytes that are invalid here can be valid beside other bytes: the template checks such splices as
        # they stand.
        return
    assert decoded(align(output, rendered)) == rendered


@given(texts, st.lists(st.integers(0, 60), max_size=8))
@settings(max_examples=150, deadline=None)
def test_an_output_rendered_as_it_was_is_its_own_ids(text, at):
    output = record(text, at)
    assert align(output, output.text) == ([output.ids] if output.ids else [])


def test_dropped_thoughts_keep_the_answer():
    output = record("<think>\nwhat now\n</think>\n\nThe answer is 42.", at=[30, 33, 38])
    pieces = align(output, "The answer is 42.")
    assert decoded(pieces) == "The answer is 42."
    assert isinstance(pieces[-1], tuple) and own(pieces) >= len(output.ids) - 25
    answer = record("The answer is 42.", at=[])
    assert own(pieces) >= len(answer.ids) - 2


def test_a_call_written_anew_keeps_what_is_the_same():
    output = record('<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris","days":3}}\n</tool_call>')
    anew = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
    pieces = align(output, anew)
    assert decoded(pieces) == anew
    assert isinstance(pieces[0], tuple) and isinstance(pieces[-1], tuple)
    assert own(pieces) > len(output.ids) // 2


def test_trimmed_white_space_on_both_sides_keeps_what_is_between():
    output = record("\n\nThe answer is 42. \n", at=[2, 19])
    pieces = align(output, "The answer is 42.")
    assert decoded(pieces) == "The answer is 42."
    assert len(pieces) == 1 and isinstance(pieces[0], tuple)


def test_a_cut_never_goes_through_a_character():
    tokenizer = byte_level()
    ids = [tokenizer.convert_tokens_to_ids(t) for t in "ä½ł"] + [tokenizer.convert_tokens_to_ids("a")]
    output = OutputRecord.of(tokenizer, ids, EOS)
    assert output.text == "你a"
    for rendered in ("你b", "b你a", "你", "a", "x你", "你x你a"):
        assert decoded(align(output, rendered)) == rendered


# ---- History -------------------------------------------------------------------------------------


def find(history, text, prompt="", taken=None, **message):
    return history.find(
        {"role": "assistant", "content": text, **message}, text, prompt, set() if taken is None else taken
    )


def test_an_output_is_found_by_its_text_or_by_its_message():
    history = History()
    said, called = record("Hello"), record('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>')
    history.add(said)
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    history.add(called, {"role": "assistant", "content": "", "tool_calls": calls})
    assert find(history, "Hello") is said
    assert find(history, " Hello\n") is said
    assert find(history, "Hallo") is None
    written = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    message = {"role": "assistant", "content": None, "tool_calls": written}
    assert history.find(message, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", set()) is called


def test_equal_outputs_are_found_in_the_order_in_which_they_came():
    history = History()
    first, second = record("Hello", at=[3]), record("Hello", at=[1, 2])
    assert first.ids != second.ids
    history.add(first)
    history.add(second)
    taken: set[int] = set()
    assert find(history, "Hello", taken=taken) is first
    assert find(history, "Hello", taken=taken) is second
    assert find(history, "Hello") is first, "another rendering begins anew"


def test_an_equal_output_is_found_by_the_prompt_that_it_answered():
    """The first was trimmed away, or abandoned for a retry: order alone would give the wrong one."""
    history = History()
    first, second = record("Hello", at=[3]), record("Hello", at=[1, 2])
    history.add(first, prompt="one")
    history.add(second, prompt="two")
    assert find(history, "Hello", prompt="two") is second
    assert find(history, "Hello", prompt="one") is first


def test_the_oldest_outputs_go_first():
    history = History(limit=3)
    for number in range(10):
        history.add(record(f"text {number % 5}"), {"role": "assistant", "content": f"text {number % 5}"})
    assert len(history) == 3
    assert find(history, "text 1") is None
    assert all(find(history, f"text {n}") is not None for n in (2, 3, 4))
    assert len(history._by_text) == 3 and len(history._by_message) == 3
