"""ChatAgentSpec as LangChain uses it: calls, streams, options, errors, cancellation, caching."""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_agentspec import CallTimeoutError, ChatAgentSpec, PromptTooLongError, close_engines, engines
from langchain_agentspec.engines import EngineSettings, shared_engine
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelTimeoutError
from langchain_core.load import dumps, load, loads
from langchain_core.load.dump import dumpd
from langchain_core.messages import AIMessage, HumanMessage, message_chunk_to_message
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel, Field, SecretStr, ValidationError

from agentspec.errors import (
    AgentSpecError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ServerError,
    UnknownOptionError,
)
from tests import tiny
from tests.engines.misbehaving import IDS, Misbehaving
from tests.langchain.text_engine import TextEngine

pytestmark = pytest.mark.fast


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return path


# ---- calls on a real (tiny) model ------------------------------------------------------------------


async def _collect(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def test_all_ways_of_calling_say_the_same_as_the_engine(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=24)
    plain = model.engine.chat([{"role": "user", "content": "Hello"}], max_tokens=24, draft=False).result().text
    invoked = model.invoke("Hello")
    streamed = functools.reduce(operator.add, model.stream("Hello"))

    async def run() -> tuple[Any, Any]:
        return await model.ainvoke("Hello"), await _collect(model.astream("Hello"))

    ainvoked, achunks = asyncio.run(run())
    events = model.stream_events("Hello", version="v3")
    messages = [invoked, streamed, ainvoked, functools.reduce(operator.add, achunks), events.output]
    assert [str(message.text) for message in messages] == [plain] * 5
    for message in messages:
        assert message.usage_metadata["output_tokens"] == 24
        assert message.response_metadata["model_provider"] == "agentspec"
        assert message.response_metadata["finish_reason"] == "length"
    for message in messages[:4]:
        assert message.response_metadata["call_stats"]["output_tokens"] == 24


def test_tokens_are_counted_by_the_models_own_tokenizer_and_template(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=1)
    assert model.get_num_tokens("Naïve façade") == len(model.get_token_ids("Naïve façade"))
    assert model.engine.tokenizer.decode(model.get_token_ids("Naïve façade")) == "Naïve façade"
    messages = [HumanMessage("Hello"), AIMessage("x"), HumanMessage("How many?")]
    assert model.get_num_tokens_from_messages(messages) == model.invoke(messages).usage_metadata["input_tokens"]


def test_a_prompt_that_is_too_long_is_both_trees_error(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=2000)
    with pytest.raises(PromptTooLongError, match="1024") as caught:
        model.invoke("Hello")
    assert isinstance(caught.value, ContextOverflowError) and isinstance(caught.value, ContextLengthError)
    with pytest.raises(ContextOverflowError):
        asyncio.run(model.ainvoke("Hello"))
    with pytest.raises(ContextOverflowError):
        list(model.stream("Hello"))


# ---- options ---------------------------------------------------------------------------------------


def test_options_reach_the_engine_and_calls_override_fields(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "hello")
    model = ChatAgentSpec(
        engine=engine, temperature=0.5, top_p=0.9, seed=7, stop=["\n"], draft=False, template_options={"x": 1}
    )
    model.invoke("a")
    assert engine.asked[-1] == (
        [{"role": "user", "content": "a"}],
        {
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "stop": ["\n"],
            "draft": False,
            "template_options": {"x": 1},
        },
    )
    model.bind(temperature=0, top_k=3).invoke("a", stop=["b"], max_completion_tokens=2)
    assert engine.asked[-1][1] == {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "stop": ["b"],
        "max_tokens": 2,
        "draft": False,
        "template_options": {"x": 1},
    }
    chosen = model.configurable_fields(temperature=ConfigurableField(id="t"))
    chosen.invoke("a", {"configurable": {"t": 1.5}})
    assert engine.asked[-1][1]["temperature"] == 1.5


def test_an_option_that_nobody_knows_is_refused(tiny_tokenizer: Any) -> None:
    model = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "hello"))
    with pytest.raises(UnknownOptionError, match="did you mean temperature"):
        model.invoke("a", temprature=1)
    with pytest.raises(ValidationError, match="unknown option 'temprature': did you mean temperature"):
        ChatAgentSpec(temprature=1)
    with pytest.raises(ValidationError, match="unknown option 'zzz': known are api_key, base_url"):
        ChatAgentSpec(zzz=1)
    for name, alias in (("model", "model_name"), ("max_tokens", "max_completion_tokens"), ("stop", "stop_sequences")):
        value = 5 if name == "max_tokens" else "a"
        assert getattr(ChatAgentSpec(**{alias: value}), name) == getattr(ChatAgentSpec(**{name: value}), name) == value
    with pytest.raises(ValidationError, match="model's name goes into model="):
        ChatAgentSpec(engine="smollm2")


