"""The whole engine on a tiny real model: what `transformers` itself generates, token for token."""

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")

from penstock import Scope  # noqa: E402
from penstock.engine.client.client import Client, ImageInput  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.messages import SamplingParams  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.engine import START, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import BLOCK_SIZE, COUNT, Asked, build_family  # noqa: E402
from tests.unit.engine.worker.test_rope import changes  # noqa: E402


@tiers.needs_all  # in push: test_rope, without processes
@in_a_loop
async def test_prompts_of_another_kind_of_positions_share_no_blocks(tmp_path: Path) -> None:
    """What the workers say of longrope reaches the scheduler: one long prompt begins as a short one before it."""
    family = build_family("llama", tmp_path, **changes("llama", "longrope"))
    sizes = {
        "num_gpu_blocks_override": 64,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": BLOCK_SIZE,
    }
    config = EngineConfig(model=str(tmp_path), dtype="float32", **sizes)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        cached = []
        for request, answer in zip(family.requests, family.answers, strict=True):
            async with await client.submit(request.prompt, params, timeout=START) as stream:
                assert [token async for piece in stream for token in piece.ids] == answer
            cached.append(stream.cached_tokens)
        lengths = [len(request.prompt) for request in family.requests]
        assert dict(zip(lengths, cached, strict=True)) == {1: 0, 2: 0, 5: 0, 23: 0, 14: 0, 17: 12, 22: 0}


@pytest.mark.parametrize(("name", "ranks"), [pytest.param("llava", 2, marks=tiers.needs_all), ("qwen2_vl", 1)])
@in_a_loop
async def test_images_are_seen_wherever_they_lie(name: str, ranks: int, tmp_path: Path) -> None:
    """With a key and without, in the store and inline; across chunks, and after preemption."""
    family = build_family(name, tmp_path)
    longest = family.blocks * BLOCK_SIZE
    sizes = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": family.blocks,
        "max_model_len": longest,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 6,
    }
    config = EngineConfig(
        model=str(tmp_path),
        tensor_parallel_size=ranks,
        dtype="float32",
        store_nbytes=1 << 20,
        api_server_count=2,
        **sizes,
    )

    async def answer(client: Client, scope: Scope | None, request: Asked, tokens: int, has_key: bool) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        values = [ImageInput(family.images[key], *place, key if has_key else None) for key, *place in request.inputs]
        submitted = client.submit(request.prompt, params, values=values, scope=scope, timeout=START)
        async with await submitted as stream:
            return [token async for piece in stream for token in piece.ids]

    async with launched(config) as engine:
        cluster = engine.launcher.cluster
        async with Client(cluster, 0) as client, Client(cluster, 1) as other:
            store = cluster.store
            assert store is not None
            pairs = list(zip(family.requests, family.answers, strict=True))
            for has_key in (True, False):
                scopes = [Scope(store, inline_nbytes=0) for _ in pairs]
                for sender, held in (
                    (client, scopes),
                    (other, [Scope() for _ in pairs]),
                ):  # the other sends all inline
                    results = await asyncio.gather(
                        *(
                            answer(sender, scope, request, len(pair), has_key)
                            for scope, (request, pair) in zip(held, pairs, strict=True)
                        )
                    )
                    assert results == [list(expected) for _, expected in pairs], (has_key, sender is client)
                    assert all(
                        (scope.stats().inline > 0) == (sender is other) for scope in held if scope.stats().handles
                    )
                assert not has_key or sum(scope.stats().hits for scope in scopes)
        assert len(store.stats().items) == len(family.images)
        while any(item.holders for item in store.stats().items) or store.stats().pool.blocks > len(family.images):
            await asyncio.sleep(0.01)  # a worker has answered, and lets go of what it has read
