"""Keys, tenants, limits, errors and hanging up: against a real port, by hand where a client would help too much."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentspec.errors import InvalidRequestError
from agentspec.loop import Trajectory
from agentspec.serve.gate import Limits, read_keys
from tests.serve.test_openai import USER, ask

pytestmark = pytest.mark.fast

BODY = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 8}
LONG = {**BODY, "max_tokens": 6000, "ignore_eos": True}


def post(server: Any, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", path, raw, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told


def begun(server: Any, body: Any, until: bytes = b"data: ") -> socket.socket:
    """A connection whose streamed answer has begun."""
    raw = json.dumps({**body, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    seen = b""
    while until not in seen:
        seen += connection.recv(4096)
    return connection


BAD: list[tuple[Any, str, str]] = [
    ({**BODY, "temperatur": 1}, "unknown_field", "did you mean temperature?"),
    ({**BODY, "temperature": "hot"}, "", "temperature: "),
    ({**BODY, "temperature": -1}, "", "temperature: "),
    ({**BODY, "max_tokens": 0}, "", "max_tokens: "),
    ({**BODY, "max_tokens": 10**6}, "context_length_exceeded", "too long"),
    ({**BODY, "n": 1000}, "", "n: "),
    ({**BODY, "messages": []}, "", "messages: "),
    ({**BODY, "messages": [{"content": "no role"}]}, "", "role"),
    (
        {**BODY, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "",
        "text only",
    ),
    ({**BODY, "messages": [{"role": "user", "content": "half \ud83d"}]}, "", "surrogate"),
    ({**BODY, "tools": [{"type": "function"}]}, "", "tools[0]"),
    ({**BODY, "tool_choice": "required"}, "", "no tools are offered"),
    ({**BODY, "response_format": {"type": "xml"}}, "", "response_format"),
    ({**BODY, "logit_bias": {"x": 1}}, "", "logit_bias"),
    ({**BODY, "logit_bias": {"999999": 1}}, "", "logit_bias"),
    ({**BODY, "top_logprobs": 2}, "", "top_logprobs"),
    ({**BODY, "stream_options": {"include_usage": True}}, "", "stream_options"),
    ({**BODY, "store": True}, "", "store"),
    ({**BODY, "no_stop_trim": True}, "", "no_stop_trim"),
    ({**BODY, "separate_reasoning": False}, "", "separate_reasoning"),
    ({**BODY, "reasoning_effort": "high"}, "", "chat template has no such variable"),
    ({**BODY, "custom_params": {"agentspec_drafts": False}}, "", "did you mean agentspec_draft?"),
    ({**BODY, "session_id": ""}, "", "session_id"),
    (b"{not json", "", "no JSON"),
    (b"[1, 2]", "", "needed a JSON object"),
]


@pytest.fixture
def server(serving: Callable[..., Any]) -> Any:
    return serving()


def test_what_is_wrong_is_said_in_openais_shape(server: Any) -> None:
    for body, code, text in BAD:
        status, told = post(server, body)
        assert status == 400, (body, told)
        error = told["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert text in error["message"], (body, error)
        assert (error["code"] or "") == code, (body, error)
    status, told = post(server, {"model": "tiny", "prompt": ["a", "b"]}, "/v1/completions")
    assert status == 400 and "one prompt a request" in told["error"]["message"]
    status, told = post(server, {"model": "tiny", "prompt": "half \ud83d"}, "/v1/completions")
    assert status == 400 and "surrogate" in told["error"]["message"]
    status, told = post(server, BODY, **{"Content-Type": "text/plain"})  # what a page in a browser may send anywhere
    assert status == 415
    assert post(server, BODY, "/v1/nothing")[0] == 404
    # what SGLang's router writes into each request asks for nothing
    neutral = {
        "no_stop_trim": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "return_hidden_states": False,
    }
    assert post(server, {**BODY, **neutral})[0] == 200
    # nothing of this harmed anybody
    assert ask(server.client()).choices[0].message.content


def test_keys_and_tenants(serving: Callable[..., Any]) -> None:
    """Two tenants name the same session, prompt and namespace, and share nothing."""
    server = serving(keys=read_keys("one sk-1\ntwo sk-2 # comment\n\nsk-3\n", "test"))
    for key in ("wrong", "sk-", "sk-11", "one"):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(server.client(key))
        assert caught.value.code == "invalid_api_key"
    assert post(server, BODY)[0] == 401 and post(server, BODY, Authorization="Basic sk-1")[0] == 401
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    shared = {"session_id": "run", "custom_params": {"agentspec_namespace": "team"}}
    first = ask(server.client("sk-1"), extra_body=shared)
    again = ask(server.client("sk-1"), extra_body=shared)
    assert again.agentspec["reused_tokens"] > 0 and again.agentspec["call_index"] == 1
    for key in ("sk-2", "sk-3"):
        other = ask(server.client(key), extra_body=shared)
        assert other.agentspec["reused_tokens"] == 0 and other.agentspec["call_index"] == 0
        assert other.agentspec["accepted"] == first.agentspec["accepted"] < again.agentspec["accepted"]
        assert other.agentspec["trajectory"] == "run"
    # inside a tenant, cache_salt divides once more; no name can be made to look like another's scope
    salted = ask(server.client("sk-1"), extra_body={**shared, "cache_salt": "user-9"})
    assert salted.agentspec["call_index"] == 0
    for forged in ("two::run", "two:", "%3Arun"):
        assert ask(server.client("sk-1"), extra_body={"session_id": forged}).agentspec["call_index"] == 0
    # and nobody follows a conversation of somebody else's
    unnamed = ask(server.client("sk-1"))
    continued = [USER, unnamed.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    assert ask(server.client("sk-2"), messages=continued).agentspec["joined_by"] == "new"
    assert (
        ask(server.client("sk-1"), messages=continued, extra_body={"cache_salt": "x"}).agentspec["joined_by"] == "new"
    )
    assert ask(server.client("sk-1"), messages=continued).agentspec["joined_by"] == "prompt"


def test_keys_are_read_with_care() -> None:
    assert read_keys("a k1\nb k2", "f") == {"k1": "a", "k2": "b"}
    (tenant,) = read_keys("secret-key", "f").values()
    assert "secret" not in tenant  # it is seen in spans
    for text in ("", "# nothing", "a b c", "k\nk", "käse"):
        with pytest.raises(InvalidRequestError):
            read_keys(text, "f")
    with pytest.raises(InvalidRequestError, match="requests"):
        Limits(requests=0)


def test_too_large_and_too_slow(serving: Callable[..., Any]) -> None:
    server = serving(limits=Limits(body_bytes=2000, read_s=0.5))
    big = {**BODY, "messages": [{"role": "user", "content": "x" * 3000}]}
    status, told = post(server, big)
    assert status == 413 and told["error"]["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as chunked:  # no length is told
        chunked.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunked.sendall(b"bb8\r\n" + b" " * 3000 + b"\r\n")
        assert chunked.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow:
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    assert ask(server.client()).choices


def test_too_many_at_once(serving: Callable[..., Any]) -> None:
    server = serving(limits=Limits(requests=1))
    connection = begun(server, LONG)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(server.client())
    assert caught.value.response.headers["retry-after"] == "1"
    assert server.client().models.list().data  # looking is free
    connection.close()
    client = server.client().with_options(max_retries=8)
    assert ask(client).choices  # the client's own retries get through


def test_a_client_that_takes_nothing_ends_its_call(serving: Callable[..., Any]) -> None:
    server = serving(limits=Limits(requests=1, write_s=0.3))
    stuck = begun(server, {**LONG, "session_id": "stuck", "logprobs": True, "top_logprobs": 20})
    try:  # 15 MB of answer, which no socket's buffers hold; the place is free again while it stays open
        client = server.client().with_options(max_retries=20)
        assert ask(client).choices
        assert len(server.engine.memory(Trajectory("stuck"))) < 6000
    finally:
        stuck.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_ends_its_call(server: Any, streamed: bool) -> None:
    long = {**LONG, "session_id": "long"}
    if streamed:
        begun(server, long).close()
    else:
        raw = json.dumps(long).encode()
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        end = time.monotonic() + 60
        while not server.engine._worker._running:  # until the engine is at it
            assert time.monotonic() < end
            time.sleep(0.001)
        connection.close()
    other = ask(server.client())  # comes after it: calls are served one by one
    assert other.choices[0].message.content
    assert len(server.engine.memory(Trajectory("long"))) < 3000
    # and the session goes on where it was
    assert ask(server.client(), extra_body={"session_id": "long"}).agentspec["call_index"] == 1


def test_a_broken_off_call_can_be_tried_again(server: Any) -> None:
    client = server.client()
    first = ask(client)
    messages = [USER, first.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    begun(server, {**LONG, "messages": messages}).close()
    ask(client, messages=[{"role": "user", "content": "wait"}])
    retried = ask(client, messages=messages)
    assert retried.agentspec["trajectory"] == first.agentspec["trajectory"]


def test_a_closed_engine_is_said(server: Any) -> None:
    connection = begun(server, LONG)
    server.engine.close()
    rest = b""
    while b"\r\n0\r\n" not in rest and (piece := connection.recv(65536)):
        rest += piece
    connection.close()
    events = [line[6:] for line in rest.decode().splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "unavailable" and b"[DONE]" not in rest
    with pytest.raises(openai.InternalServerError) as caught:
        ask(server.client())
    assert caught.value.status_code == 503
    health = http.client.HTTPConnection("127.0.0.1", server.port)
    health.request("GET", "/health")
    assert health.getresponse().status == 503


def test_the_callers_trace_goes_on(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    server = serving()
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    told = ask(server.client(), extra_headers={"traceparent": parent}, extra_body={"session_id": "traced"})
    ask(server.client())
    spans = [span for span in exporter.get_finished_spans() if span.name.startswith("chat ")]
    assert len(spans) == 2
    assert spans[0].parent is not None and f"{spans[0].parent.span_id:016x}" == "cd" * 8
    assert f"{spans[0].context.trace_id:032x}" == "ab" * 16
    assert spans[0].attributes is not None and spans[0].attributes["gen_ai.conversation.id"] == "traced"
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == told.usage.completion_tokens
    assert spans[1].parent is None
