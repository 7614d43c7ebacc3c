"""Drafts of a batch -> the arrays of one verify step, all of one width. May import numpy and numba only.

Row b of a batch: node 0 is the request's last token (the root), nodes 1..k its draft, the rest is padding:
the root's token again, reachable by no link, so that it is never accepted, and attending causally, so that
it is valid whatever the attention backend does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from agentspec.drafting import Draft

__all__ = ["VerifyTree", "pack", "places_in_full_mask"]


class VerifyTree:
    """The arrays, allocated once for the largest batch; `rows` and `width` say how much of them is in use.

    tokens, next_token, next_sibling, depth: int64[rows, width]. next_token is a node's first child,
    next_sibling the next child of its parent, -1: none. mask: bool[rows, width, width], node i sees node j.
    """

    __slots__ = ("_mask", "_nodes", "rows", "width")

    def __init__(self, max_rows: int, max_width: int) -> None:
        self._nodes = np.zeros((4, max_rows * max_width), dtype=np.int64)
        self._mask = np.zeros(max_rows * max_width * max_width, dtype=np.bool_)
        self.rows = 0
        self.width = 0

    @property
    def nodes(self) -> np.ndarray:
        """int64[4, rows * width]: tokens, next_token, next_sibling and depth, for one transfer to the
        device."""
        return self._nodes[:, : self.rows * self.width]

    @property
    def tokens(self) -> np.ndarray:
        return self.nodes[0].reshape(self.rows, self.width)

    @property
    def next_token(self) -> np.ndarray:
        return self.nodes[1].reshape(self.rows, self.width)

    @property
    def next_sibling(self) -> np.ndarray:
        return self.nodes[2].reshape(self.rows, self.width)

    @property
    def depth(self) -> np.ndarray:
        return self.nodes[3].reshape(self.rows, self.width)

    @property
    def mask(self) -> np.ndarray:
        return self._mask[: self.rows * self.width * self.width].reshape(self.rows, self.width, self.width)


def pack(
    tree: VerifyTree, roots: Sequence[int], drafts: Sequence[Draft], width: int, vocabulary: int
) -> list[tuple[int, str]]:
    """Fill `tree` with one row for each root and draft; drafts hold at most width - 1 nodes.

    Returns (row, what is wrong) for drafts that no verifier could take; their rows hold no draft.
    """
    tree.rows, tree.width = len(roots), width
    refused: list[tuple[int, str]] = []
    for row, (root, draft) in enumerate(zip(roots, drafts, strict=True)):
        fault = _pack_row(tree._nodes, tree._mask, row, width, root, draft.tokens, draft.parents, vocabulary)
        if fault:
            _pack_row(tree._nodes, tree._mask, row, width, root, _NONE, _NONE, vocabulary)
            refused.append((row, _FAULTS[fault]))
    return refused


def places_in_full_mask(lengths: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """Where a batch's trees lie in the mask that SGLang's GPU backends take, and that mask's size.

    The full mask holds for each request [width, length + width] flattened, one request after another; columns
    below `length` are the context, which every node sees. lengths: int64[rows], tokens in the KV cache before
    the step. Returns int64[rows * width * width], the place of each tree entry in order. O(rows * width^2).
    """
    sizes = width * (lengths + width)
    starts = np.cumsum(sizes) - sizes
    line = np.arange(width).reshape(1, width, 1)
    column = np.arange(width).reshape(1, 1, width)
    per_row = lengths.reshape(-1, 1, 1)
    places = starts.reshape(-1, 1, 1) + line * (per_row + width) + per_row + column
    return places.reshape(-1), int(sizes.sum())


_NONE = np.empty(0, dtype=np.int32)
_FAULTS = (
    "",
    "more nodes than the step holds",
    "an id outside the vocabulary",
    "a parent that doesn't come before its child",
    "two children of one node with the same token",
)


@njit(
    "int64(int64[:, ::1], boolean[::1], int64, int64, int64, int32[::1], int32[::1], int64)",
    nogil=True,
    cache=True,
)
def _pack_row(
    nodes: Any, mask: Any, row: int, width: int, root: int, tokens: Any, parents: Any, vocabulary: int
) -> int:
    """One row, O(width^2): a node's mask is its parent's and itself; children are linked in their order.

    Returns 0, or an index into _FAULTS (the row is then half filled).
    """
    base = row * width
    square = base * width
    if len(tokens) >= width:
        return 1
    for node in range(width):
        nodes[0, base + node] = root
        nodes[1, base + node] = -1
        nodes[2, base + node] = -1
        nodes[3, base + node] = node  # padding: a causal chain
        for other in range(width):
            mask[square + node * width + other] = other <= node
    for i in range(len(tokens)):
        node = i + 1
        parent = parents[i] + 1
        if tokens[i] < 0 or tokens[i] >= vocabulary:
            return 2
        if parent < 0 or parent >= node:
            return 3
        nodes[0, base + node] = tokens[i]
        nodes[3, base + node] = nodes[3, base + parent] + 1
        for other in range(width):
            mask[square + node * width + other] = mask[square + parent * width + other]
        mask[square + node * width + node] = True
        sibling = nodes[1, base + parent]
        if sibling == -1:
            nodes[1, base + parent] = node
            continue
        while True:
            if nodes[0, base + sibling] == tokens[i]:
                return 4
            if nodes[2, base + sibling] == -1:
                break
            sibling = nodes[2, base + sibling]
        nodes[2, base + sibling] = node
    return 0
