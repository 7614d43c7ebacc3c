"""What the proposers cost: microseconds a proposal and a token, with much in memory.

    python benchmarks/mixture_cost.py [--own 100000] [--namespace 1000000] [--steps 400]

Fills a namespace with the outputs of ../shared/traces (repeated until there are enough; made-up text without
traces), one trajectory with a long prompt, and then drafts 16 tokens at every step of recorded outputs. Medians, and
the 10th percentile (what a quiet core would give, on a busy machine). Then what that cost takes off the speedup at a
step of 6 ms and of 60 ms.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from agentspec.drafting import DraftLimits, make_proposer
from agentspec.memory import MemoryStore
from agentspec.testing import accept
from benchmarks import traces


def material(tokens: int) -> tuple[list[np.ndarray], np.ndarray, Any]:
    """Outputs, a long prompt's tokens, and a tokenizer (None without traces)."""
    if traces.directory() is None:
        random = np.random.default_rng(0)
        words = [random.zipf(1.3, int(random.integers(3, 12))) % 49_000 for _ in range(4000)]
        picks = random.zipf(1.2, 60_000) % len(words)
        text = np.concatenate([words[k] for k in picks]).astype(np.int32)
        return [text[a : a + 300] for a in range(0, len(text) - 300, 300)], text, None
    encoder = traces.encoder()
    recordings = traces.load(("tau", "sql", "bash", "qa"))
    calls = [call for family in recordings.values() for r in family for call in encoder.calls(r)]
    prompts = [call.prompt for call in calls[::12]]
    return [call.output for call in calls], np.concatenate(prompts)[: max(tokens, 1)], encoder.tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=int, default=100_000)
    parser.add_argument("--namespace", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()
    outputs, long_prompt, tokenizer = material(args.own)
    for name in ("match", "mixture"):
        proposer = make_proposer(name, tokenizer=tokenizer)
        store = MemoryStore(2 << 30)
        filled, number = 0, 0
        started = time.process_time()
        while filled < args.namespace:
            output = outputs[number % len(outputs)]
            memory = store.open(f"t{number}", "bench")
            context = memory.extend(np.array([1, 2, 3 + number % 1000], np.int32))
            proposer.begin(context)
            memory.append(context, output)
            proposer.observe(context, output)
            proposer.learn(context)
            proposer.end(context)
            memory.close(context)
            store.forget(f"t{number}", "bench")
            filled += len(output)
            number += 1
        filling = 1e6 * (time.process_time() - started) / filled
        memory = store.open("long", "bench")
        prompt = np.resize(long_prompt, args.own).astype(np.int32)
        context = memory.extend(prompt)
        started = time.process_time()
        proposer.begin(context)
        beginning = 1e6 * (time.process_time() - started) / args.own
        limits = DraftLimits(args.width, args.width, name != "match", np.zeros(args.width + 1))
        proposals, learning = [], []
        tokens = 0
        text = np.concatenate(outputs)
        at = 0
        for _ in range(args.steps):
            started = time.perf_counter()
            draft = proposer.propose(context, limits)
            proposals.append(time.perf_counter() - started)
            emitted = text[at : at + accept(draft, text[at : at + args.width]) + 1]
            memory.append(context, emitted)
            started = time.perf_counter()
            proposer.observe(context, emitted)
            proposer.learn(context)
            learning.append((time.perf_counter() - started) / len(emitted))
            tokens += len(emitted)
            at += len(emitted)
        p, t = 1e6 * np.array(proposals), 1e6 * np.array(learning)
        per_step = float(np.median(p)) + float(np.median(t)) * tokens / args.steps
        print(
            f"{name:8} proposal of {args.width}: {np.median(p):6.1f} us (p10 "
            f"{np.percentile(p, 10):.1f}); learning and insertion {np.median(t):5.2f} us a token (p10 "
            f"{np.percentile(t, 10):.2f}); a prompt {beginning:.2f} us a token; filling, all told, {filling:.2f} us a token (CPU)\n"
            f"{'':8} of a step of 6 ms that is {per_step / 60:.2f} %, of 60 ms {per_step / 600:.3f} %"
        )


if __name__ == "__main__":
    main()
