"""OpenAI's requests, checked, as what an engine takes.

A field that nobody here knows is an error, never ignored: so is one of OpenAI's that this server can't honour.
May import pydantic and the engine's request; called by app.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentspec.chat.history import message_key
from agentspec.errors import InvalidRequestError, UnknownOptionError
from agentspec.loop import Seed

__all__ = ["Asked", "ChatRequest", "CompletionRequest"]

_PREFIX = "agentspec_"
_SAMPLING = (
    "max_tokens",
    "n",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
_KEYS = ("trajectory", "namespace", "draft", "seed_ids", "seed_texts")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(BaseModel):
    """What both kinds of request may say. None is the same as leaving the field out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Said about the caller, not about the text: taken, and kept nowhere.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    # As SGLang and vLLM spell them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    # What SGLang's router writes into every request, at the only value that holds here.
    no_stop_trim: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None
    # Whose memory: as SGLang with the agentspec plugin takes them.
    session_id: str | None = None
    cache_salt: str | None = None
    custom_params: dict[str, Any] | None = None


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    continue_final_message: Literal[False] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None


@dataclass(slots=True, frozen=True)
class Asked:
    """A request, whoever sends it.

    messages:   a chat's, else None; prompt: a completion's text or ids, else None
    options:    for the engine: chat()'s, GenerationRequest's
    said:       what follows it has to begin with (bytes), apart from the answer; see `seen`
    session:    the trajectory's name, and which field named it; None: followed by the prompt
    salt, namespace: inside the tenant: who else may share the memory
    seeds:      draft material, for this call
    predicted:  OpenAI's prediction is among the seeds
    """

    model: str
    stream: bool
    include_usage: bool
    options: dict[str, Any]
    said: bytes
    messages: list[dict[str, Any]] | None = None
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False
    session: str | None = None
    joined_by: str = "prompt"
    salt: str = ""
    namespace: str | None = None
    seeds: tuple[Seed, ...] = ()
    predicted: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest, session_header: str | None = None) -> Asked:
        """Raises InvalidRequestError and its kinds. session_header: X-Session-Id, where there is no session_id."""
        options = _sampling(request)
        trajectory, namespace, draft, seeds = _own(request.custom_params or {})
        options["draft"] = draft
        named = (
            (request.session_id, "session_id"),
            (session_header, "x-session-id"),
            (trajectory, "custom_params"),
        )
        session, joined_by = next(((n, by) for n, by in named if n is not None), (None, "prompt"))
        if session == "":
            raise InvalidRequestError(f"{joined_by}: needed a name that isn't empty")
        common: dict[str, Any] = {
            "model": request.model,
            "stream": bool(request.stream),
            "include_usage": bool(request.stream_options and request.stream_options.include_usage),
            "options": options,
            "session": session,
            "joined_by": joined_by,
            "salt": request.cache_salt or "",
            "namespace": namespace,
        }
        if request.stream_options is not None and not request.stream:
            raise InvalidRequestError("stream_options: only with stream: true")
        if isinstance(request, CompletionRequest):
            prompt = _completion(request, options)
            said = prompt.encode() if isinstance(prompt, str) else _ids_bytes(prompt)
            return cls(**common, said=b"text\n" + said, prompt=prompt, echo=bool(request.echo), seeds=seeds)
        messages = [_message(message, number) for number, message in enumerate(request.messages)]
        predicted = _prediction(request.prediction)
        return cls(
            **common,
            said=b"chat\n" + b"".join(_line(message) for message in messages),
            messages=messages,
            seeds=(*seeds, *predicted),
            predicted=bool(predicted),
            template_options=_chat(request, options),
        )

    def seen(self, answer: Any) -> bytes:
        """What the next request of the conversation begins with, as `said` of that one. answer: the result."""
        if self.messages is not None:
            return self.said + _line(answer.message)
        return self.said + (answer.text.encode() if isinstance(self.prompt, str) else _ids_bytes(answer.token_ids))


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps([message["role"], message_key(message)]).encode() + b"\n"


def _ids_bytes(ids: Sequence[int]) -> bytes:
    return b"".join(b"%d," % i for i in ids)


