"""Images from the server through the media process to a worker: ways, deaths, aborts. On a device, or a double."""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("transformers")
pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'penstock[engine]'")

from penstock import Missing, Store  # noqa: E402
from penstock.engine.media import device_images  # noqa: E402
from penstock.engine.media.device_images import DeviceImages, MediaProcess  # noqa: E402
from penstock.engine.media.image_messages import MediaSetup  # noqa: E402
from penstock.engine.media.image_processor import ImageProcessor, ProcessedImage  # noqa: E402
from penstock.engine.media.media_budget import MediaScope  # noqa: E402
from penstock.engine.media.media_kind import MediaRefused  # noqa: E402
from penstock.tensor.cuda import ReceivedTensors  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.libcuda import DriverDouble, has_device, open_device  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import VISION  # noqa: E402
from tests.unit.engine.media.test_image_processor import model_in, picture  # noqa: E402

pytestmark = pytest.mark.skipif(torch.version.cuda is not None and not has_device(), reason="needs a CUDA device")

MIB = 1 << 20
IMAGE = 1024  # bytes of a slice with LLaVA's image of 3 x 8 x 8 numbers
USE_DOUBLE = """
from tests.support.libcuda import DriverDouble, use_device
from penstock.engine.cluster import cuda_devices
cuda_devices.torch_build = lambda: cuda_devices.TorchBuild("a double", "13.0", None)
use_device(0)
"""
MAIN = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
{"" if has_device() else USE_DOUBLE}
from penstock.engine.media import media_process
{{}}
media_process.main(*map(int, sys.argv[1:]))
"""
APART = "DriverDouble.current.driver.part(0, 1)"
DIES = "media_process._Images.receive = lambda *_: os._exit(1)"


class Scene:
    """A server process and a worker on device 0, both in this process, and a media process."""

    def __init__(
        self,
        double: DriverDouble | None,
        path: Path,
        store: Store,
        devices: tuple[str, ...],
        device: str,
        pool_nbytes: int,
    ) -> None:
        self.double = double
        self.ways: list[str] = []
        setup = MediaSetup(
            model=str(path),
            devices=devices,
            device=device,
            pool_nbytes=pool_nbytes,
            store=str(store.ticket),
            threads=2,
            log_format="text",
            log_level="info",
        )
        self.store = store
        self.images = DeviceImages(setup, store, self.ways.append)
        self.processor = ImageProcessor(path, store, threads=2, device=self.images, max_tokens=1000)
        self.received = ReceivedTensors(lambda handle: handle.open(store))

    def scope(self) -> MediaScope:
        return MediaScope(self.store, inline_nbytes=0)

    async def load(self, raw: bytes) -> ProcessedImage:
        """Holds nothing of the image."""
        with self.scope() as scope:
            return await self.processor.load(raw, scope)

    def resolved(self, image: ProcessedImage) -> dict[str, Any]:
        with image.item.open(self.store) as lease:
            return self.received.resolve(lease.value("torch"))

    def is_missing(self, image: ProcessedImage) -> bool:
        try:
            self.resolved(image)
        except Missing:
            return True
        return False

    def mapped(self) -> int:
        """Returns how many pools of device memory the worker has mapped; 0 on a device, which does not tell."""
        gc.collect()
        self.received.flush()
        return 0 if self.double is None else self.double.driver.held().get("reserved addresses", 0)

    @property
    def process(self) -> MediaProcess:
        assert self.images._starting is not None, "no image was loaded yet"
        return self.images._starting.result()

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come"
            await asyncio.sleep(0.005)

    async def waiting(self, raw: bytes, scope: MediaScope) -> "asyncio.Task[ProcessedImage]":
        """Returns the load of an image that the media process, which is stopped, does not answer."""
        os.kill(self.process.pid, signal.SIGSTOP)
        loading = asyncio.ensure_future(self.processor.load(raw, scope))
        await self.until(lambda: self.process._replies)
        return loading

    def blocks_of(self, name: str) -> int:
        gc.collect()
        self.received.flush()
        holders = self.process.pool.stats().holders
        return sum(holder.blocks + holder.granted for holder in holders if holder.name == name)

    async def must_hold_nothing(self) -> None:
        await self.until(lambda: not any(item.holders for item in self.store.stats().items))
        assert self.images._small.held == self.images._large.held == 0
        starting = self.images._starting
        if starting is not None and starting.exception() is None and not self.process.has_ended:
            assert not self.process._replies and not self.blocks_of("server")


@contextlib.asynccontextmanager
async def scene_of(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: tuple[str, ...] = ("0",),
    device: str = "0",
    pool_nbytes: int = 4 * MIB,
    more: str = "",
    name: str = "llava",
) -> AsyncIterator[Scene]:
    monkeypatch.setattr(device_images, "MAIN", MAIN.format(more))
    with contextlib.nullcontext() if has_device() else open_device() as double, Store(2 * MIB) as store:
        scene = Scene(double, model_in(path, name), store, devices, device, pool_nbytes)
        with scene.processor:
            yield scene
            await scene.must_hold_nothing()
            scene.received.close()
            await scene.until(lambda: not scene.mapped())


def expected_of(path: Path, raw: bytes) -> dict[str, Any]:
    with ImageProcessor(path, None, threads=1) as processor:
        return processor._make(processor._parse(raw))


@pytest.mark.parametrize("name", ["idefics3"] if tiers.TIER == "push" else VISION)
@in_a_loop
async def test_image_reaches_a_worker_without_the_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of(tmp_path, monkeypatch, name=name) as scene:
        raw = picture(60, 35)
        expected = expected_of(tmp_path, raw)
        with scene.scope() as scope:
            image = await scene.processor.load(raw, scope)
            assert (image.tokens, image.rows, image.columns) == tuple(
                expected.pop(field) for field in ("tokens", "rows", "columns")
            )
            value = scene.resolved(image)
            pixels = value["pixel_values"]
            assert pixels.device == torch.device("cuda", 0) and image.item.is_inline and image.item.nbytes < 4096
            for key, tensor in expected.items():
                assert (value[key].cpu().numpy() == tensor).all(), key
            assert scope.stats().puts == 1 and scene.blocks_of("server") > 0
            with scene.scope() as other:
                same = await scene.processor.load(raw, other)
                assert same == image and other.stats().hits == 1
            del value, pixels
        assert scene.ways == ["device", "device"] and scene.store.stats().puts == 0


@pytest.mark.skipif(has_device(), reason="needs two devices that a test can part")
@pytest.mark.parametrize(("more", "way"), [("", "peer"), (APART, "store")])
@in_a_loop
async def test_image_for_workers_of_two_devices_goes_by_peers_or_the_store(
    more: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of(tmp_path, monkeypatch, devices=("0", "1"), more=more) as scene:
        raw = picture()
        expected = expected_of(tmp_path, raw)
        with scene.scope() as scope:
            image = await scene.processor.load(raw, scope)
            assert (scene.resolved(image)["pixel_values"].cpu().numpy() == expected["pixel_values"]).all()
            assert image.item.is_inline == (way == "peer") and image.tokens == expected["tokens"]
        assert scene.ways == [way] and scene.store.stats().puts == (way == "store")
        with scene.scope() as scope:
            assert (await scene.processor.load(raw, scope)).item.key == image.item.key
            assert scope.stats().hits == 1


@tiers.needs_all
@in_a_loop
async def test_pool_without_room_gives_up_images_and_then_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of(tmp_path, monkeypatch, pool_nbytes=2 * IMAGE) as scene:
        for seed in range(4):
            await scene.load(picture(seed=seed))
        assert scene.ways == ["device"] * 4 and scene.blocks_of("media process") == 2
        with contextlib.ExitStack() as held:
            scope = held.enter_context(scene.scope())  # of all the pool
            images = [await scene.processor.load(picture(seed=seed), scope) for seed in range(4, 7)]
            assert scene.ways[4:] == ["device", "device", "store"]
            assert len({image.item.key for image in images}) == 3
            room = scene.store.put(np.zeros(scene.store.nbytes - 64 * 1024, np.uint8))
            with pytest.raises(MediaRefused, match="has no room for") as caught:
                for seed in range(7, 1000):
                    await scene.processor.load(picture(seed=seed), scope)
            assert caught.value.status == 503
        room.release()
        assert (await scene.load(picture(seed=1000))).tokens == 4


@tiers.needs_all
@in_a_loop
async def test_process_lives_on_after_images_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.media.image_processor.MAX_RATIO", 1000)
    async with scene_of(tmp_path, monkeypatch, name="qwen2_vl", pool_nbytes=16 * 1024) as scene:
        for raw, reason in ((picture(20, 20)[:-300], "expected an image as PNG"), (picture(1000, 2), "takes no image")):
            with pytest.raises(MediaRefused, match=reason) as caught:
                await scene.load(raw)
            assert caught.value.status == 400
        pid = scene.process.pid
        monkeypatch.setattr(scene.processor, "_max_tokens", 1)
        with pytest.raises(MediaRefused, match="at most 1 tokens, and the image takes"):
            await scene.load(picture())
        monkeypatch.setattr(scene.processor, "_max_tokens", 100)
        assert (await scene.load(picture())).tokens > 1 and scene.process.pid == pid
        await scene.load(picture(16, 16))
        num_blocks = scene.blocks_of("media process")
        await scene.load(picture(100, 100))  # larger than the pool: no other image makes room for it
        assert scene.ways[-1] == "store" and scene.blocks_of("media process") == num_blocks > 0


@in_a_loop
async def test_images_of_a_process_that_is_killed_are_processed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: after the second death, this process has as many descriptors as after the first."""
    async with scene_of(tmp_path, monkeypatch) as scene:
        num_descriptors = []
        for _ in range(2):
            with scene.scope() as scope, scene.scope() as later:
                before = await scene.processor.load(picture(), scope)
                assert scene.resolved(before)["pixel_values"].shape[-1] == 8
                killed = scene.process
                loading = await scene.waiting(picture(seed=1), later)
                os.kill(killed.pid, signal.SIGKILL)
                image = await loading
                assert killed.has_ended and scene.process.pid != killed.pid
                await scene.until(functools.partial(scene.is_missing, before))  # 503, as any value that is gone
                assert scene.resolved(image)["pixel_values"].shape[-1] == 8
                killed.reaping.join()
            del killed
            await scene.until(lambda: scene.mapped() <= 1)
            num_descriptors.append(len(os.listdir("/proc/self/fd")))
        assert num_descriptors[1] <= num_descriptors[0]


