"""Detokenizer: token ids to text as they come, with whole characters only. Used by the engines."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"
# An incomplete character is at most three bytes, which decode to one U+FFFD together or to one each.
_LONGEST_TAIL = 3
# Held back longer than this many tokens, text is not going to settle: a tokenizer whose decoding rewrites
# what came before. A character takes at most four bytes, and so at most four tokens.
_LONGEST_HOLD = 16
# Windows whose text is remembered, of each tokenizer: mostly two tokens, and an agent's text repeats itself.
_REMEMBERED = 32768

Decode = Callable[[tuple[int, ...]], str]
# By id(tokenizer): who it is, what it knew (tokens may be added, or made special, later), and its decoder.
_decoders: dict[int, tuple[weakref.ref[Any], Any, Decode]] = {}


def _decoder(tokenizer: Any, special: frozenset[int]) -> Decode:
    """Ids to their text without special tokens; a call of the tokenizer's own costs some 30 us."""
    try:
        size = len(tokenizer)
    except TypeError:  # it has no length
        size = 0
    key, knows = id(tokenizer), (size, special)
    known = _decoders.get(key)
    if known is not None and known[0]() is tokenizer and known[1] == knows:
        return known[2]
    try:
        held = weakref.ref(tokenizer, lambda gone: _drop(key, gone))
    except TypeError:  # it can't be held weakly
        return lambda ids: _decode(tokenizer, ids, True)
    decode = functools.lru_cache(_REMEMBERED)(lambda ids: _decode(held(), ids, True))
    _decoders[key] = (held, knows, decode)
    return decode


def _drop(key: int, gone: weakref.ref[Any]) -> None:
    known = _decoders.get(key)
    if known is not None and known[0] is gone:
        del _decoders[key]


def _decode(tokenizer: Any, ids: tuple[int, ...], skip: bool) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Streams the text of a growing list of ids: what `push` returns and `flush` returns, joined, equals
    decoding all ids at once. (A byte-fallback tokenizer decodes a whole run of byte tokens to U+FFFD if any
    of it is invalid; there the characters that were complete before the invalid byte stay shown.)

    keep: special ids whose text is shown (a tool call's markers); the others are left out

    ends[i] is the length of the text (characters) that tokens 0..i make by themselves: where a character
    spans several tokens, its last token has it and the ones before repeat the previous end, so a text can be
    cut exactly after a token whose end is larger than the one before it.

    A token's text can depend on its neighbours (a leading space that only shows inside, bytes that form one
    character together), so each push decodes a short window: the last tokens already shown, and those held
    back.
    """

    def __init__(self, tokenizer: Any, keep: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._decode = _decoder(tokenizer, special)
        self._keep = frozenset(keep) & special
        self._settled: list[int] = []  # the window's tokens that are shown completely
        self._held: list[int] = []  # those after them, shown in part or not at all
        self._before = ""  # the text of _settled, decoded by itself
        self._shown = 0  # characters of the window's text that are shown, _before included
        self.length = 0
        self.ends: list[int] = []
        self._end = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text that is complete now (may be empty)."""
        pieces = []
        for token in ids:
            token = int(token)
            if token in self._keep:
                pieces.append(self._marker(token))
                continue
            self._held.append(token)
            piece = self._advance(final=False)
            self.length += len(piece)
            if not self._held:
                self._end = self.length
            self.ends.append(self._end)
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back (the bytes of an incomplete character become U+FFFD)."""
        piece = self._advance(final=True)
        self.length += len(piece)
        self._end = self.length
        if self.ends:
            self.ends[-1] = self.length
        return piece

    def _marker(self, token: int) -> str:
        piece = self.flush()
        self._settled, self._before, self._shown = [], "", 0
        text = _decode(self._tokenizer, (token,), False)
        self.length += len(text)
        self._end = self.length
        self.ends.append(self.length)
        return piece + text

    def _advance(self, final: bool) -> str:
        if not self._held:
            return ""
        text = self._decode((*self._settled, *self._held))
        final = final or len(self._held) > _LONGEST_HOLD
        if not final and not text.startswith(self._before):
            return ""  # undecided: the window's text does not extend what is shown
        settled = len(text)
        if not final:
            tail = len(text) - len(text.rstrip(_REPLACEMENT))
            settled -= min(tail, _LONGEST_TAIL)
        piece = text[self._shown : settled]
        if settled == len(text):
            self._settled, self._held = self._held, []
            self._before = self._decode(tuple(self._settled))
            self._shown = len(self._before)
        else:
            self._shown = max(self._shown, settled)
        return piece
