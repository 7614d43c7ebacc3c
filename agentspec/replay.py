"""Replay: what agentspec would have done on recorded trajectories, teacher-forced.

`agentspec replay FILE...` and benchmarks use it. The recorded output stands in for the target model: each step
drafts through the very memory, proposer and width policy that the engines use, and the draft is checked against
what was recorded. So tokens per step and acceptance are exact for greedy decoding of the same text; speedup is
predicted, from a verify-cost curve v(n). Imports memory,
drafting and recordings; a tokenizer only for recordings
that hold text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.drafting import CostCurve, Draft, DraftLimits, Proposer, WidthPolicy, make_proposer
from agentspec.errors import InvalidRequestError, ModelError
from agentspec.memory import Context, MemoryStore, Source, Span, as_source
from agentspec.memory.kernels import kernel
from agentspec.recordings import Problem, Recording, read
from agentspec.testing import accept

__all__ = ["CURVES", "CallRow", "Encoder", "EncodedCall", "Report", "add_arguments", "replay", "run"]

Int32 = NDArray[np.int32]

# Named verify-cost curves. gpu: batch 1, memory-bound decoding, half a per cent for each further token;
# cpu: two cores, SmolLM2-135M in float32. A measured one is better: --curve FILE with {"n": ms}.
CURVES = {
    "gpu": CostCurve.linear(0.005, name="gpu"),
    "cpu": CostCurve({1: 1.0, 2: 2.1, 4: 2.3, 8: 2.5, 16: 2.7, 32: 3.1}, name="cpu"),
}
_RESAMPLES = 1000


# ---- recordings as token ids ----------------------------------------------------------------------


@dataclass(slots=True)
class EncodedCall:
    """prompt int32[n], spans of its messages, output int32[m] (an ending EOS included)."""

    prompt: Int32
    spans: list[Span] | None
    output: Int32
    steps: list[int] | None = None
    max_tokens: int | None = None


class Encoder:
    """Messages to ids in ChatML, each piece encoded once: `<|im_start|>role\\ncontent<|im_end|>\\n`.

    tokenizer: anything with encode(text, add_special_tokens=False). Tool calls are rendered as
    `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, tool schemas in the system message."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[str, Int32] = {}

    def piece(self, text: str) -> Int32:
        ids = self._pieces.get(text)
        if ids is None:
            if len(self._pieces) > 20_000:
                self._pieces.clear()
            ids = np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
            self._pieces[text] = ids
        return ids

    def calls(self, recording: Recording) -> list[EncodedCall]:
        """The trajectory's calls as ids. Calls without an output are left out."""
        made = []
        for call in recording.calls:
            if call.input_ids is not None and call.output_ids is not None:
                spans = None
                if call.spans is not None:
                    spans = [Span(int(a), int(b), as_source(int(s)), str(role)) for a, b, s, role in call.spans]
                made.append(
                    EncodedCall(
                        np.asarray(call.input_ids, np.int32),
                        spans,
                        np.asarray(call.output_ids, np.int32),
                        call.steps,
                        call.max_tokens,
                    )
                )
                continue
            if call.output is None:
                continue
            prompt, message_spans = self._prompt(call.messages, recording.tools)
            made.append(EncodedCall(prompt, message_spans, self.piece(_content(call.output) + "<|im_end|>")))
        return made

    def _prompt(self, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[Int32, list[Span]]:
        parts: list[Int32] = []
        spans: list[Span] = []
        size = 0

        def add(ids: Int32, source: Source | None = None, role: str = "") -> None:
            nonlocal size
            parts.append(ids)
            if source is not None and len(ids):
                spans.append(Span(size, size + len(ids), source, role))
            size += len(ids)

        schemas = ("\n\n# Tools\n" + "\n".join(json.dumps(tool) for tool in tools)) if tools else ""
        if schemas and (not messages or messages[0]["role"] != "system"):
            text = f"<|im_start|>system\n{schemas.strip()}<|im_end|>\n"
            add(self.piece(text), Source.SCHEMA, "system")
            schemas = ""
        for place, message in enumerate(messages):
            role = message["role"]
            if role == "assistant":
                add(self.piece("<|im_start|>assistant\n"))
                add(self.piece(_content(message) + "<|im_end|>"), Source.OUTPUT, "assistant")
                add(self.piece("\n"))
                continue
            content = _content(message) + (schemas if place == 0 else "")
            source = Source.TOOL if role == "tool" else Source.PROMPT
            add(self.piece(f"<|im_start|>{role}\n{content}<|im_end|>\n"), source, role)
        add(self.piece("<|im_start|>assistant\n"))
        return np.concatenate(parts), spans


def _content(message: dict[str, Any]) -> str:
    content = str(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        arguments = call.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        content += "\n" if content else ""
        content += f'<tool_call>\n{{"name": {json.dumps(call.get("name"))}, "arguments": {arguments}}}\n</tool_call>'
    return content


# ---- replaying ------------------------------------------------------------------------------------


@dataclass(slots=True)
class CallRow:
    """What one call did, in CallStats' words; cost is the sum of v over its steps, 1 being a plain step."""

    trajectory: str
    family: str
    call: int
    prompt_tokens: int
    output_tokens: int
    verify_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    mismatches: int = 0
    cost: float = 0.0
    oracle_steps: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    recorded_steps: int | None = None


@dataclass(slots=True)
class Report:
    """Rows of all calls, and what follows from them."""

    rows: list[CallRow]
    settings: dict[str, Any]
    reliability: NDArray[np.float64]  # float64[20, 3]: edges, sum of their probabilities, accepted; by probability
    skipped: list[str] = field(default_factory=list)
    widths: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    proposer_us: float = 0.0

    def totals(self, rows: Iterable[CallRow] | None = None) -> dict[str, Any]:
        """The figures of DESIGN.md's words over some rows (all of them by default)."""
        chosen = self.rows if rows is None else list(rows)
        tokens = sum(row.output_tokens for row in chosen)
        steps = sum(row.verify_steps for row in chosen)
        proposed = sum(row.proposed for row in chosen)
        accepted = sum(row.accepted for row in chosen)
        mismatches = sum(row.mismatches for row in chosen)
        cost = sum(row.cost for row in chosen)
        oracle = sum(row.oracle_steps for row in chosen)
        return {
            "calls": len(chosen),
            "output_tokens": tokens,
            "verify_steps": steps,
            "tokens_per_step": tokens / steps if steps else None,
            "proposed_per_step": proposed / steps if steps else None,
            "acceptance_rate": accepted / proposed if proposed else None,
            "conditional_acceptance": accepted / (accepted + mismatches) if accepted + mismatches else None,
            "break_even": cost / steps if steps else None,
            "speedup": tokens / cost if cost else None,
            "copy_oracle": tokens / oracle if oracle else None,
        }

    def by(self, key: Callable[[CallRow], Any]) -> dict[str, dict[str, Any]]:
        """totals() of the rows that share a key, by rising key."""
        groups: dict[Any, list[CallRow]] = {}
        for row in self.rows:
            groups.setdefault(key(row), []).append(row)
        return {str(k): self.totals(groups[k]) for k in sorted(groups)}

    def sources(self) -> dict[str, int]:
        """Accepted tokens by source, the most frequent first."""
        counts: dict[str, int] = {}
        for row in self.rows:
            for source, count in row.accepted_by_source.items():
                counts[source] = counts.get(source, 0) + count
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    def uncertainty(self) -> tuple[float, float]:
        """95 % bootstrap interval of the speedup, trajectories resampled. (nan, nan) for fewer than two."""
        groups: dict[tuple[str, str], list[float]] = {}
        for row in self.rows:
            pair = groups.setdefault((row.family, row.trajectory), [0.0, 0.0])
            pair[0] += row.output_tokens
            pair[1] += row.cost
        if len(groups) < 2:
            return float("nan"), float("nan")
        values = np.array(list(groups.values()))
        random = np.random.default_rng(0)
        picks = random.integers(0, len(values), (_RESAMPLES, len(values)))
        ratios = values[picks, 0].sum(axis=1) / values[picks, 1].sum(axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return float(low), float(high)

    @property
    def macro(self) -> float:
        """Mean over the families of tokens_per_step."""
        return float(np.mean([group["tokens_per_step"] for group in self.by(lambda row: row.family).values()]))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the edges' probabilities, in 20 bins."""
        edges = self.reliability[:, 0].sum()
        return float(np.abs(self.reliability[:, 1] - self.reliability[:, 2]).sum() / edges) if edges else 0.0

    def to_dict(self) -> dict[str, Any]:
        low, high = self.uncertainty()
        families = self.by(lambda row: row.family)
        return {
            "settings": self.settings,
            "totals": {**self.totals(), "speedup_interval": None if np.isnan(low) else [low, high]},
            "macro_tokens_per_step": self.macro,
            "macro_speedup": float(np.mean([group["speedup"] for group in families.values()])),
            "by_family": families,
            "by_call_index": self.by(lambda row: row.call),
            "accepted_by_source": self.sources(),
            "calibration_error": self.calibration_error,
            "reliability": [
                {"edges": int(n), "predicted": p / n, "accepted": a / n} for n, p, a in self.reliability if n
            ],
            "widths": self.widths,
            "best_width": max(self.widths, key=lambda w: self.widths[w]["speedup"]) if self.widths else None,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "proposer_us": self.proposer_us,
            "calls": [asdict(row) for row in self.rows],
        }


def replay(
    recordings: Iterable[Recording],
    encoder: Encoder,
    make: Callable[[], Proposer],
    *,
    curve: CostCurve = CURVES["gpu"],
    max_draft: int = 16,
    tree: bool = True,
    fixed: bool = False,
    shared: bool = True,
    deferred: bool = False,
    proposer_cost: float = 0.0,
    price: float | None = None,
    oracle: bool = True,
    seeds: Callable[[Recording], Iterable[Sequence[int]]] | None = None,
    progress: Callable[[int, int, CallRow], None] | None = None,
    watch: Callable[[Context, Draft, Int32], None] | None = None,
) -> Report:
    """Replay recordings, in order.

    make:     builds a proposer; one is made for each family
    fixed:    draft max_draft tokens at every step, whatever they cost; else the width policy decides
    price:    expected accepted tokens that each node has to bring, instead of the policy's
    shared:   a family's trajectories share a namespace
    deferred: learn while the next forward runs (as the SGLang plugin does), not before it (as LocalEngine does)
    seeds:    a recording's draft material besides its text, held as Source.SCHEMA before its first call
    watch:    called at each step with the call, its draft, and the recorded tokens that follow
    """
    started = time.perf_counter()
    proposers: dict[str, Proposer] = {}
    stores: dict[str, MemoryStore] = {}
    oracles: dict[str, CopyOracle] = {}
    rows: list[CallRow] = []
    reliability = np.zeros((20, 3))
    spent: list[float] = []
    listed = list(recordings)
    for number, recording in enumerate(listed):
        family = recording.family
        if family not in proposers:
            proposers[family] = make()
            stores[family] = MemoryStore()
            oracles[family] = CopyOracle(shared)
        proposer = proposers[family]
        memory = stores[family].open(f"{recording.id}#{number}", family if shared else None)
        for seed in seeds(recording) if seeds is not None else ():
            memory.seed(seed, Source.SCHEMA)
        policy = WidthPolicy(curve, max_draft, proposer_cost)
        oracles[family].new_trajectory()
        for index, call in enumerate(encoder.calls(recording)):
            row = CallRow(recording.id, family, index, len(call.prompt), len(call.output))
            if call.steps is not None:
                row.recorded_steps = len(call.steps)
            context = memory.extend(call.prompt, call.spans)
            proposer.begin(context)
            at, size = 0, len(call.output)
            while at < size:
                remaining = (call.max_tokens or 1 << 30) - at
                if fixed:
                    most = min(max_draft, max(0, remaining - 1)) if not tree else max_draft
                    limits = DraftLimits(most, max(0, min(max_draft, remaining - 1)), tree, np.zeros(most + 1))
                else:
                    limits = policy.limits(remaining, 1, tree)
                if price is not None:
                    limits = replace(limits, price=price * np.arange(limits.max_tokens + 1.0), cost=None)
                before = time.perf_counter()
                draft = proposer.propose(context, limits)
                spent.append(time.perf_counter() - before)
                if deferred:
                    proposer.learn(context)
                if watch is not None:
                    watch(context, draft, call.output[at:])
                accepted = accept(draft, call.output[at:])
                emitted = call.output[at : at + accepted + 1]
                _count(row, draft, accepted, call.output[at:], reliability)
                row.cost += policy.cost(len(draft))
                policy.record(len(emitted), len(draft))
                memory.append(context, emitted)
                proposer.observe(context, emitted)
                if not deferred:
                    proposer.learn(context)
                at += len(emitted)
            proposer.end(context)
            memory.close(context)
            if oracle:
                row.oracle_steps = oracles[family].steps(call.prompt, call.output)
            rows.append(row)
            if progress is not None:
                progress(number, len(listed), row)
    return Report(
        rows,
        {
            "proposer": next((proposer.name for proposer in proposers.values()), ""),
            "max_draft": max_draft, "tree": tree, "fixed": fixed, "shared": shared, "deferred": deferred,
            "curve": curve.name or dict(curve.points), "proposer_cost": proposer_cost,
        },
        reliability,
        seconds=time.perf_counter() - started,
        proposer_us=1e6 * float(np.median(spent)) if spent else 0.0,
    )  # fmt: skip


def _count(row: CallRow, draft: Any, accepted: int, following: Int32, reliability: NDArray[np.float64]) -> None:
    """Add a step to its call's row and to the reliability table."""
    row.verify_steps += 1
    row.proposed += len(draft)
    if not len(draft):
        return
    accepted = min(accepted, len(following))
    row.accepted += accepted
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    paths, sources = draft.probabilities.tolist(), draft.sources.tolist()
    wanted = following[: accepted + 1].tolist()
    node = -1
    for depth in range(accepted + 1):
        after = -1
        children = 0
        for k, parent in enumerate(parents):
            if parent != node:
                continue
            children += 1
            edge = paths[k] / (paths[node] if node >= 0 else 1.0)
            cell = reliability[min(19, int(edge * 20))]
            cell[0] += 1.0
            cell[1] += edge
            if depth < len(wanted) and tokens[k] == wanted[depth]:
                after = k
                cell[2] += 1.0
        if after < 0:
            if children and depth < len(wanted):
                row.mismatches += 1
            break
        name = Source(sources[after]).name.lower()
        row.accepted_by_source[name] = row.accepted_by_source.get(name, 0) + 1
        node = after


# ---- the copy oracle ------------------------------------------------------------------------------


@kernel("int64(int32[::1], int64, int64, int32[::1], int32[::1], int64)")
def _oracle_steps(text: Any, start: Any, end: Any, latest: Any, before: Any, longest_chain: Any) -> Any:
    """Steps to emit text[start:end] if each copies the longest continuation of any earlier occurrence of the
    last
    token, and one token more. latest[token], before[position]: occurrences in text[:start], kept up to date."""
    steps = 0
    at = start
    while at < end:
        best = 0
        place = int(latest[int(text[at - 1])]) if at > 0 else -1
        hops = 0
        while place >= 0 and hops < longest_chain:
            if place != at - 1:
                length = 0
                while at + length < end and text[place + 1 + length] == text[at + length]:
                    length += 1
                if length > best:
                    best = length
            place = int(before[place])
            hops += 1
        steps += 1
        until = min(end, at + best + 1)
        for i in range(at, until):
            token = int(text[i])
            before[i] = latest[token]
            latest[token] = i
        at = until
    return steps


class CopyOracle:
    """What copying alone could reach: the best choice at every step, at least one matching token, no limit on
    length. Knows what each trajectory has read and written, and (shared) what earlier ones have written."""

    def __init__(self, shared: bool, longest_chain: int = 20_000) -> None:
        self.shared = shared
        self.longest_chain = longest_chain
        self._earlier: list[Int32] = []
        self._outputs: list[Int32] = []
        self._text: Int32 = np.empty(0, np.int32)

    def new_trajectory(self) -> None:
        if self.shared and self._outputs:
            self._earlier.append(np.concatenate(self._outputs))
        self._outputs = []

    def steps(self, prompt: Int32, output: Int32) -> int:
        """Steps for one call. O(prompt + earlier outputs) to set up."""
        text = np.concatenate([*self._earlier, prompt, output]).astype(np.int32)
        start = len(text) - len(output)
        latest = np.full(int(text.max()) + 1, -1, np.int32)
        before = np.full(len(text), -1, np.int32)
        _link(text, start, latest, before)
        self._outputs.append(output)
        return int(_oracle_steps(text, start, len(text), latest, before, self.longest_chain))


@kernel("void(int32[::1], int64, int32[::1], int32[::1])")
def _link(text: Any, end: Any, latest: Any, before: Any) -> Any:
    for i in range(end):
        token = int(text[i])
        before[i] = latest[token]
        latest[token] = i


# ---- the command ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `agentspec replay`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trajectories (formats: see docs)")
    parser.add_argument("--proposer", default="mixture", help="match, mixture, or an entry point (default: mixture)")
    parser.add_argument("--prior", metavar="PATH", help="the mixture's weights to start from (default: those shipped)")
    parser.add_argument("--tokenizer", default="smollm2", help="model name or directory (default: smollm2)")
    parser.add_argument("--curve", default="gpu", help="gpu, cpu, or a JSON file {n: ms} (default: gpu)")
    parser.add_argument("--max-draft", type=int, default=16, help="most tokens drafted a step (default: 16)")
    parser.add_argument("--proposer-cost", type=float, default=0.0, help="c, relative to a plain step (default: 0)")
    parser.add_argument("--chain", action="store_true", help="chains only, where an engine can't verify trees")
    parser.add_argument("--fixed", action="store_true", help="always draft --max-draft tokens")
    parser.add_argument("--alone", action="store_true", help="no memory across trajectories")
    parser.add_argument("--deferred", action="store_true", help="learn during the next forward, as the plugin does")
    parser.add_argument("--widths", help="also replay at these fixed widths, e.g. 2,4,8,16")
    parser.add_argument("--limit", type=int, help="at most so many trajectories a file")
    parser.add_argument("--json", metavar="PATH", nargs="?", const="-", help="write all figures as JSON (-: stdout)")
    parser.add_argument("--html", metavar="PATH", help="write a page with plots")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def load_curve(text: str) -> CostCurve:
    """A named curve, or one measured: a JSON file {"1": ms, "2": ms, ...}, or {"milliseconds": {...}}."""
    if text in CURVES:
        return CURVES[text]
    path = Path(text)
    if not path.is_file():
        raise InvalidRequestError(f"curve: needed {', '.join(CURVES)} or a JSON file, got {text!r}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        value = value.get("milliseconds", value)
        return CostCurve.measured({int(n): float(ms) for n, ms in value.items()}, name=path.stem)
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidRequestError(f"curve: {path} isn't {{n: ms}} ({error})") from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model that agentspec.engines finds."""
    from transformers import AutoTokenizer

    from agentspec.engines import models

    source = models.find(name)
    try:
        if source.kind == "gguf":
            file = Path(source.location)
            return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        return AutoTokenizer.from_pretrained(source.location)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer could be loaded from {source.location}: {error}") from error


def run(args: argparse.Namespace) -> int:
    """`agentspec replay`. Returns 0; 1 if records had to be skipped."""
    options: dict[str, Any] = {}
    if args.prior is not None:
        if args.proposer != "mixture":
            raise InvalidRequestError(f"--prior: only the mixture starts from weights, not {args.proposer!r}")
        options["prior"] = args.prior
    curve = load_curve(args.curve)
    skipped: list[str] = []

    def report_problem(problem: Problem) -> None:
        skipped.append(str(problem))
        print(f"skipped {problem}", file=sys.stderr)

    recordings: list[Recording] = []
    for file in args.files:
        found = read(file, report_problem)
        recordings += found[: args.limit] if args.limit else found
    needs_text = any(call.input_ids is None for recording in recordings for call in recording.calls)
    tokenizer = load_tokenizer(args.tokenizer) if needs_text or args.proposer == "mixture" else None
    encoder = Encoder(tokenizer)
    progress = None if args.quiet or not sys.stderr.isatty() else _Progress()
    settings: dict[str, Any] = {
        "curve": curve, "tree": not args.chain, "shared": not args.alone, "deferred": args.deferred,
        "proposer_cost": args.proposer_cost,
    }  # fmt: skip

    def make() -> Proposer:
        return make_proposer(args.proposer, tokenizer=tokenizer, **options)

    report = replay(
        recordings, encoder, make, max_draft=args.max_draft, fixed=args.fixed, progress=progress, **settings
    )
    report.skipped = skipped
    widths = args.widths or ("2,4,8,16" if args.html else "")
    for width in [int(w) for w in widths.split(",") if w.strip()]:
        one = replay(
            recordings,
            encoder,
            make,
            max_draft=width,
            fixed=True,
            oracle=False,
            progress=progress,
            **settings,
        )
        totals = one.totals()
        report.widths[str(width)] = {k: totals[k] for k in ("tokens_per_step", "speedup", "proposed_per_step")}
    if args.json:
        text = json.dumps(report.to_dict(), indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.html:
        from agentspec.report import page

        Path(args.html).write_text(page(report), encoding="utf-8")
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json != "-":
        print(summary(report))
    return 1 if skipped else 0


class _Progress:
    """One line on a terminal, rewritten."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, number: int, of: int, row: CallRow) -> None:
        now = time.monotonic()
        if now - self._last < 0.2 and number + 1 < of:
            return
        self._last = now
        end = "\n" if number + 1 == of else ""
        print(f"\r{number + 1}/{of} trajectories  {row.family:12.12}", end=end, file=sys.stderr, flush=True)


def _curve_in_words(curve: Any) -> str:
    """Which v(n) the speedup is predicted from."""
    if curve == "gpu":
        return "a GPU's assumed cost of a forward over n tokens, v(n) = 1 + 0.005 (n - 1) (--curve FILE for a measured one)"
    if curve == "cpu":
        return "two CPU cores' cost of a forward over n tokens (--curve FILE for this machine's)"
    return f"the cost curve {curve!r}" if isinstance(curve, str) else f"the cost curve v(n) = {curve}"


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(report: Report) -> str:
    """The report as a table for a terminal."""
    columns = ["calls>7", "tokens>9", "t/step>8", "drafted>9", "accept>8", "a>7", "oracle>8", "speedup>9"]
    head = " " * 14 + "".join(f"{name:>{width}}" for name, width in (c.split(">") for c in columns))
    lines = [head]

    def line(name: str, totals: dict[str, Any]) -> str:
        return (
            f"{name:14.14}{totals['calls']:7}{totals['output_tokens']:9}"
            f"{_figure(totals['tokens_per_step']):>8}"
            f"{_figure(totals['proposed_per_step'], 1):>9}{_figure(totals['acceptance_rate']):>8}"
            f"{_figure(totals['conditional_acceptance']):>7}{_figure(totals['copy_oracle']):>8}"
            f"{_figure(totals['speedup']):>9}"
        )

    families = report.by(lambda row: row.family)
    if len(families) > 1:
        lines += [line(name, totals) for name, totals in families.items()]
    totals = report.totals()
    lines.append(line("all", totals))
    low, high = report.uncertainty()
    interval = "" if np.isnan(low) else f" (95 % of resampled trajectories: {low:.2f} to {high:.2f})"
    lines.append("")
    lines.append(
        f"predicted speedup {_figure(totals['speedup'])}{interval} at {_curve_in_words(report.settings['curve'])}; "
        f"break-even {_figure(totals['break_even'])} tokens a step"
    )
    if len(families) > 1:
        lines.append(f"mean over {len(families)} families: {report.macro:.2f} tokens a step")
    sources = report.sources()
    total = sum(sources.values())
    if total:
        lines.append("accepted from: " + ", ".join(f"{name} {count / total:.0%}" for name, count in sources.items()))
    if report.widths:
        best = max(report.widths, key=lambda w: report.widths[w]["speedup"])
        lines.append(
            "fixed widths: "
            + ", ".join(f"{w}: {v['speedup']:.2f}" for w, v in report.widths.items())
            + f"; best {best}"
        )
    recorded = [row for row in report.rows if row.recorded_steps is not None]
    if recorded:
        lines.append(
            f"recorded runs: {sum(row.recorded_steps or 0 for row in recorded)} verify steps, "
            f"predicted {sum(row.verify_steps for row in recorded)}"
        )
    if report.skipped:
        lines.append(f"{len(report.skipped)} records skipped")
    lines.append(
        f"edges' probabilities: expected calibration error {report.calibration_error:.4f}; "
        f"a proposal {report.proposer_us:.0f} us (median); {report.seconds:.1f} s"
    )
    return "\n".join(lines)
