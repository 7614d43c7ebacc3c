"""GenerationRequest: what a call may ask for, validated. Every engine takes it. Imports no torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from agentspec.chat import ChatTemplate, Grammar, History, PreparedChat, encodable, prepare
from agentspec.errors import ContextLengthError, InvalidRequestError, UnknownOptionError, nearest, shown, spread
from agentspec.loop import Trajectory, current_trajectory
from agentspec.memory import Span

if TYPE_CHECKING:
    from agentspec.drafting import Draft

__all__ = [
    "Constraint",
    "GenerationRequest",
    "bad_word_ids",
    "chat_request",
    "check_fits",
    "constraint_of",
    "whole_number",
]

# Below it a sample is the likeliest id anyhow, and scores divided by it overflow.
LEAST_TEMPERATURE = 1e-6
MOST_BIAS = 1e30  # what float32 logits hold, with room for penalties


@runtime_checkable
class Constraint(Protocol):
    """Restricts what one choice may emit (a grammar). The engine calls, position by position:

        draft = constraint.cut(draft)        before verification: without the nodes that it forbids
        constraint.mask(logits)              float32[vocabulary], in place: -inf where an id is forbidden here
        constraint.advance(token)            the id that was emitted; never taken back

    mask sees every position after `advance` was called for all ids before it, so `cut` has to leave the state as it
    found it. `forced` gives ids that have to follow (no proposal needed); empty where there is a choice.
    """

    def cut(self, draft: Draft) -> Draft: ...

    def forced(self, most: int) -> Sequence[int]: ...

    def mask(self, logits: np.ndarray) -> None: ...

    def advance(self, token: int) -> None: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationRequest:
    """One call. Raises InvalidRequestError for a value out of range; `of` also UnknownOptionError.

    input_ids:    the prompt, token ids
    max_tokens:   most tokens to emit; None: as many as the context allows
    min_tokens:   no EOS, stop string or stop token before so many tokens
    trajectory:   whose memory to use; None: the current one (agentspec.trajectory), else a new one for this call
    spans:        the prompt's messages (see memory.Span); None: found from the chat template's special tokens
    draft:        False: plain decoding, one token a step
    n:            choices to generate, one after another; choice i is drawn with (seed, i)

    temperature:  0: greedy, and so is what is below 1e-6. Truncation as in transformers, in this order, after the
                  temperature:
    top_k:        the k most likely ids; 0: all
    top_p:        the fewest most likely ids that hold p of the mass; 1: all
    min_p:        ids at least min_p times as likely as the likeliest; 0: all
    seed:         whole number; the same seed and prompt give the same text. None: made up (CallStats.seed has it)

    repetition_penalty:  > 1 makes ids of prompt and output less likely (transformers' definition); 1: off
    presence_penalty:    subtracted from the logit of each id in the output; 0: off
    frequency_penalty:   subtracted once for each time the id occurs in the output; 0: off
    logit_bias:          id -> what is added to its logit: up to 1e30 either way, or -inf (never)
    bad_words:           texts or id sequences that may not come
    stop:                texts that end the output; not part of the text
    stop_token_ids:      ids, or sequences of ids, that end the output; part of the ids, not of the text
    ignore_eos:          go on after EOS, until max_tokens or a stop

    logprobs:     give each emitted id's log probability by the model itself (before penalties and temperature)
    top_logprobs: and those of so many likeliest ids (implies logprobs)
    constraint:   called once per choice, makes its Constraint
    """

    input_ids: Sequence[int]
    max_tokens: int | None = None
    min_tokens: int = 0
    trajectory: Trajectory | None = None
    spans: Sequence[Span] | None = None
    draft: bool = True
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str | Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int | Sequence[int]] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    constraint: Callable[[], Constraint] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.input_ids, (str, bytes)) or not hasattr(self.input_ids, "__getitem__"):
            raise InvalidRequestError(
                f"input_ids: needed a list of token ids, got {shown(self.input_ids)}; text goes to chat()"
            )
        if self.trajectory is not None and not isinstance(self.trajectory, Trajectory):
            raise InvalidRequestError(
                f"trajectory: needed an agentspec.Trajectory or None, got {shown(self.trajectory)}; "
                f"`with agentspec.trajectory(id):` makes one"
            )
        spans = () if self.spans is None else self.spans
        if not isinstance(spans, Sequence) or not all(isinstance(span, Span) for span in spans):
            raise InvalidRequestError(f"spans: needed a list of agentspec.memory.Span or None, got {shown(self.spans)}")
        for span in spans:
            whole_number("spans: a start", span.start, 0)
            whole_number("spans: an end", span.end, 0)
        whole_number("max_tokens", self.max_tokens, 1, optional=True)
        whole_number("min_tokens", self.min_tokens, 0)
        whole_number("n", self.n, 1, 128)
        whole_number("top_k", self.top_k, 0)
        whole_number("top_logprobs", self.top_logprobs, 0)
        whole_number("seed", self.seed, 0, 2**64 - 1, optional=True)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        for name in ("draft", "ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}: needed True or False, got {shown(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({shown(self.min_tokens)}) is more than max_tokens ({shown(self.max_tokens)})"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(f"logit_bias: needed a mapping of ids to numbers, got {shown(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            whole_number("logit_bias: an id", token, 0)
            if not (isinstance(bias, (float, np.floating)) and bias == -math.inf):
                _number(f"logit_bias of {shown(token)}", bias, -MOST_BIAS, MOST_BIAS, kind="-inf or a number")
        stops = (self.stop,) if isinstance(self.stop, str) and self.stop else self.stop
        if isinstance(stops, str) or not isinstance(stops, Sequence):
            raise InvalidRequestError(f"stop: needed a non-empty text or a list of them, got {shown(self.stop)}")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop: needed non-empty texts, got {shown(text)}")
            encodable("stop", text)
        _sequences("stop_token_ids", self.stop_token_ids, texts=False)
        _sequences("bad_words", self.bad_words, texts=True)
        if self.constraint is not None and not callable(self.constraint):
            raise InvalidRequestError("constraint: needed something to call that makes a Constraint")

    @classmethod
    def of(cls, **options: Any) -> GenerationRequest:
        """A request from loose options. Raises UnknownOptionError for one that is none."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise UnknownOptionError(f"unknown option {shown(name)}: {nearest(name, known)}")
        return cls(**options)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(int(i) for i in s) if isinstance(s, Sequence) else (int(s),) for s in self.stop_token_ids)


