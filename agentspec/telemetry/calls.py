"""The span of a call: `chat {model}`, from the request to its last token. Called by engines, through
base.Channel.

It is started in the caller's thread as a child of what is current there, and finished by whichever thread
puts the call's end into the channel. It is never attached to any context. A call that nobody finishes (a
dropped stream whose engine is gone) ends its span when the channel is collected.
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import logging
import os
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from agentspec.errors import RequestAbortedError
from agentspec.telemetry import names as n
from agentspec.telemetry.content import messages_json, output_json
from agentspec.telemetry.drift import Drift, DriftWatch
from agentspec.telemetry.figures import call_attributes
from agentspec.telemetry.metrics import instruments
from agentspec.telemetry.options import OPTIONS
from agentspec.telemetry.spans import Gathered, failed, surrounding, tracer
from agentspec.telemetry.steps import step_events

__all__ = ["NO_CALL", "ChatSpan", "NoCall", "Target", "chat", "fingerprint"]

logger = logging.getLogger("agentspec.telemetry")

_drift = DriftWatch()
_open: weakref.WeakSet[ChatSpan] = weakref.WeakSet()
# (GenerationRequest's option, attribute, the value that asks for nothing)
_PARAMETERS = (
    ("max_tokens", n.MAX_TOKENS, None),
    ("temperature", n.TEMPERATURE, None),
    ("n", n.CHOICES, 1),
    ("top_p", n.TOP_P, 1.0),
    ("top_k", n.TOP_K, 0),
    ("seed", n.SEED, None),
    ("stop", n.STOP, ()),
    ("presence_penalty", n.PRESENCE_PENALTY, 0.0),
    ("frequency_penalty", n.FREQUENCY_PENALTY, 0.0),
)


@dataclass(slots=True, frozen=True)
class Target:
    """Who runs the model. engine: "local" or "sglang"; address and port: of a remote one."""

    model: str
    engine: str = "local"
    address: str | None = None
    port: int | None = None


class NoCall:
    """A ChatSpan where nothing is set up."""

    def chunk(self, text: str) -> None:
        pass

    def finish(self, stats: Any = None, error: BaseException | None = None) -> None:
        pass

    def measuring(self, stats: Any) -> None:
        pass

    def headers(self) -> dict[str, str]:
        return {}


NO_CALL = NoCall()


def chat(
    target: Target, request: Any, trajectory: Any, messages: Sequence[Mapping[str, Any]] | None = None
) -> ChatSpan | NoCall:
    """Start a call's span in the caller's thread. Never raises: telemetry must not fail a call."""
    try:
        if tracer() is None and instruments() is None:
            return NO_CALL
        _at_exit()
        return ChatSpan(target, request, trajectory, messages)
    except Exception:
        logger.exception("a call goes untraced")
        return NO_CALL


@functools.cache
def _at_exit() -> None:
    # Exit handlers run last registered first, and the providers' were registered by now.
    atexit.register(_drop_open)


class ChatSpan:
    """One call's span and metrics. `finish` may be called from any thread, counts once, and never raises."""

    __slots__ = (
        "__weakref__",
        "_common",
        "_context",
        "_done",
        "_fingerprint",
        "_pid",
        "_started",
        "_stats",
        "_text",
        "_trajectory",
        "span",
    )

    def __init__(
        self, target: Target, request: Any, trajectory: Any, messages: Sequence[Mapping[str, Any]] | None
    ) -> None:
        self._done = False
        self._pid = os.getpid()
        self._started = time.perf_counter()
        self._trajectory = trajectory
        self._fingerprint = fingerprint(request)
        self._text: list[str] | None = None
        self._stats: Any = None
        provider = "agentspec" if target.engine == "local" else target.engine
        self._common: dict[str, Any] = {
            n.OPERATION: "chat",
            n.PROVIDER: provider,
            n.REQUEST_MODEL: target.model,
        }
        if target.address is not None:
            self._common[n.SERVER_ADDRESS] = target.address
            if target.port is not None:
                self._common[n.SERVER_PORT] = target.port
        parent = surrounding(trajectory)
        current = tracer()
        self.span: Span = INVALID_SPAN
        if current is not None:
            self.span = current.start_span(
                f"chat {target.model}",
                context=parent,
                kind=SpanKind.INTERNAL if target.engine == "local" else SpanKind.CLIENT,
                attributes=self._common | self._asked(target, request),
            )
            if self.span.is_recording() and OPTIONS.wants_content():
                self._text = []
                if messages is not None:
                    self.span.set_attribute(n.INPUT_MESSAGES, messages_json(messages, OPTIONS.limit()))
        self._context: Context = trace.set_span_in_context(self.span, parent)
        _open.add(self)

    def _asked(self, target: Target, request: Any) -> dict[str, Any]:
        asked = {
            n.STREAM: True,
            n.ENGINE: target.engine,
            n.CONVERSATION: self._trajectory.id,
            n.AGENT_NAME: self._trajectory.name,
            n.FINGERPRINT: self._fingerprint,
        }
        for option, key, nothing in _PARAMETERS:
            value: Any = getattr(request, option, nothing)
            if value is None or value == nothing:
                continue
            if option == "stop":
                value = [value] if isinstance(value, str) else [str(text) for text in value]
            asked[key] = float(value) if n.ATTRIBUTES[key].kind == "float" else value
        return {key: value for key, value in asked.items() if value is not None and value != []}

    def headers(self) -> dict[str, str]:
        """traceparent (and what else the propagators write), for the request to a server."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=self._context)
        return carrier

    def measuring(self, stats: Any) -> None:
        """What the engine fills in as it goes: written as it stands if the call never comes to its end."""
        self._stats = stats

    def chunk(self, text: str) -> None:
        """Text that arrived; kept only where content was opted into."""
        if self._text is not None:
            self._text.append(text)

    def finish(self, stats: Any = None, error: BaseException | None = None) -> None:
        """The call is over. stats: what was measured until then; error: what ended it. An abort by the
        consumer is no error: its finish reason says it."""
        if self._done or os.getpid() != self._pid:
            return
        self._done = True
        _open.discard(self)
        seconds = time.perf_counter() - self._started
        try:
            self._write(stats, error, seconds)
        except Exception:
            logger.exception("a call's figures could not be written")
        finally:
            self.span.end()

    def _write(self, stats: Any, error: BaseException | None, seconds: float) -> None:
        abandoned = isinstance(error, RequestAbortedError)
        partial = getattr(error, "partial", None)
        stats = stats or getattr(partial, "stats", partial) or _as_it_stands(self._stats)
        drift: Drift | None = None
        if stats is not None and error is None:
            drift = _drift.observe(self._trajectory, self._fingerprint, stats)
        gathered = Gathered.of(self._context)
        if gathered is not None and stats is not None:
            gathered.calls.append(stats)
            gathered.drift = drift if error is None else gathered.drift
        if self.span.is_recording():
            if stats is not None:
                self.span.set_attributes(call_attributes(stats))
                if OPTIONS.wants_step_events():
                    step_events(self.span, stats, seconds)
            if drift is not None:
                self.span.set_attributes({n.DRIFT: drift.words, n.DRIFT_CAUSE: drift.cause.value})
            if self._text is not None:
                reason = getattr(stats, "finish_reason", "") or "error"
                self.span.set_attribute(n.OUTPUT_MESSAGES, output_json("".join(self._text), reason, OPTIONS.limit()))
            if abandoned:
                self.span.set_attribute(n.ABANDONED, True)
                self.span.set_attribute(n.FINISH_REASONS, ["abort"])
            elif error is not None:
                failed(self.span, error)
        made = instruments()
        if made is not None:
            common = dict(self._common)
            if getattr(stats, "model", ""):
                common[n.RESPONSE_MODEL] = stats.model
            if error is not None and not abandoned:
                common[n.ERROR_TYPE] = type(error).__qualname__
            made.record(common, self._trajectory.name, seconds, stats, drift)

    def drop(self) -> None:
        """Nobody will finish this call."""
        self.finish(None, RequestAbortedError("the call was dropped before its end"))

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.drop()


def _drop_open() -> None:
    """At exit, before the providers send their last spans: the calls that are still running end here."""
    for call in list(_open):
        call.drop()


def _as_it_stands(stats: Any) -> Any:
    """A copy of a running call's figures, its output counted by what has arrived."""
    if stats is None:
        return None
    stats = copy.copy(stats)
    stats.arrivals = list(stats.arrivals)
    if not stats.output_tokens:
        stats.output_tokens = sum(tokens for _, tokens in stats.arrivals)
    return stats


def fingerprint(request: Any) -> str | None:
    """A hash of the prompt's ids before its first message that isn't the system's: instructions, tools,
    template.

    None where the messages' places aren't known (raw ids) or nothing stands before them.
    """
    spans = getattr(request, "spans", None)
    if not spans:
        return None
    end = next((span.start for span in spans if span.role not in ("system", "developer")), 0)
    if end <= 0:
        return None
    ids = request.input_ids[:end]
    raw = ids.astype("int32").tobytes() if hasattr(ids, "astype") else array("i", ids).tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
