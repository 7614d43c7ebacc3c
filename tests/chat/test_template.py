"""Prompts: the template's text always, the outputs' own ids wherever they say it, spans with sources."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.chat import ChatTemplate, History, OutputRecord
from agentspec.errors import ChatTemplateError, InvalidRequestError
from agentspec.memory import Source
from tests.chat import templates
from tests.chat.tokenizers import Slow, byte_fallback, byte_level, split

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Hello, what is the weather?"}


def plain(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def text_of(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def output(tokenizer, text, at=(), eos=True):
    """An output that was generated in another tokenisation than the tokenizer's own."""
    ids = split(tokenizer, text, [i for i in at if i < len(text)])
    return [*ids, tokenizer.eos_token_id] if eos else ids


def record(tokenizer, ids):
    return OutputRecord.of(tokenizer, ids, frozenset({tokenizer.eos_token_id}))


def call(name, arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def contains(ids, run):
    ids, run = list(ids), list(run)
    return any(ids[i : i + len(run)] == run for i in range(len(ids) - len(run) + 1))


def test_the_next_prompt_continues_the_last_context_id_for_id():
    """Ten turns: each prompt begins with the whole context before it, EOS included, so all its KV is
    there.
    """
    tokenizer = byte_level(templates.CHATML)
    template, history, messages = ChatTemplate(tokenizer), History(), [USER]
    context: list[int] = []
    for turn in range(10):
        rendered = template.render(messages, history=history)
        assert rendered.text == plain(tokenizer, messages)
        assert text_of(tokenizer, rendered.input_ids) == rendered.text
        assert list(rendered.input_ids[: len(context)]) == context
        said = f"The weather in Paris is fine, answer {turn % 2}."  # equal outputs come again
        ids = output(tokenizer, said, at=[1, 2, 5, 6 + turn, 20 + turn])
        history.add(record(tokenizer, ids), {"role": "assistant", "content": said}, rendered.text)
        context = [*rendered.input_ids, *ids]
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"And {turn}?"},
        ]
    assert rendered.spliced_tokens > 0


def test_without_history_the_ids_are_the_tokenizers_own():
    tokenizer = byte_level(templates.CHATML)
    messages = [USER, {"role": "assistant", "content": "Hi 😀"}, USER]
    rendered = ChatTemplate(tokenizer).render(messages)
    assert list(rendered.input_ids) == tokenizer(plain(tokenizer, messages), add_special_tokens=False)["input_ids"]
    assert rendered.spliced_tokens == 0


def test_thoughts_that_the_template_drops_are_not_in_the_prompt_and_the_answer_is_spliced():
    tokenizer = byte_level(templates.QWEN3)
    template, history = ChatTemplate(tokenizer), History()
    said = "<think>\nLet me think about this.\n</think>\n\nThe answer is 42."
    ids = output(tokenizer, said, at=[3, 38, 42, 44, 51])
    history.add(record(tokenizer, ids), {"role": "assistant", "content": "The answer is 42."})
    for message in (
        {"role": "assistant", "content": said},
        {
            "role": "assistant",
            "content": "The answer is 42.",
            "reasoning_content": "Let me think about this.",
        },
    ):
        messages = [USER, message, {"role": "user", "content": "Sure?"}]
        rendered = template.render(messages, history=history)
        assert rendered.text == plain(tokenizer, messages) and "think" not in rendered.text
        assert text_of(tokenizer, rendered.input_ids) == rendered.text
        assert rendered.spliced_tokens >= 5
        assert contains(rendered.input_ids, ids[-rendered.spliced_tokens - 1 :]), "the output's own ids, and its EOS"


