"""GrammarCompiler and GrammarConstraint: grammars as masks over a tokenizer's ids, by llguidance.

Used by LocalEngine for requests with a grammar. Imports llguidance and numpy where a grammar is used; never
torch.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentspec.chat.grammar import Grammar
from agentspec.errors import GrammarError

if TYPE_CHECKING:
    from agentspec.drafting import Draft

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarConstraint"]

_CACHED = 256  # grammars
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Reading its vocabulary takes about a second, at the first grammar.

    vocabulary: how many ids the model has; eos_ids: those that end an output. Thread-safe.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_ids = sorted(eos_ids)
        self._ids: Any = None
        self._known: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Costs a few ms for a schema, nothing for one compiled lately. Raises GrammarError for a grammar
        that can't
        be honoured: unknown rules, unsupported keywords, schemas that nothing satisfies."""
        import llguidance

        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known
            if self._ids is None:
                self._ids = self._read_tokenizer()
        asked = grammar
        while True:
            text = grammar.text
            matcher = llguidance.LLMatcher(self._ids, text, log_level=0)
            if not matcher.is_error():
                break
            error = matcher.get_error()
            format_ = _UNKNOWN_FORMAT.search(error)
            bare = _without_format(grammar, format_.group(1)) if format_ else grammar
            if bare == grammar:
                raise GrammarError(f"grammar: {error.strip()}")
            grammar = bare  # by JSON schema's rules a format that is unknown restricts nothing
        compiled = CompiledGrammar(matcher, self._vocabulary, frozenset(self._eos_ids))
        with self._lock:
            self._known[asked] = compiled
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return compiled

    def _read_tokenizer(self) -> Any:
        import llguidance.hf

        if not self._eos_ids:
            raise GrammarError("grammar: this model has no EOS id, so an output could not end where the grammar does")
        try:
            return llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocabulary, eos_token=list(self._eos_ids)
            )
        except Exception as error:
            raise GrammarError(
                f"grammar: llguidance can't read this tokenizer ({type(error).__name__}: {error}); grammars "
                f"need a fast tokenizer (tokenizer.json)"
            ) from error


class CompiledGrammar:
    """A grammar ready to run. Calling it gives a fresh GrammarConstraint: pass it as
    GenerationRequest.constraint.
    """

    def __init__(self, matcher: Any, vocabulary: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary, self._eos_ids)


