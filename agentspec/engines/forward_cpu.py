"""PackedForward: the CPU's forward in float32, near what memory bandwidth allows, and row-invariant.

    linears     linear.Linear: weights in the fewest bits that give them back exactly, each read once a step
    attention   kernels.Attention over a blocked cache
    the rest    the model's own modules, which work row by row

Built by Forward.load only, which serves with the stock path where this raises NotPackable. Imports torch and, lazily,
transformers. Everything is proved at load against the model's own logits, and rows against each other.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from agentspec.engines import kernels, linear
from agentspec.engines.forward import (
    Forward,
    KVCache,
    NotPackable,
    StockForward,
    check_rows,
    paths_of,
    windows_of,
)
from agentspec.engines.team import Team, torch_team
from agentspec.errors import EngineError

__all__ = ["PackedForward"]

log = logging.getLogger(__name__)

_NO_PATHS = np.zeros((0, 0), np.int32)
_ATTENTION = "agentspec"


class BlockedCache(KVCache):
    """Keys and values in blocks of 64 slots (see kernels), one pair of arrays a layer, grown by half when full."""

    def __init__(self, layers: int, capacity: int = 0) -> None:
        self.length = 0
        self.step_start = 0
        self.tree = False
        self._blocks = -(-capacity // kernels.BLOCK)
        self._layers: list[tuple[np.ndarray, np.ndarray] | None] = [None] * layers
        self._places = np.zeros((layers, 6), np.int64)  # what move_slots wants to know of them

    @property
    def nbytes(self) -> int:
        return sum(pair[0].nbytes + pair[1].nbytes for pair in self._layers if pair is not None)

    def crop(self, length: int) -> None:
        if length < self.length:
            self.length = max(length, 0)
            self.tree = False

    def keep(self, rows: Sequence[int]) -> None:
        check_rows(rows, self.length - self.step_start)
        moved = np.asarray(rows, np.int64)
        if not np.array_equal(moved, np.arange(len(moved))):
            kernels.move_slots(self._places, self.step_start, moved)
        self.length = self.step_start + len(moved)
        self.tree = False

    def arrays(
        self, layer: int, tokens: int, heads: int, key_dim: int, value_dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The layer's (keys, values) with room for `tokens`."""
        pair = self._layers[layer]
        needed = -(-tokens // kernels.BLOCK)
        if pair is not None and pair[0].shape[0] >= needed:
            return pair
        held = 0 if pair is None else pair[0].shape[0]
        blocks = max(needed, self._blocks, held + held // 2)
        # Zeros, because slots not yet written are read, times a weight of 0; untouched pages cost no memory.
        keys = np.zeros((blocks, heads, key_dim, kernels.BLOCK), np.float32)
        width = -(-value_dim // kernels.VALUE_STEP) * kernels.VALUE_STEP
        values = np.zeros((blocks, heads, kernels.BLOCK, width), np.float32)
        if pair is not None:
            keys[:held], values[:held] = pair
        self._layers[layer] = keys, values
        self._places[layer] = keys.ctypes.data, values.ctypes.data, blocks, heads, key_dim, width
        return keys, values


class _Step(threading.local):
    """The step that runs on this thread: how transformers' attention modules find the cache. Set by PackedForward."""

    cache: BlockedCache | None = None
    attention: kernels.Attention | None = None
    team: Team | None = None
    windows: Sequence[int] = ()


_step = _Step()


def _taken_over(*_: Any, **__: Any) -> NoReturn:
    raise EngineError("this model belongs to agentspec's packed forward; load another one for other uses")


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, n, dim], new keys and values [1, kv_heads, n, dim]."""
    cache = _step.cache
    if cache is None:
        _taken_over()
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise NotPackable(f"its attention uses {name}")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotPackable("its attention mixes keys of several sequences or layers")
    if query.shape[1] % key.shape[1] or query.dtype != torch.float32:
        raise NotPackable(f"its heads are of a shape the kernel doesn't take ({tuple(query.shape)}, {query.dtype})")
    layer = module.layer_idx
    scale = options.get("scaling")
    out = attend(
        cache,
        layer,
        query[0].transpose(0, 1).contiguous().numpy(),
        key[0].transpose(0, 1).numpy(),
        value[0].transpose(0, 1).numpy(),
        _step.windows[layer],
        query.shape[-1] ** -0.5 if scale is None else float(scale),
    )
    return torch.from_numpy(out)[None], None


def attend(
    cache: BlockedCache,
    layer: int,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    window: int,
    scale: float,
) -> np.ndarray:
    """Write this step's keys and values behind the cache's end and attend: float32 [n, heads, value_dim]."""
    n, heads, _ = query.shape
    start = cache.length
    keys, values = cache.arrays(layer, start + n, key.shape[1], key.shape[2], value.shape[2])
    kernels.write_slots(keys, values, key, value, start)
    out = np.empty((n, heads, value.shape[2]), np.float32)
    assert _step.attention is not None
    _step.attention(query, keys, values, out, window, np.float32(scale))
    return out


class PackedLinear(nn.Module):
    """A linear.Linear in a torch linear's place. x float32 [..., in] -> [..., out]."""

    def __init__(self, packed: linear.Linear) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.packed.inputs).contiguous()
        y = torch.empty(len(flat), self.packed.outputs)
        self.packed(flat.numpy(), y.numpy(), _step.team)
        return y.view(*x.shape[:-1], self.packed.outputs)


class RowwiseActivation(nn.Module):
    """An activation whose result doesn't depend on where in the tensor an element lies. x float32 [..., width].

    torch computes whole vectors and a tail of single elements by different code, which rounds silu and gelu
    differently, and cuts what is large into one piece a thread, each with a tail. Here no piece has a tail.
    """

    VECTOR = 64  # floats: twice the widest vector, torch's unit of work
    PIECE = 32768  # at::internal::GRAIN_SIZE: what is smaller is not cut

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        if width % self.VECTOR:
            rows = nn.functional.pad(rows, (0, -width % self.VECTOR))
        at_once = max(1, (self.PIECE - 1) // rows.shape[1])
        if len(rows) <= at_once:
            y: torch.Tensor = self.inner(rows.contiguous())
        else:
            y = torch.cat([self.inner(piece.contiguous()) for piece in torch.split(rows, at_once)])
        return y[:, :width].view(x.shape) if width == y.shape[1] else y[:, :width].reshape(x.shape)


class PackedForward(Forward):
    """transformers' modules with packed linears and the kernels' attention: any plain attention model."""

    name = "transformers' modules with packed linears and blocked attention"

    @torch.inference_mode()
    def __init__(self, stock: StockForward) -> None:
        """Raises NotPackable, and leaves the model as it was, where it can't be run or doesn't prove right."""
        self.model = stock.model
        self.vocabulary = stock.vocabulary
        self.cache_kind = stock.cache_kind
        self._cache_name = stock.cache_name
        self._windows = windows_of(stock)
        self._formats: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        try:
            self._build()
            self._prove(stock)
        except Exception as error:
            while self._undo:
                self._undo.pop()()
            if isinstance(error, NotPackable):
                raise
            raise NotPackable(f"{type(error).__name__}: {error}") from error
        self._undo.clear()
        self._let_go_of_files()
        formats = ", ".join(sorted(self._formats))
        self.description = f"{self.name} (weights as {formats}; {'' if self.row_invariant else 'not '}row-invariant)"

    def new_cache(self, capacity: int = 0) -> KVCache:
        return BlockedCache(len(self._windows), capacity)

    @torch.inference_mode()
    def step(
        self, cache: KVCache, ids: Sequence[int] | np.ndarray, rows: int = 1, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        assert isinstance(cache, BlockedCache)
        cache.check_settled()
        new = np.ascontiguousarray(ids, dtype=np.int64)
        n = len(new)
        start = cache.length
        if parents is None:
            paths, depths = _NO_PATHS, np.arange(n, dtype=np.int32)
        else:
            paths, depths = paths_of(parents, n)
        _step.windows = self._windows
        _step.team = torch_team()
        _step.attention = kernels.Attention(start, paths, depths, _step.team)
        _step.cache = cache
        try:
            logits = self._logits(new, torch.from_numpy(depths.astype(np.int64) + start)[None], rows)
        finally:
            _step.cache = _step.attention = _step.team = None
        cache.step_start = start
        cache.length = start + n
        cache.tree = parents is not None
        return logits

    def _logits(self, ids: np.ndarray, positions: torch.Tensor, rows: int) -> torch.Tensor:
        cache = _step.cache
        assert cache is not None
        out = self.model(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=max(rows, 1),
            **{self._cache_name: _passing_cache(len(self._windows), cache.length)},
        )
        logits: torch.Tensor = out.logits[0]
        return logits[logits.shape[0] - rows :]

    # ---- built and proved once ------------------------------------------------------------------

    def _build(self) -> None:
        """Exchange linears, activations and attention in the model, leaving in _undo how to go back."""
        from transformers import AttentionInterface
        from transformers.activations import ACT2CLS

        if not getattr(self.model, "_supports_attention_backend", False):
            raise NotPackable("its attention can't be exchanged")
        implementation = self.model.config._attn_implementation
        AttentionInterface.register(_ATTENTION, _attention)
        self._undo.append(lambda: self.model.set_attn_implementation(implementation))
        self.model.set_attn_implementation(_ATTENTION)
        kinds = [kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()]
        activations = {kind for kind in kinds if isinstance(kind, type)}
        packed: dict[int, PackedLinear] = {}
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) in activations:
                    self._exchange(parent, name, RowwiseActivation(child))
                elif id(child) in packed or _weight_of(child) is not None:
                    if id(child) not in packed:
                        packed[id(child)] = PackedLinear(self._pack([child]))
                    self._exchange(parent, name, packed[id(child)])
        if not packed:
            raise NotPackable("it has no linears to pack")

    def _exchange(self, parent: nn.Module, name: str, new: nn.Module) -> None:
        old = getattr(parent, name)
        self._undo.append(lambda: setattr(parent, name, old))
        setattr(parent, name, new)

    def _pack(self, modules: Sequence[Any]) -> linear.Linear:
        """One packed linear for all of them, outputs side by side.

        Weights that nothing else uses are freed at once, so memory never holds the model twice.
        """
        weights = [_weight_of(module) for module in modules]
        if any(weight is None for weight in weights):
            raise NotPackable("its linears are not plain float32 ones")
        biases = [module.bias for module in modules]
        if any((bias is None) != (biases[0] is None) for bias in biases):
            raise NotPackable("some of its joined linears have a bias and some have none")
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # type: ignore[arg-type]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        packed = linear.Linear(weight.numpy(), None if bias is None else bias.numpy())  # type: ignore[union-attr]
        self._formats.add(packed.format)
        embeddings = {m.weight.data_ptr() for m in self.model.modules() if isinstance(m, nn.Embedding)}
        begin = 0
        for module, part in zip(modules, weights, strict=True):
            assert part is not None
            end = begin + part.shape[0]
            if module.weight.data_ptr() not in embeddings:
                self._undo.append(functools.partial(_restore, module, packed, begin, end))
                module.weight = None
            begin = end
        return packed

    def _let_go_of_files(self) -> None:
        """Copy what is left of the weights (embeddings, norms): safetensors maps files, and one view holds it all."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()

    def _prove(self, stock: StockForward) -> None:
        """Prefilled in parts, token by token, in one piece and as a tree: the model's logits, and the same bits."""
        ids = stock.probe_ids
        cache = self.new_cache()
        whole = self.step(cache, ids, len(ids))
        found = stock.difference(whole)
        if not found <= stock.tolerance:
            raise NotPackable(f"its logits differ from transformers' by {found:.1e}, more than {stock.tolerance:.1e}")
        parts = []
        cache = self.new_cache()
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 9), (9, len(ids))):
            parts.append(self.step(cache, ids[begin:end], end - begin))
        same = torch.equal(torch.cat(parts), whole)
        cache.crop(6)
        tree = self.step(cache, [ids[6], ids[0], ids[7], ids[8]], 4, [-1, 0, 0, 2])
        cache.keep([0, 2, 3])
        tail = self.step(cache, ids[9:], len(ids) - 9)
        same = same and torch.equal(torch.cat([tree[[0, 2, 3]], tail]), whole[6:])
        found = stock.difference(torch.cat([whole[:6], tree[[0, 2, 3]], tail]))
        if not found <= stock.tolerance:
            raise NotPackable(f"its logits over a tree differ from transformers' by {found:.1e}")
        rope = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        # These frequencies change with the length of the whole input, so with the draft.
        follows_length = str(rope).find("dynamic") >= 0 or str(rope).find("longrope") >= 0
        self.row_invariant = same and not follows_length


