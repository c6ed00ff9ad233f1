"""Decoders as a server uses them: where tensors lie, and what becomes of one that hangs, dies or is not needed."""

import asyncio
import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("av")

from penstock import Store
from penstock.engine.media import video_decoders
from penstock.engine.media.media_budget import MediaBudget
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.video_file import VideoFile, VideoLimits
from penstock.engine.media.video_loader import VideoLoader
from penstock.engine.media.video_processor import VideoProcessor
from penstock.engine.media.video_settings import VideoInfo, VideoSettings
from penstock.engine.media.video_upload import VideoUpload
from penstock.tensor import Scope
from tests.support.loops import in_a_loop
from tests.support.videos import repeated, video

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

    async def stopped(self, raw: bytes) -> "asyncio.Task[dict[str, Any]]":
        """Returns the load of a video, with its decoder stopped after reading the container."""
        lease = await self.budget.decoded.acquire("other", self.budget.decoded.nbytes)
        loading = asyncio.ensure_future(self.load(raw))
        await self.until(lambda: self.budget.decoded.waiting == 1)
        (decoder,) = self.decoders()
        os.kill(decoder, signal.SIGSTOP)
        lease.release()
        return loading

    async def must_hold_nothing(self) -> None:
        await self.until(lambda: self.budget.decoded.held == 0 and self.busy == (0, 0) and not self.decoders())
        if self.store is not None:
            await self.until(lambda: not any(item.holders for item in self.store.stats().items))  # type: ignore[union-attr]


def upload(raw: bytes) -> VideoUpload:
    video_upload = VideoUpload()
    video_upload.write(raw)
    video_upload.seal()
    return video_upload


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
async def scene(store: Store | None, **options: Any) -> AsyncIterator[Scene]:
    budget = MediaBudget(256 * MIB)
    observed = Scene.__new__(Scene)

    def changed(busy: int, waiting: int) -> None:
        observed.busy = busy, waiting

    usual: dict[str, Any] = {"count": 2, "max_tokens": 100_000, "limits": VideoLimits(decoder_seconds=START)}
    usual.update(options, changed=changed, ended=lambda end, _: observed.ends.append(end))
    loader = VideoLoader(settings(), store, budget, **usual)
    observed.__init__(loader, store, budget)  # type: ignore[misc]
    with contextlib.closing(loader):
        yield observed


def same(value: dict[str, Any], other: dict[str, Any]) -> bool:
    return value.keys() == other.keys() and all(np.array_equal(value[name], other[name]) for name in value)


# ── scenes: with a store of 8 MiB ────────────────────────────────────────────────────────────────────────────────────
async def tensors_are_made_in_the_store_and_found_there_the_next_time(scene: Scene, tmp_path: Path) -> None:
    assert scene.store is not None
    want = expected(video(), tmp_path)
    assert same(await scene.load(video()), want)
    assert same(await scene.load(video()), want)
    assert (scene.store.stats().puts, scene.ends) == (1, ["decoded"])


async def one_video_of_many_requests_is_decoded_once(scene: Scene, tmp_path: Path) -> None:
    want = expected(video(frames=21), tmp_path)
    values = await asyncio.gather(*(scene.load(video(frames=21), f"client {number}") for number in range(8)))
    assert all(same(value, want) for value in values) and scene.ends == ["decoded"]


async def many_videos_leave_neither_processes_nor_places_nor_descriptors(scene: Scene, tmp_path: Path) -> None:
    raws = [video(frames=8 + number, size=(32, 32)) for number in range(24)]
    for first in range(0, len(raws), 4):
        await asyncio.gather(*map(scene.load, raws[first : first + 4]))
    assert scene.ends == ["decoded"] * len(raws)
    await scene.must_hold_nothing()
    assert len(os.listdir(f"/proc/{scene.host}/fd")) < 24


