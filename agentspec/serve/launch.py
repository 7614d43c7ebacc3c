"""`agentspec serve` with SGLang: starts its server with the right options, watches it, ends it with all it started.

SGLang runs in a process group of its own. It is ready when it answers, and, with the plugin, when an answer says
that the plugin made it. SIGINT and SIGTERM are passed on; what is left of the group after `shutdown_s` is killed.
Called by serve/__init__.py. Imports nothing of SGLang, and the plugin's diagnosis only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

from agentspec.errors import EngineError, InvalidRequestError, MissingExtraError, ServerError

__all__ = ["METHODS", "SGLangServer", "command", "installed", "serve_sglang", "variables"]

# method -> SGLang's --speculative-algorithm
METHODS = {
    "agentspec": "AGENTSPEC",
    "ngram": "NGRAM",
    "standalone": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "off": None,
}
_NEEDS_DRAFT_MODEL = ("standalone", "eagle", "eagle3")
_SETTINGS = "AGENTSPEC_SGLANG"  # the plugin's own variable
_LOOK_S = 0.5


def installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


def command(
    model: str,
    *,
    host: str,
    port: int,
    method: str = "agentspec",
    max_draft: int | None = None,
    draft_model: str | None = None,
    name: str | None = None,
    api_key: str | None = None,
    device: str | None = None,
    otlp_endpoint: str | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of SGLang 0.5.23's server. max_draft: draft tokens a step; SGLang counts the last token too.

    more: further options of SGLang's own, which it checks itself. Raises InvalidRequestError for options that
    exclude each other.
    """
    if method not in METHODS:
        raise InvalidRequestError(f"--method: needed one of {', '.join(METHODS)}, got {method!r}")
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", str(port)]
    algorithm = METHODS[method]
    if method in _NEEDS_DRAFT_MODEL and draft_model is None:
        raise InvalidRequestError(f"--method {method}: needs --draft-model, the model that drafts")
    if draft_model is not None and method not in (*_NEEDS_DRAFT_MODEL, "mtp"):
        raise InvalidRequestError(f"--draft-model: --method {method} drafts without a model")
    if max_draft is not None and (algorithm is None or max_draft < 1):
        raise InvalidRequestError(
            f"--max-draft {max_draft}: with --method {method} nothing is drafted; use --method off alone"
        )
    if algorithm is not None:
        words += ["--speculative-algorithm", algorithm]
    if draft_model is not None:
        words += ["--speculative-draft-model-path", draft_model]
    if max_draft is not None:
        if method not in ("agentspec", "ngram"):
            # A chain: one step of the draft model a token. Without a width SGLang chooses all three by the model.
            words += ["--speculative-num-steps", str(max_draft), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(max_draft + 1)]
    if name is not None:
        words += ["--served-model-name", name]
    if api_key is not None:
        words += ["--api-key", api_key]
    if device is not None:
        words += ["--device", device]
    if otlp_endpoint is not None:
        # SGLang's exporter takes HOST:PORT, by gRPC unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says otherwise.
        place = urlsplit(otlp_endpoint).netloc if "://" in otlp_endpoint else otlp_endpoint
        words += ["--enable-trace", "--otlp-traces-endpoint", place]
    return [*words, "--enable-metrics", "--enable-cache-report", *more]


def variables(
    method: str, *, memory_mb: float | None, proposer: str | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The server's environment: the plugin's settings are joined to what AGENTSPEC_SGLANG says already."""
    given = {k: v for k, v in (("memory_mb", memory_mb), ("proposer", proposer)) if v is not None}
    if not given:
        return dict(environment)
    if method != "agentspec":
        raise InvalidRequestError(f"--memory-mb, --proposer: --method {method} has no such setting")
    text = environment.get(_SETTINGS, "").strip() or "{}"
    try:
        held = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{_SETTINGS}: needed a JSON object, got {text!r} ({error})") from error
    if not isinstance(held, dict):
        raise InvalidRequestError(f"{_SETTINGS}: needed a JSON object, got {type(held).__name__}")
    return {**environment, _SETTINGS: json.dumps({**held, **given})}


@dataclass
class SGLangServer:
    """A running SGLang; a context manager. url: http://HOST:PORT; method: what it was started with.

    output: an open file for what it prints; None: this process' own output
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    url: str
    method: str = "agentspec"
    api_key: str | None = None
    start_s: float = 1800.0
    shutdown_s: float = 30.0
    output: IO[bytes] | None = None

    def __enter__(self) -> SGLangServer:
        self.process = subprocess.Popen(
            list(self.words),
            stdout=self.output,
            stderr=None if self.output is None else subprocess.STDOUT,
            env=dict(self.environment),
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> int:
        """Until SGLang ends by itself; its exit code."""
        return self.process.wait()

    def stop(self) -> None:
        """End SGLang and all that it started, and wait for that."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.shutdown_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        end = time.monotonic() + 10
        while _alive(self.process.pid) and time.monotonic() < end:  # until init has reaped the last of them
            time.sleep(0.05)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self.start_s
        while True:
            if (code := self.process.poll()) is not None:
                raise EngineError(f"SGLang ended with {code} before it was ready; its output says why")
            if time.monotonic() > end:
                raise ServerError(f"SGLang was not ready after {self.start_s:g} s; allow more with --start-timeout")
            if self._healthy():
                break
            time.sleep(_LOOK_S)
        if self.method == "agentspec":
            self._check_plugin()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _check_plugin(self) -> None:
        """A real answer has to say that the plugin made it: a plugin that fails is only logged by SGLang."""
        body = {"input_ids": [1, 1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                told = json.loads(answer.read())
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ServerError(f"SGLang answers /health, but not a request: {error}") from error
        meta: Any = told.get("meta_info", {}) if isinstance(told, dict) else {}
        if "agentspec" not in meta:
            raise ServerError("SGLang runs, but without the agentspec plugin: `agentspec doctor` says what is missing")


def serve_sglang(server: SGLangServer) -> int:
    """Run it until a signal or its own end; returns the exit code. Raises EngineError where it ends by itself."""
    if not installed():
        raise MissingExtraError("agentspec serve --engine sglang", "sglang", "sglang")
    if server.method == "agentspec":
        _diagnose()
    with _signals() as signalled:
        try:
            with server:
                print(f"agentspec: SGLang ({server.method}) is ready on {server.url}/v1", flush=True)
                code = server.wait()
        except _Ended:
            code = 0
    if signalled:
        print("agentspec: stopped", file=sys.stderr, flush=True)
        return 0
    raise EngineError(f"SGLang ended by itself with {code}; its output above says why")


class _Ended(BaseException):
    """A signal asked for the end. Like KeyboardInterrupt, not for `except Exception`."""


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the block, by _Ended; further ones do not disturb the end."""
    seen: list[int] = []

    def end(number: int, _: Any) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _diagnose() -> None:
    """What would make SGLang start without the plugin, told before a model is loaded."""
    from sglang_agentspec.diagnosis import diagnose

    for finding in diagnose(load=False):
        if not finding.ok:
            raise EngineError(f"{finding.name}: {finding.found}; mend it with: {finding.remedy}")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