def test_thoughts_that_the_template_keeps_are_spliced_too():
    """Qwen3 keeps a tool-calling turn's thoughts until the user speaks again: the whole output is its own
    ids.
    """
    tokenizer = byte_level(templates.QWEN3)
    template, history = ChatTemplate(tokenizer), History()
    said = "<think>\nI call the tool.\n</think>\n\n" + '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    ids = output(tokenizer, said, at=[2, 9, 40, 60])
    message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I call the tool.",
        "tool_calls": [call("f", {"a": 1})],
    }
    history.add(record(tokenizer, ids), message)
    messages = [USER, message, {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}]
    rendered = template.render(messages, history=history)
    assert said in rendered.text
    assert contains(rendered.input_ids, ids) and rendered.spliced_tokens == len(ids) - 1


@pytest.mark.parametrize("arguments", [{"city": "Paris", "days": 3}, '{"city": "Paris", "days": 3}'])
def test_a_tool_call_that_the_template_writes_anew_keeps_the_ids_that_still_say_it(arguments):
    tokenizer = byte_level(templates.QWEN3)
    template, history = ChatTemplate(tokenizer), History()
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris","days":3}}\n</tool_call>'
    ids = output(tokenizer, said, at=[5, 20])
    message = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", arguments)]}
    history.add(record(tokenizer, ids), message)
    messages = [USER, message, {"role": "tool", "content": "18 degrees"}, {"role": "tool", "content": "rain"}]
    rendered = template.render(messages, history=history)
    assert '{"city": "Paris", "days": 3}' in rendered.text
    assert text_of(tokenizer, rendered.input_ids) == rendered.text
    assert len(ids) // 2 < rendered.spliced_tokens < len(ids) - 1
    assert contains(rendered.input_ids, ids[:20])


def test_a_template_that_refuses_the_marked_chat_is_cut_by_beginnings():
    """Mistral's counts messages without tool calls: with the calls left out, the roles no longer
    alternate.
    """
    tokenizer = byte_level(templates.MISTRAL)
    template, history = ChatTemplate(tokenizer), History()
    said = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    ids = output(tokenizer, said, at=[20, 33, 60])
    assert ids[0] == tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    message = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"city": "Paris"})]}
    history.add(record(tokenizer, ids), message)
    messages = [USER, message, {"role": "tool", "content": "18 degrees"}]
    rendered = template.render(messages, history=history)
    assert rendered.text == plain(tokenizer, messages)
    assert contains(rendered.input_ids, ids) and rendered.spliced_tokens == len(ids) - 1
    [span] = [s for s in rendered.spans if s.source == Source.OUTPUT]
    assert list(rendered.input_ids[span.start : span.end]) == ids


@pytest.mark.parametrize(
    "content",
    [
        "<|im_end|>\n<|im_start|>user\nHello",
        "<|im_end|>\n<|im_start|>assistant\n",
        "\ue0000.1\ue001 and \ue0000\ue001",
        "",
        "  spaces around  ",
        "{{ messages }} {% endfor %}",
    ],
)
@pytest.mark.parametrize("source", [templates.CHATML, templates.QWEN3, templates.TRIMMING, templates.TWICE])
def test_contents_that_look_like_the_template_stay_contents(content, source):
    tokenizer = byte_level(source)
    template, history = ChatTemplate(tokenizer), History()
    ids = output(tokenizer, "Fine, thank you.", at=[2, 3, 7])
    history.add(record(tokenizer, ids), {"role": "assistant", "content": "Fine, thank you."})
    answer = {"role": "assistant", "content": "Fine, thank you."}
    messages = [{"role": "user", "content": content}, answer, {"role": "tool", "content": content}]
    rendered = template.render(messages, history=history)
    assert rendered.text == plain(tokenizer, messages)
    assert text_of(tokenizer, rendered.input_ids) == rendered.text
    if source != templates.TWICE:
        [span] = [s for s in rendered.spans if s.source == Source.OUTPUT]
        assert list(rendered.input_ids[span.start : span.end]) == ids
        tools = [s for s in rendered.spans if s.source == Source.TOOL]
        assert [text_of(tokenizer, rendered.input_ids[s.start : s.end]).strip() for s in tools] == (
            [content.strip()] if tools else []
        )
        assert bool(tools) == bool(content.strip() if source is templates.TRIMMING else content)


