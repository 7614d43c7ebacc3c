"""Every error that agentspec raises on purpose, in one tree.

    AgentSpecError
    ├── InvalidRequestError (ValueError)     the caller's input can't be served
    │   ├── ContextLengthError               prompt or prompt + max_tokens beyond the model's context
    │   ├── UnknownOptionError               an option nobody here knows
    │   ├── ChatTemplateError                the model's chat template refuses these messages
    │   └── GrammarError                     a grammar, schema or regex that can't be honoured
    ├── ModelError
    │   ├── ModelNotFoundError               no such model here, and it could not be fetched
    │   ├── ModelLoadError                   found, but it can't be loaded (damaged file, unknown format)
    │   └── UnsupportedModelError            loads, but can't be run exactly
    ├── MemoryError_                         the trajectory memory
    │   ├── MemoryFormatError                a saved memory that is damaged, foreign or of another version
    │   ├── MemoryBudgetError                a budget too small to hold what is in use
    │   ├── VocabularyMismatchError          a memory written with another tokenizer
    │   └── IntegrityError (AssertionError)  an invariant is broken: a defect of agentspec
    ├── ProposerError                        a proposer broke the Proposer protocol
    ├── EngineError
    │   ├── EngineClosedError                the engine was closed
    │   ├── RequestAbortedError              the request was aborted; `.partial` has what had arrived
    │   └── ServerError                      a remote engine: unreachable, slow, or answering nonsense
    └── MissingExtraError (ImportError)      an optional dependency is absent; names the command that adds it

A message says what was needed, what came, and what to do. agentspec imports nothing here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AgentSpecError",
    "ChatTemplateError",
    "ContextLengthError",
    "EngineClosedError",
    "EngineError",
    "GrammarError",
    "IntegrityError",
    "InvalidRequestError",
    "MemoryBudgetError",
    "MemoryError_",
    "MemoryFormatError",
    "MissingExtraError",
    "ModelError",
    "ModelLoadError",
    "ModelNotFoundError",
    "ProposerError",
    "RequestAbortedError",
    "ServerError",
    "UnknownOptionError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "nearest",
    "shown",
    "spread",
]


def nearest(name: str, known: Iterable[str]) -> str:
    """What a message about an unknown name ends with: the known one that is like it, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def shown(value: Any, most: int = 80) -> str:
    """A value as a message quotes it: its repr, cut; of what has none (an integer of over 4300 digits, say), its type."""
    try:
        text = repr(value)
    except Exception:  # whatever somebody's __repr__ may raise
        return f"one of type {type(value).__name__} that can't be written"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def spread(low: Any, high: Any) -> str:
    """Numbers from low to high as a message quotes them: low..high, or the one that both are."""
    return shown(low) if low == high else f"{shown(low)}..{shown(high)}"


class AgentSpecError(Exception):
    """Base of all errors raised by agentspec on purpose."""


class InvalidRequestError(AgentSpecError, ValueError):
    """The request can't be served as it is."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with `max_tokens`, doesn't fit the model's context."""


class UnknownOptionError(InvalidRequestError):
    """An option that nobody here knows; silently ignoring it would be worse."""


class ChatTemplateError(InvalidRequestError):
    """The model has no chat template, or its template refuses these messages."""


class GrammarError(InvalidRequestError):
    """A grammar, JSON schema or regex that can't be honoured as it is, or not with the request's other options."""


class ModelError(AgentSpecError):
    """A model can't be had or can't be run."""


class ModelNotFoundError(ModelError):
    """No such model on this machine, and it could not be fetched."""


class ModelLoadError(ModelError):
    """The model was found but can't be loaded."""


class UnsupportedModelError(ModelError):
    """The model loads, but its output could not be kept exact."""


class MemoryError_(AgentSpecError):
    """Base of the trajectory memory's errors (the underscore keeps Python's MemoryError apart)."""


class MemoryFormatError(MemoryError_):
    """A saved memory is damaged, foreign, or of another version."""


class MemoryBudgetError(MemoryError_):
    """The byte budget can't hold what is in use."""


class VocabularyMismatchError(MemoryError_):
    """A memory written with one tokenizer was offered to another."""


class IntegrityError(MemoryError_, AssertionError):
    """An invariant of the memory doesn't hold: a defect of agentspec, please report it."""


class ProposerError(AgentSpecError):
    """A proposer returned something that the Proposer protocol forbids."""


class EngineError(AgentSpecError):
    """Base of errors raised while a model runs."""


class EngineClosedError(EngineError):
    """The engine was closed before or while it served this request."""


class RequestAbortedError(EngineError):
    """The request was aborted; `partial` is the GenerationResult with what had arrived, or None."""

    def __init__(self, message: str, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class ServerError(EngineError):
    """A remote engine is unreachable, too slow, or answers what it should not.

    `partial` is what had arrived (GenerationResult or None), `status` the HTTP status or None; `temporary` says
    whether the same request may succeed later (a busy server) or not (a wrong key), `retry_after` when, in s, where
    the server said so.
    """

    def __init__(self, message: str, partial: Any = None, status: int | None = None, temporary: bool = True) -> None:
        super().__init__(message)
        self.partial = partial
        self.status = status
        self.temporary = temporary
        self.retry_after: float | None = None


class MissingExtraError(AgentSpecError, ImportError):
    """An optional dependency is absent."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed: "
            f"pip install 'agentspec-decoding[{extra}]' (or, from a checkout, pip install -e '.[{extra}]')"
        )
        self.extra = extra
