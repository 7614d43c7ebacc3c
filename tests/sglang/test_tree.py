"""Packed verify trees against a definition written out plainly, and what no verifier may be given."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_agentspec.tree import VerifyTree, pack, places_in_full_mask

from agentspec.drafting import Draft

pytestmark = pytest.mark.fast


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, 9))
    taken: set[tuple[int, int]] = set()
    tokens, parents = [], []
    for node in range(count):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.integers(0, 19))
        while (parent, token) in taken:
            token += 1
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    return Draft(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.ones(count, np.float32),
        np.zeros(count, np.int8),
    )


@settings(deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=4), st.integers(10, 14))
def test_packed_tree_is_the_drafts(given_drafts: list[Draft], width: int) -> None:
    tree = VerifyTree(4, 16)
    roots = [1000 + i for i in range(len(given_drafts))]
    assert pack(tree, roots, given_drafts, width, 5000) == []
    for row, (root, draft) in enumerate(zip(roots, given_drafts, strict=True)):
        count = len(draft)
        parents = [-1, *(int(p) + 1 for p in draft.parents)]
        assert tree.tokens[row, : count + 1].tolist() == [root, *draft.tokens.tolist()]
        # links: every child is reached from its parent, once, in order; padding from nowhere
        reached = []
        for node in range(count + 1):
            child = int(tree.next_token[row, node])
            children = []
            while child != -1:
                children.append(child)
                child = int(tree.next_sibling[row, child])
            assert children == [n for n in range(1, count + 1) if parents[n] == node]
            reached += children
        assert sorted(reached) == list(range(1, count + 1))
        assert (tree.next_token[row, count + 1 :] == -1).all()
        # mask and depth: a node sees its ancestors and itself
        for node in range(count + 1):
            sees, at = {node}, node
            while parents[at] >= 0:
                at = parents[at]
                sees.add(at)
            assert set(np.flatnonzero(tree.mask[row, node]).tolist()) == sees
            assert tree.depth[row, node] == len(sees) - 1
        for node in range(count + 1, width):
            assert tree.depth[row, node] == node and tree.mask[row, node, : node + 1].all()


@pytest.mark.parametrize(
    ("tokens", "parents", "fault"),
    [
        ([7, 7], [-1, -1], "same token"),
        ([1, 2], [-1, 1], "parent"),
        ([1], [-2], "parent"),
        ([100], [-1], "vocabulary"),
        ([-1], [-1], "vocabulary"),
        ([1] * 8, list(range(-1, 7)), "more nodes"),
    ],
)
def test_what_no_verifier_may_be_given_is_left_out(tokens: list[int], parents: list[int], fault: str) -> None:
    n = len(tokens)
    bad = Draft(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.int8))
    good = Draft.chain([3, 4])
    tree = VerifyTree(2, 8)
    [(row, said)] = pack(tree, [50, 60], [bad, good], 8, 100)
    assert row == 0 and fault in said
    assert (tree.next_token[0] == -1).all() and (tree.tokens[0] == 50).all()
    assert tree.tokens[1, :3].tolist() == [60, 3, 4]


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 5), st.randoms())
def test_full_mask_is_the_one_that_stock_ngram_builds(lengths: list[int], width: int, source: Random) -> None:
    """As `ngram_worker.py` writes it: per request [ones(width, length), tree], flattened and joined."""
    trees = np.array([source.random() < 0.5 for _ in range(len(lengths) * width * width)])
    each = trees.reshape(len(lengths), width, width)
    stock = [np.concatenate([np.ones((width, n), bool), t], 1).ravel() for n, t in zip(lengths, each, strict=True)]
    places, total = places_in_full_mask(np.array(lengths), width)
    mask = np.ones(total, bool)
    mask[places] = trees
    assert np.array_equal(mask, np.concatenate(stock))
