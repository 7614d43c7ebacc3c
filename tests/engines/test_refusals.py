"""What can't be served is an InvalidRequestError that names it: wrong kinds, half characters, options of the engine."""

from __future__ import annotations

import math
from typing import Any

import filelock
import numpy as np
import pytest
import torch

import agentspec
from agentspec.chat import Grammar
from agentspec.drafting import CostCurve
from agentspec.engines import conversion, models
from agentspec.engines.base import GenerationRequest
from agentspec.engines.local import LocalEngine
from agentspec.errors import GrammarError, InvalidRequestError, ModelLoadError
from agentspec.loop import Trajectory
from agentspec.memory import Span
from tests import tiny

pytestmark = pytest.mark.fast


class Odd(str):
    """A text that can be read, but not in its own words."""

    def encode(self, *_: Any) -> bytes:
        raise LookupError("no bytes")


HALF = "be\ud800fore"
USER = {"role": "user", "content": "Read notes.txt, please."}
CURVE = CostCurve.linear(0.1)
NEVER = -math.inf


@pytest.fixture(scope="module")
def engine() -> Any:
    with LocalEngine(tiny.model(), tokenizer=tiny.tokenizer(), cost_curve=CURVE) as made:
        yield made


def refused(pattern: str) -> Any:
    return pytest.raises(InvalidRequestError, match=pattern)


# ---- of a wrong kind ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trajectory", "x"), ("trajectory", 5), ("spans", 5), ("spans", [1, 2]), ("spans", [Span("a", "b")]),
        ("logit_bias", {5: 10**400}), ("logit_bias", {5: 1e39}), ("constraint", "x"),
        ("grammar", "x"), ("grammar", 5), ("template_options", "x"), ("template_options", {5: 1}),
        ("template_options", {"chat_template": "x"}), ("template_options", {"messages": []}),
        ("template_options", {"tokenize": True}), ("template_options", {"tools": []}),
        ("tool_choice", {"function": 5}), ("bad_words", [HALF]), ("stop", HALF),
    ],
)  # fmt: skip
def test_options_of_a_chat(engine: Any, name: str, value: Any) -> None:
    with refused(name):
        engine.chat([USER], **{name: value})


def test_a_long_name_is_cut(engine: Any) -> None:
    with refused("unknown option 'xxx") as told:
        engine.chat([USER], **{"x" * 100_000: 2})
    assert len(str(told.value)) < 500


def test_a_text_is_read_as_the_text_it_is(engine: Any) -> None:
    """A tool may return a subclass of str whose methods fail: neither its seed nor the call with it does."""

    @agentspec.tool
    def look() -> str:
        return Odd("found it")

    with agentspec.trajectory() as mine:
        chat = [USER, {"role": "tool", "content": look()}]
        odd = engine.chat(chat, max_tokens=4).result()
    assert [type(seed.content) for seed in mine.seeds_from(0)] == [str]
    plain = engine.chat([USER, {"role": "tool", "content": "found it"}], max_tokens=4).result()
    assert odd.token_ids == plain.token_ids


@pytest.mark.parametrize("value", [None, {"input_ids": [1]}, [1, 2], "text"])
def test_generate_takes_requests(engine: Any, value: Any) -> None:
    with refused("needed a GenerationRequest"):
        engine.generate(value)


@pytest.mark.parametrize("ids", ["text", b"text", None, 5, [[1], [1, 2]], [[1, 2]], [1.5], ["a"], [10**400], [None]])
def test_input_ids(engine: Any, ids: Any) -> None:
    with refused("input_ids"):
        engine.generate(GenerationRequest(input_ids=ids))


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 10**400}, {"max_tokens": 10**5000}, {"top_logprobs": 10**400},
        {"stop_token_ids": [10**400]}, {"logit_bias": {10**5000: 1.0}}, {"bad_words": [[10**400]]},
        {"min_tokens": 10**400, "max_tokens": 10**399},
    ],
)  # fmt: skip
def test_numbers_beyond_any_model(engine: Any, options: dict[str, Any]) -> None:
    with refused(next(iter(options))) as told:
        engine.generate(GenerationRequest(input_ids=[1], **options))
    assert len(str(told.value)) < 300


