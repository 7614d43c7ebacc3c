"""The Engine protocol, Generation (the stream), TokenChunk and CallStats.

Every engine and every consumer (loop, replay, telemetry, LangChain, the server) meets here. Imports no torch.
What a call may ask for is in request.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from agentspec import recordings, telemetry
from agentspec.chat import MessageDelta, joined
from agentspec.engines.request import GenerationRequest
from agentspec.errors import AgentSpecError, RequestAbortedError, ServerError

__all__ = [
    "CallStats",
    "Engine",
    "Generation",
    "GenerationRequest",
    "GenerationResult",
    "TokenChunk",
    "TokenLogprob",
]


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """log P(token) by the model itself (natural logarithm, before penalties and temperature), and the likeliest ids."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, frozen=True)
class TokenChunk:
    """What one step emitted.

    token_ids: the emitted ids, an ending EOS or stop token included
    text:      what they add to the text; may be empty while a character is incomplete or a stop string may have begun
    time_ns:   time.perf_counter_ns() when the engine had them, before any consumer
    finish_reason: "stop" or "length" on a choice's last chunk
    logprobs:  one TokenLogprob per id where the request asked for them, else empty
    index:     which of the request's n choices this belongs to
    stop_reason: on the last chunk, the stop string or ids that ended it; None for EOS and length
    delta:     what it adds to the assistant's message, where the call was a chat; None: it was not
    """

    token_ids: tuple[int, ...]
    text: str
    time_ns: int
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    stop_reason: str | tuple[int, ...] | None = None
    delta: MessageDelta | None = None


