"""Qwen3-Coder, Qwen3.5: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>.

Values are plain text; a tool's schema says which of them are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentspec.chat.deltas import Collector
from agentspec.chat.formats.base import ToolFormat, Tools, properties_of
from agentspec.chat.grammar import json_rule
from agentspec.chat.scanner import Malformed, Scanner, Waiting, ignore

__all__ = ["QwenCoder"]


class QwenCoder(ToolFormat):
    name = "qwen-coder"
    markers = ("<tool_call>", "</tool_call>")
    traits = ("<function=", "<parameter=")
    trigger = "<tool_call>"
    json_arguments = False

    def parse(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        while (yield from scanner.until(("<tool_call>", "<function="), out.content)):
            if scanner.text.endswith("<tool_call>", 0, scanner.at):
                yield from scanner.white()
                start = scanner.at
                try:
                    yield from scanner.expect("<function=")
                except Malformed as error:
                    found = yield from scanner.until(("</tool_call>",), ignore)
                    out.invalid(None, scanner.text[start : scanner.at - len(found)].strip(), str(error))
                    continue
            yield from self._call(scanner, out, tools)

    def _call(self, scanner: Scanner, out: Collector, tools: Tools) -> Waiting:
        start = scanner.at
        number = None
        name = ""
        try:
            head: list[str] = []
            if not (yield from scanner.until((">",), head.append)) or not (name := "".join(head).strip()):
                raise Malformed("a call without a name")
            number = out.open(name)
            schema = tools.get(name)
            separator = "{"
            while True:
                yield from scanner.white()
                if (yield from scanner.starts(("<parameter=", "</function>"))) != "<parameter=":
                    break
                scanner.at += len("<parameter=")
                head = []
                if not (yield from scanner.until((">",), head.append)):
                    raise Malformed("the output ends inside a parameter's name")
                key = "".join(head).strip()
                out.arguments(number, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                yield from self._value(scanner, out, number, _kinds(schema, key))
            yield from scanner.expect("</function>")
            yield from scanner.white()
            scanner.at += len((yield from scanner.starts(("</tool_call>",))))
            out.arguments(number, "{}" if separator == "{" else "}")
            out.close(number)
        except Malformed as error:
            found = yield from scanner.until(("</tool_call>",), ignore)
            raw = scanner.text[start : scanner.at - len(found)].strip()
            out.invalid(number, f"<function={raw}", str(error), name or None)

    def _value(self, scanner: Scanner, out: Collector, number: int, kinds: frozenset[str]) -> Waiting:
        if (yield from scanner.peek()) == "\n":
            scanner.at += 1
        ends = ("\n</parameter>", "</parameter>")
        if kinds == {"string"}:  # text: streamed as it comes
            out.arguments(number, '"')
            found = yield from scanner.until(
                ends, lambda text: out.arguments(number, json.dumps(text, ensure_ascii=False)[1:-1])
            )
            out.arguments(number, '"')
        else:
            pieces: list[str] = []
            found = yield from scanner.until(ends, pieces.append)
            out.arguments(number, json.dumps(_typed("".join(pieces), kinds), ensure_ascii=False))
        if not found:
            raise Malformed("the output ends inside a parameter")

    def rule(self, name: str, schema: Mapping[str, Any], terms: Callable[[str], str]) -> str:
        extra: list[str] = []
        pieces = [terms(f"<tool_call>\n<function={name}>\n")]
        closing = terms("\n</parameter>\n")
        for key, required, value in properties_of(schema):
            text = _kinds(schema, key) == {"string"}
            if text and isinstance(value.get("enum"), list):
                body = f"({' | '.join(terms(str(option)) for option in value['enum'])}) {closing}"
            elif text and not set(value) & {"const", "pattern", "format"}:
                # Free text up to the mark that closes it, which it holds.
                low, high = value.get("minLength", 0), value.get("maxLength", "")
                body = f"text_{low}_{high}"
                extra.append(f'{body}[suffix="\\n</parameter>\\n"]: /(?s:.{{{low},{high}}})/')
            else:
                body = f"{json_rule(value)} {closing}"
            body = f"({terms(f'<parameter={key}>' + chr(10))} {body})"
            pieces.append(body if required else f"{body}?")
        return "\n".join([" ".join([*pieces, terms("</function>\n</tool_call>")]), *extra])

    def write(self, name: str, arguments: str) -> str:
        lines = [f"<tool_call>\n<function={name}>"]
        for key, value in json.loads(arguments).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        return "\n".join([*lines, "</function>\n</tool_call>"])


def _typed(raw: str, kinds: frozenset[str]) -> Any:
    """A parameter's value: JSON where that is one of its kinds, else its text."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    structured = isinstance(value, (dict, list)) or (value is None and "null" in kinds)
    return raw if "string" in kinds and not structured else value


def _kinds(schema: Any, key: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows a parameter; empty where it doesn't say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(declared, Mapping):
        return frozenset()
    kinds = declared.get("type")
    if kinds is None and isinstance(declared.get("enum"), list) and declared["enum"]:
        return frozenset({"string"} if all(isinstance(v, str) for v in declared["enum"]) else ())
    return frozenset([kinds] if isinstance(kinds, str) else kinds or ())
