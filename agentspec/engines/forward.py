"""Forward: one model's verify forward and its KV caches. Called by LocalEngine only. Imports torch.

    forward = Forward.load(model)            # picks a path, proves it against the model itself, says which and why
    cache = forward.new_cache()
    forward.step(cache, prompt_ids, rows=0)                   # prefill
    logits = forward.step(cache, [last, d1, d2], rows=3)      # verify a chain
    cache.crop(cache.length - 1)                              # d2 was wrong
    logits = forward.step(cache, ids, rows=4, parents=[-1, 0, 0, 2])
    cache.keep([0, 2, 3])                                     # the accepted path of a tree

`StockForward` is transformers' own forward over its own cache: any architecture, any device. On the CPU in float32,
`forward_cpu.PackedForward` is faster and row-invariant: a row's logits, and the keys and values it leaves, are the
same bits however many rows go with it, in a chain, a tree or a prompt. Greedy decoding with drafts then equals plain
decoding by construction. On CUDA, `forward_cuda.GraphForward` replays captured graphs over static keys and values.
Where these can't be had, the stock path serves and `description` says why.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentspec.errors import EngineError, UnsupportedModelError

__all__ = ["Forward", "KVCache", "NotPackable", "StockForward", "paths_of", "windows_of"]

log = logging.getLogger(__name__)


class NotPackable(Exception):
    """Why a model can't have a faster path; told to the user in Forward.description."""


class KVCache(ABC):
    """Keys and values of one sequence's first `length` tokens. Made by Forward.new_cache, changed by Forward.step.

    A step over a tree leaves all its rows in the cache; `keep` must say which of them the sequence goes on with
    before the next step.
    """

    length: int = 0
    tree: bool = False  # the last step was one, and its rows wait for keep

    def check_settled(self) -> None:
        """Raises EngineError while a tree's rows wait for `keep`."""
        if self.tree:
            raise EngineError("step: the last step was a tree: cache.keep(rows) must say which rows to go on with")

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget everything from token `length` on; no effect where the cache is no longer than that.

        Raises UnsupportedModelError for a cache that can't go back (Forward.supports_drafts is False), except to 0.
        """

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Of the last step's rows keep these, a path from the cache's old end, in order; forget the others.

        Raises EngineError if `rows` don't ascend or don't belong to the last step.
        """


class Forward(ABC):
    """A model's forward.

    description:      which path runs, and why
    row_invariant:    a row's logits don't depend on the rows that go with it, bit for bit; so a draft can't change
                      what greedy decoding chooses. False: near-ties may be decided differently
    noise:            how far forwards of different widths may differ in a logit; 0 where row_invariant
    cache_kind:       "full", "sliding window", "recurrent" or "hybrid"
    supports_drafts:  the cache can be cropped: rejected tokens, and the end of an earlier call, can be taken back
    supports_trees:   step takes parents
    limits:           why one of the two is False; "" where both hold
    vocabulary:       width of the logits
    """

    model: Any
    description: str = ""
    row_invariant: bool = False
    noise: float = 0.0
    cache_kind: str = "full"
    supports_drafts: bool = True
    supports_trees: bool = True
    limits: str = ""
    vocabulary: int = 0

    @staticmethod
    def load(model: Any, *, fast: bool = True) -> Forward:
        """The best forward for a transformers causal LM in evaluation mode.

        The model is taken over: the fast paths repack its weights in place. fast=False: transformers' own forward.
        Costs some ten short forwards. Raises UnsupportedModelError for a model whose cached forward can't be trusted.
        """
        stock = StockForward(model)
        if not fast:
            return stock
        parameter = next(model.parameters())
        if parameter.device.type == "cuda":
            from agentspec.engines.forward_cuda import GraphForward

            try:
                return GraphForward(stock)
            except NotPackable as reason:
                stock.description += f" (no CUDA graphs: {reason})"
                log.info("%s: no CUDA graphs: %s", type(model).__name__, reason)
            return stock
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            return stock
        import numba

        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            stock.description += " (not packed: NUMBA_DISABLE_JIT is set)"
            return stock
        from agentspec.engines.forward_cpu import LeanForward, PackedForward

        reasons = []
        for path in (LeanForward, PackedForward):
            try:
                return path(stock)
            except NotPackable as reason:
                reasons.append(str(reason))
                log.info("%s: not %s: %s", type(model).__name__, path.name, reason)
        stock.description += f" (not packed: {reasons[-1]})"
        return stock

    @abstractmethod
    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache. capacity: tokens to make room for; it grows beyond them by itself."""

    @abstractmethod
    def step(
        self, cache: KVCache, ids: Sequence[int] | np.ndarray, rows: int = 1, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Append ids to the cache; return float32 [rows, vocabulary], the logits after the last `rows` of them.

        ids:     n >= 1 token ids
        rows:    0 to n; 0 for prompt tokens whose logits nobody reads
        parents: a tree: parents[i] < i is the row that row i follows, -1 the cache's end. None: a chain
        Raises EngineError for parents that are no tree, or while a tree's rows wait for `keep`;
        UnsupportedModelError for parents where supports_trees is False.
        """


