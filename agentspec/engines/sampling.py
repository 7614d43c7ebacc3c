"""Sampler: the target's own choice at one position of one output. Called by LocalEngine for each emitted token.

The choice at a position depends on the position's logits, the ids before it, and a number drawn for (seed, choice,
position); never on what was drafted. So a draft is kept exactly while it agrees, the distribution is the target's for
any draft, and with a seed the text is the one of plain decoding (transformers' own rejection sampling draws other
numbers with other drafts).

Order of what is applied, as in transformers' generate: logit bias, repetition, presence and frequency penalties, bad
words, min tokens, constraint, temperature, top-k, top-p, min-p. Repetition penalty and bad words are transformers'
processors. Top-k, top-p and min-p are written here over float64: transformers' top-p sorts the vocabulary, 13 ms a
token at 49,152 ids where a forward takes 60 (benchmarks/sampling_cost.py); the tests hold them to transformers' sets.
Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentspec.engines.base import TokenLogprob
from agentspec.engines.request import Constraint, GenerationRequest
from agentspec.errors import InvalidRequestError

__all__ = ["Sampler", "truncate"]

Float64 = NDArray[np.float64]


class Sampler:
    """Chooses the ids of one output, one after another.

    context:    prompt ids; grows by `advance`
    ending_ids: ids that min_tokens forbids (EOS and single stop ids)
    seed, index: what the choice's numbers are drawn with
    noise:      how far two forwards of different widths may differ in a logit; 0: they don't

    `close_call` tells after `choose` whether logits within `noise` could have chosen otherwise. `choose` raises
    InvalidRequestError where the request's options together forbid every id.
    """

    def __init__(
        self,
        request: GenerationRequest,
        context: NDArray[np.int32],
        ending_ids: Sequence[int],
        seed: int,
        index: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
        noise: float = 0.0,
    ) -> None:
        self.constraint = constraint
        self.close_call = False
        self._request = request
        self._ending = np.asarray(sorted(ending_ids), dtype=np.int64)
        self._key = np.array([seed, index], dtype=np.uint64)
        self._prompt_length = self._length = len(context)
        self._ids = np.empty(max(64, 2 * len(context)), dtype=np.int64)
        self._ids[: self._length] = context
        self._counts: dict[int, int] = {}
        self._bias = {int(i): float(b) for i, b in request.logit_bias.items()}
        self._processors: list[Any] = []
        if request.repetition_penalty != 1.0:
            from transformers import RepetitionPenaltyLogitsProcessor

            self._processors.append(RepetitionPenaltyLogitsProcessor(float(request.repetition_penalty)))
        if bad_words:
            from transformers import NoBadWordsLogitsProcessor

            self._processors.append(NoBadWordsLogitsProcessor([[int(i) for i in word] for word in bad_words]))
        self._penalised = bool(request.presence_penalty or request.frequency_penalty)
        scale = max(request.repetition_penalty, 1.0 / request.repetition_penalty)
        self._noise = noise * scale
        self.plain = not (
            request.temperature
            or self._processors
            or self._penalised
            or self._bias
            or request.min_tokens
            or constraint is not None
        )

    @property
    def noisy(self) -> bool:
        """close_call is being told."""
        return self._noise > 0

    @property
    def context(self) -> NDArray[np.int64]:
        """int64[prompt + output]: a view."""
        return self._ids[: self._length]

    @property
    def position(self) -> int:
        """How many ids have been emitted."""
        return self._length - self._prompt_length

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The id at this position. logits: float32[vocabulary], left as they are."""
        scores = logits if self.plain else self._processed(logits)
        if self._request.temperature:
            return self._sampled(scores)
        token = int(scores.argmax())
        if self._noise:
            best = scores[token]
            near = np.count_nonzero(scores >= best - 2 * self._noise)
            self.close_call = bool(near > 1)
        return token

    def advance(self, token: int) -> None:
        """The id that was emitted here."""
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._length] = token
        self._length += 1
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.constraint is not None:
            self.constraint.advance(token)

    # ---- inside -------------------------------------------------------------------------------

    def _processed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        request = self._request
        row = torch.from_numpy(logits)[None].clone()
        for token, bias in self._bias.items():
            row[0, token] += bias
        if self._processors or self._penalised:
            ids = torch.from_numpy(self.context)[None]
            for processor in self._processors[:1] if request.repetition_penalty != 1.0 else ():
                row = processor(ids, row)
            for token, count in self._counts.items():
                row[0, token] -= request.presence_penalty + request.frequency_penalty * count
            for processor in self._processors[1:] if request.repetition_penalty != 1.0 else self._processors:
                row = processor(ids, row)
        scores: NDArray[np.float32] = row[0].numpy()
        if self.position < request.min_tokens:
            scores[self._ending] = -np.inf
        if self.constraint is not None and not np.isneginf(scores.max()):
            self.constraint.mask(scores)
        if np.isneginf(scores.max()):
            names = ("logit_bias", "bad_words", "min_tokens", "constraint")
            asked = " and ".join(name for name in names if getattr(request, name))
            raise InvalidRequestError(
                f"{asked}: no id of the {len(scores)} in the vocabulary is left to choose at output token "
                f"{self.position + 1}; at least one has to be allowed everywhere: forbid fewer ids"
            )
        return scores

    def _sampled(self, scores: NDArray[np.float32]) -> int:
        request = self._request
        scaled = scores.astype(np.float64)
        scaled /= request.temperature
        noise = self._noise / request.temperature
        kept, weights, near = truncate(scaled, request.top_k, request.top_p, request.min_p, noise)
        numbers = np.random.Generator(np.random.Philox(key=self._key, counter=[self.position, 0, 0, 0]))
        edges = np.cumsum(weights)
        target = numbers.random() * edges[-1]
        place = int(np.searchsorted(edges, target, side="right"))
        place = min(place, int(np.flatnonzero(weights)[-1]))
        if self._noise:
            shares = edges[max(place - 1, 0) : place + 1] / edges[-1]
            # the id's own borders; the last one's upper border and the first one's lower stay where they are
            self.close_call = near or bool((np.abs(shares - target / edges[-1]) <= _sway(shares, noise)).any())
        return int(kept[place])


