"""prepare: a chat request to what an engine runs: ids, spans, a grammar, a parser for the answer, seeds.

What every engine does with messages, tools, tool_choice and response_format, before and after the model
itself. Called by the engines' chat(). Imports the rest of chat/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.formats.base import ToolFormat
from agentspec.chat.formats.response_template import ResponseTemplate
from agentspec.chat.grammar import Grammar
from agentspec.chat.history import History
from agentspec.chat.parser import MessageParser
from agentspec.chat.template import ChatTemplate, RenderedChat, check_options, checked
from agentspec.chat.tools import ToolChoice, Tools, call_grammar, skeletons
from agentspec.errors import InvalidRequestError

__all__ = ["PreparedChat", "check_chat", "prepare"]

_TAIL = 4  # of the prompt's last ids begin a call's skeleton, so that it is found from there


@dataclass(slots=True, frozen=True)
class PreparedChat:
    """
    prompt:   the rendered chat
    grammar:  what the output has to be; None: the model is free
    parser:   makes the parser of one output
    keep_ids: special tokens that the parser has to see in the text (Detokenizer's keep)
    seeds:    ids that the output is likely to hold, for the memory as Source.SCHEMA
    """

    prompt: RenderedChat
    grammar: Grammar | None
    parser: Callable[[], MessageParser]
    keep_ids: tuple[int, ...]
    seeds: tuple[tuple[int, ...], ...]


def prepare(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    response_format: Mapping[str, Any] | None = None,
    grammar: Grammar | None = None,
    history: History | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> PreparedChat:
    """
    messages:        OpenAI's chat messages (role, content, tool_calls, tool_call_id, reasoning_content)
    tools:           {"type": "function", "function": {"name", "description", "parameters", "strict"}} each
    tool_choice:     "auto" (None), "none", "required", or a tool's name; required calls are held to by a
                     grammar
    parallel_tool_calls: False: at most one call, where a grammar holds
    response_format: as OpenAI's; grammar: a Grammar instead. With tools, the output is a call or such a
                     document
    template_options: more variables for the template (enable_thinking); none of transformers' own options

    Raises InvalidRequestError and its kinds.
    """
    _one_grammar(grammar, response_format)
    if grammar is None and response_format is not None:
        grammar = Grammar.of_response_format(response_format)
    offered = Tools.of(tools)
    choice = ToolChoice.of(tool_choice, offered, parallel_tool_calls)
    if choice.mode == "none":
        offered = Tools()  # not told to the model either: it can't call what it doesn't know
    prompt = template.render(messages, tools=offered.declared, history=history, template_options=template_options)
    format: ToolFormat | None = None
    if len(offered) or getattr(template.tokenizer, "response_template", None) is not None:
        format = template.tool_format
    elif "<|channel|>" in template.source:
        format = template.tool_format  # thoughts are in the format's own channels
    if isinstance(format, ResponseTemplate):
        format = format.at(prompt.text)
    thoughts = template.thoughts(prompt.text) if format is None or not format.reasoning else None
    if format is not None and len(offered):
        grammar = _joined(template, format, offered, choice, grammar)
    if grammar is not None and thoughts is not None:
        grammar = grammar.after_thoughts(thoughts.opening, thoughts.closing, thoughts.inside)
    schemas = offered.schemas

    def parser() -> MessageParser:
        return MessageParser(format, schemas, thoughts)

    keep = template.special_ids(format.markers) if format is not None else {}
    seeds: list[tuple[int, ...]] = []
    if format is not None:
        begins, texts = skeletons(format, offered)
        tail = prompt.input_ids[-_TAIL:]
        seeds = [tail + template.encode(text) for text in begins] + [template.encode(text) for text in texts]
    return PreparedChat(prompt, grammar, parser, tuple(sorted(keep.values())), tuple(seeds))


def check_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    grammar: Grammar | None = None,
    response_format: Mapping[str, Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """Raise InvalidRequestError for what `prepare` would refuse, where the server renders the chat."""
    checked(messages)
    check_options(template_options)
    _one_grammar(grammar, response_format)


def _one_grammar(grammar: Any, response_format: Any) -> None:
    if grammar is not None and not isinstance(grammar, Grammar):
        raise InvalidRequestError(
            f"grammar: needed an agentspec.chat.Grammar, got {grammar!r:.80}; Grammar.regex, .lark_grammar, .ebnf, "
            f".choice or .json_schema makes one"
        )
    if grammar is not None and response_format is not None:
        raise InvalidRequestError("chat: needed one of response_format and grammar, got both")


def _joined(
    template: ChatTemplate, format: ToolFormat, tools: Tools, choice: ToolChoice, document: Grammar | None
) -> Grammar | None:
    """The grammar of calls, and of the document that may come instead of them."""
    specials = template.special_ids(getattr(template.tokenizer, "all_special_tokens", ()))
    if document is None:
        return call_grammar(format, tools, choice, specials)
    if choice.mode == "required":
        raise InvalidRequestError(
            "chat: a required tool call and a response_format (or grammar) exclude each other; ask for one"
        )
    required = call_grammar(format, tools, ToolChoice("required", None, choice.parallel), specials)
    assert required is not None
    return required.either(document)
