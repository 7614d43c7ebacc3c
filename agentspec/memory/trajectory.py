"""TrajectoryMemory: everything one trajectory has seen, as token ids cut into segments with sources.

May import numpy and the index. Engines, the replay and the SGLang plugin call it; one instance a trajectory.

A call goes like this:

    context = memory.extend(prompt, spans)     # lay the prompt against what is held; adds only what is new
    matches = memory.match(context)            # where the end of this context occurred before
    tokens, source = matches.copy(0, 16)       # what followed the best of them
    memory.append(context, emitted)            # accepted tokens, as they come
    memory.close(context)                      # the call is over: its output is now an earlier output

Several calls of one trajectory may be open at once. Each has its own context and sees what the memory holds
and its own output; another call's output joins the memory when that call is closed. So what a call sees
depends on the order of extend and close alone, not on how steps interleave, and an output always lies in one
piece.

In one array lie segments in the order in which they came. Where two neighbours did not follow one another in
a real prompt, a SEAM (-1) and a lead-in part them; index.py's docstring defines both, and what a match is.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import IntegrityError, InvalidRequestError, MemoryBudgetError, shown
from agentspec.memory import forks, runs
from agentspec.memory.index import LEAD, MAX_TOKENS, SEAM, MatchIndex
from agentspec.memory.matches import Copied, Matches
from agentspec.memory.saved import SavedMemory
from agentspec.memory.search import copy_longest, find
from agentspec.memory.segments import WHOLE, Segment, Source, Span, Tokens, as_source, as_tokens, cover

__all__ = ["Context", "TrajectoryMemory"]

Int32 = NDArray[np.int32]

# A run of this many tokens counts as held, wherever it was held; shorter ones may be coincidence.
SHORTEST_RUN = 32
# Of the places where a run may be held so many are tried, the most recent first.
TRIES = 16
DEFAULT_MAX_TOKENS = 4 * 2**20
SMALLEST_MEMORY = 1024  # tokens
# What a memory costs before it holds a token, and an open call besides its arrays: measured by
# benchmarks/memory.py.
_EMPTY_BYTES = 2300
_OPEN_BYTES = 2048
_HELD_ENTRY_BYTES = 80  # the two numbers of an entry of _held, besides the dict
_PIECES_BYTES = 300  # an entry of _pieces, besides the numbers in its array


class Context:
    """One open call: its own real context (prompt and output so far), whatever the memory holds besides.

    memory:         the trajectory's memory
    prompt_length:  tokens of the prompt
    held:           prompt tokens that the memory already had
    added:          the segments that the prompt added, in their order
    layout:         int32[m, 3], where the prompt lies in the memory: tokens[row[0]:row[1]] of the context are
                    tokens[row[2]:...] of the memory (as it was when the call was opened)
    stored:         the output's segment, once the call is closed; None if there was no output
    """

    __slots__ = (
        "added",
        "bridge",
        "closed",
        "held",
        "index",
        "layout",
        "memory",
        "prompt_length",
        "stored",
        "tail",
    )

    def __init__(self, memory: TrajectoryMemory, prompt: Int32) -> None:
        self.memory = memory
        self.prompt_length = len(prompt)
        self.held = 0
        self.added: tuple[Segment, ...] = ()
        self.layout: Int32 = np.empty((0, 3), dtype=np.int32)
        self.stored: Segment | None = None
        self.closed = False
        self.index = MatchIndex(len(prompt) + 256, base=len(prompt))
        self.index.write(prompt)
        self.bridge = self.tail = -1

    @property
    def tokens(self) -> Int32:
        """int32[prompt + output]: a view, valid until the next append."""
        return self.index.tokens[: self.index.size]

    @property
    def output(self) -> Int32:
        """int32[output so far]: a view, valid until the next append."""
        return self.index.tokens[self.prompt_length : self.index.size]

    @property
    def nbytes(self) -> int:
        """Bytes held for the call while it is open."""
        return self.index.nbytes + self.layout.nbytes + _OPEN_BYTES

    def covers(self, position: int) -> bool:
        """Whether the memory's token at `position` is in this prompt, as it was laid when the call was
        opened.
        """
        rows = self.layout
        return bool(((rows[:, 2] <= position) & (position < rows[:, 2] + rows[:, 1] - rows[:, 0])).any())


class TrajectoryMemory:
    """What one trajectory has seen. Thread-safe: every method takes the memory's own lock.

    shared:      the memory of the namespace (outputs of its trajectories), matched too; None: nothing is
                 shared
    max_tokens:  beyond so many the oldest half is forgotten
    attachments: what a proposer learned for this trajectory, by the proposer's name. An attachment has an
                 `nbytes` attribute, so that it counts in the memory's budget, and goes when the memory is
    evicted. epoch:       grows when tokens are forgotten: positions noted before are void then
    """

    def __init__(
        self,
        id: str = "",
        namespace: str | None = None,
        *,
        shared: TrajectoryMemory | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        if not isinstance(max_tokens, int) or not SMALLEST_MEMORY <= max_tokens <= MAX_TOKENS:
            raise InvalidRequestError(f"max_tokens: needed {SMALLEST_MEMORY}..{MAX_TOKENS}, got {shown(max_tokens)}")
        self.id = id
        self.namespace = namespace
        self.shared = shared
        self.max_tokens = max_tokens
        self.attachments: dict[str, Any] = {}
        self.learned: dict[str, dict[str, NDArray[Any]]] = {}
        self.lock = threading.RLock()
        self.epoch = 0
        self.on_growth: Callable[[TrajectoryMemory], None] | None = None
        self._open: list[Context] = []
        self._clear()
        forks.guard_memory(self)

    def _clear(self) -> None:
        self._index = MatchIndex()
        self._rows = np.empty((16, 4), dtype=np.int32)  # start, end, source, role's place in _roles
        self._identities = np.empty(16, dtype=np.int64)
        self._count = 0
        self._roles: list[str] = []
        self._held: dict[int, int] = {}  # identity of a message -> where it lies
        self._keep_pieces({})

    # ---- what is held -------------------------------------------------------------------------

    def __len__(self) -> int:
        """Tokens held, lead-ins and seams included."""
        return self._index.size

    @property
    def tokens(self) -> Int32:
        """int32[n], everything held, in the order in which it came: a view, valid until the next change.

        Between segments may lie a lead-in (tokens that are held elsewhere) and SEAM (-1).
        """
        return self._index.tokens[: self._index.size]

    @property
    def segments(self) -> tuple[Segment, ...]:
        with self.lock:
            return self.segments_from(0)

    def segments_from(self, first: int) -> tuple[Segment, ...]:
        """The segments but for the first `first`: what is new since there were so many."""
        with self.lock:
            return tuple(
                Segment(start, end, Source(source), self._roles[role], identity)
                for (start, end, source, role), identity in zip(
                    self._rows[first : self._count].tolist(),
                    self._identities[first : self._count].tolist(),
                    strict=True,
                )
            )

    @property
    def segment_count(self) -> int:
        return self._count

    @property
    def in_use(self) -> bool:
        """Whether a call is open."""
        return bool(self._open)

    @property
    def nbytes(self) -> int:
        """Bytes held: index, open calls, attachments. Within 10 % of what the process holds for it."""
        with self.lock:
            return (
                _EMPTY_BYTES
                + self._index.nbytes
                + self._rows.nbytes
                + self._identities.nbytes
                + sys.getsizeof(self._held)
                + _HELD_ENTRY_BYTES * len(self._held)
                + self._pieces_bytes
                + sum(context.nbytes for context in self._open)
                + sum(int(getattr(attachment, "nbytes", 0)) for attachment in self.attachments.values())
                + sum(array.nbytes for arrays in self.learned.values() for array in arrays.values())
            )

    def source_at(self, position: int) -> Source:
        """The source of the token at `position` of `tokens`; a lead-in has that of what was before it, the first one
        that of what comes after it. Raises InvalidRequestError beyond the tokens.
        """
        with self.lock:
            self._check_position("source_at", position)
            return Source(int(self._rows[max(0, self._segment_at(position)), 2]))

    # ---- changes ------------------------------------------------------------------------------

    def extend(self, prompt: Tokens, spans: Sequence[Span] | None = None) -> Context:
        """Open a call: lay its prompt (int32[n]) against what is held and add what is new.

        spans cut the prompt into messages, in order and without overlap; what they leave uncovered counts as
        PROMPT. A message that is held already, whole or as a part of one, adds nothing. One that is held for
        the most part (three quarters, in runs of 32 tokens and more) adds only the rest. What no span covers
        is laid run by run. So nothing is stored more than four times, however the history was rewritten
        around it.

        Raises InvalidRequestError for an empty prompt or spans that don't fit it, MemoryBudgetError for a
        prompt that doesn't fit the memory.
        """
        ids = as_tokens(prompt, "prompt")
        if len(ids) == 0:
            raise InvalidRequestError("prompt: needed at least one token, got none")
        tiles = cover(len(ids), spans)
        bounds = np.array([(tile.start, tile.end) for tile, _ in tiles], dtype=np.int64)
        identities = np.empty(len(bounds), dtype=np.int64)
        runs.identities(ids, bounds, identities)
        with self.lock:
            self._make_room(len(ids))
            context = Context(self, ids)
            before = self._count
            layout: list[tuple[int, int, int]] = []
            writer = _Writer(self, ids)
            for (tile, named), identity in zip(tiles, identities.tolist(), strict=True):
                self._lay(writer, tile, named, identity, layout)
            context.added = self.segments_from(before)
            context.layout = np.array(layout, dtype=np.int32).reshape(-1, 3)
            added = sum(segment.end - segment.start for segment in context.added)
            context.held = max(0, len(ids) - added)
            context.bridge, context.tail = writer.bridge, self._index.size
            self._open.append(context)
        self._grew()
        return context

    def append(self, context: Context, tokens: Tokens) -> None:
        """Add emitted tokens (int32[m]) to an open call. Raises InvalidRequestError if the call is closed."""
        ids = as_tokens(tokens, "emitted tokens")
        index = context.index
        with self.lock:
            if context.closed or context.memory is not self:
                raise InvalidRequestError("append: this call is closed, or belongs to another memory")
            held = index.charged + len(index.table)
            try:
                index.append(ids)
            except BaseException:  # Ctrl-C while the kernel ran, or no memory: the index knows of more than it holds
                self._index_again(context, index.size)
                raise
            grew = index.charged + len(index.table) != held
        if grew:
            self._grew()

    def truncate(self, context: Context, output_length: int) -> None:
        """Take back the end of an open call's output: only its first output_length tokens were delivered.

        Raises InvalidRequestError if the call is closed or its output is shorter. O(output).
        """
        with self.lock:
            if context.closed or context.memory is not self:
                raise InvalidRequestError("truncate: this call is closed, or belongs to another memory")
            if not isinstance(output_length, WHOLE) or not 0 <= output_length <= len(context.output):
                raise InvalidRequestError(
                    f"truncate: needed a whole number; the output has {len(context.output)} tokens, "
                    f"{shown(output_length)} were to remain"
                )
            self._index_again(context, context.prompt_length + output_length)

    def close(self, context: Context) -> None:
        """End a call: its output becomes an earlier output, here and in the namespace. Closing twice is
        allowed.

        Raises InvalidRequestError if the call belongs to another memory.
        """
        if context.memory is not self:
            raise InvalidRequestError("close: this call belongs to another memory")
        with self.lock:
            if context.closed:
                return
            context.closed = True
            self._open.remove(context)
            ids, start, end = context.tokens, context.prompt_length, context.index.size
            start = max(start, end - self.max_tokens // 2)  # of an endless output the end is held
            if end > start:
                self._make_room(end - start)
                writer = _Writer(self, ids)
                if context.tail == self._index.size:
                    writer.bridge = context.bridge
                identity = runs.identity(ids, start, end)
                writer.store(start, end, Source.OUTPUT, "assistant", identity)
                context.stored = self.segments_from(self._count - 1)[0]
            # The tokens stay readable; the open output's own index is of no more use.
            context.index.drop()
        if self.shared is not None and end > start:
            self.shared.publish(ids, start, end)
        self._grew()

    def publish(
        self, ids: Int32, start: int, end: int, source: Source = Source.OUTPUT, role: str = "assistant"
    ) -> bool:
        """Hold ids[start:end], which followed ids[:start] in some other trajectory. False if it is held
        already, or nothing.
        """
        if end <= start:
            return False
        with self.lock:
            if end - start > self.max_tokens // 2:
                start = end - self.max_tokens // 2
            self._make_room(end - start)
            identity = runs.identity(ids, start, end)
            if self._find_held(ids, start, end, identity) >= 0:
                return False
            _Writer(self, ids).store(start, end, source, role, identity)
        self._grew()
        return True

    def seed(self, tokens: Tokens, source: Source = Source.SEED) -> int:
        """Hold tokens (int32[n]) as draft material without claiming that they are in any prompt.

        Returns how many tokens were added: 0 if they are held already. Of more than half of max_tokens the end is held.
        """
        ids = as_tokens(tokens, "seed")[-(self.max_tokens // 2) :]
        source = as_source(source)
        if len(ids) == 0:
            return 0
        with self.lock:
            self._make_room(len(ids))
            before = self._count
            layout: list[tuple[int, int, int]] = []
            writer = _Writer(self, ids)
            self._lay(writer, Span(0, len(ids), source, "seed"), True, runs.identity(ids, 0, len(ids)), layout)
            added = sum(segment.end - segment.start for segment in self.segments_from(before))
        self._grew()
        return added

    def seed_text(self, text: str, encode: Callable[[str], Tokens], source: Source = Source.SEED) -> int:
        """Hold text as it is and, where that differs, as it reads inside a JSON string.

        encode: text -> token ids, without special tokens. A model that writes a file through a tool call
        writes it escaped, so that form is what its output will repeat. Returns how many tokens were added.
        """
        added = self.seed(encode(text), source)
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        if escaped != text:
            added += self.seed(encode(escaped), source)
        return added

    def forget_oldest(self, keep: int) -> int:
        """Forget the oldest segments until at most `keep` tokens are held. Returns how many went.

        Rebuilds the index: O(tokens kept). Open calls go on; what they hold themselves isn't touched.
        """
        with self.lock:
            size = self._index.size
            if size <= keep:
                return 0
            rows = self._rows[: self._count]
            first = int(np.searchsorted(rows[:, 0], size - keep))
            cut = int(rows[first, 0]) if first < self._count else size
            old, kept, names = (
                self._index.tokens[cut:size].copy(),
                rows[first:].copy(),
                self._identities[first : self._count],
            )
            kept[:, :2] -= cut
            index = _indexed(old, kept)
            held = {identity: start - cut for identity, start in self._held.items() if start >= cut}
            moved = np.array([0, 0, cut], dtype=np.int32)
            pieces = {name: laid - moved for name, laid in self._pieces.items() if int(laid[:, 2].min()) >= cut}
            layouts = []
            for context in self._open:
                layout = context.layout[context.layout[:, 2] >= cut].copy()
                layout[:, 2] -= cut
                layouts.append((context, context.tail - cut if context.tail > cut else -1, layout))
            # All that takes time is done: an interrupt before this changes nothing.
            self._hold(index, kept, names)
            self._held = held
            self._keep_pieces(pieces)
            self.epoch += 1
            for context, tail, layout in layouts:
                context.tail, context.layout = tail, layout
            return cut

    def clear(self) -> None:
        """Forget everything, attachments too. Open calls go on with what they hold themselves."""
        with self.lock:
            self.forget_oldest(0)
            self._held = {}
            self._keep_pieces({})
            self.attachments.clear()
            self.learned.clear()

    def snapshot(self) -> SavedMemory:
        """What is held, as a file keeps it (copies; not the open calls)."""
        with self.lock:
            learned = {name: dict(arrays) for name, arrays in self.learned.items()}
            for name, attachment in self.attachments.items():
                if hasattr(attachment, "to_arrays"):
                    learned[name] = {key: np.array(array) for key, array in attachment.to_arrays().items()}
            rows = self._rows[: self._count].copy()
            return SavedMemory(self.namespace, self.id, self.tokens.copy(), rows, list(self._roles), learned)

    def restore(self, part: SavedMemory) -> None:
        """Hold what a file keeps, instead of what is held. Only the newest max_tokens fit."""
        with self.lock:
            rows = np.ascontiguousarray(part.rows, dtype=np.int32)
            identities = np.empty(len(rows), dtype=np.int64)
            runs.identities(part.tokens, rows[:, :2].astype(np.int64), identities)
            index = _indexed(part.tokens, rows)
            self._roles = list(part.roles)
            self._hold(index, rows, identities)
            self._held = dict(zip(identities.tolist(), rows[:, 0].tolist(), strict=True))
            self._keep_pieces({})
            self.epoch += 1
            for context in self._open:
                context.tail, context.layout = -1, context.layout[:0]
            self.learned = {name: dict(arrays) for name, arrays in part.learned.items()}
            self.forget_oldest(self.max_tokens)

    # ---- matching -----------------------------------------------------------------------------

    def match(self, context: Context, min_match: int = 1, max_match: int = 16, recent: int = 4) -> Matches:
        """Earlier occurrences of the end of the context (index.py's docstring defines which).

        min_match, max_match: fewest tokens that have to agree, and most that are counted
        recent:               positions per context length (ORDERS: 1, 2 and 6 tokens), 1..64
        A few microseconds, whatever the memory holds. `context` may belong to another memory (then positions
        in its own output are found too). Raises InvalidRequestError for what are no such numbers.
        """
        whole = isinstance(min_match, WHOLE) and isinstance(max_match, WHOLE) and isinstance(recent, WHOLE)
        if not whole or not 1 <= min_match <= max_match <= MAX_TOKENS or not 1 <= recent <= 64:
            raise InvalidRequestError(
                f"match: needed whole numbers, 1 <= min_match <= max_match <= {MAX_TOKENS} and 1 <= recent <= 64, "
                f"got {shown(min_match)}, {shown(max_match)}, {shown(recent)}"
            )
        found = np.empty((6 * recent, 5), dtype=np.int32)
        count = self._search(find, context, min_match, max_match, recent, found)
        return Matches(context, self, self.shared, found[:count])

    def copy_longest(self, context: Context, min_match: int, max_match: int, count: int, recent: int = 4) -> Copied:
        """(tokens, agreement, source): match()'s first occurrence and what followed it, in one kernel call.

        tokens: int32[count or less] (none: there is no match), cut as Matches.copy cuts them; agreement: how many
        tokens agreed; source: Source's number. Arguments as match() takes them, unchecked.
        """
        copied = np.empty(count, dtype=np.int32)
        found, agreement, source = self._search(copy_longest, context, min_match, max_match, recent, copied)
        return copied[:found], agreement, source

    def _search(self, search: Any, context: Context, min_match: int, max_match: int, recent: int, result: Int32) -> Any:
        """One of index.py's kernels that look in the own output, the memory and the namespace's memory."""
        own, shared = context.index, self.shared
        with self.lock:
            mine = self._index
            if shared is None:
                return search(
                    own.tokens, own.size, own.base, own.links, own.table,
                    mine.tokens, mine.links, mine.table, self._rows, self._count,
                    _NO_TOKENS, _NO_ROWS, _NO_TOKENS, _NO_ROWS, 0,
                    min_match, max_match, recent, result,
                )  # fmt: skip
            with shared.lock:
                theirs = shared._index
                return search(
                    own.tokens, own.size, own.base, own.links, own.table,
                    mine.tokens, mine.links, mine.table, self._rows, self._count,
                    theirs.tokens, theirs.links, theirs.table, shared._rows, shared._count,
                    min_match, max_match, recent, result,
                )  # fmt: skip

    def copy(self, position: int, count: int) -> tuple[Int32, Source]:
        """Up to count tokens (int32) of the memory from `position`, cut at its segment's end, and their
        source.

        For a match use Matches.copy, which knows the match's place.
        """
        with self.lock:
            self._check_position("copy", position)
            row = self._segment_at(position)
            end, source = self._rows[max(0, row), 1:3].tolist()
            if row < 0:  # the first lead-in: no copy starts there
                end = position
            return self._index.tokens[position : max(position, min(position + count, end))].copy(), Source(source)

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise IntegrityError if an invariant is broken. Microseconds a token: for tests and doctors."""
        with self.lock:
            tokens = self.tokens
            at = 0
            for segment in self.segments:
                if not at <= segment.start < segment.end <= len(tokens):
                    raise IntegrityError(f"segments overlap or are empty: {segment} after {at}")
                between = tokens[at : segment.start]
                lead = between[1:] if len(between) and between[0] == SEAM else between
                if len(lead) > LEAD or bool((lead < 0).any()):
                    raise IntegrityError(f"a lead-in of {len(lead)} tokens before {segment}")
                if bool((tokens[segment.start : segment.end] < 0).any()):
                    raise IntegrityError(f"a seam inside {segment}")
                if segment.identity != runs.identity(tokens, segment.start, segment.end):
                    raise IntegrityError(f"{segment} has another identity than its tokens")
                at = segment.end
            if at != len(tokens):
                raise IntegrityError(f"segments end at {at}, tokens at {len(tokens)}")
            self._index.check([(segment.start, segment.end) for segment in self.segments])
            for start in self._held.values():
                if not 0 <= start < len(tokens):
                    raise IntegrityError(f"a message is said to be held at {start} of {len(tokens)}")
            if self._pieces_bytes != sum(_PIECES_BYTES + pieces.nbytes for pieces in self._pieces.values()):
                raise IntegrityError("the bytes of messages in pieces don't add up")
            for identity, pieces in self._pieces.items():
                message = np.empty(int(pieces[:, 1].max()), dtype=np.int32)
                for start, end, place in pieces.tolist():
                    message[start:end] = tokens[place : place + end - start]
                if runs.identity(message, 0, len(message)) != identity:
                    raise IntegrityError("a message is said to be held in pieces that aren't it")
            for context in self._open:
                if context.closed or context.memory is not self:
                    raise IntegrityError("a closed or foreign call is listed as open")
                context.index.check([(context.prompt_length, context.index.size)])
                for start, end, place in context.layout.tolist():
                    if not np.array_equal(context.tokens[start:end], tokens[place : place + end - start]):
                        raise IntegrityError(f"prompt tokens {start}..{end} are said to be held at {place}, and aren't")

    # ---- inside -------------------------------------------------------------------------------

    def _index_again(self, context: Context, size: int) -> None:
        """Keep the first `size` tokens of an open call."""
        kept = context.tokens[:size]
        index = MatchIndex(size + 256, base=context.prompt_length)
        index.write(kept[: context.prompt_length])
        index.append(kept[context.prompt_length :])
        context.index = index

    def _drop_unfinished(self) -> None:
        """Drop what stands behind the last segment, and what the index knows of it."""
        rows = self._rows[: self._count].copy()
        size = int(rows[-1, 1]) if self._count else 0
        self._hold(_indexed(self._index.tokens[:size], rows), rows, self._identities[: self._count])
        self._held = {identity: start for identity, start in self._held.items() if start < size}
        self._keep_pieces({name: laid for name, laid in self._pieces.items() if int(laid[:, 2].max()) < size})

    def _check_position(self, what: str, position: int) -> None:
        if not isinstance(position, WHOLE) or not 0 <= position < self._index.size:
            raise InvalidRequestError(
                f"{what}: needed a position in the {self._index.size} tokens that the memory holds, got {shown(position)}"
            )

    def _segment_at(self, position: int) -> int:
        """The row of the segment that begins last at or before a position; -1: none, it is in the first lead-in."""
        return int(np.searchsorted(self._rows[: self._count, 0], position, side="right")) - 1

    def _find_held(self, ids: Int32, start: int, end: int, identity: int) -> int:
        """Where ids[start:end] is held in one piece, or -1."""
        length = end - start
        held = self._held.get(identity, -1)
        tokens = self.tokens
        if held >= 0 and np.array_equal(tokens[held : held + length], ids[start:end]):
            return held
        index = self._index
        held, run = runs.longest_run(
            ids, start, start, end, index.tokens, index.size, index.links, index.table, 0, TRIES
        )
        # Not inside a lead-in: no copy starts there.
        if run < length:
            return -1
        row = self._segment_at(held)
        if row < 0 or held >= self._rows[row, 1]:
            return -1
        self._held[identity] = held
        return int(held)

    def _lay(self, writer: _Writer, tile: Span, named: bool, identity: int, layout: list[tuple[int, int, int]]) -> None:
        """Hold one message of a prompt: not at all anew, in part, or whole."""
        ids, start, end = writer.ids, tile.start, tile.end
        held = self._find_held(ids, start, end, identity)
        if held >= 0:
            layout.append((start, end, held))
            writer.passed(end, held + end - start)
            return
        offsets = np.array([start, start, 0], dtype=np.int32)
        known = self._pieces.get(identity)
        if known is not None and self._lies_in(known, ids, start):
            layout += (known + offsets).tolist()
            writer.passed(end, int(known[-1, 2] + known[-1, 1] - known[-1, 0]))
            return
        pieces = [(start, end, -1)]
        if end - start >= SHORTEST_RUN and self._index.size:
            index = self._index
            rows = np.empty((2 + 2 * ((end - start) // SHORTEST_RUN), 3), dtype=np.int32)
            count = runs.lay_runs(
                ids, start, end, index.tokens, index.size, index.links, index.table, SHORTEST_RUN, TRIES, rows
            )
            laid = [(a, b, at) for a, b, at in rows[:count].tolist()]
            covered = sum(b - a for a, b, at in laid if at >= 0)
            if not named or 4 * covered >= 3 * (end - start):
                pieces = _merged(laid)
        whole = len(pieces) == 1
        before = len(layout)
        for a, b, at in pieces:
            if at >= 0:
                layout.append((a, b, at))
                writer.passed(b, at + b - a)
                continue
            # A piece between held runs takes some of the next run along, so that a copy of it finds its way on, and
            # so that it is found itself when it comes again.
            stop = min(max(b + LEAD, a + SHORTEST_RUN), end) if not whole else b
            at = writer.store(a, stop, tile.source, tile.role, identity if whole else None)
            layout.append((a, stop, at))
        if named and not whole:
            self._keep_pieces({identity: np.array(layout[before:], dtype=np.int32) - offsets}, self._pieces)

    def _keep_pieces(self, more: dict[int, Int32], known: dict[int, Int32] | None = None) -> None:
        """Note where messages lie that are held in several pieces: identity -> layout, counted from their start.

        Sent again such a message is found by that, piece by piece: some may be too short to be looked for.
        """
        if known is None:
            known, self._pieces_bytes = {}, 0
        for identity, laid in more.items():
            if identity in known:
                self._pieces_bytes -= _PIECES_BYTES + known[identity].nbytes
            known[identity] = laid
            self._pieces_bytes += _PIECES_BYTES + laid.nbytes
        self._pieces = known

    def _lies_in(self, pieces: Int32, ids: Int32, start: int) -> bool:
        """Whether ids[start:...] are the message that is held in these pieces."""
        tokens = self.tokens
        return all(np.array_equal(tokens[at : at + b - a], ids[start + a : start + b]) for a, b, at in pieces.tolist())

    def _make_room(self, tokens: int) -> None:
        most = self.max_tokens
        need = tokens + tokens // 8 + 64  # seams and lead-ins
        if need > most:
            raise MemoryBudgetError(f"{tokens} tokens don't fit a memory of max_tokens={most}: allow at least {need}")
        if self._index.size + need > most:
            self.forget_oldest(max(0, min(most // 2, most - need)))

    def _grew(self) -> None:
        if self.on_growth is not None:
            self.on_growth(self)

    def _add_segment(self, start: int, end: int, source: Source, role: str, identity: int) -> None:
        count = self._count
        if count == len(self._rows):
            rows = np.empty((count + max(16, count // 8), 4), dtype=np.int32)
            rows[:count] = self._rows
            names = np.empty(len(rows), dtype=np.int64)
            names[:count] = self._identities
            self._rows, self._identities = rows, names
        if role not in self._roles:
            self._roles.append(role)
        self._rows[count] = (start, end, source, self._roles.index(role))
        self._identities[count] = identity
        self._held[identity] = start
        self._count = count + 1

    def _hold(self, index: MatchIndex, rows: Int32, identities: NDArray[np.int64]) -> None:
        """Hold an index's tokens and segments (int32[m, 4], positions in its tokens) instead of what is held."""
        spare = np.empty((16, 4), dtype=np.int32)
        rows, identities = np.concatenate([rows, spare]), np.concatenate([identities, spare[:, 0]])
        self._index, self._rows, self._identities, self._count = index, rows, identities, len(rows) - len(spare)


def _indexed(tokens: Int32, rows: Int32) -> MatchIndex:
    """An index over tokens, with the segments of rows (int32[m, 4]) in it."""
    index = MatchIndex(len(tokens) + 64)
    index.write(tokens)
    index._reserve_links()
    for start, end in rows[:, :2].tolist():
        index.insert(start, end)
    return index


class _Writer:
    """Writes pieces of one real sequence (a prompt, or a prompt and its output) into a memory, in their
    order.

    bridge: the place in ids up to which the memory's end is the real past; -1 if it is something else
    """

    __slots__ = ("bridge", "ids", "memory")

    def __init__(self, memory: TrajectoryMemory, ids: Int32) -> None:
        self.memory = memory
        self.ids = ids
        self.bridge = -1

    def passed(self, end: int, held_end: int) -> None:
        """ids[:end] have been laid; the last piece was held up to held_end of the memory."""
        if held_end == self.memory._index.size:
            self.bridge = end

    def store(self, start: int, end: int, source: Source, role: str, identity: int | None) -> int:
        """Add ids[start:end] as a segment; returns where it lies."""
        ids, index = self.ids, self.memory._index
        if identity is None:
            identity = runs.identity(ids, start, end)
        try:
            if 0 <= self.bridge <= start <= self.bridge + LEAD:
                # What stands between is held elsewhere (a template's header): repeating it keeps the stretch
                # whole.
                index.lead(ids[self.bridge : start])
            else:
                index.seam(ids[max(0, start - LEAD) : start])
            at = index.size
            index.append(ids[start:end])
            self.memory._add_segment(at, index.size, source, role, identity)
        except BaseException:  # Ctrl-C while a kernel ran, or no memory
            self.memory._drop_unfinished()
            raise
        self.bridge = end
        return at


def _merged(laid: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Rows (start, end, place or -1) without the short runs behind new pieces, which become part of them.

    Of a longer run a run is left behind what the piece takes along: so all will be found when it comes again, and
    text with an edit in it is added once, not with each prompt that repeats it.
    """
    merged = laid[:1]
    for a, b, at in laid[1:]:
        if merged[-1][2] < 0 and (at < 0 or b - a < 2 * SHORTEST_RUN):
            merged[-1] = (merged[-1][0], b, -1)
        else:
            merged.append((a, b, at))
    return merged


_NO_TOKENS = np.empty(0, dtype=np.int32)
_NO_ROWS = np.empty((0, 3), dtype=np.int32)
