"""What the trajectory memory costs, beside SGLang's NgramCorpus and Arctic's suffix tree where they can be
imported.

    python benchmarks/memory.py speed      match, append and bytes a token, on text and on degenerate input
    python benchmarks/memory.py bytes      the most bytes a token at any size, in messages of 200 tokens
    python benchmarks/memory.py accounts   bytes counted against bytes that the process holds, stores of all shapes
    python benchmarks/memory.py startup    compiling the kernels once, loading them afterwards
    python benchmarks/memory.py soak       10 million tokens through a store of 128 MiB
    python benchmarks/memory.py orders     which context lengths' copies come true, on recorded trajectories
    python benchmarks/memory.py            all but the last

--json prints one object; --quick takes a tenth of everything; --traces DIR and --tokenizer DIR are for
`orders`. The peers are measured where they can be imported: SGLang in its own environment (without a GPU
with PYTHONPATH=tests/sglang/rig SGLANG_USE_CPU_ENGINE=1), Arctic's tree as benchmarks/peers.py says. Times are
of a busy or a quiet machine as it comes: bulk work in processor time, single calls as the median of many.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WIDEST = 16


# ---- input -------------------------------------------------------------------------------------------


def text(length: int, seed: int = 0) -> np.ndarray:
    """Words of a Zipf distribution, three in five of them in phrases copied from earlier: like an agent's
    text.
    """
    random = np.random.default_rng(seed)
    words = (random.zipf(1.3, length) % 49_152).astype(np.int32)
    at = 0
    while at < length:
        size = min(int(random.integers(5, 60)), length - at)
        if at > 1000 and random.random() < 0.6:
            start = int(random.integers(0, at - size))
            words[at : at + size] = words[start : start + size]
        at += size
    return words


def fibonacci(length: int) -> np.ndarray:
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return np.array(b[:length], np.int32)


def inputs(quick: bool) -> dict[str, np.ndarray]:
    million = 100_000 if quick else 1_000_000
    return {
        "text, 100k": text(100_000),
        "text, 1M": text(million),
        "1M equal": np.zeros(million, np.int32),
        "1M period 2": (np.arange(million) % 2).astype(np.int32),
        "128k distinct": np.random.default_rng(1).permutation(128_000).astype(np.int32),
        "1M Fibonacci": fibonacci(million),
        "1M random": np.random.default_rng(2).integers(0, 50_000, million).astype(np.int32),
    }


# ---- subjects: each is fed a text and then follows a continuation, token by token ------------------------


def timed(into: list[float], step: Callable[..., Any], *arguments: Any) -> Any:
    started = time.perf_counter()
    result = step(*arguments)
    into.append((time.perf_counter() - started) * 1e6)
    return result


def ours(tokens: np.ndarray, follow: np.ndarray) -> dict[str, float]:
    from agentspec.memory import TrajectoryMemory

    memory = TrajectoryMemory()
    started = time.process_time()
    context = memory.extend(tokens)
    fed = (time.process_time() - started) / len(tokens) * 1e6
    memory.close(context)
    per_token = memory.nbytes / len(tokens)
    matches: list[float] = []
    drafts: list[float] = []
    singles: list[float] = []
    fours: list[float] = []
    context = memory.extend(tokens[:1000])
    for i in range(0, len(follow) - 4, 5):
        found = timed(matches, memory.match, context)
        if len(found):
            timed(drafts, found.copy, 0, WIDEST)
        timed(singles, memory.append, context, follow[i : i + 1])
        timed(fours, memory.append, context, follow[i + 1 : i + 5])
    memory.close(context)
    context = memory.extend(tokens[:1000])
    started = time.process_time()
    memory.append(context, tokens)
    appended = (time.process_time() - started) / len(tokens) * 1e6
    return {
        "prompt_us_per_token": fed,
        "append_us_per_token": appended,
        "append_1_us": statistics.median(singles),
        "append_4_us": statistics.median(fours),
        "match_us": statistics.median(matches),
        "match_p99_us": sorted(matches)[len(matches) * 99 // 100],
        "copy_us": statistics.median(drafts) if drafts else 0.0,
        "bytes_per_token": per_token,
    }


def sglang(tokens: np.ndarray, follow: np.ndarray) -> dict[str, float]:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    before = resident()
    corpus = NgramCorpus(max_trie_depth=18, max_bfs_breadth=10, draft_token_num=WIDEST + 1, capacity=10_000_000)
    allocated = resident() - before
    listed = tokens.tolist()
    started = time.process_time()
    corpus.batch_put([listed])
    corpus.synchronize()
    fed = (time.process_time() - started) / len(tokens) * 1e6
    history = listed[:1000]
    matches: list[float] = []
    singles: list[float] = []
    for token in follow.tolist():
        timed(matches, corpus.batch_get, ["r"], [history[-18:]], [len(history)])
        history.append(token)
        timed(singles, corpus.batch_put, [history[-18:]])
        corpus.synchronize()
    return {
        "prompt_us_per_token": fed,
        "append_1_us": statistics.median(singles),
        "match_us": statistics.median(matches),
        "match_p99_us": sorted(matches)[len(matches) * 99 // 100],
        "allocated_mb": allocated / 1e6,
    }


def arctic(tokens: np.ndarray, follow: np.ndarray) -> dict[str, float]:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    gc.collect()
    before = resident()
    cache = SuffixDecodingCache(max_tree_depth=64)
    started = time.process_time()
    cache.start_request("r", tokens)
    fed = (time.process_time() - started) / len(tokens) * 1e6
    per_token = (resident() - before) / len(tokens)
    history = tokens[:1000].tolist()
    matches: list[float] = []
    singles: list[float] = []
    for token in follow.tolist():
        tail = np.array(history[-64:], np.int32)
        timed(matches, cache.speculate, "r", tail, WIDEST)
        history.append(token)
        timed(singles, cache.add_active_response, "r", [token])
    return {
        "prompt_us_per_token": fed,
        "append_1_us": statistics.median(singles),
        "match_us": statistics.median(matches),
        "match_p99_us": sorted(matches)[len(matches) * 99 // 100],
        "bytes_per_token": per_token,
    }


def resident() -> int:
    """Bytes of physical memory of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


