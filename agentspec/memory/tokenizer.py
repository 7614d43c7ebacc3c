"""What the memory has to know of a tokenizer: its fingerprint, and how its chat template marks messages.

Called by engines and the SGLang plugin. Imports no tokenizer library: a transformers tokenizer (or anything
with the same few methods) is passed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import InvalidRequestError
from agentspec.memory.segments import Source, Span, as_tokens

__all__ = ["MessageMark", "MessageMarks", "vocabulary_fingerprint"]


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """Names what a tokenizer's ids mean: the same for two tokenizers exactly if every id is the same token.

    Needs tokenizer.get_vocab() -> {token: id}; about 50 ms for 50,000. Raises InvalidRequestError without it.
    """
    vocabulary = getattr(tokenizer, "get_vocab", None)
    if vocabulary is None:
        raise InvalidRequestError(
            f"vocabulary_fingerprint: needed a tokenizer with get_vocab(), got {type(tokenizer).__name__}"
        )
    digest = hashlib.blake2b(digest_size=16)
    for number, token in sorted((int(number), str(token)) for token, number in vocabulary().items()):
        digest.update(f"{number}:{len(token)}:{token}\n".encode("utf-8", "surrogatepass"))
    return f"vocabulary-{digest.hexdigest()}"


@dataclass(slots=True, frozen=True)
class MessageMark:
    """How one kind of message begins and ends.

    opener: ids in front of the content, a special token among them
    tail:   ids of white space that the template puts behind the opener; part of the opener where they stand
            there (before some contents they melt into a longer token)
    closer: the special token behind the content, -1 if there is none
    """

    opener: tuple[int, ...]
    tail: tuple[int, ...]
    closer: int
    source: Source
    role: str


class MessageMarks:
    """Cuts a prompt that came as token ids alone into messages, by its chat template's special tokens.

        marks = MessageMarks.of(tokenizer)      # once
        context = memory.extend(ids, marks.spans(ids))

    An assistant's span is what was generated: the closer (the end-of-turn token) belongs to it. Other spans
    are the content alone. Without marks (no chat template, or one without special tokens) there are no spans,
    and the memory lays the prompt run by run.
    """

    def __init__(self, marks: Iterable[MessageMark]) -> None:
        self.marks = tuple(sorted(marks, key=lambda mark: (-len(mark.opener), mark.opener)))
        for mark in self.marks:
            if not mark.opener:
                raise InvalidRequestError(f"marks: {mark.role!r} has an empty opener")
        self._first = np.array(sorted({mark.opener[0] for mark in self.marks}), dtype=np.int32)

    @classmethod
    def of(cls, tokenizer: Any) -> MessageMarks:
        """Read the marks off a tokenizer's chat template, by rendering small chats; some milliseconds."""
        return cls(_read_marks(tokenizer))

    def spans(self, prompt: Sequence[int] | NDArray[Any]) -> list[Span]:
        """The messages in a prompt (int32[n]), in order. O(n) in numpy, and some microseconds a message."""
        ids = as_tokens(prompt, "prompt")
        found: list[tuple[int, int, MessageMark]] = []  # where the opener starts, where the content does
        opened = 0
        for at in np.flatnonzero(np.isin(ids, self._first)).tolist():
            if at < opened:
                continue
            for mark in self.marks:
                end = at + len(mark.opener)
                if tuple(ids[at:end].tolist()) == mark.opener:
                    if mark.tail and tuple(ids[end : end + len(mark.tail)].tolist()) == mark.tail:
                        end += len(mark.tail)
                    found.append((at, end, mark))
                    opened = end
                    break
        spans = []
        for number, (_, start, mark) in enumerate(found):
            end = found[number + 1][0] if number + 1 < len(found) else len(ids)
            closers = np.flatnonzero(ids[start:end] == mark.closer)
            if len(closers):
                end = start + int(closers[-1]) + (mark.source is Source.OUTPUT)
            elif end == len(ids) and mark.closer >= 0 and mark.source is Source.OUTPUT:
                continue  # what the output will follow (an opened "<think>"): no output itself
            if end > start:
                spans.append(Span(start, end, mark.source, mark.role))
        return spans


