"""LocalEngine under drafts: whatever is drafted, the output is the one of plain decoding.

TORTURE.md's table "Drafts and verification"; each test names its row. Grammars have their own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.drafting import CostCurve
from agentspec.engines.base import GenerationRequest, GenerationResult
from agentspec.engines.local import LocalEngine
from agentspec.errors import ContextLengthError, ProposerError
from agentspec.loop import Trajectory
from tests import tiny
from tests.engines import proposers

pytestmark = pytest.mark.fast

Make = Callable[..., LocalEngine]
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ids_of(text: str = PROMPT) -> list[int]:
    return [int(i) for i in tiny.tokenizer()(text).input_ids]


def run(engine: LocalEngine, prompt: list[int] | None = None, **options: Any) -> GenerationResult:
    return engine.generate(GenerationRequest.of(input_ids=prompt or ids_of(), **options)).result()


def plain(make: Make, prompt: list[int] | None = None, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    return run(make(**{**(engine or {}), "max_draft": 0}), prompt, **options)


def same(a: GenerationResult, b: GenerationResult) -> None:
    """Every account of the output agrees."""
    assert a.token_ids == b.token_ids
    assert a.text == b.text
    assert a.finish_reason == b.finish_reason
    assert a.stop_reason == b.stop_reason
    assert a.stats.output_tokens == b.stats.output_tokens == len(a.token_ids)
    assert [p.token_id for p in a.logprobs] == [p.token_id for p in b.logprobs]
    for mine, other in zip(a.logprobs, b.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def scripts(full: list[int], vocabulary: int, seed: int = 0) -> dict[str, Any]:
    return {
        "oracle": proposers.oracle(full),
        "adversary": proposers.adversary(full, vocabulary),
        "random": proposers.noise(seed, vocabulary),
        "half right": proposers.noise(seed, vocabulary, full),
        "trees": proposers.noise(seed, vocabulary, full, tree=True),
    }


# ---- vllm#41758: greedy output changes when speculation is on -------------------------------------


@pytest.mark.parametrize("fast", [True, False], ids=["packed", "stock"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_equals_plain(tiny_engine: Make, kind: str, fast: bool) -> None:
    wanted = plain(tiny_engine, engine={"kind": kind, "fast": fast}, max_tokens=80, logprobs=True)
    full = ids_of() + list(wanted.token_ids)
    steps = {}
    for name, script in scripts(full, len(tiny.tokenizer())).items():
        proposer = proposers.ScriptedProposer(script)
        got = run(tiny_engine(kind, fast=fast, proposer=proposer), max_tokens=80, logprobs=True)
        same(got, wanted)
        assert not proposer.open, "a call was not ended"
        steps[name] = got.stats.verify_steps
    assert steps["oracle"] <= 10 < steps["adversary"] < 40
    assert steps["trees"] < 60


SHARED: dict[str, Any] = {}


def shared_engine(kind: str = "packed") -> tuple[LocalEngine, proposers.ScriptedProposer]:
    """One engine for all of hypothesis' examples; its proposer's script is exchanged."""
    if kind not in SHARED:
        proposer = proposers.ScriptedProposer(proposers.nothing)
        engine = LocalEngine(
            tiny.model(), tokenizer=tiny.tokenizer(), proposer=proposer, cost_curve=CostCurve.linear(0.01)
        )
        if kind == "rounding":
            engine.forward = engine._decoder.forward = Rounding(engine.forward)  # type: ignore[assignment]
        SHARED[kind] = (engine, proposer)
    return SHARED[kind]  # type: ignore[no-any-return]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_greedy_and_seeded_equal_plain_for_any_draft(data: st.DataObject) -> None:
    """Property: prompts, options and drafts at random; chains and trees; greedy, and sampling with a seed."""
    engine, proposer = shared_engine()
    vocabulary = engine.vocabulary
    prompt = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=40))
    options: dict[str, Any] = {
        "max_tokens": data.draw(st.integers(1, 24)),
        "seed": data.draw(st.integers(0, 99)),
    }
    if data.draw(st.booleans()):
        options["temperature"] = data.draw(st.sampled_from([0.3, 1.0, 1.7]))
        options["top_k"] = data.draw(st.sampled_from([0, 3, 40]))
        options["top_p"] = data.draw(st.sampled_from([1.0, 0.5, 0.9]))
        options["min_p"] = data.draw(st.sampled_from([0.0, 0.1]))
    options["repetition_penalty"] = data.draw(st.sampled_from([1.0, 1.3, 0.8]))
    options["presence_penalty"] = data.draw(st.sampled_from([0.0, 0.7]))
    options["frequency_penalty"] = data.draw(st.sampled_from([0.0, 0.4]))
    options["logit_bias"] = data.draw(st.dictionaries(st.integers(0, vocabulary - 1), st.floats(-9, 9), max_size=3))
    options["bad_words"] = data.draw(
        st.lists(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=3), max_size=3)
    )
    options["min_tokens"] = data.draw(st.integers(0, options["max_tokens"]))
    if data.draw(st.booleans()):
        options["logit_bias"] = {**options["logit_bias"], 2: 6.0}  # EOS becomes likely
    proposer.script = proposers.nothing
    wanted = run(engine, prompt, draft=False, logprobs=True, **options)
    if data.draw(st.booleans()) and wanted.token_ids:
        at = data.draw(st.integers(0, len(wanted.token_ids) - 1))
        options["stop_token_ids"] = [wanted.token_ids[at : at + 2]]
        wanted = run(engine, prompt, draft=False, logprobs=True, **options)
    full = prompt + list(wanted.token_ids)
    names = sorted(scripts(full, vocabulary))
    proposer.script = scripts(full, vocabulary, data.draw(st.integers(0, 99)))[data.draw(st.sampled_from(names))]
    same(run(engine, prompt, logprobs=True, **options), wanted)


class Rounding:
    """A forward whose logits are coarse, so that ties are common, and off by its noise wherever n > 1."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.row_invariant = False
        self.noise = 1e-3
        self.rng = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, cache: Any, ids: Any, rows: int = 1, parents: Any = None) -> torch.Tensor:
        logits = (self.inner.step(cache, ids, rows, parents) * 2).round() / 2
        if len(ids) > 1:
            logits = logits + torch.from_numpy(self.rng.uniform(-1e-3, 1e-3, logits.shape).astype(np.float32))
        return logits


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000), tree=st.booleans(), options=st.sampled_from([
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0, "top_k": 5},
    {"repetition_penalty": 1.3},
]))  # fmt: skip
def test_near_ties_are_decided_again_where_the_forward_is_not_row_invariant(
    seed: int, tree: bool, options: dict[str, Any]
) -> None:
    engine, proposer = shared_engine("rounding")
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, engine.vocabulary, 12).tolist()
    options = {"max_tokens": 24, "seed": seed, **options}
    proposer.script = proposers.nothing
    wanted = run(engine, prompt, draft=False, **options)
    proposer.script = proposers.noise(seed, engine.vocabulary, prompt + list(wanted.token_ids), tree)
    got = run(engine, prompt, **options)
    same(got, wanted)
    TIES.append((got.stats.near_ties, got.stats.near_tie_flips))


