"""The guard around an exporter: what is said, how often, and what is passed on."""

from __future__ import annotations

import logging
import socket

import pytest

from agentspec.telemetry.guard import Guard, Listener, Quiet

pytestmark = pytest.mark.fast

FAILED, DONE = "failed", "done"
LOGGER = "opentelemetry.exporter.for_tests"


class Exporter:
    __module__ = LOGGER

    def __init__(self, *results):
        self.results, self.exports = list(results), 0

    def export(self, batch, **options):
        self.exports += 1
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if result is not DONE:
            logging.getLogger(LOGGER).error(result)
            return FAILED
        return DONE

    def shutdown(self):
        return "shut down"


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Listener(f"http://127.0.0.1:{server.getsockname()[1]}")


def guarded(exporter, listener, signal="traces"):
    return Guard(exporter, listener, signal, FAILED)


def test_what_works_is_passed_on(listening, caplog):
    guard = guarded(Exporter(DONE), listening)
    assert [guard.export([1]), guard.export([2])] == [DONE, DONE]
    assert guard.shutdown() == "shut down" and not caplog.records


def test_nobody_there_is_said_once_for_both_signals_and_nothing_is_tried(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = Listener(f"http://127.0.0.1:{server.getsockname()[1]}")
    exporter = Exporter(DONE)
    for signal in ("traces", "metrics"):
        guard = guarded(exporter, listener, signal)
        assert [guard.export([1]) for _ in range(5)] == [FAILED] * 5
    assert exporter.exports == 0
    (record,) = caplog.records
    assert "no OTLP collector answers" in record.message and record.levelno == logging.WARNING


def test_a_collector_that_comes_later_is_found(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    guard = guarded(Exporter(DONE), Listener(f"http://127.0.0.1:{port}"))
    assert guard.export([1]) == FAILED
    with socket.create_server(("127.0.0.1", port)):
        assert guard.export([2]) == DONE


def test_an_exporters_own_log_becomes_the_one_warning(listening, caplog):
    guard = guarded(Exporter("code: 500, reason: broken"), listening)
    assert [guard.export([1]), guard.export([2])] == [FAILED, FAILED]
    (record,) = caplog.records
    assert record.name == "agentspec.telemetry" and "code: 500, reason: broken" in record.message
    assert "traces are dropped" in record.message


@pytest.mark.parametrize("answer", ["code: 404, reason: x", "code: 405, reason", "StatusCode.UNIMPLEMENTED"])
def test_a_backend_without_metrics_is_left_in_peace(listening, caplog, answer):
    exporter = Exporter(answer)
    guard = guarded(exporter, listening, "metrics")
    assert [guard.export([1]) for _ in range(3)] == [FAILED] * 3
    assert exporter.exports == 1 and not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_traces_that_are_refused_are_said(listening, caplog):
    guarded(Exporter("code: 404, reason: x"), listening).export([1])
    assert "404" in caplog.text


def test_other_users_of_the_exporter_keep_their_log(caplog):
    Quiet.on(LOGGER)
    logging.getLogger(LOGGER).error("somebody else's")
    assert "somebody else's" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://collector:4318", ("collector", 4318)),
        ("https://collector", ("collector", 443)),
        ("collector:4317", ("collector", 4317)),
        ("collector", ("collector", 4317)),
        ("http://[::1]:4318", ("::1", 4318)),
    ],
)
def test_where_it_knocks(endpoint, address, monkeypatch):
    knocked = []

    def connect(at, timeout):
        knocked.append(at)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    assert Listener(endpoint).answers() is False
    assert knocked == [address]


def test_it_does_not_knock_past_a_proxy_or_at_a_unix_socket(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: 1 / 0)
    assert Listener("unix:///run/otel.sock").answers()
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert Listener("https://far.example:4318").answers()
