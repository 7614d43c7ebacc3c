"""An engine without a model: scripted steps through the real Channel and Generation, from a thread of its
own.

For what only concerns calls as such (spans, streams, threads). Its counts are consistent as a real engine's
are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec import telemetry
from agentspec.engines.base import (
    CallStats,
    Channel,
    Generation,
    GenerationRequest,
    TokenChunk,
    as_engine_error,
)
from agentspec.errors import RequestAbortedError
from agentspec.loop import Trajectory, current_trajectory


@dataclass
class Step:
    """emitted tokens after a draft of `proposed`; wait_s before them; error: raised instead."""

    emitted: int = 1
    proposed: int = 0
    wait_s: float = 0.0
    error: BaseException | None = None

    @property
    def accepted(self) -> int:
        return min(self.proposed, self.emitted - 1)


@dataclass
class ScriptedEngine:
    """Each call takes the next script, the last one for ever."""

    scripts: list[list[Step]] = field(default_factory=lambda: [[Step(), Step(4, 4), Step(2, 5), Step()]])
    target: telemetry.Target = field(default_factory=lambda: telemetry.Target("scripted-1"))
    break_even: float = 1.2
    not_drafted: str = "no match or not worth it"

    def __post_init__(self) -> None:
        self.model_name = self.target.model
        self._calls: dict[str, int] = {}
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._served = 0
        self.ended: list[CallStats] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        trajectory = options.pop("trajectory", None) or current_trajectory() or Trajectory()
        request = GenerationRequest(input_ids=list(range(1, 40)), trajectory=trajectory, **options)
        return self._submit(request, messages)

    def generate(self, request: GenerationRequest) -> Generation:
        return self._submit(request, None)

    def _submit(self, request: GenerationRequest, messages: Any) -> Generation:
        trajectory = request.trajectory or current_trajectory() or Trajectory()
        channel = Channel(telemetry.chat(self.target, request, trajectory, messages))
        script = self.scripts[min(self._served, len(self.scripts) - 1)]
        self._served += 1
        self._jobs.put((request, trajectory, channel, script, time.perf_counter()))
        return Generation(request, channel)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._run(*job)
            except BaseException as error:
                job[2].put(as_engine_error(error))
            del job  # holds the channel

    def _run(
        self,
        request: GenerationRequest,
        trajectory: Trajectory,
        channel: Channel,
        script: list[Step],
        began: float,
    ) -> None:
        if not channel.claim():
            return
        number = self._calls[trajectory.id] = self._calls.get(trajectory.id, -1) + 1
        stats = CallStats(
            model=self.model_name,
            engine=self.target.engine,
            trajectory_id=trajectory.id,
            call_index=number,
            temperature=request.temperature,
            prompt_tokens=len(request.input_ids),
            reused_tokens=len(request.input_ids) // 2,
            mean_cost=self.break_even,
            proposer_ms=0.1,
            forward_ms=0.9,
        )
        channel.span.measuring(stats)
        for step in script:
            time.sleep(step.wait_s)
            if step.error is not None:
                raise step.error
            if channel.aborted.is_set():
                stats.finish_reason = "abort"
                break
            stats.verify_steps += 1
            stats.output_tokens += step.emitted
            stats.proposed += step.proposed
            stats.accepted += step.accepted
            stats.mismatches += step.accepted < step.proposed
            stats.drafts.append((step.proposed, step.accepted))
            stats.cost_by_width[step.proposed] = 1.0 + step.proposed / 10
            if step.accepted:
                stats.accepted_by_source["tool"] = stats.accepted_by_source.get("tool", 0) + step.accepted
            if not step.proposed:
                stats.not_drafted[self.not_drafted] = stats.not_drafted.get(self.not_drafted, 0) + 1
            last = step is script[-1]
            stats.arrivals.append(((time.perf_counter() - began) * 1e3, step.emitted))
            ids, text = tuple(range(step.emitted)), "word " * step.emitted
            channel.put(TokenChunk(ids, text, time.perf_counter_ns(), "stop" if last else None))
        stats.duration_ms = (time.perf_counter() - began) * 1e3
        self.ended.append(stats)
        if stats.finish_reason == "abort":
            channel.put(RequestAbortedError("the call was aborted by its consumer", stats))
            return
        stats.finish_reason = "stop"
        trajectory.calls.append(stats)
        channel.put(stats)
