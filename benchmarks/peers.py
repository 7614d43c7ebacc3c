"""Draft-free proposers side by side: ours and the real peers, on the same tokens, in the same run.

    python tests/sglang/setup_venv.py                # once, for SGLang's row
    PYTHONPATH=tests/sglang/rig:. SGLANG_USE_CPU_ENGINE=1 \\
        $AGENTSPEC_SGLANG_VENV/bin/python benchmarks/peers.py [--limit N] [--widths 4,8,16] [--only NAME,...]

Teacher-forced over ../shared/traces (benchmarks/traces.py), greedy acceptance, one memory a family,
trajectories
in file order. Tokens per verify step, bonus included, all steps counted; macro is the mean over the families; each
peer at its best width on two cost curves. A peer that can't be imported is named, with how to get it:

us/prop: median of a proposal; us/out: all other time (prompts and outputs taken in), mean per output token, so
wall-clock noise and first use are in it; benchmarks/mixture_cost.py measures ours apart. B/token: bytes held per token
held, at the end of the family that holds most, by the peer's own account; SGLang's by how much the process grew.

    sglang      the wheel 0.5.23: NgramCorpus as NGRAMWorker drives it (as shipped: outputs only; and with the
                prompt inserted). Its N counts the root, so N = 17 for 16 drafted tokens
    hf          transformers' PromptLookupCandidateGenerator, 3-grams
    arctic      arctic-inference 0.3.0's SuffixDecodingCache. Its wheel wants vLLM and CUDA; the part that is needed
                here builds from the sdist alone, with cmake, ninja and a C++20 compiler:
                    pip download --no-deps --no-binary :all: arctic-inference==0.3.0; tar xzf arctic_inference-*.gz
                    pip install nanobind
                    cmake -S arctic_inference-0.3.0/csrc/suffix_decoding -B build -GNinja && ninja -C build
                    mkdir -p DIR/arctic_inference; cd arctic_inference-0.3.0/arctic_inference
                    cp -r __init__.py suffix_decoding DIR/arctic_inference; cd -
                    cp build/_C*.so DIR/arctic_inference/suffix_decoding
                and then DIR in PYTHONPATH, with the same Python
    vllm        its n-gram semantics (3 to 8 tokens, earliest match, k tokens), written down here
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agentspec.drafting import DraftLimits, make_proposer
from agentspec.memory import MemoryStore
from agentspec.replay import CURVES
from benchmarks import traces

Tree = tuple[list[int], list[int]]  # tokens, parents


class Ours:
    """A proposer of agentspec at a fixed width."""

    def __init__(self, name: str, width: int, tokenizer: Any, shared: bool) -> None:
        self.proposer = make_proposer(name, tokenizer=tokenizer)
        self.store = MemoryStore()
        self.shared = shared
        self.limits = DraftLimits(width, width, name != "match", np.zeros(width + 1))
        self.memory: Any = None
        self.context: Any = None
        self.tokens = 0

    def trajectory(self, name: str) -> None:
        self.memory = self.store.open(name, "family" if self.shared else None)

    def call(self, call: Any) -> None:
        self.context = self.memory.extend(call.prompt, call.spans)
        self.proposer.begin(self.context)
        self.tokens += sum(segment.end - segment.start for segment in self.context.added)

    def propose(self, tokens: np.ndarray) -> Tree:
        draft = self.proposer.propose(self.context, self.limits)
        return draft.tokens.tolist(), draft.parents.tolist()

    def emitted(self, tokens: np.ndarray, new: np.ndarray) -> None:
        self.memory.append(self.context, new)
        self.proposer.observe(self.context, new)
        self.proposer.learn(self.context)
        self.tokens += len(new)

    def end(self) -> None:
        self.proposer.end(self.context)
        self.memory.close(self.context)

    def held(self) -> tuple[int, int]:
        return self.store.nbytes, self.tokens


class SGLang:
    """NgramCorpus, driven as NGRAMWorker drives it."""

    def __init__(self, width: int, prompt: bool) -> None:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        self.before = _resident()
        self.tokens = 0
        self.depth = 18
        self.width = width
        self.prompt = prompt
        self.corpus = NgramCorpus(
            max_trie_depth=self.depth, min_bfs_breadth=1, max_bfs_breadth=10, draft_token_num=width + 1,
            match_type="BFS", capacity=10_000_000,
        )  # fmt: skip
        self.calls = 0

    def trajectory(self, name: str) -> None:
        self.known = 0

    def call(self, call: Any) -> None:
        self.calls += 1
        if self.prompt:
            ids = call.prompt.tolist()
            self.corpus.batch_put([ids[max(0, self.known - self.depth) :]])
            self.tokens += len(ids) - self.known
            self.known = len(ids)

    def propose(self, tokens: np.ndarray) -> Tree:
        self.corpus.synchronize()
        tail = tokens[-self.depth :].tolist()
        ids, mask = self.corpus.batch_get([str(self.calls)], [tail], [len(tokens)])
        n = self.width + 1
        lines = np.asarray(mask).reshape(n, n).astype(bool)
        np.fill_diagonal(lines, False)
        # A row's parent is its last ancestor; the root is node 0, -1 for us. Rows without it are padding.
        last = n - 1 - lines[:, ::-1].argmax(axis=1)
        parents = [int(last[k]) - 1 if lines[k].any() else -2 for k in range(1, n)]
        return np.asarray(ids)[1:].tolist(), parents

    def emitted(self, tokens: np.ndarray, new: np.ndarray) -> None:
        # NGRAMWorker inserts the last max_trie_depth tokens after each step.
        self.corpus.batch_put([tokens[-max(self.depth, len(new)) :].tolist()])
        self.tokens += len(new)

    def end(self) -> None:
        self.corpus.erase_match_state([str(self.calls)])

    def held(self) -> tuple[int, int]:
        self.corpus.synchronize()
        return _resident() - self.before, self.tokens


class HuggingFace:
    """transformers' prompt lookup: a chain from the first match of the longest n-gram in the own context."""

    def __init__(self, width: int) -> None:
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self.torch = torch
        self.generator = PromptLookupCandidateGenerator(
            num_output_tokens=width, max_matching_ngram_size=3, max_length=1 << 20
        )

    def trajectory(self, name: str) -> None: ...

    def call(self, call: Any) -> None: ...

    def propose(self, tokens: np.ndarray) -> Tree:
        ids = self.torch.from_numpy(tokens.astype(np.int64))[None]
        found = self.generator.get_candidates(ids)[0][0, len(tokens) :].tolist()
        return found, list(range(-1, len(found) - 1))

    def emitted(self, tokens: np.ndarray, new: np.ndarray) -> None: ...

    def end(self) -> None: ...


