"""Call: one request of a chat model on its way through an engine, with its time limit and its retries.

`steps` and `asteps` are the sync and the async edge of the same thing: they yield the engine's chunks and see
to it that the engine stops within a step when nobody wants more.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.runnables.config import run_in_executor

from agentspec.engines.base import CallStats, Engine, Generation, TokenChunk
from agentspec.errors import RequestAbortedError, ServerError
from agentspec.loop import Trajectory
from langchain_agentspec.errors import CallTimeoutError, for_langchain
from langchain_agentspec.messages import to_agentspec
from langchain_agentspec.reply import Reply
from langchain_agentspec.tracing import below
from langchain_agentspec.trajectories import Origin, trajectories_of

__all__ = ["Call"]

_FIRST_DELAY_S = 0.5  # before the first retry; doubled for each one after it


class Call:
    """One call. Raises InvalidRequestError for messages that are no text; everything else when it runs.

    options:   engine.chat's
    trajectory: to use, whatever the origin says; None: Trajectories.find
    namespace: whom a new trajectory shares with (Trajectories.find)
    seed:      whether tool results become draft material
    timeout:   most seconds in all, queueing included; None: no limit
    retries:   how often a server's failure is tried again while nothing has arrived
    run:       LangChain's manager of the run, where there is one: its id is what v3 streams give the message
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        options: Mapping[str, Any],
        origin: Origin,
        *,
        trajectory: Trajectory | None = None,
        namespace: str | bool | None = None,
        seed: bool = True,
        timeout: float | None = None,
        retries: int = 0,
        run: Any = None,
    ) -> None:
        self.engine = engine
        self.stats = CallStats()
        self._options = options
        self._timeout = timeout
        self._retries = retries
        self._run = run
        self._run_id = getattr(run, "run_id", None)
        self._timed_out = False
        self._arrived = False
        self._said = to_agentspec(messages)
        self._trajectories = trajectories_of(engine)
        self._trajectory = trajectory or self._trajectories.find(messages, self._said, origin, namespace)
        if seed:
            self._trajectories.seed(self._trajectory, messages)
        name = uuid.uuid4().hex
        choices = options.get("n") or 1
        self.replies = [
            Reply(f"agentspec-{name}" + (f"-{index}" if index else ""), engine.tokenizer) for index in range(choices)
        ]

    # ---- the two edges ------------------------------------------------------------------------

    def steps(self) -> Iterator[TokenChunk]:
        """The engine's chunks. Closing the iterator ends the call within a step."""
        for attempt in range(self._retries + 1):
            try:
                generation = self._start()
                with self._watched(generation):
                    for chunk in generation:
                        self._arrived = True
                        yield chunk
                return self._end(generation)
            except Exception as error:
                if not self._may_retry(error, attempt):
                    told = self._told(error)
                    raise told from (error.__cause__ if told is error else error)
            time.sleep(_FIRST_DELAY_S * 2**attempt)

    async def asteps(self) -> AsyncGenerator[TokenChunk, None]:
        """As `steps`. Cancelling the task ends the call within a step."""
        for attempt in range(self._retries + 1):
            try:
                generation = await run_in_executor(None, self._start)  # rendering a long chat takes a while
                with self._watched(generation):
                    async for chunk in generation:
                        self._arrived = True
                        yield chunk
                self._end(generation)
                return
            except Exception as error:
                if not self._may_retry(error, attempt):
                    told = self._told(error)
                    raise told from (error.__cause__ if told is error else error)
            await asyncio.sleep(_FIRST_DELAY_S * 2**attempt)

    def push(self, chunk: TokenChunk) -> AIMessageChunk | None:
        """What a step adds to its choice's message."""
        return self.replies[chunk.index].push(chunk)

    # ---- inside -------------------------------------------------------------------------------

    def _start(self) -> Generation:
        with below(self._run):
            return self.engine.chat(self._said, trajectory=self._trajectory, **self._options)

    def _end(self, generation: Generation) -> None:
        if generation.stats is not None:
            self.stats = generation.stats
        for reply in self.replies:
            ids = [reply.id, *reply.call_ids]
            if self._run_id is not None:
                ids.append(f"lc_run--{self._run_id}")
            self._trajectories.ended(self._trajectory, self._said, reply.said, ids)

    @contextmanager
    def _watched(self, generation: Generation) -> Iterator[None]:
        """Ends the call when the block is left, and when its time is over."""
        timer: threading.Timer | None = None
        if self._timeout is not None:
            timer = threading.Timer(self._timeout, self._time_is_over, (generation,))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            generation.abort()

    def _time_is_over(self, generation: Generation) -> None:
        self._timed_out = True
        generation.abort()

    def _may_retry(self, error: Exception, attempt: int) -> bool:
        return isinstance(error, ServerError) and error.temporary and not self._arrived and attempt < self._retries

    def _told(self, error: Exception) -> BaseException:
        if self._timed_out and self._timeout is not None and isinstance(error, RequestAbortedError):
            return CallTimeoutError(self._timeout, error.partial)
        return for_langchain(error)
