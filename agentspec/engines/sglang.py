"""SGLangEngine: the model runs in SGLang, with our plugin or without, on this machine or another, or in this process.

    SGLangEngine("http://127.0.0.1:30000")          a running server: SGLang, or any OpenAI-compatible one (vLLM)
    SGLangEngine(engine=sglang.Engine(...))         in this process

Prompts are rendered and outputs read here, by the model's own tokenizer, as LocalEngine does it: ids go in and ids come
out. Calls run beside one another in one background loop (background.py); how a server is asked is sglang_wire.py's and
openai_wire.py's. Imports no torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentspec import telemetry
from agentspec.chat import ChatTemplate, Grammar, History, PreparedChat, ToolFormat, check_chat, encodable
from agentspec.engines import models
from agentspec.engines.background import Background
from agentspec.engines.base import CallStats, Channel, Generation, GenerationRequest
from agentspec.engines.conversations import Conversation, Conversations, divergence
from agentspec.engines.http import HttpServer
from agentspec.engines.openai_wire import ByteTokenizer, OpenAIServer
from agentspec.engines.outputs import make_stopper
from agentspec.engines.remote import Ask, Notice, ServedGrammar, Server, ServerInfo
from agentspec.engines.remote_call import Client, Output, RemoteCall
from agentspec.engines.request import bad_word_ids, chat_request, check_fits
from agentspec.engines.sglang_wire import SGLangHttp
from agentspec.errors import EngineClosedError, EngineError, InvalidRequestError, ModelError
from agentspec.loop import Trajectory, current_trajectory

__all__ = ["SGLangEngine"]

logger = logging.getLogger("agentspec.engines")

_ENDLESS = 2**31 - 1  # tokens, where no limit is known


class SGLangEngine:
    """A client of a server, or of an sglang.Engine in this process.

    base_url:   the server's address, with or without /v1
    engine:     an sglang.Engine; from then on it is driven by this object alone, until close()
    model:      the model to ask for, where the server has several; None: what it serves
    tokenizer:  a transformers tokenizer, or where to load one (a directory, a Hugging Face id); None: as the server says
    tool_format: how the model writes tool calls (agentspec.chat.formats); None: as its chat template tells
    api_key:    the server's
    tenant:     keeps memory and prefix cache apart from other tenants' on an SGLang server; None: by the key, if any
    api:        how to ask: "sglang", "completions", "chat" (the last two of an OpenAI-compatible server), or "auto"
    retries:    how often a call is tried again while nothing of it has arrived
    connect_timeout, first_timeout, read_timeout: most seconds for the connection, from the request to its first token
                (queueing included), and between tokens

    What the server doesn't give is in `notices` and logged once. Raises ServerError where the server can't be reached
    or isn't one, ModelError where its tokenizer can't be had, InvalidRequestError for a bad option.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        engine: Any = None,
        model: str | None = None,
        tokenizer: Any = None,
        tool_format: str | ToolFormat | None = None,
        api_key: str | None = None,
        tenant: str | None = None,
        api: str = "auto",
        retries: int = 2,
        connect_timeout: float = 10.0,
        first_timeout: float = 600.0,
        read_timeout: float = 120.0,
    ) -> None:
        if (base_url is None) == (engine is None):
            raise InvalidRequestError("SGLangEngine: needed one of base_url and engine")
        for name, value in (("connect", connect_timeout), ("first", first_timeout), ("read", read_timeout)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise InvalidRequestError(f"{name}_timeout: needed seconds over 0, got {value!r}")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidRequestError(f"retries: needed a whole number >= 0, got {retries!r}")
        self._closed = False
        self._calls: weakref.WeakSet[RemoteCall] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self.notices: list[Notice] = []
        self._conversations = Conversations()
        forked = weakref.WeakMethod(self._forked)
        self._background = Background(lambda: _call(forked), getattr(engine, "loop", None))
        self._finalizer = weakref.finalize(self, self._background.stop)
        try:
            if engine is not None:
                from agentspec.engines.sglang_process import SGLangInProcess

                self._server: Server = SGLangInProcess(engine, tenant)
            else:
                assert base_url is not None
                http = HttpServer(base_url, api_key, connect_timeout=connect_timeout)
                scope = tenant if tenant is not None else _scope(api_key)
                self._server = self._background.run(_server(http, api, model, scope))
            self.info: ServerInfo = self._background.run(self._server.describe())
            served = {self.info.model, self.info.path, os.path.basename(self.info.model)}
            if model is not None and model not in served:
                raise InvalidRequestError(f"model: the server serves {self.info.model}, got {model!r}; leave model out")
            for notice in self.info.notices:
                self._say(notice)
            self.model_name = model or self.info.model
            self._load_tokenizer(tokenizer, tool_format)
            self._client = Client(
                server=self._server,
                info=self.info,
                model=self.model_name,
                tokenizer=self.tokenizer,
                vocabulary=self.vocabulary,
                eos_ids=models.eos_ids(self._generation_config, self.tokenizer),
                retries=retries,
                first_timeout=first_timeout,
                read_timeout=read_timeout,
                say=self._say,
                spawn=self._background.spawn,
            )
        except BaseException:
            self._finalizer()
            raise

    def _load_tokenizer(self, tokenizer: Any, tool_format: str | ToolFormat | None) -> None:
        generation_config = None
        vocabulary = 0
        if tokenizer is None and self.info.messages:
            self.tokenizer: Any = ByteTokenizer()
        elif tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
            place = os.fspath(tokenizer) if tokenizer is not None else self.info.path
            try:
                loaded = models.load_tokenizer(place)
            except ModelError as error:
                if tokenizer is not None:
                    raise
                raise type(error)(
                    f"the server's tokenizer, {place!r}, can't be had here: {error}; pass tokenizer= a directory, a Hugging "
                    f"Face id or a loaded tokenizer"
                ) from error
            self.tokenizer, generation_config, vocabulary = loaded
        else:
            self.tokenizer = tokenizer
        # SGLang dies of an id that the model doesn't have, so a prompt is held to those that it surely has.
        self.vocabulary = vocabulary or len(self.tokenizer)
        self._generation_config = generation_config
        self.context_length = self.info.context_length or _ENDLESS
        self.template = ChatTemplate(self.tokenizer, tool_format)
        if isinstance(self._server, OpenAIServer):
            self._server.encode = self._encode

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end an output, as far as they are known here."""
        return self._client.eos_ids

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    # ---- the Engine protocol ------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> Generation:
        """Start a call on token ids. Raises InvalidRequestError and its kinds, EngineClosedError."""
        if self.info.messages:
            raise InvalidRequestError(
                "generate: this server takes messages, not ids; call chat(), or use api='completions'"
            )
        return self._submit(request, None, None, None)

    def compile(self, grammar: Grammar) -> ServedGrammar:
        """The grammar for this server, to be passed as a request's `constraint`."""
        return ServedGrammar(grammar)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        grammar: Grammar | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Start a call on messages, by the model's own chat template. As LocalEngine.chat."""
        asked = {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "grammar": grammar,
            "template_options": template_options,
        }
        if self.info.messages:
            check_chat(messages, **asked)
            said = "\n".join(str(message.get("content") or "") for message in messages) or "\n"
            request = GenerationRequest.of(**{"input_ids": self._encode(encodable("messages", said)), **options})
            return self._submit(request, None, messages, {"messages": messages, **asked})
        request, prepared = chat_request(self.template, messages, self.history, self.compile, options, **asked)
        return self._submit(request, prepared, messages, {"messages": messages, **asked})

    def close(self) -> None:
        """End the calls under way with EngineClosedError, and the connections. The server goes on."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self._background.stopped:
            self._background.run(self._shut())
        self._finalizer()

    def __enter__(self) -> SGLangEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an SGLangEngine can't be sent to another process: make one there")

    def history(self, trajectory: Trajectory) -> History:
        """The outputs of a trajectory, for exact history."""
        return self._conversations.get(trajectory).history

    def forget(self, trajectory: Trajectory) -> None:
        """Free what is held here for a trajectory. What the server holds goes when its memory is full."""
        self._conversations.forget(trajectory)

    # ---- requests -----------------------------------------------------------------------------

    def _submit(
        self,
        request: GenerationRequest,
        prepared: PreparedChat | None,
        messages: Sequence[Mapping[str, Any]] | None,
        chat: Mapping[str, Any] | None,
    ) -> Generation:
        if self._closed:
            raise _closed()
        # Of messages the server alone knows the length.
        context = _ENDLESS if self.info.messages else self.context_length
        check_fits(request, self.vocabulary, context, f"the server's context holds {context}")
        given = request.trajectory or current_trajectory()
        trajectory = given or Trajectory()
        conversation = self._conversations.get(trajectory) if given is not None else Conversation()
        self._tell_losses(request)
        seeds = conversation.new_seeds(trajectory) if request.draft and self.info.plugin else []
        prompt = np.asarray(request.input_ids, dtype=np.int32)
        seed = request.seed
        if seed is None and request.temperature and self.info.seeded:
            seed = secrets.randbits(62)
        if not self.info.seeded and self.info.kind == "sglang":
            seed = None  # it would only cost the drafts
        words = bad_word_ids(request, self._encode)
        room = context - len(prompt)
        # Without ids the server alone knows where an output ends.
        followed = (
            request if self.info.ids else replace(request, max_tokens=None, min_tokens=0, stop=(), stop_token_ids=())
        )
        outputs = []
        for index in range(request.n):
            ask = Ask(
                f"agentspec-{uuid.uuid4().hex}",
                request,
                _choice_seed(seed, index),
                room if request.max_tokens is None else min(room, request.max_tokens),
                words,
                _session(given),
                trajectory.namespace if given is not None else None,
                seeds,
                prepared.seeds if prepared is not None else (),
                chat,
            )
            stopper = make_stopper(
                self.tokenizer, followed, self.eos_ids, room if self.info.ids else _ENDLESS, prepared
            )
            parser = prepared.parser() if prepared is not None else None
            outputs.append(Output(index, ask, self._server.body(ask), stopper, parser))
        stats = CallStats(
            model=self.model_name,
            engine=self.info.kind,
            trajectory_id=trajectory.id,
            call_index=conversation.calls,
            temperature=request.temperature,
            seed=seed,
            choices=request.n,
            prompt_tokens=len(prompt),
            spliced_tokens=prepared.prompt.spliced_tokens if prepared is not None else 0,
            first_divergence=divergence(conversation.last, prompt),
        )
        target = telemetry.Target(self.model_name, self.info.kind, self._server.host or None, self._server.port)
        channel = Channel(telemetry.chat(target, request, trajectory, messages))
        channel.span.measuring(stats)
        call = RemoteCall(
            self._client, request, trajectory, channel, stats, conversation, outputs, prepared, len(seeds)
        )
        with self._lock:
            if self._closed:
                raise _closed()
            self._calls.add(call)
            conversation.calls += 1
            conversation.take_seeds(trajectory, len(seeds))
            self._background.submit(call.serve())
        return Generation(request, channel)

    def _tell_losses(self, request: GenerationRequest) -> None:
        if request.seed is not None and request.temperature and not self.info.seeded:
            remedy = "start SGLang with --enable-deterministic-inference" if self.info.kind == "sglang" else ""
            self._say(Notice("seed", "this server draws its samples without regard to the seed", remedy))
        if (request.logprobs or request.top_logprobs) and self.info.kind == "sglang":
            changed = request.temperature not in (0.0, 1.0) or request.repetition_penalty != 1.0
            if changed or request.presence_penalty or request.frequency_penalty or request.logit_bias:
                self._say(
                    Notice(
                        "logprobs",
                        "SGLang gives them after penalties and temperature, not the model's own",
                        "start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1",
                    )
                )

    def _say(self, notice: Notice) -> None:
        """Once for each engine: in the log, and in `notices`."""
        with self._lock:
            if str(notice) in self._said:
                return
            self._said.add(str(notice))
            self.notices.append(notice)
        logger.warning("%s: %s", self.info.model if hasattr(self, "info") else "server", notice)

    # ---- ends ---------------------------------------------------------------------------------

    async def _shut(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel(_closed())
        tasks = [call.task for call in calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        await self._server.close()

    def _forked(self) -> None:
        """In a forked child: the calls under way are the parent's."""
        calls, self._calls = list(self._calls), weakref.WeakSet()
        self._lock = threading.Lock()
        self._conversations.lock = threading.Lock()
        self._server.abandon()
        for call in calls:
            call.channel.orphan(EngineError("this call runs in the parent process; the forked child can't follow it"))


async def _server(http: HttpServer, api: str, model: str | None, scope: str | None) -> Server:
    """The way of asking: the one that was named, or what the server answers to."""
    if api not in ("auto", "sglang", "completions", "chat"):
        raise InvalidRequestError(f"api: needed auto, sglang, completions or chat, got {api!r}")
    if api == "sglang" or (api == "auto" and await SGLangHttp.found(http)):
        return SGLangHttp(http, scope)
    if api != "auto":
        return OpenAIServer(http, model, chat=api == "chat")
    probe = OpenAIServer(http, model, chat=True)
    gives_ids = (await probe.describe()).kind == "vllm"
    return OpenAIServer(http, model, chat=False) if gives_ids else probe


def _choice_seed(seed: int | None, index: int) -> int | None:
    """Choice i is drawn with (seed, i); a server takes one number."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _session(trajectory: Trajectory | None) -> str | None:
    """The trajectory's name on the server; a call without one is followed by its prompt there."""
    if trajectory is None:
        return None
    return trajectory.id if trajectory.namespace is None else f"{trajectory.id}@{trajectory.namespace}"


def _scope(api_key: str | None) -> str | None:
    """Who has a key shares with nobody who has another. The key itself isn't told."""
    if not api_key:
        return None
    return "key-" + hashlib.blake2b(api_key.encode(), digest_size=16).hexdigest()


def _closed() -> EngineClosedError:
    return EngineClosedError("this engine was closed; make a new SGLangEngine")


def _call(method: Any) -> None:
    bound = method()
    if bound is not None:
        bound()
