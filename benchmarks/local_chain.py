"""LocalEngine against transformers' generate, interleaved: medians, ratios, and whether what was promised holds.

    python -m benchmarks.local_chain                                   # SmolLM2, minutes on two cores
    python -m benchmarks.local_chain --rounds 2 --tokens 48            # a smoke run
    python -m benchmarks.local_chain --prose README.md my-own-text.txt # held-out prose
    python -m benchmarks.local_chain --growth 4096                     # only: what a chain of ten calls prefills

Four ways, in turn, in every round, so that what else the machine does falls on all alike:

    stock      model.generate
    lookup     model.generate(prompt_lookup_num_tokens=10)
    plain      LocalEngine, draft=False
    drafts     LocalEngine

on a text to repeat and then summarise, an original poem, a chain of agent calls (each sees the last one's output and a
new piece of text), and prose named on the command line. stock and lookup start each call from nothing, as generate
does; times are of decoding only (from the first token on), prefill is told apart. All four have to give the same ids
where the stock forward itself decides clearly; the first difference is reported.

ms/token and its ratios count every token after the first. `measured` and `predicted` compare what the clock says of
drafts with tokens per step over mean v(n), both for what came after the first step alone: tokens that the prefill's own
step had drafted cost no time of their own, and would make any measurement look better than any prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentspec.engines.base import GenerationRequest
from agentspec.engines.local import LocalEngine
from agentspec.loop import Trajectory

WAYS = ("stock", "lookup", "plain", "drafts")
TEXT = (
    "The lighthouse at Kerr Point was built in 1871 by two brothers from Leith, who quarried the stone "
    "themselves and carried it up the cliff on a tramway of their own design. For forty years its lamp "
    "burned colza oil; in 1912 it was changed to paraffin, and in 1956 to electricity, when the last "
    "keeper left. The tower is twenty-six metres high and has one hundred and forty-three steps. Its "
    "lens, made in Paris, floats on a bath of mercury and can be turned with one finger. Sailors knew the"
    " light by its pattern: two short flashes, a pause of five seconds, and one long flash. In fog a horn"
    " was sounded every ninety seconds. The keepers grew potatoes and kept a cow on the lee side of the "
    "rock; a boat brought post and flour each fortnight, weather permitting."
    " "
)


@dataclass
class Run:
    """One way's turn at one task: decoding time (s) after the first token, time to it, ids."""

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)

    @property
    def per_token(self) -> list[float]:
        """ms a token after the first, of each call (next to nothing where all came at once)."""
        return [max(1e3 * s, 1e-3) / max(1, len(i) - 1) for s, i in zip(self.seconds, self.ids, strict=True)]

    def decoded(self, calls: int) -> list[tuple[float, int, int, float]]:
        """(s, tokens, steps, sum of v(n)) of each round's `calls` calls, of what came after each call's first step."""
        rounds = []
        for begin in range(0, len(self.stats), calls):
            stats = self.stats[begin : begin + calls]
            rounds.append(
                (
                    sum(self.seconds[begin : begin + calls]),
                    sum(s.output_tokens - s.arrivals[0][1] for s in stats),
                    sum(len(s.drafts) - 1 for s in stats),
                    sum(s.cost_by_width[width] for s in stats for width, _ in s.drafts[1:]),
                )
            )
        return rounds