def test_tools_are_handed_on_as_the_templates_take_them(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "hello")
    model = ChatAgentSpec(engine=engine)
    for given, handed in [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        (True, "required"),
        ("read_file", {"type": "function", "function": {"name": "read_file"}}),
        (
            {"type": "function", "function": {"name": "read_file"}},
            {"type": "function", "function": {"name": "read_file"}},
        ),
    ]:
        model.bind_tools([read_file], tool_choice=given, strict=True, parallel_tool_calls=False).invoke("a")
        options = engine.asked[-1][1]
        (made,) = options["tools"]
        assert made["function"]["name"] == "read_file" and made["function"]["strict"] is True
        assert made["function"]["parameters"]["required"] == ["path"]
        assert options.get("tool_choice") == handed and options["parallel_tool_calls"] is False
    model.bind_tools([read_file], tool_choice=["read_file", "read_file"]).invoke("a")
    assert engine.asked[-1][1]["tool_choice"] == ["read_file", "read_file"]
    with pytest.raises(InvalidRequestError, match=r"name of a bound tool \(read_file\), got \['auto'\]"):
        model.bind_tools([read_file], tool_choice=["auto"])
    with pytest.raises(InvalidRequestError, match=r"name of a bound tool \(read_file\), got 'write_file'"):
        model.bind_tools([read_file], tool_choice="write_file")
    with pytest.raises(InvalidRequestError, match="some provider runs on its servers"):
        model.bind_tools([{"type": "web_search"}])


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="the question")
    punchline: str


def test_structured_output_asks_for_the_schema_and_parses(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, '{"setup": "Why?", "punchline": "So."}')
    model = ChatAgentSpec(engine=engine)
    assert model.with_structured_output(Joke).invoke("a") == Joke(setup="Why?", punchline="So.")
    asked = engine.asked[-1][1]["response_format"]
    assert asked["type"] == "json_schema" and set(asked["json_schema"]["schema"]["properties"]) == {
        "setup",
        "punchline",
    }
    as_dict = model.with_structured_output(Joke.model_json_schema())
    assert as_dict.invoke("a") == {"setup": "Why?", "punchline": "So."}
    assert list(as_dict.stream("a"))[-1] == {"setup": "Why?", "punchline": "So."}
    raw = model.with_structured_output(Joke, include_raw=True, method="json_mode").invoke("a")
    assert isinstance(raw["raw"], AIMessage) and raw["parsed"] == Joke(setup="Why?", punchline="So.")
    assert raw["parsing_error"] is None and engine.asked[-1][1]["response_format"] == {"type": "json_object"}
    model.with_structured_output(Joke, method="function_calling", include_raw=True).invoke("a")
    assert engine.asked[-1][1]["tool_choice"] == {"type": "function", "function": {"name": "Joke"}}