async def a_video_that_the_model_has_no_tokens_for_is_refused_before_it_is_decoded(
    scene: Scene, tmp_path: Path
) -> None:
    scene.loader._max_tokens, most = 7, scene.loader._max_tokens
    with pytest.raises(MediaRefused, match="this model has at most 7 tokens, and the video takes 8") as caught:
        await scene.load(video(frames=31))
    scene.loader._max_tokens = most
    assert caught.value.status == 400 and scene.ends == ["refused"]


async def a_video_above_a_limit_is_refused_in_the_words_of_its_decoder(scene: Scene, tmp_path: Path) -> None:
    for raw, status, reason in (
        (video(frames=602, size=(32, 32), fps=1), 413, r"a video has at most 600 s, this one has \d+"),
        (video()[:400], 400, "expected a video as MP4, MOV, WebM or Matroska: Invalid data"),
        (repeated(40), 413, r"decoding the video takes \d+ bytes, and at most \d+ are held at a time"),
    ):
        held, scene.budget.decoded.nbytes = scene.budget.decoded.nbytes, 1000 if status == 413 else 128 * MIB
        with pytest.raises(MediaRefused, match=reason) as caught:
            await scene.load(raw)
        scene.budget.decoded.nbytes = held
        assert caught.value.status == status
    assert scene.ends == ["refused"] * 3


async def a_video_waits_for_the_bytes_that_others_hold(scene: Scene, tmp_path: Path) -> None:
    lease = await scene.budget.decoded.acquire("other", scene.budget.decoded.nbytes)
    loading = asyncio.ensure_future(scene.load(video(frames=20)))
    await scene.until(lambda: scene.budget.decoded.waiting == 1)
    lease.release()
    assert PIXELS in await loading


async def a_decoder_that_dies_ends_its_own_video_only(scene: Scene, tmp_path: Path) -> None:
    lease = await scene.budget.decoded.acquire("other", scene.budget.decoded.nbytes)
    videos = [asyncio.ensure_future(scene.load(video(frames=frames))) for frames in (10, 11)]
    await scene.until(lambda: scene.budget.decoded.waiting == 2)
    victim = scene.decoders()[0]
    os.kill(victim, signal.SIGKILL)
    await scene.until(lambda: victim not in scene.decoders())
    lease.release()
    results = await asyncio.gather(*videos, return_exceptions=True)
    refused = [result for result in results if isinstance(result, MediaRefused)]
    assert len(refused) == 1 and "the decoder of this video has crashed" in refused[0].reason
    assert sum(isinstance(result, dict) for result in results) == 1 and sorted(scene.ends) == ["decoded", "died"]


