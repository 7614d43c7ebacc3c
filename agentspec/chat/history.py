"""History: a trajectory's outputs as they were generated, found again in a rendered chat.

Rendering a chat again tokenises earlier outputs again, and the ids can differ from those that were generated
("Hel" + "lo" comes back as "Hello"); then neither the KV cache nor the memory matches. So each output's ids
are kept, with where in its text each of them ends, and `align` says which of them a rendered message still
says. Used by the template (to splice) and by the engines (to add). Imports nothing but the detokenizer.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.detokenizer import Detokenizer

__all__ = ["History", "OutputRecord", "align", "message_key"]

Message = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class OutputRecord:
    """One output as it was generated.

    ids:  the ids, an ending EOS excluded
    text: their text, special tokens included: what a template that renders the output has to write
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
        eos = int(ids[-1]) if len(ids) and int(ids[-1]) in eos_ids else None
        body = tuple(int(i) for i in (ids[:-1] if eos is not None else ids))
        stream = Detokenizer(tokenizer, keep=getattr(tokenizer, "all_special_ids", ()))
        text = stream.push(body)
        text += stream.flush()
        return cls(body, text, tuple(stream.ends), eos)


@dataclass(slots=True, frozen=True)
class _Held:
    record: OutputRecord
    text_key: str
    message_key: str | None
    prompt: int | None


class History:
    """A trajectory's outputs, found again by what the chat says: by text, or by the message they became.

    Equal outputs are kept apart: the one whose prompt the chat repeats is found, else they are found in the
    order in which they came. The oldest go beyond `limit` outputs. Thread-safe.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._next = 0
        self._by_text: dict[str, list[int]] = {}
        self._by_message: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, record: OutputRecord, message: Message | None = None, prompt: str | None = None) -> None:
        """Keep an output. message: what it became in the history; prompt: the rendered text it answered."""
        held = _Held(
            record,
            record.text.strip(),
            None if message is None else message_key(message),
            None if prompt is None else hash(prompt),
        )
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._held[number] = held
            self._by_text.setdefault(held.text_key, []).append(number)
            if held.message_key is not None:
                self._by_message.setdefault(held.message_key, []).append(number)
            while len(self._held) > self._limit:
                number, held = self._held.popitem(last=False)
                _drop(self._by_text, held.text_key, number)
                if held.message_key is not None:
                    _drop(self._by_message, held.message_key, number)

    def find(self, message: Message, rendered: str, prompt: str, taken: set[int]) -> OutputRecord | None:
        """The output whose text the rendered span is, else one that this message was made of; None: neither.

        prompt: the rendered text before the span. taken: what earlier finds of this rendering took; added to.
        """
        with self._lock:
            numbers = (
                self._by_text.get(rendered.strip())
                or self._by_message.get(message_key(message))
                or self._by_text.get(str(message.get("content", "")).strip())  # raw, thoughts included
            )
            if not numbers:
                return None
            number = numbers[0]
            if len(numbers) > 1:
                asked = hash(prompt)
                same = [n for n in numbers if self._held[n].prompt == asked]
                free = [n for n in numbers if n not in taken]
                number = same[-1] if same else free[0] if free else numbers[-1]
            taken.add(number)
            return self._held[number].record

    def __len__(self) -> int:
        return len(self._held)


def _drop(table: dict[str, list[int]], key: str, number: int) -> None:
    table[key].remove(number)
    if not table[key]:
        del table[key]


def message_key(message: Message) -> str:
    """What a message says (text and tool calls), however its client writes it: equal for equal messages."""
    content = message.get("content")
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        calls.append([function.get("name"), _arguments(function.get("arguments"))])
    text = content.strip() if isinstance(content, str) else content or ""
    return json.dumps([text, calls], sort_keys=True, default=str)


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def align(record: OutputRecord, rendered: str) -> list[str | tuple[int, ...]]:
    """The rendered span as pieces: runs of the record's own ids, and text where it says something else.

    Joined (ids decoded), the pieces are `rendered`. Ids are cut only where their text is whole characters.
    One run where the span is the output; its last ids where the template dropped the thoughts before them; a
    beginning and an end where it wrote a tool call anew; what is between the ends where it trimmed white
    space.
    """
    text, ends = record.text, record.ends
    if text == rendered:
        return [record.ids] if record.ids else []
    # Leading white space is the template's matter: compare from the first other character on.
    start = len(text) - len(text.lstrip())
    offset = len(rendered) - len(rendered.lstrip())
    if text[:start] == rendered[:offset]:
        start = offset = 0
    same = _common(text, start, rendered, offset)
    first = _after(ends, start)
    if first is None:
        first, last = 0, 0
    else:
        last = max(first, _last_before(ends, start + same))
    pieces: list[str | tuple[int, ...]] = []
    taken, at = start, 0  # how far text and rendered are covered
    if last > first:
        pieces += [rendered[:offset], record.ids[first:last]]
        taken = ends[last - 1]
        at = offset + taken - start
    # The common end, of what is not covered; trailing white space apart, as above.
    stop, limit = len(text), len(rendered)
    tail_text, tail_rendered = text.rstrip(), rendered.rstrip()
    if text[len(tail_text) :] != rendered[len(tail_rendered) :]:
        stop, limit = len(tail_text), len(tail_rendered)
    back = 0
    floor = taken if last > first else 0
    while back < min(stop - floor, limit - at) and text[stop - 1 - back] == rendered[limit - 1 - back]:
        back += 1
    begin, end = _first_from(ends, stop - back), _last_before(ends, stop)
    begin = max(begin, last)
    if end > begin:
        begins_at = ends[begin - 1] if begin else 0
        pieces += [rendered[at : limit - (stop - begins_at)], record.ids[begin:end]]
        at = limit - (stop - ends[end - 1])
    pieces.append(rendered[at:])
    return [piece for piece in pieces if piece]


def _common(a: str, a_from: int, b: str, b_from: int) -> int:
    """How many characters a[a_from:] and b[b_from:] share at their beginning."""
    low, high = 0, min(len(a) - a_from, len(b) - b_from)
    while low < high:
        middle = (low + high + 1) // 2
        if a[a_from + low : a_from + middle] == b[b_from + low : b_from + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _after(ends: Sequence[int], position: int) -> int | None:
    """The first token that begins exactly at `position`; None where that is inside a token."""
    if position == 0:
        return 0
    token = bisect_left(ends, position)
    return token + 1 if token < len(ends) and ends[token] == position else None


def _last_before(ends: Sequence[int], position: int) -> int:
    """How many tokens lie wholly before `position`."""
    count = bisect_right(ends, position)
    # A token that adds no text of its own holds the first bytes of a character whose end is cut off here.
    while count and ends[count - 1] == (ends[count - 2] if count > 1 else 0) and count < len(ends):
        count -= 1
    return count


def _first_from(ends: Sequence[int], position: int) -> int:
    """The first token that begins at or after `position`."""
    return 0 if position <= 0 else min(bisect_left(ends, position) + 1, len(ends))