class VLLM:
    """vLLM's n-gram proposer: the longest of 3 to 8 last tokens that occurs earlier, there the earliest
    place."""

    def __init__(self, width: int, shortest: int = 3, longest: int = 8) -> None:
        self.width, self.shortest, self.longest = width, shortest, longest
        self.places: dict[tuple[int, ...], int] = {}
        self.at = 0

    def trajectory(self, name: str) -> None: ...

    def call(self, call: Any) -> None:
        self.places = {}
        self.at = 0

    def propose(self, tokens: np.ndarray) -> Tree:
        size = len(tokens)
        listed = tokens.tolist()
        for end in range(self.at, size):  # n-grams that are followed by a token
            for n in range(self.shortest, self.longest + 1):
                if end >= n:
                    self.places.setdefault(tuple(listed[end - n : end]), end)
        self.at = size
        for n in range(self.longest, self.shortest - 1, -1):
            place = self.places.get(tuple(listed[size - n : size]))
            if place is not None:
                found = listed[place : place + self.width]
                return found, list(range(-1, len(found) - 1))
        return [], []

    def emitted(self, tokens: np.ndarray, new: np.ndarray) -> None: ...

    def end(self) -> None: ...


class Arctic:
    """SuffixDecodingCache: local and global suffix trees, tree drafts."""

    def __init__(self, width: int, factor: float, minimum: float, tree: bool) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=64)
        self.options = {
            "max_spec_tokens": width,
            "max_spec_factor": factor,
            "min_token_prob": minimum,
            "use_tree_spec": tree,
        }
        self.calls = self.tokens = 0

    def trajectory(self, name: str) -> None: ...

    def call(self, call: Any) -> None:
        self.calls += 1
        self.cache.start_request(self.calls, call.prompt)

    def propose(self, tokens: np.ndarray) -> Tree:
        draft = self.cache.speculate(self.calls, tokens[-64:].tolist(), **self.options)
        return list(draft.token_ids), list(draft.parents)

    def emitted(self, tokens: np.ndarray, new: np.ndarray) -> None:
        self.cache.add_active_response(self.calls, new.tolist())
        self.tokens += len(new)

    def end(self) -> None:
        self.cache.stop_request(self.calls)

    def held(self) -> tuple[int, int]:
        return int(self.cache._global_tree.estimate_memory()), self.tokens  # the local tree goes with its request


