"""Messages as the GenAI conventions want them on spans: role and parts, as JSON, cut to a limit and still
JSON.

Only called where content was opted into. Duck-typed on chat messages (mappings with role, content,
tool_calls).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["messages_json", "output_json", "text"]


def messages_json(messages: Sequence[Mapping[str, Any]], limit: int) -> str:
    """The messages in at most `limit` characters. What is cut first is the middle: the system's words and the
    newest messages say most about a call. Long texts are cut before messages are left out."""
    converted = [_message(message) for message in messages]
    for longest in (limit, 2048, 512, 128, 32):
        kept = [_cut(message, longest) for message in converted]
        if len(written := _dump(kept)) <= limit:
            return written
    first, newest = kept[:1], kept[1:]
    while newest:
        newest = newest[(len(newest) + 1) // 2 :]
        left_out = len(kept) - 1 - len(newest)
        note = {"role": "agentspec", "parts": [_text_part(f"[{left_out} messages left out]")]}
        if len(written := _dump([*first, note, *newest])) <= limit:
            return written
    return _dump([])


def output_json(output: str, finish_reason: str, limit: int) -> str:
    """The output as the conventions' one output message, in at most `limit` characters."""
    for longest in (limit, limit // 2, limit // 8, 0):
        message = {
            "role": "assistant",
            "parts": [_text_part(text(output, longest))],
            "finish_reason": finish_reason,
        }
        if len(written := _dump([message])) <= limit:
            return written
    return _dump([])


def text(value: Any, limit: int) -> str:
    """A value as text (JSON where it isn't text), cut, saying by how much."""
    if not isinstance(value, str):
        value = value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else _dump(value)
    value = str.__str__(value)  # not as a subclass may write itself
    if len(value) <= limit:
        return str(value)
    note = f"… [{len(value)} characters]"
    return str(value[: max(0, limit - len(note))] + note)[: max(limit, 0)]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = str(message.get("role", "")), message.get("content")
    parts: list[dict[str, Any]] = []
    if role == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": _plain(content)})
    elif content:
        parts.append(_text_part(_plain(content)))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        parts.append(
            {
                "type": "tool_call",
                "id": call.get("id") if isinstance(call, Mapping) else None,
                "name": function.get("name"),
                "arguments": function.get("arguments", function.get("args")),
            }
        )
    return {"role": role, "parts": parts}


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):  # the parts of OpenAI's format
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)


def _text_part(words: str) -> dict[str, Any]:
    return {"type": "text", "content": words}


def _cut(message: dict[str, Any], longest: int) -> dict[str, Any]:
    parts = [{key: _cut_part(key, value, longest) for key, value in part.items()} for part in message["parts"]]
    return {**message, "parts": parts}


def _cut_part(key: str, value: Any, longest: int) -> Any:
    if key not in ("content", "response", "arguments") or value is None:
        return value
    whole = value if isinstance(value, str) else _dump(value)
    return value if len(whole) <= longest else text(whole, longest)


def _dump(value: Any) -> str:
    """As JSON, whatever it is: nobody's tool or call fails for being traced."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except Exception as error:  # its own __str__ may raise anything, nested too deep, an integer of 4300 digits
        return json.dumps(f"[a {type(value).__name__} that can't be written: {type(error).__name__}]")
