"""Drift: where drafting stopped paying, and why, said once and in words.

Watched over a trajectory and over a prompt template (its fingerprint, across trajectories): tokens per step
at or under break-even over the last calls. A cold start is not drift: a few calls must have been seen.
Called by calls.py when a call ends, from engine threads. Duck-typed on CallStats; imports nothing of
agentspec.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cause", "Drift", "DriftWatch", "cause_of"]

logger = logging.getLogger("agentspec.drift")

WINDOW = 8  # calls that are looked back on
LEAST_CALLS = 3
LEAST_STEPS = 48  # with fewer the ratio is noise: one accepted draft of 8 moves it by a sixth
FINGERPRINTS = 256  # templates remembered at most


class Cause(str, enum.Enum):
    """Why. The value is what the attribute and the metric say."""

    NOTHING_MATCHED = "nothing matched"
    REJECTED = "matched and rejected"
    LOAD = "load"
    TEMPERATURE = "temperature"
    TEMPLATE = "template changed"


@dataclass(slots=True, frozen=True)
class Drift:
    """cause, and the sentence that a person reads."""

    cause: Cause
    words: str


@dataclass(slots=True)
class _Seen:
    """What the watch keeps of a call."""

    tokens: int
    steps: int
    cost: float
    proposed: int
    accepted: int
    mismatches: int
    unmatched: int
    priced_out: int
    temperature: float
    fingerprint: str | None
    changed: bool


class _Watched:
    """One trajectory or one fingerprint."""

    def __init__(self) -> None:
        self.calls: deque[_Seen] = deque(maxlen=WINDOW)
        self.said: Cause | None = None

    def look(self, seen: _Seen) -> Cause | None:
        self.calls.append(seen)
        return cause_of(self.calls)


class DriftWatch:
    """Thread-safe. One instance a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trajectories: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._fingerprints: OrderedDict[str, _Watched] = OrderedDict()
        self._last_fingerprint: OrderedDict[str, str] = OrderedDict()  # namespace (or id) -> the last

    def observe(self, trajectory: Any, fingerprint: str | None, stats: Any) -> Drift | None:
        """A call ended. Returns what there is to say about its trajectory (or its template) now, logs it
        once.
        """
        agent = str(getattr(trajectory, "name", "") or "")
        with self._lock:
            # Runs that share what they learned are compared with each other, any other with itself.
            runs = str(getattr(trajectory, "namespace", None) or getattr(trajectory, "id", ""))
            seen = _seen(stats, fingerprint, self._changed(runs, fingerprint))
            watched = self._trajectories.get(trajectory)
            if watched is None:
                watched = self._trajectories[trajectory] = _Watched()
            found = self._judge(watched, seen, f"trajectory {getattr(trajectory, 'id', '?')} ({agent})")
            if fingerprint is None:
                return found
            template = self._fingerprints.pop(fingerprint, None) or _Watched()
            self._fingerprints[fingerprint] = template
            if len(self._fingerprints) > FINGERPRINTS:
                self._fingerprints.popitem(last=False)
            if found is not None:
                template.calls.append(seen)  # its trajectory has said it already
                return found
            return self._judge(template, seen, f"prompt template {fingerprint} of agent {agent}")

    def _changed(self, runs: str, fingerprint: str | None) -> bool:
        if fingerprint is None:
            return False
        last = self._last_fingerprint.pop(runs, None)
        self._last_fingerprint[runs] = fingerprint
        if len(self._last_fingerprint) > FINGERPRINTS:
            self._last_fingerprint.popitem(last=False)
        return last is not None and last != fingerprint

    def _judge(self, watched: _Watched, seen: _Seen, where: str) -> Drift | None:
        cause = watched.look(seen)
        if cause is None:
            watched.said = None  # recovered: a relapse is news
            return None
        drift = Drift(cause, _words(cause, watched.calls))
        if watched.said is not cause:
            watched.said = cause
            logger.warning("drafting does not pay in %s: %s", where, drift.words)
        return drift


def cause_of(calls: Sequence[Any]) -> Cause | None:
    """None: the calls gain, or are too few to tell."""
    steps = sum(c.steps for c in calls)
    if len(calls) < LEAST_CALLS or steps < LEAST_STEPS:
        return None
    if sum(c.tokens for c in calls) > sum(c.cost for c in calls) + 1e-9:
        return None
    unmatched, priced_out = sum(c.unmatched for c in calls), sum(c.priced_out for c in calls)
    drafted = sum(c.accepted + c.mismatches for c in calls)
    if not (unmatched or priced_out or drafted):
        return None  # drafting was off: nothing was expected to pay
    if any(c.changed for c in calls):
        return Cause.TEMPLATE
    if priced_out > max(unmatched, sum(c.mismatches for c in calls)):
        return Cause.LOAD
    if sum(c.mismatches for c in calls) >= unmatched:
        return Cause.TEMPERATURE if any(c.temperature > 0 for c in calls) else Cause.REJECTED
    return Cause.NOTHING_MATCHED


def _seen(stats: Any, fingerprint: str | None, changed: bool) -> _Seen:
    reasons = {str(reason).lower(): count for reason, count in stats.not_drafted.items()}
    priced = sum(count for reason, count in reasons.items() if "load" in reason or "batch" in reason)
    unmatched = sum(count for reason, count in reasons.items() if "match" in reason or "worth" in reason)
    return _Seen(
        tokens=stats.output_tokens,
        steps=stats.verify_steps,
        cost=stats.break_even * stats.verify_steps,
        proposed=stats.proposed,
        accepted=stats.accepted,
        mismatches=stats.mismatches or 0,
        unmatched=unmatched,
        priced_out=priced,
        temperature=stats.temperature,
        fingerprint=fingerprint,
        changed=changed,
    )


def _words(cause: Cause, calls: Sequence[_Seen]) -> str:
    steps = max(1, sum(c.steps for c in calls))
    figures = (
        f"{sum(c.tokens for c in calls) / steps:.2f} tokens per step against a break-even of "
        f"{sum(c.cost for c in calls) / steps:.2f} over {len(calls)} calls"
    )
    proposed, accepted = sum(c.proposed for c in calls), sum(c.accepted for c in calls)
    rate = f"{accepted} of {proposed} draft tokens accepted"
    if cause is Cause.NOTHING_MATCHED:
        unmatched = sum(c.unmatched for c in calls)
        found_none = f"{unmatched} of {steps} steps found no text worth proposing in the memory"
        return f"{cause.value}: {found_none}; {figures}"
    if cause is Cause.REJECTED:
        return f"{cause.value}: the memory offers text that the model does not repeat ({rate}); {figures}"
    if cause is Cause.TEMPERATURE:
        hottest = max(c.temperature for c in calls)
        return f"{cause.value} {hottest:g}: sampled text departs from what is remembered ({rate}); {figures}"
    if cause is Cause.LOAD:
        priced = sum(c.priced_out for c in calls)
        full = f"{priced} of {steps} steps went without a draft because the batch was full"
        return f"{cause.value}: {full}; {figures}"
    news = next((c.fingerprint for c in reversed(calls) if c.changed), None)
    return f"{cause.value} to {news}: what was remembered does not line up with it any more ({rate}); {figures}"
