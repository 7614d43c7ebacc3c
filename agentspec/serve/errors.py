"""Errors in OpenAI's shape. Called by app.py and gate.py."""

from __future__ import annotations

from typing import Any

from agentspec.errors import (
    AgentSpecError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    MemoryBudgetError,
    RequestAbortedError,
)

__all__ = ["TOO_DEEP", "body", "of_exception"]

TOO_DEEP = "the body: needed JSON nested at most a hundred deep, got deeper"

_MOST = 1000  # characters


def body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """{"error": ...} as OpenAI's clients read it. What a request's own words make long is cut."""
    if len(message) > _MOST:
        message = f"{message[:_MOST]}..."
    return {"error": {"message": message, "type": kind, "param": param and param[:_MOST], "code": code}}


def of_exception(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body."""
    if isinstance(error, ContextLengthError):
        return 400, body(str(error), "invalid_request_error", "context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        param, colon, _ = str(error).partition(":")
        return 400, body(str(error), "invalid_request_error", None, param if colon and " " not in param else None)
    if isinstance(error, RecursionError):
        return 400, body(TOO_DEEP, "invalid_request_error")
    if isinstance(error, (EngineClosedError, MemoryBudgetError, RequestAbortedError)):
        return 503, body(str(error), "server_error", "unavailable")
    if isinstance(error, AgentSpecError):
        return 500, body(str(error), "server_error")
    return 500, body(f"the server failed: {type(error).__name__}", "server_error")
