"""SGLangEngine against servers that break: typed errors, nothing hangs, the next call works.

TORTURE.md: "SGLang restarts mid-chain; unreachable; 429; cut stream", streams that end early, dropped consumers.
The servers are real sockets; what a real SGLang says is in tests/sglang/test_engine.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from random import Random
from typing import Any

import pytest

from agentspec.engines.sglang import SGLangEngine
from agentspec.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    RequestAbortedError,
    ServerError,
)
from agentspec.loop import Trajectory
from tests import tiny
from tests.engines.misbehaving import IDS, Answer, Behaviour, Misbehaving, behaved
from tests.engines.remote_client import begins, client, request, until, works

__all__ = ["client"]  # a fixture

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]


def ends_early(answer: Answer) -> None:
    answer.end()


def says(text: bytes) -> Behaviour:
    return lambda answer: answer.raw(text)


# ---- the stream breaks ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Answer.cut, Answer.reset, ends_early], ids=["killed", "reset", "proxy"])
def test_a_cut_stream_is_a_server_error_with_what_had_arrived(client: Any, how: Behaviour) -> None:
    engine, server = client(begins(how))
    with pytest.raises(ServerError) as told:
        engine.generate(request()).result()
    assert list(told.value.partial.token_ids) == IDS[:2]
    assert told.value.partial.stats.output_tokens == 2
    assert len(server.seen) == 1, "what had begun to arrive is not asked for again"
    works(engine)


@pytest.mark.parametrize("how", [Answer.cut, Answer.reset, lambda a: (a.begin(), a.end())])
def test_before_the_first_token_it_is_tried_again(client: Any, how: Behaviour) -> None:
    engine, server = client(how)
    works(engine)
    assert len(server.seen) == 2


def test_after_the_retries_the_last_failure_is_told(client: Any) -> None:
    engine, server = client(*[Answer.cut] * 3, retries=1)
    with pytest.raises(ServerError, match="connection broke"):
        engine.generate(request()).result()
    assert len(server.seen) == 2


def test_a_server_that_goes_away_between_calls(client: Any) -> None:
    engine, server = client(retries=0)
    works(engine)
    server.__exit__()
    with pytest.raises(ServerError):
        engine.generate(request()).result()


def test_a_server_that_restarts_in_the_middle_of_a_chain() -> None:
    """The call in between fails; the next one goes on, its history exact to the id."""
    mine, user = Trajectory(), {"role": "user", "content": "Go on."}
    with Misbehaving() as server, SGLangEngine(server.url, tokenizer=tiny.tokenizer(), retries=0) as engine:
        first = engine.chat([user], trajectory=mine, max_tokens=len(IDS)).result()
        server.__exit__()
        with pytest.raises(ServerError):
            engine.chat([user, first.message, user], trajectory=mine, max_tokens=len(IDS)).result()
        with Misbehaving(port=server.port) as again:
            got = engine.chat([user, first.message, user], trajectory=mine, max_tokens=len(IDS)).result()
            context = [*server.seen[0].body["input_ids"], *IDS]
            assert again.seen[0].body["input_ids"][: len(context)] == context
            assert again.seen[0].body["session_id"] == server.seen[0].body["session_id"] == mine.id
            assert got.stats.first_divergence is None and got.stats.spliced_tokens == len(IDS)


def test_nobody_is_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ServerError, match="is the server running"):
        SGLangEngine(f"http://127.0.0.1:{port}", tokenizer=tiny.tokenizer())


def test_another_kind_of_server_is_told() -> None:
    with Misbehaving(openai={}) as server, pytest.raises(ServerError, match="model server's address"):
        SGLangEngine(server.url, tokenizer=tiny.tokenizer())


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "text", "kind", "tries"),
    [
        (400, '{"error": {"message": "temperature must be ..."}}', InvalidRequestError, 1),
        (400, '{"error": "The input (9 tokens) is longer than the model\'s context length"}', ContextLengthError, 1),
        (422, '{"detail": "no"}', InvalidRequestError, 1),
        (401, "{}", ServerError, 1),
        (404, "nothing here", ServerError, 1),
        (429, '{"message": "busy"}', ServerError, 2),
        (500, "Internal Server Error", ServerError, 2),
        (503, "<html>no upstream</html>", ServerError, 2),
    ],
)
def test_a_status_is_a_typed_error(client: Any, status: int, text: str, kind: type, tries: int) -> None:
    def refuse(answer: Answer) -> None:
        answer.whole(status, text, Retry_After="0.01")

    engine, server = client(refuse, refuse, retries=1)
    with pytest.raises(kind) as told:
        engine.generate(request()).result()
    assert type(told.value) is kind
    if isinstance(told.value, ServerError):
        assert told.value.status == status
    assert len(server.seen) == tries
    server.behaviours.clear()
    works(engine)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_said(client: Any, status: int) -> None:
    engine, server = client(lambda a: a.whole(status, "busy", Retry_After="0.2"))
    before = time.monotonic()
    works(engine)
    assert len(server.seen) == 2 and time.monotonic() - before >= (0.2 if status == 429 else 0.4)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "bad regex", "code": 400}}, InvalidRequestError),
        ({"error": {"message": "out of memory", "code": 500}}, ServerError),
        (
            {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "no", "status_code": 400}}},
            InvalidRequestError,
        ),
        ({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "no"}}}, ServerError),
    ],
)
def test_a_refusal_inside_the_stream(client: Any, event: Any, kind: type) -> None:
    engine, _ = client(begins(lambda a: a.event(event)))
    with pytest.raises(kind):
        engine.generate(request()).result()
    works(engine)


# ---- nonsense ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda a: a.whole(200, "<html>Welcome to the proxy</html>", "text/html"),
        lambda a: a.whole(200, '{"text": "all at once"}'),
    ],
)
def test_what_is_no_stream_is_told(client: Any, nonsense: Behaviour) -> None:
    engine, _ = client(nonsense, retries=0)
    with pytest.raises(ServerError, match="needed a stream"):
        engine.generate(request()).result()
    works(engine)


@pytest.mark.parametrize(
    "nonsense",
    [
        says(b"data: {nonsense\n\n"),
        says(b"data: [1, 2]\n\n"),
        says(b'data: {"text": "no ids"}\n\n'),
        says(b"data: \xff\xfe\n\n"),
        lambda a: a.tokens(IDS[:1], IDS[:1]),  # fewer than there were
        lambda a: a.tokens([*IDS[:2], 10**6], IDS[:3]),
        lambda a: a.tokens([*IDS[:2], "x"], IDS[:3]),
        lambda a: a.tokens([*IDS[:2], -4], IDS[:3]),
        lambda a: a.tokens(IDS, IDS[:3]),
        lambda a: a.event({"output_ids": IDS[:3], "meta_info": {"completion_tokens": None}}),
    ],
)
def test_nonsense_in_the_stream_is_told(client: Any, nonsense: Behaviour) -> None:
    engine, _ = client(begins(nonsense))
    with pytest.raises(ServerError) as told:
        engine.generate(request()).result()
    assert list(told.value.partial.token_ids) == IDS[:2]
    works(engine)


def test_other_fields_comments_and_line_ends_are_read_over(client: Any) -> None:
    def chatty(answer: Answer) -> None:
        answer.begin()
        answer.raw(b": keep-alive\r\n\r\nevent: x\r\nid: 3\r\n")
        whole = b""
        for place in range(1, len(IDS) + 1):
            finish = b'{"type": "length"}' if place == len(IDS) else b"null"
            ids = str(IDS[:place]).encode()
            whole += b'data:{"output_ids": %s, "meta_info": {"completion_tokens": %d, "finish_reason": %s}}\r\n\r\n' % (
                ids,
                place,
                finish,
            )
        for at in range(0, len(whole), 7):  # cut anywhere
            answer.raw(whole[at : at + 7])
        answer.raw(b"data: [DONE]\r\n\r\n")
        answer.end()

    engine, _ = client(chatty)
    works(engine)


def test_streams_that_repeat_and_streams_that_don_t_say_the_same(client: Any) -> None:
    engine, _ = client(behaved, lambda a: behaved(a, cumulative=False))
    works(engine)
    works(engine)


# ---- slow ----------------------------------------------------------------------------------------


def keeps_alive(answer: Answer) -> None:
    for _ in range(100):
        answer.raw(b": still here\n\n")
        if answer.hung_up.is_set():
            return
        time.sleep(0.05)


@pytest.mark.parametrize("how", [lambda a: a.wait(20), keeps_alive], ids=["silent", "keeps alive"])
def test_too_slow_between_tokens(client: Any, how: Behaviour) -> None:
    engine, server = client(begins(how), read_timeout=0.3)
    before = time.monotonic()
    with pytest.raises(ServerError, match="read_timeout") as told:
        engine.generate(request()).result()
    assert time.monotonic() - before < 10
    assert list(told.value.partial.token_ids) == IDS[:2]
    until(lambda: server.aborted == [server.seen[0].body["rid"]])
    works(engine)


def test_too_slow_before_the_first(client: Any) -> None:
    engine, _ = client(lambda a: (a.begin(), a.wait(20)), first_timeout=0.3)
    with pytest.raises(ServerError, match="first_timeout"):
        engine.generate(request()).result()
    works(engine)


def test_a_connection_that_is_never_made() -> None:
    with socket.socket() as listening:  # a full backlog: nobody accepts
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        filling = [socket.socket() for _ in range(8)]
        for one in filling:
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        before = time.monotonic()
        with pytest.raises(ServerError):
            SGLangEngine(
                f"http://127.0.0.1:{listening.getsockname()[1]}", tokenizer=tiny.tokenizer(), connect_timeout=0.5
            )
        assert time.monotonic() - before < 20
        for one in filling:
            one.close()


# ---- the consumer goes ---------------------------------------------------------------------------


def test_leaving_the_stream_hangs_up_and_aborts(client: Any) -> None:
    engine, server = client(begins(lambda a: a.wait(20)))
    trajectory = Trajectory()
    with engine.generate(request(trajectory=trajectory)) as call:
        assert next(call).token_ids == (IDS[0],)
    with pytest.raises(RequestAbortedError) as told:
        list(call)
    assert told.value.partial.finish_reason == "abort"
    until(lambda: server.seen[0].hung_up.is_set() and server.aborted == [server.seen[0].body["rid"]])
    works(engine)
    assert len(engine.history(trajectory)) == 1


def test_a_dropped_call_is_ended(client: Any) -> None:
    engine, server = client(begins(lambda a: a.wait(20)))
    call = engine.generate(request())
    next(call)
    del call
    gc.collect()
    until(lambda: bool(server.aborted))


def test_a_cancelled_task_ends_its_call(client: Any) -> None:
    engine, server = client(begins(lambda a: a.wait(20)))

    async def run() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(request()).aresult(), 0.5)

    asyncio.run(run())
    until(lambda: bool(server.aborted))
    works(engine)


def test_many_calls_at_once_of_which_some_are_left_and_some_break(client: Any) -> None:
    """Each ends as it should, and nothing of it stays."""
    random = Random(7)
    hows: list[Behaviour] = [behaved, begins(Answer.cut), begins(lambda a: a.wait(5)), lambda a: a.whole(503, "")]
    engine, server = client(*[random.choice(hows) for _ in range(120)], retries=0, read_timeout=1.0)
    trajectories = [Trajectory(str(i)) for i in range(6)]
    ended: list[str] = []

    def work(number: int) -> None:
        mine = Random(number)
        for _ in range(10):
            call = engine.generate(request(trajectory=trajectories[number % 6]))
            try:
                if mine.random() < 0.3:
                    time.sleep(mine.random() / 20)
                    call.abort()
                ended.append(call.result().finish_reason)
            except (ServerError, RequestAbortedError) as error:
                ended.append(type(error).__name__)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(ended) == 120 and {"length", "ServerError"} <= set(ended)
    assert all(engine._conversations.get(t).in_use == 0 for t in trajectories)
    gc.collect()
    until(lambda: not list(engine._calls))
    server.behaviours.clear()  # calls that were left before they began never reached it
    works(engine)


def test_an_abort_ends_the_wait_for_a_retry(client: Any) -> None:
    engine, server = client(lambda a: a.whole(429, "", Retry_After="25"))
    call = engine.generate(request())
    until(lambda: len(server.seen) == 1)
    call.abort()
    before = time.monotonic()
    with pytest.raises(RequestAbortedError):
        call.result()
    assert time.monotonic() - before < 5


def test_closing_ends_what_runs(client: Any) -> None:
    engine, _ = client(begins(lambda a: a.wait(20)))
    call = engine.generate(request())
    next(call)
    engine.close()
    with pytest.raises(EngineClosedError):
        list(call)
    with pytest.raises(EngineClosedError):
        engine.generate(request())
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_calls_for_itself(client: Any) -> None:
    engine, _ = client(begins(lambda a: a.wait(20)))
    call = engine.generate(request())
    next(call)
    next(call)
    child = os.fork()
    if child == 0:
        try:
            try:
                list(call)
            except EngineError as error:
                assert "parent" in str(error)
            works(engine)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    call.abort()
    works(engine)
