"""Videos over the API: OpenAI's own client, against tiny models that take them; and what hostile clients send."""

import asyncio
import base64
import os
import signal
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")
pytest.importorskip("av")

from penstock.engine.media.video_file import VideoLimits  # noqa: E402
from tests.e2e.test_server_images import Seeing, play  # noqa: E402
from tests.support.engine import START  # noqa: E402
from tests.support.videos import repeated, video  # noqa: E402
from tests.tiers import needs_all  # noqa: E402
from tests.unit.engine.media.test_image_processor import picture  # noqa: E402
from tests.unit.engine.media.test_media_fetcher import whole  # noqa: E402
from tests.unit.server.images.test_image_prompts import part, text  # noqa: E402

LIMITS = VideoLimits(count=2, nbytes=2_000_000, pixels=640 * 480, seconds=200.0, decoder_seconds=2.0)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
ENDLESS = 1200  # repetitions of 30 frames, in 1.8 MB: they take a decoder many times its seconds


def clip(raw: bytes, media_type: str = "video/mp4") -> dict[str, Any]:
    return clip_at(f"data:{media_type};base64,{base64.b64encode(raw).decode()}")


def clip_at(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


class Watching(Seeing):
    """A served model that takes videos."""

    async def answer_to(self, *parts: dict[str, Any], **options: Any) -> str:
        answer: str = (await self.chat(*parts, **options)).choices[0].message.content
        return answer

    def decoders(self) -> list[int]:
        """The processes of all videos, and the hosts that fork them."""
        return [pid for child in self.children() if child.member.kind == "server" for pid in descendants(child.pid)]

    async def must_hold_nothing(self) -> None:
        await super().must_hold_nothing()
        for name in ("penstock_media_bytes", "penstock_media_waiting", "penstock_videos_decoding"):
            while await self.total(name):
                await asyncio.sleep(0.01)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(deeper for child in children for deeper in descendants(child))]


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def a_video_is_answered_and_the_same_one_is_not_decoded_again(engine: Watching) -> None:
    raw = video(frames=20)
    before = engine.store.stats()
    first = await engine.chat(text("what"), clip(raw))
    assert engine.store.stats().puts == before.puts + 1
    again = await engine.chat(text("what"), clip(raw))
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens == first.usage.prompt_tokens > 8
    assert engine.store.stats().puts == before.puts + 1
    assert await engine.total("penstock_videos_total", 'end="decoded"') == 1
    assert await engine.total("penstock_items_total", 'how="put"') == engine.store.stats().puts
    other = await engine.chat(text("what"), clip(video(frames=60)))
    assert other.usage.prompt_tokens > first.usage.prompt_tokens, "it is longer"


async def the_server_does_without_torch(engine: Watching) -> None:
    maps = Path(f"/proc/{engine.child('server').pid}/maps").read_text()
    assert "libtorch" not in maps and "libavcodec" not in maps


async def a_video_is_the_same_wherever_it_lies_and_in_a_stream(engine: Watching) -> None:
    raw = video(frames=24)
    expected = await engine.answer_to(clip(raw), text("a"))
    (engine.sight.path / "open" / "a.mp4").write_bytes(raw)
    engine.elsewhere.script = whole(body=raw)
    puts = engine.store.stats().puts
    for url in (f"file://{engine.sight.path}/open/a.mp4", f"http://127.0.0.1:{engine.elsewhere.port}/a.mp4"):
        assert await engine.answer_to(clip_at(url), text("a")) == expected
    stream = await engine.chat(clip(raw), text("a"), stream=True)
    assert "".join([event.choices[0].delta.content or "" async for event in stream]) == expected
    assert engine.store.stats().puts == puts


async def images_and_videos_stand_in_one_conversation(engine: Watching) -> None:
    image, first, other = part(picture(16, 16)), clip(video(frames=20)), clip(video(frames=16))
    answer = await engine.chat(first, text("then"), image, text("then"), other)
    alone = [(await engine.chat(text("then"), each)).usage.prompt_tokens for each in (first, image, other)]
    assert max(alone) < answer.usage.prompt_tokens < sum(alone)


