"""Decoder layers by one native call beside the modules of transformers, and which layers and decoders stay."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")

import numpy  # noqa: E402
from torch import nn  # noqa: E402
from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

from penstock.engine import _native  # noqa: E402
from penstock.engine.worker.cpu_linear import FLOAT32_KERNELS, pack_linears  # noqa: E402
from penstock.engine.worker.cpu_replacement import (  # noqa: E402
    find_decoder,
    replace_attentions,
    replace_layers,
    replace_norms,
)
from penstock.engine.worker.model import CpuLayer  # noqa: E402
from penstock.engine.worker.paged_attention import NAME, KVCache, KVCacheShape, PagedAttention  # noqa: E402
from penstock.engine.worker.tensor_parallel import TPGroup  # noqa: E402
from tests.support.models import BLOCK_SIZE, batch_of_rows  # noqa: E402
from tests.support.ranks import shared_memory  # noqa: E402

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": (LlamaModel, LlamaConfig, {}),
    "biases": (LlamaModel, LlamaConfig, {"attention_bias": True}),
    "qwen3": (Qwen3Model, Qwen3Config, {}),
    "windows": (Qwen3Model, Qwen3Config, WINDOWS),
    "gemma2": (Gemma2Model, Gemma2Config, {"sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig, {"sliding_window": 8, "layer_types": LAYERS}),
}
ROWS = {
    "decode": [(5, 1), (30, 1), (17, 1), *((3 + row % 6, 1) for row in range(21))],
    "mixed": [(5, 1), (30, 1), (200, 150), (12, 12), (3, 2)],
}
BLOCKS = 100


class ScaledLayer(LlamaDecoderLayer):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options) * 2


class ScaledGemmaLayer(Gemma2DecoderLayer):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options) * 2


class ScaledLlama(LlamaModel):
    def forward(self, input_ids: Any, **options: Any) -> Any:
        return super().forward(inputs_embeds=self.embed_tokens(input_ids) * 2, **options)


class ReversedLlama(LlamaModel):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        layers = self.layers
        self.layers = nn.ModuleList(reversed(layers))
        try:
            return super().forward(*arguments, **options)
        finally:
            self.layers = layers


def built(kind: Any, config_kind: Any, more: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = config_kind(**SIZES, **more)
    config._attn_implementation = NAME
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 8
    return model.to(torch.bfloat16).to(dtype)


def replaced(model: Any) -> Any:
    for replace in (pack_linears, replace_norms, replace_attentions):
        replace(model)
    replace_layers(model, TPGroup())
    return model


def layers_of(model: Any) -> list[bool]:
    return [isinstance(layer.forward, CpuLayer) for layer in model.layers]


def step_of(rows: list[tuple[int, int]], dtype: torch.dtype) -> tuple[PagedAttention, Any, Any]:
    """Returns the attention of a step, the ids and the positions of its tokens."""
    torch.manual_seed(1)
    shapes = dict.fromkeys(range(SIZES["num_hidden_layers"]), KVCacheShape(2, 32, 32))
    memory = KVCache(shapes, BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))
    for tensors in memory.layers.values():
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape).to(torch.bfloat16))
    input_batch = batch_of_rows(rows, BLOCKS)
    positions = torch.from_numpy(input_batch.positions)
    return (
        PagedAttention(memory, input_batch, torch.device("cpu")),
        torch.arange(len(positions))[None] % 100,
        positions[None],
    )


def hidden(model: Any, rows: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> Any:
    paged, ids, positions = step_of(rows, dtype)
    return model(input_ids=ids, position_ids=positions, use_cache=False, paged=paged).last_hidden_state


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ROWS)
def test_decoder_computes_what_transformers_does(name: str, rows: str) -> None:
    stock = hidden(built(*MODELS[name]), ROWS[rows])
    exact = hidden(built(*MODELS[name], torch.float32), ROWS[rows], torch.float32)
    model = replaced(built(*MODELS[name]))
    decoder = find_decoder(model, TPGroup())
    assert layers_of(model) == [True] * 3 and decoder is not None
    paged, ids, positions = step_of(ROWS[rows], torch.bfloat16)
    actual = decoder.hidden(model.embed_tokens(ids), positions, paged)
    if actual is None:
        assert rows == "mixed" and paged.native_step is None  # torch computes chunks where no product is fast enough
        actual = hidden(model, ROWS[rows])
    assert torch.equal(actual, hidden(model, ROWS[rows]))  # layer by layer
    assert (actual - exact).abs().mean() <= (stock - exact).abs().mean() * 1.05


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_decoder_computes_decode_steps_in_float32(name: str) -> None:
    stock, model = (built(*MODELS[name], torch.float32) for _ in range(2))
    replaced(model)
    decoder = find_decoder(model, TPGroup())
    if not layers_of(model)[0]:
        assert _native.linear_kernel() not in FLOAT32_KERNELS and decoder is None
        return
    assert layers_of(model) == [True] * 3 and decoder is not None
    paged, ids, positions = step_of(ROWS["decode"], torch.float32)
    actual = decoder.hidden(model.embed_tokens(ids), positions, paged)
    torch.testing.assert_close(actual, hidden(stock, ROWS["decode"], torch.float32), rtol=1e-4, atol=1e-4)
    assert torch.equal(actual, hidden(model, ROWS["decode"], torch.float32))  # layer by layer
    paged, ids, positions = step_of(ROWS["mixed"], torch.float32)  # torch computes the chunks
    assert decoder.hidden(model.embed_tokens(ids), positions, paged) is None
    mixed = [hidden(each, ROWS["mixed"], torch.float32) for each in (model, stock)]
    torch.testing.assert_close(*mixed, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_layers_with_experts_is_native(dtype: torch.dtype) -> None:
    family = Qwen3MoeModel, Qwen3MoeConfig, EXPERTS
    stock = hidden(built(*family), ROWS["decode"])
    exact = hidden(built(*family, torch.float32), ROWS["decode"], torch.float32)
    model = replaced(built(*family, dtype))
    is_packed = dtype == torch.bfloat16 or _native.linear_kernel() in FLOAT32_KERNELS
    assert layers_of(model) == [is_packed] * 3 and find_decoder(model, TPGroup()) is None
    actual = hidden(model, ROWS["decode"], dtype)
    limit = (stock - exact).abs().mean() * 1.05 if dtype == torch.bfloat16 else 1e-5
    assert (actual - exact).abs().mean() <= limit


@torch.inference_mode()
@pytest.mark.parametrize("name", ["windows", "gemma3"])
def test_hidden_states_that_are_read_have_the_same_bits(name: str) -> None:
    model = replaced(built(*MODELS[name]))
    decoder = find_decoder(model, TPGroup())
    paged, ids, positions = step_of(ROWS["mixed"], torch.bfloat16)
    arguments = model.embed_tokens(ids), positions, paged
    whole = decoder.hidden(*arguments)  # type: ignore[union-attr]
    if whole is None:
        pytest.skip("torch computes chunks")
    for read in ([0, 1, 151, 163, 165], [163, 0], [1], []):
        tokens = numpy.array(read, numpy.intp)
        part = decoder.hidden(*arguments, read=tokens)  # type: ignore[union-attr]
        assert torch.equal(part[0, read], whole[0, read]), read
    for read in ([2], [150], [-1], [0, 166]):
        with pytest.raises(ValueError, match="expected rows of one token, and last tokens of chunks"):
            decoder.hidden(*arguments, read=numpy.array(read, numpy.intp))  # type: ignore[union-attr]


@torch.inference_mode()
def test_step_without_a_read_token_ends_after_all_ranks_have_written() -> None:
    """Else the core would publish blocks in which the last layer of a killed rank lacks keys."""
    model = replaced(built(*MODELS["windows"]))
    decoder = find_decoder(model, TPGroup())
    paged, ids, positions = step_of([(200, 150), (12, 12)], torch.bfloat16)
    if decoder is None or paged.native_step is None:
        pytest.skip("torch computes chunks")
    embeds, memory = model.embed_tokens(ids), shared_memory(2)
    zeros = torch.zeros(embeds.numel(), dtype=torch.bfloat16)
    killed = _native.RankMemory(memory, 1, 2, [])

    def compute_before_the_last_layer() -> None:
        for _ in range(2 * len(decoder._layers) - 2):
            killed.sum(zeros.data_ptr(), zeros.numel(), True)

    with subprocess.Popen(["true"]) as process:
        pidfds = [os.pidfd_open(os.getpid()), os.pidfd_open(process.pid)]
    try:
        decoder._ranks.memory = _native.RankMemory(memory, 0, 2, pidfds)
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(compute_before_the_last_layer)
            with pytest.raises(RuntimeError, match="rank 1 of the model ended in a step"):
                decoder.hidden(embeds, positions, paged, read=numpy.array([], numpy.intp))
            others.result()
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def test_decoder_refuses_a_cache_of_another_dtype() -> None:
    model = replaced(built(*MODELS["llama"]))
    decoder = find_decoder(model, TPGroup())
    paged, ids, positions = step_of(ROWS["decode"], torch.float32)
    with pytest.raises(ValueError, match="expected layers of one size, each with a cache, and of its dtype"):
        decoder.hidden(model.embed_tokens(ids), positions, paged)  # type: ignore[union-attr]


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kind"), [("llama", ScaledLayer), ("gemma2", ScaledGemmaLayer)])
def test_layers_that_compute_something_else_stay(name: str, kind: Any) -> None:
    model = built(*MODELS[name])
    scaled = kind(model.config, 1).to(torch.bfloat16)
    scaled.load_state_dict(model.layers[1].state_dict())
    model.layers[1] = scaled
    stock = hidden(model, ROWS["decode"])
    replaced(model)
    assert layers_of(model) == [True, False, True] and find_decoder(model, TPGroup()) is None
    torch.testing.assert_close(hidden(model, ROWS["decode"]), stock, rtol=0.05, atol=0.1)
    assert layers_of(replaced(built(*MODELS["llama"], torch.float16))) == [False] * 3


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ScaledLlama, ReversedLlama])
def test_decoder_that_connects_layers_otherwise_stays(kind: Any) -> None:
    model = replaced(built(kind, LlamaConfig, {}))
    assert layers_of(model) == [True] * 3 and find_decoder(model, TPGroup()) is None


def test_step_refuses_missing_blocks() -> None:
    caches, table = numpy.zeros((1, 2), numpy.int64), numpy.zeros((1, 2), numpy.int32)
    ones = numpy.ones(1, numpy.int64)
    _native.AttentionStep(caches, 4, 8, ones, table, ones, [])
    for places, tables, lengths, chunks in (
        (ones * 32, table, ones, []),
        (ones * -1, table, ones, []),
        (ones, table + 4, ones, []),
        (ones, table, ones * 17, []),
        (ones, table[:0], ones[:0], [(0, 2, 2, table[0])]),
        (ones, table[:0], ones[:0], [(0, 1, 17, table[0])]),
        (ones, table[:0], ones[:0], [(0, 1, 1, table[0] - 1)]),
    ):
        with pytest.raises(ValueError, match=r"expected|sequence 0"):
            _native.AttentionStep(caches, 4, 8, places, tables, lengths, chunks)
