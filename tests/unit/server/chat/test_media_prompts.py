"""Videos in conversations, without a server: what a prompt becomes by them, what is refused, and what is held."""

import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("starlette")
pytest.importorskip("av")

from penstock import ClosedError, Scope
from penstock.engine.media.media_budget import ByteSemaphore, MediaBudget, MediaScope
from penstock.engine.media.video_file import VideoLimits
from penstock.engine.protocol.config import EngineConfig
from penstock.lowlevel import Pool
from penstock.server.chat import media_prompts
from penstock.server.chat.media_prompts import build_media_prompts
from penstock.server.chat.prompt_builder import PromptBuilder, build_tokenizer
from penstock.server.chat.request_schema import Conversation
from penstock.server.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ITEM_FIELDS, ProcessCounters
from tests.support.loops import in_a_loop
from tests.support.sights import Sight
from tests.support.videos import video
from tests.unit.engine.media.test_image_processor import picture
from tests.unit.engine.media.test_media_urls import data_url
from tests.unit.server.images.test_image_prompts import chat_request, part, scene_of, text

CLIP = {"type": "video_url", "video_url": {"url": data_url(video(frames=20), "video/mp4")}}
OTHER = {"type": "video_url", "video_url": {"url": data_url(video(frames=60), "video/mp4")}}
PIXELS = "pixel_values_videos"


@pytest.fixture(autouse=True)
def no_frames_are_left() -> Iterator[None]:
    """The traceback of a refusal holds its frames, and they hold the store, in a cycle."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Sight("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl")).path


async def refusal(model: Path, *parts: dict[str, Any], **options: Any) -> tuple[int, str | None, str]:
    """Returns status, field and message."""
    async with scene_of(model, **options) as scene:
        with pytest.raises(ApiError) as caught:
            await scene.prompt(*parts)
    return caught.value.status, caught.value.param, caught.value.message


@in_a_loop
async def test_media_placeholders_become_tokens_in_conversation_order(qwen: Path) -> None:
    async with scene_of(qwen) as scene:
        prompt = await scene.prompt(text("a"), CLIP, part(picture(16, 16)), OTHER, CLIP)
        values = [item.open(scene.store).value() for item, *_ in prompt.items]
        assert [PIXELS in value for value in values] == [True, False, True, True]
        for value, (_, position, length) in zip(values, prompt.items, strict=True):
            assert value["tokens"] == length and len(set(prompt.ids[position : position + length])) == 1
        assert values[0]["tokens"] == values[3]["tokens"] < values[2]["tokens"], "the other video is longer"
        stats = scene.store.stats()
        assert stats.puts == 3, "the same video twice is decoded once"
        del values, value
        prompt.release()
        await scene.must_hold_nothing()


@in_a_loop
async def test_videos_beyond_the_limit_are_refused_with_the_first_position(qwen: Path) -> None:
    status, field, message = await refusal(qwen, CLIP, text("a"), CLIP, OTHER, video_limits=VideoLimits(count=2))
    assert (status, field) == (400, "messages[0].content[3]")
    assert message == "a request has at most 2 videos, this one has 3"


@in_a_loop
async def test_a_model_that_takes_images_only_says_so(tmp_path: Path) -> None:
    status, field, message = await refusal(Sight("llava", tmp_path).path, text("a"), CLIP)
    assert (status, field) == (400, "messages[0].content[1]")
    assert message.endswith("got a video at $.messages[0].content[1]: this model takes none")


@in_a_loop
async def test_without_pyav_images_are_taken_and_videos_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(media_prompts.importlib.util, "find_spec", lambda name: None if name == "av" else find(name))
    status, field, message = await refusal(qwen, part(picture(16, 16)), CLIP)
    assert (status, field) == (400, "messages[0].content[1]")
    assert message.endswith("this server takes none, as its log says")
    async with scene_of(qwen) as scene:
        assert await scene.length(part(picture(16, 16))) > 4


@in_a_loop
async def test_tensors_that_travel_inline_count_until_their_request_ends(qwen: Path) -> None:
    config, budget = EngineConfig(model=str(qwen)), MediaBudget(256 << 20)
    media = build_media_prompts(config, ServerOptions(), None, budget=budget)
    with contextlib.closing(PromptBuilder(config, build_tokenizer(config), media)) as reader:
        conversation = Conversation.of(chat_request(part(picture(16, 16))).messages)
        prompt = await reader.conversation(conversation, True, {})
        ((item, *_),) = prompt.items
        assert item.is_inline and budget.decoded.held == item.nbytes
        prompt.release()
        assert budget.decoded.held == 0


@in_a_loop
async def test_media_of_more_tokens_than_the_model_takes_are_refused(qwen: Path) -> None:
    async with scene_of(qwen) as scene:
        media = scene.reader._media
        assert media is not None
        item = await scene.length(part(picture(16, 16)))
        media._max_tokens = item
        with pytest.raises(ApiError) as caught:
            await scene.prompt(*(part(picture(16, 16, seed=seed)) for seed in range(item + 1)))
        assert caught.value.status == 400 and "tokens" in caught.value.message


@in_a_loop
async def test_media_are_counted_by_how_they_travel(qwen: Path) -> None:
    config = EngineConfig(model=str(qwen))
    row = ProcessCounters(memoryview(bytearray(8 * ProcessCounters.total_words(1))).cast("Q"))
    media = build_media_prompts(config, ServerOptions(), None, row=row)
    with contextlib.closing(PromptBuilder(config, build_tokenizer(config), media)) as reader:
        conversation = Conversation.of(chat_request(part(picture(16, 16)), part(picture(16, 16, seed=1))).messages)
        prompt = await reader.conversation(conversation, True, {})
        counted = dict(zip(ITEM_FIELDS.values(), (row[row.ITEMS + at] for at in range(len(ITEM_FIELDS))), strict=True))
        assert counted["inline_without_store"] == 2
        prompt.release()


@in_a_loop
async def test_a_scope_that_was_released_gives_bytes_back_at_once() -> None:
    semaphore = ByteSemaphore(100)
    scope = MediaScope()
    scope.release()
    scope.hold(semaphore.take(60))
    assert semaphore.held == 0
    with Pool.create(4096) as pool:
        with pytest.raises(ClosedError):
            scope.add_leases(Scope().put(b"value"), [pool.take(10)])
        assert pool.stats().blocks == 0