class Clock:
    """A transformers streamer that notes when the first id came (put is first called with the prompt)."""

    def __init__(self) -> None:
        self.first = 0.0
        self._calls = 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def tasks(engine: LocalEngine, prose: Sequence[Path], tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Name -> calls; a call's messages may hold {last}, what the call before said."""
    words = TEXT * 2
    found: dict[str, list[dict[str, Any]]] = {
        "repeat": [{"content": f"Repeat this text word for word:\n\n{words}", "tokens": 2 * tokens}],
        "summarise": [{"content": f"{words}\n\nSummarise this text in three sentences.", "tokens": tokens}],
        "poem": [{"content": "Write an original poem about the sea.", "tokens": tokens}],
        "chain": [
            {"content": f"Quote the first sentence of this text:\n\n{TEXT}", "tokens": tokens // 2},
            {"content": "Quote the sentence that says how high the tower is.", "tokens": tokens // 2},
            {"content": "Now quote the sentences about the keepers, word for word.", "tokens": tokens // 2},
            {"content": "Repeat all that you have quoted so far.", "tokens": tokens},
        ],
    }
    for path in prose:
        text = path.read_text(encoding="utf-8", errors="replace")[:3000]
        found[path.name] = [{"content": f"Continue this text:\n\n{text}", "tokens": tokens}]
    return found


def generate(
    engine: LocalEngine, model: Any, prompt: list[int], tokens: int, lookup: bool
) -> tuple[list[int], float, float]:
    """(ids, s to the first token, s after it) of transformers' generate, greedy."""
    clock = Clock()
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if lookup else {"streamer": clock}
    ids = torch.tensor([prompt])
    started = time.perf_counter()
    with torch.inference_mode():
        if lookup:
            # no streamer here: the first token is timed by a call of its own
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            clock.first = time.perf_counter()
            whole = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            eos_token_id=sorted(engine.eos_ids), pad_token_id=min(engine.eos_ids), **options,
        )  # fmt: skip
    ended = time.perf_counter()
    first = clock.first - started
    after = ended - whole - first if lookup else ended - clock.first
    return out[0, len(prompt) :].tolist(), first, max(after, 1e-9)


def one_round(
    engine: LocalEngine, model: Any, calls: list[dict[str, Any]], runs: dict[str, Run], order: Sequence[str]
) -> None:
    """Every way once through the calls; all are given the prompts that `plain` had, so that work is the same."""
    trajectories = {way: Trajectory() for way in ("plain", "drafts")}
    messages: list[dict[str, str]] = []
    for call in calls:
        messages.append({"role": "user", "content": call["content"]})
        rendered = engine.template.render(messages, history=engine.history(trajectories["plain"]))
        prompt = list(rendered.input_ids)
        said = ""
        for way in order:
            if way in trajectories:
                request = GenerationRequest(
                    input_ids=prompt, spans=rendered.spans, max_tokens=call["tokens"], draft=way == "drafts",
                    trajectory=trajectories[way],
                )  # fmt: skip
                result = engine.generate(request).result()
                stats = result.stats
                runs[way].stats.append(stats)
                runs[way].ids.append(list(result.token_ids))
                runs[way].first.append(stats.arrivals[0][0] / 1e3)
                # tokens that came with the first arrival took no time after it; they count, as for generate
                runs[way].seconds.append((stats.arrivals[-1][0] - stats.arrivals[0][0]) / 1e3)
                if way == "plain":
                    said = result.text
            else:
                ids, first, after = generate(engine, model, prompt, call["tokens"], way == "lookup")
                runs[way].ids.append(ids)
                runs[way].first.append(first)
                runs[way].seconds.append(after)
        messages.append({"role": "assistant", "content": said})
    for trajectory in trajectories.values():
        engine.forget(trajectory)


def speedups(runs: dict[str, Run], calls: int) -> tuple[float, float]:
    """(measured, predicted) speedup of drafts over plain, after the first step of each call; the rounds' median."""
    found = []
    for (plain_s, plain_tokens, *_), (s, tokens, steps, cost) in zip(
        runs["plain"].decoded(calls), runs["drafts"].decoded(calls), strict=True
    ):
        if tokens:  # else all came with the prefill
            found.append(((plain_s / plain_tokens) / (s / tokens), tokens / cost if steps else 1.0))
    if not found:
        return float("nan"), float("nan")
    return statistics.median(m for m, _ in found), statistics.median(p for _, p in found)


def growth(engine: LocalEngine, tokens: int) -> dict[str, Any]:
    """Ten calls that grow to `tokens` of context; prefilled tokens against those that no call had computed before.

    New to a call is what its prompt adds to the last call's prompt and output, and the output's last token: it was
    chosen, but never an input.
    """
    trajectory = Trajectory()
    messages: list[dict[str, str]] = []
    known: list[int] = []
    prefilled = new = diverged = 0
    piece = engine.tokenizer.encode(TEXT * 40)[: tokens // 10 - 52]
    for number in range(10):
        text = engine.tokenizer.decode(piece[number:])
        messages.append({"role": "user", "content": f"Part {number}:\n\n{text}\n\nName one fact of it."})
        rendered = engine.template.render(messages, history=engine.history(trajectory))
        prompt = list(rendered.input_ids)
        same = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
        request = GenerationRequest(input_ids=prompt, spans=rendered.spans, max_tokens=32, trajectory=trajectory)
        result = engine.generate(request).result()
        prefilled += result.stats.prompt_tokens - result.stats.reused_tokens
        new += len(prompt) - min(same, max(len(known) - 1, 0))
        diverged += len(known) - same
        known = prompt + list(result.token_ids)
        messages.append({"role": "assistant", "content": result.text})
    engine.forget(trajectory)
    return {"context": len(known), "prefilled": prefilled, "new": new, "no_longer_in_the_prompt": diverged}


def report(name: str, runs: dict[str, Run], calls: int) -> dict[str, Any]:
    """A task's medians, ratios and checks."""
    measured, predicted = speedups(runs, calls)
    medians = {way: statistics.median(run.per_token) for way, run in runs.items()}
    # ratios call by call, then their middle: what slows one round slows both sides of it
    ratios = {
        way: statistics.median(a / b for a, b in zip(runs[base].per_token, runs[way].per_token, strict=True))
        for way, base in (("plain", "stock"), ("drafts", "plain"), ("lookup", "stock"))
    }
    drafted = runs["drafts"].stats
    tokens = sum(s.output_tokens for s in drafted)
    steps = sum(s.verify_steps for s in drafted)
    cost = sum(s.mean_cost * s.verify_steps for s in drafted) / steps
    wall = sum(s.duration_ms - s.queue_ms for s in drafted)
    outside = sum(s.duration_ms - s.queue_ms - s.forward_ms for s in drafted)
    differing = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in zip(runs["stock"].ids, runs["plain"].ids, strict=True)
        if a != b
    ]
    return {
        "task": name,
        "ms_per_token": medians,
        "plain_over_stock": ratios["plain"],
        "drafts_over_plain": ratios["drafts"],
        "lookup_over_stock": ratios["lookup"],
        "drafts_over_stock": statistics.median(
            a / b for a, b in zip(runs["stock"].per_token, runs["drafts"].per_token, strict=True)
        ),
        "tokens_per_step": tokens / steps,
        "mean_v": cost,
        "measured": measured,
        "predicted": predicted,
        "outside_the_forward": outside / wall,
        "same_ids": runs["drafts"].ids == runs["plain"].ids,
        "calls_differing_from_stock": len(differing),
        "first_differences": differing[:4],
        "near_ties": sum(s.near_ties for s in drafted),
        "ttft_ms": {way: 1e3 * statistics.median(run.first) for way, run in runs.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--tasks", default="", help="only these, separated by commas")
    parser.add_argument("--prose", nargs="*", type=Path, default=[], help="files that nobody tuned on")
    parser.add_argument("--growth", type=int, help="only this: ten calls that grow to so many tokens, at least 1000")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    from agentspec.engines import models

    if options.growth is not None:
        if options.growth < 1000:
            parser.error(f"--growth: needed at least 1000 tokens, got {options.growth}")
        with LocalEngine(options.model) as engine:
            row = growth(engine, options.growth)
        print("ten calls:", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()))
        return 0 if row["prefilled"] == row["new"] else 1
    stock = models.load(options.model, device="cpu", dtype=torch.float32).model
    engine = LocalEngine(options.model)
    print(f"forward: {engine.forward.description}")
    print(
        "v(n):",
        {n: round(v, 2) for n, v in engine.cost_curve.points.items()},
        "threads:",
        torch.get_num_threads(),
    )
    rows = []
    with engine:
        for name, calls in tasks(engine, options.prose, options.tokens).items():
            if options.tasks and name not in options.tasks.split(","):
                continue
            runs = {way: Run() for way in WAYS}
            for number in range(options.rounds):
                order = WAYS[number % 4 :] + WAYS[: number % 4]
                one_round(engine, stock, calls, runs, order)
                print(f"\r{name}: round {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            row = report(name, runs, len(calls))
            rows.append(row)
            print(
                f"{name:12} ms/token "
                + " ".join(f"{way} {row['ms_per_token'][way]:.1f}" for way in WAYS)
                + f"  plain/stock {row['plain_over_stock']:.2f}  drafts/plain {row['drafts_over_plain']:.2f} "
                f"(after the first step: measured {row['measured']:.2f}, predicted {row['predicted']:.2f}; in all "
                f"{row['tokens_per_step']:.2f} tokens a step at v {row['mean_v']:.2f})"
                f"  lookup/stock {row['lookup_over_stock']:.2f}  drafts/stock {row['drafts_over_stock']:.2f}"
                f"  outside {row['outside_the_forward']:.1%}  same ids {row['same_ids']}"
                f"  near-ties {row['near_ties']}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if all(row["same_ids"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