def test_structured_output_that_max_tokens_broke_off_says_so(tiny_tokenizer: Any) -> None:
    model = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, '{"setup": "Why?", "punchline": "So."}'), max_tokens=8)
    for schema in (Joke, Joke.model_json_schema()):
        with pytest.raises(ValueError, match="reached max_tokens before the document was complete"):
            model.with_structured_output(schema).invoke("a")
        raw = model.with_structured_output(schema, include_raw=True).invoke("a")
        assert raw["parsed"] is None and "max_tokens" in str(raw["parsing_error"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schema": Joke, "method": "xml"}, "json_schema, function_calling, json_mode, got 'xml'"),
        ({"schema": None}, "needs a schema"),
        ({"schema": Joke, "method": "json_mode", "strict": True}, "no schema to be strict about"),
        ({"schema": {"properties": {}}}, "a JSON schema with a title"),
    ],
)
def test_structured_output_refuses_what_it_cannot_do(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ChatAgentSpec().with_structured_output(**arguments)


# ---- streams and cancellation ----------------------------------------------------------------------


class _Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ended = 0
        self.failed: list[BaseException] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(str(token))

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended += 1

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.failed.append(error)


def test_each_token_is_told_once_and_usage_is_counted_once(tiny_tokenizer: Any) -> None:
    model = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "the quick brown fox"))
    told, usage = _Tokens(), UsageMetadataCallbackHandler()
    streamed = functools.reduce(operator.add, model.stream("a", {"callbacks": [told, usage]}))
    assert streamed.content == "the quick brown fox" == "".join(told.tokens) and told.ended == 1
    assert usage.usage_metadata["text-1"]["output_tokens"] == streamed.usage_metadata["output_tokens"]
    assert message_chunk_to_message(streamed).id == streamed.id


def test_closing_a_stream_ends_the_call_within_a_step(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "word " * 200, wait_s=0.01)
    stream = ChatAgentSpec(engine=engine).stream("a")
    next(stream)
    stream.close()
    taken = engine.steps
    assert engine.idle.wait(2)
    assert engine.steps <= taken + 1


def test_cancelling_a_task_ends_the_call_within_a_step(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "word " * 200, wait_s=0.01)
    model = ChatAgentSpec(engine=engine)

    async def run(work: Any) -> None:
        engine.steps = 0
        task = asyncio.ensure_future(work)
        while engine.steps < 3:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        taken = engine.steps
        assert await asyncio.to_thread(engine.idle.wait, 2)
        assert engine.steps <= taken + 1

    async def break_off() -> None:
        engine.steps = 0
        stream = model.astream("a")
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        taken = engine.steps
        assert await asyncio.to_thread(engine.idle.wait, 2)
        assert engine.steps <= taken + 2  # the loop closes what is left of an async generator a tick later

    async def all_of_them() -> None:
        await run(model.ainvoke("a"))
        await run(_collect(model.astream("a")))
        await break_off()

    asyncio.run(all_of_them())


def test_an_abandoned_stream_is_told_to_the_callbacks_and_the_thread_goes_on(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "word " * 50, "fine", wait_s=0.002)
    model, told = ChatAgentSpec(engine=engine), _Tokens()
    stream = model.stream("a", {"callbacks": [told], "configurable": {"thread_id": "t"}})
    next(stream)
    stream.close()
    assert [type(error) for error in told.failed] == [GeneratorExit]
    assert model.invoke("b", {"configurable": {"thread_id": "t"}}).content == "fine"
    assert engine.trajectories[0] is engine.trajectories[1]


def test_a_timeout_ends_the_call_and_says_what_to_do(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "word " * 500, wait_s=0.01)
    model = ChatAgentSpec(engine=engine, timeout=0.1)
    for call in (
        lambda: model.invoke("a"),
        lambda: asyncio.run(model.ainvoke("a")),
        lambda: list(model.stream("a")),
    ):
        began = time.monotonic()
        with pytest.raises(CallTimeoutError, match=r"given 0\.1 s .* raise timeout=") as caught:
            call()
        assert time.monotonic() - began < 3
        assert isinstance(caught.value, ModelTimeoutError) and isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, EngineError) and caught.value.partial.text.startswith("word")


