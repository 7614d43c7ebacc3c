"""OpenAI's own client against the server: what it gets is what LocalEngine says, whole and streamed."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "The quick brown fox jumps over the lazy dog. Say that again."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"enum": ["notes.txt", "plan.txt"]}, "lines": {"enum": [1, 20]}},
                "required": ["path", "lines"],
            },
        },
    }
]


@pytest.fixture
def server(serving: Callable[..., Any]) -> Any:
    return serving()


@pytest.fixture
def plain(tiny_engine: Callable[..., Any]) -> Any:
    """The same model by itself, without drafts."""
    return tiny_engine(model={"max_position_embeddings": 8192}, max_draft=0)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 40, **options}
    )


def gathered(chunks: Any) -> tuple[dict[str, Any], str | None, Any]:
    """A stream's message, finish reason and last chunk."""
    message: dict[str, Any] = {"content": "", "tool_calls": {}}
    reason = last = None
    for chunk in chunks:
        last = chunk
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = message["tool_calls"].setdefault(piece.index, {"id": piece.id, "name": "", "arguments": ""})
                assert piece.id in (None, call["id"])
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
            reason = choice.finish_reason or reason
    return message, reason, last


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    {"temperature": 1.2, "seed": 1, "n": 3, "max_tokens": 12},
    {"presence_penalty": 0.5, "frequency_penalty": 1.5},
    {"stop": ["e", "\n\n"]},
    {"logit_bias": {"40": 30, "41": 30.5}, "max_tokens": 8},
    {"logprobs": True, "top_logprobs": 3, "max_tokens": 6},
]
EXTRA: list[dict[str, Any]] = [
    {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "temperature": 1.0, "seed": 3},
    {"ignore_eos": True, "min_tokens": 5, "stop_token_ids": [70, 80]},
]


@pytest.mark.parametrize("number", range(len(OPTIONS) + len(EXTRA)))
def test_text_is_what_the_engine_says(server: Any, plain: Any, number: int) -> None:
    """Every option reaches the engine: by the server, streamed and not, and by LocalEngine without drafts."""
    options = (OPTIONS + EXTRA)[number]
    known = {} if number < len(OPTIONS) else {"extra_body": options}
    given = known or options
    mine = {**options, "logit_bias": {int(k): v for k, v in options.get("logit_bias", {}).items()}}
    expected = plain.chat([USER], **{"temperature": 0, "max_tokens": 40, **mine}).results()
    whole = ask(server.client(), **given)
    streamed: dict[int, str] = {}
    for chunk in ask(server.client(), stream=True, **given):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    for choice, result in zip(whole.choices, expected, strict=True):
        assert choice.message.content == result.text == streamed[choice.index]
        assert choice.finish_reason == result.finish_reason
    stats = expected[0].stats
    assert whole.usage.prompt_tokens == stats.prompt_tokens and whole.usage.completion_tokens == stats.output_tokens
    if options.get("logprobs"):
        told = whole.choices[0].logprobs.content
        assert [t.logprob for t in told] == pytest.approx([p.logprob for p in expected[0].logprobs], abs=1e-4)
        assert all(len(t.top_logprobs) == 3 for t in told)
        assert "".join(t.token for t in told).replace("\ufffd", "") == expected[0].text.replace("\ufffd", "")


def test_the_next_call_is_followed_by_what_it_says(server: Any) -> None:
    client = server.client()
    first = ask(client)
    assert first.agentspec["joined_by"] == "new" and first.usage.prompt_tokens_details.cached_tokens == 0
    messages = [USER, first.choices[0].message.model_dump(), {"role": "user", "content": "And again."}]
    second = ask(client, messages=messages)
    assert second.agentspec["trajectory"] == first.agentspec["trajectory"] and second.agentspec["joined_by"] == "prompt"
    assert second.agentspec["call_index"] == 1
    # all that was said before, the answer's own ids included; the last of them isn't in the cache yet
    before = first.usage.prompt_tokens + first.usage.completion_tokens
    assert before - 1 <= second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert second.agentspec["spliced_tokens"] > 0
    # the first prompt again, and an older end: neither is that conversation any more
    assert ask(client).agentspec["joined_by"] == "new"
    elsewhere = ask(client, messages=[*messages[:2], {"role": "user", "content": "Something else."}])
    assert elsewhere.agentspec["trajectory"] != first.agentspec["trajectory"]


def test_a_session_is_one_trajectory(server: Any) -> None:
    client = server.client()
    first = ask(client, extra_body={"session_id": "run-17"})
    second = ask(client, extra_headers={"X-Session-Id": "run-17"})
    third = ask(client, extra_body={"custom_params": {"agentspec_trajectory": "run-17"}})
    assert [a.agentspec["call_index"] for a in (first, second, third)] == [0, 1, 2]
    assert [a.agentspec["joined_by"] for a in (first, second, third)] == ["session_id", "x-session-id", "custom_params"]
    assert {a.agentspec["trajectory"] for a in (first, second, third)} == {"run-17"}
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert len({a.choices[0].message.content for a in (first, second, third)}) == 1
    # a call that repeats itself is drafted
    assert second.agentspec["accepted"] > 0 and second.agentspec["verify_steps"] < first.agentspec["verify_steps"]
    undrafted = ask(client, extra_body={"session_id": "run-17", "custom_params": {"agentspec_draft": False}})
    assert undrafted.agentspec["proposed"] == 0


