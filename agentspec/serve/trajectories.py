"""Whose memory a request uses. Called by app.py, in its event loop: not thread-safe.

A request that names its trajectory (session_id) gets that one, inside its scope; one that names none is followed
by what it says (agentspec.memory.Ends). The scope is the tenant, which is told by the API key, and the request's
`cache_salt`; it is part of every id and namespace, so that nothing is shared across scopes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from agentspec.loop import Trajectory
from agentspec.memory import Ends
from agentspec.serve.requests import Asked

__all__ = ["Opened", "TrajectoryBook"]

_MOST = 4096  # conversations that can be followed, as many as an engine keeps histories of


@dataclass(slots=True, eq=False)
class _Followed:
    """A conversation without a name; it is followed inside its scope and namespace only."""

    name: str
    scope: str


@dataclass(slots=True)
class Opened:
    """A call's trajectory. name: as the client knows it; joined_by: the field that named it, "prompt", or "new"."""

    trajectory: Trajectory
    name: str
    joined_by: str
    followed: _Followed | None = None
    ends: list[Any] = field(default_factory=list)  # those that it was joined by


class TrajectoryBook:
    def __init__(self) -> None:
        self._ends: Ends[_Followed] = Ends()
        self._made = 0

    def __len__(self) -> int:
        return len(self._ends)

    def open(self, asked: Asked, tenant: str) -> Opened:
        """The trajectory for a call; close() it once."""
        # Quoted, so that no name holds a colon: what stands between colons is one part.
        scope = f"{quote(tenant, safe='')}:{quote(asked.salt, safe='')}:" if tenant or asked.salt else ""
        namespace = None if asked.namespace is None else scope + quote(asked.namespace, safe="")
        if asked.session is not None:
            name = quote(asked.session, safe="")
            return Opened(self._trajectory(asked, scope + name, namespace), asked.session, asked.joined_by)
        within = repr((scope, namespace))
        found = next(iter(self._ends.continued(within, asked.said)), None)
        joined_by = "prompt"
        if found is None:
            self._made += 1
            found, joined_by = _Followed(f"followed:{self._made}", within), "new"
        # It goes on from here: nobody else can join where it was.
        ends = self._ends.forget(found)
        return Opened(self._trajectory(asked, scope + found.name, namespace), found.name, joined_by, found, ends)

    def close(self, opened: Opened, seen: Iterable[bytes] | None) -> None:
        """The call is over. seen: what each of its choices can be continued after; None: it was broken off, and
        can be tried again."""
        if opened.followed is None:
            return
        if seen is None:
            self._ends.restore(opened.followed, opened.ends)
        else:
            for said in seen:
                self._ends.hold(opened.followed, opened.followed.scope, said)
        while len(self._ends) > _MOST:
            self._ends.forget(self._ends.oldest())

    @staticmethod
    def _trajectory(asked: Asked, id: str, namespace: str | None) -> Trajectory:
        # One a call: the engine holds what it knows by id and namespace.
        trajectory = Trajectory(id, namespace, "serve")
        for seed in asked.seeds:
            trajectory.seed(seed.content, seed.source)
        return trajectory
