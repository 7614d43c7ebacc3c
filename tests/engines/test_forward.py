"""The forward: bits that don't depend on the width, logits that are transformers' own, and caches that go back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.engines import forward_cpu
from agentspec.engines.forward import Forward, StockForward, paths_of
from agentspec.engines.linear import Linear
from agentspec.errors import EngineError, UnsupportedModelError

pytestmark = pytest.mark.fast

VOCABULARY = 160
WINDOW = 24
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 72, "num_hidden_layers": 3, "max_position_embeddings": 1024}
_ATTENTION = {**_SHAPE, "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def _config(kind: str) -> Any:
    t = transformers
    return {
        "llama": lambda: t.LlamaConfig(**_ATTENTION),
        "llama-odd": lambda: t.LlamaConfig(
            **{**_ATTENTION, "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12},
            tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        ),
        "qwen2": lambda: t.Qwen2Config(**_ATTENTION),
        "qwen3": lambda: t.Qwen3Config(**_ATTENTION),
        "mistral": lambda: t.MistralConfig(**_ATTENTION, sliding_window=WINDOW),
        "gemma3": lambda: t.Gemma3TextConfig(
            **_ATTENTION, sliding_window=WINDOW, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "phi3": lambda: t.Phi3Config(
            **{**_ATTENTION, "hidden_size": 96}, pad_token_id=0, bos_token_id=1, eos_token_id=2
        ),
        "mixtral": lambda: t.MixtralConfig(**_ATTENTION, num_local_experts=4, num_experts_per_tok=2),
        "gemma2": lambda: t.Gemma2Config(**_ATTENTION, sliding_window=WINDOW),
        "gpt2": lambda: t.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512),
        "bloom": lambda: t.BloomConfig(vocab_size=VOCABULARY, hidden_size=72, n_layer=2, n_head=4),
        "mamba": lambda: t.MambaConfig(**_SHAPE, state_size=8),
        "jamba": lambda: t.JambaConfig(
            **{**_ATTENTION, "num_hidden_layers": 4}, num_experts=2, num_experts_per_tok=1,
            attn_layer_period=4, attn_layer_offset=1, use_mamba_kernels=False, mamba_dt_rank=8,
        ),
    }[kind]()  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """These models are too small for more; on a busy machine a second thread is mostly waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PACKED = ("llama", "llama-odd", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2")
LEAN = ("llama", "llama-odd", "qwen2", "qwen3", "mistral")
_models: dict[str, Any] = {}
_forwards: dict[tuple[str, bool], Forward] = {}


def reference(kind: str) -> Any:
    """A random model of this kind, the same each time, that no forward has taken over."""
    if kind not in _models:
        torch.manual_seed(7)
        _models[kind] = transformers.AutoModelForCausalLM.from_config(_config(kind)).eval().float()
        with torch.no_grad():
            for parameter in _models[kind].parameters():  # initial weights give all but uniform attention
                parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return _models[kind]


def forward_of(kind: str, fast: bool = True) -> Forward:
    if (kind, fast) not in _forwards:
        _forwards[kind, fast] = Forward.load(copy.deepcopy(reference(kind)), fast=fast)
    return _forwards[kind, fast]


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, n)


def by_widths(forward: Forward, ids: np.ndarray, widths: list[int]) -> tuple[torch.Tensor, Any]:
    """All logits of ids, run in steps of these widths, and the cache they leave."""
    cache = forward.new_cache()
    parts, begin = [], 0
    for width in widths:
        part = ids[begin : begin + width]
        if len(part):
            parts.append(forward.step(cache, part, len(part)))
        begin += width
    return torch.cat(parts), cache


def assert_same_keys_and_values(a: Any, b: Any) -> None:
    assert a.length == b.length
    for (keys_a, values_a), (keys_b, values_b) in zip(a._layers, b._layers, strict=True):
        for t in range(a.length):
            block, j = divmod(t, 64)
            assert np.array_equal(keys_a[block, :, :, j], keys_b[block, :, :, j]), t
            assert np.array_equal(values_a[block, :, j], values_b[block, :, j]), t


# ---- which path serves which model ---------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
def test_attention_models_are_packed_and_row_invariant(kind: str) -> None:
    forward = forward_of(kind)
    wanted = forward_cpu.LeanForward if kind in LEAN else forward_cpu.PackedForward
    assert type(forward) is wanted, forward.description
    assert forward.row_invariant and forward.supports_drafts and forward.supports_trees and not forward.limits
    assert "row-invariant" in forward.description


@pytest.mark.parametrize(
    ("kind", "cache_kind", "drafts", "reason"),
    [
        ("bloom", "full", True, "can't be exchanged"),
        ("gemma2", "sliding window", False, "softcap"),
        ("mamba", "recurrent", False, "recurrent"),
        ("jamba", "hybrid", False, "hybrid"),
    ],
)
def test_other_models_run_stock_with_the_reason(kind: str, cache_kind: str, drafts: bool, reason: str) -> None:
    forward = forward_of(kind)
    assert isinstance(forward, StockForward)
    assert forward.cache_kind == cache_kind
    assert forward.supports_drafts is drafts
    assert not forward.row_invariant
    assert reason in forward.description
    assert drafts or forward.limits


def test_a_mixture_of_experts_never_claims_more_than_it_keeps() -> None:
    forward = forward_of("mixtral")
    ids = tokens(40)
    whole, _ = by_widths(forward, ids, [40])
    singly, _ = by_widths(forward, ids, [1] * 40)
    assert float((whole - singly).abs().max()) < 1e-3
    if forward.row_invariant:
        assert torch.equal(whole, singly)