def test_a_servers_failure_is_tried_again_only_while_nothing_arrived(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_agentspec.call._FIRST_DELAY_S", 0.001)
    engine = TextEngine(tiny_tokenizer, ServerError("down"), ServerError("down"), "up")
    assert ChatAgentSpec(engine=engine, max_retries=2).invoke("a").content == "up"
    engine = TextEngine(tiny_tokenizer, ServerError("down"), "up")
    assert asyncio.run(ChatAgentSpec(engine=engine).ainvoke("a")).content == "up"
    engine = TextEngine(tiny_tokenizer, ServerError("down"), "up")
    with pytest.raises(ServerError):
        ChatAgentSpec(engine=engine, max_retries=0).invoke("a")
    engine = TextEngine(tiny_tokenizer, ServerError("lost"), "up", fail_after=2)
    with pytest.raises(ServerError, match="lost"):
        list(ChatAgentSpec(engine=engine).stream("a"))
    engine = TextEngine(tiny_tokenizer, InvalidRequestError("no"), "up")
    with pytest.raises(InvalidRequestError):
        ChatAgentSpec(engine=engine).invoke("a")


# ---- what the base class does ----------------------------------------------------------------------


def test_a_cached_answer_is_the_same_in_every_thread_and_costs_no_call(tiny_tokenizer: Any) -> None:
    engine = TextEngine(tiny_tokenizer, "one", "two", "three")
    model = ChatAgentSpec(engine=engine, cache=InMemoryCache())
    first = model.invoke("a", {"configurable": {"thread_id": "t"}})
    assert model.invoke("a", {"configurable": {"thread_id": "u"}}).content == first.content == "one"
    assert model.invoke("a", stop=["x"]).content == "two"
    assert model.invoke("a", max_tokens=30).content == "three"
    assert len(engine.asked) == 3


def test_the_rate_limiter_holds(tiny_tokenizer: Any) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=20, check_every_n_seconds=0.005, max_bucket_size=1)
    model = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "x"), rate_limiter=limiter)
    began = time.monotonic()
    for _ in range(4):
        model.invoke("a")
    assert time.monotonic() - began > 0.15


@pytest.mark.filterwarnings("ignore:The function `load")
def test_serialised_without_its_key_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ChatAgentSpec(
        model="some-model",
        base_url="http://127.0.0.1:1",
        api_key="key-1",
        temperature=0.3,
        stop=["x"],
        namespace=False,
    )
    text = dumps(model)
    assert "key-1" not in text and "key-1" not in repr(model)
    monkeypatch.setenv("AGENTSPEC_API_KEY", "key-2")
    again = loads(
        text, allowed_objects=[ChatAgentSpec], valid_namespaces=["langchain_agentspec"], secrets_from_env=True
    )
    assert isinstance(again, ChatAgentSpec) and again.api_key == SecretStr("key-2")
    assert again.asdict() == model.asdict() and again.namespace is False and again.stop == ["x"]
    bound = load(
        dumpd(model.bind_tools([{"title": "f", "type": "object", "properties": {}, "description": "d"}])),
        allowed_objects=[ChatAgentSpec, *_core()],
        valid_namespaces=["langchain_agentspec"],
        secrets_from_env=True,
    )
    assert bound.kwargs["tools"][0]["function"]["name"] == "f"


def _core() -> list[Any]:
    from langchain_core.runnables import RunnableBinding

    return [RunnableBinding]


def test_langsmith_parameters(tiny_tokenizer: Any) -> None:
    model = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "x"), temperature=0.2, max_tokens=9, stop="end")
    assert model._get_ls_params() == {
        "ls_provider": "agentspec",
        "ls_model_name": "text-1",
        "ls_model_type": "chat",
        "ls_temperature": 0.2,
        "ls_max_tokens": 9,
        "ls_stop": ["end"],
    }
    asked = model._get_ls_params(stop=["s"], model="other", temperature=1, max_tokens=3)
    assert (asked["ls_model_name"], asked["ls_temperature"], asked["ls_max_tokens"]) == ("other", 1, 3)
    assert asked["ls_stop"] == ["s"]


