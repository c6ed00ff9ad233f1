"""Decoders as a server uses them: where tensors lie, and what becomes of one that hangs, dies or is not needed."""

import asyncio
import contextlib
import mmap
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("av")

from penstock import Store
from penstock.engine.client.image_processor import ImageRefused
from penstock.engine.client.video_processor import VideoProcessor
from penstock.engine.client.video_settings import VideoInfo, VideoSettings
from penstock.server.media.media_budget import MediaBudget
from penstock.server.videos import video_decoders
from penstock.server.videos.video_file import VideoFile, VideoLimits
from penstock.server.videos.video_loader import VideoLoader
from penstock.server.videos.video_upload import VideoUpload
from penstock.tensor import Scope
from tests.support.videos import video

PIXELS = "pixel_values_videos"
START = 60.0  # seconds, in which a host imports torch beside other tests
MIB = 1 << 20


class Scene:
    """A loader with its store, and what it has reported."""

    def __init__(self, loader: VideoLoader, store: Store | None, budget: MediaBudget) -> None:
        self.loader = loader
        self.store = store
        self.budget = budget
        self.busy = (0, 0)
        self.ends: list[str] = []

    async def load(self, raw: bytes, client: str = "a") -> dict[str, Any]:
        """Returns the value of a video, and holds nothing of it."""
        with Scope(self.store, inline_nbytes=0) as scope:
            loaded, _ = await self.loader.load(lambda: upload(raw), scope, client)
            lease = loaded.item.open(self.store)
            value: dict[str, Any] = lease.value()
            return {name: np.array(part) if isinstance(part, np.ndarray) else part for name, part in value.items()}

    @property
    def host(self) -> int:
        host = self.loader._decoders._host
        assert host is not None, "no video was decoded yet"
        return host.pid

    def decoders(self) -> list[int]:
        children = Path(f"/proc/{self.host}/task/{self.host}/children").read_text().split()
        return [int(pid) for pid in children]

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come"
            await asyncio.sleep(0.005)

    async def must_hold_nothing(self) -> None:
        await self.until(lambda: self.budget.decoded.held == 0 and self.busy == (0, 0) and not self.decoders())
        if self.store is not None:
            await self.until(lambda: not any(item.holders for item in self.store.stats().items))  # type: ignore[union-attr]


def upload(raw: bytes) -> VideoUpload:
    made = VideoUpload()
    made.write(raw)
    made.seal()
    return made


def settings(**changed: Any) -> VideoSettings:
    usual: dict[str, Any] = {
        "family": "qwen2_vl",
        "token_id": 7,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
        "frame_side": 0,
        "frame_tokens": 0,
        "mode": "bicubic",
        "scale": 1 / 255,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_frames": 4,
        "max_frames": 768,
        "num_frames": None,
        "fps": 2.0,
        "cap_pixels_per_frame": False,
        "max_video_tokens": 0,
    }
    return VideoSettings(**{**usual, **changed})


def expected(raw: bytes, tmp_path: Path) -> dict[str, Any]:
    """The value that is computed in this process."""
    path = tmp_path / "expected.mp4"
    path.write_bytes(raw)
    with path.open("rb") as file:
        read = VideoFile(file, VideoLimits())
        processor = VideoProcessor(settings())
        planned = processor.plan(VideoInfo(**read.info._asdict()))
        return processor.process(read.frames(planned.indices)[:], planned)


@contextlib.asynccontextmanager
async def scene(
    store: Store | None, *, budget: int = 256 * MIB, limits: VideoLimits | None = None, **options: Any
) -> AsyncIterator[Scene]:
    media = MediaBudget(budget)
    usual: dict[str, Any] = {"count": 2, "max_tokens": 1000, "limits": limits or VideoLimits(), **options}
    seen = Scene.__new__(Scene)

    def changed(busy: int, waiting: int) -> None:
        seen.busy = busy, waiting

    loader = VideoLoader(settings(), store, media, changed=changed, ended=lambda end, _: seen.ends.append(end), **usual)
    seen.__init__(loader, store, media)  # type: ignore[misc]
    with contextlib.closing(loader):
        yield seen
        if loader._decoders._host is not None:
            await seen.must_hold_nothing()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 2 * START)

    asyncio.run(bounded())


