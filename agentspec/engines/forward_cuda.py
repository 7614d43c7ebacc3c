"""GraphForward: the GPU's forward: static keys and values, and one captured CUDA graph a step.

    prompt     in pieces as they come, run as they are
    step       its rows filled up to `width`, one graph replayed; more rows than that: several replays
    attention  over the first `bucket` slots of the static keys and values, the smallest bucket that holds the step

A step is bound by reading the weights, and the same weights are read for 1 row and for 32: so by default there is one
width, and plain decoding runs the very kernels that a draft's verification runs, which makes a row's bits independent
of the rows that go with it. Narrower graphs may be asked for (`widths`); what they save is measured by
benchmarks/gpu.py, and what they cost is that near-ties are decided again.

Everything but the capture itself is plain torch and runs on the CPU too, where the tests hold it against
StockForward. Built by Forward.load only, which serves with the stock path where this raises NotPackable.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from agentspec.engines.forward import Forward, KVCache, NotPackable, StockForward, paths_of, windows_of
from agentspec.engines.static_kv import GraphCache, StaticKeysValues
from agentspec.errors import EngineError, InvalidRequestError

__all__ = ["Capture", "GraphForward", "cuda_graphs"]

log = logging.getLogger(__name__)

# Takes a function without arguments that reads and writes tensors at fixed addresses only and returns one of them;
# returns what does the same each time it is called, on what those tensors hold then.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

WIDTH = 32
# A value head is summed in pieces of this many slots, side by side: one block of threads a head would leave the most
# of a GPU idle. Buckets are whole numbers of them.
_PIECE = 128
_ROOM_FOR_TREES = 256  # a tree's rows take slots beyond the context's end before `keep`, and so do a graph's spare rows

_capturing = threading.Lock()  # torch: one capture at a time in a process


def cuda_graphs(device: torch.device) -> Capture:
    """Captures on the device. All graphs share one memory pool: they never run at the same time, and what one leaves
    is read before the next runs."""
    pool = torch.cuda.graph_pool_handle()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with _capturing, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
            # The outermost stream context: torch leaves its own side stream current where a capture fails.
            now = torch.cuda.current_stream()
            stream.wait_stream(now)
            with torch.cuda.stream(stream):  # libraries choose kernels and take workspaces at the first run
                for _ in range(2):
                    body()
            now.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: another engine's thread may allocate meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = body()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture


@dataclass(slots=True)
class _Graph:
    """One width and bucket. inputs: int64 [3 * width + 1 + width * width], see GraphForward._fill."""

    inputs: torch.Tensor
    run: Callable[[], torch.Tensor] | None = None


@dataclass(slots=True)
class _Layer:
    """One layer's weights. head_norm: [heads + kv_heads, head_dim], or None; biases may be None."""

    joined: torch.Tensor
    joined_bias: torch.Tensor | None
    out: Any
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: Any
    first: torch.Tensor
    second: torch.Tensor
    head_norm: torch.Tensor | None
    epsilon: float
    scale: float


