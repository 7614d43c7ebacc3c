"""OpenAI-compatible servers as SGLangEngine reads them: vLLM's chunks with ids, text without ids, parsed messages.

The chunks are written as vLLM and OpenAI document them; a real server's are read in tests/sglang/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentspec.chat import Grammar
from agentspec.engines.base import GenerationRequest
from agentspec.engines.sglang import SGLangEngine
from agentspec.errors import GrammarError, InvalidRequestError, ServerError
from tests import tiny
from tests.engines.misbehaving import Answer, Misbehaving

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]

USER = {"role": "user", "content": "Read notes.txt, please."}
TEXT = "An agent reads a file."
IDS: list[int] = tiny.tokenizer()(TEXT, add_special_tokens=False)["input_ids"]


def models(owner: str, **card: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner, **card}]}


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    open_: list[Any] = []

    def make(owner: str, *behaviours: Any, **options: Any) -> Any:
        server = Misbehaving(*behaviours, openai=models(owner, max_model_len=512))
        server.__enter__()
        open_.append(server)
        engine = SGLangEngine(server.url + "/v1/", **{"tokenizer": tiny.tokenizer(), "retries": 0, **options})
        open_.append(engine)
        return engine, server

    yield make
    for thing in reversed(open_):
        thing.__exit__(None, None, None)


def chunk(choice: dict[str, Any] | None, **rest: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chunk", "choices": [] if choice is None else [{"index": 0, **choice}], **rest}


def usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 9, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 4}}


def streams(*events: Any) -> Callable[[Answer], None]:
    def behaviour(answer: Answer) -> None:
        answer.begin()
        for event in events:
            answer.event(event)
        answer.raw(b"data: [DONE]\n\n")
        answer.end()

    return behaviour


def vllm(*groups: list[int], finish: str = "length") -> Callable[[Answer], None]:
    events, count = [], 0
    for place, ids in enumerate(groups):
        count += len(ids)
        choice = {"text": tiny.tokenizer().decode(ids), "token_ids": ids, "finish_reason": None}
        if place == len(groups) - 1:
            choice["finish_reason"] = finish
        events.append(chunk(choice, usage=usage(count)))
    return streams(*events, chunk(None, usage=usage(count)))


# ---- ids in, ids out -----------------------------------------------------------------------------


def test_vllm_is_found_and_gives_ids(client: Any) -> None:
    engine, server = client("vllm", vllm(IDS[:1], IDS[1:4], IDS[4:]))
    assert engine.info.kind == "vllm" and engine.context_length == 512
    asked = GenerationRequest(input_ids=[5, 6, 7], max_tokens=len(IDS), top_k=3, stop="zzz", temperature=0.5, seed=4)
    got = engine.generate(asked).result()
    assert list(got.token_ids) == IDS and got.text == TEXT and got.finish_reason == "length"
    assert [n for _, n in got.stats.arrivals] == [1, 3, len(IDS) - 4]
    assert got.stats.prompt_tokens == 9 and got.stats.reused_tokens == 4 and got.stats.seed == 4
    assert got.stats.mismatches == 0 and got.stats.proposed == 0
    body = server.seen[0].body
    assert server.seen[0].path == "/v1/completions"
    assert body["prompt"] == [5, 6, 7] and body["return_token_ids"] and body["top_k"] == 3 and body["seed"] == 4
    assert body["model"] == "m" and body["max_tokens"] == len(IDS) and body["stop"] == ["zzz"]


def test_its_history_is_exact(client: Any) -> None:
    odd = [*tiny.tokenizer()("An ag", add_special_tokens=False)["input_ids"], IDS[-1]]  # not as it would be tokenised
    engine, server = client("vllm", vllm(odd), vllm(IDS))
    import agentspec

    with agentspec.trajectory():
        first = engine.chat([USER], max_tokens=len(odd)).result()
        engine.chat([USER, first.message, USER], max_tokens=len(IDS)).result()
    before, after = (answer.body["prompt"] for answer in server.seen)
    assert after[: len(before) + len(odd)] == [*before, *odd]


def test_a_stop_text_is_looked_for_here(client: Any) -> None:
    engine, server = client("vllm", vllm(*[[i] for i in IDS], finish="stop"))
    got = engine.generate(GenerationRequest(input_ids=[5], max_tokens=90, stop="file")).result()
    assert got.text == "An agent reads a " and got.stop_reason == "file" and got.finish_reason == "stop"
    assert server.seen[0].body["include_stop_str_in_output"] is True


def test_an_old_vllm_without_ids_is_told(client: Any) -> None:
    engine, _ = client("vllm", streams(chunk({"text": "Hello", "finish_reason": None})))
    with pytest.raises(ServerError, match=r"0\.10\.2"):
        engine.generate(GenerationRequest(input_ids=[5])).result()


def test_grammars_of_vllm(client: Any) -> None:
    engine, server = client("vllm", *[vllm(IDS)] * 2)
    for grammar in (Grammar.regex("a+"), Grammar.json_schema({"type": "object"})):
        engine.generate(GenerationRequest(input_ids=[5], constraint=engine.compile(grammar))).result()
    assert server.seen[0].body["structured_outputs"] == {"regex": "a+"}
    assert server.seen[1].body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    with pytest.raises(GrammarError):
        engine.generate(GenerationRequest(input_ids=[5], constraint=engine.compile(Grammar.choice(["a"]))))


def test_text_without_ids_is_weighed_by_the_usage(client: Any) -> None:
    halves = (TEXT[:10], TEXT[10:])
    events = [chunk({"text": text, "finish_reason": None}) for text in halves]
    engine, server = client(
        "somebody",
        streams(*events, chunk({"text": "", "finish_reason": "length"}), chunk(None, usage=usage(40))),
        api="completions",
    )
    got = engine.generate(GenerationRequest(input_ids=[5], max_tokens=2)).result()
    assert got.text == TEXT and got.finish_reason == "length", "the server alone knows where its tokens end"
    assert got.stats.output_tokens == 40 == sum(n for _, n in got.stats.arrivals) and len(got.stats.arrivals) == 2
    assert "return_token_ids" not in server.seen[0].body
    for option in ({"top_k": 3}, {"min_p": 0.1}, {"ignore_eos": True}, {"bad_words": [[5]]}):
        with pytest.raises(InvalidRequestError, match=next(iter(option))):
            engine.generate(GenerationRequest(input_ids=[5], **option))


# ---- messages ------------------------------------------------------------------------------------


def said(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return chunk({"delta": delta, "finish_reason": finish})


def call(index: int, **fields: Any) -> dict[str, Any]:
    function = {k: v for k, v in fields.items() if k in ("name", "arguments")}
    return {"index": index, "function": function, **({"id": fields["id"]} if "id" in fields else {})}


def test_any_other_server_is_asked_by_messages(client: Any) -> None:
    engine, server = client(
        "somebody",
        streams(
            said(role="assistant", content=""),
            said(reasoning_content="Hm."),
            said(content="Let me "),
            said(content="look."),
            said(tool_calls=[call(0, id="a1", name="read_file", arguments="")]),
            said(tool_calls=[call(0, arguments='{"path": "n')]),
            said(tool_calls=[call(0, arguments='otes.txt"}')]),
            said(tool_calls=[call(1, id="a2", name="list_files", arguments='{"path": oops')]),
            said("tool_calls"),
            chunk(None, usage=usage(30)),
        ),
        tokenizer=None,
    )
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]
    under_way = engine.chat([USER], tools=tools, tool_choice="read_file", stop="END", max_tokens=100)
    chunks = list(under_way)
    got = under_way.stats
    from agentspec.chat import joined

    message = joined(c.delta for c in chunks)
    assert message["content"] == "Let me look." == "".join(c.text for c in chunks)
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"] == [
        {"id": "a1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "notes.txt"}'}}
    ]
    assert message["invalid_tool_calls"][0]["name"] == "list_files"
    assert chunks[-1].finish_reason == "stop" and got.output_tokens == 30 == sum(n for _, n in got.arrivals)
    body = server.seen[0].body
    assert server.seen[0].path == "/v1/chat/completions" and body["messages"] == [USER] and body["stop"] == ["END"]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "read_file"}}
    assert {n.subject for n in engine.notices} == {"plugin", "token ids"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"grammar": Grammar.regex("a")}, "grammar"),
        ({"logprobs": True}, "logprobs"),
        ({"stop_token_ids": [4]}, "stop_token_ids"),
        ({"template_options": {"enable_thinking": False}}, "template_options"),
        ({"top_k": 4}, "top_k"),
    ],
)
def test_what_messages_cannot_ask_for_is_told(client: Any, options: Any, says: str) -> None:
    engine, server = client("somebody", tokenizer=None)
    with pytest.raises(InvalidRequestError, match=says):
        engine.chat([USER], **options)
    assert server.seen == []


@pytest.mark.parametrize("messages", ["text", [5], [{"role": "user", "content": 5}], [{**USER, "content": "\ud800"}]])
def test_what_is_no_message_is_told_here(client: Any, messages: Any) -> None:
    engine, server = client("somebody", tokenizer=None)
    with pytest.raises(InvalidRequestError, match="messages"):
        engine.chat(messages)
    with pytest.raises(InvalidRequestError, match="grammar"):
        engine.chat([USER], grammar="x")
    assert server.seen == []


@pytest.mark.parametrize(
    "unknown", [(404, "no"), (405, ""), (400, "bad"), (200, "<html>Welcome</html>"), (200, '{"error": "no endpoint"}')]
)
def test_a_server_may_say_in_many_ways_that_it_is_no_sglang(unknown: tuple[int, str]) -> None:
    with Misbehaving(openai=models("somebody"), unknown=unknown) as server, SGLangEngine(server.url) as engine:
        assert engine.info.kind == "openai" and engine.model_name == "m"


@pytest.mark.parametrize(
    "events",
    [
        [said(content="Hello")],
        [said(content="Hello"), {"error": {"message": "out of memory", "code": 500}}],
        [said(content="Hello"), {"choices": "none"}],
        [said(content="Hello"), {"choices": [{"delta": None}]}],
    ],
    ids=["no finish", "error", "choices", "delta"],
)
def test_a_broken_answer_keeps_what_had_arrived(client: Any, events: list[Any]) -> None:
    engine, _ = client("somebody", streams(*events), streams(said("stop", content="Hi")), tokenizer=None)
    with pytest.raises(ServerError) as told:
        engine.chat([USER]).result()
    assert told.value.partial.text == "Hello"
    assert engine.chat([USER]).result().text == "Hi"
