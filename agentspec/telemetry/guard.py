"""An exporter that fails quietly: no collector listening costs one warning, and nothing on the call path.

Wraps a span or a metric exporter; runs in the SDK's export threads. The exporters retry for seconds and log
each failure. Here the collector is knocked at first (0.5 s at most) wherever the last export did not get
through, and what the exporter logs is kept for the one warning.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import urllib.parse
import urllib.request
from typing import Any, ClassVar

__all__ = ["Guard", "Listener", "Quiet"]

logger = logging.getLogger("agentspec.telemetry")

_KNOCK_S = 0.5
# What a backend that has no such endpoint answers, in the exporters' words.
_NO_SUCH_SIGNAL = re.compile(r"\b(404|405|501)\b|UNIMPLEMENTED", re.IGNORECASE)
_exporting = threading.local()  # .lines: what the exporter in this thread has logged


class Listener:
    """Where both signals go. Knows whether somebody listens there, and says once that nobody does."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._said = False
        self._lock = threading.Lock()
        at = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        self._host, self._port = at.hostname, at.port or {"http": 80, "https": 443}.get(at.scheme, 4317)
        self._knockable = bool(self._host) and at.scheme in ("", "http", "https")

    def answers(self) -> bool:
        if not self._knockable or self._proxied():
            return True
        try:
            socket.create_connection((self._host, self._port), timeout=_KNOCK_S).close()
        except OSError:
            return False
        return True

    def say_once(self, message: str, lost: str = "spans and metrics") -> None:
        with self._lock:
            if self._said:
                return
            self._said = True
        logger.warning(
            "%s: %s are dropped until that changes (said once). Start a collector "
            "(integrations/jaeger has one), or set OTEL_SDK_DISABLED=true.",
            message,
            lost,
        )

    def _proxied(self) -> bool:
        proxies = urllib.request.getproxies()
        return bool(proxies) and not urllib.request.proxy_bypass(self._host or "")


class Guard:
    """exporter, without its retries against nobody and without its log. signal: "traces" or "metrics"."""

    def __init__(self, exporter: Any, listener: Listener, signal: str, failure: Any) -> None:
        self._exporter, self._listener, self._signal, self._failure = exporter, listener, signal, failure
        self._through = False
        self._refused = False
        for name in {type(exporter).__module__, *(kind.__module__ for kind in type(exporter).__mro__)}:
            if name.startswith("opentelemetry.exporter"):
                Quiet.on(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)

    def export(self, batch: Any, **options: Any) -> Any:
        if self._refused:
            return self._failure
        if not self._through and not self._listener.answers():
            self._listener.say_once(f"no OTLP collector answers at {self._listener.endpoint}")
            return self._failure
        _exporting.lines = []
        try:
            result = self._exporter.export(batch, **options)
            lines = _exporting.lines
        finally:
            _exporting.lines = None
        self._through = result is not self._failure
        if not self._through:
            reason = str(lines[-1]) if lines else "no reason given"
            if self._signal == "metrics" and _NO_SUCH_SIGNAL.search(reason):
                self._refused = True  # a traces-only backend, as Jaeger and Phoenix are: nothing is wrong
                logger.info("%s takes no metrics: they are not sent", self._listener.endpoint)
            else:
                message = f"export of {self._signal} to {self._listener.endpoint} failed ({reason})"
                self._listener.say_once(message, self._signal)
        return result


class Quiet(logging.Filter):
    """On an exporter's logger: keeps its lines for the guard while that exports, lets all others through."""

    _on: ClassVar[set[str]] = set()

    @classmethod
    def on(cls, name: str) -> None:
        if name not in cls._on:
            cls._on.add(name)
            logging.getLogger(name).addFilter(cls())

    def filter(self, record: logging.LogRecord) -> bool:
        lines: list[str] | None = getattr(_exporting, "lines", None)
        if lines is None:
            return True
        lines.append(record.getMessage())
        return False
