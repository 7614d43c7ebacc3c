"""Detokenizer: token ids to text as they come, with whole characters only. Used by the engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Detokenizer"]

# A character takes at most four bytes, so at most four byte-level tokens; some tokenizers also spread one
# grapheme's normalisation over a few more. Past this many held-back tokens the bytes are simply invalid.
_LONGEST_INCOMPLETE = 16


class Detokenizer:
    """Streams the text of a growing list of ids: the concatenation of what `push` returns and `flush` equals
    decoding all ids at once.

    ends[i] is the length of the text (characters) up to which token i is known to reach: where a character
    spans several tokens, its last token has it and the ones before share the previous end.

    A token's text can depend on its neighbours (a leading space that only shows inside, bytes that form one
    character together), so each push decodes a short window: the last tokens already shown, and those held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._ids: list[int] = []
        self._shown_from = 0  # window start: ids[_shown_from:_shown_to] have been shown
        self._shown_to = 0
        self.length = 0
        self.ends: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text that is complete now (may be empty)."""
        pieces = []
        for token in ids:
            self._ids.append(int(token))
            piece = self._advance(force=len(self._ids) - self._shown_to >= _LONGEST_INCOMPLETE)
            self.length += len(piece)
            self.ends.append(self.length)
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back (the bytes of an incomplete character become U+FFFD)."""
        piece = self._advance(force=True)
        self.length += len(piece)
        if self.ends:
            self.ends[-1] = self.length
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _advance(self, force: bool) -> str:
        if self._shown_to == len(self._ids):
            return ""
        before = self._decode(self._ids[self._shown_from : self._shown_to])
        after = self._decode(self._ids[self._shown_from :])
        if not force and after.endswith("\ufffd"):
            return ""
        self._shown_from, self._shown_to = self._shown_to, len(self._ids)
        return after[len(before) :]