def check_fits(request: GenerationRequest, vocabulary: int, room: int, why: str) -> None:
    """Raise InvalidRequestError for what is no request or ids that a model doesn't have, ContextLengthError for more
    than `room` tokens.

    room: most tokens of prompt and output; why: what limits it, in words
    """
    if not isinstance(request, GenerationRequest):
        raise InvalidRequestError(
            f"generate: needed a GenerationRequest, got {type(request).__name__}; GenerationRequest(input_ids=..., ...) "
            f"makes one, messages go to chat()"
        )
    try:
        ids = np.asarray(request.input_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"input_ids: needed a flat list of token ids, got {shown(request.input_ids)}"
        ) from error
    if ids.size == 0:
        raise InvalidRequestError("input_ids: needed at least one token, got none")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequestError(f"input_ids: needed a flat list of token ids, got {shown(request.input_ids)}")
    named = {
        "input_ids": (int(ids.min()), int(ids.max())),
        "logit_bias": tuple(request.logit_bias),
        "stop_token_ids": tuple(i for s in request.stop_sequences for i in s),
        "bad_words": tuple(int(i) for w in request.bad_words if not isinstance(w, str) for i in w),
    }
    for name, values in named.items():
        if values and not 0 <= min(values) <= max(values) < vocabulary:
            raise InvalidRequestError(
                f"{name}: this model's ids are 0..{vocabulary - 1}, got {spread(min(values), max(values))}"
            )
    if request.top_logprobs > vocabulary:
        raise InvalidRequestError(f"top_logprobs: the vocabulary has {vocabulary}, got {shown(request.top_logprobs)}")
    if len(ids) >= room:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens, {why} with at least one for the output: shorten the history"
        )
    if request.max_tokens is not None and len(ids) + request.max_tokens > room:
        raise ContextLengthError(
            f"prompt ({len(ids)}) and max_tokens ({shown(request.max_tokens)}) are too long, {why}: ask for at most "
            f"{room - len(ids)}, or shorten the history"
        )


