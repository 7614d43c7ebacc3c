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
    values  float32 [blocks, kv_heads, 64, value_dim]

Slot t lies in block t // 64 at t % 64. Everything beyond the written slots is finite (zeros, or what was cropped):
it is multiplied by a probability of exactly 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["BLOCK", "add_norm", "attend", "gate", "move_slots", "norm", "rotate_heads", "write_slots"]

BLOCK = 64

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
_MASKED = np.float32(-3.0e38)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)

# "contract" lets a multiply and an add become one FMA; nothing may be reassociated, so the order written is the order
# computed, in vector and in scalar code alike.
_FLAGS: dict[str, Any] = {"nogil": True, "cache": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy"}


@njit(**_FLAGS)
def _scores(qa: Any, qb: Any, qc: Any, qd: Any, keys: Any, s: Any) -> None:
    """s[0..3] = the products of four queries with the block's 64 keys, each summed over head_dim in order."""
    a, b, c, e = s[0], s[1], s[2], s[3]
    for j in range(BLOCK):
        a[j] = _ZERO
        b[j] = _ZERO
        c[j] = _ZERO
        e[j] = _ZERO
    for d in range(0, qa.shape[0], 4):
        a0, a1, a2, a3 = qa[d], qa[d + 1], qa[d + 2], qa[d + 3]
        b0, b1, b2, b3 = qb[d], qb[d + 1], qb[d + 2], qb[d + 3]
        c0, c1, c2, c3 = qc[d], qc[d + 1], qc[d + 2], qc[d + 3]
        e0, e1, e2, e3 = qd[d], qd[d + 1], qd[d + 2], qd[d + 3]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        for j in range(BLOCK):
            x0, x1, x2, x3 = k0[j], k1[j], k2[j], k3[j]
            a[j] = (((a[j] + a0 * x0) + a1 * x1) + a2 * x2) + a3 * x3
            b[j] = (((b[j] + b0 * x0) + b1 * x1) + b2 * x2) + b3 * x3
            c[j] = (((c[j] + c0 * x0) + c1 * x1) + c2 * x2) + c3 * x3
            e[j] = (((e[j] + e0 * x0) + e1 * x1) + e2 * x2) + e3 * x3


@njit(**_FLAGS)
def _exp(s: Any, bits: Any, power: Any) -> None:
    """exp of 64 values <= 0, in place. power is bits (int32[64]) seen as float32."""
    for j in range(BLOCK):
        x = max(s[j], _SMALLEST)
        k = (x * _LOG2E + _ROUND) - _ROUND
        r = (x - k * _LN2_HIGH) - k * _LN2_LOW
        p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        s[j] = p * (r * r) + r + _ONE
        bits[j] = (np.int32(k) + np.int32(127)) << np.int32(23)
    for j in range(BLOCK):
        s[j] = s[j] * power[j]


@njit(**_FLAGS)
def _weights(s: Any, first: int, last: int, maximum: Any, bits: Any, power: Any, t: Any) -> Any:
    """Scores to weights exp(s - m) in place, 0 outside [first, last). Returns (the new running maximum m, their sum).

    Sums and maxima go by halves (64, 32, 16, ...): vector code, and one order whatever is masked.
    """
    if last < BLOCK:
        for j in range(last, BLOCK):
            s[j] = _MASKED
    for j in range(first):
        s[j] = _MASKED
    for j in range(32):
        t[j] = max(s[j], s[j + 32])
    for j in range(16):
        t[j] = max(t[j], t[j + 16])
    m = maximum
    for j in range(16):
        m = max(m, t[j])
    for j in range(BLOCK):
        s[j] = s[j] - m
    _exp(s, bits, power)
    if last < BLOCK:
        for j in range(last, BLOCK):
            s[j] = _ZERO
    for j in range(first):
        s[j] = _ZERO
    for j in range(32):
        t[j] = s[j] + s[j + 32]
    for j in range(16):
        t[j] = t[j] + t[j + 16]
    for j in range(8):
        t[j] = t[j] + t[j + 8]
    total = ((t[0] + t[4]) + (t[1] + t[5])) + ((t[2] + t[6]) + (t[3] + t[7]))
    return m, total


@njit(**_FLAGS)
def _accumulate(s: Any, values: Any, oa: Any, ob: Any, oc: Any, od: Any, factors: Any) -> None:
    """out = out * factor + weights @ values for four rows, each summed over the block's 64 keys in order."""
    a, b, c, e = s[0], s[1], s[2], s[3]
    fa, fb, fc, fd = factors[0], factors[1], factors[2], factors[3]
    width = oa.shape[0]
    for d in range(width):
        oa[d] = oa[d] * fa
        ob[d] = ob[d] * fb
        oc[d] = oc[d] * fc
        od[d] = od[d] * fd
    for j in range(0, BLOCK, 4):
        a0, a1, a2, a3 = a[j], a[j + 1], a[j + 2], a[j + 3]
        b0, b1, b2, b3 = b[j], b[j + 1], b[j + 2], b[j + 3]
        c0, c1, c2, c3 = c[j], c[j + 1], c[j + 2], c[j + 3]
        e0, e1, e2, e3 = e[j], e[j + 1], e[j + 2], e[j + 3]
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        for d in range(width):
            x0, x1, x2, x3 = v0[d], v1[d], v2[d], v3[d]
            oa[d] = (((oa[d] + a0 * x0) + a1 * x1) + a2 * x2) + a3 * x3
            ob[d] = (((ob[d] + b0 * x0) + b1 * x1) + b2 * x2) + b3 * x3
            oc[d] = (((oc[d] + c0 * x0) + c1 * x1) + c2 * x2) + c3 * x3
            od[d] = (((od[d] + e0 * x0) + e1 * x1) + e2 * x2) + e3 * x3


@njit(**_FLAGS)
def write_slots(keys: Any, values: Any, new_keys: Any, new_values: Any, start: int) -> None:
    """Write float32 [rows, kv_heads, dim] keys and values to the slots from `start` on."""
    for i in range(new_keys.shape[0]):
        block, j = (start + i) // BLOCK, (start + i) % BLOCK
        for head in range(new_keys.shape[1]):
            for d in range(new_keys.shape[2]):
                keys[block, head, d, j] = new_keys[i, head, d]
            for d in range(new_values.shape[2]):
                values[block, head, j, d] = new_values[i, head, d]


@njit(**_FLAGS)
def move_slots(keys: Any, values: Any, start: int, rows: Any) -> None:
    """Copy slot start + rows[i] to start + i for each i in order; rows ascend, so nothing is lost on the way."""
    for i in range(rows.shape[0]):
        source, target = start + rows[i], start + i
        if source != target:
            keys[target // BLOCK, :, :, target % BLOCK] = keys[source // BLOCK, :, :, source % BLOCK]
            values[target // BLOCK, :, target % BLOCK] = values[source // BLOCK, :, source % BLOCK]


@njit(**_FLAGS)
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


@njit(**_FLAGS)
def attend(
    query: Any, keys: Any, values: Any, out: Any, start: int, paths: Any, depths: Any, window: int, scale: Any,
    first_head: int, last_head: int,
) -> None:  # fmt: skip
    """out[i] = softmax(scale * query[i] . keys) values, over the logical positions that row i may see.

    query:   float32 [rows, heads, head_dim], head_dim a multiple of 4; the heads of one kv head are neighbours
    out:     float32 [rows, heads, value_dim], written for the kv heads first_head to last_head - 1
    start:   tokens in the cache before these rows, whose keys and values are already written at slots start + row
    paths:   int32 [rows, rows]: paths[i, :depths[i] + 1] are the rows on the way to row i, itself last.
             [0, 0] for a chain, where row i follows row i - 1
    depths:  int32 [rows]: row i's position is start + depths[i]
    window:  the row sees the last `window` positions, itself included; 0: all
    scale:   float32
    """
    rows, _, head_dim = query.shape
    group = query.shape[1] // keys.shape[1]
    value_dim = values.shape[3]
    total = rows * group
    tree = paths.shape[0] > 0
    # Rows go through the kernels by four; total..total + 3 stand in where fewer are left.
    q = np.zeros((total + 4, head_dim), np.float32)
    acc = np.empty((total + 4, value_dim), np.float32)
    maxima = np.empty(total, np.float32)
    sums = np.empty(total, np.float32)
    s = np.empty((4, BLOCK), np.float32)
    factors = np.empty(4, np.float32)
    tile = np.empty(4, np.int64)
    bits = np.empty(BLOCK, np.int32)
    power = bits.view(np.float32)
    t = np.empty(32, np.float32)
    row_keys = np.empty((head_dim, BLOCK) if tree else (0, 0), np.float32)
    row_values = np.empty((BLOCK, value_dim) if tree else (0, 0), np.float32)
    deepest = 0
    for i in range(rows):
        deepest = max(deepest, depths[i])
    blocks = (start + deepest) // BLOCK + 1
    shared = start // BLOCK if tree else blocks  # the blocks before it hold the same keys for every row
    for head in range(first_head, last_head):
        for r in range(total):
            maxima[r] = _MASKED
            sums[r] = _ZERO
            for d in range(head_dim):
                q[r, d] = query[r // group, head * group + r % group, d] * scale
        acc[:] = _ZERO
        for block in range(blocks):
            base = block * BLOCK
            # In a shared block any four rows make a tile; beyond it the heads of one row do, as its keys are its own.
            span = total if block < shared else group
            for begin in range(0, total, span):
                if block >= shared:
                    i = begin // group
                    if start + depths[i] < base or (window > 0 and start + depths[i] - window >= base + BLOCK - 1):
                        continue
                    _gather(keys, values, head, base, start, paths[i], depths[i], row_keys, row_values)
                    block_keys, block_values = row_keys, row_values
                else:
                    block_keys, block_values = keys[block, head], values[block, head]
                for r in range(begin, begin + span, 4):
                    seen = False
                    for c in range(4):
                        tile[c] = r + c if r + c < begin + span else total + c
                        if tile[c] < total:
                            position = start + depths[tile[c] // group]
                            seen = seen or (position >= base and (window == 0 or position - window < base + BLOCK - 1))
                    if not seen:
                        continue
                    _scores(q[tile[0]], q[tile[1]], q[tile[2]], q[tile[3]], block_keys, s)
                    for c in range(4):
                        first, last = 0, 0
                        if tile[c] < total:
                            position = start + depths[tile[c] // group]
                            last = min(BLOCK, position + 1 - base)
                            if window > 0:
                                first = max(0, position - window + 1 - base)
                        if first >= last:
                            # The others see this block, it doesn't: weights 0 and factor 1 change no bit of it.
                            for j in range(BLOCK):
                                s[c, j] = _ZERO
                            factors[c] = _ONE
                        else:
                            m, block_sum = _weights(s[c], first, last, maxima[tile[c]], bits, power, t)
                            factors[c] = np.exp(maxima[tile[c]] - m)
                            maxima[tile[c]] = m
                            sums[tile[c]] = sums[tile[c]] * factors[c] + block_sum
                    _accumulate(s, block_values, acc[tile[0]], acc[tile[1]], acc[tile[2]], acc[tile[3]], factors)
        for r in range(total):
            inverse = _ONE / sums[r]
            for d in range(value_dim):
                out[r // group, head * group + r % group, d] = acc[r, d] * inverse


@njit(**_FLAGS)
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


@njit(**_FLAGS)
def norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """out = RMS norm of x float32 [rows, width] times weight; out may have more rows than x."""
    lanes = np.empty(BLOCK, np.float32)
    for i in range(x.shape[0]):
        inverse = _inverse_rms(x[i], epsilon, lanes)
        for d in range(x.shape[1]):
            out[i, d] = weight[d] * (x[i, d] * inverse)


@njit(**_FLAGS)
def add_norm(x: Any, change: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """x += change, in place; then as `norm`. change may have more rows than x."""
    lanes = np.empty(BLOCK, np.float32)
    for i in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[i, d] = x[i, d] + change[i, d]
        inverse = _inverse_rms(x[i], epsilon, lanes)
        for d in range(x.shape[1]):
            out[i, d] = weight[d] * (x[i, d] * inverse)


@njit(**_FLAGS)
def gate(joined: Any, rows: int, out: Any) -> None:
    """out[i] = silu(g) * u, where joined[i] is g and u one after the other, float32 [.., 2 * width]."""
    width = joined.shape[1] // 2
    s = np.empty(BLOCK, np.float32)
    g = np.zeros(BLOCK, np.float32)
    bits = np.empty(BLOCK, np.int32)
    power = bits.view(np.float32)
    for i in range(rows):
        for begin in range(0, width, BLOCK):
            size = min(BLOCK, width - begin)
            for j in range(size):
                g[j] = joined[i, begin + j]
            for j in range(BLOCK):
                s[j] = -abs(g[j])
            _exp(s, bits, power)
            for j in range(BLOCK):
                # sigmoid(g) is 1 / (1 + e^-g); for g < 0 as e^g / (1 + e^g), so that the exponent is never positive
                s[j] = g[j] * ((_ONE if g[j] >= _ZERO else s[j]) / (_ONE + s[j]))
            for j in range(size):
                out[i, begin + j] = s[j] * joined[i, width + begin + j]


@njit(**_FLAGS)
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