TIES: list[tuple[int, int]] = []


def test_near_ties_were_met() -> None:
    """The property above was tried where it matters."""
    if TIES:
        assert sum(ties for ties, _ in TIES) > 20
        assert sum(flips for _, flips in TIES) > 2


def test_a_near_tie_is_counted_and_its_cache_right(tiny_engine: Make) -> None:
    """Every position is declared a near-tie: each is decided at n = 1, and all stays equal."""
    wanted = plain(tiny_engine, engine={"fast": False}, max_tokens=40)
    full = ids_of() + list(wanted.token_ids)
    for script in (proposers.oracle(full), proposers.noise(3, 400, full, tree=True)):
        engine = tiny_engine(fast=False, proposer=proposers.ScriptedProposer(script))
        engine.forward.noise = 100.0
        got = run(engine, max_tokens=40)
        same(got, wanted)
        assert got.stats.near_ties >= 20
        assert got.stats.near_tie_flips == 0


# ---- transformers#31301, ArcticInference#161: EOS inside an accepted draft ------------------------


def test_eos_inside_a_draft_ends_exactly_there(tiny_engine: Make) -> None:
    bias = {"logit_bias": {2: 4.0}, "max_tokens": 200}
    wanted = plain(tiny_engine, **bias)
    assert wanted.finish_reason == "stop" and wanted.token_ids[-1] == 2 and len(wanted.token_ids) > 3
    full = ids_of() + list(wanted.token_ids) + [7] * 20
    # the draft goes on after EOS
    proposer = proposers.ScriptedProposer(proposers.oracle(full, 16))
    engine = tiny_engine(proposer=proposer)
    trajectory = Trajectory("t")
    got = run(engine, trajectory=trajectory, **bias)
    same(got, wanted)
    # nothing after it is in the memory, the cache, or the account of acceptance
    assert engine.memory(trajectory).tokens.tolist().count(2) == 1
    assert engine._states.get(trajectory).cache.length == len(full) - 20 - 1
    assert got.stats.accepted <= len(got.token_ids)
    again = run(engine, full[: len(ids_of()) + len(got.token_ids)], trajectory=trajectory, max_tokens=4)
    fresh = plain(tiny_engine, full[: len(ids_of()) + len(got.token_ids)], max_tokens=4)
    assert again.token_ids == fresh.token_ids
    assert again.stats.reused_tokens == len(ids_of()) + len(got.token_ids) - 1


