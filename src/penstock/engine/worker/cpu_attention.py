"""Attention layers of a model on a CPU: norms of heads, rotary embedding and cache write are one native kernel.

The modules stay transformers' own. A layer is replaced if a trial shows that it computes what the kernel does, with any
projections before it and after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.worker.cpu_kernels import RmsNorm, kernel_threads, replace_forwards, rows_of
from penstock.engine.worker.paged_attention import (
    CPU_DTYPES,
    AttentionStyle,
    KVCache,
    KVCacheShape,
    PagedAttention,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
TRIAL_TOKENS = 4
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of each output, and of the largest one


class Projected(NamedTuple):
    """Queries, keys and values of a step, as a layer's projections give them."""

    query: Tensor  # [tokens, heads * size]
    key: Tensor
    value: Tensor
    cos: Tensor  # [tokens, size]
    sin: Tensor
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Writes keys and values to the places of a layer's cache, and returns the queries [tokens, heads, size]."""
        tokens, size = self.cos.shape
        queries = torch.empty(tokens, self.query.shape[1] // size, size, dtype=self.query.dtype)
        norm = self.query_norm
        _native.rotary(
            _heads(self.query, queries.shape[1], self.query_norm),
            _heads(self.key, keys.shape[1], self.key_norm),
            _heads(self.value, keys.shape[1], None),
            (self.cos.data_ptr(), self.sin.data_ptr()),
            0.0 if norm is None else norm.epsilon,
            norm is not None and norm.adds_one,
            (size, values.shape[2]),
            tokens,
            places.data_ptr(),
            (queries.data_ptr(), keys.data_ptr(), values.data_ptr()),
            queries.dtype == torch.bfloat16,
            kernel_threads(),
        )
        return queries


def _heads(projected: Tensor, count: int, norm: RmsNorm | None) -> tuple[int, int, int, int]:
    return projected.data_ptr(), projected.stride(0), count, 0 if norm is None else norm.weight.data_ptr()


class Recorder:
    """Replaces `PagedAttention` in a trial: keeps what a layer attends with, and returns random numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, AttentionStyle]] = []
        self.attended = torch.empty(0)

    def attend(self, _: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        self.calls.append((query, key, value, how))
        drawn = torch.randn(*query.shape[:2], value.shape[2], generator=torch.Generator().manual_seed(1))
        self.attended = drawn.to(query.dtype)
        return self.attended


class CpuAttention:
    """The computation of an attention layer."""

    def __init__(self, layer: Any, how: AttentionStyle, norms: tuple[RmsNorm | None, RmsNorm | None]) -> None:
        self._layer = layer
        self._stock = layer.forward
        self.how = how
        self.norms = norms
        self.dtype = layer.q_proj.weight.dtype

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """The numbers of heads and of KV heads, the sizes of a key and of a value."""
        size: int = self._layer.head_dim
        queries, keys, values = (self._layer.get_submodule(name).weight.shape[0] for name in PROJECTIONS[:3])
        return queries // size, keys // size, size, values * size // keys

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        paged, embeddings = options.get("paged"), cast(Any, options.get("position_embeddings"))
        hidden_states: Any = arguments[0] if arguments else options.get("hidden_states")
        if (
            len(arguments) > 1
            or not isinstance(paged, PagedAttention)
            or not self.can_rotate(hidden_states, embeddings)
        ):
            return self._stock(*arguments, **options)
        projected = self.project(hidden_states, embeddings)
        attended = paged.attend_written(self._layer.layer_idx, projected.write, self.how)
        return self._layer.o_proj(attended.view(*hidden_states.shape[:-1], -1)), None

    def project(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Projected:
        layer = self._layer
        projected = [module(hidden_states)[0] for module in (layer.q_proj, layer.k_proj, layer.v_proj)]
        rows = [rows_of(each, each.shape[1], self.dtype) for each in projected]
        cos, sin = (rows_of(each[0], each.shape[2], self.dtype).contiguous() for each in position_embeddings)
        return Projected(rows[0], rows[1], rows[2], cos, sin, *self.norms)

    def can_rotate(self, hidden_states: Tensor, position_embeddings: Any) -> bool:
        """Whether the kernel takes these embeddings of positions."""
        if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
            return False
        shape = (1, hidden_states.shape[1], self._layer.head_dim)
        return hidden_states.dim() == 3 and all(
            each.shape == shape and each.dtype == self.dtype for each in position_embeddings
        )


@torch.inference_mode()
def replace_attentions(model: nn.Module) -> None:
    """Replaces the computation of each attention layer that computes what the kernel does. Norms come first."""
    replace_forwards(model, PROJECTIONS, find_attention, "attention")


def find_attention(layer: Any) -> CpuAttention | None:
    """Returns the computation of a layer; None: the layer computes something else than the kernel."""
    weight, size = layer.q_proj.weight, getattr(layer, "head_dim", None)
    if weight.dtype not in CPU_DTYPES or not isinstance(size, int) or size % 2 or size > _native.MAX_ROTARY_SIZE:
        return None
    norms = tuple(getattr(getattr(layer, name, None), "forward", None) for name in ("q_norm", "k_norm"))
    if any(norm is not None and not isinstance(norm, RmsNorm) for norm in norms) or not _is_alike(norms, size):
        return None
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, TRIAL_TOKENS, weight.shape[1], generator=drawn).to(weight.dtype)
    cos, sin = torch.rand(2, 1, TRIAL_TOKENS, size, generator=drawn).to(weight.dtype)
    recorder = Recorder()
    try:
        expected, _ = layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None, paged=recorder)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        # A layer with other arguments or other embeddings, as those of a vision encoder.
        return None
    if len(recorder.calls) != 1:
        return None
    query, key, value, how = recorder.calls[0]
    attention = CpuAttention(layer, how, norms)  # type: ignore[arg-type]
    shape = KVCacheShape(key.shape[1], key.shape[2], value.shape[2])
    keys, values = KVCache({0: shape}, 1, TRIAL_TOKENS, weight.dtype, x.device).layers[0]
    queries = attention.project(x, (cos, sin)).write(torch.arange(TRIAL_TOKENS), keys, values)
    result = layer.o_proj(recorder.attended.reshape(1, TRIAL_TOKENS, -1))
    pairs = ((queries, query), (keys, key), (values, value), (result, expected))
    return attention if all(_is_near(output, stock) for output, stock in pairs) else None


def _is_alike(norms: tuple[Any, ...], size: int) -> bool:
    """Whether the norms of queries and keys are of one kind, and of single heads."""
    if norms[0] is None or norms[1] is None:
        return norms[0] is norms[1]
    kinds = {(norm.epsilon, norm.adds_one, len(norm.weight)) for norm in norms}
    return len(kinds) == 1 and len(norms[0].weight) == size


def _is_near(output: Tensor, expected: Tensor) -> bool:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return False
    tolerance = TOLERANCES[output.dtype]
    return torch.allclose(output, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
