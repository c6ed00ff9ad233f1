"""Requests are answered as in an undisturbed run when their group, or output processor, is killed."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")
pillow = pytest.importorskip("PIL.Image")

from penstock.engine.client.client import ImageInput  # noqa: E402
from tests import tiers  # noqa: E402
from tests.crash.comparable_requests import AnyRequest, ClientRequest  # noqa: E402
from tests.crash.migrating import Migrating, migrating  # noqa: E402
from tests.crash.request_mix import Mix, Shape  # noqa: E402
from tests.crash.strikes import compare, shuffled_kinds  # noqa: E402
from tests.support import tiny_models  # noqa: E402
from tests.support.engine import simulated_device  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402

MODEL_START = 240.0  # seconds; each worker imports torch
VOCABULARY = 1000  # of the simulated device
BYTES = 264  # ids of a tiny model: one for each byte, and special ones
PLACEHOLDERS = 8  # tokens of an image that a `Client` submits
PRESSED = {"max_num_seqs": 24, "max_num_batched_tokens": 64}  # so that sequences wait, and prompts take several steps
MODEL: dict[str, Any] = {
    **PRESSED,
    "simulated": None,
    "dtype": "float32",
    "threads": 1,
    "num_gpu_blocks_override": 400,
    "store_nbytes": 16 << 20,
}


@dataclass(frozen=True)
class Configuration:
    """A engine, and its part of the requests."""

    share: float  # of all requests
    shape: Shape
    options: dict[str, Any]
    kills: int = 3  # in each round: of one request at most so many
    requests: int = 20  # at a time
    server: dict[str, Any] = field(default_factory=dict)


def simulated(**options: Any) -> dict[str, Any]:
    return {**PRESSED, "simulated": simulated_device(step_seconds=0.004, vocabulary=VOCABULARY, blocks=300), **options}


def shape(model: str, vocabulary: int, **more: Any) -> Shape:
    return Shape(model, vocabulary, tuple(range(40, 40 + vocabulary // 40)), **more)


OF_RULE = shape("simulated", VOCABULARY)
CONFIGURATIONS = {
    "simulated, two groups of two ranks": Configuration(
        0.35, OF_RULE, simulated(data_parallel_size=2, tensor_parallel_size=2, store_nbytes=16 << 20), requests=30
    ),
    "simulated, one group, two outputs": Configuration(0.3, OF_RULE, simulated(output_processors=2)),
    "simulated, one group, output in the core": Configuration(
        0.0 if tiers.TIER == "push" else 0.1, OF_RULE, simulated(output_processors=0)
    ),
    # In push, test_resumed_answer_equals_the_answer_without_a_loss has resumed answers of models.
    "tiny-llama": Configuration(
        0.0 if tiers.TIER == "push" else 0.15,
        shape(tiny_models.LLAMA, BYTES, tokens=(40, 120), has_logprobs=True),
        {**MODEL, "tensor_parallel_size": 2},
    ),
    "tiny-qwen2vl": Configuration(
        0.0 if tiers.TIER == "push" else 0.2,
        shape(tiny_models.QWEN2_VL, BYTES, has_logprobs=True, has_images=True),
        MODEL,
    ),
}


def data_urls(count: int = 4) -> list[str]:
    urls = []
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 255, (40 + 8 * number, 56, 3), np.uint8)
        raw = io.BytesIO()
        pillow.fromarray(noise).save(raw, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(raw.getvalue()).decode())
    return urls


def with_images(requests: Sequence[AnyRequest]) -> list[AnyRequest]:
    """Gives every second request of a `Client` an image that its store keeps: the simulated device opens it."""
    numbers, numbered = itertools.count(), list(requests)
    for at, request in enumerate(numbered):
        if isinstance(request, ClientRequest) and len(request.prompt) > PLACEHOLDERS and next(numbers) % 2 == 0:
            pixels = np.full((3, 64, 64), at, np.float32)
            images = (ImageInput([pixels], 0, PLACEHOLDERS, at.to_bytes(32, "little")),)
            numbered[at] = ClientRequest(request.prompt, request.params, request.priority, images)
    return numbered


async def in_rounds(engine: Migrating, configuration: Configuration, count: int, seed: int, urls: list[str]) -> None:
    kinds = shuffled_kinds(
        seed, ("worker", "core", "output") if engine.config.output_processors else ("worker", "core")
    )
    mix = Mix(configuration.shape, seed, urls)
    for number in itertools.count():
        if count <= 0:
            return
        requests = await mix.requests(engine, min(count, configuration.requests))
        if engine.config.simulated is not None and engine.config.store_nbytes:
            requests = with_images(requests)
        chosen = list(itertools.islice(kinds, configuration.kills))
        await compare(engine, requests, chosen, seed + number, at_once=0.0 if number == 0 else 0.3)
        await engine.must_be_whole(MODEL_START)
        count -= len(requests)


@pytest.mark.timeout(tiers.limit(900.0, 20_000.0))
@pytest.mark.parametrize("name", CONFIGURATIONS)
@in_a_loop
async def test_answers_are_those_of_an_undisturbed_run_when_processes_are_killed(
    name: str, seed: int, request: pytest.FixtureRequest
) -> None:
    configuration = CONFIGURATIONS[name]
    count = round(configuration.share * tiers.MIGRATED_REQUESTS)
    if not count:
        pytest.skip("in make test-all (PENSTOCK_TIER=all)")
    options = dict(configuration.options)
    if options["simulated"] is None:
        options["model"] = str(request.getfixturevalue("models") / configuration.shape.model)
    urls = data_urls() if configuration.shape.has_images else []
    async with migrating(configuration.server, MODEL_START, **options) as engine:
        await in_rounds(engine, configuration, count, seed, urls)
