"""State machines: everything that can be done to memories, in any order, against the oracle.

Runs compiled here and, by test_kernels.py, as plain Python too. AGENTSPEC_EXAMPLES sets the number of runs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from agentspec.memory import Context, MemoryStore, Place, Source, Span, TrajectoryMemory
from agentspec.memory.store import SHARED_ID
from tests.memory.test_index import compare

EXAMPLES = int(os.environ.get("AGENTSPEC_EXAMPLES", "12"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    print_blob=True,
)

# Few different tokens, so that everything matches everything. A namespace's tokens are its own: a token of
# another one anywhere in a memory is a leak.
ALPHABETS = {None: 0, "x": 10, "y": 20}
message = st.lists(st.integers(0, 3), max_size=12) | st.builds(
    lambda piece, times: piece * times,
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, 25),
)
roles = st.sampled_from(["user", "tool", "assistant", ""])
SOURCES = {"user": Source.PROMPT, "tool": Source.TOOL, "assistant": Source.OUTPUT, "": Source.PROMPT}


class Machine(RuleBasedStateMachine):
    """A store of a few trajectories in two namespaces and none. `chats`: what each agent would send next."""

    contexts = Bundle("contexts")

    @initialize(budget=st.sampled_from([2**20, 2**26]), most=st.sampled_from([1024, 100_000]))
    def make(self, budget: int, most: int) -> None:
        self.store = MemoryStore(budget, fingerprint="t", namespace_tokens=most)
        self.store.trajectory_tokens = min(self.store.trajectory_tokens, most)
        self.chats: dict[tuple[str | None, str], list[tuple[str, list[int]]]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.open: list[Context] = []
        self.directory = Path(tempfile.mkdtemp())

    def memory(self, namespace: str | None, id: str) -> TrajectoryMemory:
        return self.store.open(id, namespace)

    ids = st.sampled_from(["a", "b"])
    namespaces = st.sampled_from([None, "x", "y"])

    @rule(
        target=contexts,
        namespace=namespaces,
        id=ids,
        new=st.lists(st.tuples(roles, message), max_size=3),
        drop=st.integers(0, 4),
        strip=st.booleans(),
        with_spans=st.booleans(),
    )
    def extend(
        self,
        namespace: str | None,
        id: str,
        new: list[tuple[str, list[int]]],
        drop: int,
        strip: bool,
        with_spans: bool,
    ) -> Any:
        """The next call: history kept, trimmed from the front (drop) or with thoughts stripped, then new
        messages.
        """
        base = ALPHABETS[namespace]
        chat = self.chats.setdefault((namespace, id), [])
        if drop and len(chat) > drop:
            chat = chat[drop:]
        if strip:
            chat = [(role, said[len(said) // 2 :] if role == "assistant" else said) for role, said in chat]
        chat = [*chat, *((role, [base + t for t in said]) for role, said in new)][-12:]
        self.chats[namespace, id] = chat
        prompt: list[int] = []
        spans: list[Span] = []
        for role, said in chat:
            prompt.append(base + 4)
            if role:
                spans.append(Span(len(prompt), len(prompt) + len(said), SOURCES[role], role))
            prompt += said
        prompt.append(base + 5)
        memory = self.memory(namespace, id)
        before = len(memory)
        context = memory.extend(prompt, spans if with_spans else None)
        if memory.epoch == 0 or len(memory) >= before:
            at = 0
            for start, end, _ in context.layout.tolist():
                assert start <= at
                at = max(at, end)
            assert at == len(prompt)
        assert context.tokens.tolist() == prompt
        if len(self.open) >= 6:
            self.finish(self.open.pop(0))
        self.open.append(context)
        return multiple(context)

    @rule(context=contexts, tokens=st.lists(st.integers(0, 5), max_size=9))
    def append(self, context: Context, tokens: list[int]) -> None:
        if context.closed:
            return
        tokens = [ALPHABETS[context.memory.namespace] + t for t in tokens]
        context.memory.append(context, tokens)
        self.outputs[id(context)] = self.outputs.get(id(context), []) + tokens

    @rule(context=contexts, data=st.data())
    def append_a_copy(self, context: Context, data: st.DataObject) -> None:
        """What a drafting engine does: what followed before, follows again."""
        if context.closed:
            return
        matches = context.memory.match(context)
        if len(matches):
            row = data.draw(st.integers(0, len(matches) - 1))
            tokens, source = matches.copy(row, data.draw(st.integers(1, 12)))
            assert len(tokens) >= 1
            assert (source is Source.CURRENT) == (matches.places[row] == Place.OUTPUT)
            context.memory.append(context, tokens)
            self.outputs[id(context)] = self.outputs.get(id(context), []) + tokens.tolist()

    @rule(context=contexts, data=st.data())
    def truncate(self, context: Context, data: st.DataObject) -> None:
        if context.closed:
            return
        left = data.draw(st.integers(0, len(context.output)))
        context.memory.truncate(context, left)
        self.outputs[id(context)] = self.outputs.get(id(context), [])[:left]

    @rule(context=consumes(contexts))
    def close(self, context: Context) -> None:
        if context in self.open:
            self.open.remove(context)
        self.finish(context)

    def finish(self, context: Context) -> None:
        memory, output = context.memory, self.outputs.pop(id(context), [])
        if context.closed:
            return
        assert context.output.tolist() == output
        memory.close(context)
        memory.close(context)
        assert (context.stored is not None) == bool(output)
        if output and len(memory):
            stored = context.stored
            assert stored is not None and stored.source is Source.OUTPUT
            assert memory.tokens[stored.start : stored.end].tolist() == output
        chat = self.chats.get((memory.namespace, memory.id))
        if chat is not None:
            chat.append(("assistant", output))

    @rule(namespace=namespaces, id=ids, tokens=message, source=st.sampled_from([Source.SEED, Source.TOOL]))
    def seed(self, namespace: str | None, id: str, tokens: list[int], source: Source) -> None:
        memory = self.memory(namespace, id)
        tokens = [ALPHABETS[namespace] + t for t in tokens]
        memory.seed(tokens, source)
        assert memory.seed(tokens, source) == 0 or len(memory) >= memory.max_tokens // 2

    @rule(namespace=namespaces, id=ids, keep=st.integers(0, 300))
    def forget_oldest(self, namespace: str | None, id: str, keep: int) -> None:
        memory = self.memory(namespace, id)
        memory.forget_oldest(keep)
        assert len(memory) <= keep

    @rule(namespace=namespaces, id=ids)
    def forget(self, namespace: str | None, id: str) -> None:
        memory = self.store._memories.get((namespace, id))
        if memory is not None and not memory.in_use:
            self.store.forget(id, namespace)
            assert len(memory) == 0

    @rule(count=st.integers(1, 12))
    def crowd(self, count: int) -> None:
        """Others need room: what isn't in use may go."""
        size = min(3000, self.store.trajectory_tokens // 2)
        for i in range(count):
            memory = self.store.open(f"crowd {i}")
            memory.close(memory.extend([(i * 7919 + j * j) % 40_000 + 100 for j in range(size)]))
            assert self.store.nbytes <= self.store.budget_bytes
            self.store.forget(f"crowd {i - 6}")
        for context in self.open:
            assert context.memory in self.store._memories.values()

    @precondition(lambda self: not self.open)
    @rule()
    def save_and_load(self) -> None:
        path = self.directory / "memory"
        self.store.save(path)
        other = MemoryStore(self.store.budget_bytes, fingerprint="t", namespace_tokens=self.store.namespace_tokens)
        other.trajectory_tokens = self.store.trajectory_tokens
        other.load(path)
        for key, memory in self.store._memories.items():
            if "\0" not in key[1] or key[1] == SHARED_ID:
                assert other._memories[key].segments == memory.segments
                assert other._memories[key].tokens.tolist() == memory.tokens.tolist()
        self.store = other

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "store"):
            return
        small = [(k, m) for k, m in self.store._memories.items() if not k[1].startswith("crowd")]
        for (namespace, _), memory in small:
            memory.check()
            base = ALPHABETS[namespace]
            held = memory.tokens
            assert bool(((held == -1) | ((held >= base) & (held < base + 6))).all()), "another namespace's tokens"
        for context in self.open:
            compare(context.memory, context, 1, 16, 3)
            compare(context.memory, context, 2, 5, 1)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.check()


TestMachine = Machine.TestCase
TestMachine.settings = SETTINGS
TestMachine.pytestmark = [pytest.mark.fast]
