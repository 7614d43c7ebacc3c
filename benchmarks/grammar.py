"""Grammars: which library, what a mask costs of a step, and how many steps a tool call takes.

    python benchmarks/grammar.py                       # all four, SmolLM2; two minutes on two quiet cores
    python benchmarks/grammar.py libraries             # llguidance beside xgrammar (pip install xgrammar)
    python benchmarks/grammar.py overhead calls        # on LocalEngine
    --smoke: a few of each, for CI

libraries: ms of work to read the tokenizer, to compile a schema, for a mask (mean, p95, worst) and for an accepted
           id, along documents of three schemas; and what each makes of random schemas: refused, or accepted
           though some of its documents are not valid (which is worse)
overhead:  all of the constraint's work (masks, cuts, forced ids, advances) as a share of the step it belongs
           to
calls:     steps per emitted token of SmolLM2's tool calls: without drafts; held to by a grammar, with and
           without its forced ids; and free after one example of another tool, with and without the schema's
           seeds
recorded:  tokens per step of recorded trajectories whose model was free to call tools or not (AGENTSPEC_TRACES),
           replayed with and without the seeds of their tools' schemas, each trajectory by itself
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from agentspec import LocalEngine, Trajectory
from agentspec.chat import Grammar, prepare
from agentspec.chat.compiled import CompiledGrammar
from agentspec.chat.formats import registry
from agentspec.chat.tools import Tools, skeletons
from agentspec.drafting import make_proposer
from agentspec.engines.base import GenerationRequest
from agentspec.errors import GrammarError
from agentspec.replay import Encoder, replay

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }
    for name, description, properties in [
        (
            "get_weather",
            "The weather forecast of a city.",
            {
                "city": {"type": "string", "maxLength": 24},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
        ),
        (
            "search_files",
            "Search the files of a directory for a text.",
            {
                "directory": {"type": "string", "maxLength": 24},
                "text": {"type": "string", "maxLength": 24},
                "case_sensitive": {"type": "boolean"},
            },
        ),
        (
            "create_ticket",
            "Create a ticket in the issue tracker.",
            {
                "title": {"type": "string", "maxLength": 40},
                "priority": {"type": "string", "enum": ["low", "normal", "high", "urgent"]},
                "component": {"type": "string", "enum": ["frontend", "backend", "documentation"]},
            },
        ),
    ]
]
QUESTIONS = [
    ("get_weather", "What will the weather be in Paris for the next 3 days, in celsius?"),
    ("search_files", "Find the word TODO in the directory src, whatever its case."),
    ("create_ticket", "Open an urgent ticket for the backend: login fails."),
    ("get_weather", "How warm will it be in Oslo next week, in fahrenheit?"),
    ("search_files", "Where in docs do we mention Jaeger?"),
    ("create_ticket", "Please file a low priority ticket: the README has a typo."),
]


# ---- libraries -----------------------------------------------------------------------------------


class LLGuidance:
    name = "llguidance"

    def __init__(self, tokenizer: Any, size: int) -> None:
        import llguidance.hf
        import llguidance.numpy

        self._ids = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
        self._bits = llguidance.numpy.allocate_token_bitmask(1, size)

    def compile(self, schema: Any) -> Any:
        from llguidance import LLMatcher

        text = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        matcher = LLMatcher(self._ids, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> np.ndarray:
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return self._bits[0]

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_stopped())


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Any, size: int) -> None:
        import xgrammar

        self._x = xgrammar
        information = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        self._compiler = xgrammar.GrammarCompiler(information, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, size)

    def compile(self, schema: Any) -> Any:
        try:
            compiled = self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        except RuntimeError as error:
            raise GrammarError(str(error)) from error
        return self._x.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> np.ndarray:
        matcher.fill_next_token_bitmask(self._bits)
        return self._bits[0].numpy()

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_terminated())


def timed(
    function: Callable[..., Any], *arguments: Any, clock: Callable[[], float] = time.perf_counter
) -> tuple[Any, float]:
    before = clock()
    value = function(*arguments)
    return value, (clock() - before) * 1e3


def worked(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """ms of this process's own work: what else the machine does is left out."""
    return timed(function, *arguments, clock=time.process_time)


