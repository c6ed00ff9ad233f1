"""What the kernels between the products of a layer write, beside the modules of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from penstock.engine.worker.cuda import decoder
from penstock.engine.worker.cuda.attention import CudaAttention
from penstock.engine.worker.cuda.decoder import CudaLayer, Linear, Norm
from penstock.engine.worker.paged_attention import AttentionStyle, KVCache, KVCacheShape
from penstock.engine.worker.tensor_parallel import TPGroup
from tests.support.attention_cases import multiprocessors

TYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = 5
PLACES = (7, 0, -1, 12, 3)  # the third token is padding
GUARD = 16  # places in front of the cache: a kernel that writes to place -1 writes there


def exact(*shape: int) -> Tensor:
    """Returns numbers with squares that add up exactly, in any order."""
    return torch.randint(-32, 33, shape) / 8


def check_norm(size: int, dtype: torch.dtype, *, has_x: bool, adds_one: bool = False) -> None:
    torch.manual_seed(size)
    module = (Gemma2RMSNorm if adds_one else LlamaRMSNorm)(size, 1e-5).to(dtype)
    weight = torch.randn(size).to(dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    x, residual = (exact(TOKENS, size).to(dtype) for _ in range(2))
    total = residual + x if has_x else residual.clone()
    result = decoder.add_norm(x if has_x else None, residual, Norm(weight, 1e-5, adds_one))
    assert torch.equal(residual, total)
    assert_last_bits_equal(result, module(total))


def check_gate(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = (3 * torch.randn(TOKENS, 2 * size)).to(dtype)
    gate, up = x.split(size, dim=1)
    assert_last_bits_equal(decoder.gated(x), torch.nn.functional.silu(gate) * up)


def assert_last_bits_equal(result: Tensor, expected: Tensor) -> None:
    """Exponentials and roots of two libraries may differ in the last bit of float32: of shorter types, rarely."""
    precision = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[result.dtype]
    torch.testing.assert_close(result, expected, rtol=precision, atol=1e-30)
    assert result.dtype == torch.float32 or (result != expected).float().mean() < 0.005


class Cache:
    """A cache of one layer, with places in front that are no cache."""

    def __init__(self, kv_heads: int, key_size: int, value_size: int, dtype: torch.dtype) -> None:
        self.memory = KVCache({0: KVCacheShape(kv_heads, key_size, value_size)}, 4, 4, dtype, torch.device("meta"))
        shapes = [(GUARD + 16, kv_heads, size) for size in (key_size, value_size)]
        self._whole = [torch.full(shape, 7.0, dtype=dtype) for shape in shapes]
        self.memory.layers[0] = (self._whole[0][GUARD:], self._whole[1][GUARD:])
        places = torch.tensor(PLACES, dtype=torch.int32)
        with multiprocessors(1):
            self.attention = CudaAttention(self.memory, torch.zeros(1, 4, dtype=torch.int32), places, None, None)

    def must_have(self, keys: Tensor, values: Tensor) -> None:
        """Only the places of tokens have been written."""
        for whole, written in zip(self._whole, (keys, values), strict=True):
            expected = torch.full_like(whole, 7.0)
            for place, token in zip(PLACES, written, strict=True):
                if place >= 0:
                    expected[GUARD + place] = token
            assert torch.equal(whole, expected)


def check_rotation(heads: int, kv_heads: int, size: int, dtype: torch.dtype, *, has_norm: bool) -> None:
    torch.manual_seed(heads)
    cache = Cache(kv_heads, size, size, dtype)
    norms = [LlamaRMSNorm(size, 1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight = torch.nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
    own_norms = [Norm(norm.weight.detach(), 1e-5, adds_one=False) for norm in norms]
    linear = Linear(torch.zeros(0), None)
    layer = CudaLayer(
        TPGroup(),
        0, AttentionStyle(1.0), heads, own_norms[0], own_norms[0],
        (own_norms[0], own_norms[1]) if has_norm else None, linear, linear, linear, linear,
    )  # fmt: skip
    qkv = exact(TOKENS, (heads + 2 * kv_heads) * size).to(dtype)
    angles = torch.rand(TOKENS, size // 2) * 100
    cos, sin = (torch.cat((part, part), dim=-1).to(dtype) for part in (angles.cos(), angles.sin()))
    queries = layer._rotate_write(qkv, cos, sin, cache.attention)
    query, key, value = (part.view(TOKENS, -1, size) for part in qkv.split([heads * size, *[kv_heads * size] * 2], 1))
    if has_norm:
        query, key = norms[0](query), norms[1](key)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    assert torch.equal(queries, query)
    cache.must_have(key, value)


def check_write(key_size: int, value_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(key_size)
    cache = Cache(2, key_size, value_size, dtype)
    query, key, value = (torch.randn(TOKENS, 2, size).to(dtype) for size in (key_size, key_size, value_size))
    cache.attention.attend(0, query, key, value, AttentionStyle(1.0))
    cache.must_have(key, value)
