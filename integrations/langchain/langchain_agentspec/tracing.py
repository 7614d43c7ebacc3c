"""One trace for one run: what LangChain and LangGraph run, as invoke_agent and execute_tool spans.

LangChain keeps its runs in callbacks, not in OpenTelemetry's context, so each call of an agent would be a
trace of its own. A handler that LangChain adds to every run (register_configure_hook) starts a span for a
run that has no parent and for each tool, and answers agentspec's question which run the code at hand is
part of. Where OpenInference or OpenTelemetry's own LangChain instrumentation is at work, their spans are
there already: then none are made here, and the calls' spans go below theirs. Without a tracer provider
nothing happens.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context

from agentspec.telemetry import spans as telemetry

__all__ = ["RunSpans", "below"]

_MOST = 65536  # runs held; a run that LangChain never ends is forgotten then
# module -> its instrumentor: who else turns LangChain's runs into spans
_OTHERS = {
    "openinference.instrumentation.langchain": "LangChainInstrumentor",
    "opentelemetry.instrumentation.langchain": "LangchainInstrumentor",
    "opentelemetry.instrumentation.genai.langchain": "LangChainInstrumentor",
}


@dataclass(slots=True)
class _AgentRun:
    """What telemetry.agent wants to know of a trajectory."""

    name: str
    id: str
    context: Any = None


@dataclass(slots=True)
class _Held:
    """A run: the context of the span that it is part of, what was current when that began, and its own
    span.
    """

    context: Context
    outside: Any
    agent: _AgentRun
    span: Any = field(default=None)


class RunSpans(BaseCallbackHandler):
    """Added to every run. Never raises into it."""

    run_inline = True  # in the thread or task that starts the run, where the caller's span is current
    ignore_llm = ignore_chat_model = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self._held: OrderedDict[UUID, _Held] = OrderedDict()
        self._lock = threading.Lock()

    # ---- LangChain's callbacks ----------------------------------------------------------------

    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        above = self._get(parent_run_id)
        if above is not None:
            self._hold(run_id, _Held(above.context, above.outside, above.agent))
        elif parent_run_id is None and telemetry.tracer() is not None and not traced_by_others():
            metadata = metadata or {}
            agent = _AgentRun(
                str(metadata.get("lc_agent_name") or name or "agent"),
                str(metadata.get("thread_id") or run_id.hex),
            )
            outside = trace.get_current_span()
            span = telemetry.agent(agent, context_api.get_current())
            if span.context is not None:
                self._hold(run_id, _Held(span.context, outside, agent, span))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        self._end(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self._end(run_id, error)

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        name: str | None = None,
        inputs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        above = self._get(parent_run_id)
        if above is None:
            return
        called = name or str((serialized or {}).get("name") or "tool")

        def described() -> None: ...

        described.__doc__ = (serialized or {}).get("description")
        arguments = inputs if isinstance(inputs, dict) else {"input": input_str}
        span = telemetry.tool(described, called, (), arguments, above.agent, above.context)
        if span.context is not None:
            self._hold(run_id, _Held(span.context, above.outside, above.agent, span))

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        held = self._get(run_id)
        if held is not None and held.span is not None:
            held.span.result(getattr(output, "content", output))
        self._end(run_id, None)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self._end(run_id, error)

    # ---- agentspec's question -----------------------------------------------------------------

    def surrounding(self) -> Context | None:
        """The context of the run that the code at hand is part of; None: of none, or a span was opened
        inside.
        """
        config = var_child_runnable_config.get()
        manager: Any = (config or {}).get("callbacks")
        run_id = getattr(manager, "parent_run_id", None)
        current = trace.get_current_span()
        held = self._get(run_id)
        if held is not None:
            return held.context if current is held.outside else None
        if run_id is None or current.get_span_context().is_valid:
            return None
        others = _span_of(manager, run_id)
        return None if others is None else trace.set_span_in_context(others)

    # ---- inside -------------------------------------------------------------------------------

    def _get(self, run_id: UUID | None) -> _Held | None:
        return None if run_id is None else self._held.get(run_id)

    def _hold(self, run_id: UUID, held: _Held) -> None:
        with self._lock:
            self._held[run_id] = held
            while len(self._held) > _MOST:
                self._held.popitem(last=False)

    def _end(self, run_id: UUID, error: BaseException | None) -> None:
        with self._lock:
            held = self._held.pop(run_id, None)
        if held is not None and held.span is not None:
            held.span.end(error)


def traced_by_others() -> bool:
    """Whether another instrumentation of LangChain is switched on in this process."""
    for module, name in _OTHERS.items():
        instrumentor = getattr(sys.modules.get(module), name, None)
        if instrumentor is not None and getattr(instrumentor(), "is_instrumented_by_opentelemetry", False):
            return True
    return False


def _span_of(manager: Any, run_id: UUID) -> trace.Span | None:
    """The span that another tracer among the run's handlers has for it."""
    for handler in getattr(manager, "handlers", ()):
        find = getattr(handler, "get_span", None)
        span = find(run_id) if find is not None else None
        if isinstance(span, trace.Span):
            return span
    return None


@contextmanager
def below(run_manager: Any) -> Iterator[None]:
    """Runs the block (the start of a call) below the span that another tracer has for this model's run."""
    span = None if run_manager is None else _span_of(run_manager, run_manager.run_id)
    token = None if span is None else context_api.attach(trace.set_span_in_context(span))
    try:
        yield
    finally:
        if token is not None:
            context_api.detach(token)


_RUNS = RunSpans()
_handler: ContextVar[BaseCallbackHandler | None] = ContextVar("agentspec_run_spans", default=_RUNS)
register_configure_hook(_handler, inheritable=True)
telemetry.frameworks.append(_RUNS.surrounding)
