"""A real HTTP server that misbehaves as told: what breaks between a client and SGLang, on demand.

Each /generate (or /v1/...) takes the next behaviour, a function of the Answer; when none is left it behaves.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = {"model_path": "nowhere/tiny", "served_model_name": "tiny", "tokenizer_path": "nowhere/tiny"}
SERVER = {
    "context_length": 512,
    "speculative_algorithm": "AGENTSPEC",
    "grammar_backend": "xgrammar",
    "enable_deterministic_inference": True,
}
IDS = [70, 130, 9, 200, 11, 5]


class Answer:
    """One request's connection. body: what was asked; headers: its headers, names in lower case."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self._handler = handler
        self.path = handler.path
        self.body = body
        self.headers = {k.lower(): v for k, v in handler.headers.items()}
        self.hung_up = threading.Event()

    def begin(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        self._handler.send_response(status)
        self._handler.send_header("Content-Type", kind)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def raw(self, data: bytes) -> None:
        """A chunk of the body. Sets hung_up where nobody listens."""
        try:
            self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self._handler.wfile.flush()
        except OSError:
            self.hung_up.set()

    def event(self, value: Any) -> None:
        self.raw(b"data: " + json.dumps(value).encode() + b"\n\n")

    def end(self) -> None:
        self.raw(b"")

    def whole(self, status: int, text: str, kind: str = "application/json", **headers: str) -> None:
        self.begin(status, kind, **headers)
        if text:  # an empty chunk is the end
            self.raw(text.encode())
        self.end()

    def cut(self) -> None:
        """Close the connection in the middle, as a killed server does."""
        self._handler.close_connection = True
        self._handler.connection.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """As a machine does that has lost the connection: RST."""
        self._handler.close_connection = True
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.connection.close()

    def tokens(self, ids: Sequence[int], total: Sequence[int], finish: Any = None, **meta: Any) -> None:
        """One of SGLang's outputs. ids: what it carries, total: all so far."""
        asked = len(self.body["input_ids"])
        told = {"finish_reason": finish, "prompt_tokens": asked, "completion_tokens": len(total)}
        self.event({"text": "", "output_ids": list(ids), "meta_info": {"id": self.body["rid"], **told, **meta}})

    def wait(self, seconds: float) -> None:
        """Silence, until the client hangs up at the latest."""
        end = time.monotonic() + seconds
        self._handler.connection.settimeout(0.02)
        while time.monotonic() < end:
            try:
                if not self._handler.connection.recv(1, socket.MSG_PEEK):
                    self.hung_up.set()
                    return
            except TimeoutError:
                continue
            except OSError:
                self.hung_up.set()
                return


Behaviour = Callable[[Answer], None]


def behaved(answer: Answer, ids: Sequence[int] = IDS, cumulative: bool = True) -> None:
    """All ids, one after another, as SGLang streams them."""
    answer.begin()
    for place in range(1, len(ids) + 1):
        finish = {"type": "length", "length": len(ids)} if place == len(ids) else None
        answer.tokens(ids[:place] if cumulative else ids[place - 1 : place], ids[:place], finish)
    answer.raw(b"data: [DONE]\n\n")
    answer.end()


class Misbehaving:
    """A context manager. behaviours: for the calls to come; seen: all that was asked (Answers), aborted: rids.

    info, model: of SGLang's /get_server_info and /get_model_info; openai: of /v1/models, and then no SGLang;
    unknown: status and text for a route that isn't there
    """

    def __init__(
        self,
        *behaviours: Behaviour,
        info: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        openai: Any = None,
        unknown: tuple[int, str] = (404, "null"),
        port: int = 0,
    ) -> None:
        self.behaviours = list(behaviours)
        self.seen: list[Answer] = []
        self.aborted: list[str] = []
        self.info = {**SERVER, **(info or {})}
        self.model = model or MODEL
        self.unknown = unknown
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                known: dict[str, Any] = {"/get_model_info": outer.model, "/get_server_info": outer.info}
                if openai is not None:
                    known = {"/v1/models": openai}
                found = known.get(self.path)
                if found:
                    return Answer(self, None).whole(200, json.dumps(found))
                Answer(self, None).whole(*outer.unknown)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = Answer(self, body)
                if self.path == "/abort_request":
                    outer.aborted.append(body["rid"])
                    return answer.whole(200, "")
                outer.seen.append(answer)
                behaviour = outer.behaviours.pop(0) if outer.behaviours else behaved
                try:
                    behaviour(answer)
                except OSError:
                    answer.hung_up.set()

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # connections break here on purpose

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Misbehaving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
