"""Search: the occurrences of a context's end, as index.py's docstring defines them, in up to three places at once.

Called by TrajectoryMemory, one call a step. May import index.py and the kernel decorator. As there, kernels run as
plain Python too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agentspec.memory.index import agreement, look_up, order_length
from agentspec.memory.kernels import kernel

__all__ = [
    "AGREEMENT",
    "END",
    "IN_MEMORY",
    "IN_OUTPUT",
    "IN_SHARED",
    "PLACE",
    "POSITION",
    "SOURCE",
    "copy_longest",
    "find",
]

# Columns of a row of find()'s result, and the places it names.
PLACE, POSITION, AGREEMENT, SOURCE, END = range(5)
IN_OUTPUT, IN_MEMORY, IN_SHARED = range(3)
_CURRENT_SOURCE = 3  # Source.CURRENT


@kernel("int64(int32[:, ::1], int64, int64)")
def segment_at(segments: Any, count: Any, position: Any) -> Any:
    """The last segment (row: start, end, ...) that starts at or before position; -1 if none does."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        if segments[middle, 0] <= position:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel(
    "int64(int32[::1], int64, int32[::1], int64, int32[:, ::1], int32[::1], int32[:, ::1], int64, "
    "int64, int64, int64, int64[::1], int64, int32[:, ::1], int64)"
)
def find_in(
    context: Any,
    end: Any,
    tokens: Any,
    base: Any,
    links: Any,
    table: Any,
    segments: Any,
    segment_count: Any,
    min_match: Any,
    max_match: Any,
    recent: Any,
    taken: Any,
    place: Any,
    found: Any,
    count: Any,
) -> Any:
    """Append the occurrences of the end of context[:end] in one index to found[count:]; returns the new
    count.

    taken: int64[3], how many positions each order has had already (own output and memory share it).
    """
    if len(table) == 0:
        return count
    # From the lowest order up: the head of each chain, until a context is new or has occurred once only.
    head_0 = -1
    head_1 = -1
    head_2 = -1
    top = 0  # orders below this have a chain of two or more
    single = -1
    while top < 3:
        length = order_length(top)
        if length > max_match or length > end:
            break
        _, head = look_up(tokens, table, top, context, end)
        if head < 0:
            break
        if links[head - base, top] < 0:
            single = head
            break
        if top == 0:
            head_0 = head
        elif top == 1:
            head_1 = head
        else:
            head_2 = head
        top += 1
    if single >= 0:
        n = agreement(tokens, single, context, end, max_match)
        wanted = False
        for order in range(top, 3):
            if order_length(order) <= n:
                wanted = wanted or taken[order] < recent
                taken[order] += 1
        if wanted and n >= min_match:
            found[count, PLACE] = place
            found[count, POSITION] = single
            found[count, AGREEMENT] = n
            count += 1
    for order in range(top - 1, -1, -1):
        position = head_2
        if order == 0:
            position = head_0
        elif order == 1:
            position = head_1
        above = order_length(order + 1)
        limit = min(max_match, above)
        if order == 2:
            limit = max_match
        while position >= 0 and taken[order] < recent:
            n = agreement(tokens, position, context, end, limit)
            # Those that agree in as many as the next order asks are that order's, and found there.
            if (n < above or above > max_match) and n >= min_match:
                found[count, PLACE] = place
                found[count, POSITION] = position
                found[count, AGREEMENT] = n
                count += 1
            taken[order] += 1
            position = int(links[position - base, order])
    return count


