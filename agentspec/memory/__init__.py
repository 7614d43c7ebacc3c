"""What a trajectory has seen: tokens with their sources, and where the current context occurred before.

May import: numpy, numba. Never torch. Used by drafting, the engines, the replay and the SGLang plugin alike.
"""

from agentspec.memory.ends import Ends
from agentspec.memory.matches import Copied, Matches, Place
from agentspec.memory.segments import Segment, Source, Span, as_source
from agentspec.memory.store import MemoryStore
from agentspec.memory.tokenizer import MessageMark, MessageMarks, vocabulary_fingerprint
from agentspec.memory.trajectory import Context, TrajectoryMemory

__all__ = [
    "Context",
    "Copied",
    "Ends",
    "Matches",
    "MemoryStore",
    "MessageMark",
    "MessageMarks",
    "Place",
    "Segment",
    "Source",
    "Span",
    "TrajectoryMemory",
    "as_source",
    "vocabulary_fingerprint",
]
