"""n new images and m repeats are n misses and m hits, in the store of images and in that of encodings."""

from __future__ import annotations

import asyncio
import io
import itertools
import urllib.request
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from PIL import Image

from penstock.tools.inspect import look
from tests import tiers
from tests.e2e.conftest import STORES
from tests.e2e.test_shipped import Asking, client_of
from tests.support.command import serving
from tests.unit.server.images.test_image_prompts import part

IMAGES = tiers.choose(6, 40, 400)
REPEATS = 3  # of each image; all of an image's requests are open at a time
pytestmark = pytest.mark.timeout(400)
_salts = itertools.count()


def image(number: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (96, 96), (number % 256, number // 256, 77)).save(file, "PNG")
    return part(file.getvalue())


async def ask(asking: Asking, *images: dict[str, Any]) -> None:
    """The salt is another one each time: no prefix is cached, and each image is encoded or found."""
    words = {"type": "text", "text": "What is it?"}
    await asking.chat([words, *images], max_tokens=2, extra_body={"cache_salt": f"salt {next(_salts)}"})


def counts(pid: int) -> dict[str, tuple[int, int]]:
    """Returns misses and hits of each store of tensors, by its name."""
    segments = [segment for segment in look(pid)["segments"] if segment["name"] != "responses"]
    stores = [(segment["name"], store) for segment in segments for store in segment.get("store", ())]
    return {name: (store["misses"], store["hits"]) for name, store in stores}


def counted(pid: int, port: int) -> list[int]:
    """Returns misses and hits of images and encodings, and of the metrics."""
    stores = [number for store in counts(pid).values() for number in store]
    return [*stores, metric(port, "penstock_store_misses_total"), metric(port, "penstock_store_hits_total")]


def metric(port: int, name: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")))


def must_count_new_images_and_repeats(pid: int, port: int) -> None:
    async def ask_all() -> None:
        async with client_of(port) as client:
            asking = Asking(client)
            await asyncio.gather(*(ask(asking, image(number)) for number in range(IMAGES) for _ in range(1 + REPEATS)))
            await ask(asking, image(0), image(IMAGES), image(IMAGES))  # one is new, and comes twice in a request

    before = counted(pid, port)
    asyncio.run(ask_all())
    new, repeats = IMAGES + 1, IMAGES * REPEATS + 2
    assert [after - then for after, then in zip(counted(pid, port), before, strict=True)] == [new, repeats] * 3


def test_new_images_are_misses_and_repeats_are_hits(shipped_on_two_ranks: tuple[Any, int]) -> None:
    process, port = shipped_on_two_ranks
    must_count_new_images_and_repeats(process.pid, port)


@tiers.needs_all
@pytest.mark.parametrize("groups", [1, 2])
def test_new_images_are_misses_and_repeats_are_hits_of_groups(groups: int) -> None:
    options = ("--data-parallel-size", str(groups), "--api-server-count", str(groups))
    with serving(*STORES, *options) as (process, port):
        must_count_new_images_and_repeats(process.pid, port)
