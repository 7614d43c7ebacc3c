"""Verify-step events: where in a slow call the time went. Off by default; at most 64 a call.

The SDK keeps 128 events a span and drops the rest, so nothing is written per token, and of the steps only
those worth a look: the slowest, and those that accepted the least of what they proposed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.trace import Span

from agentspec.telemetry import names as n

__all__ = ["MOST", "step_events", "worth_a_look"]

MOST = 64


def step_events(span: Span, stats: Any, seconds: float) -> None:
    """Add the events, at the times at which the steps ended. seconds: since the call's start, until now."""
    began = time.time_ns() - int(seconds * 1e9)
    before = 0.0
    gaps: list[float] = []
    for at, _ in stats.arrivals:
        gaps.append(at - before)
        before = at
    drafts: Sequence[tuple[int, int]] = getattr(stats, "drafts", ())
    for step, why in worth_a_look(gaps, drafts):
        at, tokens = stats.arrivals[step]
        proposed, accepted = drafts[step] if step < len(drafts) else (0, 0)
        span.add_event(
            n.STEP_EVENT,
            {
                n.STEP_NUMBER: step,
                n.STEP_MS: gaps[step],
                n.STEP_TOKENS: tokens,
                n.STEP_PROPOSED: proposed,
                n.STEP_ACCEPTED: accepted,
                n.STEP_WHY: why,
            },
            timestamp=began + int(at * 1e6),
        )


def worth_a_look(gaps: Sequence[float], drafts: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """(step, "slow" or "rejected") in order: the slowest half of MOST, then the steps that lost most draft
    tokens, then more slow ones where few were rejected."""
    slowest = sorted(range(len(gaps)), key=lambda step: -gaps[step])
    lost = {step: proposed - accepted for step, (proposed, accepted) in enumerate(drafts[: len(gaps)])}
    chosen = dict.fromkeys(slowest[: MOST // 2], "slow")
    for step in sorted((s for s in lost if lost[s] > 0), key=lambda s: -lost[s]):
        if len(chosen) >= MOST:
            break
        chosen.setdefault(step, "rejected")
    for step in slowest:
        if len(chosen) >= MOST:
            break
        chosen.setdefault(step, "slow")
    return sorted(chosen.items())
