"""Tools for models whose chat template knows none: told in the system message, in Hermes' words.

Calls and results in the history are written as text too, since such a template would leave them out. Used by
the template. The words are those of the Hermes and Qwen templates, which many small models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.chat.formats.base import ToolFormat

__all__ = ["instructions", "without_tools"]

Message = Mapping[str, Any]

_TOOL_ROLES = frozenset({"tool", "function", "ipython"})


def instructions(format: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """What the system message says about the tools."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    arguments = "<args-json-object>" if format.json_arguments else '{"<name>": "<value>"}'
    example = format.write_all([("<function-name>", arguments)])
    example = example.replace('"<function-name>"', "<function-name>")
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\nFor each function call, write:\n{example}"
    )


def without_tools(
    chat: Sequence[Message],
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    results: bool,
    system: bool = True,
) -> list[tuple[dict[str, Any], Message]]:
    """The messages as a template without tools can write them, each with the message that it stands for.

    results: this template writes messages of the role "tool"; else they become the user's
    system:  False: this template takes no system message; the tools are told in the first message instead
    """
    laid: list[tuple[dict[str, Any], Message]] = []
    for message in chat:
        told = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                function = call.get("function", call)
                arguments = function.get("arguments")
                text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
                calls.append((str(function.get("name")), text))
            before = f"{message['content']}\n" if message["content"] else ""
            told["content"] = before + format.write_all(calls)
        elif message["role"] in _TOOL_ROLES and not results:
            told["role"] = "user"
            told["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
        laid.append((told, message))
    if not tools:
        return laid
    text = instructions(format, tools)
    first, origin = laid[0]
    if first["role"] == "system" or not system:
        laid[0] = ({**first, "content": f"{first['content']}\n\n{text}"}, origin)
    else:
        told = {"role": "system", "content": text}
        laid.insert(0, (told, told))
    return laid
