"""RMS norms by the native kernel beside those of transformers, and which modules are left alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.engine.worker.cpu_kernels import RmsNorm
from penstock.engine.worker.cpu_replacement import replace_norms


class HalfRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states) / 2


def replaced(kind: Any, size: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Returns a norm by the kernel, and the stock one of the same weights."""
    torch.manual_seed(size)
    stock, ours = kind(size), kind(size)
    stock.weight = nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
    ours.weight = stock.weight
    replace_norms(nn.Sequential(ours))
    return ours, stock


@torch.inference_mode()
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 64, 100, 1024])
def test_norm_computes_what_transformers_does(kind: Any, dtype: torch.dtype, size: int) -> None:
    ours, stock = replaced(kind, size, dtype)
    assert isinstance(ours.forward, RmsNorm)
    for rows in (1, 9, 500):
        x = torch.randn(1, rows, size).to(dtype) * 3
        actual, expected = ours(x), stock(x)
        assert actual.dtype == dtype and actual.shape == expected.shape
        limit = 2e-6 if dtype == torch.float32 else 0.008  # a last bit
        assert ((actual - expected).float().abs() <= limit * (expected.float().abs() + 1e-3)).all()


@torch.inference_mode()
def test_norm_reads_rows_with_strides() -> None:
    ours, stock = replaced(LlamaRMSNorm, 64, torch.float32)
    wide = torch.randn(5, 3, 200)
    for x in (wide[..., 10:74], wide.transpose(0, 1)[..., :64], wide[..., ::3][..., :64]):
        assert torch.allclose(ours(x), stock(x), atol=1e-5)


@torch.inference_mode()
def test_norm_of_numbers_beyond_the_range_is_that_of_transformers() -> None:
    ours, stock = replaced(LlamaRMSNorm, 64, torch.bfloat16)
    x = torch.randn(3, 64).to(torch.bfloat16)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    assert torch.equal(ours(x).isnan(), stock(x).isnan()) and torch.equal(ours(x)[2], stock(x)[2])


@torch.inference_mode()
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("factor", [0.0, 1e4])
def test_factor_of_a_norm_does_not_depend_on_its_weights(kind: Any, factor: float) -> None:
    first, second = kind(64).to(torch.bfloat16), kind(64).to(torch.bfloat16)
    first.weight.fill_(factor)
    x = torch.randn(3, 64).to(torch.bfloat16)
    expected = second(x)
    replace_norms(nn.Sequential(first, second))
    assert isinstance(second.forward, RmsNorm) and torch.allclose(second(x), expected, rtol=0.008)


def test_norm_that_computes_something_else_stays() -> None:
    ours, _ = replaced(HalfRMSNorm, 64, torch.float32)
    assert not isinstance(ours.forward, RmsNorm)
    half, _ = replaced(LlamaRMSNorm, 64, torch.float16)
    assert not isinstance(half.forward, RmsNorm)
