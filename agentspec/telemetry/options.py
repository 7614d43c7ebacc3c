"""What telemetry writes beyond its defaults: message content and verify-step events. Set by configure() or
env.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["OPTIONS", "Options"]

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
STEPS_VARIABLE = "AGENTSPEC_STEP_EVENTS"
CONTENT_LIMIT = 16_384  # characters an attribute: Jaeger's storage and UI choke on much more (jaeger#8565)


@dataclass(slots=True)
class Options:
    """content: write messages, tool arguments and results; None: as the OTel variable says. step_events:
    likewise.
    """

    content: bool | None = None
    step_events: bool | None = None
    content_limit: int = CONTENT_LIMIT

    def wants_content(self) -> bool:
        """OTel's opt-in: "true", or the newer SPAN_ONLY and SPAN_AND_EVENT. EVENT_ONLY means events, which
        we lack.
        """
        if self.content is not None:
            return self.content
        return os.environ.get(CONTENT_VARIABLE, "").strip().lower() in (
            "true",
            "1",
            "span_only",
            "span_and_event",
        )

    def wants_step_events(self) -> bool:
        if self.step_events is not None:
            return self.step_events
        return os.environ.get(STEPS_VARIABLE, "").strip().lower() in ("true", "1", "on")

    def limit(self) -> int:
        """Ours, or the SDK's own attribute limit where that is smaller (it would cut JSON anywhere)."""
        limits = [self.content_limit]
        for variable in ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"):
            value = os.environ.get(variable, "").strip()
            if value.isdigit():
                limits.append(int(value))
                break
        return min(limits)


OPTIONS = Options()
