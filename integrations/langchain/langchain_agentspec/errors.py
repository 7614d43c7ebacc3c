"""Errors that LangChain knows, raised as agentspec's too: `except` either tree catches them.

Everything else that goes wrong is agentspec's own error (agentspec.errors), as the engine raised it.
"""

from __future__ import annotations

from typing import Any

from langchain_core.exceptions import ContextOverflowError, ModelTimeoutError

from agentspec.errors import ContextLengthError, RequestAbortedError

__all__ = ["CallTimeoutError", "PromptTooLongError", "for_langchain"]


class PromptTooLongError(ContextLengthError, ContextOverflowError):
    """The prompt, or the prompt with max_tokens, doesn't fit the context. LangChain's summarisation reacts to
    it.
    """


class CallTimeoutError(RequestAbortedError, ModelTimeoutError, TimeoutError):
    """The call took longer than `timeout`; `partial` has what had arrived (a GenerationResult)."""

    def __init__(self, seconds: float, partial: Any = None) -> None:
        arrived = len(partial.token_ids) if partial is not None else 0
        super().__init__(
            f"the call was given {seconds:g} s and ended unfinished, with {arrived} tokens: raise timeout=, "
            f"lower max_tokens=, or run fewer calls at once",
            partial,
        )


def for_langchain(error: BaseException) -> BaseException:
    """The error as LangChain's own kinds know it; most are returned as they are."""
    if isinstance(error, ContextLengthError) and not isinstance(error, PromptTooLongError):
        return PromptTooLongError(str(error))
    return error
