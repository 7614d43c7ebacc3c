"""LangChain's messages as agentspec's (and the chat templates') messages. Knows nothing of engines.

    SystemMessage   {"role": "system", "content": text}
    HumanMessage    {"role": "user", "content": text}
    AIMessage       {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [...],
                     "invalid_tool_calls": [...]}
    ToolMessage     {"role": "tool", "content": text, "tool_call_id": id}

Text only: a picture, a sound or a file raises InvalidRequestError, which says so, before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from agentspec.errors import InvalidRequestError

__all__ = ["to_agentspec"]

# Content that says in other words what the message's own fields say, or that no model reads.
_SAID_ELSEWHERE = frozenset(
    {
        "tool_use",
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "function_call",
        "reasoning",
        "thinking",
        "redacted_thinking",
    }
)


def to_agentspec(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages, one for one. Raises InvalidRequestError for what isn't text."""
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: BaseMessage, number: int) -> dict[str, Any]:
    text = _text(message, number)
    if isinstance(message, AIMessage):
        return _assistant(message, text)
    if isinstance(message, ToolMessage):
        said = {"role": "tool", "content": text, "tool_call_id": message.tool_call_id}
        return said | ({"name": message.name} if message.name else {})
    if isinstance(message, FunctionMessage):
        return {"role": "tool", "content": text, "name": message.name}
    if isinstance(message, HumanMessage):
        role = "user"
    elif isinstance(message, SystemMessage):
        role = "system"
    elif isinstance(message, ChatMessage):
        role = message.role
    else:
        raise InvalidRequestError(
            f"messages[{number}]: needed a system, human, AI, tool or chat message, got {type(message).__name__}"
        )
    return {"role": role, "content": text} | ({"name": message.name} if message.name else {})


def _assistant(message: AIMessage, text: str) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": text}
    reasoning = _reasoning(message)
    if reasoning:
        said["reasoning_content"] = reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["args"], ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    invalid = message.additional_kwargs.get("invalid_tool_calls") or message.invalid_tool_calls
    if invalid:
        said["invalid_tool_calls"] = [
            {key: call.get(key) for key in ("id", "name", "args", "error")} for call in invalid
        ]
    return said


def _reasoning(message: AIMessage) -> str:
    kept = message.additional_kwargs.get("reasoning_content")
    if isinstance(kept, str):
        return kept
    if isinstance(message.content, str):
        return ""
    texts = (
        block.get("reasoning") or block.get("thinking") or ""
        for block in message.content
        if isinstance(block, Mapping) and block.get("type") in ("reasoning", "thinking")
    )
    return "".join(texts)


def _text(message: BaseMessage, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    pieces = []
    for block in message.content:
        if isinstance(block, str):
            pieces.append(block)
            continue
        kind = block.get("type")
        if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
            pieces.append(block["text"])
        elif isinstance(message, AIMessage) and kind in _SAID_ELSEWHERE:
            continue
        elif isinstance(message, ToolMessage) and kind in (None, "json"):
            pieces.append(json.dumps(block.get("json", block), ensure_ascii=False, default=str))
        else:
            raise InvalidRequestError(
                f"messages[{number}] ({message.type}): needed text, got a content block of type {kind!r}: "
                f"this model reads text only; say it in words, or leave the block out"
            )
    return "".join(pieces)
