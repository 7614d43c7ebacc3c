"""v(n), transformers' own forward against agentspec's, interleaved in one process.

    python benchmarks/forward.py [--model smollm2] [--context 512 2048] [--widths 1 2 4 8 16 32] [--rounds 7]
    python benchmarks/forward.py --parts           # where a step's time goes
    python benchmarks/forward.py --linears         # only SmolLM2's 121 linears, by what their weights are stored as

A step of n rows appends n tokens after `context` tokens and gives the logits of all n. Each round runs every width on
both forwards in turn, so that what else the machine does falls on all alike; the table has medians and, in brackets,
the least. v(n) is the median relative to the same forward's n = 1. Also printed: prefill, memory, how far the logits
lie from transformers', and whether rows have the same bits at every width.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentspec.engines import forward_cpu, kernels, linear, models
from agentspec.engines.forward import Forward
from agentspec.engines.team import torch_team

PREFILL = 512


def memory_mb() -> str:
    """Anonymous and file-backed resident memory of this process, in MB (Linux)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return "not known on this system"
    held = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith("Rss")}
    return f"{held['RssAnon']} MB anonymous, {held['RssFile']} MB mapped files"


def load(name: str, fast: bool) -> Forward:
    model = models.load(name, device="cpu", dtype=torch.float32).model
    before = time.perf_counter()
    forward = Forward.load(model, fast=fast)
    print(f"{'agentspec' if fast else 'transformers'}: {forward.description}")
    print(f"  taken over in {time.perf_counter() - before:.1f} s; process: {memory_mb()}")
    return forward


def prefilled(forward: Forward, ids: np.ndarray) -> Any:
    cache = forward.new_cache(len(ids) + 64)
    before = time.perf_counter()
    for begin in range(0, len(ids), PREFILL):
        forward.step(cache, ids[begin : begin + PREFILL], 0)
    print(f"  prefill of {len(ids)}: {len(ids) / (time.perf_counter() - before):.0f} tokens/s")
    return cache


def compare(forwards: dict[str, Forward], ids: np.ndarray, context: int, widths: list[int], rounds: int) -> None:
    print(f"\ncontext {context}")
    caches = {}
    for name, forward in forwards.items():
        print(f" {name}")
        caches[name] = prefilled(forward, ids[:context])
    times: dict[tuple[str, int], list[float]] = {}
    logits: dict[tuple[str, int], torch.Tensor] = {}
    for round_ in range(rounds + 1):
        for n in widths:
            for name, forward in forwards.items():
                before = time.perf_counter()
                out = forward.step(caches[name], ids[context : context + n], n)
                if round_:  # the first warms up
                    times.setdefault((name, n), []).append((time.perf_counter() - before) * 1e3)
                logits[name, n] = out
                caches[name].crop(context)
    header = "".join(f"{f'n={n}':>20}" for n in widths)
    print(f"{'ms: median (least)':<22}{header}")
    for name in forwards:
        cells = (times[name, n] for n in widths)
        row = "".join(f"{f'{statistics.median(t):.1f} ({min(t):.1f})':>20}" for t in cells)
        base = statistics.median(times[name, widths[0]])
        v = "".join(f"{statistics.median(times[name, n]) / base:>20.2f}" for n in widths)
        print(f"{name:<22}{row}\n{'  v(n)':<22}{v}")
    first, second = forwards
    ratios = "".join(
        f"{statistics.median(b / a for a, b in zip(times[first, n], times[second, n], strict=True)):>20.2f}"
        for n in widths
    )
    print(f"{f'{second} / {first}':<22}{ratios}   (median of the rounds' ratios)")
    widest = max(widths)
    for name in forwards:
        same = [n for n in widths if torch.equal(logits[name, n], logits[name, widest][:n])]
        print(f"{name}: rows have the bits of n = {widest} at n = {', '.join(map(str, same))}")
    apart = (logits[first, widest] - logits[second, widest]).abs()
    own = (logits[first, widths[0]] - logits[first, widest][: widths[0]]).abs()
    print(
        f"logits apart from {first}': at most {apart.max():.1e}, on average {apart.mean():.1e}; "
        f"{first}' own at n = {widths[0]} and {widest}: {own.max():.1e}, {own.mean():.1e} "
        f"(largest logit {logits[first, widest].abs().max():.0f})"
    )


