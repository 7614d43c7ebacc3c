"""TextEngine: an engine without a model that says what it is told to, through the real Channel.

It keeps what it was asked (`asked`), emits one token a step, looks for an abort before each step as a real
engine does, and counts the steps it took (`steps`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentspec import telemetry
from agentspec.chat import MessageParser, formats
from agentspec.engines.base import CallStats, Channel, Generation, GenerationRequest, TokenChunk
from agentspec.errors import RequestAbortedError
from agentspec.loop import Trajectory

Answer = str | BaseException | Callable[[Sequence[Mapping[str, Any]]], str]


class TextEngine:
    """answers: one a call, the last for ever; a text, an error to raise, or a function of the messages."""

    context_length = 4096

    def __init__(self, tokenizer: Any, *answers: Answer, wait_s: float = 0.0, fail_after: int = 0) -> None:
        self.tokenizer = tokenizer
        self.model_name = "text-1"
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.trajectories: list[Trajectory] = []
        self.steps = 0
        self.idle = threading.Event()
        self.closed = False
        self._answers = list(answers)
        self._wait_s = wait_s
        self._fail_after = fail_after
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def chat(self, messages: Sequence[Mapping[str, Any]], *, trajectory: Trajectory, **options: Any) -> Generation:
        self.asked.append(([dict(m) for m in messages], options))
        self.trajectories.append(trajectory)
        known = {k: v for k, v in options.items() if k not in ("tools", "tool_choice", "response_format")}
        known.pop("parallel_tool_calls", None)
        known.pop("template_options", None)
        request = GenerationRequest.of(input_ids=(1, 2, 3), trajectory=trajectory, **known)
        channel = Channel(telemetry.chat(telemetry.Target(self.model_name), request, trajectory, messages))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.idle.clear()
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in options.get("tools") or ()}
        parser = MessageParser(formats.get("hermes"), offered)
        self._jobs.put((request, trajectory, channel, answer, [dict(m) for m in messages], parser))
        return Generation(request, channel)

    def generate(self, request: GenerationRequest) -> Generation:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def _serve(self) -> None:
        while True:
            request, trajectory, channel, answer, messages, parser = self._jobs.get()
            try:
                self._run(request, trajectory, channel, answer, messages, parser)
            except BaseException as error:
                channel.put(error)
            self.idle.set()
            del request, trajectory, channel

    def _run(
        self, request: Any, trajectory: Trajectory, channel: Channel, answer: Any, messages: Any, parser: Any
    ) -> None:
        if not channel.claim():
            return
        stats = CallStats(model=self.model_name, engine="text", trajectory_id=trajectory.id, prompt_tokens=3)
        failing = isinstance(answer, BaseException)
        text = "one two three four five six" if failing else answer(messages) if callable(answer) else answer
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] or [0]
        limit = min(request.max_tokens or len(ids), len(ids))
        for number, token in enumerate(ids[:limit]):
            time.sleep(self._wait_s)
            if channel.aborted.is_set():
                stats.finish_reason = "abort"
                channel.put(RequestAbortedError("the call was aborted by its consumer", stats))
                return
            if failing and number >= self._fail_after:
                raise answer
            self.steps += 1
            stats.output_tokens += 1
            stats.verify_steps += 1
            last = number == limit - 1
            finish = None if not last else "length" if limit < len(ids) else "stop"
            piece = self.tokenizer.decode([token]) if text else ""
            delta = parser.finish(piece) if last else parser.push(piece)
            channel.put(TokenChunk((token,), piece, time.perf_counter_ns(), finish, delta=delta))
        stats.finish_reason = finish or ""
        trajectory.calls.append(stats)
        channel.put(stats)
