"""What a transformer layer does between its linears, on the CPU in float32, row by row: attention over a blocked KV
cache, norms, rotary positions, the gated activation. A row's result depends on nothing but that row and its keys.

Called by forward_cpu.py only. Imports numpy and numba, no torch.

Why not torch's `scaled_dot_product_attention`: its matrix products round differently with the number of query rows
(below four) and of keys (any, within the last 512), so the bits of a row depend on the draft that travels with it,
and a tree's rows can't equal the chain's, whose keys lie elsewhere. Here a row walks its own keys by their *logical
position*, in blocks of 64 that begin at multiples of 64, whatever slot of the cache holds them: the same
instructions in the same order for 1 row or 500, for a chain or a tree. It also reads only the keys that exist, and
each key once for all the query heads that share it.

The layout, one pair of arrays per layer:

    keys    float32 [blocks, kv_heads, head_dim, 64]     transposed within a block: 64 scores at a time
    values  float32 [blocks, kv_heads, 64, value_dim]    value_dim filled up with zeros to a multiple of 16

Slot t lies in block t // 64 at t % 64. Everything beyond the written slots is finite (zeros, or what was cropped):
it is multiplied by a probability of exactly 0.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined,call-arg,no-any-return,return-value"
# (LLVM's builders and numba's intrinsics are untyped, and an intrinsic takes one argument less than it is written with)

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from agentspec.engines.team import Team
from agentspec.engines.vectors import (
    F32,
    I64,
    LANES,
    VECTOR,
    every,
    exp_of,
    fma,
    folded,
    pointer_to,
    splat,
    take_number,
)
from agentspec.memory.kernels import kernel

__all__ = ["BLOCK", "VALUE_STEP", "Attention", "add_norm", "gate", "move_slots", "norm", "rotate_heads", "write_slots"]

Array = NDArray[Any]

BLOCK = 64
VALUE_STEP = 16  # value_dim is a multiple of it
SEGMENT = 4  # blocks: 256 keys
# Multiply-adds below which waking a team costs more than it saves (a few microseconds' worth).
_WORTH_SHARING = 200_000
# Rows of one task. More read a block of keys less often, fewer share the work more evenly.
_ROWS_EACH = 16

_MASKED = np.float32(-3.0e38)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)

# "contract" lets a multiply and an add become one FMA; nothing may be reassociated, so the order written is the order
# computed. What lies in a vector and what in a tail is the same for each row, as each goes through the same loops.
_FLAGS: dict[str, Any] = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}

# The shapes that the signatures below are made of: float32 of 1 to 4 dimensions, row after row.
_V, _M, _C, _T = "float32[::1]", "float32[:, ::1]", "float32[:, :, ::1]", "float32[:, :, :, ::1]"
_PATHS, _DEPTHS = "int32[:, ::1]", "int32[::1]"


_ACROSS = 4 if LANES == 16 else 2  # vectors a tile of four rows is wide: its sums fill half the registers


def _at(builder: Any, address: Any, kind: Any, *indexes: Any) -> Any:
    """The pointer to `kind` at an address plus a number of floats, the sum of `indexes`."""
    for index in indexes:
        address = builder.add(address, builder.mul(index, ir.Constant(I64, 4)))
    return builder.inttoptr(address, kind.as_pointer())


def _multiply_add(builder: Any, sums: Any, factors: Any, vectors: Any) -> None:
    """sums[r][v] += factors[r] * vectors[v]: one FMA each, in registers (LLVM promotes what is allocated here)."""
    for row, factor in zip(sums, factors, strict=True):
        for slot, vector in zip(row, vectors, strict=True):
            builder.store(fma(builder, factor, vector, builder.load(slot)), slot)


@intrinsic
def _scores(typing_context: Any, q0: Any, q1: Any, q2: Any, q3: Any, keys: Any, s: Any, head_dim: Any) -> Any:
    """s[0..3] = the products of four queries with the block's 64 keys, each summed over head_dim in order.

    Addresses of: four queries float32 [head_dim], keys float32 [head_dim, 64], s float32 [4, 64].
    Written in LLVM's terms because four rows by sixteen keys stay in registers over the whole of head_dim: over twice
    as fast as what comes of loops over arrays.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *queries, keys, s, head_dim = args
        for begin in range(0, BLOCK, _ACROSS * LANES):
            sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(_ACROSS)] for _ in range(4)]
            for row in sums:
                for slot in row:
                    builder.store(ir.Constant(VECTOR, [0.0] * LANES), slot)
            with cgutils.for_range(builder, head_dim) as loop:
                place = builder.mul(loop.index, ir.Constant(I64, BLOCK))
                vectors = [
                    builder.load(_at(builder, keys, VECTOR, place, ir.Constant(I64, begin + v * LANES)), align=4)
                    for v in range(_ACROSS)
                ]
                _multiply_add(
                    builder,
                    sums,
                    [splat(builder, builder.load(_at(builder, q, F32, loop.index))) for q in queries],
                    vectors,
                )
            for r, row in enumerate(sums):
                for v, slot in enumerate(row):
                    target = _at(builder, s, VECTOR, ir.Constant(I64, r * BLOCK + begin + v * LANES))
                    builder.store(builder.load(slot), target, align=4)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i), generate