# Contents that no template looks into and no tokenizer merges with what surrounds them.
_CONTENTS = tuple(f"\ue000{number}\ue001" for number in range(6))
_CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}


def _read_marks(tokenizer: Any) -> list[MessageMark]:
    if not getattr(tokenizer, "chat_template", None):
        return []
    a, b, c, d, e, f = _CONTENTS
    chat = [
        {"role": "user", "content": a},
        {"role": "assistant", "content": b},
        {"role": "user", "content": c},
        {"role": "assistant", "content": d},
    ]
    text = _render(tokenizer, chat)
    if text is None:
        return []
    special = _special_ids(tokenizer)
    marks: list[MessageMark] = []
    ending = _between(text, d, None) or ""

    def add(before: str, closer: str, source: Source, role: str) -> None:
        """before: the template's text in front of a content, closer: the text behind it."""
        if ending.strip() and before.startswith(ending):
            before = before[len(ending) :]  # the end of the message before
        ids = list(tokenizer.encode(before, add_special_tokens=False))
        while ids and ids[0] not in special:
            ids = ids[1:]
        tail: list[int] = []
        while ids and ids[-1] not in special and not tokenizer.decode([ids[-1]]).strip():
            tail.insert(0, ids.pop())
        closing = [n for n in tokenizer.encode(closer, add_special_tokens=False) if n in special]
        if ids and all(mark.opener != tuple(ids) for mark in marks):
            marks.append(MessageMark(tuple(ids), tuple(tail), closing[0] if closing else -1, source, role))

    # What invites the assistant to speak is how its messages begin. Some templates add more to the invitation
    # (an opened "<think>") than stands in front of an earlier answer: then what the two have in common.
    before: str | None = _between(text, a, b) or ""
    asked, invited = _render(tokenizer, chat[:3]), _render(tokenizer, chat[:3], invite=True)
    if asked is not None and invited is not None and invited.startswith(asked):
        invitation = invited[len(asked) :]
        while invitation and not (before or "").endswith(invitation):
            invitation = invitation[:-1]
        before = invitation or before
    add(before or "", ending, Source.OUTPUT, "assistant")
    add(_between(text, b, c) or "", _between(text, c, d) or "", Source.PROMPT, "user")
    system = _render(tokenizer, [{"role": "system", "content": e}, *chat])
    if system is not None and e in system:
        add(system[: system.index(e)], _between(system, e, a) or "", Source.PROMPT, "system")
    for extra in ({"tool_calls": [_CALL]}, {}):
        result = {"role": "tool", "content": f, "name": "f", "tool_call_id": "call00000"}
        called = _render(tokenizer, [*chat[:3], {"role": "assistant", "content": d, **extra}, result])
        before = None if called is None else _between(called, d, f)
        if called is not None and before is not None:
            if ending.strip() and ending.strip() in before:
                before = before[before.rindex(ending.strip()) + len(ending.strip()) :]
            add(before, _between(called, f, None) or "", Source.TOOL, "tool")
            break
    return marks


def _render(tokenizer: Any, chat: list[dict[str, Any]], invite: bool = False) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=invite))
    except Exception:  # a template refuses what it doesn't know, each in its own way
        return None


def _between(text: str, left: str, right: str | None) -> str | None:
    if left not in text or (right is not None and right not in text):
        return None
    start = text.index(left) + len(left)
    return text[start : len(text) if right is None else text.index(right)]


def _special_ids(tokenizer: Any) -> set[int]:
    ids = {int(n) for n in getattr(tokenizer, "all_special_ids", None) or ()}
    ids.update(int(n) for n in getattr(tokenizer, "added_tokens_decoder", None) or {})
    return ids
