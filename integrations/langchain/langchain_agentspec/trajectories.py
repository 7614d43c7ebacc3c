"""Trajectories: which trajectory a call of a chat model belongs to. The user does nothing for it.

The first of these that applies:

    1. LangGraph's `thread_id`, in the run's metadata (or its config): the thread's trajectory
    2. agentspec's own context: `with agentspec.trajectory()`, `@agent_loop`
    3. an earlier output in the history, known by its message id or by the ids of its tool calls
    4. the longest history that was held, if it reaches an output: this call goes on from it
    5. none: a new trajectory

`parent_run_id` and `checkpoint_ns` are other ones in each step and are never looked at. Subagents that share
a thread share its trajectory: what they write is each other's draft material, and the memory keeps branches
apart. A system prompt or a first question that several conversations have in common joins nobody.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage

from agentspec.loop import Trajectory, as_text, current_trajectory

__all__ = ["Origin", "Trajectories", "trajectories_of"]

_TRAJECTORIES = 1024  # found again; older ones are forgotten here, and a call that goes on from one is a new one
_MARKS = 65536  # message ids and ends of histories
_LONGEST_SEED = 1_000_000  # characters: what a tool returned beyond that is more than any call repeats


@dataclass(slots=True, frozen=True)
class Origin:
    """Where a call comes from, by its run's metadata. agent: the name that `create_agent(name=...)` gave."""

    thread: str | None = None
    agent: str | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any] | None, configurable: Mapping[str, Any] | None = None) -> Origin:
        metadata = metadata or {}
        thread = metadata.get("thread_id") or (configurable or {}).get("thread_id")
        agent = metadata.get("lc_agent_name")
        return cls(str(thread) if thread else None, str(agent) if agent else None)


class Trajectories:
    """The trajectories of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Trajectory] = OrderedDict()  # by trajectory id, least recently used first
        self._marks: OrderedDict[str, str] = OrderedDict()  # message id, tool call id or end of a history -> its id
        self._seeded: weakref.WeakKeyDictionary[Trajectory, set[str]] = weakref.WeakKeyDictionary()
        # How many seeds of a context's trajectory a thread's trajectory has taken over, by the thread.
        self._adopted: weakref.WeakKeyDictionary[Trajectory, dict[str, int]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def find(
        self,
        messages: Sequence[BaseMessage],
        said: Sequence[Mapping[str, Any]],
        origin: Origin,
        namespace: str | bool | None = None,
    ) -> Trajectory:
        """The trajectory of a call.

        messages, said: the history as LangChain's and as agentspec's messages
        namespace:      for a new trajectory; None: the agent's name; False: it shares nothing
        """
        shared = origin.agent if namespace is None else namespace
        current = current_trajectory()
        with self._lock:
            if origin.thread is not None:
                thread = self._get(origin.thread) or self._new(_trajectory(origin.thread, shared, origin))
                self._adopt(current, thread)
                return thread
            if current is not None:
                return self._new(current)
            held = self._by_ids(messages) or self._by_history(said)
            return held or self._new(_trajectory(None, shared, origin))

    def seed(self, trajectory: Trajectory, messages: Iterable[BaseMessage]) -> None:
        """Offer what tools returned as draft material, each result once: the text, and the raw artifact."""
        for message in messages:
            if not isinstance(message, ToolMessage):
                continue
            texts: list[str] = [str(message.text)]
            if message.artifact is not None:
                texts.append(as_text(message.artifact))
            key = f"{message.tool_call_id} {hash(tuple(texts))}"
            with self._lock:
                seeded = self._seeded.setdefault(trajectory, set())
                if key in seeded:
                    continue
                seeded.add(key)
            for text in texts:
                trajectory.seed(text[:_LONGEST_SEED], "tool")

    def ended(
        self,
        trajectory: Trajectory,
        said: Sequence[Mapping[str, Any]],
        output: Mapping[str, Any],
        ids: Iterable[str],
    ) -> None:
        """A call has ended: its output's ids, and the history with it, lead to the trajectory from now on."""
        *_, before = b"", *_ends(said)
        end = _end_of(before, output)
        with self._lock:
            for mark in (*ids, end.hex()):
                self._marks[mark] = trajectory.id
                self._marks.move_to_end(mark)
            while len(self._marks) > _MARKS:
                self._marks.popitem(last=False)

    def __len__(self) -> int:
        return len(self._held)

    # ---- inside -------------------------------------------------------------------------------

    def _get(self, id: str) -> Trajectory | None:
        held = self._held.get(id)
        if held is not None:
            self._held.move_to_end(id)
        return held

    def _new(self, trajectory: Trajectory) -> Trajectory:
        self._held[trajectory.id] = trajectory
        self._held.move_to_end(trajectory.id)
        while len(self._held) > _TRAJECTORIES:
            self._held.popitem(last=False)
        return trajectory

    def _adopt(self, current: Trajectory | None, held: Trajectory) -> None:
        """What @agentspec.tool offered to the surrounding trajectory is for the thread's calls too."""
        if current is None or current.id == held.id:
            return
        taken = self._adopted.setdefault(current, {})
        seeds = current.seeds_from(taken.get(held.id, 0))
        for seed in seeds:
            held.seed(seed.content, seed.source)
        taken[held.id] = taken.get(held.id, 0) + len(seeds)

    def _by_ids(self, messages: Sequence[BaseMessage]) -> Trajectory | None:
        for message in reversed(messages):
            ids = [message.id, getattr(message, "tool_call_id", None)]
            ids += [call["id"] for call in getattr(message, "tool_calls", ())]
            for mark in ids:
                held = self._get(self._marks.get(mark, "")) if mark else None
                if held is not None:
                    return held
        return None

    def _by_history(self, said: Sequence[Mapping[str, Any]]) -> Trajectory | None:
        ends = list(_ends(said))
        for message, end in zip(reversed(said), reversed(ends), strict=True):
            if message["role"] == "assistant":
                held = self._get(self._marks.get(end.hex(), ""))
                if held is not None:
                    return held
        return None


def _trajectory(id: str | None, namespace: str | bool | None, origin: Origin) -> Trajectory:
    return Trajectory(id, namespace if isinstance(namespace, str) else None, origin.agent or "agent")


def _ends(said: Sequence[Mapping[str, Any]]) -> Iterable[bytes]:
    """For each message a hash of the history up to and with it."""
    end = b""
    for message in said:
        end = _end_of(end, message)
        yield end


def _end_of(before: bytes, message: Mapping[str, Any]) -> bytes:
    calls = [
        [call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    words = json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True)
    return hashlib.blake2b(before + words.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_by_engine: dict[int, Trajectories] = {}  # by id(), since an engine need not be hashable
_by_engine_lock = threading.RLock()  # a collected engine's entry goes wherever the collector runs


def trajectories_of(engine: Any) -> Trajectories:
    """The trajectories of an engine, shared by all chat models that run on it."""
    with _by_engine_lock:
        found = _by_engine.get(id(engine))
        if found is None:
            found = _by_engine[id(engine)] = Trajectories()
            weakref.finalize(engine, _by_engine.pop, id(engine), None)
        return found