def parts(forward: Forward, ids: np.ndarray, context: int, widths: list[int], rounds: int) -> None:
    """ms of a step by what runs, least of the rounds. The clock around each call adds some 0.1 ms a step."""
    if not isinstance(forward, forward_cpu.LeanForward):
        print("parts: only for agentspec's own layers")
        return
    spent: dict[str, float] = {}

    def timed(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any) -> Any:
            before = time.perf_counter()
            value = inner(*args)
            spent[label] = spent.get(label, 0.0) + (time.perf_counter() - before) * 1e3
            return value

        setattr(owner, name, outer)

    timed(linear.Linear, "__call__", "linears")
    timed(kernels.Attention, "__call__", "attention")
    for name in ("norm", "add_norm", "gate", "rotate_heads"):
        timed(kernels, name, "norms, rotation, activation")
    cache = prefilled(forward, ids[:context])
    for n in widths:
        best: tuple[float, dict[str, float]] | None = None
        for _ in range(rounds):
            spent.clear()
            before = time.perf_counter()
            forward.step(cache, ids[context : context + n], n)
            total = (time.perf_counter() - before) * 1e3
            cache.crop(context)
            if best is None or total < best[0]:
                best = total, dict(spent)
        assert best is not None
        total, shares = best
        rest = total - sum(shares.values())
        listed = ", ".join(f"{label} {ms:.1f}" for label, ms in shares.items())
        print(f"  context {context}, n = {n}: {total:.1f} ms: {listed}, Python {rest:.1f} ({rest / total:.1%})")


def linears(widths: list[int], rounds: int) -> None:
    """ms of all linears of a step on random weights of each format and on torch's own, least and median of the rounds."""
    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
    rng = np.random.default_rng(0)
    team = torch_team()

    def weight(form: str, outputs: int, inputs: int) -> np.ndarray:
        if form.startswith("levels"):
            size = 16 if form == "levels8-16" else 32
            numbers = rng.integers(0, 16 if form == "levels4" else 256, (outputs, inputs // size, size))
            steps = rng.standard_normal((outputs, inputs // size, 1)).astype(np.float16).astype(np.float32)
            return np.asarray(numbers * steps - 8 * steps, np.float32).reshape(outputs, inputs)
        dense = rng.standard_normal((outputs, inputs), dtype=np.float32)
        if form == "bfloat16":
            return (dense.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return dense.astype(np.float16).astype(np.float32) if form == "float16" else dense

    ways: dict[str, Any] = {}
    for form in linear.FORMATS:
        of = {shape: weight(form, *shape) for shape in set(shapes)}
        packed = [linear.Linear(of[shape]) for shape in shapes]
        assert all(p.format == form for p in packed)
        ways[form] = packed
        print(f"{form}: {sum(p.nbytes for p in packed) / 1e6:.0f} MB")
    ways["torch"] = [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for n in widths:
            x = {width: rng.standard_normal((n, width), dtype=np.float32) for width in (576, 1536)}
            y = {outputs: np.empty((n, outputs), np.float32) for outputs, _ in shapes}
            for form, held in ways.items():
                for timed in (False, True):  # the first brings caches and threads to where they are in a step
                    before = time.perf_counter()
                    for weights, (outputs, inputs) in zip(held, shapes, strict=True):
                        if form == "torch":
                            torch.nn.functional.linear(torch.from_numpy(x[inputs]), weights)
                        else:
                            weights(x[inputs], y[outputs], team)
                    if timed:
                        taken.setdefault((form, n), []).append((time.perf_counter() - before) * 1e3)
    print("ms: median (least)  " + "".join(f"{f'n={n}':>18}" for n in widths))
    for form in ways:
        cells = (f"{statistics.median(taken[form, n]):.1f} ({min(taken[form, n]):.1f})" for n in widths)
        print(f"{form:20}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--linears", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; at start: {memory_mb()}")
    if options.linears:
        linears(options.widths, options.rounds)
        return
    if options.parts:
        forward = load(options.model, fast=True)
        vocabulary = forward.vocabulary
    else:
        forwards = {"transformers": load(options.model, fast=False), "agentspec": load(options.model, fast=True)}
        vocabulary = forwards["agentspec"].vocabulary
    ids = np.random.default_rng(1).integers(0, vocabulary, max(options.context) + max(options.widths))
    for context in options.context:
        if options.parts:
            parts(forward, ids, context, options.widths, options.rounds)
        else:
            compare(forwards, ids, context, options.widths, options.rounds)


if __name__ == "__main__":
    main()