def documents() -> Iterator[tuple[str, Any, Any]]:
    call = TOOLS[0]["function"]
    yield "tool call", call["parameters"], {"city": "San José de los Remates", "unit": "celsius", "days": 3}
    item = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}},
            "price": {"type": "number"},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["id", "tags", "price", "when"],
        "additionalProperties": False,
    }
    row = {"id": 7, "tags": ["alpha", "beta gamma"], "price": 3.25, "when": "2024-05-06T07:08:09Z"}
    yield "nested list", {"type": "array", "items": item, "minItems": 2}, [row] * 4
    yield "any JSON", {}, {"a": [1, 2, {"b": "text with words"}], "c": None}


def libraries(tokenizer: Any, size: int, smoke: bool) -> None:
    print("\nlibraries (ms of work)", flush=True)
    eos = int(tokenizer.eos_token_id)
    for kind in (LLGuidance, XGrammar):
        try:
            library, reading = worked(kind, tokenizer, size)
        except ImportError:
            print(f"  {kind.name}: not installed (pip install {kind.name})")
            continue
        print(f"  {kind.name}: tokenizer {reading:.0f}")
        for name, schema, document in documents():
            matcher, compiling = worked(library.compile, schema)
            masks, accepts = [], []
            text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
            for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], eos]:
                bits, taken = worked(library.mask, matcher)
                masks.append(taken)
                assert int(bits[token // 32]) >> (token % 32) & 1, f"{kind.name} forbids a valid document"
                accepts.append(worked(library.accept, matcher, token)[1])
            print(
                f"    {name:12} compile {compiling:6.2f}   mask mean {statistics.fmean(masks):.3f} "
                f"p95 {sorted(masks)[int(0.95 * len(masks))]:.3f} worst {max(masks):.2f}   "
                f"accept {statistics.fmean(accepts):.4f}   ({len(masks)} ids)"
            )
        random_schemas(library, tokenizer, size, 20 if smoke else 150)


def random_schemas(library: Any, tokenizer: Any, size: int, count: int) -> None:
    """Random walks through random schemas, validated by jsonschema."""
    import jsonschema
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.chat.schemas import schemas

    seen = {"refused": 0, "valid": 0, "invalid": 0, "unfinished": 0}
    compiling: list[float] = []
    draw = random.Random(0)
    texts = [tokenizer.decode([i]) for i in range(size)]
    closing = [i for i, t in enumerate(texts) if t and t in '"}],0123456789']

    @seed(0)
    @given(schemas())
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def walk(schema: Any) -> None:
        try:
            matcher, taken = worked(library.compile, schema)
        except GrammarError:
            seen["refused"] += 1
            return
        compiling.append(taken)
        ids: list[int] = []
        while len(ids) < 120 and not library.ended(matcher):
            bits = np.unpackbits(np.ascontiguousarray(library.mask(matcher)).view(np.uint8), bitorder="little")
            may = np.flatnonzero(bits[:size])
            short = np.intersect1d(may, [*closing, tokenizer.eos_token_id])
            token = int(draw.choice(short if len(ids) > 30 and len(short) else may))
            library.accept(matcher, token)
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
        else:
            if not library.ended(matcher):
                seen["unfinished"] += 1
                return
        try:
            jsonschema.validate(json.loads(tokenizer.decode(ids)), schema)
            seen["valid"] += 1
        except (ValueError, jsonschema.ValidationError):
            seen["invalid"] += 1

    walk()
    print(f"    random schemas: {seen}, compile mean {statistics.fmean(compiling):.2f} worst {max(compiling):.1f}")


# ---- on the engine -------------------------------------------------------------------------------


class Measured:
    """A compiled grammar whose outputs add up what the constraint's work takes. forced: False: say nothing of
    it.
    """

    def __init__(self, compiled: CompiledGrammar, forced: bool = True) -> None:
        self._compiled = compiled
        self._forced = forced
        self.ms = 0.0

    def __call__(self) -> Any:
        constraint, forced = self._compiled(), self._forced

        class Timed:
            def __getattr__(_, name: str) -> Any:
                method = getattr(constraint, name)
                if name == "forced" and not forced:
                    return lambda most: ()

                def call(*arguments: Any) -> Any:
                    value, taken = timed(method, *arguments)
                    self.ms += taken
                    return value

                return call

        return Timed()


def overhead(engine: LocalEngine, smoke: bool) -> None:
    print("\noverhead: the constraint's share of a step")
    shares: dict[str, list[float]] = {}
    prompt = engine.tokenizer("List three items as JSON: ", add_special_tokens=False)["input_ids"]
    schemas = {name: schema for name, schema, _ in documents()}
    for _ in range(1 if smoke else 3):
        for name, schema in schemas.items():
            for draft in (False, True):
                compiled = engine.compile(Grammar.json_schema(schema))
                for temperature in (0.0, 0.8):
                    measured = Measured(compiled)
                    request = GenerationRequest.of(
                        input_ids=prompt,
                        constraint=measured,
                        draft=draft,
                        max_tokens=60,
                        temperature=temperature,
                        seed=1 if temperature else None,
                    )
                    stats = engine.generate(request).result().stats
                    label = f"{name}, {'drafts' if draft else 'no drafts'}"
                    shares.setdefault(label, []).append(measured.ms / (stats.duration_ms - stats.queue_ms))
    for label, values in shares.items():
        print(f"  {label:26} {100 * statistics.median(values):.2f} %  (worst {100 * max(values):.2f} %)")
    everything = [v for values in shares.values() for v in values]
    print(f"  all: {100 * statistics.fmean(everything):.2f} % of a step")


def example(question: str, name: str, arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


# Calls of tools that are not offered any more: the model has seen the format, not the offered tools' calls.
EXAMPLE = [
    *example("What time is it in UTC?", "get_time", '{"zone": "UTC", "format": "24h"}'),
    *example("Translate tree into French.", "translate", '{"text": "tree", "language": "fr"}'),
    *example("What is 3 plus 4?", "calculate", '{"expression": "3 + 4", "digits": 2}'),
]


def calls(engine: LocalEngine, smoke: bool) -> None:
    print("\ncalls: SmolLM2, steps per emitted token (greedy; each call in a new trajectory)")
    totals: dict[str, list[int]] = {}
    asked = QUESTIONS[:2] if smoke else QUESTIONS

    def count(label: str, generation: Any) -> Any:
        result = generation.result()
        sums = totals.setdefault(label, [0, 0, 0, 0])
        written = result.message.get("tool_calls") or []
        for place, value in enumerate(
            (
                result.stats.verify_steps,
                result.stats.output_tokens,
                result.stats.accepted_by_source.get("schema", 0),
                len(written),
            )
        ):
            sums[place] += value
        return result

    for name, question in asked:
        chat = [{"role": "user", "content": question}]
        options = {"tools": TOOLS, "tool_choice": name, "max_tokens": 100}
        plain = count("grammar, no drafts", engine.chat(chat, draft=False, trajectory=Trajectory(), **options))
        held = count("grammar", engine.chat(chat, trajectory=Trajectory(), **options))
        assert held.token_ids == plain.token_ids
        # the same without what the grammar forces: the schema's seeds and the prompt alone draft
        prepared = prepare(engine.template, chat, tools=TOOLS, tool_choice=name)
        measured = Measured(engine.compile(prepared.grammar), forced=False)
        free = {"tools": TOOLS, "constraint": measured, "max_tokens": 100}
        seeded = count("grammar, forced ids not told", engine.chat(chat, trajectory=Trajectory(), **free))
        request = GenerationRequest.of(
            input_ids=prepared.prompt.input_ids,
            spans=prepared.prompt.spans,
            trajectory=Trajectory(),
            constraint=measured,
            max_tokens=100,
        )
        unseeded = count("  and no schema seeds", engine.generate(request))
        assert seeded.token_ids == plain.token_ids == unseeded.token_ids
        with_example = [*EXAMPLE, *chat]
        options = {"tools": TOOLS, "max_tokens": 60}
        plain = count("free, no drafts", engine.chat(with_example, draft=False, trajectory=Trajectory(), **options))
        drafted = count("free, schema seeds", engine.chat(with_example, trajectory=Trajectory(), **options))
        prepared = prepare(engine.template, with_example, tools=TOOLS)
        bare = replace(prepared, seeds=())
        request = GenerationRequest.of(
            input_ids=bare.prompt.input_ids, spans=bare.prompt.spans, trajectory=Trajectory(), max_tokens=60
        )
        unseeded = count("free, no schema seeds", engine.generate(request))
        assert drafted.token_ids == plain.token_ids == unseeded.token_ids
    print(f"  {'':30} steps/token   tokens  steps  of them from the schema  calls")
    for label, (steps, tokens, schema, written) in totals.items():
        print(f"  {label:30} {steps / tokens:8.3f} {tokens:11} {steps:6} {schema:12} {written:15}")


def recorded(engine: LocalEngine, smoke: bool) -> None:
    from benchmarks.traces import load

    print("\nrecorded: tokens per step, replayed, at most 16 drafted at every step, own trajectory only")
    format = registry.get("hermes")
    encoder = Encoder(engine.tokenizer)
    ids: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    def seeds(recording: Any) -> list[list[int]]:
        """As chat's prepare() makes them: a call's beginning follows the prompt's last ids."""
        known = json.dumps(recording.tools)
        if known not in ids:
            begins, texts = skeletons(format, Tools.of([_declared(tool) for tool in recording.tools or ()]))
            ids[known] = ([encoder.piece(t).tolist() for t in begins], [encoder.piece(t).tolist() for t in texts])
        tail = encoder.piece("<|im_start|>assistant\n").tolist()
        return [tail + begin for begin in ids[known][0]] + ids[known][1]

    for family in ("tau", "toolapi"):
        recordings = load([family], 10 if smoke else None)[family]
        for proposer in ("match", "mixture"):
            reports = [
                replay(
                    recordings, encoder, partial(make_proposer, proposer), fixed=True, shared=False, oracle=False,
                    seeds=chosen,
                )
                for chosen in (None, seeds)
            ]  # fmt: skip
            without, given = (report.totals()["tokens_per_step"] for report in reports)
            first = [
                report.totals([row for row in report.rows if row.call < 3])["tokens_per_step"] for report in reports
            ]
            print(
                f"  {family:8} {proposer:8} {without:.3f} -> {given:.3f} ({100 * (given / without - 1):+.2f} %); "
                f"the first three calls {first[0]:.3f} -> {first[1]:.3f} ({100 * (first[1] / first[0] - 1):+.2f} %)"
            )


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    return tool if "function" in tool else {"type": "function", "function": tool}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["libraries", "overhead", "calls", "recorded", []], default=[])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--smoke", action="store_true")
    chosen = parser.parse_args()
    parts = chosen.parts or ["libraries", "overhead", "calls", "recorded"]
    with LocalEngine(chosen.model) as engine:
        if "libraries" in parts:
            libraries(engine.tokenizer, engine.vocabulary, chosen.smoke)
        if "overhead" in parts:
            overhead(engine, chosen.smoke)
        if "calls" in parts:
            calls(engine, chosen.smoke)
        if "recorded" in parts:
            recorded(engine, chosen.smoke)


if __name__ == "__main__":
    main()
