"""Messages to tokens and back: templates, exact history, streamed text, tool calls, grammars.

May import: memory (for spans and sources), transformers' tokenizers as objects passed in; llguidance where a
grammar is used. Never torch.

    prepare.py      a chat request to ids, grammar, parser, seeds: what every engine's chat() begins with
    template.py     the model's chat template, with exact history (history.py) and tools (tool_prompt.py,
    tools.py) detokenizer.py  ids to text, whole characters only
    parser.py       text to MessageDeltas (deltas.py), by the model's tool-call format (formats/, on
    scanner.py) grammar.py      what an output may be; compiled.py makes masks of it
"""

from agentspec.chat.deltas import InvalidToolCall, MessageDelta, ToolCallDelta, joined
from agentspec.chat.detokenizer import Detokenizer
from agentspec.chat.formats.base import ToolFormat
from agentspec.chat.grammar import Grammar
from agentspec.chat.history import History, OutputRecord
from agentspec.chat.parser import MessageParser
from agentspec.chat.prepare import PreparedChat, check_chat, prepare
from agentspec.chat.template import ChatTemplate, RenderedChat
from agentspec.chat.text import encodable

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Grammar",
    "History",
    "InvalidToolCall",
    "MessageDelta",
    "MessageParser",
    "OutputRecord",
    "PreparedChat",
    "RenderedChat",
    "ToolCallDelta",
    "ToolFormat",
    "check_chat",
    "encodable",
    "joined",
    "prepare",
]
