"""Recorded trajectories: readers for the formats people have them in, and record(), which writes our own.

Called by replay.py and by users (`agentspec.record`). May import numpy, memory and engines.base; no torch.

Read (JSON lines, or one JSON document):

    traces          {"id", "steps": [{"messages_delta": [...], "output": {...}}], "tools"?}
    OpenAI logs     {"messages": [...]}, or {"request": {"messages"}, "response": {"choices": [{"message"}]}};
                    the fields may also be called "body", "inputs" or "output". Lines whose messages extend an
                    earlier line's are calls of one trajectory, and so are lines that share trajectory_id,
                    session_id, thread_id, conversation_id or trace_id.
    OTel GenAI      OTLP/JSON spans with gen_ai.input.messages and gen_ai.output.messages (message content is
                    opt-in there too); a trace is a trajectory
    LangSmith       exported runs with run_type "llm"; a trace is a trajectory
    agentspec       what record(path, content=True) wrote: exact token ids

A line that can't be read is named, skipped and counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.memory import Source

__all__ = ["Problem", "RecordedCall", "Recorder", "Recording", "read", "record"]

Message = dict[str, Any]
_SOURCES = frozenset(int(source) for source in Source)
_TOKEN_LIMIT = 1 << 24  # no vocabulary is larger, and tables by token id are as long as the largest id
_GROUP_FIELDS = ("trajectory_id", "trajectory", "session_id", "thread_id", "conversation_id", "trace_id")


@dataclass(slots=True)
class RecordedCall:
    """One model call: the messages before it and the message that came out, or the very ids.

    messages, output:      chat messages ({"role", "content", "tool_calls"?})
    input_ids, output_ids: token ids, where they were recorded
    spans:                 [start, end, source, role] of the prompt's messages, with input_ids
    steps:                 tokens that each verify step emitted, where known
    """

    messages: list[Message] = field(default_factory=list)
    output: Message | None = None
    input_ids: list[int] | None = None
    output_ids: list[int] | None = None
    spans: list[list[Any]] | None = None
    steps: list[int] | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class Recording:
    """One trajectory: its calls in order, and what is common to them."""

    id: str
    family: str
    calls: list[RecordedCall]
    tools: list[Any] | None = None


@dataclass(slots=True, frozen=True)
class Problem:
    """A record that was skipped."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class _Bad(Exception):
    """This record can't be read; the text says why."""


# ---- reading --------------------------------------------------------------------------------------


def read(path: str | Path, report: Callable[[Problem], None] | None = None) -> list[Recording]:
    """The trajectories in a file. `report` is called for each record that is skipped.

    Raises InvalidRequestError if the file can't be read at all, or holds nothing readable."""
    path = Path(path)
    problems: list[Problem] = []
    family = path.name.split(".")[0]
    recordings: list[Recording] = []
    groups = _Groups(family)
    try:
        for where, value in _values(path, problems):
            try:
                _sort_in(value, where, path, groups, recordings)
            except _Bad as error:
                problems.append(Problem(where, str(error)))
            except RecursionError:
                problems.append(Problem(where, _TOO_DEEP))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
                problems.append(Problem(where, f"not laid out as expected ({type(error).__name__}: {error})"))
    except OSError as error:
        raise InvalidRequestError(f"{path}: can't be read: {error}") from error
    recordings += groups.recordings()
    if report is not None:
        for problem in problems:
            report(problem)
    recordings = [recording for recording in recordings if recording.calls]
    if not recordings:
        reasons = "; ".join(str(problem) for problem in problems[:3]) or "it is empty"
        raise InvalidRequestError(f"{path}: no trajectory in it ({reasons})")
    return recordings


_TOO_DEEP = "nested too deeply to be read"