async def what_is_no_video_for_us_is_refused_with_its_place(engine: Watching) -> None:
    good = clip(video(frames=20))
    for bad, status, words in (
        (clip_at("http://127.0.0.1:1/a.mp4"), 400, "videos are not fetched from this host"),
        (clip_at("file:///etc/passwd"), 400, "not beneath a folder"),
        (clip(b"#EXTM3U\nfile:///etc/passwd"), 400, "expected an MP4 or MOV video"),
        (clip(video()[:1000]), 400, "expected a video as MP4, MOV, WebM or Matroska"),
        (clip(video(), "video/x-msvideo"), 400, "expected a video of type"),
        (clip(bytes(2_100_000)), 413, "a video has at most 2000000 bytes"),
        (clip(video(frames=4, size=(960, 640))), 413, "at most 307200 pixels, this one has 960 x 640"),
        (clip(video(frames=12, fps=1, size=(64, 48))), 200, ""),
        (clip(video(frames=400, fps=1, size=(16, 16))), 413, "a video has at most 200 s, this one has"),
    ):
        if status == 200:
            await engine.chat(good, text("a"), bad)
            continue
        with pytest.raises(openai.APIStatusError, match=words) as caught:
            await engine.chat(good, text("a"), bad)
        assert (caught.value.status_code, caught.value.param) == (status, "messages[0].content[2]")
    with pytest.raises(openai.BadRequestError, match="a request has at most 2 videos, this one has 3") as caught:
        await engine.chat(good, good, good)
    assert caught.value.param == "messages[0].content[2]"


async def a_video_without_end_ends_with_its_own_request(engine: Watching) -> None:
    small = clip(video(frames=20))
    expected = await engine.answer_to(small)
    hostile = asyncio.ensure_future(engine.chat(clip(repeated(ENDLESS), "video/webm")))
    others = [await engine.answer_to(small) for _ in range(5)]
    with pytest.raises(openai.BadRequestError, match="at most 2 s of a decoder, this one takes longer"):
        await hostile
    assert others == [expected] * 5
    assert await engine.total("penstock_videos_total", 'end="timeout"') == 1


async def a_client_that_goes_takes_its_decoder_with_it(engine: Watching) -> None:
    content = [clip(repeated(ENDLESS - 1), "video/webm")]
    body = {"model": engine.sight.path.name, "messages": [{"role": "user", "content": content}]}
    before = await engine.total("penstock_videos_total", 'end="cancelled"')
    _, writer = await engine.connect("/v1/chat/completions", body)
    while not await engine.total("penstock_videos_decoding"):
        await asyncio.sleep(0.01)
    writer.transport.abort()
    while await engine.total("penstock_videos_total", 'end="cancelled"') == before:
        await asyncio.sleep(0.01)


async def a_server_that_dies_takes_its_decoders_with_it(engine: Watching) -> None:
    raw = video(frames=28)
    expected = await engine.answer_to(clip(raw))
    puts = engine.store.stats().puts
    hosts, dead = engine.decoders(), engine.child("server").pid
    assert hosts
    os.kill(dead, signal.SIGKILL)
    await engine.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in hosts))
    await engine.until(lambda: dead not in {child.pid for child in engine.children()}, START)
    assert await engine.answer_to(clip(raw), timeout=START) == expected
    assert engine.store.stats().puts == puts


SCENES = (
    a_video_is_answered_and_the_same_one_is_not_decoded_again,
    the_server_does_without_torch,
    a_video_is_the_same_wherever_it_lies_and_in_a_stream,
    images_and_videos_stand_in_one_conversation,
    what_is_no_video_for_us_is_refused_with_its_place,
    a_video_without_end_ends_with_its_own_request,
    a_client_that_goes_takes_its_decoder_with_it,
    a_server_that_dies_takes_its_decoders_with_it,
)


@needs_all  # the decoders by themselves are tested before a push, too
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAMILIES)
def test_videos_are_watched_refused_and_forgotten(name: str, tmp_path: Path) -> None:
    server_options = {"video_limits": LIMITS, "media_nbytes_in_flight": 256 << 20, "max_body_nbytes": 6_000_000}
    play(Watching, name, tmp_path, server_options, SCENES if name == "qwen2_vl" else SCENES[:4])
