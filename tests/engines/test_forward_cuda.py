"""GraphForward on the CPU: all but torch's own capture, which a recorder with the same rules stands for.

RecordedGraph repeats the operators that it saw, on the same tensors at the same addresses, and refuses what waits for
the device. So whatever a step froze that must change from step to step gives wrong logits here as it would on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentspec.drafting import CostCurve
from agentspec.engines.base import GenerationRequest
from agentspec.engines.forward import Forward, NotPackable, StockForward, paths_of
from agentspec.engines.forward_cuda import GraphForward
from agentspec.engines.local import LocalEngine
from agentspec.engines.static_kv import buckets
from agentspec.errors import EngineError
from agentspec.loop import Trajectory
from tests import tiny
from tests.engines import proposers
from tests.engines.test_forward import VOCABULARY, by_widths, one_thread, parent_lists, reference, tokens

__all__ = ["one_thread"]
pytestmark = pytest.mark.fast

KINDS = ("llama", "llama-odd", "qwen2", "qwen3", "mistral")
_WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "lift_fresh", "masked_select"}


class RecordedGraph(TorchDispatchMode):
    """What capture makes: calling it runs the recorded operators again."""

    def __init__(self, body: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        with self:
            self.result = body()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[1] in _WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, out))
        return out

    def __call__(self) -> torch.Tensor:
        for func, args, kwargs, out in self.operators:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self.result


class Recorder:
    """A Capture. captured: how many graphs were made."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.captured += 1
        body()
        return RecordedGraph(body)


_made: dict[Any, GraphForward] = {}


def graph_forward(kind: str, widths: tuple[int, ...] = (16,), trees: bool | None = None) -> GraphForward:
    key = kind, widths, trees
    if key not in _made:
        stock = StockForward(copy.deepcopy(reference(kind)))
        _made[key] = GraphForward(stock, widths, trees, Recorder())
    return _made[key]


def stock_logits(kind: str, ids: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return reference(kind)(torch.from_numpy(ids)[None], use_cache=False).logits[0]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# ---- logits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(16,), (1, 2, 4, 8), (1, 3, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, widths: tuple[int, ...]) -> None:
    forward = graph_forward(kind, widths)
    ids = tokens(800, seed=3)
    wanted = stock_logits(kind, ids)
    # Prompts over and under a graph's width, steps of one row and of several, over the ends of two buckets.
    found, cache = by_widths(forward, ids, [3, 1, 1, 470, 1, 1, 9, 14, 3, 40, 200, 1, 2, 20, 34])
    assert apart(found, wanted) < 1e-4
    cache.crop(500)
    assert apart(forward.step(cache, ids[500:700], 1), wanted[699:700]) < 1e-4
    assert apart(forward.step(cache, ids[700:705], 5), wanted[700:705]) < 1e-4


@pytest.mark.parametrize("rows", [0, 1, 4, 40])
def test_rows_says_how_many_logits_come_back(rows: int) -> None:
    forward = graph_forward("llama")
    ids = tokens(40, seed=4)
    logits = forward.step(forward.new_cache(), ids, rows)
    assert logits.shape == (rows, VOCABULARY) and logits.dtype == torch.float32
    if rows:
        assert apart(logits, stock_logits("llama", ids)[-rows:]) < 1e-4


def test_a_graph_is_captured_once_for_each_width_and_bucket() -> None:
    recorder = Recorder()
    forward = GraphForward(StockForward(copy.deepcopy(reference("llama"))), (4, 16), None, recorder)
    cache = forward.new_cache()
    forward.step(cache, tokens(400), 0)
    before = recorder.captured
    for _ in range(3):
        for n in (1, 3, 4, 5, 16):
            cache.crop(400)
            forward.step(cache, tokens(n), n)
    assert recorder.captured == before == 2
    assert sorted(forward._space.graphs) == [(4, 512), (16, 512)]
    forward.step(cache, tokens(81), 0)
    forward.step(cache, tokens(1), 1)  # 497 + 16 is beyond 512
    assert (4, 768) in forward._space.graphs
    logits = forward.step(cache, tokens(1), 1)
    kept = logits.clone()
    forward.step(cache, tokens(1, 5), 1)
    assert torch.equal(logits, kept), "a replay wrote into logits that were handed out"


def test_buckets_hold_what_is_asked() -> None:
    assert buckets(1) == [512]
    assert buckets(3000) == [512, 768, 1024, 1536, 2048, 3072]
    assert all(size % 256 == 0 for size in buckets(200_000))
    assert buckets(200_000)[-2] < 200_000 <= buckets(200_000)[-1]


# ---- the same bits whatever goes with a row ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([5, 17, 60, 485, 500, 740]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_bits_do_not_depend_on_the_draft(kind: str, prefix: int, widths: list[int], seed: int) -> None:
    """One width: rows verified together, over a bucket's end too, and rows by themselves."""
    forward = graph_forward(kind)
    assert forward.row_invariant and forward.noise == 0.0
    ids = tokens(prefix + sum(widths), seed)
    cache = forward.new_cache()
    forward.step(cache, ids[:prefix], 0)
    together = []
    for a, b in zip(np.cumsum([prefix, *widths]), np.cumsum([prefix, *widths])[1:], strict=False):
        together.append(forward.step(cache, ids[a:b], int(b - a)))
    cache.crop(prefix)
    alone = [forward.step(cache, ids[i : i + 1], 1) for i in range(prefix, len(ids))]
    assert torch.equal(torch.cat(together), torch.cat(alone))


@pytest.mark.parametrize("prompt", [3, 16, 17, 90])
def test_the_prompts_last_row_does_not_depend_on_the_first_draft(prompt: int) -> None:
    forward = graph_forward("qwen3")
    ids = tokens(prompt + 12, seed=6)
    alone = forward.step(forward.new_cache(), ids[:prompt], 1)
    for drafted in (1, 5, 12):
        cache = forward.new_cache()
        both = forward.step(cache, ids[: prompt + drafted], 1 + drafted)
        assert torch.equal(both[:1], alone), drafted
        cache.crop(prompt)
        after = forward.step(cache, ids[prompt : prompt + 1], 1)
        assert torch.equal(after[0], both[1])


def test_several_widths_say_their_noise() -> None:
    forward = graph_forward("llama", (1, 2, 4, 8))
    assert not forward.row_invariant and forward.noise > 0
    assert "not row-invariant" in forward.description and "1, 2, 4, 8 rows" in forward.description


def test_trees_are_off_where_they_would_cost_equality() -> None:
    forward = graph_forward("llama")
    if forward.supports_trees:
        pytest.skip("here a tree's rows have the chain's bits")
    assert forward.row_invariant and "tree" in forward.limits
    asked = graph_forward("llama", (16,), True)
    assert asked.supports_trees and not asked.row_invariant and asked.noise > 0


# ---- trees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(parent_lists(), st.sampled_from([1, 3, 40, 490, 505]), st.integers(0, 99))
def test_a_trees_rows_are_those_of_its_paths(kind: str, parents: list[int], prefix: int, seed: int) -> None:
    """Up to 33 rows over graphs of 16: wider trees run uncaptured."""
    forward = graph_forward(kind, (4, 16), True)
    n = len(parents)
    ids = tokens(prefix + n + 3, seed)
    prompt, nodes, after = ids[:prefix], ids[prefix : prefix + n], ids[prefix + n :]
    paths, depths = paths_of(parents, n)
    cache = forward.new_cache()
    forward.step(cache, prompt, 0)
    tree = forward.step(cache, nodes, n, parents)
    with pytest.raises(EngineError, match="keep"):
        forward.step(cache, after, 1)
    for i in {0, n // 2, n - 1}:
        path = nodes[paths[i, : depths[i] + 1]]
        wanted = stock_logits(kind, np.concatenate([prompt, path]))[-1]
        assert apart(tree[i], wanted) < 1e-4
    path = paths[n - 1, : depths[n - 1] + 1]
    cache.keep(path.tolist())
    assert cache.length == prefix + len(path)
    found = forward.step(cache, after, 3)
    assert apart(found, stock_logits(kind, np.concatenate([prompt, nodes[path], after]))[-3:]) < 1e-4


@pytest.mark.parametrize("pending", [1, 7, 16, 30])
def test_a_prompts_rest_and_a_tree_in_one_step(pending: int) -> None:
    forward = graph_forward("qwen3", (16,), True)
    ids = tokens(pending + 6, seed=11)
    # two branches of three behind the prompt
    parents = [*range(-1, pending - 1), pending - 1, pending, pending + 1, pending - 1, pending + 3, pending + 4]
    cache = forward.new_cache()
    logits = forward.step(cache, ids, 7, parents)
    first, second = ids[: pending + 3], np.concatenate([ids[:pending], ids[pending + 3 :]])
    assert apart(logits[:4], stock_logits("qwen3", first)[-4:]) < 1e-4
    assert apart(logits[4:], stock_logits("qwen3", second)[-3:]) < 1e-4
    cache.keep([*range(pending), pending + 3, pending + 4, pending + 5])
    more = tokens(2, seed=12)
    wanted = stock_logits("qwen3", np.concatenate([second, more]))[-2:]
    assert apart(forward.step(cache, more, 2), wanted) < 1e-4


def test_what_is_no_tree_is_refused_and_changes_nothing() -> None:
    forward = graph_forward("llama", (16,), True)
    cache = forward.new_cache()
    forward.step(cache, tokens(10), 0)
    for parents in ([-1, 1], [0, 0], [-1], [-2, 0]):
        with pytest.raises(EngineError, match="parents"):
            forward.step(cache, tokens(2), 1, parents)
    assert cache.length == 10
    forward.step(cache, tokens(3), 3, [-1, -1, 0])
    for rows in ([1, 0], [0, 3], [0, 0], [-1]):
        with pytest.raises(EngineError, match="keep"):
            cache.keep(rows)
    cache.keep([])
    assert cache.length == 10


# ---- several trajectories over one space ----------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 90), st.sampled_from(["step", "crop", "drop", "tree"])), max_size=14
    )
)
def test_caches_take_turns(turns: list[tuple[int, int, str]]) -> None:
    """Each cache goes on as if it were alone, whatever the others did, and whichever of them went away."""
    forward = graph_forward("qwen2", (4, 16), True)
    caches: list[Any] = [forward.new_cache() for _ in range(3)]
    held = [np.empty(0, np.int64) for _ in range(3)]
    for turn, (which, n, what) in enumerate(turns):
        cache = caches[which]
        if what == "step":
            new = tokens(n, turn)
            found = forward.step(cache, new, 1)
            held[which] = np.concatenate([held[which], new])
            assert apart(found, stock_logits("qwen2", held[which])[-1:]) < 1e-4
        elif what == "crop":
            cache.crop(len(held[which]) - n)
            held[which] = held[which][: max(len(held[which]) - n, 0)]
        elif what == "drop":
            caches[which], held[which] = forward.new_cache(), held[which][:0]
        elif len(held[which]):
            new = tokens(3, turn)
            forward.step(cache, new, 3, [-1, -1, 1])
            other = caches[(which + 1) % 3]
            forward.step(other, tokens(2, 1), 0)  # the tree's rows are kept after its cache had to leave
            other.crop(other.length - 2)
            cache.keep([1, 2])
            held[which] = np.concatenate([held[which], new[1:]])
        assert [c.length for c in caches] == [len(h) for h in held]


def test_the_space_grows_and_a_cache_counts_its_own_bytes() -> None:
    forward = GraphForward(StockForward(copy.deepcopy(reference("llama"))), (16,), None, Recorder())
    a_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head_dim, bytes
    one, two = forward.new_cache(), forward.new_cache()
    assert one.nbytes == 0
    forward.step(one, tokens(100), 0)
    assert one.nbytes == 100 * a_token
    forward.step(two, tokens(700, 2), 0)
    assert one.nbytes == 100 * a_token and two.nbytes == 700 * a_token
    assert forward._space.kv.shape[2] == 1024
    ids = np.concatenate([tokens(100), tokens(2, 9)])
    assert apart(forward.step(one, ids[100:], 2), stock_logits("llama", ids)[-2:]) < 1e-4
    two.crop(0)
    assert two.nbytes == 0
    with pytest.raises(EngineError, match="context of 1024 tokens"):
        forward.step(one, tokens(1500), 0)
    assert one.length == 102


# ---- what it doesn't take -------------------------------------------------------------------------------


def test_models_of_other_kinds_are_left_to_transformers() -> None:
    for kind, reason in (("gemma3", "not one of llama"), ("gpt2", "not one of llama"), ("mamba", "recurrent")):
        stock = StockForward(copy.deepcopy(reference(kind)))
        with pytest.raises(NotPackable, match=reason):
            GraphForward(stock)
        assert torch.equal(stock.step(stock.new_cache(), stock.probe_ids, 40), stock.probe_logits) or kind != "gpt2"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary"),
        ({"sliding_window": 31}, "narrower"),
    ],
)
def test_models_that_it_would_run_wrong_are_refused(changes: dict[str, Any], reason: str) -> None:
    model = tiny.model("mistral", **{"sliding_window": 32, **changes})
    with pytest.raises(NotPackable, match=reason):
        GraphForward(StockForward(model), (32,))


