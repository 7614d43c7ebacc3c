"""Stopper: where one output ends, and which of its text may be shown. Called by LocalEngine for each emitted token.

Tokens come one by one, however they were drafted, so text, ids, logprobs, usage, KV and memory all end at the same
token: the one that completes a stop. The text ends before the stop; the ids hold it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from agentspec.chat import Detokenizer

__all__ = ["Stopper"]


class Stopper:
    """Follows one output.

    eos_ids:    end it, and show no text
    texts:      end it where they are complete; the text is cut before them
    sequences:  of ids, end it where they are complete; the text is cut before them
    keep:       special ids whose text is shown (a chat's parser needs them)
    min_tokens: what is complete before so many tokens ends nothing
    max_tokens: ends it, with reason "length"

    Text that may turn out to be the beginning of a stop is held back until that is known. Of stops that are complete
    at the same token, the one that ends first in the text counts, and of those the longest.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Collection[int],
        max_tokens: int,
        texts: Sequence[str] = (),
        sequences: Sequence[Sequence[int]] = (),
        min_tokens: int = 0,
        keep: Collection[int] = (),
    ) -> None:
        self.finish_reason = ""
        self.stop_reason: str | tuple[int, ...] | None = None
        self.text = ""  # all that was shown by `take`
        self._stream = Detokenizer(tokenizer, keep)
        self._eos = frozenset(eos_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._texts = tuple(texts)
        self._sequences = tuple(tuple(s) for s in sequences)
        self._longest = max((len(s) for s in self._sequences), default=0)
        self._count = 0
        self._tail: list[int] = []  # the last ids, as many as the longest sequence has
        self._starts: list[int] = []  # for each of them, where its text began
        self._shown: list[str] = []
        self._released = 0  # characters that may be shown, or have been
        self._held = ""  # the text after them

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self._max_tokens - self._count

    def push(self, token: int) -> str:
        """The next emitted id. Returns the finish reason: "stop", "length", or "" to go on."""
        self._count += 1
        may_stop = self._count >= self._min_tokens
        if may_stop and token in self._eos:
            return self._finish("stop")
        before = self._released + len(self._held)
        if self._sequences:
            self._tail = [*self._tail, token][-self._longest :]
            self._starts = [*self._starts, before][-self._longest :]
            whole = self._completed() if may_stop else None
            if whole is not None:
                if len(whole) == 1:  # nothing of its own text has been pushed: what is held is what came before it
                    return self._finish("stop", whole)
                self._held = self._held[: max(0, self._starts[-len(whole)] - self._released)]
                return self._finish("stop", whole, flush=False)
        if token not in self._eos:
            self._add(self._stream.push((token,)), may_stop)
        if not self.finish_reason and self._count >= self._max_tokens:
            return self._finish("length")
        self._release()
        return self.finish_reason

    def end(self, reason: str) -> None:
        """The output ended for a reason that isn't seen here (a server's); what was held back is text now."""
        if not self.finish_reason:
            self._finish(reason)

    def take(self) -> str:
        """The text that may be shown and was not taken yet."""
        piece = "".join(self._shown)
        self._shown.clear()
        self.text += piece
        return piece

    # ---- inside -------------------------------------------------------------------------------

    def _finish(self, reason: str, stop: tuple[int, ...] | None = None, flush: bool = True) -> str:
        if flush:
            self._add(self._stream.flush(), self._count >= self._min_tokens)
        if not self.finish_reason:
            self.finish_reason, self.stop_reason = reason, stop
        self._show(len(self._held))
        return self.finish_reason

    def _completed(self) -> tuple[int, ...] | None:
        found = [s for s in self._sequences if tuple(self._tail[-len(s) :]) == s]
        return max(found, key=len) if found else None

    def _add(self, piece: str, may_stop: bool) -> None:
        """New text; ends the output where a stop text is complete in it."""
        old = len(self._held)
        self._held += piece
        if not self._texts or not piece or not may_stop:
            return
        best: tuple[int, int, str] | None = None
        for text in self._texts:
            # it has to end in the new piece
            at = self._held.find(text, max(0, old - len(text) + 1))
            if at >= 0 and (best is None or (at + len(text), at) < best[:2]):
                best = (at + len(text), at, text)
        if best is not None:
            self._held = self._held[: best[1]]
            self.finish_reason, self.stop_reason = "stop", best[2]

    def _release(self) -> None:
        """Let go of all held text that can't be the beginning of a stop."""
        if self.finish_reason:
            self._show(len(self._held))
            return
        keep = 0
        for text in self._texts:
            for length in range(min(len(text) - 1, len(self._held)), keep, -1):
                if self._held.endswith(text[:length]):
                    keep = length
                    break
        free = len(self._held) - keep
        for sequence in self._sequences:
            for length in range(min(len(sequence) - 1, len(self._tail)), 0, -1):
                if tuple(self._tail[-length:]) == sequence[:length]:
                    free = min(free, max(0, self._starts[-length] - self._released))
                    break
        self._show(free)

    def _show(self, count: int) -> None:
        if count > 0:
            self._shown.append(self._held[:count])
            self._released += count
            self._held = self._held[count:]
