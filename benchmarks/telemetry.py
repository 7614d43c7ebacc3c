"""What telemetry costs a call: on against off, call by call in turn, on one engine.

    python benchmarks/telemetry.py                       # SmolLM2, spans and metrics to an OTLP receiver
    python benchmarks/telemetry.py --model tiny --calls 200

On: OpenTelemetry's SDK with batching OTLP exporters (HTTP) to a receiver in another process, content and
step events off, as configure() sets it up. Off: no provider. The same request each time, greedy, so the
work is the same; pairs in random order. Three figures: wall and CPU time of whole calls (medians of the
pairs' differences, with a bootstrap interval), and the time spent inside telemetry's own functions, which a
busy machine hides least.
"""

from __future__ import annotations

import argparse
import http.server
import json
import multiprocessing
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import agentspec
from agentspec import telemetry
from agentspec.telemetry import calls as call_spans

LIMIT = 0.005


class _Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _receive(pipe: Any) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    pipe.send(server.server_port)
    server.serve_forever()


class Switch:
    """Puts the providers in and out of OpenTelemetry's globals (which may be set only once otherwise)."""

    def __init__(self, endpoint: str) -> None:
        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces")))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{endpoint}/v1/metrics"))
        self._on = tracers, MeterProvider([reader])
        self._off = trace._TRACER_PROVIDER, metrics._internal._METER_PROVIDER

    def close(self) -> None:
        for provider in self._on:
            provider.shutdown()

    def set(self, on: bool) -> None:
        trace._TRACER_PROVIDER, metrics._internal._METER_PROVIDER = self._on if on else self._off


class Inside:
    """Adds up the CPU time spent in telemetry's functions on a call's path (of its thread: on a busy
    machine the clock on the wall would count other processes in)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in (
            (telemetry, "chat"),
            (telemetry, "agent"),
            (call_spans.ChatSpan, "finish"),
            (call_spans.ChatSpan, "chunk"),
            (telemetry.Run, "end"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def _engine(name: str) -> tuple[Any, Any]:
    if name == "tiny":
        from agentspec.drafting import CostCurve
        from tests import tiny

        made = agentspec.LocalEngine(tiny.model("llama"), tokenizer=tiny.tokenizer(), cost_curve=CostCurve.linear(0.01))
    else:
        made = agentspec.LocalEngine(name)
    text = "Repeat this text exactly: The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
    return made, made.tokenizer(text * 4)["input_ids"]


def _one(engine: Any, ids: Any, tokens: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    with agentspec.trajectory(name="bench"):
        engine.generate(agentspec.GenerationRequest(input_ids=ids, max_tokens=tokens)).result()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(model: str, pairs: int, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Runs the pairs; times in ms, shares of the median call without telemetry."""
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    switch = Switch(f"http://127.0.0.1:{ours.recv()}")
    engine, ids = _engine(model)
    inside, order = Inside(), random.Random(seed)
    try:
        for on in (True, False):  # both warm
            switch.set(on)
            _one(engine, ids, tokens)
        wall: dict[bool, list[float]] = {True: [], False: []}
        cpu: dict[bool, list[float]] = {True: [], False: []}
        spent: list[float] = []
        for _ in range(pairs):
            for on in order.sample([True, False], 2):
                switch.set(on)
                inside.seconds = 0.0
                seconds, used = _one(engine, ids, tokens)
                wall[on].append(seconds)
                cpu[on].append(used)
                if on:
                    spent.append(inside.seconds)
    finally:
        switch.set(False)
        switch.close()
        engine.close()
        receiver.terminate()
    call = statistics.median(wall[False])
    return {
        "model": model,
        "pairs": pairs,
        "tokens": tokens,
        "call_ms": call * 1e3,
        "inside_ms": statistics.median(spent) * 1e3,
        "inside_share": statistics.median(spent) / call,
        "wall": _difference(wall[True], wall[False], call, order),
        "cpu": _difference(cpu[True], cpu[False], statistics.median(cpu[False]), order),
    }


def _difference(on: list[float], off: list[float], base: float, order: random.Random) -> dict[str, float]:
    """Median of the pairs' differences, as a share of `base`, with a 95 % bootstrap interval."""
    paired = [(a - b) / base for a, b in zip(on, off, strict=True)]
    drawn = sorted(statistics.median(order.choices(paired, k=len(paired))) for _ in range(1000))
    return {"share": statistics.median(paired), "low": drawn[25], "high": drawn[974]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or what LocalEngine takes")
    parser.add_argument("--calls", type=int, default=40, help="pairs of calls")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a call")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    found = measure(args.model, args.calls, args.tokens)
    size = f"{found['tokens']} tokens and {found['call_ms']:.1f} ms a call"
    print(f"{found['model']}: {found['pairs']} pairs, {size}")
    print(f"inside telemetry: CPU {found['inside_ms']:.3f} ms a call, {found['inside_share']:.3%}")
    for name in ("wall", "cpu"):
        d = found[name]
        print(f"{name} time, on less off: {d['share']:+.2%} [{d['low']:+.2%}, {d['high']:+.2%}]")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0 if found["inside_share"] < LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
