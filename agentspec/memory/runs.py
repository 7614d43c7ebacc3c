"""Runs: which pieces of a sequence are held already, and names for pieces that are the same in every process.

Called by TrajectoryMemory, which lays prompts by it. May import index.py and the kernel decorator. As there, kernels
run as plain Python too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.memory.index import look_up, order_length
from agentspec.memory.kernels import kernel

__all__ = ["common_run", "identities", "identity", "lay_runs", "longest_run"]


@kernel("int64(int32[::1], int64, int64, int32[::1], int64, int64)")
def common_run(ids: Any, first: Any, last: Any, tokens: Any, size: Any, start: Any) -> Any:
    """How many tokens from tokens[start] on equal those from ids[first] on, within tokens[:size] and
    ids[:last].
    """
    n = 0
    while start >= 0 and first + n < last and start + n < size and tokens[start + n] == ids[first + n]:
        n += 1
    return n


@kernel(
    "UniTuple(int64, 2)(int32[::1], int64, int64, int64, int32[::1], int64, int32[:, ::1], int32[::1], int64, int64)"
)
def longest_run(
    ids: Any, behind: Any, first: Any, last: Any, tokens: Any, size: Any, links: Any, table: Any, least: Any, tries: Any
) -> Any:
    """(start, length) of the longest run of tokens[:size] that equals ids[first:...], at most
    ids[first:last]. One that is preceded by ids[behind:first], and with that at least `least` tokens long, is better
    than any that isn't.

    Looks at the `tries` most recent runs that agree in the highest order's worth of tokens (fewer where
    ids[first:last] is short; a run of one token isn't looked for). (-1, 0) if there is none. Of equals the
    most recent wins.
    """
    best_start = -1
    best = 0
    best_joins = False
    if len(table) == 0:
        return best_start, best
    # The run is looked for by its first `reach` tokens: they have to be followed by one, as all that is
    # indexed is.
    reach = 0
    for order in range(3):
        if order_length(order) < last - first:
            reach = order_length(order)
    position = -1
    chain = 0
    order = 0
    while order < 3 and order_length(order) <= reach:
        _, position = look_up(tokens, table, order, ids, first + reach)
        chain = order
        if position < 0 or links[position, order] < 0:
            break
        order += 1
    recent = -1
    period = 0
    cut_off = False  # whether the most recent run ended where its stretch does, and not by another token
    for attempt in range(tries):
        if position < 0:
            break
        start = position - reach
        n = common_run(ids, first, last, tokens, size, start)
        if attempt == 0:
            recent = start
            cut_off = first + n < last and (start + n >= size or tokens[start + n] < 0)
        elif attempt == 1:
            period = recent - start
        gap = first - behind
        joins = n > 0 and gap <= start and gap + n >= least
        while joins and gap > 0:
            joins = tokens[start - gap] == ids[first - gap]
            gap -= 1
        if (joins and not best_joins) or (joins == best_joins and n > best):
            best = n
            best_start = start
            best_joins = joins
            if joins and first + n == last:
                break
        position = int(links[position, chain])
    if cut_off and period > 0 and first + best < last:
        # Text that repeats itself (a million equal tokens): all that was tried lies at its end. Go back by
        # periods.
        step = (last - first) // period * period
        while step >= period:
            n = common_run(ids, first, last, tokens, size, recent - step)
            if n > best:
                best = n
                best_start = recent - step
                break
            step = step // 2 // period * period
    return best_start, best


@kernel("int64(int32[::1], int64, int64, int32[::1], int64, int32[:, ::1], int32[::1], int64, int64, int32[:, ::1])")
def lay_runs(
    ids: Any,
    first: Any,
    last: Any,
    tokens: Any,
    size: Any,
    links: Any,
    table: Any,
    shortest: Any,
    tries: Any,
    laid: Any,
) -> Any:
    """Cut ids[first:last] into runs of at least `shortest` tokens that are held, and what lies between.

    laid: int32[n, 3], filled with rows (start, end, position in tokens or -1 for what isn't held), n >= 2 + 2
    * (last - first) // shortest. Returns the number of rows. Linear: a held run is skipped, a token that
    starts none costs at most tries * shortest comparisons.
    """
    count = 0
    at = first
    new = first
    while at < last and last - at >= shortest:
        # A few tokens between two runs may be held with what follows them: many messages begin alike, and of those
        # only the most recent were tried there.
        behind = at
        if at > first and at - new < shortest:
            behind = new
        start, length = longest_run(ids, behind, at, last, tokens, size, links, table, shortest, tries)
        begin = at
        while length > 0 and begin > new and start > 0 and tokens[start - 1] == ids[begin - 1]:
            begin -= 1
            start -= 1
            length += 1
        if length < shortest:
            at += 1
            continue
        at = begin
        if at > new:
            laid[count, 0] = new
            laid[count, 1] = at
            laid[count, 2] = -1
            count += 1
        laid[count, 0] = at
        laid[count, 1] = at + length
        laid[count, 2] = start
        count += 1
        at += length
        new = at
    if last > new:
        laid[count, 0] = new
        laid[count, 1] = last
        laid[count, 2] = -1
        count += 1
    return count


@kernel("void(int32[::1], int64[:, ::1], int64[::1])")
def identities(ids: Any, bounds: Any, result: Any) -> None:
    """result[i] = 62 bits over ids[bounds[i, 0] : bounds[i, 1]] and its length; the same in every process."""
    for i in range(len(bounds)):
        start = int(bounds[i, 0])
        end = int(bounds[i, 1])
        a = 0x1234567 + (end - start)
        b = 0x7654321
        for j in range(start, end):
            token = int(ids[j])
            a = (a * 1103515245 + token + 1) % 2147483647
            b = (b * 1664525 + token + 1) % 2147483629
        result[i] = (a << 31) | b


def identity(ids: NDArray[np.int32], start: int, end: int) -> int:
    """identities() of one piece."""
    result = np.empty(1, dtype=np.int64)
    identities(ids, np.array([(start, end)], dtype=np.int64), result)
    return int(result[0])
