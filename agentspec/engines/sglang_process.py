"""SGLangInProcess: an sglang.Engine in this process, asked as a server is. Used by sglang.py; imports nothing of SGLang.

The engine's own event loop is run by SGLangEngine's thread: until that is closed, call the engine through it only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from agentspec.engines.remote import Ask, Piece, ServerInfo
from agentspec.engines.sglang_wire import AnswerReader, body, server_info
from agentspec.errors import EngineError, InvalidRequestError

__all__ = ["SGLangInProcess"]


class SGLangInProcess:
    """engine: an sglang.Engine (0.5.23); scope: the tenant. Raises InvalidRequestError for what is none."""

    def __init__(self, engine: Any, scope: str | None = None) -> None:
        missing = [
            name
            for name in ("async_generate", "get_server_info", "tokenizer_manager", "loop")
            if not hasattr(engine, name)
        ]
        if missing:
            raise InvalidRequestError(
                f"engine: needed an sglang.Engine, got {type(engine).__name__} without {', '.join(missing)}"
            )
        self.host: str = ""  # none: the call leaves no process
        self.port: int | None = None
        self._engine = engine
        self._scope = scope
        # Asked for before the loop runs elsewhere: the Engine's own methods run it themselves.
        told = engine.get_server_info()
        self.info = server_info({}, told)

    async def describe(self) -> ServerInfo:
        return self.info

    def body(self, ask: Ask) -> dict[str, Any]:
        return body(ask, self.info, self._scope)

    async def stream(self, ask: Ask, body: dict[str, Any], headers: Mapping[str, str]) -> AsyncIterator[Piece]:
        reader = AnswerReader("sglang.Engine")
        try:
            outputs = await self._engine.async_generate(**body, external_trace_header=dict(headers) or None)
            async for output in outputs:
                piece = reader.piece(output)
                yield piece
                if piece.finish:
                    return
        except ValueError as error:  # SGLang's own word for a request that it refuses
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"sglang.Engine refused the request: {error}") from error
        raise EngineError("sglang.Engine ended the stream before the output's end")

    async def abort(self, id: str) -> None:
        self._engine.tokenizer_manager.abort_request(rid=id)

    async def close(self) -> None:
        pass  # its owner shuts it down

    def abandon(self) -> None:
        pass
