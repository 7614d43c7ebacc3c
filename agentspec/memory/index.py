"""The match index: where did the end of a context occur before, exactly, in O(1) a token and some 20 bytes a
token.

Called by TrajectoryMemory, which searches it by search.py and lays prompts against it by runs.py. May import numpy
and the kernel decorator.

What is matched
    The memory's tokens lie in one int32 array. A *stretch* is a run of tokens that followed one another in
    some real prompt or output; stretches are parted by a SEAM (-1), which no token equals. Inside a stretch
    lie segments and, after a seam, at most LEAD tokens of lead-in: what really stood before the first
    segment, held elsewhere already and repeated so that the segment's first tokens have a context.

    Position p *follows a context of k tokens* if p lies in a segment (not in a lead-in) and the k tokens
    before p, in the same stretch, equal the context's last k. Its *agreement* is the largest such k, counted
    up to max_match. What was copied from p runs to the end of p's segment and no further.

    For one place (the call's own output, the memory, the namespace's shared memory) and each k of ORDERS, the
    `recent` largest positions that follow a context of k tokens are found, own output and memory counting as
    one place in which own output is the more recent. The result is their union, without those whose agreement
    is under min_match; by falling agreement, then own output before memory before shared, then by falling
    position. Orders over max_match, or longer than the context, don't count. tests/memory/oracle.py says the
    same by brute force.

How
    For each order a hash table gives the largest position of each distinct context, and `links` chains each
    position to the one before with the same context: so a chain holds true occurrences only, and `recent`
    hops find them all, however long the chain is. A context of a higher order enters the table only when the
    next lower order's has occurred twice (until then that one occurrence answers for it), which keeps the
    table small. All orders share one open-addressing table of int32: order (2 bits), some bits of the hash
    (3), position (26). Per token: 4 bytes token, 12 links, and about 1 entry of 4 bytes at a load between 0.78
    and 0.875.

Kernels are written in arithmetic that never leaves int64 and never overflows it, so that they run as plain
Python too (NUMBA_DISABLE_JIT=1).
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import IntegrityError, MemoryBudgetError
from agentspec.memory.kernels import kernel

__all__ = ["LEAD", "MAX_TOKENS", "ORDERS", "SEAM", "MatchIndex"]

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Of the triples tried on recorded trajectories (benchmarks/memory.py orders), the one whose copies came true
# most.
ORDERS = (1, 2, 6)
LEAD = 16  # at least the highest order; agreement beyond 16 tokens tells nothing more (the same benchmark)
SEAM = -1
MAX_TOKENS = 2**26 - 1  # positions have 26 bits of a table entry

_ORDER_0, _ORDER_1, _ORDER_2 = ORDERS
_EMPTY = -1
_OWN_PAGES = 65536  # bytes from which an array gets pages of its own
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 7, 8


@kernel("int64(int64)")
def order_length(order: Any) -> Any:
    if order == 0:
        return _ORDER_0
    if order == 1:
        return _ORDER_1
    if order == 2:
        return _ORDER_2
    return 1 << 40


@kernel("int64(int32[::1], int64, int64)")
def context_hash(tokens: Any, end: Any, length: Any) -> Any:
    """32 bits over tokens[end - length : end]. Fixed constants: every process and every rank agrees."""
    h = 0x2545F491 + length
    for i in range(end - length, end):
        h = ((h ^ int(tokens[i])) * 0x2C1B3C6D) & 0xFFFFFFFF
        h ^= h >> 15
    h ^= h >> 16
    h = (h * 0x297A2D39) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * 0x7FEB352D) & 0xFFFFFFFF
    return h ^ (h >> 16)


@kernel("int64(int32[::1], int64, int32[::1], int64, int64)")
def agreement(tokens: Any, position: Any, context: Any, end: Any, limit: Any) -> Any:
    """How many tokens before tokens[position] equal those before context[end], at most limit."""
    most = min(limit, min(position, end))
    n = 0
    while n < most and tokens[position - 1 - n] == context[end - 1 - n]:
        n += 1
    return n


@kernel("UniTuple(int64, 2)(int32[::1], int32[::1], int64, int32[::1], int64)")
def look_up(tokens: Any, table: Any, order: Any, context: Any, end: Any) -> Any:
    """(slot, position) of the context of `order` before context[end]; position is -1 and slot free if it is
    new.

    The table always has a free slot. Ends at the first free one: entries are never removed.
    """
    length = order_length(order)
    h = context_hash(context, end, length)
    slots = len(table)
    slot = (h * slots) >> 32
    tag = (order << 3) | (h & 7)
    while True:
        entry = int(table[slot])
        if entry == _EMPTY:
            return slot, -1
        if entry >> 26 == tag:
            position = entry & 0x3FFFFFF
            if agreement(tokens, position, context, end, length) == length:
                return slot, position
        slot += 1
        if slot == slots:
            slot = 0


@kernel("int64(int32[::1], int64, int64)")
def entry_for(context: Any, end: Any, order: Any) -> Any:
    """The table entry's tag for the context before context[end], in place; add a position to it."""
    return ((order << 3) | (context_hash(context, end, order_length(order)) & 7)) << 26


