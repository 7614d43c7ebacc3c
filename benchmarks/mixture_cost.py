"""What the proposers cost: microseconds a proposal and a token, with much in memory.

    python benchmarks/mixture_cost.py [--own 100000] [--namespace 1000000] [--steps 1000]

Fills a namespace with the outputs of ../shared/traces but for every eighth, and, as those are too few, with what the
trajectories read (made-up text without traces). One trajectory gets a long prompt, and then drafts 16 tokens at every
step of the outputs that were held back. Medians, and the 10th percentile (what a quiet core would give, on a busy
machine). Twice: step upon step, and with the processor's caches emptied before each proposal and before each
learning, as a forward on the same cores empties them. Then what the dearer of the two takes off the speedup at a
step of 6 ms and of 60 ms.

learning: observe and learn, per emitted token. appending: the memory's own append, per emitted token; every proposer
needs it. prompt: extend and begin, per token.
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


def material() -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """Outputs, pieces of what was read (300 tokens each), and a tokenizer (None without traces)."""
    if traces.directory() is None:
        random = np.random.default_rng(0)
        words = [random.zipf(1.3, int(random.integers(3, 12))) % 49_000 for _ in range(4000)]
        picks = random.zipf(1.2, 300_000) % len(words)
        text = np.concatenate([words[k] for k in picks]).astype(np.int32)
        pieces = [text[a : a + 300] for a in range(0, len(text) - 300, 300)]
        return pieces[::2], pieces[1::2], None
    encoder = traces.encoder()
    outputs, read = [], []
    for recordings in traces.load().values():
        for recording in recordings:
            calls = encoder.calls(recording)
            outputs += [call.output for call in calls]
            read.append(calls[-1].prompt)
    text = np.concatenate(read)
    return outputs, [text[a : a + 300] for a in range(0, len(text) - 300, 300)], encoder.tokenizer


def fill(store: MemoryStore, proposer: Any, pieces: list[np.ndarray], tokens: int) -> tuple[int, float]:
    """Other trajectories' outputs into the namespace; tokens, and processor time in us a token."""
    filled = number = 0
    started = time.process_time()
    while filled < tokens:
        output = pieces[number % len(pieces)]
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
    return filled, 1e6 * (time.process_time() - started) / filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=int, default=100_000)
    parser.add_argument("--namespace", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--only", choices=("match", "mixture"))
    args = parser.parse_args()
    outputs, read, tokenizer = material()
    held_back = np.concatenate(outputs[::8])
    # Spread over the families, so that the text drafted is no piece of one of them.
    starts = np.arange(0, len(held_back) - 400, max(1, len(held_back) // 40))
    text = np.concatenate([held_back[start : start + 300] for start in starts])
    pieces = [output for k, output in enumerate(outputs) if k % 8] + read[1::2]
    prompt = np.resize(np.concatenate(read[::2]), args.own).astype(np.int32)
    limits = {
        name: DraftLimits(args.width, args.width, name != "match", np.zeros(args.width + 1))
        for name in ("match", "mixture")
    }
    junk = np.zeros(8 * 2**20)  # 64 MB
    for name in [args.only] if args.only else ["match", "mixture"]:
        proposer = make_proposer(name, tokenizer=tokenizer)
        store = MemoryStore(2 << 30)
        filled, filling = fill(store, proposer, pieces, args.namespace)
        memory = store.open("long", "bench")
        started = time.process_time()
        context = memory.extend(prompt)
        proposer.begin(context)
        beginning = 1e6 * (time.process_time() - started) / args.own
        print(f"{name}: {filled} tokens in the namespace ({filling:.2f} us each, learned and inserted), {args.own} "
              f"in the trajectory's prompt ({beginning:.2f} us each)")  # fmt: skip
        at = 0
        cost = {}
        for cold in (False, True):
            proposals, learning, appending, tokens = [], [], [], 0
            for _ in range(args.steps // 2):
                if at + args.width + 1 > len(text):
                    at = 0
                if cold:
                    junk += 1.0
                started = time.perf_counter()
                draft = proposer.propose(context, limits[name])
                proposals.append(time.perf_counter() - started)
                emitted = text[at : at + accept(draft, text[at : at + args.width]) + 1]
                if cold:
                    junk += 1.0
                started = time.perf_counter()
                memory.append(context, emitted)
                appended = time.perf_counter()
                proposer.observe(context, emitted)
                proposer.learn(context)
                learning.append(time.perf_counter() - appended)
                appending.append(appended - started)
                tokens += len(emitted)
                at += len(emitted)
            p, t, a = (1e6 * np.array(values) for values in (proposals, learning, appending))
            per_step = tokens / len(p)
            cost[cold] = float(np.median(p) + np.median(t))
            print(
                f"  {'caches emptied' if cold else 'step upon step':15} proposal of {args.width}: {np.median(p):6.1f} us "
                f"(p10 {np.percentile(p, 10):.1f}); learning {np.median(t) / per_step:5.2f} us a token "
                f"(p10 {np.percentile(t, 10) / per_step:.2f}); appending {np.median(a) / per_step:.2f}; "
                f"{per_step:.2f} tokens a step"
            )
        worst = max(cost.values())
        print(f"  of a step of 6 ms that is {worst / 60:.2f} %, of 60 ms {worst / 600:.3f} %")


if __name__ == "__main__":
    main()
