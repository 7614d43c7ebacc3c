"""Spans around code: invoke_agent around a trajectory, execute_tool around a tool. Called by loop.py.

OpenTelemetry's API only. Where no provider is set up, NOTHING is returned and costs a comparison. A span is
started here but never made current here: whoever runs the code attaches `context` around each stretch that
runs, so that nothing stays attached across a yield (openinference#1769). A span ends once: when its code
ends, when its generator is closed or collected, and only in the process that started it (a forked child
holds a copy).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from agentspec.telemetry import names as n
from agentspec.telemetry.content import text
from agentspec.telemetry.figures import totals
from agentspec.telemetry.options import OPTIONS

__all__ = ["NOTHING", "Gathered", "Run", "agent", "attach", "detach", "surrounding", "tool", "tracer"]

_MESSAGE_LIMIT = 300  # characters of an exception's message in a span's status

_tracer: tuple[Any, Tracer | None] = (None, None)
# Called once, before the first span: sets up what the environment asks for (setup.py puts itself in here).
before_first: Callable[[], None] | None = None
# Of frameworks that keep their runs elsewhere than in OpenTelemetry's context: each returns the context of
# the run
# that this code is part of, or None. langchain_agentspec.tracing puts itself in here.
frameworks: list[Callable[[], Context | None]] = []
_GATHERED = context_api.create_key("agentspec-gathered")
_IN_TOOL = context_api.create_key("agentspec-tool")


def tracer() -> Tracer | None:
    """The tracer of the provider in force; None: there is none."""
    global _tracer, before_first
    if before_first is not None:
        first, before_first = before_first, None
        first()
    provider = trace.get_tracer_provider()
    if _tracer[0] is not provider:
        unset = isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
        _tracer = provider, None if unset else provider.get_tracer("agentspec", _version())
    return _tracer[1]


def _version() -> str:
    from agentspec import __version__

    return __version__


class Run:
    """A span around code. Use it as a context manager around the whole, and attach `context` while code
    runs.
    """

    __slots__ = ("_describe", "_ended", "_pid", "context", "span")

    def __init__(self, span: Span, context: Context, describe: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self.span = span
        self.context = context
        self._describe = describe
        self._ended = False
        self._pid = os.getpid()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(error)

    def result(self, value: Any) -> None:
        """What a tool returned: written on opt-in only."""
        if self.span.is_recording() and OPTIONS.wants_content():
            self.span.set_attribute(n.TOOL_RESULT, text(value, OPTIONS.limit()))

    def end(self, error: BaseException | None = None) -> None:
        """End the span; the second call and calls in a forked child do nothing."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        if self.span.is_recording():
            if self._describe is not None:
                self.span.set_attributes(self._describe())
            if isinstance(error, GeneratorExit):
                self.span.set_attribute(n.ABANDONED, True)
            elif error is not None:
                failed(self.span, error)
        self.span.end()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self.end(GeneratorExit())


class _Nothing:
    """A Run where there is no provider."""

    context = None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def result(self, value: Any) -> None:
        pass

    def end(self, error: BaseException | None = None) -> None:
        pass


NOTHING = _Nothing()


class Gathered:
    """The calls that ended under an agent's span, and the drift as of the last. Travels in the span's
    context.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.drift: Any = None

    @classmethod
    def of(cls, context: Context) -> Gathered | None:
        found = context_api.get_value(_GATHERED, context)
        return found if isinstance(found, cls) else None


def agent(trajectory: Any, parent: Context | None = None) -> Run | _Nothing:
    """An invoke_agent span for a trajectory (its name and id), child of what is current here, or of `parent`.

    It ends with the figures of the calls below it.
    """
    current = tracer()
    if current is None:
        return NOTHING
    attributes = {
        n.OPERATION: "invoke_agent",
        n.PROVIDER: "agentspec",
        n.AGENT_NAME: trajectory.name,
        n.CONVERSATION: trajectory.id,
    }
    name = f"invoke_agent {trajectory.name}"
    above = parent if parent is not None else surrounding(None)
    span = current.start_span(name, context=above, kind=SpanKind.INTERNAL, attributes=attributes)
    gathered = Gathered()
    context = context_api.set_value(_GATHERED, gathered, trace.set_span_in_context(span, above))
    trajectory.context = context
    return Run(span, context, lambda: _agent_end(gathered))


def tool(
    function: Any,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    trajectory: Any = None,
    parent: Context | None = None,
) -> Run | _Nothing:
    """An execute_tool span, child of what is current here, or of `parent`. The arguments are written on
    opt-in only. A @tool that a framework runs as its tool, under a span already, makes no second one."""
    current = tracer()
    if current is None:
        return NOTHING
    above = parent if parent is not None else surrounding(trajectory)
    if context_api.get_value(_IN_TOOL, above) == name:
        return NOTHING
    attributes: dict[str, Any] = {n.OPERATION: "execute_tool", n.TOOL_NAME: name, n.TOOL_TYPE: "function"}
    if described := (getattr(function, "__doc__", None) or "").strip():
        attributes[n.TOOL_DESCRIPTION] = text(described.splitlines()[0], _MESSAGE_LIMIT)
    if trajectory is not None:
        attributes |= {n.CONVERSATION: trajectory.id, n.AGENT_NAME: trajectory.name}
    span = current.start_span(f"execute_tool {name}", context=above, kind=SpanKind.INTERNAL, attributes=attributes)
    if span.is_recording() and OPTIONS.wants_content():
        span.set_attribute(n.TOOL_ARGUMENTS, text(_arguments(function, args, kwargs), OPTIONS.limit()))
    context = trace.set_span_in_context(span, above)
    if parent is not None:  # a framework's
        context = context_api.set_value(_IN_TOOL, name, context)
    return Run(span, context)


def _arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call itself will say it
        return {"args": list(args), **kwargs}
    bound.pop("self", None)
    return bound


def surrounding(trajectory: Any) -> Context:
    """What a span that begins here is a child of: what a framework says (`frameworks`), what is current,
    or, in a thread that inherited nothing, the trajectory's own span."""
    for framework in frameworks:
        said = framework()
        if said is not None:
            return said
    here = context_api.get_current()
    if not trace.get_current_span(here).get_span_context().is_valid:
        return getattr(trajectory, "context", None) or here
    return here


def attach(run: Any) -> Any:
    """Make the span current whose `context` this has; give what is returned to `detach`, in the same
    context.
    """
    return None if run.context is None else context_api.attach(run.context)


def detach(token: Any) -> None:
    if token is not None:
        context_api.detach(token)


def failed(span: Span, error: BaseException) -> None:
    """error.type and the status. No stack trace: its frames' text may hold content."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "agentspec.errors") else kind.__module__ + "."
    span.set_attribute(n.ERROR_TYPE, module + kind.__qualname__)
    span.set_status(Status(StatusCode.ERROR, text(str(error) or kind.__qualname__, _MESSAGE_LIMIT)))


def _agent_end(gathered: Gathered) -> dict[str, Any]:
    attributes = totals(list(gathered.calls))
    if gathered.drift is not None:
        attributes |= {n.DRIFT: gathered.drift.words, n.DRIFT_CAUSE: gathered.drift.cause.value}
    return attributes
