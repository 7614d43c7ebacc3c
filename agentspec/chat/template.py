"""ChatTemplate: a model's own chat template, with exact history.

Rendering a chat again tokenises earlier outputs again, and the ids can differ from those that were generated
("Hel" + "lo" comes back as "Hello"); then neither the KV cache nor the memory matches. So the ids of each output
are kept (History), and wherever a rendered assistant message says what those ids say, the ids go in instead.
The prompt's text is always the template's: ids are spliced in only where they decode to the rendered span.

To know which part of the rendered text is which message, the chat is rendered a second time with each message's
content replaced by a marker: what stands between the markers is the template's own text, and the real rendering
is cut along it. Where a template does not allow that, nothing is spliced and the prompt is one span.
Used by the engines. May import memory; the tokenizer is passed in.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.detokenizer import Detokenizer
from agentspec.errors import ChatTemplateError, InvalidRequestError
from agentspec.memory import Source, Span

__all__ = ["ChatTemplate", "History", "OutputRecord", "RenderedChat"]

Message = Mapping[str, Any]

_TOOL_ROLES = frozenset({"tool", "function", "ipython", "environment"})


@dataclass(slots=True, frozen=True)
class OutputRecord:
    """One output as it was generated.

    ids:  the ids, an ending EOS excluded
    text: their text
    ends: per id, the length of the text up to it (see Detokenizer.ends)
    eos:  the id that ended it, if one did
    """

    ids: tuple[int, ...]
    text: str
    ends: tuple[int, ...]
    eos: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, ids: Sequence[int], eos_ids: frozenset[int]) -> OutputRecord:
        """The record of generated ids, which may end with an EOS."""
        eos = int(ids[-1]) if ids and int(ids[-1]) in eos_ids else None
        body = tuple(int(i) for i in (ids[:-1] if eos is not None else ids))
        stream = Detokenizer(tokenizer)
        text = stream.push(body)
        text += stream.flush()
        return cls(body, text, tuple(stream.ends), eos)


class History:
    """A trajectory's outputs, found again by what the history says: by text, or by the message they became."""

    def __init__(self) -> None:
        self._by_text: dict[str, OutputRecord] = {}
        self._by_message: dict[str, OutputRecord] = {}

    def add(self, record: OutputRecord, message: Message | None = None) -> None:
        self._by_text[record.text.strip()] = record
        if message is not None:
            self._by_message[_fingerprint(message)] = record

    def find(self, message: Message, rendered: str) -> OutputRecord | None:
        """The record whose text the rendered span is, else the one that this message was made of."""
        return self._by_text.get(rendered.strip()) or self._by_message.get(_fingerprint(message))

    def __len__(self) -> int:
        return len(self._by_text)