def test_ignore_eos_goes_on(tiny_engine: Make) -> None:
    got = run(tiny_engine(), logit_bias={2: 100.0}, max_tokens=9, ignore_eos=True)
    assert got.token_ids == (2,) * 9 and got.finish_reason == "length"


# ---- transformers#46993, vllm#42533, ArcticInference#61: overshoot -------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 17])
def test_max_tokens_is_exact(tiny_engine: Make, most: int) -> None:
    wanted = plain(tiny_engine, max_tokens=40)
    full = ids_of() + list(wanted.token_ids)
    got = run(tiny_engine(proposer=proposers.ScriptedProposer(proposers.oracle(full, 16))), max_tokens=most)
    assert got.token_ids == wanted.token_ids[:most]
    assert got.finish_reason == "length"
    assert got.stats.output_tokens == most


def test_context_limit_is_exact(tiny_engine: Make) -> None:
    """max_tokens=None runs to the last position that the context has, drafts or not, and not one further."""
    shape = {"model": {"max_position_embeddings": 48}}
    wanted = plain(tiny_engine, engine=shape)
    assert len(ids_of()) + len(wanted.token_ids) == 48 and wanted.finish_reason == "length"
    full = ids_of() + list(wanted.token_ids) + [5] * 30
    for script in (proposers.oracle(full, 16), proposers.noise(1, 400, full, tree=True)):
        same(run(tiny_engine(proposer=proposers.ScriptedProposer(script), **shape)), wanted)
    engine = tiny_engine(**shape)
    with pytest.raises(ContextLengthError, match="at most"):
        run(engine, max_tokens=48)
    with pytest.raises(ContextLengthError, match="shorten"):
        run(engine, ids_of() * 4)


# ---- vllm#47616: ids, logprobs, usage past the stop; transformers#48039: stops over steps ---------


@pytest.mark.parametrize("tree", [False, True])
def test_all_is_cut_at_the_same_token(tiny_engine: Make, tree: bool) -> None:
    """Every stop string and stop sequence that the output holds, inside drafts and across steps."""
    base = plain(tiny_engine, max_tokens=48)
    full = ids_of() + list(base.token_ids)
    proposer = proposers.ScriptedProposer(proposers.noise(5, 400, full, tree))
    engine, reference = tiny_engine(proposer=proposer), tiny_engine(max_draft=0)
    for at in range(0, len(base.text) - 3, 5):
        for options in (
            {"stop": base.text[at : at + 3]},
            {"stop_token_ids": [base.token_ids[at % 45 : at % 45 + 3]]},
        ):
            trajectory = Trajectory()
            got = run(engine, max_tokens=48, top_logprobs=2, trajectory=trajectory, **options)
            wanted = run(reference, max_tokens=48, top_logprobs=2, **options)
            same(got, wanted)
            assert len(got.logprobs) == len(got.token_ids)
            context = engine._states.get(trajectory)
            assert context.last.tolist() == ids_of() + list(got.token_ids)
            assert context.cache.length == len(context.last) - 1
            # By the definition, not only as without drafts: both run the same Stopper.
            assert got.finish_reason == "stop"
            if "stop" in options:
                assert got.text == base.text[: base.text.index(options["stop"])]
            else:
                (stop,) = options["stop_token_ids"]
                ends = [i + 3 for i in range(46) if base.token_ids[i : i + 3] == stop]
                assert got.token_ids == base.token_ids[: ends[0]]
            engine.forget(trajectory)