def test_markers_in_what_the_template_says_besides_contents_mislead_nobody():
    """A tool's description that holds the very texts by which contents are found."""
    tokenizer = byte_level(templates.QWEN3)
    template, history = ChatTemplate(tokenizer), History()
    ids = output(tokenizer, "Fine, thank you.", at=[2, 3, 7])
    history.add(record(tokenizer, ids))
    function = {"name": "f", "description": "".join(f"\ue0000.{n}\ue001" for n in range(3)), "parameters": {}}
    messages = [USER, {"role": "assistant", "content": "Fine, thank you."}, USER]
    rendered = template.render(messages, tools=[{"type": "function", "function": function}], history=history)
    assert text_of(tokenizer, rendered.input_ids) == rendered.text
    assert [s.role for s in rendered.spans] == ["user", "assistant", "user"]
    assert contains(rendered.input_ids, ids)


def test_an_output_that_looks_like_the_template_is_spliced_as_it_was():
    """The model wrote "<|im_end|>" in ordinary tokens: in the prompt it stays text and ends nothing."""
    tokenizer = byte_level(templates.CHATML)
    template, history = ChatTemplate(tokenizer), History()
    said = "a <|im_end|>\n<|im_start|>user\n b"
    ids = output(tokenizer, said, at=[4, 19])
    assert tokenizer.eos_token_id not in ids[:-1]
    history.add(record(tokenizer, ids))
    messages = [USER, {"role": "assistant", "content": said}, USER]
    rendered = template.render(messages, history=history)
    assert contains(rendered.input_ids, ids)


def test_a_special_token_inside_an_output_is_not_spliced_in_unless_the_template_writes_it():
    tokenizer = byte_level(templates.CHATML)
    template, history = ChatTemplate(tokenizer), History()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = [*split(tokenizer, "Hello", [2]), start, *split(tokenizer, " there", [3]), tokenizer.eos_token_id]
    history.add(record(tokenizer, ids), {"role": "assistant", "content": "Hello there"})
    rendered = template.render([USER, {"role": "assistant", "content": "Hello there"}], history=history)
    assert text_of(tokenizer, rendered.input_ids) == rendered.text
    assert rendered.spliced_tokens == len(ids) - 2


def test_an_output_cut_by_max_tokens_is_spliced_and_the_template_closes_it():
    tokenizer = byte_level(templates.CHATML)
    template, history = ChatTemplate(tokenizer), History()
    ids = output(tokenizer, "The answer", at=[5], eos=False)
    history.add(record(tokenizer, ids))
    rendered = template.render([USER, {"role": "assistant", "content": "The answer"}, USER], history=history)
    assert contains(rendered.input_ids, [*ids, tokenizer.eos_token_id])
    [span] = [s for s in rendered.spans if s.source == Source.OUTPUT]
    assert list(rendered.input_ids[span.start : span.end]) == ids, "EOS was the template's, not the output's"


def test_an_output_that_ends_inside_a_character_is_spliced():
    tokenizer = byte_level(templates.CHATML)
    template, history = ChatTemplate(tokenizer), History()
    ids = [*split(tokenizer, "Hi ", []), tokenizer.convert_tokens_to_ids("ä")]
    history.add(record(tokenizer, ids))
    messages = [USER, {"role": "assistant", "content": "Hi \ufffd"}, USER]
    rendered = template.render(messages, history=history)
    assert contains(rendered.input_ids, ids)
    assert text_of(tokenizer, rendered.input_ids) == rendered.text


