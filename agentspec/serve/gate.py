"""Gate: what every request passes before the app: key, and limits of size, time and number.

Pure ASGI, so that it sees the true end of a streamed response. Called by app.py. Imports nothing of the engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.serve import errors

__all__ = ["Gate", "Limits", "keys_of", "read_keys"]

_OPEN = frozenset({"/health"})  # without a key
_WORK = frozenset({"/v1/chat/completions", "/v1/completions"})  # what counts as a request under way


@dataclass(slots=True, frozen=True)
class Limits:
    """
    requests:   most under way at once, waiting for the engine included; beyond them: 429
    body_bytes: of a request; a larger one: 413
    read_s:     for a request's body to arrive; a slower one: 408
    write_s:    for the client to take a piece of the answer; a slower one's call is ended
    """

    requests: int = 64
    body_bytes: int = 16 << 20
    read_s: float = 60.0
    write_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("requests", "body_bytes", "read_s", "write_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequestError(f"{name}: needed a number over 0, got {getattr(self, name)!r}")


def read_keys(text: str, origin: str) -> dict[str, str]:
    """key -> tenant, from lines `key` or `tenant key`; # begins a comment. A key without a tenant is its own."""
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) > 2 or not words[-1].isascii():
            raise InvalidRequestError(f"{origin}, line {number}: needed `key` or `tenant key`, keys in ASCII")
        key = words[-1]
        if key in keys:
            raise InvalidRequestError(f"{origin}, line {number}: this key is there already")
        keys[key] = words[0] if len(words) == 2 else "key-" + hashlib.sha256(key.encode()).hexdigest()[:12]
    if not keys:
        raise InvalidRequestError(f"{origin}: needed at least one key, found none")
    return keys


def keys_of(path: Path | None, variable: str | None) -> dict[str, str]:
    """The keys of the file, or of the environment variable's value; none: everybody may."""
    if path is not None:
        try:
            return read_keys(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise InvalidRequestError(f"--api-keys {path}: can't be read: {error}") from error
    return read_keys(variable, "AGENTSPEC_API_KEY") if variable else {}


class _TooLarge(Exception):
    pass


class _TooSlow(Exception):
    pass


class Gate:
    """ASGI middleware. keys: API key -> tenant; none: everybody is the tenant "". The tenant goes on in the
    scope's state."""

    def __init__(self, app: Any, *, keys: Mapping[str, str], limits: Limits) -> None:
        self._app = app
        self._keys = [(key.encode(), tenant) for key, tenant in keys.items()]
        self._limits = limits
        self.under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}

        async def sending(message: Any) -> None:
            await asyncio.wait_for(send(message), self._limits.write_s)

        path = scope["path"]
        tenant = "" if not self._keys or path in _OPEN else self._tenant(headers.get(b"authorization", b""))
        if tenant is None:
            text = "needed an API key that this server knows, as `Authorization: Bearer KEY`"
            await _answer(
                sending, 401, text, "invalid_request_error", "invalid_api_key", ("www-authenticate", "Bearer")
            )
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if path not in _WORK:
            await self._app(scope, receive, sending)
            return
        if scope["method"] == "POST" and not _is_json(headers.get(b"content-type", b"")):
            text = "needed a body sent as `Content-Type: application/json`"
            await _answer(sending, 415, text, "invalid_request_error", "unsupported_media_type")
            return
        if self.under_way >= self._limits.requests:
            text = f"{self.under_way} requests are under way, which is this server's limit; try again"
            await _answer(sending, 429, text, "requests", "rate_limit_exceeded", ("retry-after", "1"))
            return
        self.under_way += 1
        try:
            body = await self._body(receive, headers)
            if body is not None:
                await self._app(scope, _replayed(body, receive), sending)
        except _TooLarge:
            text = f"needed a body of at most {self._limits.body_bytes} bytes, got more"
            await _answer(sending, 413, text, "invalid_request_error", "body_too_large")
        except _TooSlow:
            text = f"the request's body did not arrive within {self._limits.read_s:g} s"
            await _answer(sending, 408, text, "invalid_request_error", "timeout")
        except asyncio.TimeoutError:
            return  # the client takes nothing: uvicorn closes the connection, as the response is incomplete
        finally:
            self.under_way -= 1

    def _tenant(self, header: bytes) -> str | None:
        scheme, _, given = header.partition(b" ")
        tenant = None
        # All of them, each in constant time: how long it takes says nothing about which is near.
        for key, its in self._keys:
            if hmac.compare_digest(given.strip(), key) and scheme.lower() == b"bearer":
                tenant = its
        return tenant

    async def _body(self, receive: Any, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The request's body; None: the client has gone. Raises _TooLarge and _TooSlow."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            raise _TooLarge
        clock = asyncio.get_running_loop().time
        end = clock() + self._limits.read_s
        pieces, size, more = [], 0, True
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(end - clock(), 0.001))
            except asyncio.TimeoutError:
                raise _TooSlow from None
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            more = message.get("more_body", False)
            if size > self._limits.body_bytes:
                raise _TooLarge
        return b"".join(pieces)


def _is_json(content_type: bytes) -> bool:
    return content_type.split(b";")[0].strip().lower() == b"application/json"


def _replayed(body: bytes, receive: Any) -> Any:
    """receive, with the body that was read already first; after it only the disconnection comes."""
    told = False

    async def receiving() -> Any:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving


async def _answer(
    send: Any, status: int, text: str, kind: str, code: str, header: tuple[str, str] | None = None
) -> None:
    raw = json.dumps(errors.body(text, kind, code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    if header is not None:
        headers.append((header[0].encode(), header[1].encode()))
    if status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body isn't read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