def test_namespaces_and_seeds(server: Any) -> None:
    client = server.client()

    def asked(session: str, **params: Any) -> Any:
        return ask(
            client,
            extra_body={"session_id": session, "custom_params": {f"agentspec_{k}": v for k, v in params.items()}},
        )

    text = ask(client).choices[0].message.content
    alone = asked("alone").agentspec  # what it copies of itself
    a, b = (asked(session, namespace="team").agentspec for session in "ab")
    c = asked("c", namespace="other").agentspec
    assert b["accepted"] > max(told["accepted"] for told in (alone, a, c))
    # only b may draw on another's output: a is the first of its team, c of another
    assert [told["accepted_by_source"].get("shared", 0) > 0 for told in (alone, a, b, c)] == [False, False, True, False]
    assert asked("d", seed_texts=[USER["content"] + text]).agentspec["accepted_by_source"].get("seed", 0) > 0
    predicted = ask(client, prediction={"type": "content", "content": text}, extra_body={"session_id": "e"})
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens == predicted.agentspec[
        "accepted_by_source"
    ].get("seed", 0)


def test_tools_streamed_and_not(server: Any, plain: Any) -> None:
    client = server.client()
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 120}
    for choice in ("required", {"type": "function", "function": {"name": "read_file"}}):
        expected = plain.chat(
            [USER], tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=120
        ).result()
        whole = ask(client, tool_choice=choice, parallel_tool_calls=False, **options)
        message, reason, _ = gathered(
            ask(client, tool_choice=choice, parallel_tool_calls=False, stream=True, **options)
        )
        assert whole.choices[0].finish_reason == reason == "tool_calls"
        assert whole.choices[0].message.content is None and message["content"] == ""
        calls = whole.choices[0].message.tool_calls
        assert [c.function.name for c in calls] == [c["name"] for c in message["tool_calls"].values()] == ["read_file"]
        arguments = json.loads(calls[0].function.arguments)
        assert set(arguments) == {"path", "lines"} and arguments["lines"] in (1, 20)
        assert calls[0].function.arguments == message["tool_calls"][0]["arguments"]
        assert calls[0].function.arguments == expected.message["tool_calls"][0]["function"]["arguments"]
    # the tool's answer goes back as OpenAI's clients send it, and joins the conversation
    answered = ask(
        client,
        tools=TOOLS,
        messages=[
            USER,
            whole.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": calls[0].id, "content": "line one"},
        ],
    )
    assert answered.agentspec["joined_by"] == "prompt" and answered.usage.prompt_tokens_details.cached_tokens > 0
    none = ask(client, tool_choice="none", **options)
    assert none.choices[0].message.tool_calls is None and none.choices[0].finish_reason in ("stop", "length")


def test_documents_are_held_to(server: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"word": {"enum": ["fox", "dog"]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    answer = ask(
        server.client(), response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    )
    assert json.loads(answer.choices[0].message.content)["word"] in ("fox", "dog")
    assert answer.choices[0].finish_reason == "stop"


def test_usage_and_figures_close_a_stream(server: Any) -> None:
    client = server.client()
    with_usage = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert with_usage[-1].choices == [] and with_usage[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in with_usage[:-1])
    assert with_usage[-1].agentspec["output_tokens"] == with_usage[-1].usage.completion_tokens
    without = list(ask(client, stream=True))
    assert without[-1].choices[0].finish_reason and without[-1].agentspec["verify_steps"] > 0
    assert without[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in without}) == 1


def test_completions(server: Any, plain: Any) -> None:
    client = server.client()
    text = "The quick brown fox jumps over"
    ids = plain.tokenizer(text)["input_ids"]
    from agentspec.engines.base import GenerationRequest

    expected = plain.generate(GenerationRequest(input_ids=ids, max_tokens=16)).result()
    by_text = client.completions.create(model="tiny", prompt=text, temperature=0)
    by_ids = client.completions.create(model="tiny", prompt=ids, temperature=0, logprobs=2, echo=False)
    assert by_text.choices[0].text == by_ids.choices[0].text == expected.text
    assert by_text.choices[0].finish_reason == expected.finish_reason
    told = by_ids.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) > 0
    echoed = client.completions.create(model="tiny", prompt=text, temperature=0, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in echoed if c.choices) == text + expected.text
    followed = client.completions.create(model="tiny", prompt=text + expected.text + " dog", temperature=0)
    assert followed.agentspec["joined_by"] == "prompt" and followed.usage.prompt_tokens_details.cached_tokens > 0


def test_what_is_served(server: Any) -> None:
    client = server.client()
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny"] and models[0].max_model_len == 8192
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4o")
    assert caught.value.code == "model_not_found" and "'tiny'" in str(caught.value)


def test_many_at_once_say_what_each_says_alone(server: Any) -> None:
    prompts = [[{"role": "user", "content": f"Number {number}: an agent reads a file."}] for number in range(8)]
    client = server.client()
    alone = [ask(client, messages=prompt).choices[0].message.content for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda p: gathered(ask(client, messages=p, stream=True))[0]["content"], prompts))
        whole = list(pool.map(lambda p: ask(client, messages=p).choices[0].message.content, prompts))
    assert alone == streams == whole


async def _asynchronous(server: Any) -> tuple[str, str]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 20}
        whole = await client.chat.completions.create(**options)
        pieces = [
            c.choices[0].delta.content or "" async for c in await client.chat.completions.create(stream=True, **options)
        ]
        return whole.choices[0].message.content or "", "".join(pieces)


@pytest.mark.asyncio
async def test_the_asynchronous_client(server: Any) -> None:
    whole, streamed = await _asynchronous(server)
    assert whole == streamed != ""