def _json(text: bytes) -> Any:
    """The JSON value. Raises _Bad, whatever is wrong with it."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _Bad(f"not UTF-8 ({error})") from None
    except ValueError as error:
        raise _Bad(f"not JSON ({error})") from None
    except RecursionError:
        raise _Bad(_TOO_DEEP) from None


def _values(path: Path, problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """(where, JSON value) of each record: lines, or the elements of one document."""
    with open(path, "rb") as file:
        try:
            _json(next((line for line in file if line.strip()), b""))
        except _Bad:  # a bad line, or the first line of a document that is laid out over several
            file.seek(0)
            with contextlib.suppress(_Bad):
                document = _json(file.read())
                elements = document if isinstance(document, list) else [document]
                for number, element in enumerate(elements):
                    yield f"{path.name}[{number}]", element
                return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = _json(line)
            except _Bad as error:
                problems.append(Problem(f"{path.name}:{number}", str(error)))
                continue
            if isinstance(value, list):
                for place, element in enumerate(value):
                    yield f"{path.name}:{number}[{place}]", element
            else:
                yield f"{path.name}:{number}", value


def _sort_in(value: Any, where: str, path: Path, groups: _Groups, recordings: list[Recording]) -> None:
    if not isinstance(value, Mapping):
        raise _Bad(f"needed an object, got {type(value).__name__}")
    if "agentspec" in value:
        _own(value, groups)
    elif "steps" in value:
        recordings.append(_trace(value, path))
    elif "resourceSpans" in value or "resource_spans" in value:
        for span in _spans(value):
            _otel(span, groups)
    elif "attributes" in value and ("traceId" in value or "trace_id" in value or "context" in value):
        _otel(value, groups)
    elif "run_type" in value:
        _langsmith(value, groups)
    else:
        _openai(value, groups)


class _Groups:
    """Calls that come one by one, gathered into trajectories."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._named: dict[str, list[tuple[Any, RecordedCall]]] = {}
        self._tools: dict[str, Any] = {}
        self._heads: dict[str, str] = {}  # a hash of all messages so far -> the trajectory they belong to

    def add(self, name: str | None, order: Any, call: RecordedCall, tools: Any = None) -> None:
        """name None: the trajectory whose messages this call's extend, or a new one."""
        if name is None:
            keys = [json.dumps(message, sort_keys=True) for message in call.messages]
            name = next(
                (
                    self._heads[key]
                    for key in ("\n".join(keys[:n]) for n in range(len(keys), 0, -1))
                    if key in self._heads
                ),
                f"{self.family}-{len(self._named)}",
            )
            whole = keys + ([json.dumps(call.output, sort_keys=True)] if call.output is not None else [])
            self._heads["\n".join(whole)] = name
        tools = _tools(tools)
        calls = self._named.setdefault(name, [])
        calls.append((len(calls) if order is None else order, call))
        if tools and name not in self._tools:
            self._tools[name] = tools

    def recordings(self) -> list[Recording]:
        made = []
        for name, calls in self._named.items():
            with contextlib.suppress(TypeError):  # times of two kinds: keep the order of the file
                calls.sort(key=lambda pair: pair[0])
            made.append(Recording(name, self.family, [call for _, call in calls], self._tools.get(name)))
        return made


def _trace(value: Mapping[str, Any], path: Path) -> Recording:
    tools = value.get("tools")
    if value.get("tools_file"):
        file = path.parent / str(value["tools_file"])
        if not file.is_file():
            raise _Bad(f"its tools are in {file.name}, which isn't beside it")
        try:
            tools = _json(file.read_bytes())
        except OSError as error:
            raise _Bad(f"its tools in {file.name} can't be read: {error}") from None
    messages: list[Message] = []
    calls = []
    for step in value["steps"]:
        messages = messages + [_message(message) for message in step.get("messages_delta", ())]
        output = _message({"role": "assistant", **step["output"]})
        calls.append(RecordedCall(messages=messages, output=output))
        messages = [*messages, output]
    if not calls:
        raise _Bad("a trajectory without steps")
    return Recording(str(value.get("id", path.name)), path.name.split(".")[0], calls, _tools(tools))


def _tools(tools: Any) -> list[Any] | None:
    """Tools as replay writes them, which has to be possible."""
    if tools is not None and not isinstance(tools, list):
        raise _Bad(f"tools: needed a list, got {type(tools).__name__}")
    json.dumps(tools)
    return tools


