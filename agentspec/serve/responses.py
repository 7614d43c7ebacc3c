"""An engine's results in OpenAI's shapes, whole and streamed. Called by app.py.

What OpenAI has no field for is added beside theirs: `agentspec` (trajectory and CallStats, in the whole response or
the stream's last chunk), `reasoning_content` and `invalid_tool_calls` of a message.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec import __version__
from agentspec.chat import MessageDelta
from agentspec.engines.base import CallStats, GenerationResult, TokenChunk, TokenLogprob
from agentspec.serve.requests import Asked
from agentspec.serve.trajectories import Opened

__all__ = ["ChatShape", "CompletionShape", "Shape"]

_LEAST = -9999.0  # JSON has no -inf; OpenAI's own floor


class Shape:
    """One response. decode: ids -> text; eos_ids: ids that end an output."""

    kind = chunk_kind = prefix = ""

    def __init__(self, asked: Asked, opened: Opened, model: str, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.asked, self.opened = asked, opened
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"agentspec-{__version__}",
        }

    # ---- whole --------------------------------------------------------------------------------

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        stats = results[0].stats
        choices = [self._choice(result) for result in results]
        return {
            "object": self.kind,
            **self._head,
            "choices": choices,
            **self._figures(stats),
            "usage": self._usage(stats),
        }

    def _choice(self, result: GenerationResult) -> dict[str, Any]:
        raise NotImplementedError

    # ---- streamed -----------------------------------------------------------------------------

    def opening(self, n: int) -> list[dict[str, Any]]:
        """What comes before any token."""
        return []

    def chunk(self, chunk: TokenChunk) -> dict[str, Any] | None:
        """What a step's tokens add; None: nothing to show."""
        raise NotImplementedError

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """A choice's last chunk."""
        raise NotImplementedError

    def closing(self, last: dict[str, Any], stats: CallStats) -> list[dict[str, Any]]:
        """The stream's last chunks. last: the last choice's ending."""
        if not self.asked.include_usage:
            return [last | self._figures(stats)]
        return [last, self._chunk([]) | self._figures(stats) | {"usage": self._usage(stats)}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.asked.include_usage else {}
        return {"object": self.chunk_kind, **self._head, "choices": choices, **usage}

    # ---- figures ------------------------------------------------------------------------------

    def _usage(self, stats: CallStats) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.output_tokens,
            "total_tokens": stats.prompt_tokens + stats.output_tokens,
            "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
        }
        if self.asked.predicted:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": stats.accepted_by_source.get("seed", 0),
            }
        return usage

    def _figures(self, stats: CallStats) -> dict[str, Any]:
        figures = stats.to_dict()
        for name in ("model", "trajectory_id", "finish_reason"):
            del figures[name]
        return {"agentspec": {"trajectory": self.opened.name, "joined_by": self.opened.joined_by, **figures}}

    # ---- log probabilities --------------------------------------------------------------------

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _shown(self, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Without an ending EOS, which is no part of the text."""
        ended = bool(logprobs) and logprobs[-1].token_id in self._eos_ids
        return list(logprobs[:-1] if ended else logprobs)


class ChatShape(Shape):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._called: dict[int, set[int]] = {}  # choice -> its complete tool calls

    def _choice(self, result: GenerationResult) -> dict[str, Any]:
        message = dict(result.message)
        calls = bool(message.get("tool_calls"))
        if not message["content"] and (calls or "reasoning_content" in message):
            message["content"] = None
        return {
            "index": result.index,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": _reason(result.finish_reason, calls),
        }

    def opening(self, n: int) -> list[dict[str, Any]]:
        begin = {"role": "assistant", "content": ""}
        return [self._delta(index, begin) for index in range(n)]

    def chunk(self, chunk: TokenChunk) -> dict[str, Any] | None:
        delta = chunk.delta or MessageDelta(content=chunk.text)
        self._called.setdefault(chunk.index, set()).update(delta.ended)
        told: dict[str, Any] = {}
        if delta.reasoning:
            told["reasoning_content"] = delta.reasoning
        if delta.content:
            told["content"] = delta.content
        if delta.tool_calls:
            told["tool_calls"] = [
                {"index": piece.index, "function": {"arguments": piece.arguments}}
                if piece.name is None
                else {
                    "index": piece.index,
                    "id": piece.id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": piece.arguments},
                }
                for piece in delta.tool_calls
            ]
        if delta.invalid_tool_calls:
            told["invalid_tool_calls"] = [
                {"id": call.id, "name": call.name, "args": call.raw, "error": call.error}
                for call in delta.invalid_tool_calls
            ]
        logprobs = self._logprobs(chunk.logprobs)
        return self._delta(chunk.index, told, logprobs) if told or logprobs else None

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return self._delta(index, {}, None, _reason(reason, bool(self._called.get(index))))

    def _delta(
        self, index: int, delta: Mapping[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in self._shown(logprobs)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # A token that is part of a character has no bytes of its own in the decoded text.
        return {
            "token": text,
            "logprob": max(logprob, _LEAST),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


class CompletionShape(Shape):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}

    def _choice(self, result: GenerationResult) -> dict[str, Any]:
        return self._told(
            result.index,
            self._echoed() + result.text,
            self._logprobs(result.index, result.logprobs),
            result.finish_reason,
        )

    def _echoed(self) -> str:
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompt
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(list(prompt or ())))

    def opening(self, n: int) -> list[dict[str, Any]]:
        if not self.asked.echo:
            return []
        return [self._chunk([self._told(index, self._echoed(), None, None)]) for index in range(n)]

    def chunk(self, chunk: TokenChunk) -> dict[str, Any] | None:
        logprobs = self._logprobs(chunk.index, chunk.logprobs)
        if not chunk.text and not logprobs:
            return None
        return self._chunk([self._told(chunk.index, chunk.text, logprobs, None)])

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk([self._told(index, "", None, reason)])

    @staticmethod
    def _told(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        at = self._offsets.get(index, 0)
        for entry in self._shown(logprobs):
            text = self._text(entry.token_id)
            told["tokens"].append(text)
            told["token_logprobs"].append(max(entry.logprob, _LEAST))
            told["top_logprobs"].append({self._text(token): max(value, _LEAST) for token, value in entry.top})
            told["text_offset"].append(at)
            at += len(text)
        self._offsets[index] = at
        return told


def _reason(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason
