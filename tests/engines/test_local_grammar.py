"""LocalEngine under grammars and drafts: always valid or a typed error, and the output of plain decoding.

TORTURE.md: "grammar + drafts crash, or invalid JSON", "short n-gram copies corrupt tool calls".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.chat import Grammar, formats
from agentspec.drafting import CostCurve
from agentspec.engines.base import GenerationRequest, GenerationResult
from agentspec.engines.local import LocalEngine
from agentspec.errors import GrammarError, InvalidRequestError
from agentspec.loop import Trajectory
from tests import tiny
from tests.chat.schemas import schemas
from tests.engines.proposers import ScriptedProposer

fast = pytest.mark.fast
PROMPT = tiny.tokenizer()("The quick brown fox reads").input_ids
SIZE = len(tiny.tokenizer())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 8},
                    "lines": {"type": "integer", "minimum": 0, "maximum": 999},
                    "mode": {"type": "string", "enum": ["text", "bytes"]},
                },
                "required": ["path", "mode"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Guess:
    """Drafts the truth with faults strewn in, as chains and as trees: what a script says of known outputs."""

    def __init__(self) -> None:
        self.truth: list[int] = []
        self.start = 0
        self.draw = np.random.default_rng(0)

    def __call__(self, context: np.ndarray, limits: Any) -> tuple[list[int], list[int] | None]:
        place = len(context) - self.start
        ahead = self.truth[place : place + int(self.draw.integers(0, 9))]
        tokens = [int(t) if self.draw.random() < 0.8 else int(self.draw.integers(SIZE)) for t in ahead]
        if not limits.tree or self.draw.random() < 0.5:
            return tokens, None
        parents = list(range(-1, len(tokens) - 1))
        for _ in range(4):
            parents.append(int(self.draw.integers(-1, len(tokens) or 1)))
            tokens.append(int(self.draw.integers(SIZE)))
        return tokens, [min(p, n - 1) for n, p in enumerate(parents)]


class Pair:
    """One model twice: with drafts of any kind, and without."""

    def __init__(self, make: Callable[..., LocalEngine], **options: Any) -> None:
        self.guess = Guess()
        self.drafting = make(proposer=ScriptedProposer(self.guess), cost_curve=CostCurve.linear(0.01), **options)
        self.plain = make(max_draft=0, cost_curve=CostCurve.linear(0.01), **options)

    def generate(self, grammar: Grammar, **options: Any) -> GenerationResult:
        """The result, the same from both."""
        return self.both(
            lambda engine: engine.generate(
                GenerationRequest.of(input_ids=PROMPT, constraint=engine.compile(grammar), **options)
            )
        )

    def chat(self, **options: Any) -> GenerationResult:
        return self.both(lambda engine: engine.chat([{"role": "user", "content": "Read it."}], **options))

    def both(self, call: Callable[[LocalEngine], Any]) -> GenerationResult:
        generation = call(self.plain)
        expected = generation.result()
        self.guess.truth, self.guess.start = list(expected.token_ids), len(generation.request.input_ids)
        got = call(self.drafting).result()
        assert got.token_ids == expected.token_ids and got.text == expected.text
        assert got.finish_reason == expected.finish_reason
        assert anonymous(got.message) == anonymous(expected.message)
        return got


def anonymous(message: dict[str, Any]) -> Any:
    return json.loads(json.dumps(message), object_hook=lambda o: {k: v for k, v in o.items() if k != "id"})


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made: list[LocalEngine] = []

    def make(**options: Any) -> LocalEngine:
        made.append(LocalEngine(tiny.model("llama"), tokenizer=tiny.tokenizer(), **options))
        return made[-1]

    yield Pair(make)
    for engine in made:
        engine.close()


samplings = st.sampled_from(
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20, "min_p": 0.05},
    ]
)


def holds(pair: Pair, schema: dict[str, Any], seed: int, sampling: dict[str, Any], most: int) -> bool:
    """Generate under a schema, with and without drafts: valid, or the beginning of what is, or refused."""
    options = {**sampling, "seed": seed} if sampling else {}
    try:
        got = pair.generate(Grammar.json_schema(schema), max_tokens=most, **options)
    except GrammarError:
        return False
    if got.finish_reason == "stop":
        jsonschema.validate(json.loads(got.text), schema)
    else:
        assert got.finish_reason == "length" and len(got.token_ids) == most
    return True


@fast
@given(schema=schemas(), seed=st.integers(0, 2**32), sampling=samplings)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_schemas(pair: Pair, schema: dict[str, Any], seed: int, sampling: dict[str, Any]) -> None:
    holds(pair, schema, seed, sampling, 48)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_five_hundred_random_schemas(pair: Pair) -> None:
    """AGENTSPEC_SCHEMAS: how many. Greedy and seeded; prints how many were refused."""
    count = int(os.environ.get("AGENTSPEC_SCHEMAS", 500))
    seen = {"held": 0, "refused": 0}

    @given(schema=schemas(), seed=st.integers(0, 2**32), sampling=samplings)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(schema: dict[str, Any], seed: int, sampling: dict[str, Any]) -> None:
        seen["held" if holds(pair, schema, seed, sampling, 120) else "refused"] += 1

    check()
    print(seen)
    assert seen["held"] > 9 * seen["refused"]


@fast
@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("choice", ["required", "read_file"])
def test_required_calls_of_every_format(name: str, choice: str) -> None:
    def make(**options: Any) -> LocalEngine:
        return LocalEngine(tiny.model("llama"), tokenizer=tiny.tokenizer(), tool_format=name, **options)

    both = Pair(make)
    try:
        for options in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4}):
            got = both.chat(tools=TOOLS, tool_choice=choice, max_tokens=200, parallel_tool_calls=False, **options)
            message = got.message
            assert got.finish_reason == "stop", got.text
            assert message["content"] == "" and "invalid_tool_calls" not in message
            [call] = message["tool_calls"]
            schemas_by_name = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}
            assert choice == "required" or call["function"]["name"] == choice
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas_by_name[call["function"]["name"]])
    finally:
        both.plain.close()
        both.drafting.close()


@fast
def test_forced_text_takes_no_steps_of_its_own(pair: Pair) -> None:
    grammar = Grammar.choice(["An agent reads a file, searches it, and writes what it has read."])
    got = pair.generate(grammar)
    assert got.text.startswith("An agent reads") and got.finish_reason == "stop"
    assert got.stats.verify_steps <= 2 < len(got.token_ids)
    assert got.stats.accepted_by_source["schema"] == len(got.token_ids) - got.stats.verify_steps
    assert pair.drafting.proposer.drafts == [] or got.stats.mismatches == 0


@fast
def test_forced_text_does_not_make_the_drafts_around_it_timid(pair: Pair) -> None:
    """lambda, the price of a draft, stays what the free steps gain: here one token each."""
    trajectory = Trajectory()
    engine = pair.drafting
    pair.guess.truth = []
    grammar = Grammar.regex(
        "The quick brown fox jumps over the lazy dog[a-c] The lazy dog sleeps; the quick fox runs on[a-c]"
    )
    request = GenerationRequest.of(input_ids=PROMPT, constraint=engine.compile(grammar), trajectory=trajectory)
    got = engine.generate(request).result()
    assert got.stats.accepted_by_source["schema"] > 10 and got.stats.verify_steps < 6
    policy = engine._states.get(trajectory).policy
    assert policy is not None and policy.rate == pytest.approx(1.0, abs=0.05)


@fast
def test_a_document_that_max_tokens_breaks_off_is_a_beginning_and_says_length(pair: Pair) -> None:
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "minLength": 40}},
        "required": ["path"],
    }
    got = pair.generate(Grammar.json_schema(schema), max_tokens=12)
    assert got.finish_reason == "length" and len(got.token_ids) == 12
    assert got.text.startswith('{"path": "') and not got.text.endswith("}")
    call = pair.chat(tools=TOOLS, tool_choice="read_file", max_tokens=22)
    assert call.finish_reason == "length" and "tool_calls" not in call.message
    [broken] = call.message["invalid_tool_calls"]
    assert broken["name"] == "read_file" and broken["args"] and broken["args"] in call.text


@fast
def test_every_choice_of_several_is_valid_and_drawn_anew(pair: Pair) -> None:
    grammar = Grammar.regex("[a-z]{3,9}")
    call = lambda engine: engine.generate(  # noqa: E731
        GenerationRequest.of(input_ids=PROMPT, constraint=engine.compile(grammar), n=4, temperature=1.0, seed=5)
    )
    expected = [r.text for r in call(pair.plain).results()]
    pair.guess.truth = []
    assert [r.text for r in call(pair.drafting).results()] == expected
    assert all(3 <= len(t) <= 9 and t.isalpha() for t in expected) and len(set(expected)) > 1


@fast
@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": ["a"]},
        {"logit_bias": {i: -float("inf") for i in tiny.tokenizer()("a").input_ids}},
        {"bad_words": ["a"], "temperature": 1.0, "seed": 1},
    ],
)
def test_an_option_that_leaves_nothing_is_a_typed_error_and_the_next_call_is_served(
    pair: Pair, options: dict[str, Any]
) -> None:
    for engine in (pair.plain, pair.drafting):
        pair.guess.truth = []
        request = GenerationRequest.of(
            input_ids=PROMPT, constraint=engine.compile(Grammar.regex("a")), max_tokens=4, **options
        )
        with pytest.raises(GrammarError, match="option"):
            engine.generate(request).result()
    assert pair.generate(Grammar.regex("a")).text == "a"


@fast
def test_a_stop_text_ends_a_document_early_as_without_drafts(pair: Pair) -> None:
    grammar = Grammar.regex("([a-c] ){20}")
    got = pair.generate(grammar, stop=["b"], temperature=1.0, seed=2)
    assert "b" not in got.text and got.finish_reason == "stop"


@fast
def test_penalties_and_min_tokens_see_the_grammar(pair: Pair) -> None:
    grammar = Grammar.regex("[ab]{1,30}")
    for seed in range(4):
        got = pair.generate(
            grammar, min_tokens=8, presence_penalty=0.5, repetition_penalty=1.2, temperature=1.0, seed=seed
        )
        assert set(got.text) <= set("ab") and len(got.token_ids) >= 8


@fast
def test_an_aborted_document_leaves_the_trajectory_whole(pair: Pair) -> None:
    trajectory = Trajectory()
    engine = pair.drafting
    pair.guess.truth = []
    generation = engine.generate(
        GenerationRequest.of(
            input_ids=PROMPT, constraint=engine.compile(Grammar.regex("[ab]{500}")), trajectory=trajectory
        )
    )
    next(generation)
    generation.abort()
    again = engine.generate(
        GenerationRequest.of(
            input_ids=PROMPT, constraint=engine.compile(Grammar.regex("[ab]{5}")), trajectory=trajectory
        )
    ).result()
    assert len(again.text) == 5 and again.stats.reused_tokens == len(PROMPT) - 1
    engine.memory(trajectory).check()


@fast
def test_a_grammar_and_a_constraint_of_ones_own_exclude_each_other(pair: Pair) -> None:
    constraint = pair.plain.compile(Grammar.regex("a"))
    with pytest.raises(InvalidRequestError, match="both"):
        pair.plain.chat([{"role": "user", "content": "x"}], grammar=Grammar.regex("a"), constraint=constraint)
    with pytest.raises(GrammarError, match="uniqueItems"):
        schema = {"type": "array", "uniqueItems": True}
        pair.plain.chat([{"role": "user", "content": "x"}], grammar=Grammar.json_schema(schema))


# ---- SmolLM2 -------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_smollm2_random_schemas_and_tool_calls(smollm2: LocalEngine) -> None:
    """Some of the nightly's schemas, greedy and seeded, and a required call, with and without drafts."""
    count = int(os.environ.get("AGENTSPEC_SCHEMAS", 12))
    refused = 0

    def run(draft: bool, schema: dict[str, Any], **options: Any) -> GenerationResult:
        chat = [{"role": "user", "content": "Answer in JSON: what is in notes.txt?"}]
        return smollm2.chat(chat, grammar=Grammar.json_schema(schema), draft=draft, max_tokens=48, **options).result()

    @given(schema=schemas(), seed=st.integers(0, 2**32), sampling=samplings)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(schema: dict[str, Any], seed: int, sampling: dict[str, Any]) -> None:
        nonlocal refused
        options = {**sampling, "seed": seed} if sampling else {}
        try:
            got, expected = run(True, schema, **options), run(False, schema, **options)
        except GrammarError:
            refused += 1
            return
        assert got.token_ids == expected.token_ids
        if got.finish_reason == "stop":
            jsonschema.validate(json.loads(got.text), schema)

    check()
    assert refused <= count // 4
    chat = [{"role": "user", "content": "Read the file notes.txt as text."}]
    for options in ({}, {"temperature": 0.8, "seed": 1}):
        got, expected = (
            smollm2.chat(chat, tools=TOOLS, tool_choice="read_file", draft=draft, max_tokens=80, **options).result()
            for draft in (True, False)
        )
        assert got.token_ids == expected.token_ids
        [call] = got.message["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])
        assert got.stats.verify_steps < expected.stats.verify_steps / 2