def test_held_back_text_is_flushed_once(tiny_engine: Make) -> None:
    base = plain(tiny_engine, max_tokens=40)
    full = ids_of() + list(base.token_ids)
    ending = base.text[-2:] + "never comes"
    engine = tiny_engine(proposer=proposers.ScriptedProposer(proposers.oracle(full, 5)))
    chunks = list(engine.generate(GenerationRequest(input_ids=ids_of(), max_tokens=40, stop=[ending])))
    assert "".join(c.text for c in chunks) == base.text
    assert chunks[-1].text.endswith(base.text[-2:])


# ---- vllm#52469, #30204, #26027: streamed text, multi-byte characters ----------------------------


def test_stream_equals_result_and_characters_come_whole(tiny_engine: Make) -> None:
    ids = ids_of("é😀 Straße café ☃")
    assert len(ids) > len("é😀 Straße café ☃") // 2
    # the model is made to say it: each id's successor is biased by the draft's truth through a constraint
    constraint = Dictation(ids)
    full = ids_of() + ids
    for width in (1, 2, 3, 5, 16):
        proposer = proposers.ScriptedProposer(proposers.oracle(full, width))
        engine = tiny_engine(proposer=proposer)
        request = GenerationRequest(input_ids=ids_of(), max_tokens=len(ids), constraint=constraint.new)
        chunks = list(engine.generate(request))
        assert "".join(c.text for c in chunks) == "é😀 Straße café ☃"
        assert not any("\ufffd" in c.text for c in chunks)
        result = engine.generate(request).result()
        assert result.text == "".join(c.text for c in chunks)
        assert result.token_ids == tuple(i for c in chunks for i in c.token_ids) == tuple(ids)


