"""What `bind_tools` hands on: tools and tool choices, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from agentspec.errors import InvalidRequestError

__all__ = ["tool_choice_of", "tools_of"]

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool


def tools_of(tools: Sequence[Tool], strict: bool | None = None) -> list[dict[str, Any]]:
    """The tools as {"type": "function", "function": {...}}. Raises InvalidRequestError for a provider's own
    tools, such as web search, which no model here has.
    """
    formatted = []
    for tool in tools:
        made = convert_to_openai_tool(tool, strict=strict)
        if made.get("type") != "function" or "function" not in made:
            raise InvalidRequestError(
                f"bind_tools: {made.get('type')!r} is a tool that some provider runs on its servers; give a "
                f"function, a LangChain tool, a pydantic class or a JSON schema instead"
            )
        formatted.append(made)
    return formatted


def tool_choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """LangChain's tool_choice in OpenAI's words. Raises InvalidRequestError for a tool that isn't bound."""
    if choice is None or choice is False:
        return None
    if choice is True or choice in ("any", "required"):
        return "required"
    if choice in ("auto", "none"):
        return choice
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, (list, tuple)) and choice and all(name in names for name in choice):
        return list(choice)
    name = choice.get("function", choice).get("name") if isinstance(choice, Mapping) else choice
    if not isinstance(name, str) or name not in names:
        raise InvalidRequestError(
            f"tool_choice: needed auto, none, any, or the name of a bound tool "
            f"({', '.join(names) or 'there is none'}), got {choice!r}"
        )
    return {"type": "function", "function": {"name": name}}
