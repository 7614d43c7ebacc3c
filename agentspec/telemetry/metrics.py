"""The instruments. OpenTelemetry's API only: without a meter provider they record nothing.

A PromQL query that a person would type:
    histogram_quantile(0.5, sum by (le) (rate(agentspec_tokens_per_step_bucket[5m])))
    sum by (agentspec_drift_cause) (increase(agentspec_drift_calls_total[1h]))
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from agentspec.telemetry import names as n
from agentspec.telemetry.drift import Drift

__all__ = ["Instruments", "instruments", "watch_memory"]

_lock = threading.Lock()
_made: tuple[Any, Instruments | None] = (None, None)
_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_memory(store: Any) -> None:
    """Count this store's nbytes into agentspec.memory.bytes for as long as it lives."""
    _stores.add(store)


def instruments() -> Instruments | None:
    """The instruments of the meter provider in force; None: there is none."""
    global _made
    provider = metrics.get_meter_provider()
    if _made[0] is not provider:
        with _lock:
            if _made[0] is not provider:
                from agentspec import __version__

                unset = type(provider).__module__.startswith("opentelemetry.metrics")
                _made = provider, None if unset else Instruments(provider.get_meter("agentspec", __version__))
    return _made[1]


class Instruments:
    """One set a meter provider. Thread-safe, as instruments are."""

    def __init__(self, meter: Meter) -> None:
        self._duration = _histogram(meter, n.OPERATION_DURATION)
        self._first = _histogram(meter, n.TIME_TO_FIRST_TOKEN)
        self._per_token = _histogram(meter, n.TIME_PER_OUTPUT_TOKEN)
        self._usage = _histogram(meter, n.TOKEN_USAGE)
        self._acceptance = _histogram(meter, n.ACCEPTANCE_RATE)
        self._conditional = _histogram(meter, n.CONDITIONAL_ACCEPTANCE)
        self._step_tokens = _histogram(meter, n.STEP_TOKENS_METRIC)
        drifted = n.DRIFTED_CALLS
        self._drifted = meter.create_counter(drifted.name, drifted.unit, drifted.meaning)
        held = n.MEMORY_BYTES
        meter.create_observable_gauge(held.name, [_memory], held.unit, held.meaning)

    def record(self, common: dict[str, Any], agent: str, seconds: float, stats: Any, drift: Drift | None) -> None:
        """One call. common: the conventional metric attributes, error.type among them where it failed;
        stats: None where nothing was measured. All of it is low in cardinality: no trajectory ids."""
        self._duration.record(seconds, common)
        if stats is None:
            return
        self._usage.record(stats.prompt_tokens, common | {n.TOKEN_TYPE: "input"})
        self._usage.record(stats.output_tokens, common | {n.TOKEN_TYPE: "output"})
        if n.ERROR_TYPE not in common:  # these two are for successful responses
            if stats.ttft_ms is not None:
                self._first.record(stats.ttft_ms / 1e3, common)
            if stats.itl_mean_ms is not None:
                self._per_token.record(stats.itl_mean_ms / 1e3, common)
        ours = common | {n.AGENT_NAME: agent}
        for instrument, value in (
            (self._acceptance, stats.acceptance_rate),
            (self._conditional, stats.conditional_acceptance),
            (self._step_tokens, stats.tokens_per_step),
        ):
            if value is not None:
                instrument.record(value, ours)
        if drift is not None:
            self._drifted.add(1, ours | {n.DRIFT_CAUSE: drift.cause.value})


def _histogram(meter: Meter, metric: n.Metric) -> metrics.Histogram:
    return meter.create_histogram(
        metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=list(metric.buckets)
    )


def _memory(_: CallbackOptions) -> Iterable[Observation]:
    yield Observation(sum(int(store.nbytes) for store in list(_stores)))
