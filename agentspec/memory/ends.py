"""Ends: which trajectory a prompt continues that names none.

A prompt that begins with everything that an unnamed trajectory has seen (its last prompt and its last output)
is that trajectory's next call. Nothing leaks by that: all that is joined is in the prompt already. So two users
with the same first prompt are never merged, a common system prompt joins nobody, and a trajectory that has
gone on can't be claimed by an older prefix of it.

Deterministic: a function of the calls made, never of a clock. Used by the SGLang plugin (over token ids) and
by agentspec.serve (over messages).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from agentspec.errors import IntegrityError

__all__ = ["Ends"]

Item = TypeVar("Item", bound=Hashable)
End = tuple[str, int, bytes]  # scope, length, digest


class Ends(Generic[Item]):
    """Where items can be continued: after the bytes that they have seen, inside their scope. Not thread-safe."""

    def __init__(self) -> None:
        self._ends: dict[Item, list[End]] = {}  # oldest first
        self._items: dict[End, list[Item]] = {}
        self._lengths: dict[str, dict[int, int]] = {}  # scope -> length of an end -> how many

    def __len__(self) -> int:
        return len(self._ends)

    def hold(self, item: Item, scope: str, seen: bytes) -> None:
        """A prompt of this scope that begins with `seen` continues the item. An item may have several ends."""
        self.restore(item, [(scope, len(seen), hashlib.blake2b(seen, digest_size=16).digest())])

    def forget(self, item: Item) -> list[End]:
        """Nothing continues the item any more, whether or not something did. Its ends, for `restore`."""
        gone = self._ends.pop(item, [])
        for end in gone:
            scope, length, _ = end
            items = self._items[end]
            items.remove(item)
            if not items:
                del self._items[end]
            lengths = self._lengths[scope]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._lengths[scope]
        return gone

    def restore(self, item: Item, ends: list[End]) -> None:
        """What `forget` returned holds again."""
        for end in ends:
            scope, length, _ = end
            self._ends.setdefault(item, []).append(end)
            self._items.setdefault(end, []).append(item)
            lengths = self._lengths.setdefault(scope, {})
            lengths[length] = lengths.get(length, 0) + 1

    def oldest(self) -> Item:
        """The item whose end has been held longest."""
        return next(iter(self._ends))

    def continued(self, scope: str, prompt: bytes) -> Iterator[Item]:
        """The items that the prompt continues, longest end first, the oldest of equals first. One pass over the
        prompt, whatever is held."""
        lengths = sorted(n for n in self._lengths.get(scope, ()) if n <= len(prompt))
        running, at, found = hashlib.blake2b(digest_size=16), 0, []
        for length in lengths:
            running.update(prompt[at:length])
            found.append((scope, length, running.copy().digest()))
            at = length
        for end in reversed(found):
            yield from tuple(self._items.get(end, ()))

    def check(self) -> None:
        """Raise IntegrityError unless the three tables say the same. For tests."""
        held = sorted((end, id(item)) for item, ends in self._ends.items() for end in ends)
        found = sorted((end, id(item)) for end, items in self._items.items() for item in items)
        counted = sorted(
            (scope, n) for scope, lengths in self._lengths.items() for n, k in lengths.items() for _ in range(k)
        )
        if held != found or counted != sorted(end[:2] for end, _ in held):
            raise IntegrityError(f"ends: {len(held)} held, {len(found)} found, {len(counted)} counted")