def _openai(value: Mapping[str, Any], groups: _Groups) -> None:
    request = next(
        (value[k] for k in ("request", "body", "inputs", "input") if isinstance(value.get(k), Mapping)), value
    )
    if isinstance(request.get("body"), Mapping):
        request = request["body"]
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _Bad("no messages: neither a trace, an OpenAI log, an OTel export, a LangSmith run nor our own")
    name = next((str(value[k]) for k in _GROUP_FIELDS if value.get(k)), None)
    messages = [_message(message) for message in messages]
    output = _response(value)
    if output is not None:
        groups.add(
            name,
            value.get("created") or value.get("timestamp"),
            RecordedCall(messages, output),
            request.get("tools"),
        )
        return
    # A whole conversation: every assistant message is a call's output.
    found = False
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place > 0:
            groups.add(name or str(value.get("id") or f"{groups.family}-{id(value)}"), None,
                       RecordedCall(messages[:place], message), request.get("tools"))  # fmt: skip
            found = True
    if not found:
        raise _Bad("no assistant message in it")


def _response(value: Mapping[str, Any]) -> Message | None:
    for key in ("response", "completion", "outputs", "output"):
        found = value.get(key)
        if isinstance(found, Mapping):
            if isinstance(found.get("body"), Mapping):
                found = found["body"]
            if found.get("choices"):
                return _message(found["choices"][0]["message"])
            if "content" in found or "tool_calls" in found:
                return _message({"role": "assistant", **found})
        elif isinstance(found, str):
            return {"role": "assistant", "content": found}
    return None


