"""What index.py's docstring defines, by brute force: every position is looked at, nothing is clever."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.memory.index import ORDERS, SEAM
from agentspec.memory.search import IN_MEMORY, IN_OUTPUT, IN_SHARED

Row = tuple[int, int, int, int, int]  # place, position, agreement, source, end


def agreement(tokens: Sequence[int], position: int, context: Sequence[int], most: int) -> int:
    n = 0
    while (
        n < most
        and n < position
        and n < len(context)
        and tokens[position - 1 - n] != SEAM
        and tokens[position - 1 - n] == context[-1 - n]
    ):
        n += 1
    return n


def find(
    context: Sequence[int],
    prompt_length: int,
    memory: Sequence[int],
    segments: Sequence[tuple[int, int, int]],
    shared: Sequence[int],
    shared_segments: Sequence[tuple[int, int, int]],
    min_match: int,
    max_match: int,
    recent: int,
) -> list[Row]:
    """Rows as search.find gives them. segments: (start, end, source)."""
    own = [(IN_OUTPUT, p, agreement(context, p, context, max_match), 3, -1) for p in range(prompt_length, len(context))]
    held = [
        (IN_MEMORY, p, agreement(memory, p, context, max_match), source, end)
        for start, end, source in segments
        for p in range(start, end)
    ]
    theirs = [
        (IN_SHARED, p, agreement(shared, p, context, max_match), source, end)
        for start, end, source in shared_segments
        for p in range(start, end)
    ]
    result: set[Row] = set()
    for group in (own[::-1] + held[::-1], theirs[::-1]):
        for order in ORDERS:
            if order <= max_match and order <= len(context):
                result.update([row for row in group if row[2] >= order][:recent])
    rows = [row for row in result if row[2] >= min_match]
    return sorted(rows, key=lambda row: (-row[2], row[0], -row[1]))