def test_weights_of_several_kinds_are_refused() -> None:
    model = tiny.model("llama")
    stock = StockForward(model)
    model.lm_head.to(torch.float64)
    with pytest.raises(NotPackable, match="2 kinds"):
        GraphForward(stock)


def test_logits_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GraphForward._layer

    def wrong(self: Any, layer: Any) -> Any:
        made = right(self, layer)
        made.scale *= 1.2
        return made

    monkeypatch.setattr(GraphForward, "_layer", wrong)
    with pytest.raises(NotPackable, match="differ from transformers'"):
        GraphForward(StockForward(tiny.model("llama")))


def test_the_model_itself_stays_usable() -> None:
    model = tiny.model("qwen3")
    ids = torch.from_numpy(tokens(20))[None]
    with torch.inference_mode():
        wanted = model(ids).logits
    before = sum(p.numel() for p in model.parameters())
    GraphForward(StockForward(model))
    with torch.inference_mode():
        assert apart(model(ids).logits, wanted) < 1e-5
    assert sum(p.numel() for p in model.parameters()) == before
    attention = model.model.layers[0].self_attn
    storage = attention.q_proj.weight.untyped_storage().data_ptr()
    assert storage == attention.k_proj.weight.untyped_storage().data_ptr(), "the joined weight is held twice"


def test_a_capture_that_fails_is_run_uncaptured_and_said() -> None:
    def fails(body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("CUDA error: operation not permitted\nmore")

    forward = GraphForward(StockForward(copy.deepcopy(reference("llama"))), capture=fails)
    assert "not captured: CUDA error: operation not permitted;" in forward.description
    ids = tokens(30)
    assert apart(forward.step(forward.new_cache(), ids, 30), stock_logits("llama", ids)) < 1e-4


def test_the_recorder_refuses_what_waits_and_repeats_what_was_frozen() -> None:
    """The tests above mean something only if this holds."""
    source = torch.zeros(2)
    with pytest.raises(RuntimeError, match="not permitted"):
        RecordedGraph(lambda: source * float(source.sum()))
    frozen = 3.0
    graph = RecordedGraph(lambda: source.add(frozen)[:1])
    source += 1
    frozen = 5.0
    assert graph().tolist() == [4.0]


def test_bfloat16_says_the_noise_that_it_saw() -> None:
    model = tiny.model("qwen3").to(torch.bfloat16)
    forward = GraphForward(StockForward(model), (1, 16), True, Recorder())
    assert 0 < forward.noise < forward.tolerance
    logits = forward.step(forward.new_cache(), tokens(40), 40)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(tokens(40))[None]).logits[0].float()
    assert logits.dtype == torch.float32
    assert apart(logits, wanted) < 0.1 * float(wanted.abs().max())


