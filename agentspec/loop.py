"""Trajectories in user code: the context manager, @agent_loop, @tool, and seed().

    with agentspec.trajectory("ticket-42"):
        engine.chat(messages)                  # this call, and all below it, share one memory

    @agentspec.agent_loop                      # one trajectory a run, named after the function
    def triage(ticket): ...

    @agentspec.tool                            # its return value is draft material as soon as it returns
    def read_file(path): ...

The current trajectory travels in a contextvar, so tasks and threads started through contextvars-aware means
(asyncio, asyncio.to_thread, LangChain's executors) inherit it; `Trajectory.bind` carries it into a bare thread.
Knows nothing of engines: an engine asks `current_trajectory()` and turns the seeds' text into tokens itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import json
import operator
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from agentspec import telemetry
from agentspec.errors import InvalidRequestError, shown

__all__ = ["Seed", "Trajectory", "agent_loop", "as_text", "current_trajectory", "seed", "tool", "trajectory"]

F = TypeVar("F", bound=Callable[..., Any])
SeedSource = Literal["seed", "tool", "schema"]
_SOURCES = ("seed", "tool", "schema")


@dataclass(slots=True, frozen=True)
class Seed:
    """Draft material that no prompt has shown yet: text, or token ids of the engine's own vocabulary."""

    content: str | tuple[int, ...]
    source: SeedSource = "seed"


class Trajectory:
    """One agent run: calls that share a memory. Thread-safe.

    id:        unique among live trajectories; made up where None was given
    namespace: whose earlier runs this one may learn from: a name, or None for nobody's
    calls:     CallStats of the finished calls, in the order in which they ended
    """

    def __init__(self, id: str | None = None, namespace: str | None = None, name: str = "agent") -> None:
        for what, value in (("id", id), ("namespace", namespace), ("name", name)):
            if (value is not None or what == "name") and (not isinstance(value, str) or not value or "\0" in value):
                raise InvalidRequestError(
                    f"trajectory {what}: needed a non-empty string without NUL{'' if what == 'name' else ' or None'}, "
                    f"got {shown(value)}"
                )
        self.id = id if id is not None else uuid.uuid4().hex
        self.namespace = namespace
        self.name = name
        self.calls: list[Any] = []
        self.context: Any = None  # OpenTelemetry's, of its invoke_agent span; for threads that inherit nothing
        self._seeds: list[Seed] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Trajectory(id={self.id!r}, namespace={self.namespace!r}, name={self.name!r}, calls={len(self.calls)})"

    def seed(self, content: str | Sequence[int], source: SeedSource = "seed") -> None:
        """Offer text (or token ids) as draft material for the calls to come. Half a surrogate pair in the text (a badly
        decoded file) counts as "?": a guess never fails a call. Raises InvalidRequestError for what is neither.
        """
        if source not in _SOURCES:
            raise InvalidRequestError(f"seed source: needed one of {', '.join(_SOURCES)}, got {shown(source)}")
        if isinstance(content, str):
            content = str.encode(content, "utf-8", "replace").decode("utf-8")  # not as a subclass may encode
        else:
            try:
                if isinstance(content, (bytes, bytearray)):
                    raise TypeError("bytes")
                content = tuple(operator.index(i) for i in content)
            except TypeError as error:
                raise InvalidRequestError(
                    f"seed: needed text or a sequence of token ids (whole numbers), got {shown(content)}; "
                    f"decode bytes to text first"
                ) from error
            if content and min(content) < 0:
                raise InvalidRequestError(f"seed: token ids are >= 0, got {shown(min(content))}")
        if content:
            with self._lock:
                self._seeds.append(Seed(content, source))

    def seeds_from(self, start: int) -> list[Seed]:
        """The seeds from number `start` on; an engine remembers how many it has taken."""
        with self._lock:
            return self._seeds[start:]

    def bind(self, function: F) -> F:
        """The function, running inside this trajectory wherever it is called (for bare threads)."""

        @functools.wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            with _Scope(self, self):
                return function(*args, **kwargs)

        return bound  # type: ignore[return-value]


_current: contextvars.ContextVar[Trajectory | None] = contextvars.ContextVar("agentspec_trajectory", default=None)


def current_trajectory() -> Trajectory | None:
    """The trajectory that this code runs in, or None."""
    return _current.get()


class _Scope:
    """Makes a trajectory and a span current while it is entered: around each stretch of code that runs, never
    across a yield. span: whatever has the OpenTelemetry context to attach."""

    def __init__(self, entered: Trajectory | None, span: Any) -> None:
        self.trajectory, self.span = entered, span

    def __enter__(self) -> None:
        # Set also where it stays the same: resetting it tells whether this is still the context it was set in.
        self._token = _current.set(self.trajectory or _current.get())
        self._attached = telemetry.attach(self.span)

    def __exit__(self, *_: object) -> None:
        try:
            _current.reset(self._token)
        except ValueError:
            return  # left in another context (a coroutine collected elsewhere): nothing was changed here
        telemetry.detach(self._attached)


def _namespace(namespace: str | bool | None, name: str | None) -> str | None:
    """DESIGN's default: an agent's own name is its namespace; False shares nothing."""
    if namespace is False:
        return None
    if namespace is None:
        return name
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequestError(f"namespace: needed a name, None or False, got {shown(namespace)}")
    return namespace