def chat_request(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    history_of: Callable[[Trajectory], History],
    compile: Callable[[Grammar], Callable[[], Constraint]],
    options: Mapping[str, Any],
    **chat: Any,
) -> tuple[GenerationRequest, PreparedChat]:
    """The request that a chat is: what every engine's chat() begins with.

    history_of: a trajectory's outputs; compile: a grammar as the engine's `constraint`; options: GenerationRequest's;
    chat: agentspec.chat.prepare's. Raises InvalidRequestError and its kinds.
    """
    GenerationRequest.of(**{"input_ids": (0,), **options})  # a bad option is told before anything is rendered
    given = {name: value for name, value in options.items() if name != "trajectory"}
    trajectory = options.get("trajectory") or current_trajectory()
    history = history_of(trajectory) if trajectory is not None else History()
    prepared = prepare(template, messages, history=history, **chat)
    if prepared.grammar is not None:
        if given.get("constraint") is not None:
            raise InvalidRequestError("chat: needed one of constraint and a grammar, got both")
        given["constraint"] = compile(prepared.grammar)
    prompt = prepared.prompt
    base = {"input_ids": prompt.input_ids, "spans": prompt.spans, "trajectory": trajectory}
    return GenerationRequest.of(**{**base, **given}), prepared


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """A fresh Constraint for one choice. Raises InvalidRequestError where the request's callable makes none."""
    if request.constraint is None:
        return None
    made = request.constraint()
    if not isinstance(made, Constraint):
        raise InvalidRequestError(
            f"constraint: needed a callable that makes a Constraint (cut, forced, mask, advance), it made {shown(made)}"
        )
    return made


def bad_word_ids(request: GenerationRequest, encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """The ids of bad words, of texts as the tokenizer writes them at a beginning and after a space."""
    words: list[list[int]] = []
    for word in request.bad_words:
        if isinstance(word, str):
            for text in (word, " " + word):
                ids = [int(i) for i in encode(text)]
                if ids and ids not in words:
                    words.append(ids)
        else:
            words.append([int(i) for i in word])
    return words


def whole_number(name: str, value: Any, low: int, high: int | None = None, optional: bool = False) -> None:
    """Raise InvalidRequestError unless value is a whole number in low..high (or, if optional, None)."""
    if optional and value is None:
        return
    try:
        operator.index(value)
        good = not (isinstance(value, bool) or value < low or (high is not None and value > high))
    except Exception:  # whatever somebody's __index__ or comparison may raise
        good = False
    if not good:
        span = f">= {low}" if high is None else f"from {low} to {high}"
        span += " or None" if optional else ""
        raise InvalidRequestError(f"{name}: needed a whole number {span}, got {shown(value)}")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False, kind: str = "a number") -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not good or (open_low and value == low):
        raise InvalidRequestError(
            f"{name}: needed {kind} {'over' if open_low else 'from'} {low:g} to {high:g}, got {shown(value)}"
        )


def _sequences(name: str, values: Any, texts: bool) -> None:
    what = "texts or id sequences" if texts else "ids or id sequences"
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{name}: needed a list of {what}, got {shown(values)}")
    for value in values:
        if isinstance(value, str):
            if not texts or not value:
                raise InvalidRequestError(f"{name}: needed a list of {what}, none empty, got {shown(value)}")
            encodable(name, value)
            continue
        if not texts and not isinstance(value, Sequence):
            whole_number(f"{name}: an id", value, 0)
            continue
        if not isinstance(value, Sequence) or len(value) == 0:
            raise InvalidRequestError(f"{name}: needed a list of {what}, none empty, got {shown(value)}")
        for token in value:
            whole_number(f"{name}: an id", token, 0)