# ---- logits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*PACKED, "mixtral", "gemma2", "bloom", "mamba", "jamba"])
def test_logits_are_those_of_transformers(kind: str) -> None:
    ids = tokens(150, seed=3)
    with torch.inference_mode():
        wanted = reference(kind)(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    # Past the sliding window and over two of the kernels' blocks, prefilled in parts, then 1 to 9 rows a step.
    found, _ = by_widths(forward_of(kind), ids, [70, 1, 1, 3, 9, 2, 64])
    # A recurrent state carries transformers' own rounding on; packed rows have none to carry.
    assert float((found - wanted).abs().max()) < (1e-4 if forward_of(kind).supports_drafts else 1e-3)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_rows_says_how_many_logits_come_back(kind: str) -> None:
    forward = forward_of(kind)
    ids = tokens(9)
    everything, _ = by_widths(forward, ids, [9])
    for rows in (0, 1, 4, 9):
        logits = forward.step(forward.new_cache(), ids, rows)
        assert logits.shape == (rows, VOCABULARY) and logits.dtype == torch.float32
        assert torch.allclose(logits, everything[9 - rows :], atol=1e-5)
        if forward.row_invariant:
            assert torch.equal(logits, everything[9 - rows :])


# ---- the same bits at any width -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 33), min_size=2, max_size=12), st.integers(0, 1000))
def test_bits_do_not_depend_on_widths(kind: str, widths: list[int], seed: int) -> None:
    forward = forward_of(kind)
    n = sum(widths)
    ids = tokens(n, seed)
    whole, cache_whole = by_widths(forward, ids, [n])
    parts, cache_parts = by_widths(forward, ids, widths)
    assert torch.equal(whole, parts)
    assert_same_keys_and_values(cache_whole, cache_parts)


@pytest.mark.parametrize("kind", PACKED)
def test_prefill_gives_the_bits_of_token_by_token(kind: str) -> None:
    forward = forward_of(kind)
    ids = tokens(270, seed=5)
    whole, cache_whole = by_widths(forward, ids, [270])
    singly, cache_singly = by_widths(forward, ids, [1] * 270)
    assert torch.equal(whole, singly)
    assert_same_keys_and_values(cache_whole, cache_singly)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_width_from_1_to_33(kind: str) -> None:
    forward = forward_of(kind)
    ids = tokens(120, seed=6)
    prefix, rest = ids[:50], ids[50:]
    cache = forward.new_cache()
    forward.step(cache, prefix, 0)
    wanted = forward.step(cache, rest[:33], 33)
    for width in range(1, 34):
        cache.crop(50)
        assert torch.equal(forward.step(cache, rest[:width], width), wanted[:width]), width


# ---- going back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*PACKED, "bloom"])
def test_a_cropped_cache_is_one_that_never_went_on(kind: str) -> None:
    forward = forward_of(kind)
    ids, wrong = tokens(100, seed=8), tokens(60, seed=9)
    wanted, _ = by_widths(forward, ids, [75, 25])
    cache = forward.new_cache()
    forward.step(cache, ids[:75], 0)
    forward.step(cache, wrong, 0)
    cache.crop(200)
    assert cache.length == 135
    cache.crop(75)
    assert cache.length == 75
    found = forward.step(cache, ids[75:], 25)
    if forward.row_invariant:
        assert torch.equal(found, wanted[75:])
    else:
        assert torch.allclose(found, wanted[75:], atol=1e-4)
    cache.crop(0)
    assert cache.length == 0
    again = forward.step(cache, ids[:75], 75)
    assert torch.allclose(again, wanted[:75], atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_state_that_cannot_go_back_says_so(kind: str) -> None:
    forward = forward_of(kind)
    cache = forward.new_cache()
    forward.step(cache, tokens(20), 0)
    cache.crop(20)
    with pytest.raises(UnsupportedModelError, match="can't go back to 19 tokens"):
        cache.crop(19)
    with pytest.raises(UnsupportedModelError, match="no trees"):
        forward.step(cache, tokens(2), 1, [-1, -1])
    cache.crop(0)
    wanted, _ = by_widths(forward, tokens(20), [20])
    assert torch.allclose(forward.step(cache, tokens(20), 20), wanted, atol=1e-5)


def test_the_cache_grows_and_counts_its_bytes() -> None:
    forward = forward_of("llama")
    small, roomy = forward.new_cache(), forward.new_cache(1000)
    ids = tokens(700, seed=2)
    wanted, _ = by_widths(forward, ids, [700])
    for begin in range(0, 700, 50):
        for cache in (small, roomy):
            found = forward.step(cache, ids[begin : begin + 50], 50)
            assert torch.equal(found, wanted[begin : begin + 50])
    per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head_dim, bytes
    assert 700 * per_token <= small.nbytes <= 1.6 * 700 * per_token
    assert roomy.nbytes == 1024 * per_token


# ---- trees -----------------------------------------------------------------------------------------------


@st.composite
def parent_lists(draw: Any) -> list[int]:
    n = draw(st.integers(1, 33))
    return [draw(st.integers(-1 if draw(st.booleans()) else max(-1, i - 3), i - 1)) for i in range(n)]


@pytest.mark.parametrize("kind", PACKED)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(parent_lists(), st.integers(1, 140), st.integers(0, 1000))
def test_tree_rows_have_the_bits_of_the_chain(kind: str, parents: list[int], prefix: int, seed: int) -> None:
    forward = forward_of(kind)
    ids = tokens(prefix + len(parents) + 5, seed)
    prompt, nodes, after = ids[:prefix], ids[prefix:-5], ids[-5:]
    paths, depths = paths_of(parents, len(parents))
    cache = forward.new_cache()
    forward.step(cache, prompt, 0)
    tree = forward.step(cache, nodes, len(nodes), parents)
    chain = forward.new_cache()
    forward.step(chain, prompt, 0)
    for i in range(len(parents)):
        path = paths[i, : depths[i] + 1]
        chain.crop(prefix)
        assert torch.equal(forward.step(chain, nodes[path], 1)[0], tree[i])
    path = paths[len(parents) - 1, : depths[len(parents) - 1] + 1]
    cache.keep(path.tolist())
    assert_same_keys_and_values(cache, chain)
    assert torch.equal(forward.step(cache, after, 5), forward.step(chain, after, 5))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tree_on_the_stock_path(kind: str) -> None:
    forward = forward_of(kind, fast=False)
    assert forward.supports_trees
    ids = tokens(40)
    wanted, _ = by_widths(forward, ids, [40])
    cache = forward.new_cache()
    forward.step(cache, ids[:30], 0)
    # rows 0, 2, 4 are the sequence's own, 1 and 3 are not
    tree = forward.step(cache, [ids[30], 5, ids[31], 9, ids[32]], 5, [-1, -1, 0, 2, 2])
    assert torch.allclose(tree[[0, 2, 4]], wanted[30:33], atol=1e-4)
    cache.keep([0, 2, 4])
    assert cache.length == 33
    assert torch.allclose(forward.step(cache, ids[33:], 7), wanted[33:], atol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_no_tree_is_refused(fast: bool) -> None:
    forward = forward_of("llama", fast)
    cache = forward.new_cache()
    forward.step(cache, tokens(10), 0)
    for parents in ([-1, 1], [0, 0], [-1], [-2, 0]):
        with pytest.raises(EngineError, match="parents"):
            forward.step(cache, tokens(2), 1, parents)
    assert cache.length == 10
    forward.step(cache, tokens(3), 3, [-1, -1, 0])
    with pytest.raises(EngineError, match="keep"):
        forward.step(cache, tokens(1), 1)
    for rows in ([1, 0], [0, 3], [0, 0], [-1]):
        with pytest.raises(EngineError, match="keep"):
            cache.keep(rows)
    cache.keep([])
    assert cache.length == 10
    forward.step(cache, tokens(1), 1)


# ---- falling back ------------------------------------------------------------------------------------------


def _assert_stock_and_unharmed(forward: Forward, reason: str) -> None:
    assert isinstance(forward, StockForward)
    assert reason in forward.description
    ids = torch.from_numpy(tokens(30))[None]
    with torch.inference_mode():
        assert torch.equal(forward.model(ids).logits, reference("llama-odd")(ids).logits)
    assert forward.model.lm_head.weight is forward.model.model.embed_tokens.weight


def test_without_the_compiler_it_serves_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    forward = Forward.load(copy.deepcopy(reference("llama-odd")))
    _assert_stock_and_unharmed(forward, "NUMBA_DISABLE_JIT")


def test_linears_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x, y, team=None: np.multiply(right(self, x, y, team), 1.01, y))
    forward = Forward.load(copy.deepcopy(reference("llama-odd")))
    _assert_stock_and_unharmed(forward, "differ from transformers'")


def test_rows_that_depend_on_their_number_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.__call__

    def wobbling(self: Linear, x: np.ndarray, y: np.ndarray, team: Any = None) -> np.ndarray:
        return np.add(right(self, x, y, team), 1e-6 if len(x) > 4 else 0.0, y)

    monkeypatch.setattr(Linear, "__call__", wobbling)
    forward = Forward.load(copy.deepcopy(reference("llama")))
    assert isinstance(forward, forward_cpu.PackedForward)
    assert not forward.row_invariant and "not row-invariant" in forward.description


def test_a_model_whose_cache_is_broken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DynamicCache

    right = DynamicCache.update

    def forgetful(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return right(self, keys * 1.5, values, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", forgetful)
    with pytest.raises(UnsupportedModelError, match="with a cache differ"):
        Forward.load(copy.deepcopy(reference("llama")))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_model_taken_over_cannot_be_called_by_itself(kind: str) -> None:
    model = forward_of(kind).model
    with torch.inference_mode(), pytest.raises(EngineError, match="belongs to agentspec"):
        model(torch.from_numpy(tokens(3))[None])