@contextmanager
def trajectory(
    id: str | None = None, namespace: str | Literal[False] | None = None, *, name: str | None = None
) -> Iterator[Trajectory]:
    """Run the block's calls as one trajectory.

    id:        continue the trajectory of this id, or start it; None: a new one
    namespace: share what is learned with earlier runs under this name; None: under `name`, if one was given;
               False: with nobody
    """
    entered = Trajectory(id, _namespace(namespace, name), name or "agent")
    with telemetry.agent(entered) as span, _Scope(entered, span):
        yield entered


def seed(content: str | Sequence[int], source: SeedSource = "seed") -> None:
    """Offer text or token ids as draft material to the current trajectory.

    Raises InvalidRequestError outside of one: it would be lost silently.
    """
    current = _current.get()
    if current is None:
        raise InvalidRequestError(
            "seed: there is no current trajectory; call it inside `with agentspec.trajectory():` or an @agent_loop"
        )
    current.seed(content, source)


def _wrap(
    function: Any,
    start: Callable[[tuple[Any, ...], dict[str, Any]], _Scope],
    returned: Callable[[Any], None] = lambda value: None,
) -> Any:
    """function with each of its runs inside start(args, kwargs), whatever kind of function it is.

    A generator's body sees the trajectory and its span only while it runs: they are set before each
    resumption and reset before each yield, so the consumer's context is never touched. The span ends with the
    body, or when the generator is closed or collected.
    """
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def async_generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            scope = start(args, kwargs)
            with scope.span:
                body = function(*args, **kwargs)
                resume: Callable[[Any], Any] = body.asend
                value: Any = None
                try:
                    while True:
                        try:
                            with scope:
                                item = await resume(value)
                        except StopAsyncIteration:
                            return
                        returned(item)
                        try:
                            value = yield item
                            resume = body.asend
                        except GeneratorExit:
                            raise
                        except BaseException as error:
                            value, resume = error, body.athrow
                finally:
                    with scope:
                        await body.aclose()

        return async_generator

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            scope = start(args, kwargs)
            with scope.span:
                body = function(*args, **kwargs)
                resume: Callable[[Any], Any] = body.send
                value: Any = None
                try:
                    while True:
                        try:
                            with scope:
                                item = resume(value)
                        except StopIteration as stop:
                            return stop.value
                        returned(item)
                        try:
                            value = yield item
                            resume = body.send
                        except GeneratorExit:
                            raise
                        except BaseException as error:
                            value, resume = error, body.throw
                finally:
                    with scope:
                        body.close()

        return generator

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            scope = start(args, kwargs)
            with scope.span as span:
                with scope:
                    value = await function(*args, **kwargs)
                span.result(value)
            returned(value)
            return value

        return coroutine

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        scope = start(args, kwargs)
        with scope.span as span:
            with scope:
                value = function(*args, **kwargs)
            span.result(value)
        returned(value)
        return value

    return plain


def _decorate(function: Any, wrap: Callable[[Any], Any]) -> Any:
    """wrap(function), also under classmethod and staticmethod."""
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(wrap(function.__func__))
    if not callable(function):
        raise InvalidRequestError(f"needed a function or method to decorate, got {type(function).__name__}")
    return wrap(function)


@overload
def agent_loop(function: F, /) -> F: ...
@overload
def agent_loop(
    *, name: str | None = None, id: str | None = None, namespace: str | Literal[False] | None = None
) -> Callable[[F], F]: ...


def agent_loop(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    id: str | None = None,
    namespace: str | Literal[False] | None = None,
) -> Any:
    """Each run of the function is one trajectory, nested runs their own.

    Works on functions, coroutines, generators and async generators, and on methods (also under classmethod and
    staticmethod); the signature is kept. The function's qualified name is the agent's name, and, in this process,
    the namespace that its runs share (namespace=False shares nothing).
    """

    def wrap(target: Any) -> Any:
        agent = name or getattr(target, "__qualname__", "agent").replace(".<locals>", "")
        shared = _namespace(namespace, f"{getattr(target, '__module__', '')}.{agent}" if name is None else name)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Scope:
            entered = Trajectory(id, shared, agent)
            return _Scope(entered, telemetry.agent(entered))

        return _wrap(target, start)

    if function is None:
        return lambda target: _decorate(target, wrap)
    return _decorate(function, wrap)


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, seed: bool = True) -> Callable[[F], F]: ...


def tool(function: Any = None, /, *, seed: bool = True) -> Any:
    """What the function returns (or yields) is offered as draft material the moment it does, before anybody
    shortens or reformats it. seed=False: not (secrets). Text goes as it is, anything else as JSON where it can.
    """

    def returned(value: Any) -> None:
        current = _current.get()
        if current is None or not seed or value is None:
            return
        current.seed(as_text(value), "tool")

    def wrap(target: Any) -> Any:
        name = getattr(target, "__name__", type(target).__name__)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Scope:
            return _Scope(None, telemetry.tool(target, name, args, kwargs, _current.get()))

        return _wrap(target, start, returned)

    if function is None:
        return lambda target: _decorate(target, wrap)
    return _decorate(function, wrap)


def as_text(value: Any) -> str:
    """What a tool returned, as draft material: text as it is, anything else as JSON where it can; "" where it has no
    text. Never raises: a tool doesn't fail for being remembered."""
    if isinstance(value, str):
        return str.__str__(value)  # not as a subclass may write itself
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    writers: tuple[Callable[[Any], str], ...] = (functools.partial(json.dumps, ensure_ascii=False), str)
    for write in writers:
        with contextlib.suppress(Exception):  # its own __str__ may raise anything
            return write(value)
    return ""