class Dictation:
    """A constraint that leaves one id at each position: what is dictated."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.at = 0

    def new(self) -> Dictation:
        return Dictation(self.ids)

    def cut(self, draft: Any) -> Any:
        return draft

    def forced(self, most: int) -> list[int]:
        return []

    def mask(self, logits: np.ndarray) -> None:
        if self.at < len(self.ids):
            only = logits[self.ids[self.at]]
            logits[:] = -np.inf
            logits[self.ids[self.at]] = only

    def advance(self, token: int) -> None:
        self.at += 1


def test_forced_ids_need_no_proposal(tiny_engine: Make) -> None:
    """A constraint that knows what must follow is its own draft."""

    class Forcing(Dictation):
        def new(self) -> Forcing:
            return Forcing(self.ids)

        def forced(self, most: int) -> list[int]:
            return self.ids[self.at : self.at + most]

    ids = ids_of("The lazy dog sleeps; the quick fox runs on.")
    proposer = proposers.ScriptedProposer(proposers.nothing)
    engine = tiny_engine(proposer=proposer)
    got = run(engine, max_tokens=len(ids), constraint=Forcing(ids).new)
    assert got.token_ids == tuple(ids)
    assert got.stats.verify_steps <= -(-len(ids) // 17) + 1
    assert got.stats.accepted_by_source == {"schema": got.stats.accepted}


# ---- logits processors applied to the draft's start only -----------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 3.0},
        {"frequency_penalty": 2.0},
        {"bad_words": ["the", " quick"]},
        {"min_tokens": 12, "logit_bias": {2: 30.0}},
        {"logit_bias": {7: 4.0, 9: 4.0}},
        {"temperature": 0.8, "top_p": 0.8, "seed": 3, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    ],
    ids=lambda o: "+".join(o),
)
@pytest.mark.parametrize("tree", [False, True])
def test_penalties_bad_words_and_min_tokens_hold_at_every_position(
    tiny_engine: Make, options: dict[str, Any], tree: bool
) -> None:
    wanted = plain(tiny_engine, max_tokens=40, **options)
    unprocessed = plain(tiny_engine, max_tokens=40)
    assert wanted.token_ids != unprocessed.token_ids, "the option does nothing here"
    full = ids_of() + list(wanted.token_ids)
    for script in (proposers.oracle(full, 16), proposers.noise(2, 400, full, tree)):
        same(run(tiny_engine(proposer=proposers.ScriptedProposer(script)), max_tokens=40, **options), wanted)
    if options.get("min_tokens"):
        assert len(wanted.token_ids) == 13 and wanted.token_ids[12] == 2


# ---- transformers#30312, #48280, #49036, vllm#39273: rollback ------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "mamba", "jamba"])
def test_rollback_is_right_or_refused_with_the_reason(tiny_engine: Make, kind: str) -> None:
    """Past the sliding window, over two calls; or the load says why not."""
    from agentspec.errors import UnsupportedModelError

    prompt = ids_of() * 3  # 60 ids and more, the window has 16
    try:
        reference = tiny_engine(kind, max_draft=0, fast=False)
    except UnsupportedModelError as error:
        assert kind in ("mamba", "jamba"), error
        assert "can't be run exactly" in str(error)
        return
    # Log probabilities too: a wrong key or value moves them long before it changes what is likeliest.
    wanted = run(reference, prompt, max_tokens=40, logprobs=True)
    full = prompt + list(wanted.token_ids)
    follow = full + ids_of("And then")
    then = run(reference, follow, max_tokens=20, logprobs=True)
    for fast in (True, False):
        for name, script in scripts(full + [0] * 40, reference.vocabulary).items():
            proposer = proposers.ScriptedProposer(script)
            engine = tiny_engine(kind, fast=fast, proposer=proposer)
            trajectory = Trajectory()
            got = run(engine, prompt, max_tokens=40, trajectory=trajectory, logprobs=True)
            assert got.token_ids == wanted.token_ids, (kind, fast, name)
            if engine.forward.supports_drafts:
                same(got, wanted)
            else:
                assert not proposer.drafts and engine.forward.limits
                assert got.stats.not_drafted == {engine.forward.limits: got.stats.verify_steps}
            # the second call goes on, the third goes back
            options = {"logprobs": True, "trajectory": trajectory}
            for ids, most, expected in ((follow, 20, then), (prompt, 40, wanted)):
                got = run(engine, ids, max_tokens=most, **options)
                assert got.token_ids == expected.token_ids, (kind, fast, name)
                if engine.forward.supports_drafts:
                    same(got, expected)


def test_quantised_and_static_caches_are_not_used(tiny_engine: Make) -> None:
    """A model that asks for another cache in its generation config gets the one that can go back."""
    model = tiny.model()
    model.generation_config.cache_implementation = "static"
    engine = LocalEngine(model, tokenizer=tiny.tokenizer(), cost_curve=CostCurve.linear(0.01))
    with engine:
        assert engine.forward.cache_kind == "full" and engine.forward.supports_drafts
        assert run(engine, max_tokens=30).token_ids == plain(tiny_engine, max_tokens=30).token_ids


def test_trees_equal_chains_in_what_is_accepted(tiny_engine: Make) -> None:
    """A tree whose one branch is the chain is accepted as the chain is; its cache goes on with the branch."""
    wanted = plain(tiny_engine, max_tokens=60, logprobs=True)
    full = ids_of() + list(wanted.token_ids)

    def branching(context: np.ndarray, limits: Any) -> Any:
        right = full[len(context) : len(context) + 5]
        if not limits.tree or not right:
            return right, None
        tokens, parents = [(right[0] + 1) % 400], [-1]
        at = -1
        for token in right:
            tokens += [token, (token + 1) % 400]
            parents += [at, at]
            at = len(tokens) - 2
        return tokens, parents

    options = {"max_tokens": 60, "logprobs": True}
    tree = run(tiny_engine(proposer=proposers.ScriptedProposer(branching)), **options)
    chain = run(tiny_engine(proposer=proposers.ScriptedProposer(proposers.oracle(full, 5))), **options)
    same(tree, wanted)
    assert tree.stats.verify_steps == chain.stats.verify_steps
    assert tree.stats.accepted == chain.stats.accepted
    assert tree.stats.proposed > chain.stats.proposed
    assert tree.stats.proposed_depth == chain.stats.proposed_depth


# ---- transformers#29769: batch > 1 ---------------------------------------------------------------


def test_many_calls_at_once_are_served_one_after_another(tiny_engine: Make) -> None:
    engine = tiny_engine()
    prompts = [ids_of(text) for text in tiny.CORPUS]
    wanted = [plain(tiny_engine, prompt, max_tokens=24).token_ids for prompt in prompts]
    calls = [engine.generate(GenerationRequest(input_ids=p, max_tokens=24)) for p in prompts]
    assert [call.result().token_ids for call in reversed(calls)] == wanted[::-1]


def test_n_choices(tiny_engine: Make) -> None:
    """Choice 0 is the one of n = 1; choices differ; each equals itself without drafts; usage sums."""
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
    engine = tiny_engine()
    call = engine.generate(GenerationRequest(input_ids=ids_of(), n=3, **options))
    results = call.results()
    assert [r.index for r in results] == [0, 1, 2]
    assert results[0].token_ids == run(engine, **options).token_ids
    assert len({r.token_ids for r in results}) == 3
    undrafted = tiny_engine(max_draft=0).generate(GenerationRequest(input_ids=ids_of(), n=3, **options)).results()
    for got, wanted in zip(results, undrafted, strict=True):
        assert (got.token_ids, got.text, got.finish_reason) == (
            wanted.token_ids,
            wanted.text,
            wanted.finish_reason,
        )
    assert call.stats is not None and call.stats.output_tokens == sum(len(r.token_ids) for r in results)
    assert call.stats.prompt_tokens == len(ids_of())


# ---- vllm#16258, #49548: slower with speculation on ----------------------------------------------


def test_useless_drafts_are_backed_off(tiny_engine: Make) -> None:
    """With a steep v(n) and nothing that comes true, hardly anything is drafted after a short while."""
    engine = tiny_engine(cost_curve=CostCurve({1: 1.0, 2: 2.2, 16: 2.9}))
    prompt = np.random.default_rng(0).integers(0, engine.vocabulary, 150).tolist()
    got = run(engine, prompt, max_tokens=200, temperature=2.0, seed=1, ignore_eos=True)
    assert got.stats.output_tokens == 200
    assert got.stats.break_even <= 1.03 * (got.stats.tokens_per_step or 0), got.stats


# ---- vllm#40875, #56077: tool calls --------------------------------------------------------------


def test_tool_calls_equal_those_without_drafts(tiny_engine: Make) -> None:
    """The prompt is full of calls that differ in a digit: what short copies would corrupt."""
    call = '{"name": "read_file", "arguments": {"path": "notes%d.txt", "n": %d}}\n'
    calls = "".join(call % (i, i * 7) for i in range(9))
    for seed in range(3):
        options = {"max_tokens": 60, "temperature": 0.7, "seed": seed}
        same(run(tiny_engine(), ids_of(calls), **options), plain(tiny_engine, ids_of(calls), **options))
    # A model that does write calls like those, with other digits: copies are accepted up to these, and no further.
    ids = ids_of(call % (41, 7) + call % (52, 3))
    got = run(tiny_engine(), ids_of(calls), max_tokens=len(ids), constraint=Dictation(ids).new)
    assert got.token_ids == tuple(ids)
    assert got.stats.accepted > 10 and got.stats.mismatches > 0, "the copies were hardly tried"


# ---- (arctic cache.py): an optional argument left at None raises; a proposer that breaks the rules -


def test_defaults_work(tiny_engine: Make) -> None:
    engine = tiny_engine(model={"max_position_embeddings": 64})
    assert engine.generate(GenerationRequest(input_ids=ids_of())).result().token_ids


def test_a_proposer_that_breaks_the_protocol_is_told(tiny_engine: Make) -> None:
    from agentspec.drafting import Draft

    class Wide(proposers.ScriptedProposer):
        def propose(self, context: Any, limits: Any) -> Draft:
            return Draft.chain([1] * (limits.max_depth + 1))

    engine = tiny_engine(proposer=Wide(proposers.nothing))
    with pytest.raises(ProposerError, match="at most"):
        run(engine, max_tokens=30)
    # the engine goes on
    engine.proposer.propose = lambda context, limits: Draft.empty()  # type: ignore[method-assign]
    assert run(engine, max_tokens=5).token_ids == plain(tiny_engine, max_tokens=5).token_ids