def same(value: dict[str, Any], other: dict[str, Any]) -> bool:
    return value.keys() == other.keys() and all(np.array_equal(value[name], other[name]) for name in value)


# ── where the tensors lie ────────────────────────────────────────────────────────────────────────────────────────────
def test_tensors_are_made_in_the_store_and_found_there_the_next_time(tmp_path: Path) -> None:
    async def work() -> None:
        with Store(8 * MIB) as store:
            async with scene(store) as seen:
                raw = video()
                assert same(await seen.load(raw), expected(raw, tmp_path))
                assert same(await seen.load(raw), expected(raw, tmp_path))
                assert (store.stats().puts, seen.ends) == (1, ["decoded"])

    run(work)


def test_tensors_travel_inline_without_a_store_and_where_it_is_too_small(tmp_path: Path) -> None:
    async def work() -> None:
        want = expected(video(), tmp_path)
        async with scene(None) as seen:
            assert same(await seen.load(video()), want)
            await seen.must_hold_nothing()
        with Store(64 << 10) as store:
            async with scene(store) as seen:
                assert same(await seen.load(video()), want)
                assert store.stats().puts == 0
            async with scene(store, must_store=True) as seen:
                with pytest.raises(
                    ImageRefused, match=r"the store has \d+ bytes, the tensors of this video have"
                ) as no:
                    await seen.load(video())
                assert no.value.status == 413

    run(work)


def test_one_video_of_many_requests_is_decoded_once(tmp_path: Path) -> None:
    async def work() -> None:
        with Store(8 * MIB) as store:
            async with scene(store) as seen:
                values = await asyncio.gather(*(seen.load(video(), f"client {n}") for n in range(8)))
                want = expected(video(), tmp_path)
                assert all(same(value, want) for value in values) and seen.ends == ["decoded"]

    run(work)


def test_many_videos_one_after_the_other_leave_neither_process_nor_place() -> None:
    async def work() -> None:
        with Store(32 * MIB, max_peers=4) as store:
            async with scene(store) as seen:
                raws = [video(frames=8 + n, size=(32, 32)) for n in range(24)]
                for first in range(0, len(raws), 4):
                    await asyncio.gather(*map(seen.load, raws[first : first + 4]))
                assert seen.ends == ["decoded"] * len(raws) and store.stats().puts == len(raws)
                await seen.must_hold_nothing()
                assert len(os.listdir(f"/proc/{seen.host}/fd")) < 16

    run(work)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        ({"max_tokens": 7}, 400, "this model has at most 7 tokens, and the video takes 8"),
        (
            {"limits": VideoLimits(frames=3)},
            413,
            "of a video the model gets at most 3 frames, of this one it would get 4",
        ),
        ({"limits": VideoLimits(pixels=100)}, 413, "a frame of a video has at most 100 pixels, this one has 64 x 48"),
        ({"budget": 128 << 10}, 413, r"decoding the video takes \d+ bytes, and at most 65536 are held at a time"),
    ],
)
def test_a_video_above_a_limit_is_refused_before_it_is_decoded(
    options: dict[str, Any], status: int, reason: str
) -> None:
    async def work() -> None:
        async with scene(None, **options) as seen:
            with pytest.raises(ImageRefused, match=reason) as caught:
                await seen.load(video())
            assert caught.value.status == status and seen.ends == ["refused"]

    run(work)


def test_a_video_waits_for_the_bytes_that_others_hold() -> None:
    async def work() -> None:
        async with scene(None) as seen:
            await seen.load(video())
            lease = await seen.budget.decoded.acquire("other", seen.budget.decoded.nbytes)
            loading = asyncio.ensure_future(seen.load(video(frames=20)))
            await seen.until(lambda: seen.budget.decoded.waiting == 1)
            lease.release()
            assert PIXELS in await loading

    run(work)