def truncate(
    scores: Float64, top_k: int, top_p: float, min_p: float, noise: float = 0.0
) -> tuple[NDArray[np.int64], Float64, bool]:
    """The ids that top-k, top-p and min-p leave (ascending), their weights (relative probabilities), and whether
    scores within `noise` of these could leave others. scores: float64[vocabulary], overwritten.

    Each rule is applied to what the one before left, renormalised, as transformers' warpers do: top-k keeps all that
    equal the k-th; top-p the fewest likeliest whose mass reaches p; min-p those at least min_p times the likeliest.
    """
    best = scores.max()
    if top_k and top_k < len(scores):
        cut = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        kept = np.flatnonzero((scores >= cut) & (scores > -np.inf))
        near = bool(noise and np.count_nonzero(np.abs(scores - cut) <= 2 * noise) > 1)
    else:
        kept = np.flatnonzero(scores > -np.inf)
        near = False
    values = scores[kept]
    weights = np.exp(values - best)
    if top_p < 1.0:
        inside, close = _nucleus(weights, top_p, 2 * noise)
        near = near or close
        kept, weights = kept[inside], weights[inside]
    if min_p > 0.0:
        # weights are relative to the likeliest, which every rule keeps
        if noise:
            near = near or bool((np.abs(weights / min_p - 1.0) <= 2 * noise).any())
        inside = np.flatnonzero(weights >= min_p)
        kept, weights = kept[inside], weights[inside]
    return kept, weights, near


def _nucleus(weights: Float64, p: float, noise: float) -> tuple[NDArray[np.int64], bool]:
    """The places (ascending) of the fewest largest weights whose share reaches p, and whether it is close."""
    total = weights.sum()
    size = len(weights)
    count = min(256, size)
    while True:
        if count < size:
            places = np.argpartition(weights, size - count)[size - count :]
        else:
            places = np.arange(size)
        # of equals, the smaller id first
        order = places[np.lexsort((places, -weights[places]))]
        shares = np.cumsum(weights[order]) / total
        if shares[-1] >= p + noise or count == size:
            break
        count = min(size, count * 8)
    last = min(int(np.searchsorted(shares, p)), len(order) - 1)
    close = False
    if noise:
        around = shares[max(0, last - 1) : last + 1]
        close = bool((np.abs(around - p) <= _sway(around, noise / 2)).any())
        if last + 1 < len(order):
            close = close or weights[order[last + 1]] >= weights[order[last]] * (1.0 - noise)
    return np.sort(order[: last + 1]), bool(close)


def _sway(shares: Float64, noise: float) -> Float64:
    """How far the share of a set of ids moves when each score moves by up to `noise`: inside up, outside down."""
    odds = np.exp(2 * noise)
    return np.asarray(shares * odds / (1.0 + shares * (odds - 1.0)) - shares) + 1e-12


def logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """log P of `token` and of the `top` likeliest ids. logits: float32[vocabulary], the model's own."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    best: tuple[tuple[int, float], ...] = ()
    if top:
        size = len(scores)
        order = np.argpartition(scores, size - top)[size - top :] if top < size else np.arange(size)
        order = order[np.lexsort((order, -scores[order]))]
        best = tuple((int(i), float(scores[i])) for i in order)
    return TokenLogprob(token, float(scores[token]), best)
