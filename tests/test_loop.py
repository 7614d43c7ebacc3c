"""Trajectories in user code: every kind of function, threads, tasks, abandoned generators."""

import asyncio
import contextvars
import gc
import inspect
import threading

import pytest

import agentspec
from agentspec.errors import InvalidRequestError
from agentspec.loop import Trajectory, current_trajectory

pytestmark = pytest.mark.fast


def test_context_manager_sets_and_resets():
    assert current_trajectory() is None
    with agentspec.trajectory("t1") as outer:
        assert current_trajectory() is outer and outer.id == "t1" and outer.namespace is None
        with agentspec.trajectory(name="sub") as inner:
            assert current_trajectory() is inner and inner.namespace == "sub" and inner.id != outer.id
        assert current_trajectory() is outer
    assert current_trajectory() is None


@pytest.mark.parametrize(("given", "expected"), [(None, "me"), (False, None), ("shared", "shared")])
def test_namespace_defaults(given, expected):
    with agentspec.trajectory(name="me", namespace=given) as t:
        assert t.namespace == expected


@pytest.mark.parametrize("bad", [{"id": ""}, {"id": 3}, {"namespace": ""}, {"namespace": 7}, {"namespace": 10**5000}])
def test_bad_ids_and_namespaces(bad):
    with pytest.raises(InvalidRequestError), agentspec.trajectory(**bad):
        pass


def test_seed_needs_a_trajectory():
    with pytest.raises(InvalidRequestError, match="no current trajectory"):
        agentspec.seed("text")
    with agentspec.trajectory() as t:
        agentspec.seed("text")
        agentspec.seed([1, 2, 3], source="tool")
        with pytest.raises(InvalidRequestError, match="seed source"):
            agentspec.seed("x", source="nonsense")
        with pytest.raises(InvalidRequestError, match="seed source"):
            agentspec.seed("x", source=10**5000)
        with pytest.raises(InvalidRequestError, match="needed text or a sequence"):
            agentspec.seed(5)
    assert [(s.content, s.source) for s in t.seeds_from(0)] == [("text", "seed"), ((1, 2, 3), "tool")]


class Agent:
    @agentspec.agent_loop
    def method(self, x: int = 3) -> object:
        """doc"""
        return current_trajectory(), x

    @agentspec.agent_loop(name="shared-name")
    @classmethod
    def class_method(cls):
        return current_trajectory()

    @agentspec.agent_loop
    @staticmethod
    def static_method():
        return current_trajectory()


def test_methods_keep_their_signature():
    t, x = Agent().method(4)
    assert x == 4 and t.name == "Agent.method" and t.namespace.endswith("Agent.method")
    assert str(inspect.signature(Agent.method)) == "(self, x: int = 3) -> object"
    assert Agent.method.__doc__ == "doc" and Agent.method.__name__ == "method"
    assert Agent.class_method().namespace == "shared-name"
    assert Agent.static_method().name == "Agent.static_method"
    assert current_trajectory() is None


def test_runs_are_apart_and_nested_runs_their_own():
    @agentspec.agent_loop
    def inner():
        return current_trajectory()

    @agentspec.agent_loop
    def outer():
        mine = current_trajectory()
        theirs = inner()
        assert current_trajectory() is mine
        return mine, theirs

    a, b = outer()
    c, _ = outer()
    assert len({a.id, b.id, c.id}) == 3 and a.namespace == c.namespace != b.namespace


def test_generator_protocol():
    seen = []

    @agentspec.agent_loop
    def loop(a):
        seen.append(current_trajectory())
        try:
            got = yield a
            seen.append(current_trajectory())
            try:
                yield got
            except KeyError:
                yield "caught"
            return "end"
        finally:
            seen.append("closed")

    assert inspect.isgeneratorfunction(loop)
    g = loop(1)
    assert next(g) == 1 and current_trajectory() is None
    assert g.send("hello") == "hello"
    assert g.throw(KeyError()) == "caught"
    with pytest.raises(StopIteration) as stop:
        next(g)
    assert stop.value.value == "end"
    assert seen[0] is seen[1] is not None and seen[2] == "closed"
    # closed early, and dropped
    del seen[:]
    g = loop(1)
    next(g)
    g.close()
    assert seen[-1] == "closed"
    del seen[:]
    g = loop(1)
    next(g)
    del g
    gc.collect()
    assert seen[-1] == "closed" and current_trajectory() is None