def _sampling(request: _Request) -> dict[str, Any]:
    """GenerationRequest's options. OpenAI's defaults: a temperature of 1."""
    options: dict[str, Any] = {"temperature": 1.0}
    for name in _SAMPLING:
        value = getattr(request, name)
        if value is not None:
            options[name] = value
    if request.logit_bias is not None:
        try:
            options["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        except ValueError as error:
            raise InvalidRequestError(f"logit_bias: needed token ids as keys: {error}") from error
    return options


def _chat(request: ChatRequest, options: dict[str, Any]) -> dict[str, Any]:
    """Adds a chat's own options; returns the template's variables."""
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequestError("max_tokens and max_completion_tokens say the same; give one of them")
        options["max_tokens"] = request.max_completion_tokens
    for name in ("tools", "tool_choice", "parallel_tool_calls", "response_format"):
        value = getattr(request, name)
        if value is not None:
            options[name] = value
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs: only with logprobs: true")
    if request.logprobs:
        options["logprobs"], options["top_logprobs"] = True, request.top_logprobs or 0
    given = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        given["reasoning_effort"] = request.reasoning_effort
    return given


def _completion(request: CompletionRequest, options: dict[str, Any]) -> str | tuple[int, ...]:
    prompt: Any = request.prompt
    if prompt and isinstance(prompt, list) and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequestError(f"prompt: needed one prompt a request, got {len(prompt)}; send them one by one")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequestError("prompt: needed a text or token ids, got nothing")
    if request.best_of not in (None, request.n or 1):
        raise InvalidRequestError(
            f"best_of: this server gives every choice that it makes; needed n, got {request.best_of}"
        )
    options.setdefault("max_tokens", 16)  # OpenAI's default
    if request.logprobs is not None:
        if request.echo:
            raise InvalidRequestError(
                "echo: the prompt's log probabilities aren't computed; ask for one of echo and logprobs"
            )
        options["logprobs"], options["top_logprobs"] = True, request.logprobs
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Without fields that are null (an SDK's model_dump writes them), text parts as one text."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{number}]: needed a 'role', got {json.dumps(message)[:120]}")
    told = {key: value for key, value in message.items() if value is not None}
    content = told.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        told["content"] = "".join(part["text"] for part in content)
    if not isinstance(told.get("tool_calls", []), list) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)
        for call in told.get("tool_calls", [])
    ):
        raise InvalidRequestError(f"messages[{number}].tool_calls: needed a list of calls")
    return told


def _prediction(given: Mapping[str, Any] | None) -> tuple[Seed, ...]:
    """OpenAI's predicted output is draft material."""
    if given is None:
        return ()
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, Mapping) else "" for part in content)
    if given.get("type") != "content" or not isinstance(content, str):
        raise InvalidRequestError("prediction: needed {'type': 'content', 'content': text}")
    return (Seed(content),) if content else ()


def _own(params: Mapping[str, Any]) -> tuple[str | None, str | None, bool, tuple[Seed, ...]]:
    """custom_params: trajectory, namespace, draft, seeds."""
    for key in params:
        if not key.startswith(_PREFIX) or key[len(_PREFIX) :] not in _KEYS:
            known = [_PREFIX + k for k in _KEYS]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise UnknownOptionError(f"custom_params: unknown key {key}: {hint}")
    own = {key[len(_PREFIX) :]: value for key, value in params.items() if value is not None}
    for key in ("trajectory", "namespace"):
        if key in own and (not isinstance(own[key], str) or not own[key]):
            raise InvalidRequestError(
                f"custom_params.{_PREFIX}{key}: needed a text that isn't empty, got {own[key]!r:.80}"
            )
    draft = own.get("draft", True)
    if not isinstance(draft, bool):
        raise InvalidRequestError(f"custom_params.{_PREFIX}draft: needed true or false, got {draft!r:.80}")
    texts = own.get("seed_texts", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"custom_params.{_PREFIX}seed_texts: needed a list of texts")
    ids = own.get("seed_ids", [])
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and -1 <= i < 2**31 for i in ids
    ):
        raise InvalidRequestError(f"custom_params.{_PREFIX}seed_ids: needed token ids, -1 between pieces")
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == -1:
            pieces.append([])
        else:
            pieces[-1].append(token)
    seeds = [Seed(text) for text in texts if text] + [Seed(tuple(piece)) for piece in pieces if piece]
    return own.get("trajectory"), own.get("namespace"), draft, tuple(seeds)
