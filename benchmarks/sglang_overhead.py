"""What a worker spends on the host in each decode step, beside SGLang's NGRAM worker in the same run.

    python tests/sglang/setup_venv.py                      # once
    PYTHONPATH=tests/sglang/rig:integrations/sglang:. SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 \\
        $AGENTSPEC_SGLANG_VENV/bin/python benchmarks/sglang_overhead.py [--json] [--proposer match] [--steps
        400]

Recorded trajectories of ../shared/traces are fed to the real methods of both workers (NGRAMWorker's
_prepare_draft_tokens and _update_ngram_corpus; AgentSpecWorker's _settle, Drafter.draft and learn),
interleaved, with the recorded tokens standing in for the model. Medians in microseconds a step, all of a
batch together; then the resident memory that each took.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch

from tests.sglang.traces import FAMILIES, Call, load_calls

WIDEST = 16


def rss_mb() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss / 1e6)


class Row:
    """One request of a batch, as both workers see it; it lives until its recorded output is used up."""

    made = 0

    def __init__(self, call: Call) -> None:
        Row.made += 1
        params = SimpleNamespace(
            custom_params=None,
            max_new_tokens=len(call.output),
            ignore_eos=True,
            stop_token_ids=None,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
            min_p=0.0,
            top_k=1,
            top_p=1.0,
            sampling_seed=None,
        )
        self.truth = call.output
        self.request = SimpleNamespace(
            rid=str(Row.made),
            origin_input_ids=array("q", call.prompt),
            origin_input_ids_unpadded=array("q", call.prompt),
            output_ids=array("q", call.output[:1]),
            output_ids_through_stop=array("q", call.output),
            session_id=call.trajectory,
            session=None,
            cache_salt=None,
            extra_key=None,
            sampling_params=params,
            custom_logit_processor=None,
            return_sampling_mask=False,
            return_hidden_states=False,
            return_logprob=False,
            input_embeds=None,
            customized_info=None,
            eos_token_ids=None,
            tokenizer=None,
            finished=lambda: False,
        )

    @property
    def left(self) -> list[int]:
        return self.truth[len(self.request.output_ids) :]

    def emit(self, tokens: list[int]) -> None:
        self.request.output_ids.extend(tokens[: len(self.left)])


def walk(tokens: list[int], parents: list[int], truth: list[int]) -> list[int]:
    """What a verify step emits: the drafted path that the recording takes, and one token more."""
    node, emitted = 0, [truth[0]]
    while len(emitted) < len(truth):
        step = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == emitted[-1]]
        if not step:
            return emitted
        node = step[0]
        emitted.append(truth[len(emitted)])
    return emitted


class Ngram:
    name = "NGRAM"

    def __init__(self, capacity: int) -> None:
        from sglang.srt.speculative import ngram_worker
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        before = rss_mb()
        self.worker = ngram_worker.NGRAMWorker.__new__(ngram_worker.NGRAMWorker)
        self.worker.enable_overlap = False
        self.worker.draft_token_num = WIDEST
        self.worker.max_trie_depth = 18
        self.worker.ngram_corpus = NgramCorpus(
            max_trie_depth=18,
            min_bfs_breadth=1,
            max_bfs_breadth=10,
            draft_token_num=WIDEST,
            match_type="BFS",
            capacity=capacity,
            external_sam_budget=0,
            external_corpus_max_tokens=10_000_000,
        )
        self.allocated = rss_mb() - before

    def begin(self, row: Row) -> None:
        pass

    def step(self, batch: Any, rows: list[Row]) -> tuple[float, float, list[list[int]]]:
        start = time.perf_counter()
        tokens, mask = self.worker._prepare_draft_tokens(batch)
        middle = time.perf_counter()
        emitted = []
        mask = mask.reshape(len(rows), WIDEST, WIDEST)
        for i, row in enumerate(rows):
            ancestors = mask[i].astype(bool) & ~np.eye(WIDEST, dtype=bool)
            parents = [int(np.flatnonzero(line)[-1]) if line.any() else -1 for line in ancestors]
            emitted.append(walk(tokens[i * WIDEST : (i + 1) * WIDEST].tolist(), parents, row.left))
        again = time.perf_counter()
        self.worker._update_ngram_corpus(batch)
        return middle - start, time.perf_counter() - again, emitted

    def end(self, row: Row) -> None:
        self.worker.ngram_corpus.erase_match_state([row.request.rid])


class AgentSpec:
    def __init__(self, proposer: str) -> None:
        from sglang_agentspec.drafter import Drafter
        from sglang_agentspec.internals import AgentSpecWorker
        from sglang_agentspec.settings import PluginSettings

        self.name = f"AGENTSPEC {proposer}"
        before = rss_mb()
        settings = PluginSettings(proposer=proposer, cost_curve={1: 1.0, 2: 1.005})
        self.worker = AgentSpecWorker.__new__(AgentSpecWorker)
        self.worker.enable_overlap = False
        self.worker.calls, self.worker._requests, self.worker._last_seen = {}, {}, {}
        self.worker._decoding, self.worker._forwards = set(), 0
        self.worker.drafter = Drafter(
            settings, vocabulary=49152, curve=settings.curve("cpu"), widest=WIDEST, max_rows=64, trees=True
        )
        self.worker.drafter.warm_up()
        self.allocated = rss_mb() - before

    def begin(self, row: Row) -> None:
        self.worker._begin(row.request)

    def step(self, batch: Any, rows: list[Row]) -> tuple[float, float, list[list[int]]]:
        drafter = self.worker.drafter
        start = time.perf_counter()
        calls = self.worker._settle(batch)
        step = drafter.draft(calls)
        middle = time.perf_counter()
        emitted = []
        for i, row in enumerate(rows):
            if step.width == 1:
                emitted.append(row.left[:1])
                continue
            parents = [-1] * step.width
            for node in range(step.width):
                child = int(drafter.tree.next_token[i, node])
                while child != -1:
                    parents[child] = node
                    child = int(drafter.tree.next_sibling[i, child])
            emitted.append(walk(drafter.tree.tokens[i].tolist(), parents, row.left))
        again = time.perf_counter()
        drafter.learn(calls)
        return middle - start, time.perf_counter() - again, emitted

    def end(self, row: Row) -> None:
        self.worker._end(row.request.rid)


class Lane:
    """One place of a batch: runs the calls of one trajectory after another, so that none runs beside its
    successor."""

    def __init__(self, worker: Any, trajectories: list[list[Call]]) -> None:
        self.worker = worker
        self.waiting = [call for calls in trajectories for call in calls if len(call.output) > 1]
        self.row: Row | None = None

    def ready(self) -> Row | None:
        if self.row is not None and not self.row.left:
            self.worker.end(self.row)
            self.row = None
        if self.row is None and self.waiting:
            self.row = Row(self.waiting.pop(0))
            self.worker.begin(self.row)
        return self.row


def run(workers: list[Any], calls: list[Call], size: int, steps: int) -> dict[str, dict[str, float]]:
    """Median microseconds a step, and tokens a step, of each worker at one batch size."""
    by_id: dict[str, list[Call]] = {}
    for call in calls:
        by_id.setdefault(call.trajectory, []).append(call)
    trajectories = list(by_id.values())
    lanes = {w.name: [Lane(w, trajectories[i::size]) for i in range(size)] for w in workers}
    before: dict[str, list[float]] = {w.name: [] for w in workers}
    after: dict[str, list[float]] = {w.name: [] for w in workers}
    tokens = {w.name: 0.0 for w in workers}
    for _ in range(steps):
        for worker in workers:
            rows = [row for row in (lane.ready() for lane in lanes[worker.name]) if row is not None]
            if len(rows) < size:
                continue
            lengths = [len(r.request.origin_input_ids) + len(r.request.output_ids) - 1 for r in rows]
            batch = SimpleNamespace(
                reqs=[r.request for r in rows],
                seq_lens_cpu=torch.tensor(lengths),
                spec_info=None,
                grammar_needs_sync=lambda: False,
            )
            first, second, emitted = worker.step(batch, rows)
            before[worker.name].append(first * 1e6)
            after[worker.name].append(second * 1e6)
            tokens[worker.name] += sum(map(len, emitted)) / size
            for row, out in zip(rows, emitted, strict=True):
                row.emit(out)
    for worker in workers:
        for lane in lanes[worker.name]:
            if lane.row is not None:
                worker.end(lane.row)
    return {
        name: {
            "before_us": round(statistics.median(t), 1),
            "before_p10_us": round(sorted(t)[int(0.1 * len(t))], 1),
            "after_us": round(statistics.median(after[name]), 1),
            "both_us": round(statistics.median(map(sum, zip(t, after[name], strict=True))), 1),
            "tokens_a_step": round(tokens[name] / len(t), 2),
            "steps": len(t),
        }
        for name, t in before.items()
        if t
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--proposer", action="append", choices=["match", "mixture"], help="may be given twice")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, action="append", help="batch sizes, default 1, 8, 16")
    parser.add_argument("--capacity", type=int, default=10_000_000, help="NGRAM's, by default its own default")
    chosen = parser.parse_args()
    from transformers import AutoTokenizer

    from tests.sglang.setup_venv import models_path

    tokenizer = AutoTokenizer.from_pretrained(str(models_path() / "scripted"))
    calls = [call for family in FAMILIES for call in load_calls(tokenizer, family, 6)]
    torch.set_num_threads(1)
    result: dict[str, Any] = {"batch": {}}
    for size in chosen.batch or [1, 8, 16]:
        workers: list[Any] = [AgentSpec(p) for p in chosen.proposer or ["match"]]
        workers.append(Ngram(chosen.capacity))
        result["batch"][size] = run(workers, calls, size, chosen.steps)
        result.setdefault("allocated_mb", {w.name: round(w.allocated, 1) for w in workers})
        result["held_mb"] = {
            w.name: round(w.worker.drafter.book.nbytes / 1e6, 1) for w in workers if isinstance(w, AgentSpec)
        }
        del workers
    if chosen.json:
        print(json.dumps(result))
        return
    print(f"{'batch':>5}  {'worker':<20}{'before':>10}{'p10':>10}{'after':>10}{'both':>10}   tokens/step  steps")
    for size, by_name in result["batch"].items():
        for name, r in by_name.items():
            numbers = "".join(f"{r[k]:>8.0f}us" for k in ("before_us", "before_p10_us", "after_us", "both_us"))
            print(f"{size:>5}  {name:<20}{numbers}{r['tokens_a_step']:>14.2f}{r['steps']:>8}")
    print("resident memory taken at start, MB:", result["allocated_mb"])
    print("memories held at the end, MB:", result["held_mb"])


if __name__ == "__main__":
    main()