def _spans(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in value.get("resourceSpans", value.get("resource_spans", ())):
        for scope in resource.get("scopeSpans", resource.get("scope_spans", ())):
            yield from scope.get("spans", ())


def _otel(span: Mapping[str, Any], groups: _Groups) -> None:
    raw = span.get("attributes", {})
    attributes = raw if isinstance(raw, Mapping) else {item["key"]: _any_value(item.get("value")) for item in raw}
    for event in span.get("events", ()):
        inner = event.get("attributes", {})
        inner = inner if isinstance(inner, Mapping) else {item["key"]: _any_value(item.get("value")) for item in inner}
        attributes = {**inner, **attributes}
    given, came = attributes.get("gen_ai.input.messages"), attributes.get("gen_ai.output.messages")
    if given is None and came is None:
        operation = attributes.get("gen_ai.operation.name")
        if operation in (None, "invoke_agent", "execute_tool", "create_agent", "embeddings"):
            return  # not a model call
        raise _Bad("a model call without message content: exporting it has to be switched on where it is traced")
    messages = []
    instructions = attributes.get("gen_ai.system_instructions")
    if instructions:
        messages.append({"role": "system", "content": _parts(_loaded(instructions))})
    messages += [_otel_message(message) for message in _loaded(given or "[]")]
    outputs = [_otel_message(message) for message in _loaded(came or "[]")]
    if not outputs or not messages:
        raise _Bad("a model call without input or output messages")
    context = span.get("context", {})
    name = (
        attributes.get("gen_ai.conversation.id")
        or span.get("traceId")
        or span.get("trace_id")
        or context.get("trace_id")
    )
    order = span.get("startTimeUnixNano") or span.get("start_time") or span.get("start_time_unix_nano")
    tools = attributes.get("gen_ai.tool.definitions")
    when = int(str(order)) if str(order).isdigit() else order
    groups.add(str(name), when, RecordedCall(messages, outputs[0]),
               _loaded(tools) if tools else None)  # fmt: skip


def _any_value(value: Any) -> Any:
    """An OTLP AnyValue as a plain value."""
    if not isinstance(value, Mapping):
        return value
    for key in ("stringValue", "string_value", "intValue", "doubleValue", "boolValue"):
        if key in value:
            return value[key]
    if "arrayValue" in value:
        return [_any_value(item) for item in value["arrayValue"].get("values", ())]
    if "kvlistValue" in value:
        return {item["key"]: _any_value(item.get("value")) for item in value["kvlistValue"].get("values", ())}
    return None


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _parts(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    return "\n".join(str(part.get("content", "")) for part in parts if isinstance(part, Mapping))


def _otel_message(message: Mapping[str, Any]) -> Message:
    parts = message.get("parts")
    if parts is None:
        return _message(message)
    text, calls = [], []
    for part in parts:
        if part.get("type") == "tool_call":
            calls.append({"name": part.get("name"), "arguments": part.get("arguments", {}), "id": part.get("id")})
        elif part.get("type") == "tool_call_response":
            answer = part.get("response", part.get("result", ""))
            text.append(answer if isinstance(answer, str) else json.dumps(answer))
        elif isinstance(part.get("content"), str) and part.get("type") != "reasoning":
            text.append(part["content"])
    made: Message = {"role": message.get("role", "user"), "content": "\n".join(text)}
    if calls:
        made["tool_calls"] = calls
    return made


def _langsmith(run: Mapping[str, Any], groups: _Groups) -> None:
    if run.get("run_type") != "llm":
        return
    inputs, outputs = run.get("inputs") or {}, run.get("outputs") or {}
    messages = inputs.get("messages")
    if not messages:
        raise _Bad("an llm run without input messages")
    if isinstance(messages[0], list):
        messages = messages[0]
    output = None
    generations = outputs.get("generations")
    if generations:
        first = generations[0][0] if isinstance(generations[0], list) else generations[0]
        output = first.get("message") or {"role": "assistant", "content": first.get("text", "")}
    elif outputs.get("choices"):
        output = outputs["choices"][0]["message"]
    elif outputs.get("content") is not None or outputs.get("role"):
        output = outputs
    if output is None:
        raise _Bad("an llm run without an output message")
    name = str(run.get("trace_id") or run.get("session_id") or run.get("id"))
    extra = (run.get("extra") or {}).get("invocation_params") or {}
    groups.add(name, run.get("start_time"), RecordedCall([_message(m) for m in messages], _message(output)),
               extra.get("tools"))  # fmt: skip


_LANGCHAIN_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "developer": "system"}


def _message(message: Any) -> Message:
    """A chat message in one form: role, content (text), tool_calls [{name, arguments}]?"""
    if not isinstance(message, Mapping):
        raise _Bad(f"a message must be an object, got {type(message).__name__}")
    if "kwargs" in message and "role" not in message:  # LangChain's serialised form
        kind = message.get("id", ["", ""])[-1] if isinstance(message.get("id"), list) else ""
        names = {
            "HumanMessage": "user",
            "AIMessage": "assistant",
            "SystemMessage": "system",
            "ToolMessage": "tool",
        }
        message = {"role": names.get(str(kind).replace("Chunk", ""), "user"), **message["kwargs"]}
    if "data" in message and "type" in message and isinstance(message["data"], Mapping):
        message = {"type": message["type"], **message["data"]}
    role = message.get("role") or message.get("type") or "user"
    role = _LANGCHAIN_ROLES.get(role, role)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            part if isinstance(part, str) else str(part.get("text", ""))
            for part in content
            if isinstance(part, (str, Mapping))
        )
    made: Message = {"role": str(role), "content": "" if content is None else str(content)}
    made["content"].encode()  # half of a surrogate pair is no character, and no tokenizer takes it
    if message.get("name"):
        made["name"] = message["name"]
    calls = []
    for call in message.get("tool_calls") or ():
        inner = call.get("function", call)
        calls.append({"name": inner.get("name"), "arguments": inner.get("arguments", inner.get("args", {}))})
        json.dumps(calls[-1], ensure_ascii=False).encode()  # as replay writes it
    if calls:
        made["tool_calls"] = calls
    return made


# ---- our own ----------------------------------------------------------------------------------------


def _own(value: Mapping[str, Any], groups: _Groups) -> None:
    if value["agentspec"] != Recorder.VERSION:
        raise _Bad(f"written by another version of agentspec's format ({value['agentspec']!r})")
    if value.get("output_ids") is None or value.get("input_ids") is None:
        raise _Bad("recorded without content, so it can't be replayed: record(path, content=True)")
    prompt = _whole("input_ids", value["input_ids"], _TOKEN_LIMIT)
    if not prompt:
        raise _Bad("input_ids: needed at least one token id, got none")
    steps, most = value.get("steps"), value.get("max_tokens")
    call = RecordedCall(
        input_ids=prompt,
        output_ids=_whole("output_ids", value["output_ids"], _TOKEN_LIMIT),
        spans=None if value.get("spans") is None else _message_spans(value["spans"], len(prompt)),
        steps=None if steps is None else _whole("steps", steps, _TOKEN_LIMIT),
        max_tokens=None if most is None else _whole("max_tokens", [most], 1 << 31)[0],
    )
    groups.add(str(value.get("trajectory", "")), None, call)


