"""`agentspec demo`: a document agent of nine calls on a real model, plain and with agentspec side by side.

SmolLM2-135M can quote prose; it can't plan. So the plan (which tool, which question) is scripted here, after two
worked examples, and said so in the output; the tools, the texts, the model and its answers are real. Every call runs
twice, plain and with drafts, one right after the other, on the same engine but in trajectories of their own; the
texts have to be equal. Called by cli. Imports the engine only when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import functools
import importlib.metadata
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agentspec
from agentspec import telemetry
from agentspec.engines.models import notice, waiting
from agentspec.errors import InvalidRequestError
from agentspec.loop import tool, trajectory

if TYPE_CHECKING:
    from agentspec.engines.base import GenerationResult
    from agentspec.engines.local import LocalEngine

__all__ = ["add_arguments", "run"]

_PROSE = (".md", ".txt", ".rst")
_EXCERPT = 1000  # characters of a paragraph: about 220 tokens, so that nine calls fit a small context


# ---- the agent's tools: real ones, over real files ----------------------------------------------


class Documents:
    """A directory's prose files (or, without a checkout, the installed README)."""

    def __init__(self, directory: Path | None) -> None:
        if directory is not None:
            if not directory.is_dir():
                raise InvalidRequestError(f"--docs {directory}: needed a directory with {', '.join(_PROSE)} files")
            found = {
                p.relative_to(directory).as_posix(): p for p in sorted(directory.rglob("*")) if _is_prose(p, directory)
            }
            self.files = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in found.items()}
        else:
            self.files = _own_prose()
        self.files = {name: text for name, text in self.files.items() if len(_paragraphs(text)) >= 2}
        if not self.files:
            raise InvalidRequestError(
                f"--docs {directory}: needed at least one {', '.join(_PROSE)} file with two paragraphs of prose"
            )

    @tool
    def list_files(self) -> str:
        return "\n".join(f"{name}: {len(text.split())} words" for name, text in self.files.items())

    @tool
    def read_paragraph(self, name: str, number: int) -> str:
        """The file's prose paragraph of that number, from 1; the last one if there are fewer."""
        paragraphs = _paragraphs(self.files[name])
        return paragraphs[min(number, len(paragraphs)) - 1][:_EXCERPT]

    @tool
    def search(self, word: str) -> str:
        """The sentences that have the word, at most three, each with its file's name."""
        hits = []
        for name, text in self.files.items():
            for paragraph in _paragraphs(text):
                for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
                    if word.lower() in sentence.lower():
                        hits.append(f"{name}: {sentence[:300]}")
        return "\n".join(hits[:3]) or "no match"


