"""Reply: one output on its way to the user, as LangChain's chunks and at the end as one AIMessage.

Fed with an engine's TokenChunks, once each, by whoever iterates: sync or async, streamed or not. Nothing here
waits or calls an engine.
"""

from __future__ import annotations

import json
from typing import Any, cast

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import (
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.utils.json import parse_partial_json

from agentspec.chat.deltas import InvalidToolCall, MessageDelta
from agentspec.engines.base import CallStats, TokenChunk

__all__ = ["PROVIDER", "Reply"]

PROVIDER = "agentspec"


class _ToolCall:
    """A call of the reply: its deltas' pieces, or what was wrong with it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.name: str | None = None
        self.arguments = ""
        self.invalid: InvalidToolCall | None = None


class Reply:
    """One of a call's n outputs.

    id:        the message's, the same in all of its chunks
    tokenizer: names the tokens where log probabilities are asked for
    """

    def __init__(self, id: str, tokenizer: Any = None) -> None:
        self.id = id
        self._tokenizer = tokenizer
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _ToolCall] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason = ""
        self._stop_reason: Any = None

    # ---- chunk by chunk -----------------------------------------------------------------------

    def push(self, chunk: TokenChunk) -> AIMessageChunk | None:
        """What a step adds to the message; None for nothing that can be shown yet."""
        delta = MessageDelta(content=chunk.text) if chunk.delta is None else chunk.delta
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._stop_reason = chunk.stop_reason if chunk.stop_reason is not None else self._stop_reason
        logprobs = [self._logprob(p) for p in chunk.logprobs]
        self._logprobs += logprobs
        calls = [*self._opened(delta), *self._spoiled(delta)]
        if not (delta.content or delta.reasoning or calls or logprobs):
            return None
        return AIMessageChunk(
            content=self._said(delta.content, self._content),
            additional_kwargs=(
                {"reasoning_content": self._said(delta.reasoning, self._reasoning)} if delta.reasoning else {}
            ),
            tool_call_chunks=calls,
            response_metadata={"logprobs": {"content": logprobs}} if logprobs else {},
            id=self.id,
        )

    def last(self, stats: CallStats) -> AIMessageChunk:
        """The closing chunk: usage, metadata, and what is exactly wrong with invalid calls."""
        return AIMessageChunk(
            content="",
            additional_kwargs=self._invalid_kwargs(),
            response_metadata=self._metadata(stats),
            usage_metadata=self._usage(stats),
            id=self.id,
            chunk_position="last",
        )

    def message(self, stats: CallStats, usage: bool = True) -> AIMessage:
        """The whole message, for a call that was not streamed. usage: False where another choice has it."""
        metadata = self._metadata(stats)
        if self._logprobs:
            metadata["logprobs"] = {"content": self._logprobs}
        reasoning = {"reasoning_content": "".join(self._reasoning)} if self._reasoning else {}
        return AIMessage(
            content="".join(self._content),
            additional_kwargs={**reasoning, **self._invalid_kwargs()},
            tool_calls=[
                tool_call(name=c.name or "", args=json.loads(c.arguments or "{}"), id=c.id) for c in self._valid
            ],
            invalid_tool_calls=[
                invalid_tool_call(name=c.invalid.name, args=c.invalid.raw, id=c.id, error=c.invalid.error)
                for c in self._calls.values()
                if c.invalid is not None
            ],
            response_metadata=metadata,
            usage_metadata=self._usage(stats) if usage else None,
            id=self.id,
        )

    @property
    def said(self) -> dict[str, Any]:
        """The message as the next call's history will say it (messages.to_agentspec)."""
        said: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._valid:
            said["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": c.arguments or "{}"}} for c in self._valid
            ]
        return said

    @property
    def call_ids(self) -> list[str]:
        return [call.id for call in self._calls.values()]

    # ---- inside -------------------------------------------------------------------------------

    @property
    def _valid(self) -> list[_ToolCall]:
        return [call for call in self._calls.values() if call.invalid is None]

    @staticmethod
    def _said(text: str, kept: list[str]) -> str:
        if text:
            kept.append(text)
        return text

    def _opened(self, delta: MessageDelta) -> list[Any]:
        chunks = []
        for piece in delta.tool_calls:
            call = self._calls.setdefault(piece.index, _ToolCall(piece.id))
            call.name = call.name or piece.name
            call.arguments += piece.arguments
            chunks.append(
                tool_call_chunk(
                    name=piece.name,
                    args=piece.arguments,
                    id=piece.id if piece.name else None,
                    index=piece.index,
                )
            )
        return chunks

    def _spoiled(self, delta: MessageDelta) -> list[Any]:
        """For calls found invalid: text that keeps LangChain's merging from making valid ones of them."""
        chunks = []
        for invalid in delta.invalid_tool_calls:
            new = invalid.index not in self._calls
            call = self._calls.setdefault(invalid.index, _ToolCall(invalid.id))
            call.invalid = invalid
            text = invalid.raw if new else ""
            text += _spoil(call.arguments + text)
            chunks.append(
                tool_call_chunk(
                    name=invalid.name if new else None,
                    args=text,
                    id=invalid.id if new else None,
                    index=invalid.index,
                )
            )
        return chunks

    def _invalid_kwargs(self) -> dict[str, Any]:
        invalid = [
            {"id": c.id, "name": c.invalid.name, "args": c.invalid.raw, "error": c.invalid.error}
            for c in self._calls.values()
            if c.invalid is not None
        ]
        return {"invalid_tool_calls": invalid} if invalid else {}

    def _metadata(self, stats: CallStats) -> dict[str, Any]:
        reason = self._finish_reason or stats.finish_reason
        if reason == "stop" and self._valid:
            reason = "tool_calls"
        metadata: dict[str, Any] = {
            "model_name": stats.model,
            "model_provider": PROVIDER,
            "finish_reason": reason,
            "call_stats": stats.to_dict(),
        }
        if self._stop_reason is not None:
            metadata["stop_reason"] = self._stop_reason
        return metadata

    def _usage(self, stats: CallStats) -> UsageMetadata:
        usage: Any = {
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.output_tokens,
            "total_tokens": stats.prompt_tokens + stats.output_tokens,
            "input_token_details": InputTokenDetails(cache_read=stats.reused_tokens),
        }
        if self._reasoning and self._tokenizer is not None:
            thoughts = self._tokenizer("".join(self._reasoning), add_special_tokens=False)["input_ids"]
            usage["output_token_details"] = OutputTokenDetails(reasoning=min(len(thoughts), stats.output_tokens))
        return cast(UsageMetadata, usage)

    def _logprob(self, logprob: Any) -> dict[str, Any]:
        return {
            "token": self._token(logprob.token_id),
            "token_id": logprob.token_id,
            "logprob": logprob.logprob,
            "top_logprobs": [
                {"token": self._token(token), "token_id": token, "logprob": value} for token, value in logprob.top
            ],
        }

    def _token(self, token: int) -> str:
        return str(self._tokenizer.decode([token])) if self._tokenizer is not None else ""


def _spoil(arguments: str) -> str:
    """The shortest text after which the arguments can't be taken for JSON, however generous the reader.

    LangChain closes what is open in a streamed call's arguments; a call broken off inside a path would run
    with half of it.
    """
    for ending in ("", "]", "}", '"]', '"}', '\\"]', '\\"}'):
        try:
            if not isinstance(parse_partial_json(arguments + ending) if arguments + ending else {}, dict):
                return ending
        except ValueError:
            return ending
    return ""