@dataclass(slots=True)
class CallStats:
    """What one call did, in DESIGN.md's words. Counts are tokens, times ms.

    prompt_tokens, output_tokens   the usage; an ending EOS is an output token
    reused_tokens                  prompt tokens whose KV was there already
    first_divergence               first prompt position that differs from the trajectory's last context; None: none
    spliced_tokens                 prompt tokens taken over as generated instead of tokenised again
    verify_steps                   forward passes that emitted tokens (LocalEngine's last prefill pass is one: it
                                   carries a draft and emits)
    proposed, accepted             draft tokens verified, and those of them emitted
    mismatches                     steps in which the target disagreed with the draft before it ran out; None: the
                                   engine isn't told
    proposed_depth                 sum over steps of the draft's longest path
    accepted_by_source             accepted tokens by the memory's source
    not_drafted                    steps without a draft, by reason
    near_ties                      positions decided again at n = 1 because their two best were closer than the noise
    near_tie_flips                 those of them in which the second decision differed
    seed                           what the sample was drawn with, given or made up; None: greedy
    choices                        n; counts below are sums over them
    arrivals                       (ms since the request, tokens) of each step
    drafts                         (proposed, accepted) of each step
    cost_by_width                  v(n + 1), proposer included, of the draft widths n that were used
    """

    model: str = ""
    engine: str = ""
    trajectory_id: str = ""
    call_index: int = 0
    finish_reason: str = ""
    temperature: float = 0.0
    seed: int | None = None
    choices: int = 1
    prompt_tokens: int = 0
    reused_tokens: int = 0
    first_divergence: int | None = None
    spliced_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    mismatches: int | None = 0
    proposed_depth: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    not_drafted: dict[str, int] = field(default_factory=dict)
    near_ties: int = 0
    near_tie_flips: int = 0
    mean_cost: float = 1.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)
    cost_by_width: dict[int, float] = field(default_factory=dict)
    queue_ms: float = 0.0
    proposer_ms: float = 0.0
    forward_ms: float = 0.0
    duration_ms: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / proposed: what drafting wastes. None: nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def conditional_acceptance(self) -> float | None:
        """accepted / (accepted + first mismatches): the `a` of the formulas. None: nothing was tried, or not told."""
        if self.mismatches is None:
            return None
        tried = self.accepted + self.mismatches
        return self.accepted / tried if tried else None

    @property
    def tokens_per_step(self) -> float | None:
        """Emitted tokens / verify steps, the bonus and steps without a draft included."""
        return self.output_tokens / self.verify_steps if self.verify_steps else None

    @property
    def break_even(self) -> float:
        """tokens_per_step from which drafting paid in this call: the mean v of its steps, proposer included."""
        return self.mean_cost

    @property
    def mean_width(self) -> float:
        """Draft tokens a step, steps without a draft included."""
        return self.proposed / self.verify_steps if self.verify_steps else 0.0

    @property
    def ttft_ms(self) -> float | None:
        """From the request to its first token, queueing included."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def itl_mean_ms(self) -> float | None:
        """(last - first arrival) / (tokens - 1)."""
        if self.output_tokens < 2 or len(self.arrivals) < 1:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.output_tokens - 1)

    def itl_per_arrival(self) -> list[float]:
        """The gaps between arrivals, ms."""
        return [b[0] - a[0] for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def itl_per_token(self) -> list[float]:
        """A gap g with m tokens counts as m times g / m, ms."""
        gaps: list[float] = []
        for before, after in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(after[0] - before[0]) / after[1]] * after[1]
        return gaps

    def to_dict(self) -> dict[str, Any]:
        """All counts and derived figures, for JSON. Gaps as mean, p50, p95 and max."""
        out = asdict(self)
        del out["arrivals"], out["drafts"]
        for name in (
            "acceptance_rate",
            "conditional_acceptance",
            "tokens_per_step",
            "mean_width",
            "ttft_ms",
            "itl_mean_ms",
        ):
            out[name] = getattr(self, name)
        for name, gaps in (("token", self.itl_per_token()), ("arrival", self.itl_per_arrival())):
            out[f"itl_per_{name}_ms"] = summary(gaps)
        return out


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p95 and max of the values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }


@dataclass(slots=True, frozen=True)
class GenerationResult:
    """A finished (or broken-off) call, or one of its n choices. `stats` is the whole call's."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: CallStats
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    stop_reason: str | tuple[int, ...] | None = None
    deltas: tuple[MessageDelta, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The output as an assistant message, to be appended to the history: content, and where there are any,
        reasoning_content, tool_calls and invalid_tool_calls (malformed ones, with their raw text)."""
        return joined(self.deltas) if self.deltas else {"role": "assistant", "content": self.text}


class Channel:
    """Where an engine puts a call's chunks, from whichever thread it runs in. Engines write, Generation reads.

    It holds no reference to its Generation, so a consumer that is dropped is noticed (Generation.__del__, which
    may run anywhere and so only sets `aborted`). Nothing blocks the writer: an unread call holds its chunks.
    span is the call's (telemetry.chat); it ends with the call, before its consumer learns of the end.
    """

    def __init__(self, span: telemetry.ChatSpan | telemetry.NoCall = telemetry.NO_CALL) -> None:
        self.span = span
        self._events: deque[TokenChunk | CallStats | BaseException] = deque()
        self._wakers: list[Callable[[], None]] = []
        self._sealed = False
        self._whole = False  # the consumer waits for the end: what is put counts as taken, and wakes nobody before
        self.aborted = threading.Event()
        self.claimed = False  # an engine has begun (or dropped) the call
        self.delivered: dict[int, int] = {}  # tokens that the consumer has taken, by choice
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)

    def put(self, event: TokenChunk | CallStats | BaseException) -> None:
        if isinstance(event, TokenChunk):
            self.span.chunk(event.text)
        elif isinstance(event, CallStats):
            self.span.finish(event)
        else:
            self.span.finish(error=event)
        with self._lock:
            if self._sealed and isinstance(event, TokenChunk):
                return
            self._events.append(event)
            if self._whole and isinstance(event, TokenChunk):
                self._count(event, 1)
                return
            wakers, self._wakers = self._wakers, []
            self._ready.notify_all()
        for wake in wakers:
            wake()

    def take(self, timeout: float | None = None) -> Any:
        """The next event, waiting for it; None after `timeout` seconds without one."""
        with self._lock:
            if not self._ready.wait_for(lambda: self._events, timeout):
                return None
            return self._taken()

    def take_or_wake(self, wake: Callable[[], None]) -> Any:
        """The next event, or None, and then `wake` is called (from any thread) once there is one."""
        with self._lock:
            if self._events:
                return self._taken()
            self._wakers.append(wake)
            return None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """While the consumer waits for the end, as if it took each chunk at once. Being woken at every step costs the
        engine more than all else beside its forward: the interpreter's lock, and a core."""
        self._take_all(True)
        try:
            yield
        finally:
            self._take_all(False)

    def wait_for_end(self) -> None:
        with self._lock:
            while not self._ended():
                self._ready.wait(1.0)  # finite: see Generation.__next__

    def end_or_wake(self, wake: Callable[[], None]) -> bool:
        """Whether the end is there; if not `wake` is called (from any thread) once it is."""
        with self._lock:
            if not self._ended():
                self._wakers.append(wake)
                return False
            return True

    def claim(self) -> bool:
        """The engine begins the call; False: it was aborted before, drop it."""
        with self._lock:
            if self.aborted.is_set():
                return False
            self.claimed = True
            return True

    def disowned(self) -> bool:
        """The consumer has aborted before any engine began; none will."""
        with self._lock:
            return self.aborted.is_set() and not self.claimed

    def seal(self) -> dict[int, int]:
        """Drop what was not taken and take no more chunks; returns the delivered tokens by choice."""
        with self._lock:
            self._sealed = True
            if not self._whole:
                self._events = deque(e for e in self._events if not isinstance(e, TokenChunk))
            return dict(self.delivered)

    def orphan(self, error: BaseException) -> None:
        """In a forked child: whoever wrote here is gone. Locks may be held by threads that are gone too."""
        self._make_locks()
        self._wakers = []
        self._events.append(error)

    def _taken(self) -> Any:
        event = self._events.popleft()
        self._count(event, 1)
        return event

    def _count(self, event: Any, times: int) -> None:
        if isinstance(event, TokenChunk):
            self.delivered[event.index] = self.delivered.get(event.index, 0) + times * len(event.token_ids)

    def _take_all(self, whole: bool) -> None:
        with self._lock:
            self._whole = whole
            for event in self._events:  # those that were taken at once are still to be read
                self._count(event, 1 if whole else -1)

    def _ended(self) -> bool:
        return bool(self._events) and not isinstance(self._events[-1], TokenChunk)


class Generation:
    """A call under way: iterate over its TokenChunks (`for` or `async for`), then read `stats`.

    `result()` and `await aresult()` run it to its end (`results()`, `aresults()` where n > 1: one a choice).
    `abort()`, `close()`, leaving a `with` block, cancelling a task that waits for it, or dropping the object ends it
    within a step. One consumer at a time.
    """

    def __init__(self, request: GenerationRequest, channel: Channel) -> None:
        self.request = request
        self.stats: CallStats | None = None
        self._channel = channel
        self._chunks: list[TokenChunk] = []
        self._error: BaseException | None = None

    # ---- consuming ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        self._raise_if_over(StopIteration)
        while True:
            # A finite wait keeps Ctrl-C working on systems where a lock's wait can't be interrupted.
            event = self._channel.take(timeout=1.0)
            if event is not None:
                return self._settle(event, StopIteration)

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    async def __anext__(self) -> TokenChunk:
        self._raise_if_over(StopAsyncIteration)
        return self._settle(await self._woken(self._channel.take_or_wake), StopAsyncIteration)

    def result(self) -> GenerationResult:
        """Wait for the end; the first choice. Raises what the engine raised."""
        self._to_the_end()
        return self._partial()

    async def aresult(self) -> GenerationResult:
        """As `result`. Cancelling it aborts the call."""
        await self._ato_the_end()
        return self._partial()

    def results(self) -> list[GenerationResult]:
        """Wait for the end; all n choices."""
        self._to_the_end()
        return [self._partial(index) for index in range(self.request.n)]

    async def aresults(self) -> list[GenerationResult]:
        """As `results`. Cancelling it aborts the call."""
        await self._ato_the_end()
        return [self._partial(index) for index in range(self.request.n)]

    def abort(self) -> None:
        """End the call within a step. Chunks that were read stay; those that were not are dropped, from the memory
        too, and the next read raises RequestAbortedError. Nothing happens to a call that is over."""
        self._channel.aborted.set()
        if self._channel.disowned():
            stats = CallStats(finish_reason="abort", prompt_tokens=len(self.request.input_ids))
            self._channel.put(RequestAbortedError("the call was aborted before it was served", stats))

    close = abort

    async def aclose(self) -> None:
        self.abort()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.abort()

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None:
            channel.aborted.set()

    # ---- inside -------------------------------------------------------------------------------

    def _to_the_end(self) -> None:
        if self._error is None and self.stats is None:
            with self._channel.whole():
                self._channel.wait_for_end()
        for _ in self:
            pass

    async def _ato_the_end(self) -> None:
        if self._error is None and self.stats is None:
            with self._channel.whole():
                await self._woken(self._channel.end_or_wake)
        async for _ in self:
            pass

    async def _woken(self, poll: Callable[[Callable[[], None]], Any]) -> Any:
        """What `poll` gives once it gives something; until then it calls what it is given when it is worth another."""
        loop = asyncio.get_running_loop()
        while True:
            ready = asyncio.Event()

            def wake(ready: asyncio.Event = ready) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                    loop.call_soon_threadsafe(ready.set)

            found = poll(wake)
            if found:
                return found
            try:
                await ready.wait()
            except asyncio.CancelledError:
                self.abort()  # as with any async generator: a cancelled wait ends the stream
                raise

    def _raise_if_over(self, stop: type[Exception]) -> None:
        if self._error is not None:
            raise self._error
        if self.stats is not None:
            raise stop

    def _settle(self, event: Any, stop: type[Exception]) -> TokenChunk:
        if isinstance(event, TokenChunk):
            self._chunks.append(event)
            return event
        if isinstance(event, CallStats):
            self.stats = event
            recordings.note(self.request, self._chunks, event)
            raise stop
        if isinstance(event, (RequestAbortedError, ServerError)) and isinstance(event.partial, CallStats):
            self.stats = event.partial
            event.partial = self._partial()
        self._error = event
        raise event

    def _partial(self, index: int = 0) -> GenerationResult:
        stats = self.stats or CallStats()
        mine = [chunk for chunk in self._chunks if chunk.index == index]
        last = mine[-1] if mine else None
        return GenerationResult(
            "".join(chunk.text for chunk in mine),
            tuple(i for chunk in mine for i in chunk.token_ids),
            (last.finish_reason if last is not None else None) or stats.finish_reason,
            stats,
            tuple(p for chunk in mine for p in chunk.logprobs),
            index,
            last.stop_reason if last is not None else None,
            tuple(chunk.delta for chunk in mine if chunk.delta is not None),
        )


@runtime_checkable
class Engine(Protocol):
    """Who runs the target model.

    generate returns at once; the work happens elsewhere, one call after another or batched. Errors in the
    request are raised by generate itself, errors while running by the Generation.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def context_length(self) -> int: ...

    def generate(self, request: GenerationRequest) -> Generation: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation: ...

    def close(self) -> None: ...


def now_ns() -> int:
    """The clock that all of a call's stamps use."""
    return time.perf_counter_ns()


def as_engine_error(error: BaseException) -> BaseException:
    """AgentSpecErrors and interrupts as they are; anything else wrapped, so that callers can catch one tree."""
    if isinstance(error, AgentSpecError) or not isinstance(error, Exception):
        return error
    from agentspec.errors import EngineError

    wrapped = EngineError(f"the engine failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
