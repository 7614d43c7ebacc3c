"""Part "forward" of gpu.py: LocalEngine's forward on random weights. Needs torch and transformers; the engine's own
part also numba."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import Report, table

SHAPES: dict[str, dict[str, Any]] = {
    "7b": {"kind": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768},
    "8b": {"kind": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "1b": {"kind": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768},
    "tiny": {"kind": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
}  # fmt: skip
# GB/s of the memory, by the makers' data sheets; others: --peak
PEAKS = {"H200": 4800, "H100 NVL": 3900, "H100 PCIe": 2000, "H100": 3350, "A100-SXM4-80": 2039, "A100 80GB": 1935,
         "A100": 1555, "L40S": 864, "L40": 864, "L4": 300, "A10G": 600, "A10": 600, "RTX 4090": 1008, "RTX 3090": 936,
         "T4": 320, "B200": 8000}  # fmt: skip
ENGINE_WAYS = ("plain", "right", "right for a while", "trees")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, on a CPU float32"
    )
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4000])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each engine run")
    parser.add_argument("--peak", type=float, help="the memory's peak rate in GB/s")


class _Bench:
    def __init__(self, report: Report, options: argparse.Namespace) -> None:
        self.report, self.options = report, options
        self.device = torch.device(options.device)
        name = options.dtype or ("float32" if self.device.type == "cpu" else "bfloat16")
        self.dtype: torch.dtype = getattr(torch, name)
        self.peak: float | None = options.peak
        self.copies: float | None = None
        self.model: Any = None
        self.forwards: dict[str, Any] = {}
        self.ids = np.random.default_rng(1).integers(0, SHAPES[options.shape]["vocab_size"], 70_000)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clock(self, run: Callable[[], Any]) -> float:
        """ms of one run, waited for."""
        self.wait()
        before = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - before) * 1e3

    # ---- parts ------------------------------------------------------------------------------------

    def machine(self, found: dict[str, Any]) -> None:
        import transformers

        found.update(torch=torch.__version__, transformers=transformers.__version__, device=str(self.device))
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            found.update(
                name=properties.name,
                multiprocessors=properties.multi_processor_count,
                memory_gb=round(properties.total_memory / 1e9, 1),
                cuda=torch.version.cuda,
            )
            if self.peak is None:
                self.peak = next((float(gbs) for name, gbs in PEAKS.items() if name in properties.name), None)
        size = 1 << (31 if self.device.type == "cuda" else 26)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = [self.clock(lambda: target.copy_(source)) for _ in range(8)]
        self.copies = 2 * size / min(times) / 1e6
        found.update(peak_gbs=self.peak, copy_gbs=round(self.copies, 1))

    def build(self, found: dict[str, Any]) -> None:
        import transformers

        shape = dict(SHAPES[self.options.shape])
        config_of = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[shape.pop("kind")]
        config: Any = config_of(**shape, max_position_embeddings=32768, tie_word_embeddings=False)
        torch.manual_seed(0)
        before = time.perf_counter()
        with torch.device(self.device):
            made: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        self.model = made.eval()
        self.wait()
        found.update(
            shape=self.options.shape,
            dtype=str(self.dtype),
            parameters=sum(p.numel() for p in made.parameters()),
            weight_gb=round(sum(p.nbytes for p in made.parameters()) / 1e9, 2),
            seconds=round(time.perf_counter() - before, 1),
        )

    def prepare(self, found: dict[str, Any]) -> None:
        """Each way of running the model; one that can't be had is said and left out."""
        from agentspec.engines.forward import StockForward
        from agentspec.engines.forward_cuda import GraphForward

        widths = self.options.widths
        stock = StockForward(self.model)
        ways: dict[str, Callable[[], Any]] = {
            "transformers": lambda: stock,
            "ours uncaptured": lambda: GraphForward(stock, widths, True, capture=lambda body: body),
            "a graph a width": lambda: GraphForward(stock, widths, True),
            "one graph": lambda: GraphForward(stock),
        }
        for name, make in ways.items():
            before = time.perf_counter()
            try:
                self.forwards[name] = made = make()
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            found[name] = {
                "description": made.description,
                "row_invariant": made.row_invariant,
                "noise": made.noise,
                "trees": made.supports_trees,
                "seconds": round(time.perf_counter() - before, 2),
            }
        if len(self.forwards) < len(ways):
            raise RuntimeError("; ".join(f"{n}: {f['error']}" for n, f in found.items() if "error" in f))

    def costs(self, found: dict[str, Any], context: int) -> None:
        """Interleaved: each round runs every width by every way, so that what else happens falls on all alike."""
        end = 0.7 * self.report.left
        caches = {}
        for name, forward in self.forwards.items():
            caches[name] = cache = forward.new_cache(context + 64)
            found[name] = {"prefill_ms": self.clock(lambda f=forward, c=cache: prefill(f, c, self.ids[:context]))}  # type: ignore[misc]
        times: dict[tuple[str, int], list[float]] = {}
        for round_ in range(self.options.rounds + 2):
            for n in self.options.widths:
                ids = self.ids[context : context + n]
                for name, forward in self.forwards.items():
                    took = self.clock(lambda f=forward, c=caches[name], i=ids: f.step(c, i, len(i)))  # type: ignore[misc]
                    caches[name].crop(context)
                    if round_ > 1:  # the first two capture and warm up
                        times.setdefault((name, n), []).append(took)
            if self.report.left < end and round_ > 2:
                break
        embedding = self.model.get_input_embeddings().weight
        config = self.model.config
        read = sum(p.nbytes for p in self.model.parameters()) - embedding.nbytes
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        read += context * 2 * config.num_hidden_layers * config.num_key_value_heads * size * self.dtype.itemsize
        for name in self.forwards:
            base = statistics.median(times[name, self.options.widths[0]])
            rate = read / base / 1e6
            found[name].update(
                rounds=len(times[name, self.options.widths[0]]),
                ms={n: round(statistics.median(times[name, n]), 4) for n in self.options.widths},
                least_ms={n: round(min(times[name, n]), 4) for n in self.options.widths},
                v={n: round(statistics.median(times[name, n]) / base, 3) for n in self.options.widths},
                read_gbs=round(rate, 1),
                share_of_peak=round(rate / self.peak, 3) if self.peak else None,
                share_of_copy=round(rate / self.copies, 3) if self.copies else None,
            )

    @torch.inference_mode()
    def equality(self, found: dict[str, Any]) -> None:
        """Rows by themselves, in steps of several, and in trees; on the device, by each way."""
        context, count = 300, 24
        prompt, ids = self.ids[:context], self.ids[context : context + count]
        wrong = self.ids[context + count : context + 2 * count]
        for name, forward in self.forwards.items():
            cache = forward.new_cache()
            prefill(forward, cache, prompt)

            def run(widths: list[int], forward: Any = forward, cache: Any = cache) -> torch.Tensor:
                cache.crop(context)
                parts, at = [], 0
                for n in widths:
                    parts.append(forward.step(cache, ids[at : at + n], n))
                    at += n
                return torch.cat(parts)

            alone = run([1] * count)
            entry: dict[str, Any] = {"largest_logit": float(alone.abs().max())}
            found[name] = entry
            for widths in ([2] * 12, [8] * 3, [5, 1, 9, 2, 7], [count]):
                entry[f"steps of {'+'.join(map(str, widths))}"] = compared(run(widths), alone)
            if not forward.supports_trees:
                entry["tree"] = forward.limits
                continue
            # Each token of the sequence has a wrong sibling before it: rows 1, 3, 5, ... are the sequence.
            some = min(count, 8)
            cache.crop(context)
            tree_ids = np.stack([wrong[:some], ids[:some]], 1).ravel()
            parents = [-1 if i < 2 else 2 * (i // 2) - 1 for i in range(2 * some)]
            tree = forward.step(cache, tree_ids, len(tree_ids), parents)
            cache.keep([2 * i + 1 for i in range(some)])
            after = forward.step(cache, ids[some : some + 1], 1)
            entry["tree"] = compared(tree[1::2], alone[:some])
            entry["after the tree's path was kept"] = compared(after, alone[some : some + 1])

    def engine(self, found: dict[str, Any]) -> None:
        """LocalEngine at work, with drafts of known worth: random weights write nothing that a memory could guess."""
        from agentspec.drafting import CostCurve
        from agentspec.engines.base import GenerationRequest
        from agentspec.engines.local import LocalEngine
        from tests.engines import proposers

        self.forwards.clear()  # and the memory that each works in
        proposer = proposers.ScriptedProposer(proposers.nothing)
        engine = LocalEngine(
            self.model,
            tokenizer=words(self.model.config.vocab_size),
            proposer=proposer,
            max_draft=15,
            cost_curve=CostCurve.linear(0.001),
        )
        found["forward"] = engine.forward.description
        prompt = self.ids[:300].tolist()
        wanted: list[int] = []
        with engine:
            for way in ENGINE_WAYS:
                if self.report.left < 5:
                    found[way] = {"error": "no time left"}
                    continue
                full = prompt + wanted
                proposer.script = {
                    "plain": proposers.nothing,
                    "right": proposers.oracle(full, 15),
                    "right for a while": proposers.adversary(full, engine.vocabulary),
                    "trees": proposers.noise(3, engine.vocabulary, full, tree=True),
                }[way]
                request = GenerationRequest.of(input_ids=prompt, max_tokens=self.options.tokens, ignore_eos=True)
                engine.generate(request).result()  # graphs are captured when first needed
                result = engine.generate(request).result()
                stats, ids = result.stats, list(result.token_ids)
                wanted = wanted or ids
                differ = next((i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), None)
                arrivals = [ms for ms, _ in stats.arrivals]
                steps = max(len(arrivals) - 1, 1)
                found[way] = {
                    "tokens": len(ids),
                    "steps": stats.verify_steps,
                    "tokens_per_step": stats.tokens_per_step,
                    "acceptance_rate": stats.acceptance_rate,
                    "conditional_acceptance": stats.conditional_acceptance,
                    "ms_a_step": (arrivals[-1] - arrivals[0]) / steps,
                    "itl_ms": (arrivals[-1] - arrivals[0]) / max(len(ids) - 1, 1),
                    "ttft_ms": arrivals[0],
                    "near_ties": stats.near_ties,
                    "near_tie_flips": stats.near_tie_flips,
                    "first_difference_from_plain": differ,
                }
        if self.device.type == "cuda":
            found["peak_memory_gb"] = round(torch.cuda.max_memory_allocated(self.device) / 1e9, 2)


def prefill(forward: Any, cache: Any, ids: np.ndarray) -> None:
    for begin in range(0, len(ids), 256):
        forward.step(cache, ids[begin : begin + 256], 0)


def compared(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    return {
        "same_bits": bool(torch.equal(found, wanted)),
        "furthest_apart": float((found - wanted).abs().max()),
        "other_choices": int((found.argmax(-1) != wanted.argmax(-1)).sum()),
        "rows": len(found),
    }


def words(vocabulary: int) -> Any:
    """A tokenizer with one word an id: the engine wants one, and there is no text here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w1", pad_token="w1")


def run(report: Report, options: argparse.Namespace) -> None:
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("gpu forward: torch sees no GPU; for a trial without one: --device cpu --shape tiny")
    bench = _Bench(report, options)
    report.part("machine", bench.machine)
    if report.part("model", bench.build):
        report.part("ways", bench.prepare)
        for context in options.context if bench.forwards else ():
            report.part(f"v(n) after {context}", lambda found, c=context: bench.costs(found, c), least_s=10)  # type: ignore[misc]
        if bench.forwards:
            report.part("equality", bench.equality, least_s=10)
        report.part("engine", bench.engine, least_s=10)
    tell(report.results)


def tell(results: dict[str, Any]) -> None:
    parts = results["parts"]
    machine = parts["machine"]["found"]
    print(
        f"{machine.get('name', machine.get('device'))}: copies at {machine.get('copy_gbs')} GB/s, peak {machine.get('peak_gbs')}"
    )
    for name, part in parts.items():
        ways = {way: entry for way, entry in part["found"].items() if isinstance(entry, dict) and "v" in entry}
        if not ways:
            continue
        widths = list(next(iter(ways.values()))["v"])
        rows = [
            [way, e["ms"][widths[0]], *(e["v"][n] for n in widths), e["share_of_peak"], e["share_of_copy"]]
            for way, e in ways.items()
        ]
        print(f"\n{name}\n" + table(["", "ms", *(f"v({n})" for n in widths), "of peak", "of copy"], rows))
        if "one graph" in ways and "a graph a width" in ways:
            price = ways["one graph"]["ms"][widths[0]] / ways["a graph a width"]["ms"][widths[0]]
            print(f"equality's price: n = {widths[0]} in the one graph takes {price:.3f} of its time in its own")
    rows = []
    for way, entry in parts.get("equality", {}).get("found", {}).items():
        for what, e in entry.items():
            if isinstance(e, dict):
                rows.append(
                    [
                        way,
                        what,
                        "yes" if e["same_bits"] else "no",
                        e["furthest_apart"],
                        f"{e['other_choices']}/{e['rows']}",
                    ]
                )
    if rows:
        print("\nagainst rows by themselves\n" + table(["", "", "same bits", "apart", "other choices"], rows))
    engine = parts.get("engine", {}).get("found", {})
    ran = {way: engine[way] for way in ENGINE_WAYS if "tokens" in engine.get(way, {})}
    if ran:
        keys = ["tokens", "steps", "tokens_per_step", "ms_a_step", "itl_ms", "near_ties", "first_difference_from_plain"]
        print("\nLocalEngine\n" + table(["", *keys], [[way, *(e[k] for k in keys)] for way, e in ran.items()]))
