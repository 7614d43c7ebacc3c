"""Linear: a weight matrix in the fewest bits that give it back exactly, and its product with the rows of a step.

Reading the weights is what a step of few rows waits for. What transformers loads as float32 seldom holds 32 bits of
news: checkpoints are made of bfloat16 or float16, and a quantised file's groups of inputs have one base, one step and
a small integer each. So each matrix is stored as one of

    levels4      base + step * (0..15) for each output and 32 inputs: 6 bits a weight (GGUF's Q4_0, Q4_1, Q4_K)
    levels8      base + step * (0..255): 10 bits (Q5_0, Q5_1, Q8_0, Q5_K, Q3_K)
    levels8-16   the same by 16 inputs: 12 bits (Q6_K, Q2_K)
    bfloat16, float16    16 bits
    float32      32 bits

whichever is the smallest that reproduces every float32 weight bit for bit (but for the sign of zeros, which no sum
sees). The products are float32's: a weight is unpacked in registers and meets the same multiply-add as any other.

An output is the sum of its sums over DEPTH inputs each, in their order and with one FMA an input, then the bias: the
same for 1 row or 500, in whatever place, on however many threads. So rows are the same bits at all widths.

Called by forward_cpu.py only. Imports numpy and numba, no torch.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined,call-arg,no-any-return,return-value"
# (LLVM's builders and numba's intrinsics are untyped, and an intrinsic takes one argument less than it is written with)

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
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
    HALVES,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    every,
    fma,
    pointer_to,
    splat,
    take_number,
)
from agentspec.memory.kernels import kernel

__all__ = ["FORMATS", "Linear"]

Array = NDArray[Any]

# A tile is MOST_ROWS rows by three vectors of outputs: its sums, the weights and one input fill the registers (32 of
# 16 floats, or 16 of 8), and each weight that was read and unpacked is used for all its rows.
MOST_ROWS = 8 if LANES == 16 else 4
VECTORS = 3
PANEL = LANES * VECTORS  # outputs that lie together in memory
# Inputs of a pass over all rows. Its weights stay in the first cache for the next tile of rows, while the memory fetches
# those of the next pass; and sums of sums round less than one long sum.
DEPTH = 192
_ALIGNED = 64  # bytes of a cache line: a vector across two costs twice

FORMATS = ("float32", "bfloat16", "float16", "levels8-16", "levels8", "levels4")
_BITS = (32, 16, 16, 8, 8, 4)
_GROUPS = (1, 1, 1, 16, 32, 32)  # inputs that share a base and a step
_FLOAT32, _BFLOAT16, _FLOAT16, _LEVELS8_16, _LEVELS8, _LEVELS4 = range(6)
_LEVELS = (_LEVELS8_16, _LEVELS8, _LEVELS4)
# Bytes of DEPTH inputs of a panel: of levels first a group's steps and bases, then its levels.
_BYTES = np.array(
    [DEPTH * PANEL * b // 8 + (DEPTH // g * 8 * PANEL if g > 1 else 0) for b, g in zip(_BITS, _GROUPS, strict=True)],
    np.int64,
)

_FLAGS: dict[str, Any] = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}
_HELD = tuple(form for form in range(len(FORMATS)) if HALVES or form != _FLOAT16)
_ROWS = (1, 2, 4, 8)[: 4 if MOST_ROWS == 8 else 3]
_F16, _I16, _I8 = ir.HalfType(), ir.IntType(16), ir.IntType(8)


def _at(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """The pointer to `kind` at an address plus a number of bytes."""
    return builder.inttoptr(builder.add(address, ir.Constant(I64, offset)), kind.as_pointer())


def _same(value: int) -> Any:
    return ir.Constant(INTEGERS, [value] * LANES)


class _Tile:
    """LLVM code for `rows` rows times a panel: c[r] += x[r, :depth] @ weights, in registers over the whole depth.

    Written in LLVM's terms because what comes of loops over arrays keeps the sums in memory.
    """

    def __init__(self, builder: Any, rows: int, form: int) -> None:
        self.builder, self.rows, self.form = builder, rows, form
        self.sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), I32, I32, I32])
        self.fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")

    def clear(self) -> None:
        for row in self.sums:
            for slot in row:
                self.builder.store(every(0.0), slot)

    def add_to(self, c: Any) -> None:
        for r, row in enumerate(self.sums):
            for v, slot in enumerate(row):
                cell = _at(self.builder, c, VECTOR, 4 * (r * PANEL + v * LANES))
                whole = self.builder.fadd(self.builder.load(cell, align=4), self.builder.load(slot))
                self.builder.store(whole, cell, align=4)

    def load(self, address: Any, kind: Any, size: int, offset: int = 0) -> list[Any]:
        """Three neighbouring vectors of elements of `size` bytes."""
        vector = ir.VectorType(kind, LANES)
        return [
            self.builder.load(_at(self.builder, address, vector, offset + v * LANES * size), align=size)
            for v in range(VECTORS)
        ]

    def prefetch(self, address: Any, size: int) -> None:
        for line in range(max(1, size // 64)):
            where = _at(self.builder, address, _I8, 64 * line)
            self.builder.call(self.fetch, [where, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])

    def unpacked(self, place: Any, steps: list[Any], bases: list[Any]) -> list[list[Any]]:
        """The weights at a place: of one input, for levels4 of two."""
        b = self.builder
        if self.form == _FLOAT32:
            return [self.load(place, F32, 4)]
        if self.form == _BFLOAT16:
            halves = [b.shl(b.zext(v, INTEGERS), _same(16)) for v in self.load(place, _I16, 2)]
            return [[b.bitcast(v, VECTOR) for v in halves]]
        if self.form == _FLOAT16:
            return [[b.fpext(v, VECTOR) for v in self.load(place, _F16, 2)]]
        numbers = [b.zext(v, INTEGERS) for v in self.load(place, _I8, 1)]
        of = [numbers]
        if self.form == _LEVELS4:
            of = [[b.and_(v, _same(15)) for v in numbers], [b.lshr(v, _same(4)) for v in numbers]]
        return [
            [fma(b, b.sitofp(v, VECTOR), step, base) for v, step, base in zip(n, steps, bases, strict=True)] for n in of
        ]

    def add(self, inputs: list[Any], offset: Any, weights: list[Any]) -> None:
        """sums[r] += input r * weights."""
        b = self.builder
        for address, row in zip(inputs, self.sums, strict=True):
            factor = splat(b, b.load(_at(b, b.add(address, offset), F32)))
            for slot, weight in zip(row, weights, strict=True):
                b.store(fma(b, factor, weight, b.load(slot)), slot)

    def each(self, weights: Any, depth: Any, use: Callable[[Any, list[list[Any]]], None]) -> None:
        """use(input, its weights and maybe the next one's) over `depth` inputs."""
        b = self.builder
        at_once = 2 if self.form == _LEVELS4 else 1
        size = PANEL * _BITS[self.form] * at_once // 8

        def some(place: Any, first: Any, count: Any, steps: list[Any], bases: list[Any]) -> None:
            with cgutils.for_range(b, count) as loop:
                here = b.add(place, b.mul(loop.index, ir.Constant(I64, size)))
                k = b.add(first, b.mul(loop.index, ir.Constant(I64, at_once)))
                use(k, self.unpacked(here, steps, bases))

        if self.form not in _LEVELS:
            some(weights, ir.Constant(I64, 0), depth, [], [])
            return
        group = _GROUPS[self.form]
        with cgutils.for_range(b, b.udiv(depth, ir.Constant(I64, group))) as groups:
            place = b.add(weights, b.mul(groups.index, ir.Constant(I64, int(_BYTES[self.form]) * group // DEPTH)))
            steps, bases = self.load(place, F32, 4), self.load(place, F32, 4, 4 * PANEL)
            first = b.mul(groups.index, ir.Constant(I64, group))
            some(b.add(place, ir.Constant(I64, 8 * PANEL)), first, ir.Constant(I64, group // at_once), steps, bases)

    def run(self, x: Any, stride: Any, weights: Any, c: Any, depth: Any, ahead: Any, step: Any) -> None:
        b = self.builder
        self.clear()
        inputs = [b.add(x, b.mul(stride, ir.Constant(I64, r))) for r in range(self.rows)]

        def use(k: Any, weights: list[list[Any]]) -> None:
            self.prefetch(b.add(ahead, b.mul(k, step)), len(weights) * PANEL * _BITS[self.form] // 8)
            for number, vectors in enumerate(weights):
                self.add(inputs, b.mul(b.add(k, ir.Constant(I64, number)), ir.Constant(I64, 4)), vectors)

        self.each(weights, depth, use)
        self.add_to(c)

    def unpack(self, weights: Any, target: Any, depth: Any) -> None:
        """The weights as float32 [depth, PANEL]."""
        b = self.builder

        def use(k: Any, weights: list[list[Any]]) -> None:
            place = b.add(target, b.mul(k, ir.Constant(I64, 4 * PANEL)))
            for number, vectors in enumerate(weights):
                for v, vector in enumerate(vectors):
                    b.store(vector, _at(b, place, VECTOR, 4 * (number * PANEL + v * LANES)), align=4)

        self.each(weights, depth, use)


def _for_each(builder: Any, value: Any, cases: Sequence[int], generate: Callable[[int], None]) -> None:
    """The code of each case, run where the value is that."""
    for case in cases:
        with builder.if_then(builder.icmp_signed("==", value, ir.Constant(I64, case))):
            generate(case)


@intrinsic
def _tile(
    typing_context: Any, form: Any, rows: Any, x: Any, stride: Any, weights: Any, c: Any, depth: Any, ahead: Any,
    step: Any,
) -> Any:  # fmt: skip
    """c[r] += x[r, :depth] @ weights for 1, 2, 4 or MOST_ROWS rows.

    Addresses of: x float32 [rows, stride bytes], weights in this format, c float32 [rows, PANEL]. While it runs `ahead`
    is fetched into the cache, `step` bytes for each input.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        form, rows, *rest = args
        _for_each(
            builder, form, _HELD,
            lambda f: _for_each(builder, rows, _ROWS, lambda r: _Tile(builder, r, f).run(*rest)),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic
def _unpack(typing_context: Any, form: Any, weights: Any, target: Any, depth: Any) -> Any:
    """The weights of `depth` inputs of a panel of levels, as float32 [depth, PANEL] at the target's address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        form, *rest = args
        _for_each(builder, form, _LEVELS, lambda f: _Tile(builder, 0, f).unpack(*rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", **_FLAGS)
def _panel(
    form: int, x: int, stride: int, rows: int, weights: int, c: int, depth: int, ahead: int, step: int, scratch: int
) -> None:
    """A pass of all rows over `depth` inputs of a panel, in tiles of MOST_ROWS, 4, 2 and 1 rows.

    scratch: the address of float32 [DEPTH, PANEL]. More than a tile of rows would unpack levels more than once.
    """
    if rows > MOST_ROWS and form >= _LEVELS8_16:
        _unpack(form, weights, scratch, depth)
        form, weights = _FLOAT32, scratch
    while rows > 0:
        taken = MOST_ROWS if rows >= MOST_ROWS else 4 if rows >= 4 else 2 if rows >= 2 else 1
        _tile(form, taken, x, stride, weights, c, depth, ahead, step)
        rows -= taken
        x += taken * stride
        c += taken * PANEL * 4
        ahead += depth * step


@kernel("void(CPointer(int64))", callback=True, **_FLAGS)
def _worker(packet: Any) -> None:
    """What each thread of a team runs: panels off a shared counter until there are none left."""
    p = carray(packet, 12, np.int64)
    panels, rows, inputs, outputs, form = p[0], p[1], p[2], p[3], p[4]
    x, weights, counter = p[5], p[6], p[7]
    y = carray(pointer_to(p[8]), (rows, outputs), np.float32)
    bias = carray(pointer_to(p[9]), p[10], np.float32)
    memory = np.empty(((rows + DEPTH) * PANEL + 16), np.float32)
    scratch = (np.int64(memory.ctypes.data) + 63) // 64 * 64
    sums = carray(pointer_to(scratch + DEPTH * PANEL * 4), (rows, PANEL), np.float32)
    stride = inputs * 4
    block = _BYTES[form]
    size = inputs * block // DEPTH
    step = block // DEPTH // ((rows + MOST_ROWS - 1) // MOST_ROWS)
    number = take_number(counter)
    while number < panels:
        following = take_number(counter)  # known now, so that its first weights can be fetched in time
        for i in range(rows):
            for j in range(PANEL):
                sums[i, j] = np.float32(0.0)
        c = np.int64(sums.ctypes.data)
        place = weights + number * size
        for first in range(0, inputs, DEPTH):
            depth = min(DEPTH, inputs - first)
            if first + DEPTH < inputs:
                ahead = place + block
            elif following < panels:
                ahead = weights + following * size
            else:
                ahead = place
            _panel(form, x + first * 4, stride, rows, place, c, depth, ahead, step, scratch)
            place += block
        begin = number * PANEL
        width = min(PANEL, outputs - begin)
        if p[10] > 0:
            for i in range(rows):
                for j in range(width):
                    y[i, begin + j] = sums[i, j] + bias[begin + j]
        else:
            for i in range(rows):
                for j in range(width):
                    y[i, begin + j] = sums[i, j]
        number = following
    memory[0] = np.float32(0.0)  # numba frees an array after its last use by name, whatever addresses of it are about


_alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_worker.address)


# ---- packing -----------------------------------------------------------------------------------------------


@kernel("int64(float32[:, ::1], int64, float32[:, ::1], float32[:, ::1])", error_model="numpy")
def _find_levels(weight: Any, size: int, steps: Any, bases: Any) -> int:
    """Find the base and step of each `size` inputs; returns the highest level of all, or -1 where one has more than 255.

    A step is the greatest common divisor of what lies between the group's weights, taken as integers of the finest bit
    that 40 bits below the largest weight leave.
    """
    numbers = np.empty(size, np.int64)
    highest = 0
    for i in range(weight.shape[0]):
        for group in range(steps.shape[1]):
            part = weight[i, group * size : (group + 1) * size]
            largest = np.float64(0.0)
            for value in part:
                largest = max(largest, abs(np.float64(value)))
            if not largest < np.inf:
                return -1
            unit = np.float64(1.0)
            if largest > 0.0:
                unit = 2.0 ** (np.floor(np.log2(largest)) - 40.0)
            least = np.int64(2**62)
            for k in range(size):
                exact = np.float64(part[k]) / unit
                numbers[k] = np.int64(exact)
                if np.float64(numbers[k]) != exact:
                    return -1
                least = min(least, numbers[k])
            divisor, farthest = np.int64(0), np.int64(0)
            for k in range(size):
                a = numbers[k] - least
                farthest = max(farthest, a)
                b = divisor
                while b != 0:
                    a, b = b, a % b
                divisor = a
            if divisor > 0:
                if farthest // divisor > 255:
                    return -1
                highest = max(highest, farthest // divisor)
            steps[i, group] = np.float32(divisor * unit)
            bases[i, group] = np.float32(least * unit)
            for k in range(size):
                level = np.float64((numbers[k] - least) // max(divisor, 1))
                if np.float32(level * np.float64(steps[i, group]) + np.float64(bases[i, group])) != part[k]:
                    return -1
    return highest


@kernel(
    "void(float32[:, ::1], int64, float32[:, ::1], float32[:, ::1], int64, float32[:, :, ::1], uint8[:, :, ::1])",
    error_model="numpy",
)
def _write_levels(weight: Any, size: int, steps: Any, bases: Any, bits: int, heads: Any, numbers: Any) -> None:
    """Write panels of levels. heads and numbers: the same memory [panels, groups, bytes] as float32 and as uint8."""
    for i in range(weight.shape[0]):
        panel, j = i // PANEL, i % PANEL
        for group in range(steps.shape[1]):
            step, base = np.float64(steps[i, group]), np.float64(bases[i, group])
            heads[panel, group, j] = steps[i, group]
            heads[panel, group, PANEL + j] = bases[i, group]
            for k in range(size):
                level = np.uint8(0)
                if step > 0.0:
                    level = np.uint8(np.rint((np.float64(weight[i, group * size + k]) - base) / step))
                if bits == 8:
                    numbers[panel, group, 8 * PANEL + k * PANEL + j] = level
                else:
                    place = 8 * PANEL + k // 2 * PANEL + j
                    numbers[panel, group, place] = numbers[panel, group, place] | (level << (4 * (k % 2)))


def _is_bfloat16(weight: Array) -> bool:
    return not any((rows.view(np.uint32) & 0xFFFF).any() for rows in _blocks(weight))


def _is_float16(weight: Array) -> bool:
    with np.errstate(over="ignore"):
        return all(np.array_equal(rows.astype(np.float16).astype(np.float32), rows) for rows in _blocks(weight))


def _blocks(weight: Array) -> Iterator[Array]:
    """A hundred outputs at a time: most weights are told by the first, and a copy of all would be large."""
    return (weight[begin : begin + 100] for begin in range(0, len(weight), 100))


def _aligned(size: int) -> Array:
    """uint8 [size], zeros, from a cache line's begin on."""
    memory = np.zeros(size + _ALIGNED, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED
    return memory[begin : begin + size]


class Linear:
    """A weight, packed, and its bias.

    weight:  float32 [outputs, inputs], contiguous; not kept
    bias:    float32 [outputs] or None
    format:  one of FORMATS, chosen so that `dense` is the weight again
    """

    def __init__(self, weight: Array, bias: Array | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = np.empty(0, np.float32) if bias is None else np.ascontiguousarray(bias, np.float32)
        self._panels = -(-self.outputs // PANEL)
        form = self._pack(np.ascontiguousarray(weight, np.float32))
        self.format = FORMATS[form]
        self._counter = np.zeros(1, np.int64)
        self._packet = np.array(
            [self._panels, 0, self.inputs, self.outputs, form, 0, self._memory.ctypes.data, self._counter.ctypes.data, 0,
             self._bias.ctypes.data, len(self._bias), 0], np.int64,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes + self._bias.nbytes)

    def __call__(self, x: Array, y: Array, team: Team | None = None) -> Array:
        """y = x @ weight.T + bias. x float32 [rows, inputs], y float32 [rows, outputs], written and returned, both
        contiguous. Not to be called from two threads at once: the team is what shares the work."""
        packet = self._packet
        packet[1], packet[5], packet[8] = len(x), x.ctypes.data, y.ctypes.data
        self._counter[0] = 0
        if team is None or self._panels == 1:
            _alone(packet.ctypes.data)
        else:
            team.run(_worker.address, packet.ctypes.data)
        return y

    def dense(self) -> Array:
        """The weight again, float32 [outputs, inputs]."""
        panels, inputs = self._panels, self.inputs
        if self.format == "float32":
            values = self._memory.view(np.float32).reshape(panels, inputs, PANEL)
        elif self.format == "bfloat16":
            halves = self._memory.view(np.uint16).astype(np.uint32) << 16
            values = halves.view(np.float32).reshape(panels, inputs, PANEL)
        elif self.format == "float16":
            values = self._memory.view(np.float16).astype(np.float32).reshape(panels, inputs, PANEL)
        else:
            size = _GROUPS[FORMATS.index(self.format)]
            groups = inputs // size
            held = self._memory.reshape(panels, groups, -1)
            heads = np.ascontiguousarray(held[:, :, : 8 * PANEL]).view(np.float32).reshape(panels, groups, 2, 1, PANEL)
            levels = held[:, :, 8 * PANEL :].reshape(panels, groups, -1, PANEL)
            if self.format == "levels4":
                levels = np.stack([levels & 15, levels >> 4], 3).reshape(panels, groups, size, PANEL)
            values = (heads[:, :, 0].astype(np.float64) * levels + heads[:, :, 1]).astype(np.float32)
        by_output = values.reshape(panels, inputs, PANEL).transpose(0, 2, 1).reshape(panels * PANEL, inputs)
        return np.ascontiguousarray(by_output[: self.outputs])

    def _pack(self, weight: Array) -> int:
        """Fill the memory; returns the format."""
        panels, inputs = self._panels, self.inputs
        for size, forms in ((32, (_LEVELS4, _LEVELS8)), (16, (_LEVELS8_16, _LEVELS8_16))):
            if inputs % size:
                continue
            steps = np.empty((self.outputs, inputs // size), np.float32)
            bases = np.empty_like(steps)
            highest = _find_levels(weight, size, steps, bases)
            if highest >= 0:
                form = forms[highest > 15]
                self._memory = _aligned(panels * inputs * int(_BYTES[form]) // DEPTH)
                shape = (panels, inputs // size, -1)
                heads, numbers = self._memory.view(np.float32).reshape(shape), self._memory.reshape(shape)
                _write_levels(weight, size, steps, bases, _BITS[form], heads, numbers)
                return form
        form, kind = _FLOAT32, "f4"
        if _is_bfloat16(weight):
            form, kind = _BFLOAT16, "u2"
        elif HALVES and _is_float16(weight):
            form, kind = _FLOAT16, "f2"
        self._memory = _aligned(panels * inputs * PANEL * _BITS[form] // 8)
        held = self._memory.view(kind).reshape(panels, inputs, PANEL)
        for panel in range(panels):
            part = weight[panel * PANEL : (panel + 1) * PANEL].T
            held[panel, :, : part.shape[1]] = part.view(np.uint32) >> 16 if form == _BFLOAT16 else part
        return form
