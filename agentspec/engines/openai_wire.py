"""OpenAI's words: any server with /v1/completions (ids in) or /v1/chat/completions (messages in). Used by sglang.py.

    completions  prompts are rendered here, and where the server tells its token ids (vLLM does), history stays exact
    chat         the server renders and parses; ids and prompts aren't known here

What goes beyond OpenAI's own options is sent to vLLM, SGLang and `agentspec serve` only; elsewhere it is refused, not
ignored. `agentspec serve` is told the trajectory too, and tells its CallStats.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from agentspec.chat import InvalidToolCall, MessageDelta, ToolCallDelta
from agentspec.engines.base import TokenLogprob
from agentspec.engines.http import HttpServer, refusal
from agentspec.engines.remote import Ask, Notice, Piece, ServerInfo, grammar_of
from agentspec.engines.request import GenerationRequest
from agentspec.engines.sglang_wire import plugin_words
from agentspec.errors import GrammarError, InvalidRequestError, ServerError

__all__ = ["ByteTokenizer", "OpenAIServer"]

# GenerationRequest's options beyond OpenAI's, the value that asks for nothing, and their names at vLLM and SGLang
_BEYOND: tuple[tuple[str, Any, str], ...] = (
    ("top_k", 0, "top_k"),
    ("min_p", 0.0, "min_p"),
    ("repetition_penalty", 1.0, "repetition_penalty"),
    ("min_tokens", 0, "min_tokens"),
    ("ignore_eos", False, "ignore_eos"),
)


class ByteTokenizer:
    """Stands in where a server's tokenizer isn't known: an id is a byte of UTF-8."""

    chat_template: str | None = None
    eos_token_id: int | None = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 256

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", "replace")


class OpenAIServer:
    """One OpenAI-compatible server. model: which to ask for; None: its first. chat: by messages, not by ids."""

    def __init__(self, http: HttpServer, model: str | None, chat: bool) -> None:
        self._http = http
        self._model = model
        self._chat = chat
        self.host, self.port = http.host, http.port
        self.info = ServerInfo("openai", model or "")
        self.encode: Any = None  # text -> ids, by the engine's tokenizer; set by the engine

    async def describe(self) -> ServerInfo:
        found = await self._http.get("/v1/models")
        cards = found.get("data") if isinstance(found, Mapping) else None
        if not isinstance(cards, list) or not cards or not all(isinstance(card, Mapping) for card in cards):
            raise ServerError(
                f"{self._http.url}: neither SGLang's /get_model_info nor OpenAI's /v1/models is there; is this a model "
                f"server's address?",
                temporary=False,
            )
        names = [str(card.get("id")) for card in cards]
        if self._model is not None and self._model not in names:
            raise InvalidRequestError(f"model: {self._http.url} serves {', '.join(names)}, got {self._model!r}")
        card = cards[names.index(self._model)] if self._model is not None else cards[0]
        owner = str(card.get("owned_by") or "")
        length = card.get("max_model_len")
        info = ServerInfo(
            kind=owner if owner in ("vllm", "sglang", "agentspec") else "openai",
            plugin=owner == "agentspec",
            model=str(card.get("id")),
            path="" if self._chat else str(card.get("root") or card.get("id")),
            context_length=length if isinstance(length, int) and length > 0 else None,
            ids=owner == "vllm" and not self._chat,
            messages=self._chat,
            seeded=owner in ("vllm", "agentspec"),
        )
        if not info.plugin:
            info.notices.append(
                Notice(
                    "plugin",
                    "not an SGLang server's own API: no drafts from trajectories' memory, the text is the same",
                )
            )
        if self._chat:
            info.notices.append(
                Notice(
                    "token ids",
                    "the server takes messages and gives text: history isn't exact, times and counts are its own",
                    "api='completions' with tokenizer=, where it has /v1/completions",
                )
            )
        elif not info.ids:
            info.notices.append(Notice("token ids", "the server may give text only: then history isn't exact"))
        self.info = info
        return info

    # ---- what is sent -------------------------------------------------------------------------

    def body(self, ask: Ask) -> dict[str, Any]:
        request = ask.request
        made: dict[str, Any] = {
            "model": self.info.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": request.temperature,
            "top_p": request.top_p,
        }
        beyond = self.info.kind != "openai"
        if request.max_tokens is not None or (self.info.context_length is not None and not self._chat):
            made["max_tokens"] = ask.room
        for option in ("presence_penalty", "frequency_penalty"):
            if getattr(request, option):
                made[option] = getattr(request, option)
        for option, nothing, name in _BEYOND:
            if getattr(request, option) != nothing:
                if not beyond:
                    raise InvalidRequestError(
                        f"{option}: OpenAI's API has no such option, and {self._http.url} is no vLLM"
                    )
                made[name] = getattr(request, option)
        if ask.seed is not None:
            made["seed"] = ask.seed
        if request.stop_texts:
            made["stop"] = list(request.stop_texts)
        bias = {str(token): max(-100.0, float(value)) for token, value in request.logit_bias.items()}
        if ask.bad_words:
            raise InvalidRequestError(
                "bad_words: OpenAI's API has no such option; logit_bias of -inf forbids single ids"
            )
        if bias:
            made["logit_bias"] = bias
        if self.info.kind in ("vllm", "sglang"):
            made["stream_options"]["continuous_usage_stats"] = True
        if self.info.plugin:
            if ask.session is not None:
                made["session_id"] = ask.session
            told = {name: value for name, value in plugin_words(ask).items() if name != "agentspec_spans"}
            if told:
                made["custom_params"] = told
        if self._chat:
            return made | self._messages(ask, request)
        if self.info.kind == "vllm":
            made["return_token_ids"] = True
            made["include_stop_str_in_output"] = True  # the engine looks for stops itself
        made["prompt"] = [int(i) for i in request.input_ids]
        if request.logprobs or request.top_logprobs:
            made["logprobs"] = request.top_logprobs
            if self.info.kind == "vllm":
                made["return_tokens_as_token_ids"] = True
        return made | self._grammar(request)

    def _messages(self, ask: Ask, request: GenerationRequest) -> dict[str, Any]:
        chat = dict(ask.chat or {})
        made: dict[str, Any] = {"messages": [dict(message) for message in chat["messages"]]}
        if request.stop_sequences:
            raise InvalidRequestError("stop_token_ids: a server that takes messages gives no ids; use stop texts")
        if request.logprobs or request.top_logprobs:
            raise InvalidRequestError("logprobs: a server that takes messages gives no ids; use api='completions'")
        if chat.get("tools"):
            made["tools"] = [dict(tool) for tool in chat["tools"]]
            choice = chat.get("tool_choice")
            if isinstance(choice, (list, tuple)):
                raise InvalidRequestError("tool_choice: a plan of calls needs a grammar here; this server has its own")
            if isinstance(choice, str) and choice not in ("auto", "none", "required", "any"):
                choice = {"type": "function", "function": {"name": choice}}
            if choice is not None:
                made["tool_choice"] = "required" if choice in ("any", True) else choice
            if chat.get("parallel_tool_calls") is not None:
                made["parallel_tool_calls"] = chat["parallel_tool_calls"]
        if chat.get("response_format") is not None:
            made["response_format"] = chat["response_format"]
        if chat.get("template_options"):
            if self.info.kind == "openai":
                raise InvalidRequestError("template_options: OpenAI's API has none; vLLM and SGLang take them")
            made["chat_template_kwargs"] = chat["template_options"]
        if chat.get("grammar") is not None:
            raise GrammarError("grammar: a server that takes messages takes a response_format only")
        return made

    def _grammar(self, request: GenerationRequest) -> dict[str, Any]:
        grammar = grammar_of(request)
        if grammar is None:
            return {}
        if grammar.source is not None and not grammar.parts:
            kind, text = grammar.source
            if kind == "json_schema":
                schema = {"name": "output", "schema": json.loads(text)}
                return {"response_format": {"type": "json_schema", "json_schema": schema}}
            if self.info.kind == "vllm":
                return {"structured_outputs": {"regex" if kind == "regex" else "grammar": text}}
            if self.info.kind == "sglang":
                return {kind: text}
        raise GrammarError(f"grammar: {self._http.url} takes JSON schemas here, and this is another kind")

    # ---- what comes ---------------------------------------------------------------------------

    async def stream(self, ask: Ask, body: dict[str, Any], headers: Mapping[str, str]) -> AsyncIterator[Piece]:
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        reader = _Reader(self._http.url + path, self.encode, self._chat, self.info.ids)
        events = self._http.events(path, body, headers)
        try:
            async for event in events:
                piece = reader.piece(event)
                if piece is not None:
                    yield piece
            # The usage comes after the finish, so the finish waits for the end of the stream.
            yield reader.last()
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def abort(self, id: str) -> None:
        pass  # hanging up is all that there is

    async def close(self) -> None:
        await self._http.close()

    def abandon(self) -> None:
        self._http.abandon()


class _Reader:
    """The chunks of one answer as Pieces. ids: the server gives them; encode: text -> ids where it doesn't."""

    def __init__(self, where: str, encode: Any, chat: bool, ids: bool) -> None:
        self._where = where
        self._encode = encode
        self._chat = chat
        self._ids = ids
        self._finish = ""
        self._matched: Any = None
        self._meta: dict[str, Any] = {}
        self._calls: dict[int, dict[str, str]] = {}
        self._counted = 0

    def piece(self, event: Mapping[str, Any]) -> Piece | None:
        if "error" in event or event.get("object") == "error":
            said = event.get("error") or event
            code = said.get("code") if isinstance(said, Mapping) else None
            raise refusal(self._where, code if isinstance(code, int) else 500, json.dumps({"error": said}))
        usage = event.get("usage")
        counted: int | None = None
        if isinstance(usage, Mapping):
            self._meta["prompt_tokens"] = usage.get("prompt_tokens")
            details = usage.get("prompt_tokens_details")
            self._meta["cached_tokens"] = details.get("cached_tokens") if isinstance(details, Mapping) else None
            total = self._meta["completion_tokens"] = usage.get("completion_tokens")
            if isinstance(total, int) and total >= self._counted:
                counted, self._counted = total - self._counted, total
        if isinstance(event.get("agentspec"), Mapping):
            self._meta["call_stats"] = event["agentspec"]
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise ServerError(f"{self._where}: needed choices, got {json.dumps(event, default=str)[:200]}")
        if not choices:
            return None  # the usage of the whole
        choice = choices[0]
        if not isinstance(choice, Mapping):
            raise ServerError(f"{self._where}: needed a choice, got {choice!r:.200}")
        reason = choice.get("finish_reason")
        if reason is not None:
            self._finish = "length" if reason == "length" else "stop"
            self._matched = choice.get("stop_reason")
        return self._delta(choice, counted) if self._chat else self._text(choice, counted)

    def last(self) -> Piece:
        """The end. Raises ServerError where the server never said why it ended."""
        if not self._finish:
            raise ServerError(f"{self._where}: the stream ended without a finish_reason")
        delta = None
        if self._chat:
            ended, invalid = [], []
            for index, call in sorted(self._calls.items()):
                try:
                    if not isinstance(json.loads(call["arguments"] or "{}"), dict):
                        raise ValueError("the arguments are no JSON object")
                    ended.append(index)
                except ValueError as error:
                    invalid.append(InvalidToolCall(index, call["id"], call["name"], call["arguments"], str(error)))
            delta = MessageDelta(invalid_tool_calls=tuple(invalid), ended=tuple(ended))
        return Piece(finish=self._finish, matched=self._matched, meta=self._meta, delta=delta)

    def _text(self, choice: Mapping[str, Any], counted: int | None) -> Piece | None:
        text, ids = choice.get("text") or "", choice.get("token_ids")
        if ids is None and self._ids and text:
            raise ServerError(
                f"{self._where}: needed token_ids, which vLLM gives from 0.10.2 on; with an older one use api='chat'",
                temporary=False,
            )
        if ids is None:
            ids = self._encode(text) if text else []
        elif not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ServerError(f"{self._where}: needed token ids, got {ids!r:.120}")
        if not ids and not counted:
            return None
        return Piece(ids, _logprobs(choice.get("logprobs"), ids), meta=self._meta, tokens=counted)

    def _delta(self, choice: Mapping[str, Any], counted: int | None) -> Piece | None:
        said = choice.get("delta")
        if not isinstance(said, Mapping):
            raise ServerError(f"{self._where}: needed a delta, got {choice!r:.200}")
        content = said.get("content") or ""
        calls = []
        for given in said.get("tool_calls") or ():
            index, function = int(given.get("index") or 0), given.get("function") or {}
            known = index in self._calls
            call = self._calls.setdefault(
                index, {"id": given.get("id") or f"call_{index}", "name": "", "arguments": ""}
            )
            name = None if known else str(function.get("name") or "")
            call["name"] = call["name"] or name or ""
            call["arguments"] += function.get("arguments") or ""
            calls.append(ToolCallDelta(index, call["id"], name, function.get("arguments") or ""))
        reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
        delta = MessageDelta(content, reasoning, tuple(calls))
        if not delta and not counted:
            return None
        written = content + reasoning + "".join(call.arguments for call in calls)
        ids = self._encode(written) if written else []
        return Piece(ids, meta=self._meta, text=content, tokens=counted, delta=delta)


def _logprobs(given: Any, ids: Sequence[int]) -> list[TokenLogprob]:
    """OpenAI's lists, where they are those of our ids; vLLM names tokens as token_id:N."""
    if not isinstance(given, Mapping) or len(given.get("token_logprobs") or ()) != len(ids):
        return []
    tops = given.get("top_logprobs") or [None] * len(ids)
    found = []
    for token, value, top in zip(ids, given["token_logprobs"], tops, strict=False):
        likely = tuple(
            (int(name[len("token_id:") :]), float(v)) for name, v in (top or {}).items() if name.startswith("token_id:")
        )
        found.append(TokenLogprob(token, float(value), likely))
    return found
