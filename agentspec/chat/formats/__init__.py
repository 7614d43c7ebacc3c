"""Tool-call formats: how a model writes the calls that its chat template taught it.

A format is a ToolFormat (base.py) under a name. `detect` finds a model's format from its chat template; an
engine's `tool_format=` overrides it. To add one, write a class with a `parse` generator (hermes.py is the
shortest example) and `register` an instance, or name it in the entry-point group "agentspec.tool_formats":

    class Angle(ToolFormat):
        name = "angle"
        markers = ("<<", ">>")                      # special tokens among them stay visible to the parser
        traits = ("<<call",)                        # in the chat template: this model writes that

        def parse(self, scanner, out, tools):
            while (yield from scanner.until(("<<call ",), out.content)):
                yield from call_in_json(scanner, out, closing=">>")

        def write(self, name, arguments):           # what `parse` reads; grammars and drafts are made of it
            return f'<<call {{"name": "{name}", "arguments": {arguments}}}>>'

    agentspec.chat.formats.register(Angle())

Parsers looked for before these were written: transformers' ResponseParser streams by regions and is used
wherever a tokenizer brings its `response_template` (response_template.py); it has no templates of its own for
the models below, delivers a call's arguments only when its region closes, and raises on a malformed one.
openai-harmony parses token ids of its own vocabulary, which it downloads when it is first used. SGLang's and
vLLM's come with those servers.
"""

from agentspec.chat.formats.base import ToolFormat, call_in_json
from agentspec.chat.formats.registry import detect, get, names, register

__all__ = ["ToolFormat", "call_in_json", "detect", "get", "names", "register"]