class GraphForward(Forward):
    """Llama's layers (Qwen2, Qwen3 and Mistral have them too) over static keys and values.

    widths:  rows that a graph is made for; a step takes the narrowest that holds it, a longer one several
    trees:   None: where a tree's rows have the bits of a chain's, or a chain's depend on the width anyway: trees never
             cost what chains keep. True, False: always, never
    capture: None: CUDA graphs on CUDA, elsewhere none
    noise:   twice the largest difference in a logit that was seen at load between widths, and between tree and chain
    """

    KINDS = ("llama", "mistral", "qwen2", "qwen3")

    @torch.no_grad()
    def __init__(
        self,
        stock: StockForward,
        widths: Sequence[int] = (WIDTH,),
        trees: bool | None = None,
        capture: Capture | None = None,
    ) -> None:
        """Raises NotPackable where the model can't be run or doesn't prove right; the model itself stays usable."""
        if not widths or min(widths) < 1 or max(widths) > _ROOM_FOR_TREES // 2:
            raise InvalidRequestError(f"widths: needed numbers from 1 to {_ROOM_FOR_TREES // 2}, got {widths!r}")
        self.model = model = stock.model
        self.vocabulary = stock.vocabulary
        self.tolerance = stock.tolerance
        self.cache_kind = stock.cache_kind
        self.widths = sorted(set(widths))
        self._windows = windows_of(stock)
        self._build(model)
        config = model.config
        parameter = next(model.parameters())
        self.device = parameter.device
        self._most = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self._space = StaticKeysValues(
            (len(self._layers), self._kv_heads, self._dim), parameter.dtype, self.device, self._most + _ROOM_FOR_TREES
        )
        on_cuda = self.device.type == "cuda"
        self._capture = capture or (cuda_graphs(self.device) if on_cuda else None)
        self._uncaptured = ""
        self._outputs: dict[int, torch.Tensor] = {}  # by width, float32 [width, vocabulary]: one for all buckets
        try:
            tree_alike = self._prove(stock)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise NotPackable(f"{type(error).__name__}: {error}") from error
        if trees is False or (trees is None and self.row_invariant and not tree_alike):
            self.supports_trees = False
            self.limits = (
                "trees are not asked for" if trees is False else "a tree's rows round differently from a chain's"
            )
        elif not tree_alike:
            self.row_invariant = False
        if self.row_invariant:
            self.noise = 0.0
        self._describe()

    def _describe(self) -> None:
        how = (
            f"not captured: {self._uncaptured}" if self._uncaptured else "captured" if self._capture else "not captured"
        )
        self.description = (
            f"own layers over static keys and values, graphs of {', '.join(map(str, self.widths))} rows ({how}; "
            f"{'' if self.row_invariant else 'not '}row-invariant on the probe)"
        )

    def new_cache(self, capacity: int = 0) -> KVCache:
        return GraphCache(self._space)

    # ---- a step -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(
        self, cache: KVCache, ids: Sequence[int] | np.ndarray, rows: int = 1, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        assert isinstance(cache, GraphCache)
        cache.check_settled()
        new = np.ascontiguousarray(ids, dtype=np.int64)
        n, start, widest = len(new), cache.length, self.widths[-1]
        if start + n + widest > self._space.sizes[-1]:
            raise EngineError(
                f"step: needed tokens of the model's context of {self._most} tokens, got {start} and {n} more"
            )
        paths = depths = None
        if parents is not None:
            paths, depths = paths_of(parents, n)
        self._space.hold(cache, self._bucket(start + n - 1))
        # Prompt tokens beyond a graph's width run apart from the rows that choose: how they run then depends on the
        # prompt only, and not on the draft that follows.
        head = n - rows if rows else n
        if not (head > widest or (parents is not None and n > widest)):
            head = 0
        if head and parents is not None and any(parent != i - 1 for i, parent in enumerate(parents[: head + 1])):
            head = 0
        if head:
            self._wide(new[:head], start, None, None, 0)
        if head < n:
            begin = start + head
            if paths is None or depths is None:
                parts = [self._narrow(new[head + a : head + b], begin + a) for a, b in self._pieces(begin, n - head)]
                logits = torch.cat(parts)
            else:
                if head:
                    paths, depths = paths_of([p - head for p in parents[head:]], n - head)  # type: ignore[index]
                one = n - head <= widest
                logits = (self._narrow if one else self._wide)(new[head:], begin, paths, depths)
            logits = logits[len(logits) - rows :].float()
        else:
            logits = torch.empty(0, self.vocabulary, device=self.device)
        cache.step_start = start
        cache.length = start + n
        cache.tree = parents is not None
        return logits

    def _bucket(self, position: int) -> int:
        """The slots that a step sees whose first row is at this position. A function of the position alone, so that
        the row is computed alike whatever step it is in."""
        return self._space.bucket(position, self.widths[-1])

    def _pieces(self, start: int, n: int) -> list[tuple[int, int]]:
        """A chain's rows by the replays that they take: none is wider than a graph, none sees two buckets."""
        pieces, begin = [], 0
        while begin < n:
            end = min(n, begin + self.widths[-1])
            while self._bucket(start + end - 1) != self._bucket(start + begin):
                end -= 1
            pieces.append((begin, end))
            begin = end
        return pieces

    def _narrow(
        self, ids: np.ndarray, start: int, paths: np.ndarray | None = None, depths: np.ndarray | None = None
    ) -> torch.Tensor:
        """Rows that fit a graph, at slots from `start` on: float32 [n, vocabulary]."""
        n = len(ids)
        width = next(w for w in self.widths if w >= n)
        key = width, self._bucket(start)
        graph = self._space.graphs.get(key)
        if graph is None:
            size = 3 * width + 1 + width * width
            graph = self._space.graphs[key] = _Graph(torch.zeros(size, dtype=torch.int64, device=self.device))
        graph.inputs.copy_(torch.from_numpy(self._fill(ids, start, width, paths, depths)))
        if graph.run is None:
            graph.run = self._captured(graph.inputs, *key)
        return graph.run()[:n].clone()  # the next replay overwrites it

    @staticmethod
    def _fill(
        ids: np.ndarray, start: int, width: int, paths: np.ndarray | None, depths: np.ndarray | None
    ) -> np.ndarray:
        """A graph's inputs: ids, positions and slots of the rows, where the step starts, and which of its rows each
        row sees. Rows beyond n go on as a chain would: what they leave lies behind the end."""
        n = len(ids)
        inputs = np.zeros(3 * width + 1 + width * width, np.int64)
        inputs[:n] = ids
        inputs[width : 2 * width] = inputs[2 * width : 3 * width] = np.arange(start, start + width)
        inputs[3 * width] = start
        own = inputs[3 * width + 1 :].reshape(width, width)
        own[:] = np.tri(width, dtype=np.int64)
        if paths is not None and depths is not None:
            inputs[width : width + n] = start + depths
            own[:n] = 0
            for i in range(n):
                own[i, paths[i, : depths[i] + 1]] = 1
        return inputs

    def _captured(self, inputs: torch.Tensor, width: int, bucket: int) -> Callable[[], torch.Tensor]:
        out = self._outputs.get(width)
        if out is None:
            out = self._outputs[width] = torch.empty(width, self.vocabulary, device=self.device)

        def body() -> torch.Tensor:
            return self._static(inputs, out, width, bucket)

        if self._capture is None or self._uncaptured:
            return body
        try:
            return self._capture(body)
        except RuntimeError as error:
            # Slower, but right: what was to be captured can be run.
            self._uncaptured = str(error).partition("\n")[0]
            log.warning("no CUDA graph for %d rows over %d slots, run as they are: %s", width, bucket, error)
            self._describe()
            return body

    def _static(self, inputs: torch.Tensor, out: torch.Tensor, width: int, bucket: int) -> torch.Tensor:
        """What is captured: nothing here may depend on values on the host, or wait for the device."""
        ids, positions, slots = inputs[: 3 * width].view(3, width)
        start, own = inputs[3 * width], inputs[3 * width + 1 :].view(width, width)
        slot = torch.arange(bucket, device=self.device)
        behind = slot - start
        inside = (behind >= 0) & (behind < width)
        seen = torch.where(inside, own.index_select(1, behind.clamp(0, width - 1)) != 0, slot < start)
        groups = self._heads // self._kv_heads
        masks = {}
        for window in set(self._windows):
            # A row's own step is never as long as a window (see _build), so slots tell how far back a token is.
            visible = seen & (inside | (slot > positions[:, None] - window)) if window else seen
            hidden = torch.zeros(width, bucket, device=self.device).masked_fill_(~visible, float("-inf"))
            masks[window] = hidden.repeat(groups, 1)

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self._space.kv[layer, :, :bucket]
            q = self._fold(query)
            scores = _product(q, keys.permute(1, 2, 0))
            weights = torch.add(masks[self._windows[layer]], scores, alpha=self._layers[layer].scale).softmax(-1)
            # Slot s is the (s // pieces)th of piece s % pieces: so the pieces' values are one strided batch.
            pieces = bucket // _PIECE
            split = weights.view(self._kv_heads, -1, _PIECE, pieces).permute(3, 0, 1, 2).to(values.dtype)
            split = split.reshape(pieces * self._kv_heads, -1, _PIECE)
            parts = _product(split, values.reshape(_PIECE, pieces * self._kv_heads, -1).transpose(0, 1))
            out = parts.view(pieces, self._kv_heads, -1, self._dim).sum(0)
            return self._unfold(out.to(values.dtype), width)

        return out.copy_(self._logits(self._hidden(ids, positions, slots, attend)))

    def _wide(
        self,
        ids: np.ndarray,
        start: int,
        paths: np.ndarray | None,
        depths: np.ndarray | None,
        rows: int | None = None,
    ) -> torch.Tensor:
        """Any number of rows, never captured. rows: how many logits; None: all."""
        n = len(ids)
        end = start + n
        seen = np.ones((n, end), bool)
        if paths is None or depths is None:
            depths = np.arange(n)
            seen[:, start:] = np.tri(n, dtype=bool)
        else:
            seen[:, start:] = False
            for i in range(n):
                seen[i, start + paths[i, : depths[i] + 1].astype(np.int64)] = True
        positions = start + depths.astype(np.int64)
        of_slot = np.concatenate([np.arange(start), positions])
        masks = {}
        for window in set(self._windows):
            visible = seen & (of_slot > positions[:, None] - window) if window else seen
            mask = torch.from_numpy(visible).to(self.device)
            masks[window] = mask.repeat(self._heads // self._kv_heads, 1)

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = (part.transpose(0, 1)[None] for part in self._space.kv[layer, :, :end])
            out = F.scaled_dot_product_attention(
                self._fold(query)[None],
                keys,
                values,
                attn_mask=masks[self._windows[layer]][None, None],
                scale=self._layers[layer].scale,
            )
            return self._unfold(out[0], n)

        slots = torch.arange(start, end, device=self.device)
        x = self._hidden(
            torch.from_numpy(ids).to(self.device), torch.from_numpy(positions).to(self.device), slots, attend
        )
        return self._logits(x if rows is None else x[n - rows :])

    def _fold(self, query: torch.Tensor) -> torch.Tensor:
        """[n, heads, dim] -> [kv_heads, groups * n, dim]: the heads that share keys become rows, and the keys need
        no copies."""
        n = query.shape[0]
        return query.view(n, self._kv_heads, -1, self._dim).permute(1, 2, 0, 3).reshape(self._kv_heads, -1, self._dim)

    def _unfold(self, out: torch.Tensor, n: int) -> torch.Tensor:
        """[kv_heads, groups * n, dim] -> [n, heads * dim]"""
        return out.view(self._kv_heads, -1, n, self._dim).permute(2, 0, 1, 3).reshape(n, -1)

    # ---- the layers -------------------------------------------------------------------------------

    def _hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """[n, hidden] after the last layer. attend(layer, [n, heads, dim]) -> [n, heads * dim]"""
        n, both = len(ids), self._heads + self._kv_heads
        x = F.embedding(ids, self._embedding)
        cos, sin = (part[0][:, None] for part in self._rotary(x[None], positions[None]))
        half = self._dim // 2
        sin = sin[..., :half]
        shape = (x.shape[1],)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, shape, layer.first, layer.epsilon)
            joined = F.linear(normed, layer.joined, layer.joined_bias).view(n, -1, self._dim)
            heads = joined[:, :both]
            if layer.head_norm is not None:
                heads = F.rms_norm(heads, (self._dim,), None, layer.epsilon) * layer.head_norm
            turned = heads * cos
            turned[..., :half].addcmul_(heads[..., half:], sin, value=-1)
            turned[..., half:].addcmul_(heads[..., :half], sin)
            keys, values = self._space.kv[index]
            keys.index_copy_(0, slots, turned[:, self._heads :])
            values.index_copy_(0, slots, joined[:, both:])
            x = x + F.linear(attend(index, turned[:, : self._heads]), layer.out.weight, layer.out.bias)
            normed = F.rms_norm(x, shape, layer.second, layer.epsilon)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down.weight, layer.down.bias)
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.model.model.norm
        x = F.rms_norm(x, (x.shape[1],), norm.weight, norm.variance_epsilon)
        return F.linear(x, self.model.lm_head.weight, self.model.lm_head.bias)

    # ---- built and proved once ----------------------------------------------------------------------

    def _build(self, model: Any) -> None:
        config = model.config
        if (
            config.model_type not in self.KINDS
            or type(model).__name__ != f"{type(model.model).__name__[:-5]}ForCausalLM"
        ):
            raise NotPackable(f"{type(model).__name__} is not one of {', '.join(self.KINDS)}")
        if config.hidden_act not in ("silu", "swish"):
            raise NotPackable(f"its activation is {config.hidden_act}")
        kinds = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
        if len(kinds) > 1 or not next(iter(kinds))[1].is_floating_point:
            raise NotPackable(f"its weights are of {len(kinds)} kinds or devices, or not plain floats")
        if any(0 < window < max(self.widths) for window in self._windows):
            raise NotPackable(f"its sliding window is narrower than a step of {max(self.widths)} rows")
        rope = str(getattr(config, "rope_parameters", None) or "")
        if "dynamic" in rope or "longrope" in rope:
            raise NotPackable("its rotary frequencies change with the length of the input")
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = model.model.layers[0].self_attn.head_dim
        if self._heads % self._kv_heads or self._dim % 2:
            raise NotPackable(f"its heads are {self._heads} and {self._kv_heads} of {self._dim}")
        self._embedding = model.model.embed_tokens.weight.detach()
        self._rotary = model.model.rotary_emb
        self._layers = [self._layer(layer) for layer in model.model.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if set(dict(layer.named_children())) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            raise NotPackable("its layers have other parts than Llama's")
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(type(linear) is not nn.Linear for linear in linears):
            raise NotPackable("its linears are not plain ones")
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        head_norm = None
        if hasattr(attention, "q_norm"):
            norms += [attention.q_norm, attention.k_norm]
        if len({getattr(norm, "variance_epsilon", None) for norm in norms} | {None}) != 2:
            raise NotPackable("its norms are not plain RMS norms of one epsilon")
        if hasattr(attention, "q_norm"):
            weights = [
                attention.q_norm.weight.expand(self._heads, -1),
                attention.k_norm.weight.expand(self._kv_heads, -1),
            ]
            head_norm = torch.cat(weights).detach()
        joined, joined_bias = _join(linears[:3])
        gate_up, gate_up_bias = _join(linears[4:6])
        return _Layer(
            joined=joined,
            joined_bias=joined_bias,
            out=attention.o_proj,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=mlp.down_proj,
            first=norms[0].weight.detach(),
            second=norms[1].weight.detach(),
            head_norm=head_norm,
            epsilon=float(norms[0].variance_epsilon),
            scale=float(attention.scaling),
        )

    def _prove(self, stock: StockForward) -> bool:
        """The model's logits, in pieces, row by row and over a tree; sets row_invariant and noise. Returns whether
        the tree's rows have the chain's bits."""
        ids = stock.probe_ids
        n = len(ids)
        whole = self.step(self.new_cache(), ids, n)
        apart = stock.difference(whole)
        cache = self.new_cache()
        cuts = [0, 1, 2, 5, 6, 14, n]
        parts = torch.cat([self.step(cache, ids[a:b], b - a) for a, b in itertools.pairwise(cuts)])
        cache.crop(6)
        # rows 1 and 3 are wrong branches, rows 0, 2 and 4 go on with the probe
        tree = self.step(cache, [ids[6], ids[0], ids[7], ids[1], ids[8]], 5, [-1, 0, 0, 2, 2])[[0, 2, 4]]
        cache.keep([0, 2, 4])
        tree = torch.cat([tree, self.step(cache, ids[9:], n - 9)])
        # A prompt longer than a graph is wide runs by other kernels, whatever is drafted: right, and not compared.
        long = self.step(self.new_cache(), ids, 1) if n > self.widths[-1] + 1 else whole[-1:]
        for found in (apart, stock.difference(parts), stock.difference(torch.cat([parts[:6], tree]))):
            if not found <= stock.tolerance:
                raise NotPackable(
                    f"its logits differ from transformers' by {found:.1e} (at most {stock.tolerance:.1e})"
                )
        found = float((long - stock.probe_logits[-1:]).abs().max())
        if not found <= stock.tolerance:
            raise NotPackable(f"its logits after a long prompt differ from transformers' by {found:.1e}")
        self.row_invariant = len(self.widths) == 1 and torch.equal(parts, whole)
        spread = max(float((parts - whole).abs().max()), float((tree - whole[6:]).abs().max()))
        self.noise = stock.tolerance if self._embedding.dtype == torch.float32 else max(2 * spread, 1e-3)
        return torch.equal(tree, whole[6:])


def _join(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias for all of them, outputs side by side. The modules go on with views into it, so memory
    never holds the model twice."""
    biases = [linear.bias for linear in linears]
    if any((bias is None) != (biases[0] is None) for bias in biases):
        raise NotPackable("some of its joined linears have a bias and some have none")
    parts = [linear.weight.detach() for linear in linears]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    starts = [part.data_ptr() for part in parts[1:]]
    if starts == ends[:-1] and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
        weight = parts[0].as_strided((sum(map(len, parts)), parts[0].shape[1]), parts[0].stride())  # joined before
    else:
        weight = torch.cat(parts)
        for linear, part in zip(linears, torch.split(weight, [len(part) for part in parts]), strict=True):
            linear.weight.data = part
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 a @ b of [batch, i, j] and [batch, j, k]: attention's sums are not rounded on the way."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
