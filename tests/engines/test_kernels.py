"""The attention kernel against its definition in float64, and the same bits however the work is cut up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.engines import kernels
from agentspec.engines.forward import paths_of
from agentspec.engines.team import Team, torch_team

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]

CHAIN = np.zeros((0, 0), np.int32)


class Case:
    """Random queries, keys and values for `tokens` tokens; heads share kv heads in groups."""

    def __init__(self, tokens: int, kv_heads: int, group: int, dim: int, value_dim: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.query = 3 * rng.standard_normal((tokens, kv_heads * group, dim), dtype=np.float32)
        self.key = rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)
        self.value = rng.standard_normal((tokens, kv_heads, value_dim), dtype=np.float32)
        blocks = tokens // kernels.BLOCK + 2
        width = -(-value_dim // kernels.VALUE_STEP) * kernels.VALUE_STEP
        self.keys = np.zeros((blocks, kv_heads, dim, kernels.BLOCK), np.float32)
        self.values = np.zeros((blocks, kv_heads, kernels.BLOCK, width), np.float32)
        kernels.write_slots(self.keys, self.values, self.key, self.value, 0)

    def attend(
        self, start: int, query: np.ndarray, window: int = 0, paths: np.ndarray = CHAIN,
        depths: np.ndarray | None = None, team: Team | None = None,
    ) -> np.ndarray:  # fmt: skip
        if depths is None:
            depths = np.arange(len(query), dtype=np.int32)
        out = np.full((*query.shape[:2], self.value.shape[2]), np.nan, np.float32)
        scale = np.float32(query.shape[2] ** -0.5)
        kernels.Attention(start, paths, depths, team)(query, self.keys, self.values, out, window, scale)
        return out

    def definition(self, window: int) -> np.ndarray:
        """softmax(q k / sqrt(d)) v over the last `window` positions of each row, in float64."""
        n, heads, dim = self.query.shape
        group = heads // self.key.shape[1]
        key, value = (np.repeat(x.astype(np.float64), group, axis=1) for x in (self.key, self.value))
        scores = np.einsum("ihd,jhd->hij", self.query.astype(np.float64), key) / np.sqrt(dim)
        i, j = np.arange(n)[:, None], np.arange(n)[None]
        scores[:, (j > i) | ((j <= i - window) if window else False)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, value)


shapes = st.sampled_from([(1, 1, 4, 4), (2, 3, 16, 16), (3, 3, 64, 64), (1, 7, 20, 12), (2, 4, 80, 48)])
windows = st.sampled_from([0, 0, 1, 37, 64, 300])


@settings(max_examples=25, deadline=None)
@given(shapes, windows, st.integers(1, 700), st.integers(0, 99))
def test_it_is_the_definition(shape: tuple[int, ...], window: int, tokens: int, seed: int) -> None:
    case = Case(tokens, *shape, seed)
    assert np.abs(case.attend(0, case.query, window) - case.definition(window)).max() < 2e-5


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    case = Case(200, 1, 1, 16, 16, 0)
    case.query *= 100
    found = case.attend(0, case.query)
    assert np.isfinite(found).all()
    assert np.abs(found - case.definition(0)).max() < 1e-3


def test_what_lies_beyond_a_row_does_not_matter() -> None:
    case = Case(300, 2, 3, 16, 16, 1)
    wanted = case.attend(128, case.query[128:140])
    kernels.write_slots(case.keys, case.values, case.key[:100] * 1e6, case.value[:100] * 1e6, 140)
    assert np.array_equal(case.attend(128, case.query[128:140]), wanted)


@settings(max_examples=25, deadline=None)
@given(shapes, windows, st.integers(1, 600), st.data())
def test_a_row_has_the_same_bits_in_any_step(shape: tuple[int, ...], window: int, tokens: int, data: Any) -> None:
    case = Case(tokens, *shape, 2)
    whole = case.attend(0, case.query, window)
    for _ in range(6):
        start = data.draw(st.integers(0, tokens - 1))
        width = data.draw(st.integers(1, min(40, tokens - start)))
        assert np.array_equal(case.attend(start, case.query[start : start + width], window), whole[start:][:width])


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """Three of torch's threads, and no work too small for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(kernels, "_WORTH_SHARING", 0)
    made = torch_team()
    if made is None:
        torch.set_num_threads(before)
        pytest.skip("this torch's threads can't be had")
    yield made
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 33, 150])
def test_a_team_computes_the_same_bits(team: Team, rows: int, window: int) -> None:
    case = Case(700, 3, 3, 32, 32, rows)
    for start in (0, 63, 300, 550):
        query = case.query[start : start + rows]
        alone = case.attend(start, query, window)
        for _ in range(3):
            assert np.array_equal(case.attend(start, query, window, team=team), alone)


def test_a_team_computes_the_same_tree(team: Team) -> None:
    rng = np.random.default_rng(3)
    case = Case(700, 2, 2, 16, 16, 4)
    for start in (10, 250, 640):
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(33)]
        paths, depths = paths_of(parents, 33)
        query = case.query[start : start + 33]
        alone = case.attend(start, query, 0, paths, depths)
        assert np.array_equal(case.attend(start, query, 0, paths, depths, team), alone)


def test_memory_that_was_freed_is_not_read() -> None:
    """In a process whose malloc overwrites what is freed and unmaps what is large, the definition holds as before."""
    code = (
        "from tests.engines.test_kernels import *\n"
        "for tokens, start in ((101, 100), (304, 300), (300, 0)):\n"
        "    case = Case(tokens, 2, 4, 64, 64, 0)\n"
        "    found = case.attend(start, case.query[start:])\n"
        "    assert np.abs(found - case.definition(0)[start:]).max() < 2e-5, (tokens, start)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