@kernel("int64(int32[::1], int64, int64, int64, int32[:, ::1], int32[::1], int64[::1])")
def insert(tokens: Any, base: Any, first: Any, last: Any, links: Any, table: Any, used: Any) -> Any:
    """Index positions first..last-1 of tokens; links has a row for each position from base on.

    used: int64[1], taken slots of the table. Returns the first position not indexed: `last`, or less where
    the table is full (then it has to grow, and the call is repeated from there). A position takes at most
    three slots.
    """
    limit = (len(table) * _LOAD_NUMERATOR) // _LOAD_DENOMINATOR - 3
    run = 0  # tokens before the position in its stretch, as far as they matter
    while run < _ORDER_2 and first - 1 - run >= 0 and tokens[first - 1 - run] >= 0:
        run += 1
    taken = int(used[0])
    position = first
    while position < last:
        if taken > limit:
            break
        row = position - base
        links[row, 0] = -1
        links[row, 1] = -1
        links[row, 2] = -1
        for order in range(3):
            if run < order_length(order):
                break
            slot, before = look_up(tokens, table, order, tokens, position)
            table[slot] = entry_for(tokens, position, order) + position
            if before < 0:
                taken += 1
                break
            links[row, order] = before
            if order < 2 and links[before - base, order] < 0:
                # The context has now occurred twice: its first occurrence enters the next order too.
                longer = order_length(order + 1)
                valid = before >= longer
                n = order_length(order)
                while valid and n < longer:
                    valid = tokens[before - 1 - n] >= 0
                    n += 1
                if valid:
                    free, _ = look_up(tokens, table, order + 1, tokens, before)
                    table[free] = entry_for(tokens, before, order + 1) + before
                    taken += 1
        if run < _ORDER_2:
            run += 1
        position += 1
    used[0] = taken
    return position


@kernel("int64(int32[::1], int32[::1], int64, int64, int32[:, ::1], int32[::1], int64[::1])")
def add(ids: Any, tokens: Any, first: Any, base: Any, links: Any, table: Any, used: Any) -> Any:
    """Write ids to tokens[first:] and index them; returns what insert() does. There must be room in tokens and
    links."""
    for i in range(len(ids)):
        tokens[first + i] = ids[i]
    return insert(tokens, base, first, first + len(ids), links, table, used)


@kernel("void(int32[::1], int32[::1], int32[::1])")
def move_entries(tokens: Any, old: Any, new: Any) -> None:
    """Put every entry of table `old` into the larger, empty table `new`."""
    slots = len(new)
    for i in range(len(old)):
        entry = int(old[i])
        if entry == _EMPTY:
            continue
        position = entry & 0x3FFFFFF
        h = context_hash(tokens, position, order_length(entry >> 29))
        slot = (h * slots) >> 32
        while new[slot] != _EMPTY:
            slot += 1
            if slot == slots:
                slot = 0
        new[slot] = entry


