"""Log-probabilities of prompts, on tiny real models: those of transformers, wherever and however often computed."""

import asyncio
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
from penstock.engine.protocol.messages import SamplingParams  # noqa: E402
from penstock.server.chat.prompt_fields import TokenLogprobs, by_position  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.engine import START, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import BLOCK_SIZE, build_family  # noqa: E402

COUNT = 3
SIZES: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 64,
    "max_model_len": 240,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "dtype": "float32",
}


def prompts(seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    beginning = random.integers(3, 120, 40).tolist()
    return [
        *([*beginning, *random.integers(3, 120, size).tolist()] for size in (1, 9, 60)),
        beginning[:1],
        beginning[:2],
        random.integers(3, 120, 150).tolist(),
    ]


def reference(path: Path, prompt: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)


def require_those_of_transformers(path: Path, prompt: list[int], rows: dict[int, TokenLogprobs]) -> None:
    assert rows.keys() == set(range(1, len(prompt)))
    expected = reference(path, prompt)
    for position, (rank, pairs) in rows.items():
        row = expected[position - 1]
        token, value = pairs[0]
        assert token == prompt[position] and value == pytest.approx(float(row[token]), abs=1e-4)
        assert rank == pytest.approx(1 + int((row > row[token]).sum()), abs=1)  # two may be as likely
        values = [value for _, value in pairs[1:]]
        assert values == pytest.approx(row.topk(COUNT).values.tolist(), abs=1e-4)
        assert [float(row[key]) for key, _ in pairs[1:]] == pytest.approx(values, abs=1e-4)


async def scored(client: Client, prompt: list[int], **params: Any) -> dict[int, TokenLogprobs]:
    sampling = SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": 30, "prompt_logprobs": COUNT, **params})
    async with await client.submit(prompt, sampling, timeout=2 * START) as stream:
        assert sum([len(chunk.ids) async for chunk in stream]) == sampling.n * (sampling.max_tokens or 0)
        assert stream.cached_tokens == 0 or sampling.n > 1
    return by_position(stream.prompt_logprobs)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("gemma2", 2), *tiers.only_in_all(("llama", 1), ("mixtral", 1))],
)
@in_a_loop
async def test_prompt_logprobs_are_those_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    """In chunks, beside others, after preemptions, of prompts that the cache has, and of several samples."""
    build_family(name, tmp_path)
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=ranks, **SIZES)
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        for text in prompts(5):  # into the cache
            async with await client.submit(text, SamplingParams(max_tokens=1), timeout=START) as stream:
                assert [chunk async for chunk in stream]
        samples = [1, 1, 2, 1, 1, 1]
        results = await asyncio.gather(
            *(scored(client, text, n=n) for text, n in zip(prompts(5), samples, strict=True)),
            scored(client, prompts(5)[0], prompt_logprobs=None),
        )
        assert engine.number(StatusBoard.PREEMPTIONS) > 0
    assert results.pop() == {}
    for text, rows in zip(prompts(5), results, strict=True):
        require_those_of_transformers(tmp_path, text, rows)


@in_a_loop
async def test_prompt_logprobs_are_complete_after_the_death_of_a_worker(tmp_path: Path) -> None:
    build_family("llama", tmp_path)
    config = EngineConfig(model=str(tmp_path), **{**SIZES, "max_num_batched_tokens": 6})
    text = prompts(6)[-1]
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=COUNT)
        async with await client.submit(text, sampling, timeout=2 * START) as stream:
            await engine.until(lambda: stream.prompt_logprobs)
            worker = engine.child("worker")
            os.kill(worker.pid, signal.SIGKILL)
            assert stream.completion_tokens == 0, "it was too late"
            assert sum([len(chunk.ids) async for chunk in stream]) == 9
    positions = [entry.position for entry in stream.prompt_logprobs]
    assert positions != sorted(set(positions)), "all of them came before the death"
    require_those_of_transformers(tmp_path, text, by_position(stream.prompt_logprobs))
