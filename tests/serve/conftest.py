"""A real server on a real port: the app under uvicorn in a thread of this process (so that tests see its engine)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import uvicorn

from agentspec.serve.app import make_app


class Running:
    """engine: the LocalEngine behind the port; url: without /v1."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.engine = engine
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(make_app(engine, name="tiny", **options), log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        end = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < end and self._thread.is_alive()
            time.sleep(0.01)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def serving(tiny_engine: Callable[..., Any]) -> Iterator[Callable[..., Running]]:
    """Makes servers over tiny models; options: make_app's, and engine=: tiny_engine's. Stopped after the test."""
    made: list[Running] = []

    def serve(engine: dict[str, Any] | None = None, **options: Any) -> Running:
        given = {"model": {"max_position_embeddings": 8192}, **(engine or {})}
        running = Running(tiny_engine(**given), **options)
        made.append(running)
        return running

    yield serve
    for running in made:
        running.stop()
