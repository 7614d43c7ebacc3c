"""Vectors: the LLVM terms that kernels.py and linear.py are written in where numba's loops over arrays would keep sums in
memory. Imports numpy and numba.

A vector is one register of this machine: 16 floats with AVX-512, else 8. Nothing computed here depends on which.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined,call-arg,no-any-return,return-value"
# (LLVM's builders and numba's intrinsics are untyped, and an intrinsic takes one argument less than it is written with)

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "F32",
    "HALVES",
    "I32",
    "I64",
    "INTEGERS",
    "LANES",
    "VECTOR",
    "every",
    "exp_of",
    "fma",
    "folded",
    "pointer_to",
    "splat",
    "take_number",
]


def _features() -> dict[str, bool]:
    """What the processor that numba compiles for can do: this one, if NUMBA_CPU_FEATURES names no other."""
    given = numba.config.CPU_FEATURES
    if given is None:
        return dict(llvmlite.binding.get_host_cpu_features())
    return {feature[1:]: feature[0] == "+" for feature in given.split(",") if feature}


LANES = 16 if _features().get("avx512f") else 8
# Whether it turns float16 into float32 by itself.
HALVES = bool(_features().get("f16c")) or (platform.machine() in ("arm64", "aarch64"))
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)

# exp(x) for x <= 0, after Cephes' expf: x = k ln 2 + r, a polynomial of degree 6 in r, then the exponent bits.
# numpy's exp is a scalar call into libm here, which costs as much as the rest of the kernel.
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to the nearest integer
_SMALLEST = np.float32(-87.0)  # exp below this is subnormal; its weight is 0 to any float32 sum


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def splat(builder: Any, value: Any) -> Any:
    """A vector of this float in all lanes."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))


def every(value: Any) -> Any:
    """A vector of this constant in all lanes."""
    return ir.Constant(VECTOR, [float(value)] * LANES)


def exp_of(builder: Any, x: Any) -> Any:
    """exp of a vector of values <= 0; 0 below _SMALLEST."""
    tiny = builder.fcmp_ordered("<", x, every(_SMALLEST))
    x = builder.select(tiny, every(_SMALLEST), x)
    k = builder.fsub(fma(builder, x, every(_LOG2E), every(_ROUND)), every(_ROUND))
    r = fma(builder, k, every(-_LN2_HIGH), x)
    r = fma(builder, k, every(-_LN2_LOW), r)
    p = every(_C0)
    for c in (_C1, _C2, _C3, _C4, _C5):
        p = fma(builder, p, r, every(c))
    p = builder.fadd(fma(builder, p, builder.fmul(r, r), r), every(1.0))
    exponent = builder.add(builder.fptosi(k, INTEGERS), ir.Constant(INTEGERS, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(INTEGERS, [23] * LANES)), VECTOR)
    return builder.select(tiny, every(0.0), builder.fmul(p, power))


def folded(builder: Any, vectors: list[Any], join: Any) -> Any:
    """Join 64 values by halves (64, 32, ..., 1), the same order whatever the vectors' width."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [join(a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
    (last,) = vectors
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                last, last, ir.Constant(ir.VectorType(I32, width), list(range(begin, begin + width)))
            )
            for begin in (0, width)
        )
        last = join(low, high)
    return builder.extract_element(last, ir.Constant(I32, 0))


@intrinsic
def pointer_to(typing_context: Any, address: Any) -> Any:
    """An integer as the pointer that it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def take_number(typing_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, atomically; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", where, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), generate
