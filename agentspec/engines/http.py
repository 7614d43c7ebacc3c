"""HttpServer: the HTTP that remote engines need: JSON, server-sent events, and every failure as a typed error.

Called by sglang.py and openai.py, always in the engine's Background loop. Imports httpx where it is used.

    400, 413, 422           InvalidRequestError (ContextLengthError where the server says so)
    401, 403, 404, ...      ServerError, temporary=False
    408, 429, 5xx           ServerError, temporary=True
    no connection, cut off, nonsense   ServerError
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from agentspec.errors import ContextLengthError, InvalidRequestError, ServerError

__all__ = ["HttpServer", "refusal"]

_LONGEST_EVENT = 64 << 20  # bytes; a cumulative stream with log probabilities is large, a runaway one has no end
_QUOTED = 300  # characters of a server's words in an error
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CONTEXT = re.compile(r"context[ _]length|maximum allowed length|longer than the model", re.IGNORECASE)


class HttpServer:
    """One server. Not thread-safe: used in one loop.

    url:     its address; a trailing /v1 is left out
    api_key: sent as a bearer token
    connect_timeout, read_timeout: s, for the connection, and for an answer that isn't streamed

    Raises InvalidRequestError for an address that is none.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        connect_timeout: float = 10.0,
        read_timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        bare = url.strip().rstrip("/")
        self.url = bare[: -len("/v1")] if bare.endswith("/v1") else bare
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequestError(f"base_url: needed http://HOST:PORT, got {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidRequestError(f"base_url: needed http://HOST:PORT, got {url!r}")
        self.host: str = host
        self.port: int | None = port
        self._read_timeout = read_timeout
        self._connect_timeout = connect_timeout
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._client: Any = None

    async def get(self, path: str) -> Any:
        """The JSON at a path; None where the server has no such path (404, 405)."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `get`, with a body."""
        return await self._whole("POST", path, body)

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The events of a stream, JSON objects; ends with the server's [DONE], raises where it ends without.

        How long they may take is the caller's to say. Closing the iterator hangs up.
        """
        with self._typed():
            async with self._open().stream("POST", self.url + path, json=body, headers=dict(headers)) as answer:
                if answer.status_code != 200:
                    raise refusal(self.url + path, answer.status_code, await _beginning(answer), answer.headers)
                kind = answer.headers.get("content-type", "")
                if "text/event-stream" not in kind:
                    said = await _beginning(answer)
                    raise ServerError(
                        f"{self.url}{path}: needed a stream of events, the server answered {kind or 'something'}: "
                        f"{said[:_QUOTED]!r}; is this the right address?"
                    )
                async for data in _data(answer.aiter_bytes(), self.url + path):
                    if data == b"[DONE]":
                        return
                    yield _object(data, self.url + path)
        raise ServerError(f"{self.url}{path}: the stream broke off before the output's end")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def abandon(self) -> None:
        """In a forked child: the connections are the parent's."""
        if self._client is not None:
            _lost.append(self._client)
            self._client = None

    # ---- inside -------------------------------------------------------------------------------

    def _open(self) -> Any:
        if self._client is None:
            import httpx

            self._client = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=self._connect_timeout, write=60.0),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
                trust_env=self.host not in _LOOPBACK,  # a proxy can't reach this machine's own servers
            )
        return self._client

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        import httpx

        timeout = httpx.Timeout(self._read_timeout, connect=self._connect_timeout)
        with self._typed():
            answer = await self._open().request(method, self.url + path, json=body, timeout=timeout)
        if answer.status_code in (404, 405):
            return None
        if answer.status_code != 200:
            raise refusal(self.url + path, answer.status_code, answer.text, answer.headers)
        if not answer.content:
            return {}
        try:
            return answer.json()
        except ValueError as error:
            raise ServerError(
                f"{self.url}{path}: needed JSON, the server answered {answer.text[:_QUOTED]!r}; is this the right address?",
                status=answer.status_code,
            ) from error

    @contextlib.contextmanager
    def _typed(self) -> Any:
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerError(
                f"{self.url}: no connection ({error or type(error).__name__}); is the server running?"
            ) from error
        except httpx.TimeoutException as error:
            raise ServerError(f"{self.url}: no answer in time ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}: the connection broke ({error or type(error).__name__})") from error
        except (httpx.InvalidURL, httpx.DecodingError) as error:
            raise ServerError(f"{self.url}: {error}") from error


_lost: list[Any] = []


def refusal(where: str, status: int, said: str, headers: Mapping[str, str] | None = None) -> Exception:
    """The error for a status other than 200. said: the answer's body."""
    words = _words(said)
    if status in (400, 413, 422):
        if _CONTEXT.search(words):
            return ContextLengthError(f"{where}: {words}")
        return InvalidRequestError(f"{where}: the server refused the request ({status}): {words}")
    if status in (401, 403):
        return ServerError(f"{where}: the server wants another key ({status}): pass api_key=", None, status, False)
    if status == 429:
        wait = (headers or {}).get("retry-after")
        error = ServerError(
            f"{where}: the server is busy (429): {words}; try again later, or ask for less at once", None, status
        )
        error.retry_after = _seconds(wait)
        return error
    temporary = status >= 500 or status == 408
    return ServerError(f"{where}: the server answered {status}: {words}", None, status, temporary)


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None  # a date: not worth the reading


def _words(said: str) -> str:
    """What a body says: its error message, where it has one."""
    try:
        found: Any = json.loads(said)
    except ValueError:
        return said[:_QUOTED]
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    return found[:_QUOTED] if isinstance(found, str) else json.dumps(found)[:_QUOTED]


async def _beginning(answer: Any) -> str:
    data = b""
    async for piece in answer.aiter_bytes():
        data += piece
        if len(data) > 1 << 16:
            break
    return data.decode("utf-8", "replace")


async def _data(pieces: AsyncIterator[bytes], where: str) -> AsyncIterator[bytes]:
    """The data lines of an event stream. Comments (keep-alives) and other fields are left out."""
    rest = bytearray()
    searched = 0
    async for piece in pieces:
        rest += piece
        while True:
            end = rest.find(b"\n", searched)
            if end < 0:
                searched = len(rest)
                break
            line = bytes(rest[:end]).rstrip(b"\r")
            del rest[: end + 1]
            searched = 0
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > _LONGEST_EVENT:
            raise ServerError(f"{where}: an event of more than {_LONGEST_EVENT >> 20} MB; this is no model's output")


def _object(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ServerError(f"{where}: needed JSON in the stream, got {data[:_QUOTED]!r}") from error
    if not isinstance(found, Mapping):
        raise ServerError(f"{where}: needed a JSON object in the stream, got {data[:_QUOTED]!r}")
    return found
