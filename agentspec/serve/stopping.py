"""A uvicorn server that gives the calls under way some time at its end, and then has them say that it ended.

Called by local.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

__all__ = ["StoppingServer"]


class StoppingServer(uvicorn.Server):
    """close: ends what the calls wait for; called `after_s` into the shutdown if it takes so long. uvicorn itself
    would cancel the calls, and their clients would see a connection that breaks."""

    def __init__(self, config: uvicorn.Config, close: Callable[[], Any], after_s: float) -> None:
        super().__init__(config)
        self._close, self._after_s = close, after_s

    async def shutdown(self, sockets: Any = None) -> None:
        # In a thread: it waits for the running step.
        timer = asyncio.get_running_loop().call_later(self._after_s, threading.Thread(target=self._close).start)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