def _whole(name: str, values: Any, limit: int) -> list[int]:
    """A list of whole numbers from 0 to limit - 1. Raises _Bad for anything else."""
    if not isinstance(values, list):
        raise _Bad(f"{name}: needed a list of whole numbers, got {type(values).__name__}")
    for place, value in enumerate(values):
        if type(value) is not int or not 0 <= value < limit:
            raise _Bad(f"{name}[{place}]: needed a whole number from 0 to {limit - 1}, got {value!r:.60}")
    return values


def _message_spans(values: Any, length: int) -> list[list[Any]]:
    """Spans that lie in order and inside the prompt. Raises _Bad for others."""
    if not isinstance(values, list):
        raise _Bad(f"spans: needed a list, got {type(values).__name__}")
    at = 0
    for place, value in enumerate(values):
        fits = isinstance(value, list) and len(value) == 4 and all(type(part) is int for part in value[:3])
        if not fits or not at <= value[0] <= value[1] <= length or value[2] not in _SOURCES:
            raise _Bad(
                f"spans[{place}]: needed [start, end, source, role], in order and within the prompt's {length} "
                f"tokens, got {value!r:.80}"
            )
        at = value[1]
    return values


class Recorder:
    """Writes a line of JSON for each finished call. Made by record()."""

    VERSION = 1

    def __init__(self, path: str | Path, content: bool = False) -> None:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise InvalidRequestError(f"record: needed a path to write to, got {path!r}")
        self.path = Path(path)
        self.content = content
        self.calls = 0
        self._lock = threading.Lock()
        try:
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InvalidRequestError(f"record: {self.path} can't be written: {error}") from error

    def write(
        self,
        stats: Any,
        input_ids: Iterable[int],
        output_ids: Iterable[int],
        steps: Iterable[int],
        spans: Iterable[Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """One finished call. steps: tokens each verify step emitted."""
        line: dict[str, Any] = {
            "agentspec": self.VERSION,
            "trajectory": stats.trajectory_id,
            "call": stats.call_index,
            "time": time.time(),
            "steps": list(steps),
            "max_tokens": max_tokens,
            "stats": stats.to_dict(),
            "input_ids": [int(i) for i in input_ids] if self.content else None,
            "output_ids": [int(i) for i in output_ids] if self.content else None,
            "spans": None,
        }
        if self.content and spans is not None:
            line["spans"] = [[span.start, span.end, int(span.source), span.role] for span in spans]
        text = json.dumps(line, default=str)
        with self._lock:
            if self._file.closed:
                return
            self._file.write(text + "\n")
            self._file.flush()
            self.calls += 1

    def close(self) -> None:
        """Stop recording."""
        with _lock:
            if self in _active:
                _active.remove(self)
        with self._lock:
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_active: list[Recorder] = []
_lock = threading.Lock()


def record(path: str | Path, content: bool = False) -> Recorder:
    """Record every call of this process to `path` (JSON lines, appended), until closed or left as a context.

    Without content only counts and times are written. With content=True also the token ids of prompts and
    outputs,
    which is what `agentspec replay` needs: whoever has the file can read the text.
    """
    recorder = Recorder(path, content)
    with _lock:
        _active.append(recorder)
    return recorder


def note(request: Any, chunks: Sequence[Any], stats: Any) -> None:
    """Called by Generation when a call has ended: hand it to every open recorder. Nothing, when there is
    none.

    request: GenerationRequest, chunks: its TokenChunks, stats: CallStats. Of several choices the first is kept.
    """
    if not _active:
        return
    ids = [token for chunk in chunks if chunk.index == 0 for token in chunk.token_ids]
    steps = [tokens for _, tokens in stats.arrivals]
    for recorder in list(_active):
        recorder.write(stats, request.input_ids, ids, steps, request.spans, request.max_tokens)
