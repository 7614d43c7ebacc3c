"""Forward: one model's verify forward and its KV caches. Called by LocalEngine only. Imports torch.

A step takes the ids that are new (prompt tokens, the last emitted token, a draft) and gives the logits of the
last rows of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["Forward", "KVCache"]


class KVCache:
    """Keys and values of one sequence's first `length` tokens."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.length = 0

    def crop(self, length: int) -> None:
        """Forget everything from token `length` on."""
        if length < self.length:
            self.cache.crop(length - self.length)  # negative: that many tokens are removed
            self.length = length

    @property
    def nbytes(self) -> int:
        return sum(
            t.nbytes
            for layer in self.cache.layers
            for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if t is not None
        )


class Forward:
    """The model's forward. rows of logits are float32 on the model's device."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.description = "transformers' forward"
        # transformers renamed the argument; the old name warns on each call of a release that knows the new one
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    def new_cache(self) -> KVCache:
        from transformers import DynamicCache

        return KVCache(DynamicCache(config=self.model.config))

    @torch.inference_mode()
    def step(self, cache: KVCache, ids: np.ndarray, rows: int = 1, parents: Sequence[int] | None = None) -> torch.Tensor:
        """Append ids (int32[n]) to the cache; returns float32[rows, vocabulary], the logits after the last `rows`."""
        new = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(self.device)[None]
        positions = torch.arange(cache.length, cache.length + new.shape[1], device=self.device)
        out = self.model(
            input_ids=new,
            **{self._cache_name: cache.cache},
            use_cache=True,
            position_ids=positions[None],
            logits_to_keep=rows,
        )
        cache.length += new.shape[1]
        return out.logits[0].float()
