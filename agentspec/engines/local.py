"""LocalEngine: the embedded engine. Any causal LM that transformers loads, on CPU (float32) or CUDA (bfloat16).

One worker thread runs the calls one after another. Each call:

    lay the prompt against the trajectory's memory and KV cache (common prefix kept, the rest cropped)
    step 1: the prompt's new tokens and a draft in one forward; later steps: the last token and a draft
    the target's own choice at each position is emitted while the draft agrees, and one more

so every forward's choice is the target's, whatever was drafted. Imports torch, and everything below engines.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from agentspec import telemetry
from agentspec.chat import ChatTemplate, Detokenizer, History, OutputRecord
from agentspec.drafting import CostCurve, Draft, Proposer, WidthPolicy, make_proposer
from agentspec.engines import models
from agentspec.engines.base import (
    CallStats,
    Channel,
    Generation,
    GenerationRequest,
    TokenChunk,
    as_engine_error,
    now_ns,
)
from agentspec.engines.forward import Forward, KVCache
from agentspec.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    RequestAbortedError,
    UnknownOptionError,
)
from agentspec.loop import Trajectory, current_trajectory
from agentspec.memory import MemoryStore, Source, TrajectoryMemory

__all__ = ["LocalEngine"]

_PREFILL_CHUNK = 512  # tokens a forward: bounds the attention scores' memory at long contexts
_MEASURED_WIDTHS = (1, 2, 4, 8, 16, 32)


@dataclass(slots=True)
class _State:
    """What the engine holds for one trajectory."""

    memory: TrajectoryMemory
    cache: KVCache
    cached: list[int] = field(default_factory=list)  # the ids whose keys and values the cache has
    last: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # the last call's whole context
    history: History = field(default_factory=History)
    policy: WidthPolicy | None = None
    calls: int = 0
    seeds_taken: weakref.WeakKeyDictionary[Trajectory, int] = field(default_factory=weakref.WeakKeyDictionary)


@dataclass(slots=True)
class _Job:
    request: GenerationRequest
    trajectory: Trajectory
    channel: Channel
    submitted_ns: int
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]


class LocalEngine:
    """The embedded engine.

    model:      "smollm2", a Hugging Face id, a directory, a GGUF file, or a loaded transformers model
                (then with tokenizer=)
    device:     "cpu", "cuda", ...; None: CUDA where there is one, else CPU
    dtype:      None: float32 on CPU, bfloat16 elsewhere
    proposer:   a name, or anything that implements the Proposer protocol
    max_draft:  most draft tokens a step; 0 switches drafting off
    cost_curve: v(n); None: measured at load (a few seconds), cached by model, dtype, device and threads
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
        proposer: str | Proposer = "match",
        max_draft: int = 16,
        cost_curve: CostCurve | None = None,
        announce: models.Notice = models.notice,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        if isinstance(model, (str, os.PathLike)):
            loaded = models.load(model, device=device, dtype=dtype, announce=announce)
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
        self.eos_ids = _eos_ids(self._model, self.tokenizer)
        self.device, self.dtype = str(device), dtype
        self.template = ChatTemplate(self.tokenizer)
        self.store = MemoryStore()
        telemetry.watch_memory(self.store)
        self.proposer = make_proposer(proposer)
        if max_draft < 0:
            raise InvalidRequestError(f"max_draft: needed >= 0, got {max_draft}")
        self.max_draft = max_draft
        self._forward = Forward.load(self._model)
        self._states: dict[tuple[str | None, str], _State] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._worker_pid = 0
        self._closed = False
        self.cost_curve = cost_curve or self._measured_curve(announce)

    # ---- the Engine protocol ------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> Generation:
        """Start a call on token ids. Raises InvalidRequestError, ContextLengthError, EngineClosedError."""
        self._checked(request)
        return self._submit(request, None, None, {})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Start a call on messages, by the model's own chat template.

        tools: JSON schemas as the template takes them; template_options: more variables for the template;
        options: GenerationRequest's. Raises as `generate`, and ChatTemplateError, UnknownOptionError.
        """
        known = {f.name for f in fields(GenerationRequest)} - {"input_ids", "spans"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise UnknownOptionError(f"chat: unknown option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        trajectory = options.pop("trajectory", None) or current_trajectory() or Trajectory()
        # Rendered now, so that a bad message is told to the caller and not to the stream. The history may still
        # grow by a call under way in this trajectory; then its output is tokenised instead of spliced.
        state = self._state(trajectory)
        rendered = self.template.render(
            messages, tools=tools, history=state.history, template_options=template_options
        )
        request = GenerationRequest(
            input_ids=rendered.input_ids, spans=rendered.spans, trajectory=trajectory, **options
        )
        self._checked(request)
        return self._submit(request, messages, tools, {"spliced": rendered.spliced_tokens})

    def close(self) -> None:
        """Stop the worker after the running step and free the caches. Calls not served end with EngineClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker = self._worker
        self._jobs.put(None)
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        self._states.clear()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def history(self, trajectory: Trajectory) -> History:
        """The outputs of a trajectory, for exact history."""
        return self._state(trajectory).history

    def memory(self, trajectory: Trajectory) -> TrajectoryMemory:
        """The memory of a trajectory."""
        return self._state(trajectory).memory

    def forget(self, trajectory: Trajectory) -> None:
        """Free what is held for a trajectory."""
        with self._lock:
            self._states.pop((trajectory.namespace, trajectory.id), None)
        self.store.forget(trajectory.id, trajectory.namespace)

    # ---- requests -----------------------------------------------------------------------------

    def _checked(self, request: GenerationRequest) -> None:
        if self._closed:
            raise EngineClosedError("this engine was closed; make a new LocalEngine")
        ids = np.asarray(request.input_ids)
        if ids.size == 0:
            raise InvalidRequestError("input_ids: needed at least one token, got none")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InvalidRequestError(f"input_ids: needed a flat list of token ids, got {request.input_ids!r:.80}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            raise InvalidRequestError(
                f"input_ids: this model's ids are 0..{self.vocabulary - 1}, got {int(ids.min())}..{int(ids.max())}"
            )
        if len(ids) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the model's context holds {self.context_length} with at least one "
                f"for the output: shorten the history"
            )
        if request.max_tokens is not None and len(ids) + request.max_tokens > self.context_length:
            raise ContextLengthError(
                f"prompt ({len(ids)}) and max_tokens ({request.max_tokens}) exceed the model's context of "
                f"{self.context_length}: ask for at most {self.context_length - len(ids)}, or shorten the history"
            )
        if request.temperature != 0:
            raise InvalidRequestError(f"temperature: only greedy decoding (0) is served, got {request.temperature}")

    def _submit(
        self, request: GenerationRequest, messages: Any, tools: Any, options: Mapping[str, Any]
    ) -> Generation:
        trajectory = request.trajectory or current_trajectory() or Trajectory()
        channel = Channel(telemetry.chat(telemetry.Target(self.model_name), request, trajectory, messages))
        job = _Job(request, trajectory, channel, now_ns(), messages, tools, options)
        with self._lock:
            if self._closed:
                raise EngineClosedError("this engine was closed; make a new LocalEngine")
            if self._worker is None or self._worker_pid != os.getpid():
                # A forked child has the lock and the queue but not the thread.
                self._worker = threading.Thread(target=self._serve, name="agentspec-engine", daemon=True)
                self._worker_pid = os.getpid()
                self._worker.start()
        self._jobs.put(job)
        return Generation(request, channel)

    def _state(self, trajectory: Trajectory) -> _State:
        key = (trajectory.namespace, trajectory.id)
        with self._lock:
            state = self._states.get(key)
            if state is None:
                memory = self.store.open(trajectory.id, trajectory.namespace)
                state = self._states[key] = _State(memory, self._forward.new_cache())
            return state

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                break
            if self._closed:
                job.channel.put(EngineClosedError("the engine was closed before this call was served"))
                continue
            try:
                self._run(job)
            except BaseException as error:
                job.channel.put(as_engine_error(error))
                if not isinstance(error, Exception):
                    raise
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.channel.put(EngineClosedError("the engine was closed before this call was served"))

    # ---- one call -----------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        request, channel = job.request, job.channel
        state = self._state(job.trajectory)
        started = now_ns()
        prompt = np.asarray(request.input_ids, dtype=np.int32)
        stats = CallStats(
            model=self.model_name,
            engine="local",
            trajectory_id=job.trajectory.id,
            call_index=state.calls,
            temperature=request.temperature,
            prompt_tokens=len(prompt),
            spliced_tokens=job.options.get("spliced", 0),
            queue_ms=(started - job.submitted_ns) / 1e6,
        )
        channel.span.measuring(stats)
        state.calls += 1
        self._take_seeds(state, job.trajectory)
        if state.policy is None:
            state.policy = WidthPolicy(self.cost_curve, self.max_draft)
        stats.first_divergence = _divergence(state.last, prompt)
        # The prompt's last token always runs again: its logits choose the first output token.
        reused = min(_common_prefix(state.cached, prompt), len(prompt) - 1)
        if reused < state.cache.length and not self._forward.supports_drafts:
            reused = 0  # a state that can't go back starts anew
        state.cache.crop(reused)
        del state.cached[reused:]
        stats.reused_tokens = reused

        context = state.memory.extend(prompt, request.spans)
        self.proposer.begin(context)
        limit = self.context_length - len(prompt)
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        detokenizer = Detokenizer(self.tokenizer)
        output: list[int] = []
        pending = prompt[reused:]
        costs: list[float] = []
        try:
            while not stats.finish_reason:
                if channel.aborted.is_set():
                    stats.finish_reason = "abort"
                    break
                while len(pending) > _PREFILL_CHUNK:
                    self._step(state, pending[:_PREFILL_CHUNK], 0, stats)
                    pending = pending[_PREFILL_CHUNK:]
                    if channel.aborted.is_set():
                        break
                if channel.aborted.is_set():
                    continue
                draft = self._propose(state, context, request, limit - len(output), stats)
                emitted = self._verify(state, pending, draft, stats)
                finish = ""
                for place, token in enumerate(emitted):
                    if token in self.eos_ids:
                        finish, emitted = "stop", emitted[: place + 1]
                        break
                if not finish and len(output) + len(emitted) >= limit:
                    finish, emitted = "length", emitted[: limit - len(output)]
                # What the draft gained is what was emitted of it: cut tokens are not accepted ones.
                accepted = self._count(draft, emitted, stats)
                costs.append(state.policy.cost(len(draft)))
                stats.cost_by_width[len(draft)] = costs[-1]
                stats.drafts.append((len(draft), accepted))
                state.policy.record(len(emitted), len(draft))
                output += emitted
                keep = len(prompt) + len(output) - 1
                state.cache.crop(keep)
                state.cached += [int(t) for t in pending] + [int(t) for t in draft.tokens[:accepted]]
                del state.cached[keep:]
                new = np.asarray(emitted, dtype=np.int32)
                state.memory.append(context, new)
                self._timed(stats, self.proposer.observe, context, new)
                self._timed(stats, self.proposer.learn, context)
                pending = new[-1:]
                visible = [t for t in emitted if t not in self.eos_ids]
                text = detokenizer.push(visible)
                if finish:
                    text += detokenizer.flush()
                    stats.finish_reason = finish
                stamp = now_ns()
                stats.arrivals.append(((stamp - job.submitted_ns) / 1e6, len(emitted)))
                channel.put(TokenChunk(tuple(emitted), text, stamp, finish or None))
        finally:
            self.proposer.end(context)
            state.memory.close(context)
            state.last = context.tokens.copy()
            stats.output_tokens = len(output)
            stats.mean_cost = float(np.mean(costs)) if costs else 1.0
            stats.duration_ms = (now_ns() - job.submitted_ns) / 1e6
            if output:
                record = OutputRecord.of(self.tokenizer, output, self.eos_ids)
                state.history.add(record, {"role": "assistant", "content": record.text})
        if stats.finish_reason == "abort":
            channel.put(RequestAbortedError("the call was aborted by its consumer", stats))
        else:
            job.trajectory.calls.append(stats)
            channel.put(stats)

    def _take_seeds(self, state: _State, trajectory: Trajectory) -> None:
        taken = state.seeds_taken.get(trajectory, 0)
        seeds = trajectory.seeds_from(taken)
        for seed in seeds:
            source = {"tool": Source.TOOL, "schema": Source.SCHEMA}.get(seed.source, Source.SEED)
            if isinstance(seed.content, str):
                ids = self.tokenizer(seed.content, add_special_tokens=False)["input_ids"]
            else:
                ids = [i for i in seed.content if i < self.vocabulary]
            if len(ids):
                state.memory.seed(ids, source)
        state.seeds_taken[trajectory] = taken + len(seeds)

    def _propose(
        self, state: _State, context: Any, request: GenerationRequest, remaining: int, stats: CallStats
    ) -> Draft:
        reason = ""
        draft = Draft.empty()
        if not request.draft or self.max_draft == 0:
            reason = "off"
        elif not self._forward.supports_drafts:
            reason = self._forward.limits
        elif remaining <= 1:
            reason = "last token"
        else:
            assert state.policy is not None
            limits = state.policy.limits(remaining)
            draft = self._timed(stats, self.proposer.propose, context, limits)
            draft.check(limits, self.vocabulary)
            if not len(draft):
                reason = "no match or not worth it"
        if reason:
            stats.not_drafted[reason] = stats.not_drafted.get(reason, 0) + 1
        return draft

    def _verify(self, state: _State, pending: np.ndarray, draft: Draft, stats: CallStats) -> list[int]:
        """The target's choices: those that agree with the draft, and one more."""
        logits = self._step(state, np.concatenate([pending, draft.tokens]), 1 + len(draft), stats)
        assert logits is not None
        choices: list[int] = logits.argmax(dim=-1).tolist()
        agreed = 0
        for token in draft.tokens.tolist():
            if choices[agreed] != token:
                break
            agreed += 1
        stats.verify_steps += 1
        stats.proposed += len(draft)
        stats.proposed_depth += draft.depth
        return choices[: agreed + 1]

    def _count(self, draft: Draft, emitted: list[int], stats: CallStats) -> int:
        accepted = 0
        for token, source, got in zip(draft.tokens.tolist(), draft.sources.tolist(), emitted, strict=False):
            if token != got:
                stats.mismatches += 1
                break
            accepted += 1
            name = Source(source).name.lower()
            stats.accepted_by_source[name] = stats.accepted_by_source.get(name, 0) + 1
        stats.accepted += accepted
        return accepted

    def _step(self, state: _State, ids: np.ndarray, rows: int, stats: CallStats) -> torch.Tensor | None:
        before = time.perf_counter()
        logits = self._forward.step(state.cache, ids, rows)
        if not rows:
            state.cached += [int(t) for t in ids]
        stats.forward_ms += (time.perf_counter() - before) * 1e3
        return logits if rows else None

    @staticmethod
    def _timed(stats: CallStats, function: Callable[..., Any], *args: Any) -> Any:
        before = time.perf_counter()
        value = function(*args)
        stats.proposer_ms += (time.perf_counter() - before) * 1e3
        return value

    # ---- v(n) ---------------------------------------------------------------------------------

    def _measured_curve(self, announce: models.Notice) -> CostCurve:
        """v(n) from the cache, or measured now: under ten seconds for a model that takes 0.1 s a token."""
        if self.max_draft == 0:
            return CostCurve.linear(1.0, name="not measured: drafting is off")
        identity = {
            "model": self.path or self.model_name,
            "parameters": int(sum(p.numel() for p in self._model.parameters())),
            "dtype": str(self.dtype),
            "device": torch.cuda.get_device_name() if self.device.startswith("cuda") else self.device,
            "threads": torch.get_num_threads(),
            "forward": self._forward.description,
        }
        key = json.dumps(identity, sort_keys=True)
        path = models.cache_dir() / "cost_curves.json"
        known: dict[str, dict[str, float]] = {}
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass  # nothing measured yet, or a file somebody broke: measured again below
        if key in known:
            return CostCurve.measured({int(n): float(ms) for n, ms in known[key].items()}, name="measured")
        announce("measuring what a forward over n tokens costs on this machine (a few seconds, once)")
        times = self._measure()
        known[key] = {str(n): ms for n, ms in times.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(known), encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            pass  # a read-only home: measured again next time
        return CostCurve.measured(times, name="measured")

    def _measure(self, context: int = 256, budget_s: float = 8.0) -> dict[int, float]:
        """Least ms of a forward over n tokens after `context` tokens, widths interleaved, within the budget."""
        context = min(context, self.context_length // 2)
        cache = self._forward.new_cache()
        ids = (np.arange(context) * 7919 % self.vocabulary).astype(np.int32)
        self._forward.step(cache, ids, 0)
        widths = [n for n in _MEASURED_WIDTHS if context + n <= self.context_length]
        times: dict[int, list[float]] = {n: [] for n in widths}
        end = time.perf_counter() + budget_s
        for round_ in range(12):
            for n in widths:
                before = time.perf_counter()
                self._forward.step(cache, ids[:n], n)
                if self.device.startswith("cuda"):
                    torch.cuda.synchronize()
                if round_:  # the first round warms up
                    times[n].append((time.perf_counter() - before) * 1e3)
                cache.crop(context)
            if round_ >= 2 and time.perf_counter() > end:
                break
        # The least of each: what else the machine does only ever adds.
        return {n: float(np.min(t)) for n, t in times.items()}


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    if getattr(tokenizer, "eos_token_id", None) is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(int(i) for i in ids)


def _common_prefix(held: list[int], prompt: np.ndarray) -> int:
    n = min(len(held), len(prompt))
    if not n:
        return 0
    differ = np.flatnonzero(np.asarray(held[:n], dtype=np.int32) != prompt[:n])
    return int(differ[0]) if len(differ) else n


def _divergence(last: np.ndarray, prompt: np.ndarray) -> int | None:
    """The first position where a prompt departs from the last context; None where one continues the other."""
    n = min(len(last), len(prompt))
    differ = np.flatnonzero(last[:n] != prompt[:n])
    return int(differ[0]) if len(differ) else None