def _is_prose(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and path.suffix.lower() in _PROSE and not hidden and path.stat().st_size < 1 << 20


def _own_prose() -> dict[str, str]:
    root = Path(agentspec.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        paths = [root / "README.md", root / "docs" / "how-it-works.md", root / "docs" / "limits.md"]
        return {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in paths if p.is_file()}
    readme: Any = importlib.metadata.metadata("agentspec-decoding")
    return {"README.md": str(readme.get_payload())}


def _paragraphs(text: str) -> list[str]:
    """The text's paragraphs of plain prose: no headings, tables, lists or code, in one line each."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [b for b in blocks if len(b.split()) >= 25 and b[0].isalpha() and "|" not in b]


def _word_of(paragraph: str) -> str:
    words: list[str] = re.findall(r"[A-Za-z]{4,}", paragraph)
    return max(words, key=lambda word: (len(word), word))


# ---- the scripted plan ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What the agent does before a call: the tool it uses (a label), the tool's result, and its question."""

    action: str
    result: str
    question: str
    max_tokens: int


_REPEAT = "Repeat this text exactly:\n\n"
# Two turns that show a small model what is wanted: without them SmolLM2 comments on texts instead of quoting them.
_EXAMPLES = (
    "The river runs past the mill. In spring the water is high.",
    "bread.txt: 120 words\nmilk.txt: 45 words",
)


def _plan(documents: Documents) -> Iterator[Step]:
    """Nine calls: seven that quote a tool's result, two that have nothing to copy."""
    main = max(documents.files, key=lambda name: sum(map(len, _paragraphs(documents.files[name]))))
    short = Path(main).name
    one, two = documents.read_paragraph(main, 1), documents.read_paragraph(main, 3)
    yield Step(f"read_paragraph({short}, 1)", one, _REPEAT, 220)
    yield Step("list_files()", documents.list_files(), _REPEAT, 100)
    yield Step(f"read_paragraph({short}, 3)", two, _REPEAT, 220)
    word = _word_of(two)
    yield Step(f"search({word})", documents.search(word), _REPEAT, 220)
    yield Step(f"read_paragraph({short}, 4)", documents.read_paragraph(main, 4), _REPEAT, 220)
    yield Step(f"read_paragraph({short}, 3)", documents.read_paragraph(main, 3), _REPEAT, 220)
    yield Step("", "", "What are these texts about? Answer in one sentence.", 60)
    yield Step("the notes so far", f"{one}\n\n{two}", _REPEAT, 300)
    yield Step("", "", "Write a short poem about the sea.", 60)


# ---- running and showing -------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, a Hugging Face id, a directory or a GGUF file")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="prose files to work on (default: the project's own)")
    parser.add_argument("--proposer", default=None, help="which proposer drafts (default: the engine's)")
    parser.add_argument(
        "--otlp", nargs="?", const="", metavar="URL",
        help="send spans and metrics to a collector (default: what OTEL_EXPORTER_OTLP_ENDPOINT says, else localhost)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of the table")


@dataclass(slots=True)
class _Pair:
    step: Step
    plain: GenerationResult
    drafted: GenerationResult

    @property
    def equal(self) -> bool:
        return self.plain.token_ids == self.drafted.token_ids


def run(args: argparse.Namespace) -> int:
    """The demo. Returns 0, or 1 if any text differs between plain decoding and agentspec."""
    documents = Documents(args.docs)
    if args.otlp is not None:
        telemetry.configure(endpoint=args.otlp or None)
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    say(
        f"A document agent works through {len(documents.files)} file(s): {', '.join(documents.files)}.\n"
        f"The plan is scripted (a 135M model can't plan); tools, texts, model and answers are real.\n"
        f"Every call runs twice: plain decoding, and agentspec. Loading {args.model} ..."
    )
    with waiting(notice, "importing torch and transformers"):
        from agentspec.engines.local import LocalEngine

    options = {"proposer": args.proposer} if args.proposer else {}
    with LocalEngine(args.model, **options) as engine:
        curve = engine.cost_curve
        widths = ", ".join(f"v({n}) = {v:.2f}" for n, v in curve.points.items() if n > 1)
        say(f"One forward takes {curve.base_ms or 0:.0f} ms for one token; {widths}.\n")
        if not args.json:
            say(_HEADER)
        pairs = []
        for number, pair in enumerate(_calls(engine, documents), start=1):
            pairs.append(pair)
            if not args.json:
                say(_row(number, pair))
    unequal = [number for number, pair in enumerate(pairs, start=1) if not pair.equal]
    totals = _totals(pairs)
    if args.json:
        print(json.dumps(_report(args, curve, pairs, totals, unequal), indent=2))
    else:
        print(_summary(totals, unequal))
        for number in (3, 7):
            pair = pairs[number - 1]
            print(f"\nCall {number}, {pair.step.action or pair.step.question}\n  {pair.drafted.text.strip()[:400]}")
    return 1 if unequal else 0


def _calls(engine: LocalEngine, documents: Documents) -> Iterator[_Pair]:
    # Two trajectories side by side, each in a context of its own. Tools run in the drafting one, so that @tool seeds
    # what they return; the plain one is given the same results and drafts nothing.
    contexts = {draft: contextvars.copy_context() for draft in (False, True)}
    histories: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        for draft, context in contexts.items():
            opened = trajectory(name="demo" if draft else "demo (plain)", namespace=False)
            context.run(opened.__enter__)
            stack.callback(context.run, opened.__exit__, None, None, None)
            for example in _EXAMPLES:
                histories[draft].append({"role": "user", "content": _REPEAT + example})
                histories[draft].append({"role": "assistant", "content": example})
        plan = _plan(documents)
        number = 0
        while (step := contexts[True].run(next, plan, None)) is not None:
            results = {}
            for draft in (False, True) if number % 2 == 0 else (True, False):
                history = histories[draft]
                history.append({"role": "user", "content": step.question + step.result})
                generation = contexts[draft].run(engine.chat, history, max_tokens=step.max_tokens, draft=draft)
                results[draft] = generation.result()
                history.append(results[draft].message)
            number += 1
            yield _Pair(step, results[False], results[True])


_HEADER = (
    f"{'call':>4}  {'what':26} {'prompt':>6} {'reused':>6} {'tokens':>6} {'steps':>5} {'tok/step':>8} {'accepted':>10} "
    f"{'TTFT ms':>15} {'ITL ms':>13}  {'time':>6}  not drafted"
)


def _row(number: int, pair: _Pair) -> str:
    a, b = pair.plain.stats, pair.drafted.stats
    what = pair.step.action or pair.step.question
    what = what if len(what) <= 26 else what[:25] + "…"
    accepted = f"{b.accepted}/{b.proposed}"
    ttft = f"{a.ttft_ms or 0:.0f} -> {b.ttft_ms or 0:.0f}"
    itl = f"{a.itl_mean_ms or 0:.0f} -> {b.itl_mean_ms or 0:.0f}"
    reasons = ", ".join(f"{reason} {count}x" for reason, count in b.not_drafted.items())
    equal = "" if pair.equal else "  TEXT DIFFERS"
    return (
        f"{number:>4}  {what:26} {b.prompt_tokens:>6} {b.reused_tokens:>6} {b.output_tokens:>6} {b.verify_steps:>5} "
        f"{b.tokens_per_step or 0:>8.2f} {accepted:>10} {ttft:>15} {itl:>13}  {a.duration_ms / b.duration_ms:>5.2f}x  "
        f"{reasons}{equal}"
    )


def _totals(pairs: list[_Pair]) -> dict[str, Any]:
    plain, drafted = [p.plain.stats for p in pairs], [p.drafted.stats for p in pairs]
    tokens, steps = sum(s.output_tokens for s in drafted), sum(s.verify_steps for s in drafted)
    seconds = sum(s.duration_ms for s in plain) / 1e3, sum(s.duration_ms for s in drafted) / 1e3
    itl = [statistics.fmean([s.itl_mean_ms for s in side if s.itl_mean_ms]) for side in (plain, drafted)]
    return {
        "output_tokens": tokens,
        "plain_steps": sum(s.verify_steps for s in plain),
        "verify_steps": steps,
        "tokens_per_step": tokens / steps,
        "proposed": sum(s.proposed for s in drafted),
        "accepted": sum(s.accepted for s in drafted),
        "plain_seconds": seconds[0],
        "agentspec_seconds": seconds[1],
        "chain_speedup": seconds[0] / seconds[1],
        "plain_itl_ms": itl[0],
        "agentspec_itl_ms": itl[1],
        "break_even_tokens_per_step": statistics.fmean([s.mean_cost for s in drafted]),
    }


def _summary(totals: dict[str, Any], unequal: list[int]) -> str:
    verdict = (
        "Every text is the same, token for token."
        if not unequal
        else f"TEXTS DIFFER in call(s) {', '.join(map(str, unequal))}: please report this."
    )
    return (
        f"\nThe chain: {totals['output_tokens']} tokens in {totals['verify_steps']} verify steps instead of "
        f"{totals['plain_steps']} ({totals['tokens_per_step']:.2f} tokens a step, break-even at "
        f"{totals['break_even_tokens_per_step']:.2f});\n"
        f"{totals['plain_seconds']:.1f} s plain, {totals['agentspec_seconds']:.1f} s with agentspec: "
        f"{totals['chain_speedup']:.2f} times as fast, prefill included. {verdict}"
    )


def _report(
    args: argparse.Namespace, curve: Any, pairs: list[_Pair], totals: dict[str, Any], unequal: list[int]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "cost_curve": {"points": curve.points, "base_ms": curve.base_ms},
        "calls": [
            {
                "action": pair.step.action,
                "question": pair.step.question,
                "text": pair.drafted.text,
                "equal": pair.equal,
                "plain": pair.plain.stats.to_dict(),
                "agentspec": pair.drafted.stats.to_dict(),
            }
            for pair in pairs
        ],
        "chain": totals,
        "unequal_calls": unequal,
    }