async def a_request_that_goes_kills_its_decoder_and_gives_its_bytes_back(scene: Scene, tmp_path: Path) -> None:
    loading = await scene.stopped(video(frames=12))
    await scene.until(lambda: scene.budget.decoded.held > 0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await scene.must_hold_nothing()
    assert scene.ends == ["cancelled"]


async def a_decoder_that_takes_too_long_is_killed_and_the_next_video_is_decoded(scene: Scene, tmp_path: Path) -> None:
    scene.loader._decoders._settings = msgspec.structs.replace(
        scene.loader._decoders._settings, limits=VideoLimits(decoder_seconds=0.5)
    )
    loading = await scene.stopped(video(frames=13))
    with pytest.raises(MediaRefused, match=r"at most 0\.5 s of a decoder, this one takes longer") as caught:
        await loading
    assert caught.value.status == 400 and scene.ends == ["timeout"]
    scene.loader._decoders._settings = msgspec.structs.replace(
        scene.loader._decoders._settings, limits=VideoLimits(decoder_seconds=START)
    )
    assert PIXELS in await scene.load(video(frames=13))


async def signals_that_all_processes_get_do_not_end_the_host(scene: Scene, tmp_path: Path) -> None:
    host = scene.host
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(host, number)
    await scene.load(video(frames=14))
    assert scene.host == host


async def a_host_that_dies_is_started_again(scene: Scene, tmp_path: Path) -> None:
    first = scene.host
    os.kill(first, signal.SIGKILL)
    assert PIXELS in await scene.load(video(frames=15))
    assert scene.host != first and scene.ends == ["decoded"]


WITH_A_STORE = (
    tensors_are_made_in_the_store_and_found_there_the_next_time,
    one_video_of_many_requests_is_decoded_once,
    many_videos_leave_neither_processes_nor_places_nor_descriptors,
    a_video_that_the_model_has_no_tokens_for_is_refused_before_it_is_decoded,
    a_video_above_a_limit_is_refused_in_the_words_of_its_decoder,
    a_video_waits_for_the_bytes_that_others_hold,
    a_decoder_that_dies_ends_its_own_video_only,
    a_request_that_goes_kills_its_decoder_and_gives_its_bytes_back,
    a_decoder_that_takes_too_long_is_killed_and_the_next_video_is_decoded,
    signals_that_all_processes_get_do_not_end_the_host,
    a_host_that_dies_is_started_again,
)


@pytest.mark.timeout(300)
@in_a_loop
async def test_on_one_host_with_a_store(tmp_path: Path) -> None:
    """All scenes, as a host takes seconds to start; the scene's name stands above a failure."""
    with Store(8 * MIB, max_peers=6) as store:
        async with scene(store) as observed:
            for item in WITH_A_STORE:
                print(item.__name__, flush=True)
                observed.ends.clear()
                await item(observed, tmp_path)
                await observed.must_hold_nothing()
            host = observed.host
        assert not Path(f"/proc/{host}").exists(), "it ends with its loader"


@in_a_loop
async def test_tensors_travel_inline_where_the_store_is_too_small(tmp_path: Path) -> None:
    with Store(64 << 10) as store:
        async with scene(store) as observed:
            with pytest.warns(RuntimeWarning, match="does not fit the store"):  # of the server's own, once
                assert same(await observed.load(video()), expected(video(), tmp_path))
            assert store.stats().puts == 0
            observed.loader._must_store = True
            with pytest.raises(MediaRefused, match=r"the store has \d+ bytes, the tensors of this video have") as no:
                await observed.load(video())
            assert no.value.status == 413
            await observed.must_hold_nothing()


@in_a_loop
async def test_host_that_cannot_start_refuses_videos_and_points_at_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_decoders, "MAIN", "raise SystemExit('no such package')")
    async with scene(None) as observed:
        with pytest.raises(MediaRefused, match="no video decoder can be started: the server's log says why") as no:
            await observed.load(video())
        assert no.value.status == 500 and observed.budget.decoded.held == 0 and observed.busy == (0, 0)


# ── files of memory ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_upload_is_sealed_and_its_key_is_that_of_its_bytes() -> None:
    with upload(b"abc" * 1000) as created, upload(b"abc" * 1000) as twin, upload(b"abd" * 1000) as other:
        assert created.key(b"salt") == twin.key(b"salt") != other.key(b"salt") and created.key(b"x") != created.key(
            b"salt"
        )
        with pytest.raises(OSError, match="not permitted"):
            created.write(b"more")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(created.fd, 1)
        with pytest.raises(PermissionError):
            mmap.mmap(created.fd, 3000)
    with upload(b"") as empty:
        assert empty.key(b"") and empty.container is None


@in_a_loop
async def test_an_upload_that_no_request_waits_for_any_more_is_closed() -> None:
    began, goes_on = threading.Event(), threading.Event()
    fds: list[int] = []

    def slowly() -> VideoUpload:
        began.set()
        assert goes_on.wait(START)
        created = upload(b"abc")
        fds.append(created.fd)
        return created

    async with scene(None) as observed:
        with Scope(None) as scope:
            loading = asyncio.ensure_future(observed.loader.load(slowly, scope, "a"))
            await observed.until(began.is_set)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
        goes_on.set()
        await observed.until(lambda: fds and not is_memory_file(fds[0]))


def is_memory_file(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:video")
    except FileNotFoundError:
        return False
