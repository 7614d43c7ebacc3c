"""What every engine does with one choice's ids: where they end, the chunk that the consumer gets, the history's record.

Called by LocalEngine (local.py, decoding.py) and by SGLangEngine. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentspec.chat import History, MessageParser, OutputRecord, PreparedChat
from agentspec.engines.base import TokenChunk, TokenLogprob
from agentspec.engines.request import GenerationRequest
from agentspec.engines.stops import Stopper

__all__ = ["make_stopper", "remember", "token_chunk"]


def make_stopper(
    tokenizer: Any,
    request: GenerationRequest,
    eos_ids: frozenset[int],
    room: int,
    prepared: PreparedChat | None,
) -> Stopper:
    """The Stopper of one choice. room: most tokens that may come, whatever the request says."""
    return Stopper(
        tokenizer,
        frozenset() if request.ignore_eos else eos_ids,
        room if request.max_tokens is None else min(room, request.max_tokens),
        request.stop_texts,
        request.stop_sequences,
        request.min_tokens,
        prepared.keep_ids if prepared is not None else (),
    )


def token_chunk(
    stopper: Stopper,
    parser: MessageParser | None,
    ids: Sequence[int],
    time_ns: int,
    logprobs: Sequence[TokenLogprob] = (),
    index: int = 0,
) -> TokenChunk:
    """The chunk of ids that were pushed into the stopper since the last chunk."""
    text, delta = stopper.take(), None
    if parser is not None:
        delta = parser.finish(text) if stopper.finish_reason else parser.push(text)
    return TokenChunk(
        tuple(ids),
        text,
        time_ns,
        stopper.finish_reason or None,
        tuple(logprobs),
        index,
        stopper.stop_reason,
        delta,
    )


def remember(
    history: History,
    tokenizer: Any,
    eos_ids: frozenset[int],
    ids: Sequence[int],
    stopper: Stopper,
    parser: MessageParser | None,
    prepared: PreparedChat | None,
    aborted: bool,
) -> None:
    """Keep an output for the next prompt. ids: those that the consumer has, of an aborted call only the delivered."""
    if not len(ids):
        return
    record = OutputRecord.of(tokenizer, ids, eos_ids)
    text = record.text if aborted else stopper.text
    message = {"role": "assistant", "content": text} if parser is None else parser.message()
    history.add(record, message, prepared.prompt.text if prepared is not None else None)