@intrinsic
def _accumulate(
    typing_context: Any, s: Any, values: Any, o0: Any, o1: Any, o2: Any, o3: Any, factors: Any, width: Any
) -> Any:
    """out = out * factor + weights @ values for four rows, each summed over the block's 64 keys in order.

    Addresses of: s float32 [4, 64], values float32 [64, width], four rows float32 [width], factors float32 [4].
    width is a multiple of 16.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        s, values, *outs, factors, width = args

        def columns(first: Any, count: Any, across: int) -> None:
            """`count` times `across` vectors from column `first` on."""
            with cgutils.for_range(builder, count) as groups:
                begin = builder.add(first, builder.mul(groups.index, ir.Constant(I64, across * LANES)))
                sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(across)] for _ in range(4)]
                for r, (row, out) in enumerate(zip(sums, outs, strict=True)):
                    factor = splat(builder, builder.load(_at(builder, factors, F32, ir.Constant(I64, r))))
                    for v, slot in enumerate(row):
                        old = builder.load(_at(builder, out, VECTOR, begin, ir.Constant(I64, v * LANES)), align=4)
                        builder.store(builder.fmul(old, factor), slot)
                with cgutils.for_range(builder, ir.Constant(I64, BLOCK)) as loop:
                    place = builder.add(builder.mul(loop.index, width), begin)
                    vectors = [
                        builder.load(_at(builder, values, VECTOR, place, ir.Constant(I64, v * LANES)), align=4)
                        for v in range(across)
                    ]
                    weights = [
                        splat(builder, builder.load(_at(builder, s, F32, loop.index, ir.Constant(I64, r * BLOCK))))
                        for r in range(4)
                    ]
                    _multiply_add(builder, sums, weights, vectors)
                for row, out in zip(sums, outs, strict=True):
                    for v, slot in enumerate(row):
                        target = _at(builder, out, VECTOR, begin, ir.Constant(I64, v * LANES))
                        builder.store(builder.load(slot), target, align=4)

        whole = builder.udiv(width, ir.Constant(I64, _ACROSS * LANES))
        done = builder.mul(whole, ir.Constant(I64, _ACROSS * LANES))
        columns(ir.Constant(I64, 0), whole, _ACROSS)
        rest = builder.udiv(builder.sub(width, done), ir.Constant(I64, VALUE_STEP))
        columns(done, rest, VALUE_STEP // LANES)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i, i), generate


def _block(builder: Any, address: Any) -> list[Any]:
    """Pointers to the vectors of 64 floats."""
    return [_at(builder, address, VECTOR, ir.Constant(I64, begin)) for begin in range(0, BLOCK, LANES)]


@intrinsic
def _gated(typing_context: Any, g: Any, u: Any, out: Any, width: Any) -> Any:
    """out = silu(g) * u over `width` floats at these addresses, a multiple of a vector's.

    sigmoid(g) is 1 / (1 + e^-g); for g < 0 as e^g / (1 + e^g), so that the exponent is never positive.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *addresses, width = args
        with cgutils.for_range(builder, builder.udiv(width, ir.Constant(I64, LANES))) as loop:
            place = builder.mul(loop.index, ir.Constant(I64, LANES))
            g, u, out = (_at(builder, address, VECTOR, place) for address in addresses)
            x = builder.load(g, align=4)
            positive = builder.fcmp_ordered(">=", x, every(_ZERO))
            e = exp_of(builder, builder.select(positive, builder.fneg(x), x))
            share = builder.fdiv(builder.select(positive, every(_ONE), e), builder.fadd(e, every(_ONE)))
            builder.store(builder.fmul(builder.fmul(x, share), builder.load(u, align=4)), out, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _softmax(typing_context: Any, s: Any, maximum: Any) -> Any:
    """64 scores at an address to exp(s - m) in place, m the larger of `maximum` and theirs: (m, the sum of them)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        pointers = _block(builder, args[0])
        scores = [builder.load(pointer, align=4) for pointer in pointers]
        m = larger(folded(builder, scores, larger), args[1])
        top = splat(builder, m)
        weights = [exp_of(builder, builder.fsub(score, top)) for score in scores]
        for pointer, weight in zip(pointers, weights, strict=True):
            builder.store(weight, pointer, align=4)
        return context.make_tuple(builder, signature.return_type, [m, folded(builder, weights, builder.fadd)])

    return types.UniTuple(types.float32, 2)(types.int64, types.float32), generate


@kernel([f"int64({_V})", f"int64({_M})"], **_FLAGS)
def _address(array: Any) -> int:
    return np.int64(array.ctypes.data)


@kernel(f"UniTuple(float32, 2)({_V}, int64, int64, float32)", **_FLAGS)
def _weights(s: Any, first: int, last: int, maximum: Any) -> Any:
    """Scores to weights exp(s - m) in place, 0 outside [first, last). Returns (the new running maximum m, their sum)."""
    for j in range(last, BLOCK):
        s[j] = _MASKED
    for j in range(first):
        s[j] = _MASKED
    return _softmax(_address(s), maximum)


@kernel(f"void({_T}, {_T}, float32[:, :, :], float32[:, :, :], int64)", **_FLAGS)
def write_slots(keys: Any, values: Any, new_keys: Any, new_values: Any, start: int) -> None:
    """Write float32 [rows, kv_heads, dim] keys and values to the slots from `start` on."""
    for i in range(new_keys.shape[0]):
        block, j = (start + i) // BLOCK, (start + i) % BLOCK
        for head in range(new_keys.shape[1]):
            for d in range(new_keys.shape[2]):
                keys[block, head, d, j] = new_keys[i, head, d]
            for d in range(new_values.shape[2]):
                values[block, head, j, d] = new_values[i, head, d]


@kernel("void(int64[:, ::1], int64, int64[::1])", **_FLAGS)
def move_slots(layers: Any, start: int, rows: Any) -> None:
    """Copy slot start + rows[i] to start + i for each i in order; rows ascend, so nothing is lost on the way.

    layers: of each (address of the keys, of the values, blocks, kv_heads, head_dim, value_dim); zeros: it has none
    """
    for layer in range(layers.shape[0]):
        blocks, heads, dim, value_dim = layers[layer, 2], layers[layer, 3], layers[layer, 4], layers[layer, 5]
        keys = carray(pointer_to(layers[layer, 0]), (blocks, heads, dim, BLOCK), np.float32)
        values = carray(pointer_to(layers[layer, 1]), (blocks, heads, BLOCK, value_dim), np.float32)
        for i in range(rows.shape[0]):
            source, target = start + rows[i], start + i
            if source != target and blocks > 0:
                keys[target // BLOCK, :, :, target % BLOCK] = keys[source // BLOCK, :, :, source % BLOCK]
                values[target // BLOCK, :, target % BLOCK] = values[source // BLOCK, :, source % BLOCK]


@kernel(f"void({_T}, {_T}, int64, int64, int64, int32[::1], int64, {_M}, {_M})", **_FLAGS)
def _gather(
    keys: Any, values: Any, head: int, base: int, start: int, path: Any, depth: int, to_keys: Any, to_values: Any
) -> None:
    """The block of logical positions base..base + 63 as one row of a tree sees it; zeros beyond the row itself."""
    for j in range(BLOCK):
        position = base + j
        if position > start + depth:
            for d in range(to_keys.shape[0]):
                to_keys[d, j] = _ZERO
            for d in range(to_values.shape[1]):
                to_values[j, d] = _ZERO
        else:
            slot = position if position < start else start + path[position - start]
            block, k = slot // BLOCK, slot % BLOCK
            for d in range(to_keys.shape[0]):
                to_keys[d, j] = keys[block, head, d, k]
            for d in range(to_values.shape[1]):
                to_values[j, d] = values[block, head, k, d]


@kernel(
    f"void({_C}, {_T}, {_T}, int64, int64, int64, int64, int64, int64, {_PATHS}, {_DEPTHS}, int64, float32, {_V}, {_V}, {_M})",
    **_FLAGS,
)
def _segment(
    query: Any, keys: Any, values: Any, head: int, first_row: int, last_row: int, first_block: int, last_block: int,
    start: int, paths: Any, depths: Any, window: int, scale: Any, maxima: Any, sums: Any, acc: Any,
) -> None:  # fmt: skip
    """The unnormalised attention of some rows over some blocks, for the query heads of one kv head.

    Written for r = (row - first_row) * group + query head: the scores' maximum, the sum of exp(score - maximum), and
    that sum weighted by the values, acc float32 [at least 4 more than needed, value_dim].
    """
    head_dim = query.shape[2]
    group = query.shape[1] // keys.shape[1]
    value_dim = values.shape[3]
    total = (last_row - first_row) * group
    tree = paths.shape[0] > 0
    # Rows go through the kernels by four; total..total + 3 stand in where fewer are left.
    q = np.zeros((total + 4, head_dim), np.float32)
    s = np.empty((4, BLOCK), np.float32)
    factors = np.empty(4, np.float32)
    tile = np.empty(4, np.int64)
    row_keys = np.empty((head_dim, BLOCK) if tree else (0, 0), np.float32)
    row_values = np.empty((BLOCK, value_dim) if tree else (0, 0), np.float32)
    at_s, at_acc, at_factors = _address(s), _address(acc), _address(factors)
    q_step, acc_step = 4 * head_dim, 4 * value_dim
    for r in range(total):
        maxima[r] = _MASKED
        sums[r] = _ZERO
        for d in range(head_dim):
            q[r, d] = query[first_row + r // group, head * group + r % group, d] * scale
    for r in range(total + 4):
        for d in range(value_dim):
            acc[r, d] = _ZERO
    shared = start // BLOCK if tree else last_block  # the blocks before it hold the same keys for every row
    for block in range(first_block, last_block):
        # numba frees an array after its last use by name, whatever addresses of it are about: so q is named here, in
        # the loop that reads it by address (s, factors and acc are named further down, or the caller's).
        at_q = _address(q)
        base = block * BLOCK
        # In a shared block any four rows make a tile; beyond it the heads of one row do, as its keys are its own.
        span = total if block < shared else group
        for begin in range(0, total, span):
            if block >= shared:
                i = first_row + begin // group
                if start + depths[i] < base or (window > 0 and start + depths[i] - window >= base + BLOCK - 1):
                    continue
                _gather(keys, values, head, base, start, paths[i], depths[i], row_keys, row_values)
                at_keys, at_values = _address(row_keys), _address(row_values)
            else:
                at_keys, at_values = _address(keys[block, head]), _address(values[block, head])
            for r in range(begin, begin + span, 4):
                seen = False
                for c in range(4):
                    tile[c] = r + c if r + c < begin + span else total + c
                    if tile[c] < total:
                        position = start + depths[first_row + tile[c] // group]
                        seen = seen or (position >= base and (window == 0 or position - window < base + BLOCK - 1))
                if not seen:
                    continue
                _scores(
                    at_q + tile[0] * q_step, at_q + tile[1] * q_step, at_q + tile[2] * q_step, at_q + tile[3] * q_step,
                    at_keys, at_s, head_dim,
                )  # fmt: skip
                for c in range(4):
                    first, last = 0, 0
                    if tile[c] < total:
                        position = start + depths[first_row + tile[c] // group]
                        last = min(BLOCK, position + 1 - base)
                        if window > 0:
                            first = max(0, position - window + 1 - base)
                    if first >= last:
                        # The others see this block, it doesn't: weights 0 and factor 1 change no bit of it.
                        for j in range(BLOCK):
                            s[c, j] = _ZERO
                        factors[c] = _ONE
                    else:
                        m, block_sum = _weights(s[c], first, last, maxima[tile[c]])
                        factors[c] = np.exp(maxima[tile[c]] - m)
                        maxima[tile[c]] = m
                        sums[tile[c]] = sums[tile[c]] * factors[c] + block_sum
                _accumulate(
                    at_s, at_values, at_acc + tile[0] * acc_step, at_acc + tile[1] * acc_step,
                    at_acc + tile[2] * acc_step, at_acc + tile[3] * acc_step, at_factors, value_dim,
                )  # fmt: skip


@kernel(f"void({_V}, {_V}, {_M}, int64, float32, float32, {_V})", **_FLAGS)
def _fold(maxima: Any, sums: Any, acc: Any, r: int, next_maximum: Any, next_sum: Any, next_acc: Any) -> None:
    """Add the next segment's part of a row to what the row has of the segments before it."""
    m = max(maxima[r], next_maximum)
    old, new = np.exp(maxima[r] - m), np.exp(next_maximum - m)
    maxima[r] = m
    sums[r] = sums[r] * old + next_sum * new
    for d in range(acc.shape[1]):
        acc[r, d] = acc[r, d] * old + next_acc[d] * new


@kernel(f"void(int64, int64[::1], {_C}, {_T}, {_T}, {_C}, {_PATHS}, {_DEPTHS}, float32, {_C}, {_C}, {_T})", **_FLAGS)
def _task(
    number: int, plan: Any, query: Any, keys: Any, values: Any, out: Any, paths: Any, depths: Any, scale: Any,
    part_maxima: Any, part_sums: Any, part_acc: Any,
) -> None:  # fmt: skip
    """One piece of the work: by `plan` one head's segment for all rows, or all segments for some rows."""
    start, window, segments, first_segment, blocks = plan[0], plan[1], plan[2], plan[3], plan[4]
    rows = query.shape[0]
    if part_acc.shape[0] > 0:
        head, part = number // segments, number % segments
        first_block = (first_segment + part) * SEGMENT
        _segment(
            query, keys, values, head, 0, rows, first_block, min(first_block + SEGMENT, blocks), start, paths, depths,
            window, scale, part_maxima[part, head], part_sums[part, head], part_acc[part, head],
        )  # fmt: skip
        return
    groups, rows_each = plan[5], plan[6]
    group = query.shape[1] // keys.shape[1]
    head = number // groups
    first_row = number % groups * rows_each
    last_row = min(first_row + rows_each, rows)
    total = (last_row - first_row) * group
    acc = np.empty((total + 4, values.shape[3]), np.float32)
    maxima, sums = np.empty(total, np.float32), np.empty(total, np.float32)
    next_acc = np.empty((total + 4, values.shape[3]), np.float32)
    next_maxima, next_sums = np.empty(total, np.float32), np.empty(total, np.float32)
    for part in range(segments):
        first_block = (first_segment + part) * SEGMENT
        last_block = min(first_block + SEGMENT, blocks)
        if part == 0:
            _segment(
                query, keys, values, head, first_row, last_row, first_block, last_block, start, paths, depths,
                window, scale, maxima, sums, acc,
            )  # fmt: skip
            continue
        _segment(
            query, keys, values, head, first_row, last_row, first_block, last_block, start, paths, depths,
            window, scale, next_maxima, next_sums, next_acc,
        )  # fmt: skip
        for r in range(total):
            _fold(maxima, sums, acc, r, next_maxima[r], next_sums[r], next_acc[r])
    for r in range(total):
        inverse = _ONE / sums[r]
        for d in range(out.shape[2]):
            out[first_row + r // group, head * group + r % group, d] = acc[r, d] * inverse


@kernel(f"void({_C}, {_T}, {_C}, {_C}, {_C}, {_T})", **_FLAGS)
def _join(query: Any, keys: Any, out: Any, part_maxima: Any, part_sums: Any, part_acc: Any) -> None:
    """Fold the segments that tasks have left, in their order."""
    group = query.shape[1] // keys.shape[1]
    for head in range(keys.shape[1]):
        maxima, sums, acc = part_maxima[0, head], part_sums[0, head], part_acc[0, head]
        for r in range(query.shape[0] * group):
            for part in range(1, part_acc.shape[0]):
                _fold(
                    maxima, sums, acc, r, part_maxima[part, head, r], part_sums[part, head, r], part_acc[part, head, r]
                )
            inverse = _ONE / sums[r]
            for d in range(out.shape[2]):
                out[r // group, head * group + r % group, d] = acc[r, d] * inverse


@kernel("void(CPointer(int64))", callback=True, **_FLAGS)
def _worker(packet: Any) -> None:
    """What each thread of a team runs: tasks off a shared counter until there are none left."""
    p = carray(packet, 32, np.int64)
    rows, heads, head_dim, value_dim, kv_heads, blocks, paths, segments = (
        p[11],
        p[12],
        p[13],
        p[14],
        p[15],
        p[16],
        p[17],
        p[18],
    )
    plan = carray(pointer_to(p[1]), 8, np.int64)
    query = carray(pointer_to(p[2]), (rows, heads, head_dim), np.float32)
    keys = carray(pointer_to(p[3]), (blocks, kv_heads, head_dim, BLOCK), np.float32)
    values = carray(pointer_to(p[4]), (blocks, kv_heads, BLOCK, value_dim), np.float32)
    out = carray(pointer_to(p[5]), (rows, heads, p[19]), np.float32)
    path = carray(pointer_to(p[6]), (paths, paths), np.int32)
    depths = carray(pointer_to(p[7]), rows, np.int32)
    total = rows * (heads // kv_heads)
    part_maxima = carray(pointer_to(p[8]), (segments, kv_heads, total), np.float32)
    part_sums = carray(pointer_to(p[9]), (segments, kv_heads, total), np.float32)
    part_acc = carray(pointer_to(p[10]), (segments, kv_heads, total + 4, value_dim), np.float32)
    scale = carray(pointer_to(p[20]), 1, np.float32)[0]
    while True:
        number = take_number(p[21])
        if number >= p[0]:
            break
        _task(number, plan, query, keys, values, out, path, depths, scale, part_maxima, part_sums, part_acc)


class Attention:
    """The attention of one step, the same for all its layers.

    start:   tokens in the cache before the step's rows, whose keys and values are written at slots start + row
             before they are attended to
    paths:   int32 [rows, rows]: paths[i, :depths[i] + 1] are the rows on the way to row i, itself last.
             [0, 0] for a chain, where row i follows row i - 1
    depths:  int32 [rows]: row i's position is start + depths[i]
    team:    threads to share the work with; None: this one does it alone. The bits are the same: a row's keys are
             folded segment by segment in any case, so that threads can share even a single row's.
    """

    def __init__(self, start: int, paths: Array, depths: Array, team: Team | None = None) -> None:
        self._start, self._paths, self._depths, self._team = start, paths, depths, team
        self._last = start + int(depths.max())
        self._plans: dict[Any, _Plan] = {}

    def __call__(self, query: Array, keys: Array, values: Array, out: Array, window: int, scale: Any) -> None:
        """out[i] = softmax(scale * query[i] . keys) values, over the logical positions that row i may see.

        query:   float32 [rows, heads, head_dim]; the heads of one kv head are neighbours
        keys, values: the layer's cache
        out:     float32 [rows, heads, the values' own width], written. All arrays are contiguous
        window:  the row sees the last `window` positions, itself included; 0: all
        scale:   float32
        """
        shape = (window, query.shape, keys.shape[1], values.shape[3], out.shape[2])
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._planned(*shape)
        packet = plan.packet
        packet[2:6] = query.ctypes.data, keys.ctypes.data, values.ctypes.data, out.ctypes.data
        packet[16] = keys.shape[0]
        plan.scale[0] = scale
        plan.counter[0] = 0
        if plan.team is None:
            _alone(packet.ctypes.data)
        else:
            plan.team.run(_worker.address, packet.ctypes.data)
        if len(plan.parts[2]):
            _join(query, keys, out, *plan.parts)

    def _planned(self, window: int, query: tuple[int, ...], kv_heads: int, value_dim: int, out_dim: int) -> _Plan:
        rows, heads, head_dim = query
        blocks = self._last // BLOCK + 1
        first_segment = max(0, self._start - window + 1) // (BLOCK * SEGMENT) if window else 0
        segments = -(-blocks // SEGMENT) - first_segment
        total = rows * (heads // kv_heads)
        team = self._team
        if total * kv_heads * (self._last + 1 - first_segment * BLOCK * SEGMENT) * head_dim < _WORTH_SHARING:
            team = None
        threads = team.threads if team is not None else 1
        split = threads > 1 and rows <= _ROWS_EACH and segments > 1
        rows_each = max(1, min(_ROWS_EACH, -(-rows * kv_heads // (4 * threads)))) if threads > 1 else rows
        groups = -(-rows // rows_each)
        tasks = kv_heads * (segments if split else groups)
        parts = segments if split else 0
        plan = _Plan(
            packet=np.zeros(32, np.int64),
            numbers=np.array([self._start, window, segments, first_segment, blocks, groups, rows_each, 0], np.int64),
            parts=(
                np.empty((parts, kv_heads, total), np.float32),
                np.empty((parts, kv_heads, total), np.float32),
                np.empty((parts, kv_heads, total + 4, value_dim), np.float32),
            ),
            scale=np.zeros(1, np.float32),
            counter=np.zeros(1, np.int64),
            team=team if tasks > 1 else None,
        )
        plan.packet[0:2] = tasks, plan.numbers.ctypes.data
        plan.packet[6:11] = [a.ctypes.data for a in (self._paths, self._depths, *plan.parts)]
        plan.packet[11:16] = rows, heads, head_dim, value_dim, kv_heads
        plan.packet[17:20] = self._paths.shape[0], parts, out_dim
        plan.packet[20:22] = plan.scale.ctypes.data, plan.counter.ctypes.data
        return plan


@dataclass(slots=True)
class _Plan:
    """How one shape of attention is cut up, and what its tasks share.

    packet: the numbers and addresses that `_worker` unpacks; it points into the other arrays
    numbers: `_task`'s plan
    parts:  what tasks leave for `_join`: maxima, sums and weighted values by segment; of no length where each task
            does whole rows
    """

    packet: Array
    numbers: Array
    parts: tuple[Array, Array, Array]
    scale: Array
    counter: Array
    team: Team | None


_alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_worker.address)


@kernel(f"float32({_V}, float32, {_V})", **_FLAGS)
def _inverse_rms(x: Any, epsilon: Any, lanes: Any) -> Any:
    """1 / sqrt(mean(x^2) + epsilon), summed in 64 lanes and then by halves. lanes: float32[64], scratch."""
    width = x.shape[0]
    for j in range(BLOCK):
        lanes[j] = _ZERO
    whole = width // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        part = x[begin : begin + BLOCK]
        for j in range(BLOCK):
            lanes[j] = lanes[j] + part[j] * part[j]
    for j in range(whole, width):
        lanes[j - whole] = lanes[j - whole] + x[j] * x[j]
    for j in range(32):
        lanes[j] = lanes[j] + lanes[j + 32]
    for j in range(16):
        lanes[j] = lanes[j] + lanes[j + 16]
    for j in range(8):
        lanes[j] = lanes[j] + lanes[j + 8]
    total = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
    return _ONE / np.sqrt(total / np.float32(width) + epsilon)


@kernel(f"void({_M}, {_V}, float32, {_M})", **_FLAGS)
def norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """out = RMS norm of x float32 [rows, width] times weight; out may have more rows than x."""
    lanes = np.empty(BLOCK, np.float32)
    for i in range(x.shape[0]):
        inverse = _inverse_rms(x[i], epsilon, lanes)
        for d in range(x.shape[1]):
            out[i, d] = weight[d] * (x[i, d] * inverse)


@kernel(f"void({_M}, {_M}, {_V}, float32, {_M})", **_FLAGS)
def add_norm(x: Any, change: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """x += change, in place; then as `norm`. change may have more rows than x."""
    lanes = np.empty(BLOCK, np.float32)
    for i in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[i, d] = x[i, d] + change[i, d]
        inverse = _inverse_rms(x[i], epsilon, lanes)
        for d in range(x.shape[1]):
            out[i, d] = weight[d] * (x[i, d] * inverse)


@kernel(f"void({_M}, int64, {_M})", **_FLAGS)
def gate(joined: Any, rows: int, out: Any) -> None:
    """out[i] = silu(g) * u, where joined[i] is g and u one after the other, float32 [.., 2 * width]."""
    width = joined.shape[1] // 2
    whole = width // BLOCK * BLOCK
    rest = np.zeros((2, BLOCK), np.float32)
    at_rest = _address(rest)
    for i in range(rows):
        at_g, at_out = _address(joined[i]), _address(out[i])
        _gated(at_g, at_g + 4 * width, at_out, whole)
        for j in range(whole, width):
            rest[0, j - whole] = joined[i, j]
            rest[1, j - whole] = joined[i, width + j]
        if whole < width:
            _gated(at_rest, at_rest + 4 * BLOCK, at_rest, BLOCK)
        for j in range(whole, width):
            out[i, j] = rest[0, j - whole]


@kernel(f"void({_M}, int64, {_M}, {_M}, {_V}, {_V}, float32, {_C}, {_T}, {_T}, int64)", **_FLAGS)
def rotate_heads(
    joined: Any, rows: int, cos: Any, sin: Any, query_weight: Any, key_weight: Any, epsilon: Any, query: Any,
    keys: Any, values: Any, start: int,
) -> None:  # fmt: skip
    """Take one projection's queries, keys and values apart, norm and rotate them, and write the keys and values.

    joined:       float32 [.., (heads + 2 kv_heads) * head_dim]: queries, keys, values
    cos, sin:     float32 [rows, head_dim], of each row's position
    query_weight, key_weight: float32 [head_dim], the weights of the norms over each head; of no length: no norms
    query:        float32 [rows, heads, head_dim], written
    keys, values: the layer's cache, written at slots start + row
    """
    heads, dim = query.shape[1], query.shape[2]
    kv_heads = keys.shape[1]
    half = dim // 2
    lanes = np.empty(BLOCK, np.float32)
    head = np.empty(dim, np.float32)
    turned = np.empty(dim, np.float32)
    normed = query_weight.shape[0] > 0
    for i in range(rows):
        block, j = (start + i) // BLOCK, (start + i) % BLOCK
        for h in range(heads + kv_heads):
            part = joined[i, h * dim : (h + 1) * dim]
            for d in range(dim):
                head[d] = part[d]
            if normed:
                inverse = _inverse_rms(head, epsilon, lanes)
                weight = query_weight if h < heads else key_weight
                for d in range(dim):
                    head[d] = weight[d] * (head[d] * inverse)
            for d in range(half):
                turned[d] = head[d] * cos[i, d] - head[d + half] * sin[i, d]
            for d in range(half):
                turned[d + half] = head[d + half] * cos[i, d + half] + head[d] * sin[i, d + half]
            if h < heads:
                for d in range(dim):
                    query[i, h, d] = turned[d]
            else:
                for d in range(dim):
                    keys[block, h - heads, d, j] = turned[d]
        for h in range(kv_heads):
            part = joined[i, (heads + kv_heads + h) * dim : (heads + kv_heads + h + 1) * dim]
            for d in range(dim):
                values[block, h, j, d] = part[d]
