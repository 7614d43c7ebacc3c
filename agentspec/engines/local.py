"""LocalEngine: the embedded engine. Any causal LM that transformers loads, on CPU (float32) or CUDA (bfloat16).

One worker thread runs the calls one after another, the trajectories in turn. Each call is laid against its
trajectory's memory and KV cache (common prefix kept, the rest cropped), then decoded (decoding.py).
Imports torch, and everything below engines.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from agentspec import __version__, telemetry
from agentspec.chat import ChatTemplate, Grammar, History, PreparedChat, ToolFormat
from agentspec.chat.compiled import CompiledGrammar, GrammarCompiler
from agentspec.drafting import CostCurve, Proposer, make_proposer
from agentspec.engines import cost, models
from agentspec.engines.base import CallStats, Channel, Generation, GenerationRequest, as_engine_error, now_ns
from agentspec.engines.conversations import divergence
from agentspec.engines.decoding import Decoder, Output
from agentspec.engines.forward import Forward
from agentspec.engines.outputs import make_stopper, remember
from agentspec.engines.request import bad_word_ids, chat_request, check_fits, constraint_of, whole_number
from agentspec.engines.sampling import Sampler
from agentspec.engines.states import States, TrajectoryState, default_budget, token_bytes
from agentspec.engines.worker import Worker
from agentspec.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    RequestAbortedError,
)
from agentspec.loop import Trajectory, current_trajectory
from agentspec.memory import MemoryStore, Source, TrajectoryMemory
from agentspec.memory.kernels import code_name

__all__ = ["LocalEngine"]

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    request: GenerationRequest
    trajectory: Trajectory
    channel: Channel
    submitted_ns: int
    once: bool  # the trajectory was made for this call and ends with it
    prepared: PreparedChat | None = None
    outputs: list[Output] = field(default_factory=list)


class LocalEngine:
    """The embedded engine.

    model:      "smollm2", a Hugging Face id, a directory, a GGUF file, or a loaded transformers model
                (then with tokenizer=); the engine takes it over: its weights may be repacked for the CPU
    device:     "cpu", "cuda", ...; None: CUDA where there is one, else CPU. A loaded model stays where it is
    dtype:      None: float32 on CPU, bfloat16 elsewhere; a loaded model's own
    proposer:   "mixture", "match" or another name, or anything that implements the Proposer protocol
    max_draft:  most draft tokens a step, up to 1024; 0 switches drafting off
    tool_format: how the model writes tool calls (agentspec.chat.formats); None: as its chat template tells
    cost_curve: v(n), kept as it is, and no clock decides a width; None: measured at load (a few seconds, cached by
                model, dtype, device and threads) and corrected while running
    kv_budget:  most bytes of keys and values kept for all trajectories; None: a quarter of the machine's memory (on
                CUDA of what the model leaves free). The least recently used trajectory's go first and are computed
                again when needed
    fast:       False: transformers' own forward, whatever else could run
    announce:   where first-use waits are told

    Raises ModelError and its kinds for a model that can't be had, InvalidRequestError for a bad option.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        *,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        proposer: str | Proposer = "mixture",
        max_draft: int = 16,
        tool_format: str | ToolFormat | None = None,
        cost_curve: CostCurve | None = None,
        kv_budget: int | None = None,
        fast: bool = True,
        announce: models.Notice = models.notice,
    ) -> None:
        whole_number("max_draft", max_draft, 0, 1024)
        whole_number("kv_budget", kv_budget, 1, optional=True)
        for name, value, good, needed in (
            ("fast", fast, isinstance(fast, bool), "True or False"),
            ("announce", announce, callable(announce), "a function that takes a text"),
            ("cost_curve", cost_curve, isinstance(cost_curve, CostCurve | None), "an agentspec.CostCurve or None"),
            ("tokenizer", tokenizer, tokenizer is None or callable(tokenizer), "a transformers tokenizer or None"),
        ):
            if not good:
                raise InvalidRequestError(f"{name}: needed {needed}, got {value!r:.80}")
        place, kind = models.placement(model, device, dtype)
        if isinstance(model, (str, os.PathLike)):
            loaded = models.load(model, device=place, dtype=kind, announce=announce)
            self._model, self.tokenizer = loaded.model, tokenizer or loaded.tokenizer
            self.model_name = os.fspath(model)
            self.path: str | None = loaded.path
        else:
            if tokenizer is None:
                raise InvalidRequestError("LocalEngine: a loaded model needs tokenizer=, its transformers tokenizer")
            self._model, self.tokenizer = model.eval(), tokenizer
            self.model_name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
            self.path = None
        config = self._model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.context_length = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
        self.eos_ids = models.eos_ids(getattr(self._model, "generation_config", None), self.tokenizer)
        self.device, self.dtype = place, kind
        self.template = ChatTemplate(self.tokenizer, tool_format)
        self._grammars = GrammarCompiler(self.tokenizer, self.vocabulary, self.eos_ids)
        self.store = MemoryStore()
        telemetry.watch_memory(self.store)
        self.proposer = make_proposer(proposer, self.tokenizer)
        self.max_draft = max_draft
        with models.waiting(announce, "preparing the model's forward and checking it against transformers' own"):
            self.forward = Forward.load(self._model, fast=fast)
        self._states = States(self.store, default_budget(self.device) if kv_budget is None else kv_budget)
        self._token_bytes = (
            token_bytes(self._model.config, self.dtype.itemsize) if self.forward.cache_kind == "full" else 0
        )
        if kv_budget is not None and self._token_bytes * 2 > kv_budget:
            raise InvalidRequestError(
                f"kv_budget: one token's keys and values take {self._token_bytes} bytes, got a budget of {kv_budget}; "
                f"allow at least {self._token_bytes * 1024} (a context of 1024 tokens)"
            )
        self._closed = False
        curve = cost_curve or self._measured_curve(announce)
        self._decoder = Decoder(
            self.forward,
            self.proposer,
            cost.CostMeter(curve),
            max_draft,
            self.vocabulary,
            refine=cost_curve is None,
        )
        # The thread must not keep the engine alive: an engine that is dropped ends it.
        serve = weakref.WeakMethod(self._serve)
        on_fork = weakref.WeakMethod(self._forked)
        self._worker: Worker[_Job] = Worker(
            lambda job: _call(serve, job),
            lambda jobs: _call(on_fork, jobs),
            [self._decoder.step_lock, self._states.lock],
        )
        self._finalizer = weakref.finalize(self, self._worker.release)
        _open.add(self)

    # ---- the Engine protocol ------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> Generation:
        """Start a call on token ids. Raises InvalidRequestError, ContextLengthError, EngineClosedError."""
        self._check(request)
        return self._submit(request, None, None)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar for this model, to be passed as a request's `constraint`. Raises GrammarError."""
        return self._grammars.compile(grammar)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        grammar: Grammar | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Start a call on messages, by the model's own chat template.

        Its chunks carry deltas of the assistant's message, its result() the message: content, reasoning_content,
        tool_calls, invalid_tool_calls. agentspec.chat.prepare says what the arguments are; options:
        GenerationRequest's. Raises as `generate`, and ChatTemplateError, GrammarError, UnknownOptionError.
        """
        # Rendered now, so that a bad message is told to the caller and not to the stream. The history may still
        # grow by a call under way in this trajectory; then its output is tokenised instead of spliced.
        request, prepared = chat_request(
            self.template,
            messages,
            lambda trajectory: self._states.get(trajectory).history,
            self.compile,
            options,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            grammar=grammar,
            template_options=template_options,
        )
        self._check(request)
        return self._submit(request, prepared, messages)

    def close(self) -> None:
        """Stop after the running step and free the caches. Calls under way and calls waiting end with
        EngineClosedError."""
        if self._closed:
            return
        self._closed = True
        self._decoder.closed.set()
        for job in self._worker.stop():
            job.channel.put(_closed())
        self._states.clear()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a LocalEngine can't be sent to another process: make one there (each loads the model itself)")

    # ---- what is held -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def cost_curve(self) -> CostCurve:
        """v(n) in force: measured at load and corrected since, or as it was given."""
        return self._decoder.meter.curve

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held for all trajectories."""
        return self._states.nbytes

    def history(self, trajectory: Trajectory) -> History:
        """The outputs of a trajectory, for exact history."""
        return self._states.get(trajectory).history

    def memory(self, trajectory: Trajectory) -> TrajectoryMemory:
        """The memory of a trajectory."""
        return self._states.get(trajectory).memory

    def forget(self, trajectory: Trajectory) -> None:
        """Free what is held for a trajectory."""
        self._states.forget(trajectory)

    # ---- requests -----------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        if self._closed:
            raise _closed()
        why = (
            f"the model's context holds {self._room}"
            if self._room == self.context_length
            else f"kv_budget holds {self._room} tokens of {self._token_bytes} bytes"
        )
        check_fits(request, self.vocabulary, self._room, why)

    @property
    def _room(self) -> int:
        """Most tokens of a context: the model's, or what the KV budget holds."""
        if not self._token_bytes:
            return self.context_length
        return min(self.context_length, self._states.kv_budget // self._token_bytes)

    def _submit(
        self,
        request: GenerationRequest,
        prepared: PreparedChat | None,
        messages: Sequence[Mapping[str, Any]] | None,
    ) -> Generation:
        trajectory = request.trajectory or current_trajectory()
        once = trajectory is None
        trajectory = trajectory or Trajectory()
        channel = Channel(telemetry.chat(telemetry.Target(self.model_name), request, trajectory, messages))
        job = _Job(request, trajectory, channel, now_ns(), once, prepared)
        lane = _caller() if once else (trajectory.namespace, trajectory.id)
        if not self._worker.submit(lane, job):
            raise _closed()
        return Generation(request, channel)

    def _serve(self, job: _Job) -> None:
        try:
            if not job.channel.claim():
                job.channel.put(RequestAbortedError("the call was aborted before it was served"))
                return
            if self._closed:
                raise _closed()
            self._run(job)
        except BaseException as error:
            job.channel.put(as_engine_error(error))
            if not isinstance(error, Exception):
                raise

    def _forked(self, jobs: list[_Job]) -> None:
        for job in jobs:
            for output in job.outputs:
                output.context.memory.close(output.context)
            job.channel.orphan(EngineError("this call runs in the parent process; the forked child can't follow it"))
        self._states.drop_broken()

    # ---- one call -----------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        request = job.request
        prompt = np.asarray(request.input_ids, dtype=np.int32)
        try:
            state = self._states.begin(job.trajectory)
        except Exception:
            if job.once:
                self._states.forget(job.trajectory)
            raise
        whole = False
        try:
            with self._decoder.step_lock:
                seed = request.seed
                if seed is None and request.temperature:
                    seed = secrets.randbits(63)
                stats = CallStats(
                    model=self.model_name,
                    engine="local",
                    trajectory_id=job.trajectory.id,
                    call_index=state.calls,
                    temperature=request.temperature,
                    seed=seed,
                    choices=request.n,
                    prompt_tokens=len(prompt),
                    spliced_tokens=job.prepared.prompt.spliced_tokens if job.prepared is not None else 0,
                    queue_ms=(now_ns() - job.submitted_ns) / 1e6,
                    first_divergence=divergence(state.last, prompt),
                )
                job.channel.span.measuring(stats)
                state.calls += 1
                self._take_seeds(state, job.trajectory)
                for seed_ids in job.prepared.seeds if job.prepared is not None and request.draft else ():
                    state.memory.seed(seed_ids, Source.SCHEMA)
            for index in range(request.n):
                with self._decoder.step_lock:
                    output = self._output(job, state, prompt, index, seed or 0, stats)
                    job.outputs.append(output)
                self._decoder.run(state, output, job.channel, stats, job.submitted_ns)
                self._states.trim()
                if output.aborted:
                    break
            whole = True
        finally:
            with self._decoder.step_lock:
                if not whole:
                    state.drop_cache()  # an error may have left it between two tokens
                self._settle(job, state)
            self._states.end(state)
            if job.once:
                self._states.forget(job.trajectory)
        aborted = job.outputs[-1].aborted
        stats.finish_reason = "abort" if aborted else job.outputs[0].stopper.finish_reason
        costs = [c for output in job.outputs for c in output.costs]
        stats.mean_cost = float(np.mean(costs)) if costs else 1.0
        stats.duration_ms = (now_ns() - job.submitted_ns) / 1e6
        if aborted:
            job.channel.put(RequestAbortedError("the call was aborted by its consumer", stats))
        else:
            job.trajectory.calls.append(stats)
            job.channel.put(stats)

    def _output(
        self, job: _Job, state: TrajectoryState, prompt: np.ndarray, index: int, seed: int, stats: CallStats
    ) -> Output:
        request = job.request
        reused = self._decoder.reuse(state, prompt)
        if index == 0:
            stats.reused_tokens = reused
        eos = frozenset() if request.ignore_eos else self.eos_ids
        single = {s[0] for s in request.stop_sequences if len(s) == 1}
        sampler = Sampler(
            request,
            prompt,
            sorted(eos | single),
            seed,
            index,
            bad_word_ids(request, self._encode),
            constraint_of(request),
            self._decoder.noise,
        )
        prepared = job.prepared
        stopper = make_stopper(self.tokenizer, request, self.eos_ids, self._room - len(prompt), prepared)
        parser = prepared.parser() if prepared is not None else None
        context = state.memory.extend(prompt, request.spans)
        return Output(index, request, prompt, sampler, stopper, context, prompt[reused:], parser=parser)

    def _settle(self, job: _Job, state: TrajectoryState) -> None:
        """The call is over: what the consumer of an aborted one did not get is taken back, the rest is kept."""
        aborted = bool(job.outputs) and job.outputs[-1].aborted
        delivered = job.channel.seal() if aborted else {}
        for output in job.outputs:
            context = output.context
            if aborted:
                kept = delivered.get(output.index, 0)
                context.memory.truncate(context, kept)
                if output is job.outputs[-1] and state.cache is not None and self.forward.supports_drafts:
                    state.cache.crop(len(output.prompt) + kept)
                    state.cached = state.cached[: len(output.prompt) + kept]
            ids = context.output.tolist()
            state.last = context.tokens.copy()
            context.memory.close(context)
            remember(
                state.history, self.tokenizer, self.eos_ids, ids, output.stopper, output.parser, job.prepared, aborted
            )
        state.cached = state.cached.copy()

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _take_seeds(self, state: TrajectoryState, trajectory: Trajectory) -> None:
        seeds = state.new_seeds(trajectory)
        state.take_seeds(trajectory, len(seeds))
        for seed in seeds:
            source = {"tool": Source.TOOL, "schema": Source.SCHEMA}.get(seed.source, Source.SEED)
            if isinstance(seed.content, str):
                state.memory.seed_text(seed.content, self._encode, source)
            else:
                state.memory.seed([i for i in seed.content if i < self.vocabulary], source)

    # ---- v(n) ---------------------------------------------------------------------------------

    def _measured_curve(self, announce: models.Notice) -> CostCurve:
        """v(n) from the disk, or measured now: under ten seconds for a model that takes 0.1 s a token."""
        if self.max_draft == 0 or not self.forward.supports_drafts:
            return CostCurve.linear(1.0, name="not measured: drafting is off")
        identity = {
            "model": self.path or self.model_name,
            "parameters": int(sum(p.numel() for p in self._model.parameters())),
            "dtype": str(self.dtype),
            "device": torch.cuda.get_device_name() if self.device.startswith("cuda") else self.device,
            "threads": torch.get_num_threads(),
            "forward": self.forward.description,
            "code": _code_of(self.forward),
        }
        path = models.cache_dir() / "cost_curves.json"
        times = cost.stored(path, identity)
        if times is None:
            announce("measuring what a forward over n tokens costs on this machine (a few seconds, once)")
            times, worth_keeping = cost.measure_forward(self.forward, self.context_length)
            if worth_keeping:
                cost.store(path, identity, times)
        return CostCurve.measured(times, name="measured")


_open: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A call that its consumer left may still run when the program ends; a thread inside torch can't be cut off then
    (C++ ends the whole process), so it ends after its step."""
    for engine in list(_open):
        engine.close()


def _call(method: Callable[[], Callable[[T], None] | None], argument: T) -> None:
    bound = method()
    if bound is not None:
        bound(argument)


def _code_of(forward: Forward) -> str:
    """What tells one version of the forward's code from another."""
    try:
        return code_name(type(forward).__module__)
    except OSError:  # its source can't be read: in a zip
        return __version__


def _closed() -> EngineClosedError:
    return EngineClosedError("this engine was closed; make a new LocalEngine")


def _caller() -> Hashable:
    """Whose turn a call without a trajectory takes: the task's, or the thread's."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return ("task", id(task)) if task is not None else ("thread", threading.get_ident())
