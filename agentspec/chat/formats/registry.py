"""The formats by name, and which of them a chat template asks for."""

from __future__ import annotations

import functools
import threading
from importlib.metadata import entry_points

from agentspec.chat.formats.base import ToolFormat
from agentspec.chat.formats.deepseek import DeepSeekV3, DeepSeekV31
from agentspec.chat.formats.harmony import Harmony
from agentspec.chat.formats.hermes import Hermes
from agentspec.chat.formats.llama import LlamaJson, LlamaPythonic
from agentspec.chat.formats.mistral import Mistral, MistralArgs
from agentspec.chat.formats.qwen_coder import QwenCoder
from agentspec.errors import InvalidRequestError

__all__ = ["detect", "get", "names", "register"]

_lock = threading.Lock()
# In the order in which a template is asked: what is special before what is common.
_formats: list[ToolFormat] = [
    Harmony(),
    DeepSeekV3(),
    DeepSeekV31(),
    MistralArgs(),
    Mistral(),
    QwenCoder(),
    LlamaPythonic(),
    LlamaJson(),
    Hermes(),
]


def register(format: ToolFormat) -> None:
    """Add a format, or replace the one of its name; it is asked before the others."""
    if not isinstance(format, ToolFormat) or not format.name:
        raise InvalidRequestError(f"tool format: needed a ToolFormat with a name, got {format!r}")
    with _lock:
        _formats[:] = [format, *(f for f in _formats if f.name != format.name)]


def names() -> list[str]:
    return sorted(format.name for format in _all())


def get(name: str) -> ToolFormat:
    """The format of this name. Raises InvalidRequestError."""
    for format in _all():
        if format.name == name:
            return format
    raise InvalidRequestError(f"tool format: needed one of {', '.join(names())}, got {name!r}")


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template's text asks for: the first whose traits it all has."""
    for format in _all():
        if format.traits and all(trait in template for trait in format.traits):
            return format
    return None


def _all() -> list[ToolFormat]:
    _installed()
    with _lock:
        return list(_formats)


@functools.cache
def _installed() -> None:
    for entry in entry_points(group="agentspec.tool_formats"):
        found = entry.load()
        register(found() if isinstance(found, type) else found)
