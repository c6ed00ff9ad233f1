"""Attention layers by the native kernels beside those of transformers, and which layers are left alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")

from torch import nn  # noqa: E402
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention  # noqa: E402

from penstock.engine.worker.cpu_linear import pack_linears  # noqa: E402
from penstock.engine.worker.cpu_replacement import replace_attentions, replace_norms  # noqa: E402
from penstock.engine.worker.model import CpuAttention  # noqa: E402
from penstock.engine.worker.paged_attention import NAME, KVCache, KVCacheShape, PagedAttention  # noqa: E402
from tests.support.models import BLOCK_SIZE, batch_of_rows  # noqa: E402

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LAYERS = {
    "llama": (LlamaAttention, LlamaConfig),
    "qwen3": (Qwen3Attention, Qwen3Config),
    "gemma3": (Gemma3Attention, Gemma3TextConfig),
}
ROWS = [(5, 1), (30, 1), (200, 150), (12, 12), (3, 2)]  # tokens of each request, and how many the step computes
TOKENS, BLOCKS = 166, 100


class ScaledAttention(LlamaAttention):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        output, weights = super().forward(*arguments, **options)
        return output * 2, weights


def built(kind: Any, config_kind: Any, dtype: torch.dtype, **more: Any) -> Any:
    torch.manual_seed(0)
    config = config_kind(**SIZES, **more)
    config._attn_implementation = NAME
    layer = kind(config, layer_idx=0)
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) / 8
    return layer.to(dtype).eval().requires_grad_(False)


def attended(layer: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    memory = KVCache({0: KVCacheShape(2, 32, 32)}, BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))
    for tensor in memory.layers[0]:
        tensor.copy_(torch.randn(tensor.shape))
    paged = PagedAttention(memory, batch_of_rows(ROWS, BLOCKS), torch.device("cpu"))
    x = torch.randn(1, TOKENS, 64).to(dtype)
    angles = torch.rand(1, TOKENS, 32) * 6
    embeddings = (angles.cos().to(dtype), angles.sin().to(dtype))
    return layer(hidden_states=x, position_embeddings=embeddings, attention_mask=None, paged=paged)[0]


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_computes_what_transformers_does(name: str, dtype: torch.dtype) -> None:
    layer, exact = built(*LAYERS[name], dtype), built(*LAYERS[name], dtype).float()
    stock = attended(layer, dtype)
    holder = nn.ModuleList([layer])
    pack_linears(holder)
    replace_norms(holder)
    replace_attentions(holder)
    assert isinstance(layer.forward, CpuAttention)
    actual = attended(layer, dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(actual, stock, rtol=1e-4, atol=1e-5)
        return
    expected = attended(exact, torch.float32)
    assert (actual - expected).abs().mean() <= (stock - expected).abs().mean() * 1.05


@torch.inference_mode()
def test_layer_that_computes_something_else_stays() -> None:
    scaled = built(ScaledAttention, LlamaConfig, torch.float32)
    replace_attentions(nn.ModuleList([scaled]))
    assert not isinstance(scaled.forward, CpuAttention)