@kernel(
    "int64(int32[::1], int64, int64, int32[:, ::1], int32[::1], "
    "int32[::1], int32[:, ::1], int32[::1], int32[:, ::1], int64, "
    "int32[::1], int32[:, ::1], int32[::1], int32[:, ::1], int64, "
    "int64, int64, int64, int32[:, ::1])"
)
def find(
    context: Any,
    end: Any,
    base: Any,
    own_links: Any,
    own_table: Any,
    tokens: Any,
    links: Any,
    table: Any,
    segments: Any,
    segment_count: Any,
    shared_tokens: Any,
    shared_links: Any,
    shared_table: Any,
    shared_segments: Any,
    shared_segment_count: Any,
    min_match: Any,
    max_match: Any,
    recent: Any,
    found: Any,
) -> Any:
    """All occurrences of the end of context[:end], as the module's docstring defines them.

    found: int32[6 * recent or more, 5], rows of place, position, agreement, source, end (of what may be
    copied; -1: a copy of the own output has no end). Returns how many rows are filled.
    """
    taken = np.zeros(3, dtype=np.int64)
    count = find_in(
        context, end, context, base, own_links, own_table, segments, 0,
        min_match, max_match, recent, taken, IN_OUTPUT, found, 0,
    )  # fmt: skip
    for i in range(count):
        found[i, SOURCE] = _CURRENT_SOURCE
        found[i, END] = -1
    first = count
    count = find_in(
        context, end, tokens, 0, links, table, segments, segment_count,
        min_match, max_match, recent, taken, IN_MEMORY, found, count,
    )  # fmt: skip
    for i in range(first, count):
        segment = segment_at(segments, segment_count, found[i, POSITION])
        found[i, SOURCE] = segments[segment, 2]
        found[i, END] = segments[segment, 1]
    first = count
    taken[:] = 0
    count = find_in(
        context, end, shared_tokens, 0, shared_links, shared_table, shared_segments, shared_segment_count,
        min_match, max_match, recent, taken, IN_SHARED, found, count,
    )  # fmt: skip
    for i in range(first, count):
        segment = segment_at(shared_segments, shared_segment_count, found[i, POSITION])
        found[i, SOURCE] = shared_segments[segment, 2]
        found[i, END] = shared_segments[segment, 1]
    # Stable, by falling agreement: the order in which they were found settles the rest.
    for i in range(1, count):
        place = found[i, PLACE]
        position = found[i, POSITION]
        n = found[i, AGREEMENT]
        source = found[i, SOURCE]
        stop = found[i, END]
        j = i - 1
        while j >= 0 and found[j, AGREEMENT] < n:
            for column in range(5):
                found[j + 1, column] = found[j, column]
            j -= 1
        found[j + 1, PLACE] = place
        found[j + 1, POSITION] = position
        found[j + 1, AGREEMENT] = n
        found[j + 1, SOURCE] = source
        found[j + 1, END] = stop
    return count


@kernel(
    "UniTuple(int64, 3)(int32[::1], int64, int64, int32[:, ::1], int32[::1], "
    "int32[::1], int32[:, ::1], int32[::1], int32[:, ::1], int64, "
    "int32[::1], int32[:, ::1], int32[::1], int32[:, ::1], int64, "
    "int64, int64, int64, int32[::1])"
)
def copy_longest(
    context: Any,
    end: Any,
    base: Any,
    own_links: Any,
    own_table: Any,
    tokens: Any,
    links: Any,
    table: Any,
    segments: Any,
    segment_count: Any,
    shared_tokens: Any,
    shared_links: Any,
    shared_table: Any,
    shared_segments: Any,
    shared_segment_count: Any,
    min_match: Any,
    max_match: Any,
    recent: Any,
    copied: Any,
) -> Any:
    """(count, agreement, source) of what followed the first of find()'s occurrences; copied[:count] is filled.

    (0, 0, 0) where there is none. A copy of the own output goes on periodically over what it copied itself.
    """
    found = np.empty((6 * recent, 5), np.int32)
    if find(
        context, end, base, own_links, own_table, tokens, links, table, segments, segment_count,
        shared_tokens, shared_links, shared_table, shared_segments, shared_segment_count,
        min_match, max_match, recent, found,
    ) == 0:  # fmt: skip
        return 0, 0, 0
    position = int(found[0, POSITION])
    place = int(found[0, PLACE])
    count = len(copied)
    if place == IN_OUTPUT:
        at = position
        for i in range(count):
            copied[i] = context[at]
            at += 1
            if at == end:
                at = position
    else:
        count = min(count, int(found[0, END]) - position)
        held = tokens if place == IN_MEMORY else shared_tokens
        for i in range(count):
            copied[i] = held[position + i]
    return count, int(found[0, AGREEMENT]), int(found[0, SOURCE])
