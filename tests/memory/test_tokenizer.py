"""Message marks read off chat templates, and vocabulary fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.memory import Source, Span, TrajectoryMemory
from agentspec.memory.tokenizer import MessageMark, MessageMarks, vocabulary_fingerprint
from tests.chat.tokenizers import byte_fallback, byte_level

pytestmark = pytest.mark.fast

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
LLAMA = (
    "{% for m in messages %}[INST]{{ m.role }}[/INST]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[INST]assistant[/INST]\n\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def encode(tokenizer: Any, chat: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


CHAT = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": "Let me call the tool."},
    {"role": "user", "content": "Do so."},
    {"role": "assistant", "content": "It says 42."},
    {"role": "user", "content": "\n\nThanks"},
]


@pytest.mark.parametrize(
    "text",
    [template("chatml"), template("qwen3"), LLAMA, THINKING],
    ids=["chatml", "qwen3", "llama", "thinking"],
)
def test_spans_are_the_messages(text: str) -> None:
    tokenizer = byte_level(text)
    ids = encode(tokenizer, CHAT)
    spans = MessageMarks.of(tokenizer).spans(ids)
    assert [span.role for span in spans] == ["user", "assistant", "user", "assistant", "user"]
    for span, message in zip(spans, CHAT, strict=True):
        said = tokenizer.decode(ids[span.start : span.end])
        if message["role"] == "assistant":
            assert span.source is Source.OUTPUT
            assert said == message["content"] + "<|im_end|>"
        else:
            assert span.source is Source.PROMPT
            assert said.strip() == message["content"].strip()


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_tool_results_are_told_apart(name: str) -> None:
    tokenizer = byte_level(template(name))
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    chat = [
        {"role": "system", "content": "Answer the question."},
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny, 42", "name": "get_weather"},
    ]
    ids = encode(tokenizer, chat)
    spans = MessageMarks.of(tokenizer).spans(ids)
    assert [(span.role, span.source) for span in spans if span.role != "assistant"] == [
        ("system", Source.PROMPT),
        ("user", Source.PROMPT),
        ("tool", Source.TOOL),
    ]
    assert "sunny, 42" in tokenizer.decode(ids[spans[-1].start : spans[-1].end])


def test_an_output_is_found_again_in_the_next_prompt() -> None:
    """What the plugin does: ids only, call after call; each adds its new message and its output, no more."""
    tokenizer = byte_level(template("chatml"))
    marks = MessageMarks.of(tokenizer)
    memory = TrajectoryMemory()
    chat = [CHAT[0]]
    for number in range(5):
        ids = encode(tokenizer, chat)
        context = memory.extend(ids, marks.spans(ids))
        if number > 1:  # the first two also bring the template's own text, as it begins and as it goes on
            assert [segment.role for segment in context.added] == ["user"]
        answer = f"Answer number {number}, which is unlike the others."
        memory.append(context, tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False))
        memory.close(context)
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"And {number * 17}?"}]
    memory.check()


def test_without_marks_there_are_no_spans() -> None:
    for tokenizer in (byte_level(), byte_fallback(template("chatml")), byte_level("{{ nonsense(1) }}")):
        marks = MessageMarks.of(tokenizer)
        assert marks.spans([1, 2, 3]) == [] and marks.spans([]) == []


def test_marks_by_hand() -> None:
    marks = MessageMarks(
        [
            MessageMark((90, 1), (5,), 91, Source.PROMPT, "user"),
            MessageMark((90, 1, 7), (), 91, Source.TOOL, "tool"),
            MessageMark((90, 2), (5,), 91, Source.OUTPUT, "assistant"),
        ]
    )
    ids = [90, 1, 5, 10, 91, 5, 90, 1, 7, 11, 12, 91, 90, 2, 5, 13, 91, 90, 3, 90, 1, 14, 91, 90, 2, 5]
    assert marks.spans(ids) == [
        Span(3, 4, Source.PROMPT, "user"),
        Span(9, 11, Source.TOOL, "tool"),
        Span(15, 17, Source.OUTPUT, "assistant"),
        Span(21, 22, Source.PROMPT, "user"),
    ]
    assert marks.spans([90, 1, 5, 13]) == [Span(3, 4, Source.PROMPT, "user")]  # cut off: no closer
    assert marks.spans([90, 2, 5, 13]) == []  # what the output is to follow
    assert marks.spans([90]) == []
    with pytest.raises(InvalidRequestError, match="empty opener"):
        MessageMarks([MessageMark((), (), -1, Source.PROMPT, "user")])


def test_fingerprints() -> None:
    class Fake:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.get_vocab = lambda: vocabulary

    first = vocabulary_fingerprint(Fake({"a": 0, "b": 1, "\ud800": 2}))
    assert first == vocabulary_fingerprint(Fake({"\ud800": 2, "b": 1, "a": 0}))
    assert first == "vocabulary-cc8f82e8dbd712ced3d25f0a6ab21871"  # files hold it: it must not change
    others = [{"a": 1, "b": 0, "\ud800": 2}, {"a": 0, "b": 1}, {"a": 0, "b": 1, "\ud801": 2}, {"a\n1:b": 0}]
    assert len({first, *(vocabulary_fingerprint(Fake(other)) for other in others)}) == 5
    with pytest.raises(InvalidRequestError, match="get_vocab"):
        vocabulary_fingerprint(object())