class GrammarConstraint:
    """One output under a grammar (engines.request.Constraint says who calls what). Not thread-safe.

    matcher: an LLMatcher that has consumed nothing; what it has consumed is always exactly the emitted ids,
    between the calls below
    """

    def __init__(self, matcher: Any, vocabulary: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._words: NDArray[np.int32] = np.zeros((1, (vocabulary + 31) // 32), dtype=np.int32)
        self.ended = False  # EOS was emitted
        self._masked = False  # _words belongs to the current state

    def mask(self, logits: NDArray[np.float32]) -> None:
        """-inf where an id can't come next. About 0.1 ms for 50,000 ids."""
        allowed = self._allowed()[: len(logits)]
        np.copyto(logits[: len(allowed)], -np.inf, where=allowed == 0)
        logits[len(allowed) :] = -np.inf
        if np.isneginf(logits.max()):
            raise GrammarError(
                "grammar: another option (logit_bias, bad_words, min_tokens) forbids every id that it allows"
            )

    def advance(self, token: int) -> None:
        """Raises GrammarError for an id that the grammar forbids: another option left none that it allows."""
        self._masked = False
        if self._matcher.is_stopped() and int(token) in self._eos_ids:
            self.ended = True  # the grammar had nothing more to say
            return
        self.ended = int(token) in self._eos_ids
        if self._matcher.is_stopped() or not self._matcher.consume_token(int(token)):
            raise GrammarError(
                f"grammar: id {token} was emitted where the grammar forbids it; another option (logit_bias, "
                f"bad_words, min_tokens) leaves none that it allows. {self._matcher.get_error()[:160]}"
            )

    def cut(self, draft: Draft) -> Draft:
        """The draft without the nodes that the grammar forbids, and those below them (and below an EOS)."""
        if not len(draft):
            return draft
        if self.ended:
            kept = np.arange(0)
        elif draft.is_chain:
            tokens = draft.tokens.tolist()
            ends = [place + 1 for place, token in enumerate(tokens) if token in self._eos_ids]
            kept = np.arange(self._valid(tokens[: ends[0]] if ends else tokens))
        else:
            kept = self._reachable(draft)
        if len(kept) == len(draft):
            return draft
        place = np.full(len(draft) + 1, -1, dtype=np.int32)  # the last entry is the parent -1
        place[kept] = np.arange(len(kept), dtype=np.int32)
        return replace(
            draft,
            tokens=draft.tokens[kept],
            parents=place[draft.parents[kept]],
            probabilities=draft.probabilities[kept],
            sources=draft.sources[kept],
        )

    def forced(self, most: int) -> Sequence[int]:
        """The ids that have to follow, one after the other: the masks there allow no other.

        Where the grammar leaves one text only, llguidance's masks allow that text as the tokenizer itself
        writes it, with or without drafts; so what other tokenisations there are is never a question here.
        """
        if self.ended or most < 1:
            return ()
        ids = [int(i) for i in self._matcher.compute_ff_tokens()[:most]]
        if not ids:
            only = np.flatnonzero(self._allowed())
            ids = [int(only[0])] if len(only) == 1 else []
        return ids

    @property
    def complete(self) -> bool:
        """The output so far satisfies the grammar."""
        return bool(self._matcher.is_accepting())

    # ---- inside -------------------------------------------------------------------------------

    def _allowed(self) -> NDArray[np.uint8]:
        """uint8[vocabulary]: 1 where an id may come next."""
        if not self._masked:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            if self._matcher.is_error():
                raise GrammarError(f"grammar: {self._matcher.get_error()[:200].strip()}")
            self._masked = True
        return np.unpackbits(self._words.view(np.uint8).ravel(), bitorder="little")[: self._vocabulary]

    def _valid(self, tokens: list[int]) -> int:
        """How many of the tokens the grammar allows from here."""
        if self._matcher.is_stopped():  # nothing but the end, which the matcher doesn't count
            return int(bool(tokens) and tokens[0] in self._eos_ids)
        return int(self._matcher.validate_tokens(tokens))

    def _rollback(self, count: int) -> None:
        self._masked = False
        if not self._matcher.rollback(count):
            raise GrammarError(f"grammar: {self._matcher.get_error()[:200].strip()}")

    def _reachable(self, draft: Draft) -> NDArray[np.int64]:
        """The nodes whose whole path the grammar allows, ascending. Walks the tree, one consume a node."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents.tolist()):
            children.setdefault(parent, []).append(node)
        kept: list[int] = []
        depth = 0
        todo = [(node, 0) for node in children.get(-1, ())]
        while todo:
            node, at = todo.pop()
            if depth > at:
                self._rollback(depth - at)
                depth = at
            token = int(draft.tokens[node])
            if not self._valid([token]):
                continue
            kept.append(node)
            below = children.get(node)
            if below and token not in self._eos_ids:
                self._masked = False
                if not self._matcher.consume_token(token):
                    raise GrammarError(f"grammar: {self._matcher.get_error()[:200].strip()}")
                depth += 1
                todo += [(child, depth) for child in below]
        if depth:
            self._rollback(depth)
        return np.sort(np.asarray(kept, dtype=np.int64))


def _without_format(grammar: Grammar, name: str) -> Grammar:
    """The grammar with {"format": name} left out of its schemas."""
    pieces: list[str] = []
    rest = grammar.lark
    while True:
        head, mark, rest = rest.partition("%json ")
        pieces += [head, mark]
        if not mark:
            break
        value, end = json.JSONDecoder().raw_decode(rest)
        pieces.append(json.dumps(_drop_format(value, name)))
        rest = rest[end:]
    return Grammar("".join(pieces), tuple((n, _without_format(part, name)) for n, part in grammar.parts))


def _drop_format(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {k: _drop_format(v, name) for k, v in value.items() if not (k == "format" and v == name)}
    if isinstance(value, list):
        return [_drop_format(v, name) for v in value]
    return value
