"""/metrics: what agentspec measures, for Prometheus; and spans to a collector where one is named.

A query that a person would type:
    histogram_quantile(0.5, sum by (le) (rate(agentspec_tokens_per_step_bucket[5m])))
    sum by (http_response_status_code) (rate(http_server_request_duration_seconds_count[5m]))
"""

from __future__ import annotations

import os
from collections.abc import Callable

from agentspec import telemetry
from agentspec.errors import MissingExtraError

__all__ = ["set_up"]


def set_up(otlp_endpoint: str | None) -> Callable[[], tuple[bytes, str]]:
    """Make the process's meter provider; returns what /metrics answers. Once a process, before any call.

    otlp_endpoint: also send spans and metrics there; None: as the OTEL_EXPORTER_OTLP_* variables say, or nowhere.
    """
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
    except ImportError as error:
        raise MissingExtraError("agentspec serve", "opentelemetry-exporter-prometheus", "serve") from error
    reader = PrometheusMetricReader()
    if otlp_endpoint is not None or any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        telemetry.configure(endpoint=otlp_endpoint, readers=[reader])
    else:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider

        from agentspec.telemetry.setup import resource

        metrics.set_meter_provider(MeterProvider([reader], resource=resource(None), shutdown_on_exit=False))
    return lambda: (generate_latest(REGISTRY), CONTENT_TYPE_LATEST)
