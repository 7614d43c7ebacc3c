"""Hashed tables of fixed size: which tokens followed a context, how often, and which of them last.

Called by the mixture's kernels. May import numpy and memory's kernel decorator.

A table is one uint32 array: a header, some small direct-mapped arrays, and two regions of 64-byte lines.

    header      0: buckets in the narrow region, 1: lines in the wide region, 2: clock (tokens inserted)
    seen        SEEN words: when a token (by hash) last came, clock + 1; 0: never
    followers   2 x FOLLOW words: what followed a token (by hash) the last two times, id + 1
    narrow      buckets of 4 entries of 4 words: head, then the 3 successors seen last, the latest first
    wide        lines of 16 words: head, then up to 15 successors that were pushed out of a narrow entry

An entry's head:   check 12 bits | overflows 1 | total 7 | stamp 12 (clock / 16 when it was last touched)
A successor:       token 20 bits | count 6 | kind 3 | tag 3;  0: none
A wide line's head: check 16 bits | stamp 16

A context is found by 32 bits of hash: the upper ones choose the bucket, the lower 12 are the check, so one
lookup of an absent context in a thousand finds another's entry; that costs a little acceptance and never
correctness. A new context takes the place of the bucket's least useful entry: few occurrences, long ago.
When a total or a count reaches its bound all counts of the entry are halved: recent behaviour wins."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import InvalidRequestError
from agentspec.memory.kernels import kernel

__all__ = ["MAX_TOKEN", "UInt32", "insert", "lookup", "mix", "new_table", "wide_line"]

UInt32 = NDArray[np.uint32]

MAX_TOKEN = (1 << 20) - 1
M32 = 0xFFFFFFFF
K1 = 0x9E3779B1
HEADER = 64
SEEN_BITS = 13
SEEN = 1 << SEEN_BITS
FOLLOW = HEADER + SEEN
OFFSET = FOLLOW + 2 * SEEN
TOTAL_BOUND = 126
COUNT_BOUND = 62
SUCCESSORS = 3 + 15  # that an entry holds at most
_SMALLEST = 256 * 1024


def new_table(nbytes: int) -> UInt32:
    """An empty table of about nbytes, its lines aligned to the cache's. The pages are touched when used.

    Raises InvalidRequestError for a size under 256 KiB.
    """
    if nbytes < _SMALLEST:
        raise InvalidRequestError(f"table: needed at least {_SMALLEST} bytes, got {nbytes}")
    lines = (nbytes // 4 - OFFSET) // 16 - 2
    wide = lines // 3
    words = OFFSET + 16 * lines + 16
    raw = np.zeros(words + 16, np.uint32)
    start = (-(raw.ctypes.data // 4)) % 16
    table: UInt32 = raw[start : start + words]
    table[0] = lines - wide
    table[1] = wide
    return table


@kernel("int64(int64, int64)")
def mix(h: Any, x: Any) -> Any:
    """One step of a 32-bit hash; x may be -1 (no such token)."""
    h = ((h ^ (x + 1)) * K1) & M32
    return h ^ (h >> 15)


@kernel("int64(int64)")
def log2_floor(x: Any) -> Any:
    """Of 1 <= x < 2^32; 0 for less."""
    b = 0
    if x >= 65536:
        x >>= 16
        b = 16
    if x >= 256:
        x >>= 8
        b += 8
    if x >= 16:
        x >>= 4
        b += 4
    if x >= 4:
        x >>= 2
        b += 2
    return b + 1 if x >= 2 else b


@kernel("int64(int64)")
def seen_slot(token: Any) -> Any:
    return HEADER + ((((token + 1) * K1) & M32) >> (32 - SEEN_BITS))


@kernel("int64(int64)")
def follow_slot(token: Any) -> Any:
    return FOLLOW + 2 * ((((token + 1) * K1) & M32) >> (32 - SEEN_BITS))


@kernel("int64(uint32[::1], int64)")
def lookup(table: Any, h: Any) -> Any:
    """Where the entry of the context with hash h lies, -1 if there is none. One cache line is read."""
    base = OFFSET + ((h * int(table[0])) >> 32) * 16
    check = h & 0xFFF
    for e in range(4):
        head = int(table[base + 4 * e]) & M32
        if (head & 0xFFF) == check and ((head >> 13) & 127) > 0:
            return base + 4 * e
    return -1


@kernel("int64(uint32[::1], int64)")
def wide_line(table: Any, h: Any) -> Any:
    """Where the context's wide line lies; -1 if another context has it."""
    h2 = mix(h, 77)
    line = OFFSET + int(table[0]) * 16 + ((h2 * int(table[1])) >> 32) * 16
    if (int(table[line]) & 0xFFFF) == (h2 & 0xFFFF):
        return line
    return -1


