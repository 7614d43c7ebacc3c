"""Messages to tokens and back: templates, exact history, streamed text.

May import: memory (for spans and sources), transformers' tokenizers as objects passed in. Never torch.
"""

from agentspec.chat.detokenizer import Detokenizer
from agentspec.chat.history import History, OutputRecord
from agentspec.chat.template import ChatTemplate, RenderedChat

__all__ = ["ChatTemplate", "Detokenizer", "History", "OutputRecord", "RenderedChat"]