def test_the_k_of_all_ids_and_more_is_all(engine: Any) -> None:
    said = [
        engine.generate(GenerationRequest(input_ids=[1], max_tokens=8, temperature=1.0, seed=1, top_k=k))
        .result()
        .token_ids
        for k in (0, engine.vocabulary, 10**400)
    ]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("ids", [(5, 6), np.array([5, 6]), torch.tensor([5, 6])])
def test_input_ids_of_other_kinds_are_fine(engine: Any, ids: Any) -> None:
    assert len(engine.generate(GenerationRequest(input_ids=ids, max_tokens=2, ignore_eos=True)).result().token_ids) == 2


@pytest.mark.parametrize("calls", [5, "x", {"a": 1}, [5], [{"function": 5}]])
def test_tool_calls(engine: Any, calls: Any) -> None:
    with refused(r"messages\[1\]"):
        engine.chat([USER, {"role": "assistant", "tool_calls": calls}, USER])


@pytest.mark.parametrize("field", ["id", "namespace", "name"])
@pytest.mark.parametrize("value", [5, [], "", "a\0b"])
def test_a_trajectory_complains_where_it_is_made(field: str, value: Any) -> None:
    with refused(field):
        Trajectory(**{field: value})
    with refused(field) as told:
        Trajectory(**{field: 10**5000})
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    "content", [[1.7], [math.inf], [math.nan], ["a"], b"bytes", [-1], [-(10**5000)], [0.5, 10**5000], 5, None]
)
def test_seeds(content: Any) -> None:
    with agentspec.trajectory() as mine, refused("seed"):
        agentspec.seed(content)
    assert mine.seeds_from(0) == []


def test_a_constraint_that_is_none(engine: Any) -> None:
    for made in (None, 5):
        with refused("constraint"):
            engine.chat([USER], constraint=lambda made=made: made, max_tokens=2).result()
    assert engine.chat([USER], max_tokens=2).result()


# ---- half characters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": HALF}],
        [{"role": "user", "content": [{"type": "text", "text": HALF}]}],
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": HALF}}}]}, USER],
        [{"role": HALF, "content": "x"}],
    ],
)
def test_half_a_character_in_messages(engine: Any, messages: Any) -> None:
    with refused("surrogate pair"):
        engine.chat(messages, max_tokens=2)


def test_half_a_character_in_tools_and_grammars(engine: Any) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [HALF]}}}}
    with refused("surrogate pair"):
        engine.chat([USER], tools=[tool], max_tokens=2)
    for make in (Grammar.regex, Grammar.lark_grammar, Grammar.ebnf, lambda text: Grammar.choice([text])):
        with pytest.raises(GrammarError, match="surrogate pair"):
            make(HALF)


def test_half_a_character_in_a_seed_or_a_tools_result_fails_no_call(engine: Any) -> None:
    @agentspec.tool
    def read() -> str:
        return f"a badly decoded file: {HALF}"

    with agentspec.trajectory() as mine:
        agentspec.seed(HALF)
        read()
        assert engine.chat([USER], max_tokens=2, ignore_eos=True).result().token_ids
    assert [seed.content for seed in mine.seeds_from(0)] == ["be?fore", "a badly decoded file: be?fore"]


# ---- nothing left to choose ------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("logit_bias", lambda n, eos: {"logit_bias": dict.fromkeys(range(n), NEVER)}),
        ("bad_words", lambda n, eos: {"bad_words": [[i] for i in range(n)]}),
        (
            "logit_bias and min_tokens",
            lambda n, eos: {"logit_bias": {i: NEVER for i in range(n) if i != eos}, "min_tokens": 1},
        ),
    ],
)
def test_nothing_left_names_the_options(engine: Any, temperature: float, names: str, options: Any) -> None:
    asked = options(engine.vocabulary, tiny.tokenizer().eos_token_id)
    with refused(f"^{names}: no id"):
        engine.chat([USER], temperature=temperature, max_tokens=4, **asked).result()


