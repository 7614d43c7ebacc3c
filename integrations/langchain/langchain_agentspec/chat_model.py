"""ChatAgentSpec: LangChain's chat model on an agentspec engine.

    model = ChatAgentSpec(model="smollm2")                     # the embedded engine, loaded when first called
    model = ChatAgentSpec(base_url="http://127.0.0.1:30000")   # SGLang, or any OpenAI-compatible server
    model = ChatAgentSpec(engine=engine)                        # an engine of your own

A call goes: LangChain's messages -> messages.py -> trajectories.py (whose memory?) -> call.py (the engine) ->
reply.py (its chunks, as LangChain's). This file holds the settings and what BaseChatModel asks for.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, run_in_executor
from langchain_core.tools import BaseTool
from langchain_core.utils.utils import from_env, secret_from_env
from pydantic import ConfigDict, Field, SecretStr, model_validator

from agentspec.chat import ChatTemplate, encodable
from agentspec.engines.base import Engine
from agentspec.errors import InvalidRequestError, UnknownOptionError, nearest
from agentspec.loop import Trajectory
from langchain_agentspec import structured
from langchain_agentspec.call import Call
from langchain_agentspec.engines import EngineSettings, is_loaded, shared_engine
from langchain_agentspec.messages import to_agentspec
from langchain_agentspec.reply import PROVIDER
from langchain_agentspec.tools import tool_choice_of, tools_of
from langchain_agentspec.trajectories import Origin

__all__ = ["ChatAgentSpec"]

# Fields that are GenerationRequest's options, under the same names.
_SAMPLING = (
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "n",
    "draft",
    "template_options",
)
_ORIGIN = "agentspec_origin"  # how the public methods tell the private ones where a call comes from


class ChatAgentSpec(BaseChatModel):
    """A chat model whose calls share their trajectory's memory, which drafts what they write. The text is the
    same as without drafts.

    model:      "smollm2", a Hugging Face id, a directory, a GGUF file; AGENTSPEC_MODEL. With base_url: the
                served model's name; what the server serves, if left out
    engine:     an agentspec engine to run on; None: one of these settings, loaded at the first call and
                shared by all chat models that have them (close_engines frees them)
    base_url:   a server's address, SGLang or any OpenAI-compatible one; AGENTSPEC_BASE_URL. None: the embedded engine.
                Not together with engine
    api_key:    the server's; AGENTSPEC_API_KEY. The embedded engine needs none
    engine_options: more of the engine's own: LocalEngine's (device, max_draft, proposer, ...) or SGLangEngine's
                (tokenizer, api, tenant, read_timeout, ...)

    temperature, max_tokens, top_p, top_k, min_p, seed, repetition_penalty, presence_penalty,
    frequency_penalty, logit_bias, logprobs, top_logprobs, n, draft: GenerationRequest's; None: its default
                (greedy decoding, as with a temperature below 1e-6)
    template_options: more variables for the model's chat template, as {"enable_thinking": False}
    stop:       texts that end the output
    timeout:    most seconds that a call may take, queueing included
    max_retries: how often a server's failure is tried again while nothing has arrived
    parallel_tool_calls: bind_tools' default; False: at most one call a message (small models don't stop by
                themselves)
    namespace:  whose earlier runs new trajectories learn from; None: those of the same agent (its name in
                LangGraph); False: nobody's
    seed_tools: tool results and their raw artifacts become draft material

    Any of the options may be given to a call too: `model.invoke(..., max_tokens=20)`, or with `bind`; also
    trajectory= (an id, or an agentspec.Trajectory), where trajectories.py should not find it out, and
    grammar= (an agentspec.chat.Grammar).
    """

    model: str = Field(default_factory=from_env("AGENTSPEC_MODEL", default="smollm2"), alias="model_name")
    engine: Any = Field(default=None, exclude=True, repr=False)
    base_url: str | None = Field(default_factory=from_env("AGENTSPEC_BASE_URL", default=None))
    api_key: SecretStr | None = Field(default_factory=secret_from_env("AGENTSPEC_API_KEY", default=None))
    engine_options: dict[str, Any] = Field(default_factory=dict)

    temperature: float | None = None
    max_tokens: int | None = Field(default=None, alias="max_completion_tokens")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    draft: bool | None = None
    template_options: dict[str, Any] | None = None

    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = Field(default=None, alias="request_timeout")
    max_retries: int = 2
    parallel_tool_calls: bool | None = None
    streaming: bool = False
    namespace: str | Literal[False] | None = None
    seed_tools: bool = True

    model_config = ConfigDict(populate_by_name=True, extra="forbid", arbitrary_types_allowed=True)

    # ---- settings -----------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _all_known(cls, given: Any) -> Any:
        """Pydantic forbids other names too, but doesn't say which one was meant."""
        known = {name for field, info in cls.model_fields.items() for name in (field, info.alias) if name}
        for name in given if isinstance(given, builtins.dict) else ():
            if name not in known:
                raise UnknownOptionError(f"unknown option {name!r:.80}: {nearest(str(name), known)}")
        return given

    @model_validator(mode="after")
    def _engine_checked(self) -> ChatAgentSpec:
        if self.engine is None:
            return self
        if not isinstance(self.engine, Engine):
            raise InvalidRequestError(
                f"engine: needed an agentspec engine (LocalEngine, SGLangEngine), got "
                f"{type(self.engine).__name__}; a model's name goes into model="
            )
        if self.base_url is not None and "base_url" in self.model_fields_set:
            raise InvalidRequestError(
                f"needed one of engine and base_url, got both (base_url={self.base_url!r}): leave one out"
            )
        if "model" not in self.model_fields_set:
            self.model = self.engine.model_name
        return self

    @property
    def model_name(self) -> str:
        return self.model

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langchain_agentspec", "chat_model"]

    @property
    def lc_secrets(self) -> builtins.dict[str, str]:
        return {"api_key": "AGENTSPEC_API_KEY"}

    @property
    def _llm_type(self) -> str:
        return "agentspec"

    @property
    def _identifying_params(self) -> builtins.dict[str, Any]:
        given = {name: getattr(self, name) for name in (*_SAMPLING, "stop", "base_url")}
        return {"model": self.model, **{name: value for name, value in given.items() if value is not None}}

    def _resolve_model_profile(self) -> Any:
        profile: builtins.dict[str, Any] = {
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "pdf_inputs": False,
            "tool_calling": True,
            "tool_choice": True,
            "tool_call_streaming": True,
            "structured_output": True,
        }
        if self.engine is not None:
            profile["max_input_tokens"] = self.engine.context_length
        return profile

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        asked = {**{name: getattr(self, name) for name in ("temperature", "max_tokens")}, **kwargs}
        params = LangSmithParams(
            ls_provider=PROVIDER, ls_model_type="chat", ls_model_name=str(kwargs.get("model") or self.model)
        )
        if isinstance(asked["temperature"], (int, float)):
            params["ls_temperature"] = asked["temperature"]
        if isinstance(asked["max_tokens"], int):
            params["ls_max_tokens"] = asked["max_tokens"]
        stops = self.stop if stop is None else stop
        if stops:
            params["ls_stop"] = [stops] if isinstance(stops, str) else list(stops)
        return params

    # ---- tokens -------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own ids of a text. Loads the engine."""
        tokenizer = self._engine(self.model).tokenizer
        return list(tokenizer(encodable("text", text), add_special_tokens=False)["input_ids"])

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """How many tokens these messages' prompt has, by the model's chat template. Loads the engine."""
        engine = self._engine(self.model)
        template = getattr(engine, "template", None) or ChatTemplate(engine.tokenizer)
        rendered = template.render(
            to_agentspec(messages),
            tools=tools_of(tools) if tools else None,
            template_options=self.template_options,
        )
        return len(rendered.input_ids)

    # ---- tools and structured output ----------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[builtins.dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: builtins.dict[str, Any] | Sequence[str] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools.

        tool_choice: "auto" (None), "none", "any" (or "required", True: one call or more), a tool's name,
                     or a list of names: one call of each, in this order
        strict:      True: a call's arguments fit the tool's schema, whatever the choice
        parallel_tool_calls: False: at most one call a message
        kwargs:      more options of the call
        """
        made = tools_of(tools, strict)
        kwargs["tools"] = made
        choice = tool_choice_of(tool_choice, made)
        if choice is not None:
            kwargs["tool_choice"] = choice
        parallel = self.parallel_tool_calls if parallel_tool_calls is None else parallel_tool_calls
        if parallel is not None:
            kwargs["parallel_tool_calls"] = parallel
        return self.bind(**kwargs)

    def with_structured_output(
        self,
        schema: builtins.dict[str, Any] | type | None = None,
        *,
        method: structured.Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with an output of this schema: a pydantic class gives instances, a TypedDict or a JSON
        schema dicts.

        method:      structured.py says how they differ
        include_raw: {"raw", "parsed", "parsing_error"} instead of what was parsed, and no error raised
        strict:      OpenAI's stricter schema (every property is required, none is added)
        tools:       tools that the model may see too (with json_schema)
        """
        if method not in structured.METHODS:
            known = ", ".join(structured.METHODS)
            raise InvalidRequestError(f"method: needed one of {known}, got {method!r}")
        if schema is None and method != "json_mode":
            raise InvalidRequestError(f"with_structured_output: {method} needs a schema; only json_mode does not")
        if strict is not None and method == "json_mode":
            raise InvalidRequestError("strict: json_mode has no schema to be strict about; use json_schema")
        kwargs["ls_structured_output_format"] = {
            "kwargs": {"method": method, "strict": strict},
            "schema": schema or {"title": "object", "type": "object"},
        }
        if method == "function_calling":
            assert schema is not None
            name = tools_of([schema])[0]["function"]["name"]
            model = self.bind_tools([schema], tool_choice=name, parallel_tool_calls=False, strict=strict, **kwargs)
        else:
            kwargs["response_format"] = structured.response_format_of(schema, method, strict)
            model = self.bind_tools(tools, strict=strict, **kwargs) if tools else self.bind(**kwargs)
        parser = structured.parser_of(schema, method)
        return structured.with_raw(model, parser) if include_raw else model | parser

    # ---- calls --------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        for step in call.steps():
            call.push(step)
        return _result(call)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await self._acall(messages, stop, run_manager, kwargs)
        async with aclosing(call.asteps()) as steps:
            async for step in steps:
                call.push(step)
        return _result(call)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs, streamed=True)
        for step in call.steps():
            message = call.push(step)
            if message is not None:
                chunk = ChatGenerationChunk(message=message)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        yield _closing(call)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await self._acall(messages, stop, run_manager, kwargs, streamed=True)
        async with aclosing(call.asteps()) as steps:
            async for step in steps:
                message = call.push(step)
                if message is not None:
                    chunk = ChatGenerationChunk(message=message)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        yield _closing(call)

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        kwargs: builtins.dict[str, Any],
        streamed: bool = False,
    ) -> Call:
        origin = kwargs.pop(_ORIGIN, None)
        if origin is None:
            config = ensure_config()
            told = run_manager.metadata if run_manager is not None else {}
            origin = Origin.of({**(config.get("metadata") or {}), **told}, config.get("configurable"))
        kwargs.pop("stream", None)  # LangChain's: whether to stream, which is decided by now
        mine = ("timeout", "max_retries", "namespace")
        own = {name: kwargs.pop(name, getattr(self, name)) for name in mine}
        trajectory = kwargs.pop("trajectory", None)
        if isinstance(trajectory, str):
            origin, trajectory = replace(origin, thread=trajectory), None
        elif trajectory is not None and not isinstance(trajectory, Trajectory):
            raise InvalidRequestError(
                f"trajectory: needed an id or an agentspec.Trajectory, got {type(trajectory).__name__}"
            )
        engine = self._engine(kwargs.pop("model", None) or self.model)
        options = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        stops = kwargs.pop("stop_sequences", None) or (self.stop if stop is None else stop)
        if stops:
            options["stop"] = stops
        if "max_completion_tokens" in kwargs:
            kwargs["max_tokens"] = kwargs.pop("max_completion_tokens")
        options.update((name, value) for name, value in kwargs.items() if value is not None)
        if streamed and options.get("n", 1) != 1:
            raise InvalidRequestError("n: a stream has one output; use generate() for several, or n=1")
        return Call(
            engine,
            messages,
            options,
            origin,
            trajectory=trajectory,
            namespace=own["namespace"],
            seed=self.seed_tools,
            timeout=own["timeout"],
            retries=own["max_retries"],
            run=run_manager,
        )

    async def _acall(self, messages: Any, stop: Any, run_manager: Any, kwargs: Any, streamed: bool = False) -> Call:
        if self.engine is None and not is_loaded(self._settings(kwargs.get("model") or self.model)):
            # Loading a model takes seconds, in which the loop should serve others.
            await run_in_executor(None, self._engine, kwargs.get("model") or self.model)
        return self._call(messages, stop, run_manager, kwargs, streamed)

    def _settings(self, model: str) -> EngineSettings:
        key = None
        if self.api_key is not None and self.base_url is not None:
            key = self.api_key.get_secret_value()
        if self.base_url is not None and model == "smollm2" and "model" not in self.model_fields_set:
            model = ""  # nobody named one
        return EngineSettings(model, self.base_url, key, tuple(sorted(self.engine_options.items())))

    def _engine(self, model: str) -> Engine:
        if self.engine is not None and model in (self.model, self.engine.model_name):
            engine: Engine = self.engine
            return engine
        return shared_engine(self._settings(model))

    # ---- where a call comes from --------------------------------------------------------------
    # BaseChatModel hands a run's config to the callbacks, but not to `_stream`; so it goes with the options.

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: Any = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **_with_origin(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: Any = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **_with_origin(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: Any = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, config, stop=stop, **_with_origin(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: Any = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, config, stop=stop, **_with_origin(config, kwargs))

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> builtins.dict[str, Any]:
        kwargs.pop(_ORIGIN, None)
        return super()._get_invocation_params(stop=stop, **kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        kwargs.pop(_ORIGIN, None)  # the thread doesn't change what the model says
        return super()._get_llm_string(stop=stop, **kwargs)


def _with_origin(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    if _ORIGIN in kwargs:
        return kwargs
    whole = ensure_config(config)
    return {**kwargs, _ORIGIN: Origin.of(whole.get("metadata"), whole.get("configurable"))}


def _result(call: Call) -> ChatResult:
    generations = []
    for number, reply in enumerate(call.replies):
        message = reply.message(call.stats, usage=number == 0)
        info = {"finish_reason": message.response_metadata["finish_reason"]}
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations)


def _closing(call: Call) -> ChatGenerationChunk:
    message = call.replies[0].last(call.stats)
    return ChatGenerationChunk(
        message=message, generation_info={"finish_reason": message.response_metadata["finish_reason"]}
    )