# ---- measurements ------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"agentspec": {}}
    ours(text(5000), text(2000))  # the kernels are ready, the caches warm
    cases = inputs(options.quick)
    for name, tokens in cases.items():
        start = min(1000, len(tokens) // 2)
        follow = tokens[start : start + (2000 if options.quick else 10_000)]
        result["agentspec"][name] = ours(tokens, follow)
    for name, subject in (("sglang NgramCorpus", sglang), ("arctic suffix tree", arctic)):
        # Each in a new process: what it holds is told by how the process grows.
        rows = {}
        for case in ("text, 100k", "128k distinct"):
            code = f"""
import json
from benchmarks.memory import inputs, {subject.__name__}
tokens = inputs(True)[{case!r}]
try: print(json.dumps({subject.__name__}(tokens, tokens[1000:{1500 if options.quick else 4000}])))
except ImportError as error: print(json.dumps(str(error)))
"""
            rows[case] = json.loads(child(code).splitlines()[-1])
        result[name] = rows
    return result


def most_bytes(options: argparse.Namespace) -> dict[str, Any]:
    """Arrays grow in steps: the most bytes a token while a memory grows from 20,000 tokens on."""
    from agentspec.memory import TrajectoryMemory

    length = 50_000 if options.quick else 400_000
    random = np.random.default_rng(0)
    cases = {"text": text(length), "distinct": random.permutation(length).astype(np.int32)}
    for vocabulary in (200, 20_000, 50_000):
        cases[f"random of {vocabulary}"] = random.integers(0, vocabulary, length).astype(np.int32)
    most = {}
    for name, tokens in cases.items():
        memory, most[name] = TrajectoryMemory(), 0.0
        for at in range(0, length, 200):
            memory.seed(tokens[at : at + 200])
            if len(memory) >= 20_000:
                most[name] = max(most[name], memory.nbytes / len(memory))
    return most


SHAPES = ("agents", "small", "short messages", "one large", "open calls", "turned over")


def accounts(options: argparse.Namespace) -> dict[str, Any]:
    """Fill a store in a new process and compare what it counts with what the process holds, for each of SHAPES."""
    code = """
import gc, json
import psutil
from benchmarks.memory import fill, text
from agentspec.memory import MemoryStore, TrajectoryMemory
process = psutil.Process()
TrajectoryMemory().extend([1, 2])
source = text(400_000)
gc.collect(); before = process.memory_info().rss
store = MemoryStore({budget})
kept = fill(store, {shape!r}, source)
gc.collect()
held = process.memory_info().rss - before
counted = store.nbytes
tokens = sum(len(m) for m in store._memories.values())
print(json.dumps(dict(trajectories=len(store), tokens=tokens, counted=counted, resident=held,
                      ratio=counted / held, bytes_per_token=counted / tokens)))
"""
    budget = 2**24 if options.quick else 2**26
    return {shape: json.loads(child(code.format(budget=budget, shape=shape))) for shape in SHAPES}


def fill(store: Any, shape: str, source: np.ndarray) -> list[Any]:
    """Fill a store to its budget by one of SHAPES. Returns the open calls."""
    from agentspec.memory import Span

    random = np.random.default_rng(0)
    opened = []
    number = 0
    while store.evictions < (store.budget_bytes // 2**17 if shape == "turned over" else 1):
        memory = store.open(f"run {number}", ("agent", "other", None)[number % 3])
        number += 1
        at = int(random.integers(0, 300_000))
        if shape == "agents":
            prompt: list[int] = []
            spans: list[Span] = []
            for _ in range(int(random.integers(3, 25))):
                at = int(random.integers(0, 390_000))
                new = source[at : at + int(random.integers(20, 800))].tolist()
                spans.append(Span(len(prompt), len(prompt) + len(new), role="user"))
                prompt += new
                context = memory.extend(prompt, spans)
                memory.append(context, source[at + 900 : at + 960])
                memory.close(context)
                prompt += context.output.tolist()
        elif shape == "small":
            memory.close(memory.extend(source[at : at + 100]))
        elif shape == "short messages":
            memory.close(memory.extend(source[at : at + 3000], [Span(n, n + 5) for n in range(0, 3000, 5)]))
        elif shape == "one large":
            memory.seed(random.integers(0, 50_000, store.trajectory_tokens // 2))
            break
        elif shape == "open calls":
            context = memory.extend(source[at : at + 10_000])
            for step in range(0, 2000, 4):
                memory.append(context, source[at + step : at + step + 4])
            opened.append(context)
            if store.nbytes > store.budget_bytes * 3 // 4:
                break
        else:
            memory.close(memory.extend(source[at : at + int(random.choice([200, 2000, 20_000, 60_000]))]))
    return opened


def startup(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from `import agentspec.memory` to the first match, kernels compiled and kernels loaded; and the same
    with every kernel there is.
    """
    code = """
import json, time
import numba, numpy
{first}
a, p = time.perf_counter(), time.process_time()
{imports}
from agentspec.memory import TrajectoryMemory
from agentspec.memory.kernels import kernel_report
m = TrajectoryMemory(); m.match(m.extend([1, 2, 1]))
report = kernel_report()
report.update(seconds=time.perf_counter() - a, processor_seconds=time.process_time() - p)
print(json.dumps(report))
"""
    everything = "import agentspec.drafting.acceptance, agentspec.drafting.mixing, agentspec.engines.kernels"
    result = {}
    for name, first, imports in (("memory", "", ""), ("everything", "import torch", everything)):
        with tempfile.TemporaryDirectory() as directory:
            whole = code.format(first=first, imports=imports)
            compiled = json.loads(child(whole, NUMBA_CACHE_DIR=directory))
            later = [json.loads(child(whole, NUMBA_CACHE_DIR=directory)) for _ in range(3)]
        result[name] = {
            "compile_s": compiled["seconds"],
            "compile_processor_s": compiled["processor_seconds"],
            "load_s": min(run["seconds"] for run in later),
            "load_processor_s": min(run["processor_seconds"] for run in later),
            "kernels": float(compiled["kernels"]),
            "loaded_from_cache": float(later[0]["from_cache"]),
        }
    return result


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens without end through one budget; every trajectory's chain is laid, matched and closed."""
    from agentspec.memory import MemoryStore

    total = 1_000_000 if options.quick else 10_000_000
    store = MemoryStore(2**27)
    source = text(400_000)
    random = np.random.default_rng(0)
    most = 0
    done = 0
    number = 0
    gc.collect()
    before = resident()
    started = time.process_time()
    while done < total:
        memory = store.open(f"run {number}", f"agent {number % 5}")
        number += 1
        prompt: np.ndarray = np.empty(0, np.int32)
        for _ in range(8):
            at = int(random.integers(0, 380_000))
            new = source[at : at + int(random.integers(100, 4000))]
            prompt = np.concatenate([prompt, new])
            context = memory.extend(prompt)
            for step in range(0, 200, 4):
                memory.match(context)
                memory.append(context, source[at + step : at + step + 4])
            memory.close(context)
            prompt = context.tokens.copy()
            done += len(new) + 200
        most = max(most, store.nbytes)
    return {
        "tokens": done,
        "us_per_token": (time.process_time() - started) / done * 1e6,
        "budget": store.budget_bytes,
        "most_counted": most,
        "resident_growth": resident() - before,
        "evictions": store.evictions,
        "trajectories": number,
        "held": len(store),
    }


def orders(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a step if the best match is copied, 16 at most, and if the best of the first four is (an
    oracle).
    """
    from agentspec.memory import MemoryStore
    from agentspec.memory.index import ORDERS
    from agentspec.recordings import read
    from agentspec.replay import Encoder, load_tokenizer

    encoder = Encoder(load_tokenizer(options.tokenizer))
    most = 5 if options.quick else 25
    families = {
        file.name: [encoder.calls(recording) for recording in read(file)[:most]]
        for file in sorted(options.traces.glob("*.jsonl"))
    }
    if not families:
        raise SystemExit(f"no recorded trajectories (*.jsonl) in {options.traces}: name a directory with --traces")
    rows: dict[str, Any] = {}
    for max_match, recent in ((32, 4), (16, 4), (8, 4), (16, 8)):
        chain: list[float] = []
        best_of_four: list[float] = []
        for trajectories in families.values():
            store = MemoryStore(2**30)
            steps = emitted = oracle = 0
            for number, calls in enumerate(trajectories):
                memory = store.open(str(number), "family")
                for call in calls:
                    output = call.output
                    context = memory.extend(call.prompt, call.spans)
                    at = 0
                    while at < len(output):
                        matches = memory.match(context, 1, max_match, recent)
                        right = [common(matches.copy(i, WIDEST)[0], output[at:]) for i in range(min(4, len(matches)))]
                        taken = min((right[0] if right else 0) + 1, len(output) - at)
                        oracle += min(max(right, default=0) + 1, len(output) - at)
                        memory.append(context, output[at : at + taken])
                        at += taken
                        steps += 1
                        emitted += taken
                    memory.close(context)
            chain.append(emitted / steps)
            best_of_four.append(oracle / steps)
        rows[f"max_match {max_match}, recent {recent}"] = {
            "chain_macro": statistics.mean(chain),
            "best_of_4_macro": statistics.mean(best_of_four),
        }
    return {"orders": list(ORDERS), **rows}


def common(left: np.ndarray, right: np.ndarray) -> int:
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0]) if len(differ) else n


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "AGENTSPEC_QUIET": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


MEASUREMENTS = {
    "speed": speed,
    "bytes": most_bytes,
    "accounts": accounts,
    "startup": startup,
    "soak": soak,
    "orders": orders,
}


def show(name: str, result: dict[str, Any], indent: str = "") -> None:
    print(f"{indent}{name}")
    for key, value in result.items():
        if isinstance(value, dict) and value and all(isinstance(v, float) for v in value.values()):
            print(f"{indent}  {key:16s}" + "  ".join(f"{k} {v:.2f}" for k, v in value.items()))
        elif isinstance(value, dict):
            show(key, value, indent + "  ")
        else:
            print(f"{indent}  {key}: {value:.3f}" if isinstance(value, float) else f"{indent}  {key}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *MEASUREMENTS], default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    parser.add_argument("--tokenizer", default="smollm2", help="a model that agentspec finds")
    options = parser.parse_args()
    results = {}
    for name in options.what or [name for name in MEASUREMENTS if name != "orders"]:
        results[name] = MEASUREMENTS[name](options)
        if not options.json:
            show(name, results[name])
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