def test_a_grammar_that_other_options_forbid(engine: Any) -> None:
    word = "yes"
    banned = [[i] for i in range(engine.vocabulary) if tiny.tokenizer().decode([i])[:1] == "y"]
    with pytest.raises(GrammarError, match="bad_words"):
        engine.chat([USER], grammar=Grammar.choice([word]), bad_words=banned, max_tokens=8).result()


# ---- the smallest temperature ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-7])
def test_below_the_smallest_temperature_is_greedy(engine: Any, temperature: float) -> None:
    greedy = engine.chat([USER], max_tokens=12).result()
    assert engine.chat([USER], max_tokens=12, temperature=temperature, seed=3).result().token_ids == greedy.token_ids
    assert GenerationRequest(input_ids=[1], temperature=temperature).temperature == 0
    assert GenerationRequest(input_ids=[1], temperature=1e-6).temperature == 1e-6


def test_the_smallest_temperature_works(engine: Any) -> None:
    greedy = engine.chat([USER], max_tokens=12).result()
    assert engine.chat([USER], max_tokens=12, temperature=1e-6, seed=3).result().token_ids == greedy.token_ids


# ---- options of the engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_draft", value) for value in ("x", None, 1.5, math.nan, True, -1, 10**9)),
        *(("kv_budget", value) for value in ("a", math.nan, 0, 1e9, True)),
        ("announce", None), ("cost_curve", 5), ("cost_curve", {1: 1.0}), ("fast", "x"), ("fast", None),
        ("tool_format", 5), ("tool_format", "unknown"), ("tokenizer", None), ("tokenizer", 5), ("tokenizer", "x"),
        ("device", "banana"), ("device", "meta"), ("device", [1]), ("dtype", "float32"), ("dtype", torch.float64),
        ("dtype", torch.int8), ("model", 5), ("model", None), ("model", torch.nn.Linear(2, 2)),
    ],
)  # fmt: skip
def test_options_of_the_engine(name: str, value: Any) -> None:
    options = {"model": tiny.model(), "tokenizer": tiny.tokenizer(), "cost_curve": CURVE, name: value}
    with refused(name.replace("_", ".")):
        LocalEngine(**options)


def test_device_and_dtype_that_a_loaded_model_has_are_fine() -> None:
    options = {"tokenizer": tiny.tokenizer(), "cost_curve": CURVE, "device": "cpu", "dtype": torch.float32}
    with LocalEngine(tiny.model(), **options) as engine:
        assert (engine.device, engine.dtype) == ("cpu", torch.float32)


# ---- a cache that can't be used --------------------------------------------------------------------


def test_a_cache_directory_that_cant_be_used(monkeypatch: Any, tmp_path: Any) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setenv("AGENTSPEC_CACHE_DIR", "/dev/null/x")
    with pytest.raises(ModelLoadError, match=r"/dev/null/x.*AGENTSPEC_CACHE_DIR"):
        models.load(gguf, device="cpu", dtype=torch.float32)
    monkeypatch.setenv("AGENTSPEC_CACHE_DIR", "~nobody-of-this-name/x")
    with pytest.raises(ModelLoadError, match="AGENTSPEC_CACHE_DIR"):
        models.load(gguf, device="cpu", dtype=torch.float32)


def test_a_conversion_elsewhere_that_never_ends(monkeypatch: Any, tmp_path: Any) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setenv("AGENTSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(conversion, "_LONGEST_S", 0.1)
    path = models.converted_path(gguf)
    path.parent.mkdir(parents=True)
    told: list[str] = []
    held = filelock.FileLock(f"{path}.lock")
    with held, pytest.raises(ModelLoadError, match=r"another process.*AGENTSPEC_CACHE_DIR"):
        models.load(gguf, device="cpu", dtype=torch.float32, announce=told.append)
    assert any("waiting" in text for text in told)