def test_coroutine_and_async_generator():
    seen = []

    @agentspec.agent_loop
    async def run():
        await asyncio.sleep(0)
        return current_trajectory()

    @agentspec.agent_loop
    async def stream():
        try:
            seen.append(current_trajectory())
            got = yield 1
            seen.append(got)
            try:
                yield 2
            except ValueError:
                yield 3
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    assert inspect.iscoroutinefunction(run) and inspect.isasyncgenfunction(stream)

    async def main():
        a, b = await asyncio.gather(run(), run())
        assert a.id != b.id
        g = stream()
        assert await g.__anext__() == 1 and current_trajectory() is None
        assert await g.asend("sent") == 2
        assert await g.athrow(ValueError()) == 3
        await g.aclose()
        with pytest.raises(StopAsyncIteration):
            await g.__anext__()
        assert seen[0] is not None and seen[1:] == ["sent", "closed"]
        # abandoned in another context: no "was created in a different Context"
        g = stream()
        await contextvars.copy_context().run(asyncio.ensure_future, g.__anext__())
        await g.aclose()

    asyncio.run(main())


def test_generator_can_be_closed_in_another_context():
    @agentspec.agent_loop
    def loop():
        yield 1

    g = loop()
    next(g)
    contextvars.copy_context().run(g.close)  # OTel's "Failed to detach context", were a token held over the yield
    assert current_trajectory() is None


def test_tasks_and_threads_inherit():
    with agentspec.trajectory() as t:

        async def main():
            task = asyncio.create_task(asyncio.to_thread(current_trajectory))
            return await task

        assert asyncio.run(main()) is t
        found = []
        thread = threading.Thread(target=lambda: found.append(current_trajectory()))
        bound = threading.Thread(target=t.bind(lambda: found.append(current_trajectory())))
        for each in (thread, bound):
            each.start()
            each.join()
        # a bare thread starts with an empty context until Python 3.14; bind carries it over
        assert found[1] is t


class Odd(str):
    def encode(self, *_):
        raise LookupError("no bytes")

    def __str__(self):
        raise LookupError("no words")


class Mute:
    def __str__(self):
        raise LookupError("no words")


def _deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("make", [Mute, lambda: Odd("text"), _deep, lambda: 10**5000, lambda: {"a": {1, 2}, "b": Mute}])
def test_a_tool_does_not_fail_for_what_it_returns(make):
    value = make()
    with agentspec.trajectory() as t:
        assert agentspec.tool(lambda: value)() is value
    assert all(seed.content for seed in t.seeds_from(0))


def test_tool_seeds_what_it_returns():
    @agentspec.tool
    def read(path):
        return f"content of {path}"

    @agentspec.tool
    def table():
        return {"rows": [1, 2]}

    @agentspec.tool(seed=False)
    def secret():
        return "hunter2"

    @agentspec.tool
    def lines():
        yield "one"
        yield "two"

    @agentspec.tool
    async def fetch():
        return b"bytes"

    @agentspec.tool
    async def pages():
        yield "p1"

    @agentspec.tool
    def fails():
        raise RuntimeError("boom")

    assert read("x") == "content of x"  # outside of a trajectory: just a function
    with agentspec.trajectory() as t:
        assert read("a") == "content of a"
        assert table() == {"rows": [1, 2]}
        assert secret() == "hunter2"
        assert list(lines()) == ["one", "two"]

        async def main():
            assert await fetch() == b"bytes"
            assert [p async for p in pages()] == ["p1"]

        asyncio.run(main())
        with pytest.raises(RuntimeError, match="boom"):
            fails()
    assert [s.content for s in t.seeds_from(0)] == ["content of a", '{"rows": [1, 2]}', "one", "two", "bytes", "p1"]
    assert {s.source for s in t.seeds_from(0)} == {"tool"}


def test_decorating_nonsense():
    with pytest.raises(InvalidRequestError, match="needed a function"):
        agentspec.agent_loop(3)


def test_trajectory_is_thread_safe():
    t = Trajectory()

    def work():
        for i in range(500):
            t.seed(f"s{i}")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(t.seeds_from(0)) == 2000