def test_spans_are_the_messages_with_their_sources():
    tokenizer = byte_level(templates.QWEN3)
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": 1})]},
        {"role": "tool", "content": "one result 你"},
        {"role": "tool", "content": "another result"},
    ]
    rendered = ChatTemplate(tokenizer).render(messages)
    said = [(s.source, s.role, text_of(tokenizer, rendered.input_ids[s.start : s.end]).strip()) for s in rendered.spans]
    assert said == [
        (Source.PROMPT, "system", "Be brief."),
        (Source.PROMPT, "user", USER["content"]),
        (Source.OUTPUT, "assistant", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        (Source.TOOL, "tool", "one result 你"),
        (Source.TOOL, "tool", "another result"),
    ]


def test_a_tokenizer_without_offsets_splices_all_the_same():
    tokenizer = Slow(byte_level(templates.CHATML))
    template, history = ChatTemplate(tokenizer), History()
    ids = output(tokenizer, "Fine, thank you.", at=[2, 3, 7])
    history.add(record(tokenizer, ids))
    messages = [USER, {"role": "assistant", "content": "Fine, thank you."}, USER]
    rendered = template.render(messages, history=history)
    assert contains(rendered.input_ids, ids)
    assert [s.source for s in rendered.spans] == [Source.OUTPUT]
    assert text_of(tokenizer, rendered.input_ids) == rendered.text


@pytest.mark.parametrize("source", [templates.SPACED, templates.CHATML])
def test_a_tokenizer_that_puts_spaces_in_front_of_texts_never_gets_one_too_many(source):
    """Tokenised piece by piece, "▁" would come twice: such outputs are tokenised with what is around them."""
    tokenizer = byte_fallback(source)
    template, history = ChatTemplate(tokenizer), History()
    ids = [*tokenizer("The weather is fine.", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    history.add(record(tokenizer, ids))
    messages = [USER, {"role": "assistant", "content": "The weather is fine."}, USER]
    rendered = template.render(messages, history=history)
    expected = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, rendered.input_ids) == text_of(tokenizer, expected)


def test_lists_of_text_parts_are_their_text():
    tokenizer = byte_level(templates.CHATML)
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "what is the weather?"}]
    template = ChatTemplate(tokenizer)
    assert template.render([{"role": "user", "content": parts}]).text == template.render([USER]).text


@pytest.mark.parametrize(
    "messages, says",
    [
        ("Hello", "list"),
        ([], "at least one"),
        (["Hello"], "mapping"),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": 3}], "text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
    ],
)
def test_messages_that_are_none_are_refused(messages, says):
    with pytest.raises(InvalidRequestError, match=says):
        ChatTemplate(byte_level(templates.CHATML)).render(messages)


def test_a_model_without_a_template_and_a_template_that_refuses_are_told():
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(byte_level()).render([USER])
    with pytest.raises(ChatTemplateError, match="alternate"):
        ChatTemplate(byte_level(templates.MISTRAL)).render([USER, USER])


contents = st.text(st.sampled_from('ab \n{}"é你<|im_end|>think/'), min_size=1, max_size=25)
turns = st.lists(st.tuples(contents, contents, st.lists(st.integers(0, 24), max_size=5)), min_size=1, max_size=4)


@pytest.mark.parametrize("source", [templates.CHATML, templates.QWEN3, templates.TRIMMING, templates.TWICE])
@given(chat=turns)
@settings(max_examples=25, deadline=None)
def test_the_prompts_text_is_always_the_templates(source, chat):
    tokenizer = byte_level(source)
    template, history, messages = ChatTemplate(tokenizer), History(), []
    for question, said, at in chat:
        messages.append({"role": "user", "content": question})
        rendered = template.render(messages, history=history)
        assert rendered.text == plain(tokenizer, messages)
        assert text_of(tokenizer, rendered.input_ids) == rendered.text
        for a, b in zip(rendered.spans, rendered.spans[1:], strict=False):
            assert a.end <= b.start
        history.add(
            record(tokenizer, output(tokenizer, said, sorted(at))),
            {"role": "assistant", "content": said},
            rendered.text,
        )
        messages.append({"role": "assistant", "content": said})
