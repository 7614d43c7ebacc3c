"""The OpenAI-compatible routes over LocalEngine: a FastAPI app, and what runs one call.

    /v1/chat/completions, /v1/completions    streamed and not
    /v1/models, /v1/models/{id}
    /health                                  200 once the model is loaded, 503 when it is not any more
    /metrics                                 Prometheus

May import fastapi and everything below. Called by local.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from opentelemetry import propagate
from opentelemetry.context import attach, detach
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from agentspec.engines.base import Generation, GenerationRequest
from agentspec.engines.local import LocalEngine
from agentspec.errors import InvalidRequestError, RequestAbortedError, UnknownOptionError
from agentspec.serve import errors
from agentspec.serve.gate import Gate, Limits
from agentspec.serve.requests import Asked, ChatRequest, CompletionRequest
from agentspec.serve.responses import ChatShape, CompletionShape, Shape
from agentspec.serve.trajectories import Opened, TrajectoryBook

__all__ = ["make_app"]

logger = logging.getLogger("agentspec.serve")


def make_app(
    engine: LocalEngine,
    *,
    name: str | None = None,
    keys: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    metrics: Callable[[], tuple[bytes, str]] | None = None,
) -> FastAPI:
    """The app. It doesn't own the engine: close that after the last request.

    name:    what clients call the model; None: as the engine does
    keys:    API key -> tenant; None or empty: no key is asked for
    metrics: what /metrics answers, and its content type; None: 404
    """
    # A recent FastAPI measures the requests itself. Spans are for calls, not for each look at /health.
    app = FastAPI(title="agentspec", docs_url=None, redoc_url=None, telemetry={"tracing": False, "logs": False})
    server = _Server(engine, name or engine.model_name)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await server.answer(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.answer(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        server.check_model(model)
        return server.model()

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if not engine.closed else JSONResponse({"status": "closed"}, 503)

    if metrics is not None:

        @app.get("/metrics")
        async def measured() -> Response:
            content, media_type = await run_in_threadpool(metrics)
            return Response(content, media_type=media_type)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return JSONResponse(_invalid(error), 400)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        if isinstance(error.detail, dict):
            return JSONResponse(error.detail, error.status_code)
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's, for a body that isn't read as JSON
            return JSONResponse(errors.body(_unread(error.__cause__), "invalid_request_error"), 400)
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return JSONResponse(errors.body(str(error.detail), kind), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        status, told = errors.of_exception(error)
        return JSONResponse(told, status)

    app.add_middleware(Gate, keys=keys or {}, limits=limits or Limits())
    return app


class _Server:
    """One engine behind the routes."""

    def __init__(self, engine: LocalEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._book = TrajectoryBook()
        self._created = int(time.time())

    def model(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "agentspec",
            "max_model_len": self._engine.context_length,
        }

    def check_model(self, model: str) -> None:
        if model != self._name:
            text = f"the model {model!r} is not here; this server has {self._name!r}"
            raise HTTPException(404, errors.body(text, "invalid_request_error", "model_not_found", "model"))  # type: ignore[arg-type]

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        opened: Opened | None = None
        try:
            _whole_characters(await request.body())
            asked = Asked.of(body, request.headers.get("x-session-id"))
            opened = self._book.open(asked, request.state.tenant)
            generation = await self._start(asked, opened, request.headers)
        except Exception as error:
            if opened is not None:
                self._book.close(opened, None)
            status, told = errors.of_exception(error)
            if status == 500:
                logger.exception("a request failed")
            return JSONResponse(told, status)
        shape = (ChatShape if asked.messages is not None else CompletionShape)(
            asked, opened, self._name, self._engine.tokenizer, self._engine.eos_ids
        )
        call = _Call(generation, shape, lambda seen: self._book.close(opened, seen))
        return _Stream(call) if asked.stream else await call.whole(request.receive)

    async def _start(self, asked: Asked, opened: Opened, headers: Mapping[str, str]) -> Generation:
        """Rendering and tokenising take their time, so they run in a thread; the call's span is a child of the
        caller's."""
        token = attach(propagate.extract(dict(headers)))
        try:
            return await run_in_threadpool(self._begin, asked, opened)
        finally:
            detach(token)

    def _begin(self, asked: Asked, opened: Opened) -> Generation:
        engine = self._engine
        for variable in asked.template_options:
            if variable not in engine.template.variables:
                known = ", ".join(sorted(engine.template.variables)) or "none"
                raise UnknownOptionError(
                    f"{variable}: this model's chat template has no such variable to set (it has: {known}); leave it out"
                )
        for seed in asked.seeds:
            highest = -1 if isinstance(seed.content, str) else max(seed.content)
            if highest >= engine.vocabulary:
                raise InvalidRequestError(
                    f"custom_params.agentspec_seed_ids: this model's ids are 0..{engine.vocabulary - 1}, got {highest}"
                )
        if asked.messages is not None:
            messages = asked.messages
            if "developer" not in engine.template.source:  # OpenAI's newer word for system
                messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            return engine.chat(
                messages,
                trajectory=opened.trajectory,
                template_options=asked.template_options or None,
                **asked.options,
            )
        prompt = asked.prompt
        ids = tuple(engine.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt
        return engine.generate(GenerationRequest.of(input_ids=ids, trajectory=opened.trajectory, **asked.options))


class _Call:
    """A call under way, to be answered whole or as a stream. closed: told once what it can be continued after."""

    def __init__(self, generation: Generation, shape: Shape, closed: Callable[[list[bytes] | None], None]) -> None:
        self._generation, self._shape, self._closed = generation, shape, closed
        self._n = generation.request.n

    @contextlib.asynccontextmanager
    async def _watched(self, receive: Any) -> AsyncIterator[None]:
        """A client that hangs up ends the call within a step; so does everything else that leaves this block."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._generation.abort()

        watcher = asyncio.create_task(watch())
        seen: list[bytes] | None = None
        try:
            yield
            seen = [self._shape.asked.seen(result) for result in await self._generation.aresults()]
        finally:
            watcher.cancel()
            self._generation.abort()
            self._closed(seen)

    async def whole(self, receive: Any) -> Response:
        try:
            async with self._watched(receive):
                results = await self._generation.aresults()
        except RequestAbortedError:
            return Response(status_code=499)  # nobody is there to read it
        except Exception as error:
            status, told = errors.of_exception(error)
            return JSONResponse(told, status)
        return JSONResponse(self._shape.whole(results))

    async def events(self, receive: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The stream's chunks, the first of them once there is a token. Raises what the engine raises."""
        shape, begun = self._shape, False
        async with self._watched(receive):
            last: dict[str, Any] | None = None
            async for chunk in self._generation:
                if not begun:
                    begun = True
                    for opening in shape.opening(self._n):
                        yield opening
                if last is not None:
                    yield last
                    last = None
                told = shape.chunk(chunk)
                if told is not None:
                    yield told
                if chunk.finish_reason is not None:
                    last = shape.ending(chunk.index, chunk.finish_reason)
            assert last is not None and self._generation.stats is not None
            for closing in shape.closing(last, self._generation.stats):
                yield closing


class _Stream(Response):
    """Server-sent events. An error before the first token has its own status; one after it is the last event."""

    def __init__(self, call: _Call) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False
        async with contextlib.aclosing(self._call.events(receive)) as events:
            try:
                async for event in events:
                    if not begun:
                        begun = True
                        del self.headers["content-length"]
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send(_event(json.dumps(event, ensure_ascii=False)))
            except RequestAbortedError:
                return  # the client has gone
            except asyncio.TimeoutError:
                raise  # the gate's: the client takes nothing
            except Exception as error:
                status, told = errors.of_exception(error)
                if not begun:
                    await JSONResponse(told, status)(scope, receive, send)
                    return
                await send(_event(json.dumps(told)))
            else:
                await send(_event("[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


def _whole_characters(raw: bytes) -> None:
    """Raise InvalidRequestError for half a surrogate pair: JSON can hold it, no text can."""
    if b"\\u" in raw and (b"\\ud" in raw or b"\\uD" in raw):
        try:
            json.dumps(json.loads(raw), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the body holds half of a surrogate pair, which is no character: {error}"
            ) from None


def _unread(cause: BaseException) -> str:
    """Why the body wasn't read, and what to send."""
    if isinstance(cause, RecursionError):
        return errors.TOO_DEEP
    if isinstance(cause, UnicodeDecodeError):
        return f"the body: needed JSON in UTF-8, got bytes that aren't ({cause.reason} at byte {cause.start})"
    if isinstance(cause, ValueError):
        return f"the body: needed JSON whose numbers fit 64 bits, got one that can't be read ({cause})"
    return f"the body: needed one JSON object, got what can't be read ({type(cause).__name__})"


def _invalid(error: RequestValidationError) -> dict[str, Any]:
    """The first thing that is wrong."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place)
    if first["type"] == "json_invalid":
        return errors.body(f"the body is no JSON: {first['ctx']['error']} at {param}", "invalid_request_error")
    if first["type"] == "extra_forbidden":
        known = {**ChatRequest.model_fields, **CompletionRequest.model_fields}
        near = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        text = f"{param}: this server knows no such field{hint}"
        return errors.body(text, "invalid_request_error", "unknown_field", param)
    if not place:
        return errors.body("needed a JSON object, sent as application/json", "invalid_request_error")
    shown = repr(first.get("input"))
    return errors.body(f"{param}: {first['msg']}, got {shown[:80]}", "invalid_request_error", None, param)