def paths_of(parents: Sequence[int], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(paths int32 [n, n], depths int32 [n]): paths[i, :depths[i] + 1] are the rows from the root to row i.

    Raises EngineError unless there are n parents, each -1 or an earlier row.
    """
    if len(parents) != n:
        raise EngineError(f"parents: needed one for each of the {n} ids, got {len(parents)}")
    paths = np.zeros((n, n), np.int32)
    depths = np.zeros(n, np.int32)
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise EngineError(f"parents: row {i} needed -1 or an earlier row, got {parent}")
        depth = 0 if parent < 0 else int(depths[parent]) + 1
        if depth:
            paths[i, :depth] = paths[parent, :depth]
        paths[i, depth] = i
        depths[i] = depth
    return paths, depths


class _StockCache(KVCache):
    def __init__(self, forward: StockForward) -> None:
        self._forward = forward
        self._reset()

    def _reset(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self._forward.model.config)
        self.length = 0
        self.step_start = 0
        self.tree = False

    @property
    def nbytes(self) -> int:
        total = 0
        for layer in self.cache.layers:
            held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
            for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
                held += list(states.values()) if isinstance(states, dict) else [states]
            total += sum(t.nbytes for t in held if isinstance(t, torch.Tensor))
        return total

    def crop(self, length: int) -> None:
        if length >= self.length:
            return
        if length <= 0:
            self._reset()
            return
        if not self._forward.supports_drafts:
            raise UnsupportedModelError(f"the cache can't go back to {length} tokens: {self._forward.limits}")
        self.cache.crop(length - self.length)  # negative: that many tokens are removed
        self.length = length
        self.tree = False

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        check_rows(rows, self.length - self.step_start)
        end = self.step_start + len(rows)
        if list(rows) != list(range(len(rows))):
            index = torch.tensor([self.step_start + r for r in rows])
            layers: list[Any] = self.cache.layers
            for layer in layers:
                for states in (layer.keys, layer.values):
                    states[..., self.step_start : end, :] = states.index_select(-2, index.to(states.device))
        self.tree = False
        self.crop(end)


def check_rows(rows: Sequence[int], n: int) -> None:
    """Raises EngineError unless rows ascend within 0..n-1."""
    if any(b <= a for a, b in zip(rows, list(rows)[1:], strict=False)) or (
        len(rows) and not 0 <= rows[0] <= rows[-1] < n
    ):
        raise EngineError(f"keep: needed ascending rows of the last step's {n}, got {list(rows)}")


class StockForward(Forward):
    """transformers' forward over transformers' DynamicCache: the definition of right.

    probe_ids:     a few token ids, int64 [PROBE_TOKENS]
    probe_logits:  the model's logits for them, float32 [PROBE_TOKENS, vocabulary]
    tolerance:     how far from them other ways to the same logits may lie: 1e-4, or 2e-5 of the largest logit. Sums
                   in another order differ by that much: SmolLM2's largest is 32, and transformers' own logits for 40
                   tokens in one step or in forty are up to 2.6e-4 apart (2e-4 from those in float64)
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        parameter = next(model.parameters())
        self.device = parameter.device
        self._float32 = parameter.dtype == torch.float32
        self._one_by_one = False
        known = inspect.signature(model.forward).parameters
        # transformers renamed the argument; the old name warns on each call of a release that knows the new one
        self.cache_name = next(
            (n for n in ("cache", "past_key_values", "cache_params") if n in known), "past_key_values"
        )
        self._slices_logits = "logits_to_keep" in known
        self._takes_positions = "position_ids" in known
        self.description = "transformers' forward"
        self._describe_cache()
        self._prove()

    def new_cache(self, capacity: int = 0) -> KVCache:
        return _StockCache(self)

    @torch.inference_mode()
    def step(
        self, cache: KVCache, ids: Sequence[int] | np.ndarray, rows: int = 1, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        assert isinstance(cache, _StockCache)
        cache.check_settled()
        new = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(self.device)[None]
        n = new.shape[1]
        start = cache.length
        if self._one_by_one and start and n > 1:
            parts = [self.step(cache, ids[i : i + 1], int(i >= n - rows), parents) for i in range(n)]
            cache.step_start = start
            return torch.cat(parts)
        extra: dict[str, Any] = {}
        if parents is not None:
            if not self.supports_trees:
                raise UnsupportedModelError(f"this model takes no trees: {self.limits}")
            paths, depths = paths_of(parents, n)
            extra["attention_mask"] = self._tree_mask(paths, depths, start)
            positions = torch.from_numpy(depths.astype(np.int64)).to(self.device) + start
        else:
            positions = torch.arange(start, start + n, device=self.device)
        if self._takes_positions:
            extra["position_ids"] = positions[None]
        if self._slices_logits:
            extra["logits_to_keep"] = max(rows, 1)
        out = self.model(input_ids=new, use_cache=True, **{self.cache_name: cache.cache}, **extra)
        cache.step_start = start
        cache.length = start + n
        cache.tree = parents is not None
        logits: torch.Tensor = out.logits[0]
        return logits[logits.shape[0] - rows :].float()

    def _tree_mask(self, paths: np.ndarray, depths: np.ndarray, start: int) -> torch.Tensor:
        """[1, 1, n, start + n]: 0 where a row sees a slot, the dtype's lowest elsewhere."""
        n = len(depths)
        seen = torch.zeros(n, start + n, dtype=torch.bool)
        seen[:, :start] = True
        for i in range(n):
            seen[i, start + paths[i, : depths[i] + 1].astype(np.int64)] = True
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(n, start + n, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask.to(self.device)[None, None]

    def _describe_cache(self) -> None:
        from transformers import cache_utils

        layers = cache_utils.DynamicCache(config=self.model.config).layers
        recurrent = [isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin) for layer in layers]
        sliding = [bool(getattr(layer, "is_sliding", False)) for layer in layers]
        plain = [type(layer) is cache_utils.DynamicLayer for layer in layers]
        if any(recurrent) or getattr(self.model, "_is_stateful", False):
            self.cache_kind = "recurrent" if all(recurrent) else "hybrid"
            self.limits = f"its {self.cache_kind} state can't be taken back token by token"
        elif any(sliding):
            self.cache_kind = "sliding window"
            self.limits = "transformers drops keys and values as they leave the sliding window"
        elif not all(plain):
            self.limits = f"its cache ({type(layers[0]).__name__}) is of no kind known here"
        if self.limits:
            self.supports_drafts = self.supports_trees = False

    def _prove(self) -> None:
        """A few tokens through the cache must give the logits of one forward without it."""
        config = self.model.config.get_text_config()
        vocabulary = int(config.vocab_size)
        self.probe_ids = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)
        with torch.inference_mode():
            new = torch.from_numpy(self.probe_ids).to(self.device)[None]
            self.probe_logits = self.model(input_ids=new, use_cache=False).logits[0].float()
        self.vocabulary = int(self.probe_logits.shape[-1])
        # A cache that loses something changes logits by their own size; kernels for other widths by some 1e-5 of it,
        # which the tolerance below is for, and recurrent states, which carry it on, by ten times that.
        largest = float(self.probe_logits.abs().max())
        self.tolerance = max(1e-4, 2e-5 * largest) if self._float32 else 0.1 * largest
        allowed = 10 * self.tolerance if self._float32 else self.tolerance
        found = self._difference_in_steps()
        if not found <= allowed and not self.supports_drafts:
            # Some recurrent models go on from their state by single tokens only, and start anew with more.
            self._one_by_one = True
            found = self._difference_in_steps()
        if not found <= allowed:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its logits with a cache differ from those without by {found:.1e} "
                f"(needed {allowed:.1e}); it can't be run exactly here"
            )
        # In float32 a bound that holds; in bfloat16, where a bound would doubt every choice, twice what was seen.
        self.noise = self.tolerance if self._float32 else max(2 * found, 1e-3)
        if self.supports_trees and not self._proves_trees():
            self.supports_trees = False
            self.limits = "its attention takes no tree mask"

    def _difference_in_steps(self) -> float:
        cache = self.new_cache()
        try:
            parts = [self.step(cache, self.probe_ids[a:b], b - a) for a, b in ((0, 7), (7, 8), (8, PROBE_TOKENS))]
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its forward with a cache fails ({error}); it can't be run here"
            ) from error
        return self.difference(torch.cat(parts))

    def _proves_trees(self) -> bool:
        ids = self.probe_ids
        cache = self.new_cache()
        self.step(cache, ids[:6], 0)
        try:
            # row 1 is a wrong branch, rows 0 and 2 go on with the probe
            logits = self.step(cache, [ids[6], ids[0], ids[7]], 3, [-1, 0, 0])[[0, 2]]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            log.info("%s takes no tree mask: %s", type(self.model).__name__, error)
            return False
        cache.keep([0, 2])
        logits = torch.cat([logits, self.step(cache, ids[8:9], 1)])
        return float((logits - self.probe_logits[6:9]).abs().max()) <= self.tolerance

    def difference(self, logits: torch.Tensor) -> float:
        """The largest difference from the model's own logits on the probe's tokens (nan counts as infinite)."""
        found = float((logits - self.probe_logits).abs().max())
        return found if found == found else float("inf")


def windows_of(stock: StockForward) -> list[int]:
    """Each layer's sliding window in tokens, 0 for none. Raises NotPackable for layers that aren't plain attention."""
    from transformers import cache_utils

    config = stock.model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if stock.cache_kind not in ("full", "sliding window") or types - {"full_attention", "sliding_attention"}:
        raise NotPackable(f"its layers are {', '.join(sorted(types))} ({stock.cache_kind} cache)")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise NotPackable("its attention looks ahead")
    layers = cache_utils.DynamicCache(config=stock.model.config).layers
    if not layers or len(layers) != config.num_hidden_layers:
        raise NotPackable("its cache has not one entry a layer")
    known = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    if any(type(layer) not in known for layer in layers):
        raise NotPackable(
            f"its cache has layers of kind {', '.join(sorted({type(layer).__name__ for layer in layers}))}"
        )
    return [int(getattr(layer, "sliding_window", 0) or 0) for layer in layers]


# Enough that torch cuts a layer's elementwise work among threads, as it does in a prefill.
PROBE_TOKENS = 40