def test_a_decoder_that_takes_too_long_is_killed_and_the_next_video_is_decoded() -> None:
    async def work() -> None:
        async with scene(None, limits=VideoLimits(decoder_seconds=0.5)) as seen:
            await seen.load(video(frames=8))  # the host has started
            long = video(frames=3000, size=(640, 480), codec="mpeg4")
            began = time.monotonic()
            with pytest.raises(ImageRefused, match=r"at most 0\.5 s of a decoder, this one takes longer") as caught:
                await seen.load(long)
            print(f"refused after {time.monotonic() - began:.2f} s")
            assert caught.value.status == 400
            await seen.load(video(frames=9))
            assert seen.ends == ["decoded", "timeout", "decoded"]

    run(work)


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_decoder_that_dies_ends_its_own_video_only() -> None:
    async def work() -> None:
        with Store(8 * MIB) as store:
            async with scene(store) as seen:
                await seen.load(video(frames=8))
                lease = await seen.budget.decoded.acquire("other", seen.budget.decoded.nbytes)
                videos = [asyncio.ensure_future(seen.load(video(frames=frames))) for frames in (10, 11)]
                await seen.until(lambda: seen.budget.decoded.waiting == 2)
                victim = seen.decoders()[0]
                os.kill(victim, signal.SIGKILL)
                await seen.until(lambda: victim not in seen.decoders())
                lease.release()
                results = await asyncio.gather(*videos, return_exceptions=True)
                refused = [result for result in results if isinstance(result, ImageRefused)]
                assert len(refused) == 1 and "the decoder of this video has crashed" in refused[0].reason
                assert sum(isinstance(result, dict) for result in results) == 1
                assert sorted(seen.ends) == ["decoded", "decoded", "died"]

    run(work)


def test_a_request_that_goes_kills_its_decoder_and_gives_its_bytes_back() -> None:
    async def work() -> None:
        async with scene(None) as seen:
            await seen.load(video(frames=8))
            loading = asyncio.ensure_future(seen.load(video(frames=2000, size=(640, 480), codec="mpeg4")))
            await seen.until(lambda: seen.budget.decoded.held and seen.decoders())
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            await seen.must_hold_nothing()
            assert seen.ends == ["decoded", "cancelled"]

    run(work)


def test_a_host_that_dies_is_started_again() -> None:
    async def work() -> None:
        async with scene(None) as seen:
            await seen.load(video(frames=8))
            first = seen.host
            os.kill(first, signal.SIGKILL)
            assert PIXELS in await seen.load(video(frames=9))
            assert seen.host != first and seen.ends == ["decoded", "decoded"]

    run(work)


def test_a_host_that_cannot_start_refuses_videos_and_says_where_the_reason_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_decoders, "MAIN", "raise SystemExit('no such package')")

    async def work() -> None:
        async with scene(None) as seen:
            with pytest.raises(ImageRefused, match="no video decoder can be started: the server's log says why") as no:
                await seen.load(video())
            assert no.value.status == 500

    run(work)


def test_a_host_ends_with_its_server_and_ignores_signals_that_all_processes_get() -> None:
    async def work() -> None:
        async with scene(None) as seen:
            await seen.load(video(frames=8))
            host = seen.host
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(host, number)
            await seen.load(video(frames=9))
            assert seen.host == host
        assert not Path(f"/proc/{host}").exists()

    run(work)


# ── files of memory ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_upload_is_sealed_and_its_key_is_that_of_its_bytes() -> None:
    with upload(b"abc" * 1000) as made, upload(b"abc" * 1000) as twin, upload(b"abd" * 1000) as other:
        assert made.key(b"salt") == twin.key(b"salt") != other.key(b"salt") and made.key(b"x") != made.key(b"salt")
        with pytest.raises(OSError, match="not permitted"):
            made.write(b"more")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(made.fd, 1)
        with pytest.raises(PermissionError):
            mmap.mmap(made.fd, 3000)
    with upload(b"") as empty:
        assert empty.key(b"") and empty.container is None
