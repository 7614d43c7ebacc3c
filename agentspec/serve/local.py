"""`agentspec serve` without SGLang: LocalEngine behind the OpenAI-compatible routes, run by uvicorn.

The port is taken before the model loads, so that a port in use is told at once; it answers once the model is loaded.
SIGINT and SIGTERM end it: no new connections, calls under way get `shutdown_s` to finish, then they are aborted.
Called by serve/__init__.py.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentspec.engines.models import notice
from agentspec.errors import EngineError, MissingExtraError
from agentspec.serve.gate import Limits

__all__ = ["bound", "serve_local"]

_CONNECTIONS_PER_REQUEST = 4  # idle kept-alive ones among them
_AFTER_CLOSE_S = 10  # for answers to say that the engine was closed


def serve_local(
    make_engine: Callable[[], Any],
    *,
    host: str,
    port: int,
    name: str | None,
    keys: Mapping[str, str],
    limits: Limits,
    otlp_endpoint: str | None,
    shutdown_s: float,
) -> int:
    """Serve until a signal; returns the exit code. make_engine: loads the model, once the port is taken."""
    try:
        import uvicorn

        from agentspec.serve.app import make_app
        from agentspec.serve.stopping import StoppingServer
    except ImportError as error:
        raise MissingExtraError("agentspec serve", str(error.name), "serve") from error
    from agentspec.serve.metrics import set_up

    with contextlib.closing(bound(host, port)) as listening:
        address, port = listening.getsockname()[:2]
        if not keys and not _is_loopback(address):
            notice(
                f"listening on {address} without an API key: whoever reaches this port can use the model (--api-keys)"
            )
        metrics = set_up(otlp_endpoint)
        with make_engine() as engine:
            app = make_app(engine, name=name, keys=keys, limits=limits, metrics=metrics)
            config = uvicorn.Config(
                app,
                log_level="warning",
                timeout_graceful_shutdown=round(shutdown_s) + _AFTER_CLOSE_S,
                limit_concurrency=limits.requests * _CONNECTIONS_PER_REQUEST,
                server_header=False,
            )
            server = StoppingServer(config, engine.close, shutdown_s)
            shown = f"[{address}]" if ":" in address else address
            with _signals_end(server):
                listening.listen(config.backlog)  # whoever reads the line below can connect
                print(f"agentspec: serving {name or engine.model_name} on http://{shown}:{port}/v1", flush=True)
                server.run(sockets=[listening])
            if not server.started:
                raise EngineError("the HTTP server did not start; its log says why")
    print("agentspec: stopped", file=sys.stderr, flush=True)
    return 0


@contextlib.contextmanager
def _signals_end(server: Any) -> Iterator[None]:
    """uvicorn raises the signals that it got once more when it has ended: an end by a signal is a clean one here."""

    def end(*_: Any) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bound(host: str, port: int) -> socket.socket:
    """A socket on that address, not listening yet: connections are refused until the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
        return made
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"needed {host} port {port} to listen on: {error}; choose another with --host or --port (0: any free one)"
        ) from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
