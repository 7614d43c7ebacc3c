"""ChatTemplate: a model's own chat template, with exact history.

The prompt's text is always the template's. Where a rendered assistant message says what an earlier output
said, the output's own ids are spliced in (history.py says why); the rest is tokenised, each stretch between
two outputs in one piece, so that the same text before an output gives the same ids in every later call.

To know which part of the rendered text is which message, the chat is rendered a second time with each
message's content replaced by a marker: what stands between the markers is the template's own text, and the
real rendering is cut along it. A template that treats the marked chat otherwise is asked for each beginning
of the chat instead. Where neither gives a certain cut, nothing is spliced and the prompt is one span.
Used by the engines. May import memory; the tokenizer is passed in.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import numpy as np

from agentspec.chat import formats
from agentspec.chat.formats.base import ToolFormat
from agentspec.chat.formats.response_template import ResponseTemplate
from agentspec.chat.history import History, OutputRecord, align
from agentspec.chat.parser import Thoughts
from agentspec.chat.text import encodable
from agentspec.chat.tool_prompt import without_tools
from agentspec.errors import ChatTemplateError, InvalidRequestError
from agentspec.memory import Source, Span

__all__ = ["ChatTemplate", "RenderedChat", "check_options", "checked"]

Message = Mapping[str, Any]
# The messages as the template gets them, each with the message that it stands for.
_Laid = list[tuple[dict[str, Any], Message]]

_NO_PARAMETERS = {"type": "object", "properties": {}}
_TAKES_TEXT = re.compile(r"arguments\s+is\s+(?:not\s+)?(?:string|mapping)")
_TOOL_ROLES = frozenset({"tool", "function", "ipython", "environment"})
# What apply_chat_template takes for itself: as a variable of the template it would change something else.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SEAM = 4  # tokens on each side of a splice that its decoding is checked with
_CACHED_CHARACTERS = 4_000_000  # of tokenised stretches that are kept for the next call


class _Generation(jinja2.ext.Extension):
    """transformers' {% generation %} block, as what is in it."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(slots=True, frozen=True)
class RenderedChat:
    """A prompt: its ids, its text by the template, its messages' spans, and how many ids were spliced in."""

    input_ids: tuple[int, ...]
    text: str
    spans: tuple[Span, ...]
    spliced_tokens: int


@dataclass(slots=True)
class _Part:
    """A stretch of the rendered text: a message's content, or (message None) the template's own text.

    pieces: for an output found again: its text as runs of its own ids, and text between them
    """

    text: str
    message: Message | None
    record: OutputRecord | None = None
    pieces: list[str | tuple[int, ...]] | None = None


