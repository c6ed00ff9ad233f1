"""Vectors of prompts, on tiny real models: those of transformers, wherever and however often computed."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
transformers = pytest.importorskip("transformers")

from penstock.engine.client.client import Client  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.lora import LoraConfig  # noqa: E402
from penstock.engine.protocol.messages import FinishReason, Floats, SamplingParams  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.adapters import merge, write_adapter  # noqa: E402
from tests.support.engine import START, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import BLOCK_SIZE, build_family  # noqa: E402

LENGTHS = (1, 3, BLOCK_SIZE, 16, 17, 64, 150, 240)  # the last one is as long as the model allows
SIZES: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 160,
    "max_model_len": 240,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "dtype": "float32",
    "runner": "pooling",
    "store_nbytes": 1 << 22,
}


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 120, length).tolist() for length in lengths]


def references(path: Path, texts: list[list[int]]) -> list[Floats]:
    """What transformers computes: the hidden state of the last position, of length 1."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in texts]
    return [torch.nn.functional.normalize(state, dim=-1).numpy() for state in states]


def require_equal(vector: Floats, expected: Floats) -> None:
    assert vector.shape == expected.shape and vector.dtype == np.float32
    assert float(vector @ expected) / float(np.linalg.norm(vector) * np.linalg.norm(expected)) >= 0.9999
    assert np.abs(vector - expected).max() <= 1e-4


async def embedded(
    client: Client, ids: list[int], *, is_inline: bool = False, adapter: bytes = b""
) -> tuple[Floats, int]:
    """Returns the vector, and how many tokens of the prompt the cache had."""
    async with await client.submit(ids, SamplingParams(max_tokens=1), timeout=2 * START, adapter=adapter) as stream:
        (chunk,) = [chunk async for chunk in stream]
    assert (chunk.reason, chunk.ids, chunk.utf8) == (FinishReason.STOP, [], b"")
    assert chunk.vector_handle is not None and chunk.vector_handle.is_inline == is_inline
    vector = client.take_vector(chunk.vector_handle)
    assert vector is not None
    return vector, stream.cached_tokens


@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 2), *tiers.only_in_all(("gemma2", 1), ("llama", 1))])
@in_a_loop
async def test_vectors_are_those_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    """In chunks of 16, beside others, and again with a cache that has all of each prompt."""
    build_family(name, tmp_path)
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=ranks, **SIZES)
    expected = references(tmp_path, prompts(1))
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        assert not [child for child in engine.children() if child.member.kind == "output"]
        for round in range(2):
            answers = await asyncio.gather(*(embedded(client, ids) for ids in prompts(1)))
            for ids, (vector, cached), reference in zip(prompts(1), answers, expected, strict=True):
                require_equal(vector, reference)
                assert cached == (round and (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        await engine.must_be_empty()
        assert engine.launcher.cluster.store.stats().items == ()  # type: ignore[union-attr]


@in_a_loop
async def test_vectors_travel_inline_without_a_store(tmp_path: Path) -> None:
    build_family("llama", tmp_path)
    config = EngineConfig(model=str(tmp_path), **{**SIZES, "store_nbytes": 0})
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        vector, _ = await embedded(client, prompts(2)[3], is_inline=True)
    require_equal(vector, references(tmp_path, prompts(2)[3:4])[0])


@in_a_loop
async def test_vectors_of_a_model_without_a_head_are_computed(tmp_path: Path) -> None:
    """As sentence-transformers saves it: the tensors have no prefix, and modules.json says what the model is for."""
    build_family("llama", tmp_path / "whole")
    transformers.AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32).save_pretrained(tmp_path / "base")
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
    (tmp_path / "base" / "modules.json").write_text(json.dumps(modules))
    config = EngineConfig(model=str(tmp_path / "base"), **{**SIZES, "runner": "auto"})
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        vector, _ = await embedded(client, prompts(3)[5])
    require_equal(vector, references(tmp_path / "base", prompts(3)[5:6])[0])


@in_a_loop
async def test_vectors_are_computed_again_when_the_worker_is_killed(tmp_path: Path) -> None:
    build_family("llama", tmp_path)
    texts = prompts(4, tuple(20 + 3 * number for number in range(64)))
    config = EngineConfig(model=str(tmp_path), **SIZES)
    expected = references(tmp_path, texts)
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        tasks = [asyncio.ensure_future(embedded(client, ids)) for ids in texts]
        await engine.until(lambda: sum(task.done() for task in tasks) >= 10)
        os.kill(engine.child("worker").pid, signal.SIGKILL)
        assert sum(task.done() for task in tasks) < 60, "it was too late"
        answers = await asyncio.gather(*tasks)
        assert engine.number(StatusBoard.SERVING) > 1
    for (vector, _), reference in zip(answers, expected, strict=True):
        require_equal(vector, reference)


@tiers.needs_all
@in_a_loop
async def test_vectors_of_adapters_are_those_of_merged_weights(tmp_path: Path) -> None:
    build_family("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "poems", tmp_path / "base", 1)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merge(stock, tmp_path / "poems")
    stock.save_pretrained(tmp_path / "merged")
    lora = LoraConfig(enable_lora=True, lora_modules=(f"poems={adapter.path}",))
    config = EngineConfig(model=str(tmp_path / "base"), lora=lora, **SIZES)
    texts = prompts(6)[2:6]
    expected = [references(tmp_path / name, texts) for name in ("base", "merged")]
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        pairs = [(number, ids) for ids in texts for number in range(2)]
        digests = b"", adapter.digest
        answers = await asyncio.gather(*(embedded(client, ids, adapter=digests[number]) for number, ids in pairs))
    for (number, ids), (vector, cached) in zip(pairs, answers, strict=True):
        require_equal(vector, expected[number][texts.index(ids)])
        assert cached == 0


@in_a_loop
async def test_vector_is_gone_when_the_store_needed_the_room(tmp_path: Path) -> None:
    build_family("llama", tmp_path)
    config = EngineConfig(model=str(tmp_path), **SIZES)
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        async with await client.submit(prompts(5)[1], SamplingParams(max_tokens=1), timeout=START) as stream:
            (chunk,) = [chunk async for chunk in stream]
        assert engine.launcher.cluster.store is not None and engine.launcher.cluster.store.clear() == 1
        assert chunk.vector_handle is not None and client.take_vector(chunk.vector_handle) is None