class MatchIndex:
    """Tokens with an index over them, growing. Not thread-safe: its owner holds a lock.

    tokens: int32[capacity], the first `size` are in use
    charged: for so many tokens memory is held, or about to be; somewhat more than size
    links:  int32[capacity - base, 3], for each position from base on and each order, the position before it
            with the same context, or -1
    table:  int32[slots], see the module's docstring; -1: free

    An index with a base indexes only positions from base on (an open call's output behind its prompt).
    """

    __slots__ = ("base", "charged", "links", "size", "table", "tokens", "used")

    def __init__(self, capacity: int = 64, base: int = 0) -> None:
        self.base = base
        self.size = 0
        self.charged = max(1, capacity)
        self.tokens: Int32 = _allocate(self.charged)
        self.links: Int32 = np.empty((0, 3), dtype=np.int32)
        self.table: Int32 = np.empty(0, dtype=np.int32)
        self.used: Int64 = np.zeros(1, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held. Of tokens and links `charged` count: what lies behind is addresses without memory."""
        links = min(len(self.links), self.charged - self.base)
        return 4 * self.charged + 12 * links + self.table.nbytes + self.used.nbytes

    def write(self, ids: Int32) -> None:
        """Add tokens without indexing them. O(1) a token, amortised."""
        need = self.size + len(ids)
        if need > self.charged:
            self._reserve(need)
        self.tokens[self.size : need] = ids
        self.size = need

    def append(self, ids: Int32) -> None:
        """Add tokens and index each: it followed the context before it. O(1) a token, amortised."""
        first, need = self.size, self.size + len(ids)
        if need > self.charged:
            self._reserve(need)
        if self.charged - self.base > len(self.links):
            self._reserve_links()
        if len(self.table) < 64:
            self._grow_table(0)
        used = int(self.used[0])
        at = add(ids, self.tokens, first, self.base, self.links, self.table, self.used)
        self.size = need
        if at < need:
            self._grow_table((int(self.used[0]) - used) * (need - at) // max(1, at - first))
            self.insert(at, need)

    def insert(self, first: int, last: int) -> None:
        """Index positions first..last-1, whose tokens are written already."""
        if len(self.table) < 64:
            self._grow_table(0)
        at, used = first, int(self.used[0])
        while True:
            at = insert(self.tokens, self.base, at, last, self.links, self.table, self.used)
            if at >= last:
                return
            # The rest will take as many entries a token as what is done has: one growth, not ten.
            self._grow_table((int(self.used[0]) - used) * (last - at) // max(1, at - first))

    def seam(self, lead: Int32) -> None:
        """End the stretch: what comes next follows `lead` (up to LEAD tokens), not what was written last."""
        if self.size and self.tokens[self.size - 1] != SEAM:
            self.write(_SEAM)
        self.lead(lead)

    def lead(self, tokens: Int32) -> None:
        """Add tokens that are no positions: they are only what comes before the next ones."""
        self.write(tokens)

    def drop(self) -> None:
        """Let the index go; the tokens stay."""
        self.links = np.empty((0, 3), dtype=np.int32)
        self.table = np.empty(0, dtype=np.int32)
        self.used[0] = 0

    # ---- growth ---------------------------------------------------------------------------------

    def _reserve(self, need: int) -> None:
        if need > MAX_TOKENS:
            raise MemoryBudgetError(
                f"one trajectory can hold {MAX_TOKENS} tokens, {need} were needed: start a new trajectory"
            )
        self.charged = need + max(64, need // 64)
        if self.charged > len(self.tokens):
            grown = _allocate(self.charged, spare=True)
            grown[: self.size] = self.tokens[: self.size]
            self.tokens = grown

    def _reserve_links(self) -> None:
        grown = _allocate(3 * (self.charged - self.base), spare=True).reshape(-1, 3)
        held = min(len(self.links), self.size - self.base)
        grown[:held] = self.links[:held]
        self.links = grown

    def _grow_table(self, expected: int) -> None:
        slots = len(self.table)
        least = max(64, 2 * slots if slots < 2048 else slots + slots // 8)
        wanted = (int(self.used[0]) + expected) * 6 // 5
        grown = _allocate(max(least, min(wanted, 8 * slots)))
        grown.fill(_EMPTY)
        if slots:
            move_entries(self.tokens, self.table, grown)
        self.table = grown

    def check(self, segments: Any) -> None:
        """Raise IntegrityError unless links and table are what the definition makes of tokens and segments.

        segments: [(start, end), ...], the indexed ranges. Pure Python over dicts, some microseconds a token.
        """
        tokens = self.tokens[: self.size].tolist()
        expected = 0
        last: list[dict[tuple[int, ...], int]] = [{}, {}, {}]
        occurred: list[dict[tuple[int, ...], int]] = [{}, {}, {}]
        for start, end in segments:
            for position in range(start, end):
                for order, length in enumerate(ORDERS):
                    key = tuple(tokens[max(0, position - length) : position])
                    link = int(self.links[position - self.base, order])
                    if len(key) < length or SEAM in key:
                        if link != -1:
                            raise IntegrityError(f"link {order} of {position} is {link}, but it has no such context")
                        continue
                    if link != last[order].get(key, -1):
                        raise IntegrityError(
                            f"link {order} of {position} is {link}, the occurrence before is at "
                            f"{last[order].get(key, -1)}"
                        )
                    last[order][key] = position
                    occurred[order][key] = occurred[order].get(key, 0) + 1
        for order, length in enumerate(ORDERS):
            for key, position in last[order].items():
                present = order == 0 or occurred[order - 1][key[length - ORDERS[order - 1] :]] > 1
                query = np.array(key, dtype=np.int32)
                _, held = look_up(self.tokens, self.table, order, query, length)
                if held != (position if present else -1):
                    raise IntegrityError(f"order {order}: the table has {held} for a context last seen at {position}")
                expected += present
        entries = int((self.table != _EMPTY).sum())
        if not expected == entries == int(self.used[0]):
            raise IntegrityError(f"{expected} contexts, {entries} table entries, {int(self.used[0])} counted")
        if entries and entries >= len(self.table):
            raise IntegrityError("the table has no free slot")


_SEAM = np.array([SEAM], dtype=np.int32)


def _allocate(count: int, spare: bool = False) -> Int32:
    """int32[count], large ones as pages of their own, which go back to the system at once when they are
    dropped; with room for as many again where that is wanted and takes no memory before it is written to.

    In malloc's heap the arrays of evicted memories leave holes: a store that had turned over its budget a few
    times was seen to hold a fifth more than it counted.
    """
    if 4 * count < _OWN_PAGES or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(count, dtype=np.int32)
    pages = mmap.mmap(-1, (8 if spare else 4) * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if spare and hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would be held whole for its first token
        except OSError:
            pass  # a kernel without them
    return np.frombuffer(pages, dtype=np.int32)