class ChatTemplate:
    """Renders messages by the tokenizer's own chat template. tokenizer: a transformers tokenizer.
    Thread-safe.
    """

    def __init__(self, tokenizer: Any, tool_format: str | ToolFormat | None = None) -> None:
        self.tokenizer = tokenizer
        self._cache = _EncodingCache(tokenizer)
        if tool_format is not None and not isinstance(tool_format, (str, ToolFormat)):
            raise InvalidRequestError(
                f"tool_format: needed one of {', '.join(formats.names())}, a ToolFormat, or None, got {tool_format!r:.80}"
            )
        self._asked_format = formats.get(tool_format) if isinstance(tool_format, str) else tool_format

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        history: History | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt for the next assistant message.

        Raises InvalidRequestError for messages that are none, ChatTemplateError where the model has no
        template or the template refuses them.
        """
        chat = checked(messages)
        options = check_options(template_options)
        if self.renders_tools:
            options["tools"] = list(tools) if tools else None
            laid: _Laid = [(self._with_arguments(message), message) for message in chat]
            text = self._apply([told for told, _ in laid], options)
        else:
            laid, text = self._told(chat, list(tools or ()), options)
        parts = self._parts(laid, text, options)
        return self._tokenise(text, parts, history)

    def encode(self, text: str) -> tuple[int, ...]:
        """The text's ids, as it stands."""
        return tuple(self._cache.encode(text)[0].tolist())

    # ---- what the template can do ---------------------------------------------------------------

    @functools.cached_property
    def source(self) -> str:
        """The template's text; "" where the model has none."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and a caller may set (enable_thinking and the like), not those that
        the renderer fills in."""
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
        try:
            read = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
        except jinja2.TemplateError:  # it can't be rendered either
            return frozenset()
        filled = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
        return frozenset(read - filled - set(getattr(self.tokenizer, "special_tokens_map", ())))

    @functools.cached_property
    def renders_tools(self) -> bool:
        """Offered tools reach the prompt. Where they don't, they are told in the system message
        (tool_prompt.py).
        """
        name = "agentspec_probe"
        tool = {
            "type": "function",
            "function": {"name": name, "description": name, "parameters": _NO_PARAMETERS},
        }
        try:
            return name in self._apply([{"role": "user", "content": "Hi"}], {"tools": [tool]})
        except ChatTemplateError:
            return "tools" in self.source

    @functools.cached_property
    def _renders_results(self) -> bool:
        """Messages of the role "tool" reach the prompt."""
        chat = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hi"},
            {"role": "tool", "content": "agentspec_probe"},
        ]
        try:
            return "agentspec_probe" in self._apply(chat, {})
        except ChatTemplateError:
            return False

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """How this model writes tool calls. Raises InvalidRequestError where the template doesn't tell."""
        if self._asked_format is not None:
            return self._asked_format
        spec = getattr(self.tokenizer, "response_template", None)
        if spec is not None:
            special = getattr(self.tokenizer, "all_special_tokens", ())
            return ResponseTemplate(spec, tuple(str(token) for token in special))
        if not self.renders_tools:
            return formats.get("hermes")
        found = formats.detect(self.source)
        if found is None:
            raise InvalidRequestError(
                f"tools: it can't be told from this model's chat template how it writes tool calls; say so "
                f"with tool_format=, one of {', '.join(formats.names())}, or add one (agentspec.chat.formats)"
            )
        return found

    def thoughts(self, text: str) -> Thoughts | None:
        """The marks around this model's thoughts, for the answer to a rendered prompt; None: it has none."""
        if "</think>" not in self.source:
            return None
        return Thoughts(inside=text.rstrip().endswith("<think>"))

    def special_ids(self, marks: Sequence[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, with their ids."""
        special = dict(
            zip(
                (str(token) for token in getattr(self.tokenizer, "all_special_tokens", ())),
                getattr(self.tokenizer, "all_special_ids", ()),
                strict=False,
            )
        )
        return {mark: int(special[mark]) for mark in marks if mark in special}

    def _with_arguments(self, message: dict[str, Any]) -> dict[str, Any]:
        """Templates write a call's arguments with tojson, so JSON text would be quoted once more; the
        template gets the object, unless it says what it does with text."""
        calls = message.get("tool_calls")
        if not calls or _TAKES_TEXT.search(self.source):
            return message
        told = []
        for call in calls:
            function = call.get("function", call)
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError):
                    arguments = json.loads(arguments)
            function = {**function, "arguments": arguments}
            told.append({**call, "function": function} if "function" in call else function)
        return {**message, "tool_calls": told}

    def _told(
        self, chat: list[dict[str, Any]], tools: list[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[_Laid, str]:
        """Messages and tools for a template that knows no tools, and what it makes of them."""
        laid = without_tools(chat, self.tool_format, tools, results=self._renders_results)
        try:
            return laid, self._apply([told for told, _ in laid], options)
        except ChatTemplateError:
            if not tools or chat[0]["role"] == "system":
                raise
            laid = without_tools(chat, self.tool_format, tools, results=self._renders_results, system=False)
            return laid, self._apply([told for told, _ in laid], options)

    # ---- rendering ----------------------------------------------------------------------------

    def _apply(self, chat: Sequence[Message], options: Mapping[str, Any], prompt: bool = True) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "this model has no chat template: use engine.generate with token ids or text, or set "
                "tokenizer.chat_template"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=prompt, **options)
            )
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error

    def _parts(self, laid: _Laid, text: str, options: Mapping[str, Any]) -> list[_Part]:
        """The text cut into template text and contents; one template part where no cut is certain."""
        return (
            self._parts_by_marker(laid, text, options)
            or self._parts_by_beginning(laid, text, options)
            or [_Part(text, None)]
        )

    def _parts_by_marker(self, laid: _Laid, text: str, options: Mapping[str, Any]) -> list[_Part] | None:
        """Cut along a rendering whose contents are markers. Costs one rendering."""
        # Private-use characters, which no template touches, and a number that the text does not hold.
        nonce = 0
        while f"\ue000{nonce}." in text:
            nonce += 1
        markers = [f"\ue000{nonce}.{number}\ue001" for number in range(len(laid))]
        marked: list[dict[str, Any]] = []
        for (message, _), marker in zip(laid, markers, strict=True):
            bare = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
            bare.pop("tool_calls", None)
            marked.append({**bare, "content": marker})
        try:
            skeleton = self._apply(marked, options)
        except ChatTemplateError:
            return None
        literals: list[str] = []
        order: list[int] = []
        at = 0
        for number, marker in enumerate(markers):
            place = skeleton.find(marker, at)
            if place < 0:
                continue  # the template leaves this message out
            literals.append(skeleton[at:place])
            order.append(number)
            at = place + len(marker)
        literals.append(skeleton[at:])
        if any(marker in literal for marker in markers for literal in literals):
            return None  # a content that is written twice, or out of order
        return _cut(text, literals, [laid[number] for number in order])

    def _parts_by_beginning(self, laid: _Laid, text: str, options: Mapping[str, Any]) -> list[_Part] | None:
        """Cut where the template ends the prompt that each assistant message answered. Two renderings a
        message.

        Right for templates that render a beginning of the chat as a beginning of the text.
        """
        parts: list[_Part] = []
        at = 0
        chat = [told for told, _ in laid]
        for number, (_, message) in enumerate(laid):
            if message["role"] != "assistant" or number == 0:
                continue
            try:
                before = self._apply(chat[:number], options)
                through = self._apply(chat[: number + 1], options, prompt=False)
            except ChatTemplateError:
                return None
            if not (text.startswith(through) and through.startswith(before) and len(before) >= at):
                return None
            content = through[len(before) :]
            closing = next((t for t in self._eos_texts() if content.rstrip().endswith(t)), "")
            if closing:
                content = content[: content.rindex(closing)]
            parts += [_Part(text[at : len(before)], None), _Part(content, message)]
            at = len(before) + len(content)
        if not parts:
            return None
        return [*parts, _Part(text[at:], None)]

    def _eos_texts(self) -> list[str]:
        return sorted((str(t) for t in getattr(self.tokenizer, "all_special_tokens", ())), key=len, reverse=True)

    # ---- tokens -------------------------------------------------------------------------------

    def _tokenise(self, text: str, parts: list[_Part], history: History | None) -> RenderedChat:
        taken: set[int] = set()
        at = 0
        for part in parts:
            if history and part.text and part.message is not None and part.message["role"] == "assistant":
                record = history.find(part.message, part.text, text[:at], taken)
                if record is not None:
                    pieces = align(record, part.text)
                    if any(isinstance(piece, tuple) for piece in pieces):
                        part.record, part.pieces = record, pieces
            at += len(part.text)
        while True:
            rendered, faulty = self._laid_out(text, parts)
            if faulty is None:
                return rendered
            # A tokenizer that writes a stretch otherwise when it stands alone (a space in front of it): this
            # output is tokenised with what is around it.
            parts[faulty].record = parts[faulty].pieces = None

    def _laid_out(self, text: str, parts: list[_Part]) -> tuple[RenderedChat, int | None]:
        """The prompt, and the number of an output whose ids don't decode to the rendered text where they
        stand.
        """
        ids: list[int] = []
        spans: list[Span] = []
        spliced = 0
        seams: list[tuple[int, int, int]] = []  # part, its ids' start and end
        pending: list[_Part] = []

        def flush() -> None:
            piece = "".join(part.text for part in pending)
            new, starts = self._cache.encode(piece)
            base, at = len(ids), 0
            ids.extend(new.tolist())
            for part in pending:
                end = at + len(part.text)
                if part.message is not None and part.text and starts is not None:
                    first, last = np.searchsorted(starts, (at, end)).tolist()
                    if last > first:
                        role = str(part.message["role"])
                        spans.append(Span(base + first, base + last, _source(role), role))
                at = end
            pending.clear()

        for number, part in enumerate(parts):
            if part.pieces is None or part.record is None:
                pending.append(part)
                continue
            flush()
            start = len(ids)
            for piece in part.pieces:
                if isinstance(piece, tuple):
                    ids.extend(piece)
                    spliced += len(piece)
                else:
                    ids.extend(self._cache.encode(piece)[0].tolist())
            seams.append((number, start, len(ids)))
            end = len(ids)
            following = parts[number + 1].text if number + 1 < len(parts) else ""
            if part.record.eos is not None and following.startswith(self._text_of(part.record.eos)):
                # The template closes the message as the model did: EOS belongs to the output.
                end += 1
            spans.append(Span(start, end, Source.OUTPUT, "assistant"))
        flush()
        for number, start, end in seams:
            low, high = max(0, start - _SEAM), min(len(ids), end + _SEAM)
            before, after = self._decode(ids[low:start]), self._decode(ids[end:high])
            if self._decode(ids[low:high]) != before + parts[number].text + after:
                return RenderedChat((), text, (), 0), number
        spans = [span for span in spans if span.end <= len(ids)]
        return RenderedChat(tuple(ids), text, tuple(spans), spliced), None

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _text_of(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))


class _EncodingCache:
    """Tokenised stretches, the recently used ones kept: a chat's earlier stretches come again in every
    call.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = bool(getattr(tokenizer, "is_fast", False))
        self._known: OrderedDict[str, tuple[np.ndarray, np.ndarray | None]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        """ids (int32[n]) and where in the text each begins (int32[n]; None: this tokenizer doesn't say)."""
        if not text:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return known
        encodable("chat", text)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=self._fast)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        starts = None
        if self._fast:
            starts = np.asarray(encoded["offset_mapping"], dtype=np.int32).reshape(-1, 2)[:, 0]
        with self._lock:
            if text not in self._known:
                self._known[text] = ids, starts
                self._characters += len(text)
            while self._characters > _CACHED_CHARACTERS and len(self._known) > 1:
                self._characters -= len(self._known.popitem(last=False)[0])
        return ids, starts


def _cut(text: str, literals: list[str], laid: _Laid) -> list[_Part] | None:
    """The text as literals[0], a content, literals[1], ..., literals[-1]; None where it isn't that.

    A content is looked for as it is; one that the template wrote otherwise (with a tool call or thoughts)
    ends where what follows it begins.
    """
    if not text.startswith(literals[0]):
        return None
    parts = [_Part(literals[0], None)]
    at = len(literals[0])
    for number, (told, message) in enumerate(laid):
        following = literals[number + 1]
        if number == len(laid) - 1:
            end = len(text) - len(following)
        else:
            end = next(
                (at + len(c) for c in (told["content"], told["content"].strip()) if text.startswith(c + following, at)),
                text.find(following, at) if following else -1,
            )
        if end < at or not text.startswith(following, end):
            return None
        parts += [_Part(text[at:end], message), _Part(following, None)]
        at = end + len(following)
    return parts if at == len(text) else None


def _source(role: str) -> Source:
    if role == "assistant":
        return Source.OUTPUT
    return Source.TOOL if role in _TOOL_ROLES else Source.PROMPT


def check_options(template_options: Any) -> dict[str, Any]:
    """Template variables as a dict of their own. Raises InvalidRequestError for what is none, and reserved names."""
    if template_options is None:
        return {}
    if not isinstance(template_options, Mapping) or not all(isinstance(name, str) for name in template_options):
        raise InvalidRequestError(
            f"template_options: needed a mapping of names to values, as {{'enable_thinking': False}}, got "
            f"{template_options!r:.80}"
        )
    reserved = sorted(_RESERVED & set(template_options))
    if reserved:
        raise InvalidRequestError(
            f"template_options: needed the template's own variables, got {', '.join(reserved)}, which agentspec or "
            f"transformers sets; messages and tools are arguments of chat(), another template goes into "
            f"tokenizer.chat_template"
        )
    return dict(template_options)


def checked(messages: Any) -> list[dict[str, Any]]:
    """The messages with their contents as text. Raises InvalidRequestError for what is no message."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages: needed a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("messages: needed at least one message, got none")
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{number}]: needed a mapping with a 'role', got {message!r:.200}")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise InvalidRequestError(f"messages[{number}] ({message['role']}): needed 'content' or 'tool_calls'")
        calls = message.get("tool_calls")
        if calls and (isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence)):
            raise InvalidRequestError(f"messages[{number}]: needed tool_calls as a list, got {calls!r:.80}")
        for call in calls or ():
            if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
                raise InvalidRequestError(
                    f"messages[{number}]: needed tool calls as {{'function': {{'name': ..., 'arguments': ...}}}}, got "
                    f"{call!r:.80}"
                )
        chat.append({**message, "content": _text(content, number)})
    return chat


def _text(content: Any, number: int) -> str:
    """A message's content as text; a list of text parts is their text, one after the other."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InvalidRequestError(
            f"messages[{number}]: needed content as text or a list of parts, got {type(content).__name__}"
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"messages[{number}]: needed text parts ({{'type': 'text', 'text': ...}}), got one of type "
                f"{kind!r}; this engine reads text only"
            )
    return "".join(texts)
