"""OpenAI's requests, checked, as what an engine takes.

A field that nobody here knows is an error, never ignored: so is one of OpenAI's that this server can't honour.
May import pydantic and the engine's request; called by app.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentspec.chat.history import message_key
from agentspec.errors import InvalidRequestError, UnknownOptionError, nearest
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


_TEXTS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning", "thinking")
# What an answer of ours, or OpenAI's client beside it, has in a message; templates are not told of the last three.
_MESSAGE = ("role", "content", "tool_calls", *_TEXTS, "invalid_tool_calls", "annotations", "parsed")
_CALL = ("id", "type", "index", "function")
_FUNCTION = ("name", "arguments", "parsed_arguments")


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Without fields that are null (an SDK's model_dump writes them), text parts as one text."""
    where = f"messages[{number}]"
    told = {key: value for key, value in message.items() if value is not None}
    if not isinstance(told.get("role"), str):
        raise InvalidRequestError(f"{where}: needed a 'role', got {json.dumps(message)[:120]}")
    _known(where, told, _MESSAGE)
    for key in _TEXTS:
        if not isinstance(told.get(key, ""), str):
            raise InvalidRequestError(f"{where}.{key}: needed a text, got {told[key]!r:.80}")
    if "content" in told:
        told["content"] = _content(f"{where}.content", told["content"])
    for key in ("tool_calls", "invalid_tool_calls", "annotations"):
        value = told.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise InvalidRequestError(f"{where}.{key}: needed a list of objects, got {value!r:.80}")
    for place, call in enumerate(told.get("tool_calls", ())):
        _check_call(f"{where}.tool_calls[{place}]", call)
    if "content" not in told and ("reasoning_content" in told or "invalid_tool_calls" in told):
        told["content"] = ""  # an answer of ours that was cut inside its thoughts or a call
    for key in ("invalid_tool_calls", "annotations", "parsed"):
        told.pop(key, None)
    return told


def _check_call(where: str, call: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError unless it is {"id", "type": "function", "function": {"name", "arguments"}}."""
    call = {key: value for key, value in call.items() if value is not None}
    _known(where, call, _CALL)
    function = call.get("function")
    if not isinstance(call.get("id", ""), str) or call.get("type", "function") != "function":
        raise InvalidRequestError(f"{where}: needed an id that is a text and the type 'function', got {call!r:.120}")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"{where}.function: needed {{'name': text, 'arguments': JSON text}}, got {function!r:.80}"
        )
    _known(f"{where}.function", function, _FUNCTION)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequestError(f"{where}.function.name: needed a text, got {function.get('name')!r:.80}")
    if not isinstance(function.get("arguments"), (str, Mapping)):
        raise InvalidRequestError(
            f"{where}.function.arguments: needed JSON text or an object, got {function.get('arguments')!r:.80}"
        )


def _content(where: str, content: Any) -> str:
    """A text, or a list of text parts as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}: needed a text or a list of text parts, got {content!r:.80}")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{where}[{place}]: needed {{'type': 'text', 'text': text}}, since this server reads text only, "
                f"got {part!r:.80}"
            )
        _known(f"{where}[{place}]", part, ("type", "text"))
        texts.append(part["text"])
    return "".join(texts)


def _known(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise UnknownOptionError(f"{where}: this server knows no field {key!r:.80} there: {nearest(key, known)}")


def _prediction(given: Mapping[str, Any] | None) -> tuple[Seed, ...]:
    """OpenAI's predicted output is draft material."""
    if given is None:
        return ()
    _known("prediction", given, ("type", "content"))
    if given.get("type") != "content":
        raise InvalidRequestError(f"prediction: needed {{'type': 'content', 'content': text}}, got {given!r:.80}")
    content = _content("prediction.content", given.get("content"))
    return (Seed(content),) if content else ()


def _own(params: Mapping[str, Any]) -> tuple[str | None, str | None, bool, tuple[Seed, ...]]:
    """custom_params: trajectory, namespace, draft, seeds."""
    for key in params:
        if not key.startswith(_PREFIX) or key[len(_PREFIX) :] not in _KEYS:
            known = [_PREFIX + k for k in _KEYS]
            raise UnknownOptionError(f"custom_params: unknown key {key:.80}: {nearest(key, known)}")
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
