"""Which engine a chat model runs on: the one it was given, or one made at the first call and shared.

Chat models with the same settings share an engine, so that a model made anew in every request loads nothing
and finds the memory of its trajectories again. Shared engines live until `close_engines()`, or the process
ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from agentspec.engines.base import Engine

__all__ = ["EngineSettings", "close_engines", "shared_engine"]


@dataclass(slots=True, frozen=True)
class EngineSettings:
    """What makes an engine: model (of a server "": what it serves), a server's address (None: the embedded engine) and
    key, more options."""

    model: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.base_url, self.api_key, repr(self.options)


@dataclass(slots=True)
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    engine: Engine | None = None


_slots: dict[tuple[Any, ...], _Slot] = {}
_lock = threading.Lock()


def shared_engine(settings: EngineSettings) -> Engine:
    """The engine of these settings, made if there is none. Loads a model: seconds, the first time.

    Raises what the engine raises when it can't be made: ModelError, InvalidRequestError, ServerError.
    """
    with _lock:
        slot = _slots.setdefault(settings.key, _Slot())
    with slot.lock:  # its own, so that models load beside one another
        if slot.engine is None:
            slot.engine = _make(settings)
        return slot.engine


def is_loaded(settings: EngineSettings) -> bool:
    slot = _slots.get(settings.key)
    return slot is not None and slot.engine is not None


def close_engines() -> None:
    """Close the shared engines and free their models. The next call of a chat model makes a new one."""
    with _lock:
        slots = list(_slots.values())
        _slots.clear()
    for slot in slots:
        with slot.lock:
            if slot.engine is not None:
                slot.engine.close()


def _make(settings: EngineSettings) -> Engine:
    options = dict(settings.options)
    if settings.base_url is None:
        from agentspec.engines.local import LocalEngine

        local: Engine = LocalEngine(settings.model, **options)
        return local
    from agentspec.engines.sglang import SGLangEngine

    # The chat model tries again itself (max_retries), and knows what has arrived.
    remote: Engine = SGLangEngine(
        settings.base_url, model=settings.model or None, api_key=settings.api_key, **{"retries": 0, **options}
    )
    return remote