@tiers.needs_all
@in_a_loop
async def test_image_that_kills_two_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene_of(tmp_path, monkeypatch, more=DIES) as scene:
        with pytest.raises(MediaRefused, match="died twice") as caught:
            await scene.load(picture())
        assert caught.value.status == 503


@tiers.needs_all
@in_a_loop
async def test_process_that_does_not_start_refuses_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene_of(tmp_path, monkeypatch, device="7") as scene:
        for _ in range(2):
            with pytest.raises(MediaRefused, match="no media process can be started") as caught:
                await scene.load(picture())
            assert caught.value.status == 500


@tiers.needs_all
@in_a_loop
async def test_image_of_a_request_that_has_gone_is_held_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_of(tmp_path, monkeypatch) as scene:
        await scene.load(picture())
        with scene.scope() as scope:
            loading = await scene.waiting(picture(seed=1), scope)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            os.kill(scene.process.pid, signal.SIGCONT)
        assert (await scene.load(picture(seed=2))).tokens == 4


@tiers.needs_all
@in_a_loop
async def test_process_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene_of(tmp_path, monkeypatch) as scene:
        await scene.load(picture())
        stopped = scene.process
        monkeypatch.setattr(device_images, "REPLY_TIMEOUT", 0.01)
        with scene.scope() as scope:
            loading = await scene.waiting(picture(seed=1), scope)
            with pytest.raises(MediaRefused, match="not processed the image within") as caught:
                await loading
        assert caught.value.status == 503 and stopped.has_ended
