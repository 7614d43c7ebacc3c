"""RemoteCall: one call of a remote engine, from its first request to its end, in the engine's background loop.

Each choice is a request of its own (its own id, its own seed), asked again while nothing of it has arrived and the
failure may pass. A watcher ends the call when its consumer has gone or nothing came for too long. Used by sglang.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from agentspec.chat import MessageParser, PreparedChat
from agentspec.engines.base import CallStats, Channel, GenerationRequest, TokenChunk, as_engine_error, now_ns
from agentspec.engines.conversations import Conversation
from agentspec.engines.outputs import remember, token_chunk
from agentspec.engines.remote import Ask, Notice, Piece, Server, ServerInfo
from agentspec.engines.sglang_wire import count
from agentspec.engines.stops import Stopper
from agentspec.errors import EngineClosedError, RequestAbortedError, ServerError
from agentspec.loop import Trajectory

__all__ = ["Client", "Output", "RemoteCall"]

logger = logging.getLogger("agentspec.engines")

_LOOK_S = 0.02  # how often an abort and the time limits are looked at
_LONGEST_WAIT_S = 30.0  # before a retry, whatever the server asks for
Arrivals = list[tuple[float, int]]
_COUNTS = ("verify_steps", "proposed", "accepted", "mismatches", "proposed_depth", "near_ties", "near_tie_flips")


@dataclass(slots=True)
class Client:
    """What a call needs of its engine. eos_ids may grow: the server may know of one that the tokenizer doesn't.

    retries: how often a choice is asked for again; first_timeout, read_timeout: s, to the first token and between tokens
    say: tells a loss once; spawn: starts a coroutine that nobody waits for
    """

    server: Server
    info: ServerInfo
    model: str
    tokenizer: Any
    vocabulary: int
    eos_ids: frozenset[int]
    retries: int
    first_timeout: float
    read_timeout: float
    say: Callable[[Notice], None]
    spawn: Callable[[Coroutine[Any, Any, Any]], None]


@dataclass(slots=True)
class Output:
    """One choice under way.

    ids, arrivals: what came, and (ms since the call began, tokens) of each arrival
    since: when the last of it came (now_ns)
    """

    index: int
    ask: Ask
    body: dict[str, Any]
    stopper: Stopper
    parser: MessageParser | None
    ids: list[int] = field(default_factory=list)
    arrivals: Arrivals = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)
    since: int = field(default_factory=now_ns)


@dataclass(eq=False)
class RemoteCall:
    """seeds: how many of the trajectory's seeds go with it; end: why it was cancelled."""

    client: Client
    request: GenerationRequest
    trajectory: Trajectory
    channel: Channel
    stats: CallStats
    conversation: Conversation
    outputs: list[Output]
    prepared: PreparedChat | None
    seeds: int = 0
    began: int = field(default_factory=now_ns)
    end: BaseException | None = None
    task: asyncio.Task[Any] | None = None

    async def serve(self) -> None:
        """Run the call to its end. Never raises: the channel is told."""
        if not self.channel.claim():
            self.channel.put(RequestAbortedError("the call was aborted before it was served", self.stats))
            return
        self.task = asyncio.current_task()
        self.conversation.in_use += 1
        watcher = asyncio.create_task(self._watch())
        error: BaseException | None = None
        try:
            if self.end is not None:
                raise self.end
            if len(self.outputs) == 1:
                await self._choice(self.outputs[0])
            else:
                await _all([self._choice(output) for output in self.outputs])
        except asyncio.CancelledError:
            error = self.end or EngineClosedError("the engine was closed while this call ran")
        except BaseException as raised:
            error = as_engine_error(raised)
        finally:
            watcher.cancel()
        self._settle(error)

    def cancel(self, why: BaseException) -> None:
        """End the call with this error. From inside the loop only."""
        if self.end is None:
            self.end = why
        if self.task is not None:
            self.task.cancel()

    # ---- asking -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Cancels the call when its consumer has gone, or when nothing came for too long."""
        client = self.client
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.channel.aborted.is_set():
                self.cancel(RequestAbortedError("the call was aborted by its consumer", self.stats))
                return
            now = now_ns()
            for output in self.outputs:
                begun = bool(output.arrivals)
                limit = client.read_timeout if begun else client.first_timeout
                if not output.stopper.finish_reason and (now - output.since) / 1e9 > limit:
                    what, name = ("token", "read_timeout") if begun else ("first token", "first_timeout")
                    self.cancel(
                        ServerError(
                            f"{client.model}: no {what} came within {limit:g} s; is the server overloaded or stuck? "
                            f"{name}= allows more"
                        )
                    )
                    return

    async def _choice(self, output: Output) -> None:
        ended = False
        try:
            for attempt in range(self.client.retries + 1):
                try:
                    await self._follow(output)
                    ended = True
                    return
                except ServerError as error:
                    if output.arrivals or not error.temporary or attempt == self.client.retries:
                        raise
                    wait = 0.5 * 2**attempt if error.retry_after is None else error.retry_after
                    logger.info("%s; trying again in %.1f s", error, wait)
                    await asyncio.sleep(min(wait, _LONGEST_WAIT_S))
        finally:
            if not ended:
                self.client.spawn(self.client.server.abort(output.ask.id))

    async def _follow(self, output: Output) -> None:
        pieces = self.client.server.stream(output.ask, output.body, self.channel.span.headers())
        try:
            async for piece in pieces:
                self._take(output, piece)
                if piece.finish:
                    return
                if output.stopper.finish_reason == "stop":  # one that only we know of
                    self.client.spawn(self.client.server.abort(output.ask.id))
                    return
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        if not output.stopper.finish_reason:
            raise ServerError(f"{self.client.model}: the stream broke off before the output's end")

    # ---- what comes ---------------------------------------------------------------------------

    def _take(self, output: Output, piece: Piece) -> None:
        stamp = output.since = now_ns()
        stopper = output.stopper
        output.meta = piece.meta
        if stopper.finish_reason:
            return  # what the server still has to say is in meta
        if piece.delta is not None:
            if piece.finish:
                stopper.end(piece.finish)
            self._arrived(output, piece.ids, piece.tokens, stamp)
            reason = stopper.finish_reason or None
            self.channel.put(
                TokenChunk(tuple(piece.ids), piece.text, stamp, reason, (), output.index, None, piece.delta)
            )
            return
        taken: list[int] = []
        for token in piece.ids:
            if not 0 <= token < self.client.vocabulary:
                raise ServerError(
                    f"{self.client.model}: the server gave id {token}, this tokenizer's are below "
                    f"{self.client.vocabulary}; pass tokenizer= the served model's own"
                )
            taken.append(token)
            if stopper.push(token):
                break
        if piece.finish and not stopper.finish_reason:
            if taken and piece.matched == taken[-1]:
                self.client.eos_ids |= {taken[-1]}
            stopper.end(piece.finish)
        tokens = piece.tokens if len(taken) == len(piece.ids) else None
        self._arrived(output, taken, tokens, stamp)
        if taken or stopper.finish_reason:
            self.channel.put(
                token_chunk(stopper, output.parser, taken, stamp, piece.logprobs[: len(taken)], output.index)
            )

    def _arrived(self, output: Output, ids: Sequence[int], tokens: int | None, stamp: int) -> None:
        output.ids += ids
        number = len(ids) if tokens is None else tokens
        if number:
            arrival = ((stamp - self.began) / 1e6, number)
            output.arrivals.append(arrival)
            self.stats.arrivals.append(arrival)
            self.stats.output_tokens += number

    # ---- the end ------------------------------------------------------------------------------

    def _settle(self, error: BaseException | None) -> None:
        """The call is over: its figures, its history, and its end for the consumer."""
        stats, aborted = self.stats, isinstance(error, RequestAbortedError)
        delivered = self.channel.seal() if aborted else {}
        self.conversation.in_use -= 1
        try:
            self._count()
            for output in self.outputs:
                ids = output.ids[: delivered.get(output.index, 0)] if aborted else output.ids
                self._remember(output, ids, aborted)
            if self.seeds and not any(output.arrivals for output in self.outputs):
                self.conversation.take_seeds(self.trajectory, -self.seeds)  # they served no call
        except Exception as raised:
            error = error or as_engine_error(raised)
        stats.finish_reason = "abort" if aborted else "" if error else self.outputs[0].stopper.finish_reason
        stats.duration_ms = (now_ns() - self.began) / 1e6
        if error is None:
            self.trajectory.calls.append(stats)
            self.channel.put(stats)
            return
        if isinstance(error, (RequestAbortedError, ServerError)) and error.partial is None:
            error.partial = stats
        self.channel.put(error)

    def _count(self) -> None:
        stats, meta = self.stats, self.outputs[0].meta
        for output in self.outputs:
            total = output.meta.get("completion_tokens")
            if not self.client.info.ids and isinstance(total, int):
                output.arrivals = _weighed(output.arrivals, total)
            told = output.meta.get("call_stats")
            if told is not None:
                _adopt(stats, told)
                continue
            count(stats, output.meta, sum(n for _, n in output.arrivals), len(output.arrivals))
        stats.arrivals = sorted(arrival for output in self.outputs for arrival in output.arrivals)
        stats.output_tokens = sum(n for _, n in stats.arrivals)
        stats.prompt_tokens = int(meta.get("prompt_tokens") or stats.prompt_tokens)
        stats.reused_tokens = int(meta.get("cached_tokens") or 0)
        stats.queue_ms = float(meta.get("queue_time") or 0.0) * 1e3
        for told in meta.get("agentspec") or ():
            if told.get("held_tokens") == 0 and stats.call_index > 0 and not self.seeds:
                # The server was restarted, or had no room: the next call tells it all seeds again.
                self.conversation.take_seeds(self.trajectory, -self.conversation.seeds_taken.get(self.trajectory, 0))
            for text in told.get("problems", ()):
                self.client.say(Notice("plugin", f"the server could not use what a call said: {text}"))

    def _remember(self, output: Output, ids: Sequence[int], aborted: bool) -> None:
        if self.client.info.messages:
            return  # the server renders the next prompt
        remember(
            self.conversation.history,
            self.client.tokenizer,
            self.client.eos_ids,
            ids,
            output.stopper,
            output.parser,
            self.prepared,
            aborted,
        )
        self.conversation.last = np.asarray([*self.request.input_ids, *ids], dtype=np.int32)


def _weighed(arrivals: Arrivals, total: int) -> Arrivals:
    """Arrivals that were counted by a stand-in for ids, in the server's count of tokens: each keeps its share."""
    if not arrivals:
        return []
    held = list(accumulate(n for _, n in arrivals))
    ends = [round(n * total / held[-1]) for n in held]
    begins = [0, *ends[:-1]]
    return [(ms, end - begin) for (ms, _), begin, end in zip(arrivals, begins, ends, strict=True) if end > begin]


def _adopt(stats: CallStats, told: Mapping[str, Any]) -> None:
    """Add the figures of `agentspec serve`, which are a CallStats itself."""
    for name in _COUNTS:
        value = told.get(name)
        if isinstance(value, (int, float)):
            setattr(stats, name, getattr(stats, name) + value)
    for name in ("accepted_by_source", "not_drafted"):
        held = getattr(stats, name)
        for key, value in dict(told.get(name) or {}).items():
            held[str(key)] = held.get(str(key), 0) + int(value)
    stats.mean_cost = float(told.get("mean_cost") or 1.0)


async def _all(choices: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them beside one another; the first failure ends all."""
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