class LeanForward(PackedForward):
    """Llama's layers (Qwen2, Qwen3 and Mistral have them too) without transformers' modules around them.

    A step of transformers' modules spends some 10 ms in Python over SmolLM2's 30 layers, this one 1 ms. Per layer four
    linears (queries, keys and values as one, gate and up as one), four kernels and the attention.
    """

    name = "own layers with packed linears and blocked attention"
    KINDS = ("llama", "mistral", "qwen2", "qwen3")

    def _build(self) -> None:
        model, config = self.model, self.model.config
        if (
            config.model_type not in self.KINDS
            or type(model).__name__ != f"{type(model.model).__name__[:-5]}ForCausalLM"
        ):
            raise NotPackable(f"{type(model).__name__} is not one of {', '.join(self.KINDS)}")
        if config.hidden_act not in ("silu", "swish"):
            raise NotPackable(f"its activation is {config.hidden_act}")
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = model.model.layers[0].self_attn.head_dim
        if self._heads % self._kv_heads:
            raise NotPackable(f"its heads are {self._heads} and {self._kv_heads} of {self._dim}")
        self._embedding = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._layers = [self._layer(layer) for layer in model.model.layers]
        self._norm = _norm_of(model.model.norm)
        self._head = self._pack([model.lm_head])
        self._undo.append(lambda: delattr(model, "forward"))
        model.forward = _taken_over

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if set(dict(layer.named_children())) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            raise NotPackable("its layers have other parts than Llama's")
        none = np.empty(0, np.float32)
        return _Layer(
            joined=self._pack([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._pack([attention.o_proj]),
            gate_up=self._pack([mlp.gate_proj, mlp.up_proj]),
            down=self._pack([mlp.down_proj]),
            first=_norm_of(layer.input_layernorm),
            second=_norm_of(layer.post_attention_layernorm),
            query=_norm_of(attention.q_norm) if hasattr(attention, "q_norm") else (none, np.float32(0)),
            key=_norm_of(attention.k_norm) if hasattr(attention, "k_norm") else (none, np.float32(0)),
            scale=np.float32(attention.scaling),
        )

    def _logits(self, ids: np.ndarray, positions: torch.Tensor, rows: int) -> torch.Tensor:
        cache = _step.cache
        assert cache is not None and _step.attention is not None
        n, start = len(ids), cache.length
        x = self._embedding[torch.from_numpy(ids)].numpy()
        first = self._layers[0]
        # Each is written anew in every layer.
        hidden, change = np.empty_like(x), np.empty_like(x)
        joined = np.empty((n, first.joined.outputs), np.float32)
        gate_up = np.empty((n, first.gate_up.outputs), np.float32)
        gated = np.empty((n, first.down.inputs), np.float32)
        attended = np.empty((n, first.out.inputs), np.float32)
        query = np.empty((n, self._heads, self._dim), np.float32)
        out = attended.reshape(n, self._heads, self._dim)
        cos, sin = (part[0].contiguous().numpy() for part in self._rotary(self._embedding, positions))
        attention, team, windows = _step.attention, _step.team, self._windows
        for index, layer in enumerate(self._layers):
            if index == 0:
                kernels.norm(x, *layer.first, hidden)
            else:
                kernels.add_norm(x, change, *layer.first, hidden)
            keys, values = cache.arrays(index, start + n, self._kv_heads, self._dim, self._dim)
            layer.joined(hidden, joined, team)
            kernels.rotate_heads(
                joined, n, cos, sin, layer.query[0], layer.key[0], layer.query[1], query, keys, values, start
            )
            attention(query, keys, values, out, windows[index], layer.scale)
            kernels.add_norm(x, layer.out(attended, change, team), *layer.second, hidden)
            kernels.gate(layer.gate_up(hidden, gate_up, team), n, gated)
            layer.down(gated, change, team)
        logits = torch.empty(rows, self.vocabulary)
        if rows:
            kernels.add_norm(x[n - rows :], change[n - rows :], *self._norm, hidden[:rows])
            self._head(hidden[:rows], logits.numpy(), team)
        return logits


@dataclass(slots=True)
class _Layer:
    """One layer's weights. A norm is (weight, epsilon); the query's and key's weights have no length where there is
    no such norm."""

    joined: linear.Linear
    out: linear.Linear
    gate_up: linear.Linear
    down: linear.Linear
    first: tuple[np.ndarray, np.float32]
    second: tuple[np.ndarray, np.float32]
    query: tuple[np.ndarray, np.float32]
    key: tuple[np.ndarray, np.float32]
    scale: np.float32


def _norm_of(module: Any) -> tuple[np.ndarray, np.float32]:
    """(weight, epsilon) of an RMS norm."""
    if not hasattr(module, "variance_epsilon") or getattr(module, "bias", None) is not None:
        raise NotPackable("its norms are not plain RMS norms")
    return module.weight.detach().numpy().copy(), np.float32(module.variance_epsilon)


def _restore(module: Any, packed: linear.Linear, begin: int, end: int) -> None:
    """Give a linear its weight back."""
    weight = torch.from_numpy(packed.dense())[begin:end]
    weight = weight if type(module) is nn.Linear else weight.t()
    module.weight = nn.Parameter(weight.contiguous().clone(), requires_grad=False)


def _weight_of(module: nn.Module) -> torch.Tensor | None:
    """[out, in] of a float32 nn.Linear, or of the Conv1D that GPT-2 has in its place; None for other modules."""
    from transformers.pytorch_utils import Conv1D

    if type(module) not in (nn.Linear, Conv1D) or module.weight is None or module.weight.dtype != torch.float32:
        return None
    held: Any = module.weight
    weight: torch.Tensor = held.detach()
    return weight if type(module) is nn.Linear else weight.t().contiguous()


def _passing_cache(layers: int, length: int) -> Any:
    """What transformers' modules see as the cache: it tells the length and hands the new keys and values through."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class Passing(CacheLayerMixin):  # type: ignore[no-untyped-call]
        is_sliding = False

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            pass

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            return key_states, value_states

        def get_seq_length(self) -> int:
            return length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return length + query_length, 0

        def get_max_length(self) -> int:
            return -1

    return Cache(layers=[Passing() for _ in range(layers)])  # type: ignore[no-untyped-call]
