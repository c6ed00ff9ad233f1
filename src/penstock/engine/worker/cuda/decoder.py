"""The layers of a decoder on a CUDA device, in ten kernels each: the products are torch's, all between is fused.

The modules stay transformers' own, and keep the weights. A decoder is computed here if trials show that its layers are
what the kernels compute: RMS norms before attention and before a gated MLP, with SiLU, and rotary embedding of whole
heads. Other decoders run their modules, with the attention of this package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.cluster.logs import event
from penstock.engine.worker.cuda import kernels, launcher
from penstock.engine.worker.cuda.attention import ChunkTensors, CudaAttention, chunk_items, power_of_two
from penstock.engine.worker.input_batch import PrefillChunk
from penstock.engine.worker.paged_attention import Attention, AttentionStyle, KVCache, KVCacheShape
from penstock.engine.worker.stock import SiLUActivation
from penstock.engine.worker.tensor_parallel import TPGroup

LARGEST_NORM = 1 << 14  # elements that a program keeps in registers


class Norm(NamedTuple):
    weight: Tensor
    epsilon: float
    adds_one: bool


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class CudaLayer(NamedTuple):
    ranks: TPGroup  # each has some of the heads, and of the columns of the MLP
    layer: int  # of its KV cache
    how: AttentionStyle
    heads: int
    input_norm: Norm
    mlp_norm: Norm
    head_norms: tuple[Norm, Norm] | None  # of queries and keys
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear

    def hidden(self, x: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, attention: CudaAttention) -> Tensor:
        """Returns what is to be added to the residual. `x`: what the layer before has returned."""
        qkv = self.qkv(add_norm(x, residual, self.input_norm))
        queries = self._rotate_write(qkv, cos, sin, attention)
        attended = attention.attend_written(self.layer, queries, self.how)
        middle = add_norm(self.ranks.all_reduce(self.output(attended.flatten(1))), residual, self.mlp_norm)
        return self.ranks.all_reduce(self.down(gated(self.gate_up(middle))))

    def head_size(self, memory: KVCache) -> int:
        return memory.layers[self.layer][0].shape[2]

    def _rotate_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, attention: CudaAttention) -> Tensor:
        keys, values = attention.cache_of(self.layer)
        size, kv_heads = keys.shape[2], keys.shape[1]
        queries = qkv.new_empty((qkv.shape[0], self.heads, size))
        query_norm, key_norm = self.head_norms or (self.input_norm, self.input_norm)  # unused without norms of heads
        heads = power_of_two(self.heads + kv_heads)
        launcher.launch(
            kernels.rotate_write, (qkv.shape[0],),
            qkv, queries, keys, values, cos, sin, attention.places, query_norm.weight, key_norm.weight, qkv.stride(0),
            keys.stride(0), values.stride(0), query_norm.epsilon,
            HEADS=self.heads, KV_HEADS=kv_heads, P=heads, K=size, HALF=size // 2,
            V=values.shape[2], VP=power_of_two(values.stride(0)), HAS_NORM=self.head_norms is not None,
            ADDS_ONE=query_norm.adds_one, num_warps=4 if heads * size <= 8192 else 8,
        )  # fmt: skip
        return queries


def add_norm(x: Tensor | None, residual: Tensor, norm: Norm) -> Tensor:
    """Adds `x` to the residual in place, and returns the norm of the sum."""
    out = torch.empty_like(residual)
    size = residual.shape[1]
    added = residual if x is None else x
    launcher.launch(
        kernels.add_norm, (residual.shape[0],),
        added, residual, norm.weight, out, added.stride(0), norm.epsilon,
        SIZE=size, POWER=power_of_two(size), ADDS_ONE=norm.adds_one, HAS_X=x is not None,
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip
    return out


def gated(x: Tensor) -> Tensor:
    """Returns silu(gate) * up of [tokens, gate and up]."""
    size = x.shape[1] // 2
    out = x.new_empty((x.shape[0], size))
    launcher.launch(
        kernels.gate, (x.shape[0], -(-size // 1024)),
        x, out, x.stride(0), SIZE=size, TILE=1024,
    )  # fmt: skip
    return out


class CudaDecoder:
    """The computation of all layers of a decoder, and of the norm after them."""

    def __init__(self, decoder: Any, layers: list[CudaLayer], norm: Norm) -> None:
        self._rotary = decoder.rotary_emb
        self.layers = layers
        self._norm = norm

    def hidden(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor | None:
        """Returns hidden states [tokens, size] of embeddings, which are overwritten; None: of another attention.
        `positions` [tokens]."""
        if not isinstance(attention, CudaAttention):
            return None
        cos, sin = (each[0].contiguous() for each in self._rotary(embeds[None], positions[None]))
        residual, x = embeds, None
        for layer in self.layers:
            x = layer.hidden(x, residual, cos, sin, attention)
        return add_norm(x, residual, self._norm)


# ── which decoders are computed here ─────────────────────────────────────────────────────────────────────────────────
TRIAL_TOKENS = 5
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}  # norm of the error of a layer
WHOLE = 4  # times that error is allowed for all layers together


@torch.inference_mode()
def find_decoder(
    decoder: Any, embeddings: Any, shapes: dict[int, KVCacheShape], styles: dict[int, AttentionStyle], ranks: TPGroup
) -> CudaDecoder | None:
    """Returns the computation of a decoder; None: its modules compute something else than the kernels.

    `shapes` and `styles`: the KV cache of each layer, and how the layer attends, as a trial of the modules has found.
    """
    layers, norm = [], norm_of(getattr(decoder, "norm", None))
    for module in getattr(decoder, "layers", ()):
        layer = layer_of(module, styles, ranks)
        if layer is None:
            return None
        layers.append(layer)
    if not layers or norm is None or not hasattr(decoder, "rotary_emb"):
        return None
    computation = CudaDecoder(decoder, layers, norm)
    return computation if is_alike(decoder, computation, embeddings, shapes) else None


def is_alike(decoder: Any, computation: CudaDecoder, embeddings: Any, shapes: dict[int, KVCacheShape]) -> bool:
    """Whether kernels and modules compute the same, found by trials of each layer and of all."""
    weight = embeddings.weight
    device, dtype = weight.device, weight.dtype
    memory = KVCache(shapes, 1, 16, dtype, device)
    numbers = torch.arange(TRIAL_TOKENS, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    ends = torch.tensor([[0, TRIAL_TOKENS], [TRIAL_TOKENS, 0]], dtype=torch.int32, device=device)
    groups = max(layer.heads // shapes[layer.layer].heads for layer in computation.layers)
    chunk = PrefillChunk(0, TRIAL_TOKENS, TRIAL_TOKENS, np.zeros(1, np.int32))
    items = torch.from_numpy(chunk_items([chunk], max(1, 16 // groups))).to(device)
    chunks = ChunkTensors(table[0], ends[1, :1], ends[0], items)
    attention = CudaAttention(memory, table, numbers, None, chunks)
    embeds = embeddings(numbers)
    x = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    positions = numbers * 37  # not those of the cache
    try:
        cos, sin = decoder.rotary_emb(x[None], positions[None])
        if cos.shape[-1] != computation.layers[0].head_size(memory):
            return False
        for module, layer in zip(decoder.layers, computation.layers, strict=True):
            stock = module(x[None], position_embeddings=(cos, sin), paged=attention)
            residual = x.clone()
            residual = residual + layer.hidden(None, residual, cos[0], sin[0], attention)
            stock = stock[0] if isinstance(stock, tuple) else stock
            if error(residual, stock.view_as(residual)) > TOLERANCES[dtype]:
                return False
        options = {"position_ids": positions[None], "use_cache": False, "paged": attention, "return_dict": True}
        stock = decoder(input_ids=numbers[None], **options).last_hidden_state[0]
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError, KeyError):
        return False  # modules with other arguments, or other results
    result = computation.hidden(embeds.clone(), positions, attention)
    return result is not None and error(result, stock) <= WHOLE * TOLERANCES[dtype]


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def layer_of(module: Any, styles: dict[int, AttentionStyle], ranks: TPGroup) -> CudaLayer | None:
    attention: Any = getattr(module, "self_attn", None)
    mlp: Any = getattr(module, "mlp", None)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp_names = ("gate_proj", "up_proj", "down_proj")
    if not has_linears(attention, names) or not has_linears(mlp, mlp_names):
        return None
    if not isinstance(getattr(mlp, "act_fn", None), SiLUActivation):
        return None
    norms = [norm_of(getattr(module, name, None)) for name in ("input_layernorm", "post_attention_layernorm")]
    head_norms = [norm_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    size = attention.head_dim
    if norms[0] is None or norms[1] is None or (head_norms[0] is None) != (head_norms[1] is None):
        return None
    if head_norms[0] is not None and len(head_norms[0].weight) != size:
        return None
    projections = [getattr(attention, name) for name in names[:3]]
    if size & (size - 1) or not has_like_biases(projections) or not has_like_biases([mlp.gate_proj, mlp.up_proj]):
        return None
    return CudaLayer(
        ranks,
        attention.layer_idx,
        styles[attention.layer_idx],
        attention.q_proj.weight.shape[0] // size,
        norms[0],
        norms[1],
        None if head_norms[0] is None or head_norms[1] is None else (head_norms[0], head_norms[1]),
        join([attention.q_proj, attention.k_proj, attention.v_proj]),
        join([attention.o_proj]),
        join([mlp.gate_proj, mlp.up_proj]),
        join([mlp.down_proj]),
    )


def has_linears(module: Any, names: tuple[str, ...]) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def has_like_biases(layers: list[Any]) -> bool:
    return len({layer.bias is None for layer in layers}) == 1


def norm_of(module: Any) -> Norm | None:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or len(weight) > LARGEST_NORM:
        return None
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return None if epsilon is None else Norm(weight.detach(), epsilon, adds_one=False)


def join(layers: list[nn.Linear]) -> Linear:
    """Returns one linear layer with the results of several of the same input. Their weights become views of its own."""
    if len(layers) == 1:
        return Linear(layers[0].weight.detach(), layers[0].bias)
    weight = torch.cat([layer.weight for layer in layers])
    biases: list[Any] = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat(biases)
    first = 0
    for layer in layers:
        size = layer.weight.shape[0]
        layer.weight = nn.Parameter(weight[first : first + size], requires_grad=False)
        first += size
    return Linear(weight, bias)


def log_layers(decoder: CudaDecoder | None, layers: int) -> None:
    event("decoder layers replaced", layers=0 if decoder is None else layers, stock=layers if decoder is None else 0)
