"""Linears against their definition: every weight back bit for bit, float32's products, the same bits however many rows
go together, on however many threads and in whatever width of vectors."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.engines import linear
from agentspec.engines.linear import Linear
from agentspec.engines.team import Team, ThreadTeam, torch_team

ROOT = Path(__file__).parents[2]
QUANTISED = {
    "Q4_0": "levels4", "Q4_1": "levels4", "Q4_K": "levels4", "Q5_0": "levels8", "Q5_1": "levels8", "Q8_0": "levels8",
    "Q5_K": "levels8", "Q3_K": "levels8", "Q6_K": "levels8-16", "Q2_K": "levels8-16",
}  # fmt: skip
SCALES = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q6_K": (208,),
    "Q3_K": (108,),
}  # bytes of a block's float16


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def weight_as(form: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """A random weight as this format holds it, float32."""
    weight = random(outputs, inputs, seed=seed)
    if form == "bfloat16":
        return (weight.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if form == "float16":
        return weight.astype(np.float16).astype(np.float32)
    if form in QUANTISED:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        kind = GGMLQuantizationType[form]
        if form in SCALES:  # gguf reads these and doesn't write them
            rng = np.random.default_rng(seed)
            per_block, size = GGML_QUANT_SIZES[kind]
            blocks = rng.integers(0, 256, (outputs, inputs // per_block, size), dtype=np.uint8)
            for place in SCALES[form]:
                scales = rng.uniform(1e-4, 4e-4, blocks.shape[:2]).astype(np.float16)
                blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
            return np.asarray(quants.dequantize(blocks.reshape(outputs, -1), kind), np.float32)
        return np.asarray(quants.dequantize(quants.quantize(0.02 * weight, kind), kind), np.float32)
    return weight


def product(packed: Linear, x: np.ndarray, team: Team | None = None) -> np.ndarray:
    return packed(np.ascontiguousarray(x), np.full((len(x), packed.outputs), np.nan, np.float32), team)


def assert_is_product(packed: Linear, weight: np.ndarray, bias: Any = None) -> None:
    x = random(19, weight.shape[1], seed=9)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64)  # what float32's rounding is relative to
    wanted = wanted if bias is None else wanted + bias
    assert np.all(np.abs(product(packed, x) - wanted) <= 1e-5 * size + 1e-6)


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", *QUANTISED])
def test_a_weight_is_held_in_the_fewest_bits_and_comes_back_exactly(form: str) -> None:
    weight = weight_as(form, 100, 256)
    packed = Linear(weight)
    assert packed.format == QUANTISED.get(form, form)
    assert np.array_equal(packed.dense(), weight)
    bits = {"float32": 32, "bfloat16": 16, "float16": 16, "levels8-16": 12, "levels8": 10, "levels4": 6}[packed.format]
    assert packed.nbytes == -(-100 // linear.PANEL) * linear.PANEL * 256 * bits // 8
    assert_is_product(packed, weight)


@pytest.mark.fast
@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q6_K", "bfloat16", "float16"])
def test_products_are_those_of_float32(form: str) -> None:
    """One more output that fits no format makes float32 of the whole: the others keep their bits."""
    weight = weight_as(form, 64, 512)
    whole = Linear(np.concatenate([weight, random(1, 512, seed=4)]))
    assert whole.format == "float32" != Linear(weight).format
    for rows in (1, 7, 8, 9, 40):
        x = random(rows, 512, seed=rows)
        assert np.array_equal(product(Linear(weight), x), product(whole, x)[:, :64])


def groups(*parts: list[float]) -> np.ndarray:
    """One output whose groups of 32 inputs repeat these values."""
    return np.array([np.resize(np.array(part, np.float32), 32) for part in parts]).reshape(1, -1)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("weight", "form"),
    [
        (groups([0.0], [1.5]), "levels4"),
        (groups([-0.0, 0.0, 3.0]), "levels4"),
        (groups([-1.0, 0.5], [7.0, 7.25, 10.75]), "levels4"),
        (groups([0.0, 16.0, 1.0]), "levels8"),
        (groups([0.0, 255.0, 1.0]), "levels8"),
        (groups([0.0, 256.0, 1.0]), "bfloat16"),
        (groups([0.0, 256.5, 0.25]), "float16"),
        (groups([0.0, 300.0, 1.0], [0.0, 300.0, 1.0])[:, :48], "bfloat16"),
        (np.concatenate([groups([0.0, 60.0, 0.25])[:, :16], groups([0.0, 1000.0])[:, :16]], 1) + 0.5, "levels8-16"),
        (groups([1e30, 1e-30]), "float32"),
        (groups([1e-41, 0.0, 3e-41]), "float32"),  # below float32's smallest normal number
        (groups([np.inf, 1.0]), "bfloat16"),
        (groups([np.nan, 1.0]), "bfloat16"),
        (groups([3.4028235e38, -3.4028235e38]), "float32"),  # what lies between them is no float32
        (np.full((1, 33), 0.1, np.float32), "float32"),
        (np.ones((3, 1), np.float32), "bfloat16"),
    ],
)
def test_odd_weights_come_back_exactly(weight: np.ndarray, form: str) -> None:
    packed = Linear(weight)
    assert packed.format == form
    assert np.array_equal(packed.dense(), weight, equal_nan=True)
    if np.abs(weight).max() < 1e9:
        assert_is_product(packed, weight)


@pytest.mark.fast
@given(st.integers(1, 60), st.integers(1, 3), st.sampled_from([2, 16, 17, 256, 257]), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_any_grid_comes_back_exactly(outputs: int, many: int, levels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, levels, (outputs, many, 32))
    steps = rng.standard_normal((outputs, many, 1)).astype(np.float16).astype(np.float32)
    bases = (steps * rng.integers(-levels, 0, steps.shape)).astype(np.float32)
    weight = (numbers * steps + bases).astype(np.float32).reshape(outputs, -1)
    packed = Linear(weight)
    assert np.array_equal(packed.dense(), weight)
    if levels <= 16:
        assert packed.format == "levels4"


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 31), (47, 192), (49, 193), (96, 384), (200, 577)])
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_shapes_and_bias(form: str, outputs: int, inputs: int) -> None:
    weight, bias = weight_as(form, outputs, inputs), random(outputs, seed=2)
    assert_is_product(Linear(weight), weight)
    assert_is_product(Linear(weight, bias), weight, bias)


@pytest.fixture(scope="module")
def teams() -> list[Team | None]:
    return [None, torch_team(), ThreadTeam(3)]


@pytest.mark.fast
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "Q4_1", "Q8_0", "Q6_K"])
def test_a_rows_bits_depend_on_nothing_else(form: str, teams: list[Team | None]) -> None:
    packed = Linear(weight_as(form, 150, 512), random(150, seed=2))
    x = random(70, 512, seed=3)
    x[33] = 0.0
    x[50] *= 1e6
    whole = product(packed, x)
    rng = np.random.default_rng(5)
    for rows in (*range(1, 20), 31, 32, 33, 64, 70):
        begin = int(rng.integers(0, len(x) - rows + 1))
        for team in teams:
            assert np.array_equal(product(packed, x[begin : begin + rows], team), whole[begin : begin + rows]), rows


@pytest.mark.fast
def test_nothing_beyond_the_rows_is_read_or_written() -> None:
    packed = Linear(weight_as("Q4_1", 70, 96))
    for rows in range(1, 12):
        x, y = np.full((rows + 9, 96), np.nan, np.float32), np.full((rows + 9, 70), 7.0, np.float32)
        x[:rows] = random(rows, 96)
        packed(x[:rows], y[:rows])
        assert not np.isnan(y).any() and (y[rows:] == 7.0).all()


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_threads_of_its_own_stand_in_where_torchs_cant_be_had() -> None:
    """Also in a forked child, where the pool's threads are gone: the calling one does it all."""
    packed = Linear(random(300, 64))
    x = random(4, 64, seed=1)
    team = ThreadTeam(3)
    wanted = product(packed, x)
    assert np.array_equal(product(packed, x, team), wanted)
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(product(packed, x, team), wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.fast
def test_after_the_main_threads_end_the_calling_thread_does_it_alone() -> None:
    """Python's pools take no more work then, while other threads may still be in a call."""
    packed, x = Linear(random(300, 64)), random(4, 64, seed=1)
    team = ThreadTeam(3)
    team._pool.shutdown()
    assert np.array_equal(product(packed, x, team), product(packed, x))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("features", "found"), [("", "8 False"), ("+avx2,+f16c", "8 True"), ("+avx512f,-f16c", "16 False")]
)
def test_what_numba_compiles_for_counts_not_what_runs_it(features: str, found: str) -> None:
    code = "from agentspec.engines import vectors; print(vectors.LANES, vectors.HALVES)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert platform.machine() in ("arm64", "aarch64") or done.stdout.strip() == found


_OTHER_LANES = """
import sys
import llvmlite.binding as llvm
found = llvm.get_host_cpu_features()
found["avx512f"] = sys.argv[1] == "16"
llvm.get_host_cpu_features = lambda: found
from tests.engines import test_linear
print(test_linear.linear.LANES, test_linear.digest())
"""


def digest() -> str:
    """Of the products in all formats."""
    found = hashlib.sha256()
    for form in ("float32", "bfloat16", "float16", "Q4_1", "Q8_0", "Q6_K"):
        packed = Linear(weight_as(form, 150, 512), random(150, seed=2))
        for rows in (1, 2, 3, 5, 8, 21):
            found.update(product(packed, random(rows, 512, seed=rows)).tobytes())
    return found.hexdigest()


@pytest.mark.fast
def test_vectors_of_another_width_give_the_same_bits() -> None:
    other = "8" if linear.LANES == 16 else "16"
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_LANES, other], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [other, digest()]
