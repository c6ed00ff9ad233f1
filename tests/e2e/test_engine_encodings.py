"""Encodings of images in the whole engine: each image is encoded once, also for two engines, and also when one dies."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")

from penstock import Store  # noqa: E402
from penstock.engine.client.client import Client, ImageInput  # noqa: E402
from penstock.engine.client.stream import EngineError  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.messages import SamplingParams  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.engine import START, Running, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import BLOCK_SIZE, Asked, Family, build_family  # noqa: E402


def config_of(family: Family, path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(path),
        dtype="float32",
        store_nbytes=1 << 24,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=4 * family.blocks,
        max_model_len=family.blocks * BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        threads=1,
        **options,
    )


async def answer(client: Client, family: Family, request: Asked, group: int) -> list[int]:
    """Of this group."""
    params = SamplingParams(temperature=0, max_tokens=request.tokens, ignore_eos=True, detokenize=False)
    values = [ImageInput(family.images[key], *place, key) for key, *place in request.inputs if key is not None]
    client._router.choose = lambda loads, traces: group  # type: ignore[method-assign]
    async with await client.submit(request.prompt, params, values=values, timeout=START) as stream:
        return [token async for piece in stream for token in piece.ids]


def encoded(engine: Running, word: int = StatusBoard.ENCODINGS) -> int:
    return sum(engine.number(word, group) for group in range(engine.config.data_parallel_size))


@pytest.mark.parametrize(
    ("name", "ranks", "groups", "mode"),
    [
        pytest.param("llava", 2, 2, None, marks=tiers.needs_all),
        ("qwen2_vl", 1, 2, "store"),
        pytest.param("idefics3", 2, 1, "data", marks=tiers.needs_all),
    ],
)
@in_a_loop
async def test_each_image_is_encoded_once(name: str, ranks: int, groups: int, mode: str | None, tmp_path: Path) -> None:
    """In each group, one after the other and at the same time; without a mode, there is a store of encodings."""
    family = build_family(name, tmp_path)
    options = {"tensor_parallel_size": ranks, "data_parallel_size": groups, "mm_encoder_tp_mode": mode}
    pairs = list(zip(family.requests, family.answers, strict=True))
    async with launched(config_of(family, tmp_path, **options), within=2 * START) as engine:
        async with Client(engine.launcher.cluster, 0) as client:
            together = [answer(client, family, pairs[2][0], group) for group in range(groups)]
            assert await asyncio.gather(*together) == [pairs[2][1]] * groups
            for request, expected in pairs:
                for group in range(groups):
                    assert await answer(client, family, request, group) == expected
        await engine.until(lambda: encoded(engine) >= len(family.images))
        assert encoded(engine) == len(family.images)
        assert encoded(engine, StatusBoard.ENCODINGS_UNSHARED) == 0
        if groups > 1:
            assert encoded(engine, StatusBoard.ENCODINGS_FOUND) >= len(family.images)


def slow(path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """A model that takes a second and more for an image: 4,096 patches, and many layers, become 16 tokens."""
    tower = {**models.TOWER, "num_hidden_layers": 12, "image_size": 256, "initializer_range": 0.3}
    shape = {**models.VISION["idefics3"], "vision_config": tower, "scale_factor": 16}
    image = {
        "pixel_values": torch.randn(1, 1, 3, 256, 256),
        "pixel_attention_mask": torch.ones(1, 1, 256, 256, dtype=torch.int64),
    }
    monkeypatch.setitem(models.VISION, "idefics3", shape)
    monkeypatch.setattr(models, "image", lambda name, chance: (image, [models.IMAGE] * 16))
    prompt = [5, 6, *[models.IMAGE] * 16, 7]
    family = build_family("idefics3", path, requests=[Asked([5], [])])
    key = random.Random(1).randbytes(32)
    request = Asked(prompt, [(key, 2, 16)])
    stock = models.transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    images = {key: image}
    return family._replace(requests=[request], images=images, answers=[models._answer(stock, request, images)])


def writers(store: Store) -> list[int]:
    return [item.holders for item in store.stats().items if item.is_being_written]


@tiers.needs_all
@in_a_loop
async def test_an_engine_goes_on_when_the_one_that_encodes_its_image_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = slow(tmp_path, monkeypatch)
    request, expected = family.requests[0], family.answers[0]
    async with launched(config_of(family, tmp_path, data_parallel_size=2), within=2 * START) as engine:
        store = engine.launcher.cluster.encodings
        assert store is not None
        async with Client(engine.launcher.cluster, 0) as client:
            dying = asyncio.ensure_future(answer(client, family, request, 0))
            await engine.until(lambda: writers(store))
            waiting = asyncio.ensure_future(answer(client, family, request, 1))
            await engine.until(lambda: store.stats().fills_awaited)
            assert writers(store), "the image was encoded too soon for this test"
            worker = next(
                child for child in engine.children() if (child.member.kind, child.member.group) == ("worker", 0)
            )
            os.kill(worker.pid, signal.SIGKILL)
            assert await waiting == expected
            try:
                assert await dying == expected  # a request may have moved to the other engine
            except EngineError as error:
                assert error.status == 503
            await engine.until(lambda: engine.number(StatusBoard.ENCODINGS, 1) == 1)
            assert engine.number(StatusBoard.ENCODINGS_UNSHARED, 1) == 0
            await engine.serving_again(client)
            assert await answer(client, family, request, 0) == expected
            await engine.until(lambda: engine.number(StatusBoard.ENCODINGS_FOUND, 0) == 1)
            assert engine.number(StatusBoard.ENCODINGS, 0) == 0
        assert not writers(store)