@kernel("void(uint32[::1], int64, int64)")
def _halve(table: Any, at: Any, slots: Any) -> Any:
    for i in range(at, at + slots):
        s = int(table[i]) & M32
        if s != 0:
            count = (((s >> 20) & 63) + 1) >> 1
            table[i] = (s & ~(63 << 20)) | (count << 20)


@kernel("int64(int64, int64, int64, boolean)")
def _renewed(old: Any, kind: Any, tag: Any, tagged: Any) -> Any:
    """Kind and tag bits of a successor that came again. Tagged tables count in `kind` how many different
    tags (trajectories) brought it, up to 4."""
    if not tagged:
        return kind << 26
    kind = (old >> 26) & 7
    if ((old >> 29) & 7) != tag and kind < 3:
        kind += 1
    return (kind << 26) | (tag << 29)


@kernel("void(uint32[::1], int64, int64, int64, int64, boolean)")
def insert(table: Any, h: Any, token: Any, kind: Any, tag: Any, tagged: Any) -> Any:
    """The context with hash h was followed by token. Ids over MAX_TOKEN are not held."""
    if token > MAX_TOKEN:
        return
    base = OFFSET + ((h * int(table[0])) >> 32) * 16
    check = h & 0xFFF
    stamp = (int(table[2]) >> 4) & 0xFFF
    at = -1
    worst = base
    lowest = 1 << 30
    for e in range(4):
        head = int(table[base + 4 * e]) & M32
        total = (head >> 13) & 127
        if total > 0 and (head & 0xFFF) == check:
            at = base + 4 * e
            break
        worth = 0
        if total > 0:
            # An occurrence twice as often is worth 2048 x 16 tokens of age.
            worth = 8192 + log2_floor(total) * 2048 - ((stamp - (head >> 20)) & 0xFFF)
        if worth < lowest:
            lowest = worth
            worst = base + 4 * e
    fresh = token | (1 << 20) | (kind << 26)
    if tagged:
        fresh = token | (1 << 20) | (tag << 29)
    if at < 0:
        table[worst] = check | (1 << 13) | (stamp << 20)
        table[worst + 1] = fresh
        table[worst + 2] = 0
        table[worst + 3] = 0
        return
    head = int(table[at]) & M32
    total = ((head >> 13) & 127) + 1
    overflows = (head >> 12) & 1
    found = -1
    old = 0
    for i in range(3):
        old = int(table[at + 1 + i]) & M32
        if old != 0 and (old & 0xFFFFF) == token:
            found = i
            break
    count = 1
    if found >= 0:
        count = ((old >> 20) & 63) + 1
        fresh = token | (count << 20) | _renewed(old, kind, tag, tagged)
        for i in range(found, 0, -1):
            table[at + 1 + i] = table[at + i]
    else:
        pushed = int(table[at + 3]) & M32
        if pushed != 0:
            line = wide_line(table, h) if overflows == 1 else -1
            if line >= 0:
                place = 14
                for i in range(15):
                    old = int(table[line + 1 + i]) & M32
                    if old == 0:
                        place = i
                        break
                    if (old & 0xFFFFF) == token:
                        place = i
                        count = ((old >> 20) & 63) + 1
                        fresh = token | (count << 20) | _renewed(old, kind, tag, tagged)
                        break
                for i in range(place, 0, -1):
                    table[line + 1 + i] = table[line + i]
                table[line + 1] = pushed
            else:
                h2 = mix(h, 77)
                line = OFFSET + int(table[0]) * 16 + ((h2 * int(table[1])) >> 32) * 16
                table[line] = (h2 & 0xFFFF) | (stamp << 16)
                table[line + 1] = pushed
                for i in range(2, 16):
                    table[line + i] = 0
                overflows = 1
        table[at + 3] = table[at + 2]
        table[at + 2] = table[at + 1]
    table[at + 1] = fresh
    if total > TOTAL_BOUND or count > COUNT_BOUND:
        total = (total + 1) >> 1
        _halve(table, at + 1, 3)
        if overflows == 1:
            line = wide_line(table, h)
            if line >= 0:
                _halve(table, line + 1, 15)
    table[at] = check | (overflows << 12) | (total << 13) | (stamp << 20)
