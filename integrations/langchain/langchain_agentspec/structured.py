"""`with_structured_output`: the options that restrict the output, and the parser that reads it.

json_schema         the output is one JSON document of the schema; the prompt is left as it is
function_calling    the output is one call of a tool that the schema describes; the model sees the tool
json_mode           the output is any JSON object; the prompt has to say which
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from agentspec.errors import InvalidRequestError

__all__ = ["METHODS", "Method", "parser_of", "response_format_of", "with_raw"]

Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS = ("json_schema", "function_calling", "json_mode")


def response_format_of(schema: Any, method: Method, strict: bool | None) -> dict[str, Any]:
    """OpenAI's response_format. Raises InvalidRequestError for something that isn't a schema."""
    if method == "json_mode":
        return {"type": "json_object"}
    try:
        name = convert_to_openai_tool(schema)["function"]["name"]
        described = convert_to_json_schema(schema, strict=strict)
    except ValueError as error:
        raise InvalidRequestError(
            f"with_structured_output: needed a pydantic class, a TypedDict, or a JSON schema with a title, "
            f"got {schema!r:.120} ({error})"
        ) from error
    return {"type": "json_schema", "json_schema": {"name": name, "schema": described, "strict": True}}


def parser_of(schema: Any, method: Method) -> Any:
    """Reads the output: into the class where the schema is a pydantic class, else into a dict."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_class:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        name = convert_to_openai_tool(schema)["function"]["name"]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return _ClassParser(pydantic_object=schema) if is_class else _DictParser()


def with_raw(model: Runnable[Any, Any], parser: Any) -> Runnable[Any, Any]:
    """{"raw": the message, "parsed": what the parser made of it, "parsing_error": what it raised}."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _told(error: OutputParserException, result: list[Generation]) -> OutputParserException:
    """The error, with the remedy where the document was only broken off."""
    metadata = getattr(getattr(result[0], "message", None), "response_metadata", {}) if result else {}
    if metadata.get("finish_reason") != "length":
        return error
    return OutputParserException(
        "the output reached max_tokens before the document was complete: raise max_tokens, or restrict the "
        "schema (maxLength, maxItems)",
        llm_output=result[0].text,
    )


class _ClassParser(PydanticOutputParser[Any]):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        try:
            return super().parse_result(result, partial=partial)
        except OutputParserException as error:
            raise _told(error, result) from error


class _DictParser(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        try:
            parsed = super().parse_result(result, partial=partial)
        except OutputParserException as error:
            raise _told(error, result) from error
        metadata = getattr(getattr(result[0], "message", None), "response_metadata", {})
        if not partial and metadata.get("finish_reason") == "length":
            # The parser closes what is open; a document that was broken off isn't one.
            raise _told(OutputParserException(""), result)
        return parsed
