"""StaticKeysValues: one tensor at a fixed address for the keys and values of the sequence that is worked on.

CUDA graphs are bound to addresses, so every step works in the same tensor. A sequence that has to make room for
another is copied out to a tensor of its own length, and back when its turn comes: calls run one after another, so that
happens once a call. Called by GraphForward. Imports torch.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentspec.engines.forward import KVCache, check_rows
from agentspec.errors import EngineError

__all__ = ["GraphCache", "StaticKeysValues", "buckets"]

_FIRST_BUCKET = 512


def buckets(most: int) -> list[int]:
    """512, 768, 1024, 1536, ... up to the first that holds `most` slots: a step reads a quarter too much on average."""
    found = [_FIRST_BUCKET]
    while found[-1] < most:
        last = found[-1]
        found.append(last * 3 // 2 if last & (last - 1) == 0 else last // 3 * 4)
    return found


class GraphCache(KVCache):
    """One sequence's keys and values: in the forward's space while they are worked on, else in a tensor of their own.

    parked: [layers, 2, >= length, kv_heads, head_dim], or None: nothing yet, or in the space
    """

    def __init__(self, space: StaticKeysValues) -> None:
        self._space = space
        self.parked: torch.Tensor | None = None
        self.length = 0
        self.step_start = 0
        self.tree = False

    @property
    def nbytes(self) -> int:
        """Of its own tensor, or what that would take; the space itself, at most twice the longest context, is extra."""
        if self._space.owner() is self:
            return self.length * self._space.token_bytes
        return 0 if self.parked is None else self.parked.nbytes

    def crop(self, length: int) -> None:
        if length < self.length:
            self.length = max(length, 0)
            self.tree = False
            if not self.length:
                self.parked = None

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        check_rows(rows, self.length - self.step_start)
        end = self.step_start + len(rows)
        held = self._space.kv if self._space.owner() is self else self.parked
        if list(rows) != list(range(len(rows))) and held is not None:
            index = torch.tensor([self.step_start + r for r in rows], device=held.device)
            held[:, :, self.step_start : end] = held.index_select(2, index)
        self.length = end
        self.tree = False


class StaticKeysValues:
    """The keys and values that graphs are bound to, and the cache whose tokens are in them.

    graphs: what is bound to the tensor at its present address; emptied when it moves
    kv: [layers, 2, slots, kv_heads, head_dim]. A slot that was never written holds zeros, because it is read, times 0.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, most: int) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        layers, heads, size = shape
        self.token_bytes = 2 * layers * heads * size * dtype.itemsize
        self.sizes = buckets(most)
        self.owner: Callable[[], GraphCache | None] = lambda: None
        self.graphs: dict[tuple[int, int], Any] = {}
        self.kv = self._allocate(0)

    def _allocate(self, slots: int) -> torch.Tensor:
        layers, heads, size = self._shape
        return torch.zeros(layers, 2, slots, heads, size, dtype=self._dtype, device=self._device)

    def bucket(self, position: int, room: int) -> int:
        """The smallest bucket with room for `room` slots from `position` on."""
        return self.sizes[min(bisect.bisect_left(self.sizes, position + room), len(self.sizes) - 1)]

    def hold(self, cache: GraphCache, slots: int) -> None:
        """Have the cache's tokens in the space, with at least so many slots.

        A change of trajectory copies two contexts; growing drops the graphs, which are captured again when needed.
        Raises EngineError where the device's memory doesn't hold it.
        """
        held = self.owner()
        if held is not cache or self.kv.shape[2] < slots:
            if held is not None:
                held.parked = self.kv[:, :, : held.length].clone() if held.length else None
            self.owner = lambda: None
            if self.kv.shape[2] < slots:
                self._grow(slots)
            if cache.parked is not None:
                self.kv[:, :, : cache.length] = cache.parked[:, :, : cache.length]
            cache.parked = None
            self.owner = weakref.ref(cache)

    def _grow(self, slots: int) -> None:
        roomy = bisect.bisect_left(self.sizes, max(slots, 2 * self.kv.shape[2]))
        exact = bisect.bisect_left(self.sizes, slots)
        self.graphs.clear()
        self.kv = self._allocate(0)
        for place in (min(roomy, len(self.sizes) - 1), exact):
            try:
                self.kv = self._allocate(self.sizes[place])
                return
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
        raise EngineError(
            f"a context of {slots} tokens needs {self.sizes[exact] * self.token_bytes >> 20} MB of working memory on "
            f"{self._device}, which isn't free; give a smaller kv_budget or max_tokens, or a smaller model"
        )