def _resident() -> int:
    """Bytes of memory that the process holds (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def accepted(tree: Tree, following: list[int]) -> int:
    tokens, parents = tree
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    node, count = -1, 0
    for token in following:
        found = children.get((node, token))
        if found is None:
            break
        node, count = found, count + 1
    return count


def measure(make: Callable[[], Any], data: dict[str, list[Any]]) -> dict[str, Any]:
    """Steps, tokens, drafted and times of one peer over all families."""
    families = {}
    proposals: list[float] = []
    inserted = 0.0
    held = (0, 0)
    for family, trajectories in data.items():
        peer = make()
        steps = tokens_out = drafted = 0
        for name, calls in trajectories:
            peer.trajectory(name)
            for call in calls:
                whole = np.concatenate([call.prompt, call.output])
                output = call.output.tolist()
                started = time.perf_counter()
                peer.call(call)
                inserted += time.perf_counter() - started
                at, base = 0, len(call.prompt)
                while at < len(output):
                    context = whole[: base + at]
                    started = time.perf_counter()
                    tree = peer.propose(context)
                    proposals.append(time.perf_counter() - started)
                    emit = min(len(output) - at, accepted(tree, output[at:]) + 1)
                    started = time.perf_counter()
                    peer.emitted(whole[: base + at + emit], call.output[at : at + emit])
                    inserted += time.perf_counter() - started
                    at += emit
                    steps += 1
                    tokens_out += emit
                    drafted += len(tree[0])
                peer.end()
        families[family] = (tokens_out, steps, drafted)
        if hasattr(peer, "held"):
            held = max(held, peer.held(), key=lambda pair: pair[1])
    tokens_out = sum(f[0] for f in families.values())
    steps = sum(f[1] for f in families.values())
    return {
        "all": tokens_out / steps,
        "macro": float(np.mean([f[0] / f[1] for f in families.values()])),
        "drafted": sum(f[2] for f in families.values()) / steps,
        "families": {name: f[0] / f[1] for name, f in families.items()},
        "shape": {name: (f[0], f[1], f[2] / f[1]) for name, f in families.items()},
        "proposal_us": 1e6 * float(np.median(proposals)),
        "token_us": 1e6 * inserted / tokens_out,
        "token_bytes": held[0] / held[1] if held[1] else 0.0,
    }


def speedup(row: dict[str, Any], curve: Any, macro: bool = True) -> float:
    """Predicted from mean widths: tokens / (steps x v(1 + drafted)). Kind to peers whose width varies."""
    per = {name: t / (s * curve(1.0 + d)) for name, (t, s, d) in row["shape"].items()}
    if macro:
        return float(np.mean(list(per.values())))
    return sum(t for t, _, _ in row["shape"].values()) / sum(s * curve(1.0 + d) for _, s, d in row["shape"].values())


def first_of_task(recordings: list[Any]) -> list[Any]:
    """Without repeated tasks: the first trajectory of each (ids end in -TRIAL or -tTRIAL)."""
    seen, kept = set(), []
    for recording in recordings:
        task = recording.id.rsplit("-", 1)[0]
        if task not in seen:
            seen.add(task)
            kept.append(recording)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="trajectories a family")
    parser.add_argument("--widths", default="2,4,8,16,32")
    parser.add_argument("--only", default="", help="peers whose name contains one of these")
    parser.add_argument("--families", default=",".join(traces.FAMILIES))
    parser.add_argument("--no-repeats", action="store_true", help="leave tau's and qa's repeated tasks out")
    parser.add_argument("--tokenizer", default="smollm2")
    parser.add_argument("--json", metavar="PATH", help="write the rows there, beside those that it holds already")
    args = parser.parse_args()
    recordings = traces.load(args.families.split(","), args.limit)
    if args.no_repeats:
        recordings = {f: first_of_task(r) if f in ("tau", "qa") else r for f, r in recordings.items()}
    encode = traces.encoder(args.tokenizer)
    data = {f: [(r.id, encode.calls(r)) for r in rs] for f, rs in recordings.items()}
    tokenizer = encode.tokenizer
    peers: dict[str, Callable[[int], Any]] = {
        "agentspec mixture": lambda w: Ours("mixture", w, tokenizer, True),
        "agentspec mixture, alone": lambda w: Ours("mixture", w, tokenizer, False),
        "agentspec match": lambda w: Ours("match", w, tokenizer, True),
        "agentspec match, alone": lambda w: Ours("match", w, tokenizer, False),
        "sglang as shipped": lambda w: SGLang(w, False),
        "sglang, prompt inserted": lambda w: SGLang(w, True),
        "arctic defaults": lambda w: Arctic(w, 1.0, 0.1, False),
        "arctic factor 16, tree": lambda w: Arctic(w, 16.0, 0.0, True),
        "vllm n-gram": VLLM,
        "hf prompt lookup": HuggingFace,
    }
    wanted = [word for word in args.only.split(",") if word]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    if args.json and os.path.exists(args.json):
        with open(args.json, encoding="utf-8") as file:
            rows = {name: {int(w): row for w, row in by.items()} for name, by in json.load(file).items()}
    print(f"{'':26}{'width':>6}{'drafted':>9}{'all':>7}{'macro':>7}  " + "".join(f"{f:>8}" for f in data)
          + f"{'us/prop':>9}{'us/out':>8}{'B/token':>9}")  # fmt: skip
    for name, make in peers.items():
        if wanted and not any(word in name for word in wanted):
            continue
        for width in [int(w) for w in args.widths.split(",")]:
            try:
                row = measure(lambda make=make, width=width: make(width), data)  # type: ignore[misc]
            except ImportError as error:
                print(f"{name:26}  not here: {error}", flush=True)
                break
            rows.setdefault(name, {})[width] = row
            print(
                f"{name:26}{width:6}{row['drafted']:9.1f}{row['all']:7.2f}{row['macro']:7.2f}  "
                + "".join(f"{v:8.2f}" for v in row["families"].values())
                + f"{row['proposal_us']:9.1f}{row['token_us']:8.2f}{row['token_bytes']:9.0f}",
                flush=True,
            )
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump({name: {str(w): r for w, r in by.items()} for name, by in rows.items()}, file, indent=1)
    print("\nbest width on each cost curve, predicted speedup (all / macro):")
    for name, by_width in rows.items():
        line = f"{name:26}"
        for curve_name, curve in CURVES.items():
            best = max(by_width, key=lambda w: speedup(by_width[w], curve))
            value = speedup(by_width[best], curve)
            whole = speedup(by_width[best], curve, macro=False)
            line += f"  {curve_name}: {whole:.2f} / {value:.2f} at {best}"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