def _fingerprint(message: Message) -> str:
    content = message.get("content")
    calls = [
        [call.get("function", call).get("name"), _arguments(call.get("function", call).get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps([content.strip() if isinstance(content, str) else content or "", calls], sort_keys=True, default=str)


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


@dataclass(slots=True, frozen=True)
class RenderedChat:
    """A prompt: its ids, its text by the template, its messages' spans, and how many ids were spliced in."""

    input_ids: tuple[int, ...]
    text: str
    spans: tuple[Span, ...]
    spliced_tokens: int


@dataclass(slots=True)
class _Part:
    """A stretch of the rendered text: a message's content, or (message None) the template's own text."""

    text: str
    message: Message | None


class ChatTemplate:
    """Renders messages by the tokenizer's own chat template. tokenizer: a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        history: History | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt for the next assistant message.

        Raises InvalidRequestError for messages that are none, ChatTemplateError where the model has no template or
        the template refuses them.
        """
        chat = _checked(messages)
        options = {"tools": list(tools) if tools else None, **(template_options or {})}
        text = self._apply(chat, options)
        parts = self._parts(chat, text, options)
        return self._tokenise(text, parts, history or History())

    # ---- rendering ----------------------------------------------------------------------------

    def _apply(self, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "this model has no chat template: use engine.generate with token ids or text, or set "
                "tokenizer.chat_template"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
            )
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error

    def _parts(self, chat: list[dict[str, Any]], text: str, options: Mapping[str, Any]) -> list[_Part]:
        """The text cut into template text and contents; one template part where the cut isn't certain."""
        whole = [_Part(text, None)]
        marked: list[dict[str, Any]] = []
        for number, message in enumerate(chat):
            # Private-use characters: no template touches them, no content is likely to hold this very marker.
            marked.append({**message, "content": _marker(number)})
            marked[-1].pop("tool_calls", None)
            for reasoning in ("reasoning_content", "reasoning", "thinking"):
                marked[-1].pop(reasoning, None)
        try:
            skeleton = self._apply(marked, options)
        except ChatTemplateError:
            return whole
        literals: list[str] = []
        at = 0
        order: list[int] = []
        for number in range(len(chat)):
            place = skeleton.find(_marker(number), at)
            if place < 0:
                continue  # the template leaves this message out
            literals.append(skeleton[at:place])
            order.append(number)
            at = place + len(_marker(number))
        literals.append(skeleton[at:])
        parts: list[_Part] = []
        at = 0
        for literal, number in zip(literals, order, strict=False):
            if not text.startswith(literal, at):
                return whole
            parts.append(_Part(literal, None))
            at += len(literal)
            following = literals[len(parts) // 2 + 1]
            content = chat[number].get("content")
            if isinstance(content, str) and text.startswith(content + following, at):
                end = at + len(content)
            elif number == order[-1]:
                end = len(text) - len(following)
            else:
                end = text.find(following, at) if following else -1
            if end < at or not text.startswith(following, end):
                return whole
            parts.append(_Part(text[at:end], chat[number]))
            at = end
        if text[at:] != literals[-1]:
            return whole
        parts.append(_Part(literals[-1], None))
        return parts

    # ---- tokens -------------------------------------------------------------------------------

    def _tokenise(self, text: str, parts: list[_Part], history: History) -> RenderedChat:
        """Known outputs by their own ids; what lies between them by the tokenizer, in one piece each, so that
        the same text before an output gives the same ids in every later call."""
        ids: list[int] = []
        spans: list[Span] = []
        spliced = 0
        pending: list[_Part] = []

        def flush() -> None:
            base = len(ids)
            piece = "".join(part.text for part in pending)
            if not piece:
                pending.clear()
                return
            new, offsets = self._encode(piece)
            ids.extend(new)
            starts = [start for start, _ in offsets] if offsets else None
            at = 0
            for part in pending:
                end = at + len(part.text)
                if part.message is not None and part.text and starts is not None:
                    first, last = bisect_left(starts, at), bisect_left(starts, end)
                    if last > first:
                        role = str(part.message["role"])
                        spans.append(Span(base + first, base + last, _source(role), role))
                at = end
            pending.clear()

        for index, part in enumerate(parts):
            record = None
            if part.message is not None and part.message["role"] == "assistant" and part.text:
                record = history.find(part.message, part.text)
            if record is None:
                pending.append(part)
                continue
            head, middle, tail = _align(record, part.text)
            if not head and not tail:
                pending.append(part)
                continue
            flush()
            start = len(ids)
            ids.extend(head)
            if middle:
                ids.extend(self._encode(middle)[0])
            ids.extend(tail)
            spliced += len(head) + len(tail)
            end = len(ids)
            following = parts[index + 1].text if index + 1 < len(parts) else ""
            if record.eos is not None and following.startswith(self._text_of(record.eos)):
                # The template closes the message as the model did: EOS belongs to the output.
                end += 1
            spans.append(Span(start, end, Source.OUTPUT, "assistant"))
        flush()
        spans = [span for span in spans if span.end <= len(ids)]
        return RenderedChat(tuple(ids), text, tuple(spans), spliced)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
        return list(encoded["input_ids"]), [tuple(o) for o in encoded["offset_mapping"]] if fast else None

    def _text_of(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))


def _align(record: OutputRecord, rendered: str) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    """(ids of a common beginning, text between, ids of a common end) of a record and its rendered span.

    Cut only where a token begins or ends with a whole character. All ids and no text between where the span is
    the output; its last ids where the template dropped the thoughts before them; a beginning where it wrote a
    tool call anew from some point on.
    """
    text, ends = record.text, record.ends
    if text == rendered:
        return record.ids, "", ()
    same = 0
    for a, b in zip(text, rendered, strict=False):
        if a != b:
            break
        same += 1
    first = bisect_right(ends, same)
    # A token that shows no text of its own may be the first bytes of a character that is cut off here.
    while 0 < first < len(ends) and ends[first - 1] == (ends[first - 2] if first > 1 else 0):
        first -= 1
    taken = ends[first - 1] if first else 0
    back = 0
    room = min(len(text), len(rendered)) - taken
    while back < room and text[len(text) - 1 - back] == rendered[len(rendered) - 1 - back]:
        back += 1
    last = bisect_left(ends, len(text) - back) + 1 if back else len(ends)
    # a tail starts after a token whose end lies inside the common end
    last = min(last, len(ends))
    if back and first == 0 and back == len(text):
        last = 0
    last = max(last, first)
    tail_from = ends[last - 1] if last else 0
    tail = record.ids[last:]
    middle = rendered[taken : len(rendered) - (len(text) - tail_from)]
    return record.ids[:first], middle, tail


def _marker(number: int) -> str:
    return f"\ue000{number}\ue001"


def _source(role: str) -> Source:
    if role == "assistant":
        return Source.OUTPUT
    return Source.TOOL if role in _TOOL_ROLES else Source.PROMPT


def _checked(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages: needed a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("messages: needed at least one message, got none")
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{number}]: needed a mapping with a 'role', got {message!r:.200}")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise InvalidRequestError(f"messages[{number}] ({message['role']}): needed 'content' or 'tool_calls'")
        if content is not None and not isinstance(content, (str, list)):
            raise InvalidRequestError(
                f"messages[{number}]: needed content as text or a list of parts, got {type(content).__name__}"
            )
        chat.append({**message, "content": "" if content is None else content})
    return chat
