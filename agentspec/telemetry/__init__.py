"""OpenTelemetry spans and metrics: what each call gained, made to be looked at in Jaeger.

    agentspec.telemetry.configure()            # for a process that has no OpenTelemetry of its own

Nothing happens where OpenTelemetry isn't set up. The library uses OpenTelemetry's API only; the SDK and the
exporters are imported by configure(). Names and their sources: names.py. A leaf: loop.py and the engines call
it, it imports nothing of theirs and reads CallStats by its fields.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from agentspec.telemetry import spans
from agentspec.telemetry.calls import NO_CALL, ChatSpan, NoCall, Target, chat
from agentspec.telemetry.metrics import watch_memory
from agentspec.telemetry.spans import NOTHING, Run, agent, attach, detach, tool

if TYPE_CHECKING:
    from agentspec.telemetry.setup import Telemetry

__all__ = [
    "NOTHING",
    "NO_CALL",
    "ChatSpan",
    "NoCall",
    "Run",
    "Target",
    "agent",
    "attach",
    "chat",
    "configure",
    "detach",
    "tool",
    "watch_memory",
]


def configure(**options: Any) -> Telemetry:
    """Set up the SDK and an OTLP exporter; see telemetry.setup.configure for the options."""
    from agentspec.telemetry.setup import configure

    return configure(**options)


RECORDING_VARIABLE = "AGENTSPEC_TRACE_FOLDER"  # set by `agentspec trace record` for the command that it runs


def _record() -> None:
    from agentspec.telemetry.setup import record_to

    record_to(os.environ[RECORDING_VARIABLE])


if os.environ.get(RECORDING_VARIABLE):
    # At the first span, not now: a provider that the program sets up by then is kept and recorded.
    spans.before_first = _record
