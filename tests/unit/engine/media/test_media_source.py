"""Where media come from: what is admitted by the budget before it is read, and what is read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.engine.media.media_budget import MediaBudget
from penstock.engine.media.media_kind import IMAGE, MATROSKA, MP4, VIDEO, MediaKind, MediaRef, MediaRefused
from penstock.engine.media.media_source import MediaSource
from tests.support.loops import in_a_loop
from tests.unit.engine.media.test_media_fetcher import Elsewhere, whole
from tests.unit.engine.media.test_media_urls import PNG, data_url

MOVIE = b"\0\0\0\x18ftypmp42" + bytes(range(256)) * 20
WEBM = b"\x1a\x45\xdf\xa3" + bytes(1000)
BUDGET = 1 << 20
FILES = BUDGET // 4


def ref(url: str, kind: MediaKind = VIDEO) -> MediaRef:
    return MediaRef("messages[0].content[0]", url, kind)


@contextlib.asynccontextmanager
async def source(
    folder: Path | None = None, host: str = "", budget: MediaBudget | None = None
) -> AsyncIterator[tuple[MediaSource, MediaBudget]]:
    budget = MediaBudget(BUDGET) if budget is None else budget
    media_source = MediaSource([str(folder)] if folder else [], [host] if host else [], budget)
    with contextlib.closing(media_source):
        yield media_source, budget
    assert (budget.files.held, budget.files.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("raw", "media_type", "container"),
    [(MOVIE, "video/mp4", MP4), (MOVIE, "video/quicktime", MP4), (WEBM, "video/webm", MATROSKA)],
)
@in_a_loop
async def test_a_video_in_a_data_url_is_uploaded_as_it_is(raw: bytes, media_type: str, container: str) -> None:
    async with source() as (media, budget):
        async with media.video(ref(data_url(raw, media_type)), 10_000, "a") as read:
            assert budget.files.held == 0, "the body holds its bytes"
            with await asyncio.to_thread(read) as upload:
                assert upload.nbytes == len(raw) and upload.container == container


@pytest.mark.parametrize(
    ("url", "status", "reason"),
    [
        (data_url(MOVIE, "video/mp4")[:5], 400, "expected data:video/mp4;base64,…"),
        (data_url(MOVIE, "video/x-msvideo"), 400, "expected a video of type video/mp4, .* got 'video/x-msvideo'"),
        (data_url(MOVIE, "image/png"), 400, "expected a video of type"),
        (data_url(WEBM, "video/mp4"), 400, "expected an MP4 or MOV video, as its URL says, got WebM or Matroska"),
        (data_url(b"#EXTM3U", "video/webm"), 400, "expected a WebM or Matroska video, .* got something else"),
        (data_url(MOVIE * 4, "video/mp4"), 413, "a video has at most 10000 bytes, this one has more"),
        ("data:video/mp4;base64,AAAA!AAA", 400, "the data of the URL is not base64"),
        ("https://example.org/a.mp4", 400, "videos are not fetched from other hosts: send this one as data:video/mp4"),
        ("file:///etc/passwd", 400, "files are not open to clients here"),
    ],
)
@in_a_loop
async def test_a_video_that_is_refused_says_why(url: str, status: int, reason: str) -> None:
    async with source() as (media, _):
        with pytest.raises(MediaRefused, match=reason) as caught:
            async with media.video(ref(url), 10_000, "a") as read:
                await asyncio.to_thread(read)
        assert caught.value.status == status


@in_a_loop
async def test_a_file_is_read_when_its_bytes_are_granted(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(MOVIE)
    (tmp_path / "a.png").write_bytes(PNG)
    async with source(tmp_path) as (media, budget):
        lease = await budget.files.acquire("other", FILES - len(MOVIE) + 1)

        async def load() -> int:
            async with media.video(ref(f"file://{tmp_path}/a.mp4"), 10_000, "a") as read:
                assert budget.files.held == len(MOVIE)
                with await asyncio.to_thread(read) as upload:
                    return upload.nbytes

        task = asyncio.ensure_future(load())
        while not budget.files.waiting:
            await asyncio.sleep(0.001)
        lease.release()
        assert await task == len(MOVIE)
        async with media.image(ref(f"file://{tmp_path}/a.png", IMAGE), 10_000, "a") as raw:
            assert budget.files.held == len(PNG) and callable(raw) and raw() == PNG
        with pytest.raises(MediaRefused, match=f"a video has at most 100 bytes, this one has {len(MOVIE)}"):
            async with media.video(ref(f"file://{tmp_path}/a.mp4"), 100, "a"):
                pass


def test_fetch_holds_its_maximum_until_the_host_states_a_length() -> None:
    with contextlib.closing(Elsewhere()) as host:
        host.script = whole(body=MOVIE)
        there = f"127.0.0.1:{host.port}"

        async def work() -> None:
            async with source(host=there) as (media, budget):
                observed: list[int] = []
                budget = media._budget
                budget.files._changed = lambda held, waiting: observed.append(held)
                async with media.video(ref(f"http://{there}/a.mp4"), 50_000, "a") as read:
                    assert budget.files.held == len(MOVIE)
                    with await asyncio.to_thread(read) as upload:
                        assert upload.nbytes == len(MOVIE)
                assert observed[0] == 50_000 and observed[-1] == 0

        asyncio.run(work())


def test_fetched_video_of_another_type_is_refused() -> None:
    with contextlib.closing(Elsewhere()) as host:
        host.script = whole(body=PNG)
        there = f"127.0.0.1:{host.port}"

        async def work() -> None:
            async with source(host=there) as (media, _):
                with pytest.raises(MediaRefused, match=r"expected a video of type video/mp4, .* from its host"):
                    async with media.video(ref(f"http://{there}/a.mp4"), 50_000, "a"):
                        pass
                with pytest.raises(MediaRefused, match="videos are not fetched from this host"):
                    async with media.video(ref("http://127.0.0.1:1/a.mp4"), 50_000, "a"):
                        pass

        asyncio.run(work())