# ---- in the engine ------------------------------------------------------------------------------------------


def engine_with(kind: str, script: Any, widths: tuple[int, ...], trees: bool | None, monkeypatch: Any) -> LocalEngine:
    monkeypatch.setattr(
        Forward,
        "load",
        staticmethod(lambda model, fast=True: GraphForward(StockForward(model), widths, trees, Recorder())),
    )
    return LocalEngine(
        tiny.model(kind),
        tokenizer=tiny.tokenizer(),
        proposer=proposers.ScriptedProposer(script),
        cost_curve=CostCurve.linear(0.01),
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize(("widths", "trees"), [((32,), None), ((1, 4, 16), True)])
def test_an_engines_output_is_plain_decodings(
    widths: tuple[int, ...], trees: bool | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [int(i) for i in tiny.tokenizer()(tiny.CORPUS[1]).input_ids]
    options = {"max_tokens": 60, "ignore_eos": True, **options}
    plain = LocalEngine(tiny.model("qwen3"), tokenizer=tiny.tokenizer(), max_draft=0, fast=False)
    wanted = plain.generate(GenerationRequest.of(input_ids=prompt, **options)).result()
    full = prompt + list(wanted.token_ids)
    for script, most in (
        (proposers.oracle(full), 14),
        (proposers.adversary(full, plain.vocabulary), 40),
        (proposers.noise(5, plain.vocabulary, full, tree=True), 60),
    ):
        with engine_with("qwen3", script, widths, trees, monkeypatch) as engine:
            assert isinstance(engine.forward, GraphForward)
            got = engine.generate(GenerationRequest.of(input_ids=prompt, **options)).result()
            assert got.token_ids == wanted.token_ids
            assert got.stats.verify_steps <= most
            assert got.stats.near_ties == 0 or not engine.forward.row_invariant
    plain.close()


def test_an_engines_trajectories_keep_their_own_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with("llama", proposers.nothing, (16,), None, monkeypatch) as engine:
        runs = [Trajectory(f"run {i}") for i in range(3)]
        prompts = [tokens(200 + 30 * i, seed=i).tolist() for i in range(3)]
        for call in range(3):
            for i, trajectory in enumerate(runs):
                request = GenerationRequest.of(
                    input_ids=prompts[i], max_tokens=8, ignore_eos=True, trajectory=trajectory
                )
                result = engine.generate(request).result()
                assert result.stats.reused_tokens == (0 if call == 0 else len(prompts[i]) - 4)
                alone = engine.generate(
                    GenerationRequest.of(input_ids=prompts[i], max_tokens=8, ignore_eos=True)
                ).result()
                assert alone.token_ids == result.token_ids
                prompts[i] = prompts[i] + list(result.token_ids) + [7, 8, 9]
        held = sum(len(p) - 4 for p in prompts)
        assert engine.kv_bytes == held * engine._token_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_replay_gives_the_bits_of_what_was_captured(dtype: torch.dtype) -> None:
    model = copy.deepcopy(reference("qwen3")).to("cuda", dtype)
    forward = Forward.load(model)
    assert isinstance(forward, GraphForward) and "(captured" in forward.description
    uncaptured = GraphForward(StockForward(model), capture=lambda body: body)
    ids = tokens(600, seed=3)
    for widths in ([3, 1, 480, 9, 107], [40, 1, 1, 200, 358]):
        assert torch.equal(by_widths(forward, ids, widths)[0], by_widths(uncaptured, ids, widths)[0])
