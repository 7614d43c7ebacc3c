"""Vocabulary: what the mixture knows about a tokenizer's tokens, and the language table made with it.

Called by MixtureProposer. May import numpy, tables, contexts and mixing; never transformers: a tokenizer is
anything with `get_vocab()`, `decode(ids)`, `encode(text)`, and `all_special_ids` if it has special tokens.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting.contexts import CONTINUATION, DIGIT, NEWLINE, PUNCTUATION, SPACE, SPECIAL, WORD
from agentspec.drafting.mixing import LANGUAGE, absorb, contexts
from agentspec.drafting.tables import COUNT_BOUND, MAX_TOKEN, SUCCESSORS, UInt32, new_table
from agentspec.errors import InvalidRequestError

__all__ = ["Vocabulary", "token_class"]

LANGUAGE_BYTES = 10 * 2**20
_PIECE = 1 << 16  # characters encoded at a time
_MOST = 110  # occurrences of a context that the language table is told of, lest its counts be halved


def token_class(text: str) -> int:
    """The class of a token by its text: of its first character that isn't white space; NEWLINE is added."""
    newline = NEWLINE if "\n" in text else 0
    rest = text.strip()
    if not rest:
        return SPACE | newline
    if rest[0].isdigit():
        return DIGIT | newline
    if rest[0].isalpha():
        return (WORD if text[0].isspace() else CONTINUATION) | newline
    return PUNCTUATION | newline


class Vocabulary:
    """Token classes and the language table of one tokenizer.

    classes:  uint8[V], contexts.py's classes; empty where no tokenizer is known (all tokens are alike then)
    language: the language table; one that holds nothing where no tokenizer is known

    Making one decodes the vocabulary and encodes the standard library's text: some three seconds, once a
    tokenizer and process.
    """

    def __init__(self, tokenizer: Any = None, language: bool = True) -> None:
        self.classes: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.language: UInt32 = np.zeros(1, np.uint32)
        if tokenizer is None:
            return
        self.classes = _classes(tokenizer)
        if language:
            self.language = _language(tokenizer, self.classes)

    @property
    def nbytes(self) -> int:
        return int(self.classes.nbytes + self.language.nbytes)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The tokenizer's Vocabulary, made once and kept as long as the tokenizer lives."""
        if tokenizer is None:
            return cls()
        with _lock:
            made = _known.get(id(tokenizer))
            if made is None:
                made = _known[id(tokenizer)] = cls(tokenizer)
                try:
                    weakref.finalize(tokenizer, _known.pop, id(tokenizer), None)
                except TypeError:
                    _keep.append(tokenizer)
            return made


_lock = threading.Lock()
_known: dict[int, Vocabulary] = {}
_keep: list[Any] = []


def _classes(tokenizer: Any) -> NDArray[np.uint8]:
    size = max(tokenizer.get_vocab().values()) + 1
    if size - 1 > MAX_TOKEN:
        raise InvalidRequestError(f"vocabulary: ids up to {MAX_TOKEN} are supported, got {size - 1}")
    special = set(getattr(tokenizer, "all_special_ids", ()))
    texts = tokenizer.batch_decode([[i] for i in range(size)], clean_up_tokenization_spaces=False)
    return np.array(
        [SPECIAL if i in special or text.startswith("<|") else token_class(text) for i, text in enumerate(texts)],
        dtype=np.uint8,
    )


# What the language table is filled from besides the modules at the top of the running Python's own standard library. It
# teaches what English prose, code and punctuation look like in the target's tokens, so that a trajectory's first outputs
# find something.
_MODULES = (
    "logging/__init__.py", "json/__init__.py", "json/decoder.py", "unittest/case.py", "sqlite3/dump.py",
    "http/client.py", "asyncio/base_events.py", "email/message.py", "re/__init__.py", "urllib/parse.py",
    "collections/__init__.py",
)  # fmt: skip


def language_text() -> str:
    """Those modules and pydoc's language reference, some 6 MB; what isn't there is left out.

    It differs a little between Python versions, and drafts with it: under tensor parallelism all ranks need the same.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    # Not what a build or a distribution put beside them, which differs from machine to machine.
    paths = [path for path in sorted(library.glob("*.py")) if path.stem in sys.stdlib_module_names]
    paths += [library / name for name in _MODULES]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python without its documentation
        pass
    else:
        texts += topics.values()
    return "\n".join(texts)


def _language(tokenizer: Any, classes: NDArray[np.uint8]) -> UInt32:
    """What followed each context, the most frequent first, and the most frequent contexts where room is short: a table
    that is written once has no use for the latest."""
    text = language_text()
    pieces = [
        tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False)
        for start in range(0, len(text), _PIECE)
    ]  # fmt: skip
    ids = np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces])
    table = new_table(LANGUAGE_BYTES)
    hashed = np.empty((len(ids), LANGUAGE), np.int64)
    contexts(ids, table, classes, hashed)
    for k in range(LANGUAGE):
        absorb(table, *_rising(hashed[:, k], ids.astype(np.int64)))
    table[2] = len(ids)
    return table


def _rising(hashed: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pairs of a context and its successor in the order in which they are to be inserted, each as often as its share
    says: what comes last stands first in the table, and pushes out what came before."""
    known = hashed >= 0
    pairs, count = np.unique((hashed[known] << 20) | tokens[known], return_counts=True)
    order = np.lexsort((-count, pairs >> 20))
    context, token, count = pairs[order] >> 20, pairs[order] & MAX_TOKEN, count[order]
    _, start, successors = np.unique(context, return_index=True, return_counts=True)
    rank = np.arange(len(context)) - np.repeat(start, successors)
    total = np.repeat(np.add.reduceat(count, start), successors)
    share = np.where(total > _MOST, (count * _MOST + total // 2) // total, count)
    share = np.clip(share, rank < SUCCESSORS, COUNT_BOUND)
    order = np.lexsort((-rank, context, total))
    return np.repeat(context[order], share[order]), np.repeat(token[order], share[order])