def test_the_origin_of_a_call_is_not_traced(tiny_tokenizer: Any) -> None:
    seen: list[Any] = []

    class Start(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            seen.append(kwargs)

    model = ChatAgentSpec(engine=TextEngine(tiny_tokenizer, "x"))
    config: Any = {"callbacks": [Start()], "configurable": {"thread_id": "t"}}
    model.invoke("a", config)
    list(model.stream("a", config))
    assert len(seen) == 2 and not any("origin" in key for kwargs in seen for key in kwargs["invocation_params"])


# ---- engines ---------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> Any:
    engines_made: list[EngineSettings] = []

    def make(settings: EngineSettings) -> Any:
        engines_made.append(settings)
        time.sleep(0.02)
        engine = TextEngine(tiny_tokenizer, "hello")
        engine.model_name = settings.model
        return engine

    monkeypatch.setattr(engines, "_make", make)
    close_engines()
    yield engines_made
    close_engines()


def test_models_with_the_same_settings_share_an_engine_made_at_the_first_call(made: Any) -> None:
    one, two = ChatAgentSpec(model="a"), ChatAgentSpec(model="a", temperature=0.5)
    other = ChatAgentSpec(model="a", engine_options={"max_draft": 0})
    assert made == []
    one.batch(["x"] * 6)
    two.invoke("x")
    other.invoke("x")
    assert [dict(settings.options) for settings in made] == [{}, {"max_draft": 0}]
    asyncio.run(one.ainvoke("x"))
    assert len(made) == 2


def test_a_call_can_name_another_model(made: Any) -> None:
    answer = ChatAgentSpec(model="a").invoke("x", model="b")
    assert answer.response_metadata["model_name"] == "b" and [settings.model for settings in made] == ["b"]


def test_closed_engines_are_made_anew(made: Any) -> None:
    model = ChatAgentSpec(model="a")
    model.invoke("x")
    engine: Any = shared_engine(EngineSettings("a"))
    close_engines()
    assert engine.closed
    model.invoke("x")
    assert len(made) == 2


def test_the_key_is_part_of_the_engine_only_with_a_server(made: Any) -> None:
    ChatAgentSpec(model="a", api_key="k1").invoke("x")
    ChatAgentSpec(model="a").invoke("x")
    ChatAgentSpec(model="a", base_url="http://127.0.0.1:1", api_key="k1").invoke("x")
    assert [settings.api_key for settings in made] == [None, "k1"]
    assert "k1" not in repr(made)


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ServerError, match="is the server running"):
        ChatAgentSpec(model="a", base_url="http://127.0.0.1:1").invoke("x")


def test_a_server_is_what_base_url_means() -> None:
    """Streamed and whole, its failures tried again by max_retries alone; what a real server does is in tests/sglang."""
    options = {"tokenizer": tiny.tokenizer()}
    busy = [lambda answer: answer.whole(503, "busy")] * 2
    try:
        with Misbehaving(*busy) as server:
            model = ChatAgentSpec(
                base_url=server.url, api_key="k", max_tokens=len(IDS), engine_options=options, max_retries=1
            )
            with pytest.raises(ServerError):
                model.invoke("x")
            assert len(server.seen) == 2
            said = model.invoke("x")
            assert said.usage_metadata["output_tokens"] == len(IDS)
            assert said.content == tiny.tokenizer().decode(IDS, skip_special_tokens=True)
            assert "".join(str(chunk.content) for chunk in model.stream("x")) == said.content
            assert server.seen[-1].headers["authorization"] == "Bearer k"
            with pytest.raises(InvalidRequestError, match="serves tiny"):
                ChatAgentSpec(model="other", base_url=server.url, engine_options=options).invoke("x")
    finally:
        close_engines()


def test_every_error_is_in_agentspecs_tree() -> None:
    assert issubclass(CallTimeoutError, AgentSpecError) and issubclass(PromptTooLongError, AgentSpecError)


# ---- what can't be served ---------------------------------------------------------------------------


def test_an_engine_and_an_address_exclude_each_other(
    tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    with pytest.raises(ValidationError, match="one of engine and base_url"):
        ChatAgentSpec(engine=engine, base_url="http://127.0.0.1:9")
    monkeypatch.setenv("AGENTSPEC_BASE_URL", "http://127.0.0.1:9")
    assert ChatAgentSpec(engine=engine, max_tokens=2).invoke("x").usage_metadata is not None


def test_half_a_character_is_told(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=2)
    called = AIMessage("", tool_calls=[{"name": "f", "args": {"a": "\ud800"}, "id": "1"}])
    for messages in ("be\ud800fore", [HumanMessage("x"), called, HumanMessage("y")]):
        with pytest.raises(InvalidRequestError, match="surrogate pair"):
            model.invoke(messages)
    with pytest.raises(InvalidRequestError, match="surrogate pair"):
        model.get_token_ids("\ud800")


def test_reserved_template_options_and_tiny_temperatures(chat: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequestError, match="template_options"):
        chat(template_options={"chat_template": "x"}).invoke("x")
    model = chat(max_tokens=8)
    assert model.invoke("Hello", temperature=5e-324, seed=1).text == model.invoke("Hello").text
