"""Images in conversations, without a server: what a prompt becomes by them, what is refused, and what is held."""

import asyncio
import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("starlette")
pillow = pytest.importorskip("PIL.Image")

from penstock import Store  # noqa: E402
from penstock.engine.media import image_processor  # noqa: E402
from penstock.engine.media.image_processor import ImageLimits  # noqa: E402
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice  # noqa: E402
from penstock.server.chat.media_prompts import Prompt, build_media_prompts  # noqa: E402
from penstock.server.chat.prompt_builder import NumberTokenizer, PromptBuilder, build_tokenizer  # noqa: E402
from penstock.server.chat.request_schema import ChatRequest, Conversation, decoded  # noqa: E402
from penstock.server.errors import ApiError  # noqa: E402
from penstock.server.options import ServerOptions  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import VISION  # noqa: E402
from tests.support.sights import Sight, placeholder  # noqa: E402
from tests.unit.engine.media.test_image_processor import picture, png_of  # noqa: E402
from tests.unit.engine.media.test_media_fetcher import Elsewhere, bare  # noqa: E402
from tests.unit.engine.test_images_of_requests import must_be_held_by_nobody  # noqa: E402

WHERE = "messages[0].content[{}]"


def part(raw: bytes, kind: str = "image/png") -> dict[str, Any]:
    return named(f"data:{kind};base64,{base64.b64encode(raw).decode()}")


def named(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(output: str) -> dict[str, Any]:
    return {"type": "text", "text": output}


def plain(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "image"} if part["type"] == "image_url" else part for part in parts]


class Scene:
    """A reader for a model in a folder, and its store."""

    def __init__(self, model: Path, store: Store, **options: Any) -> None:
        config = EngineConfig(model=str(model))
        images = build_media_prompts(config, ServerOptions(**options), store)
        assert images is not None
        self.store = store
        self.reader = PromptBuilder(config, build_tokenizer(config), images)

    async def prompt(self, *parts: dict[str, Any]) -> Prompt:
        output = Conversation.of(chat_request(*parts).messages)
        return await self.reader.conversation(output, True, {})

    async def length(self, *parts: dict[str, Any]) -> int:
        """Of a prompt that is made and given back."""
        prompt = await self.prompt(*parts)
        prompt.release()
        return len(prompt.ids)

    async def must_hold_nothing(self) -> None:
        deadline = time.monotonic() + 10
        while any(item.holders for item in self.store.stats().items) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # a thread is at its last image
        must_be_held_by_nobody(self.store)


def chat_request(*parts: dict[str, Any]) -> ChatRequest:
    return decoded(json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode(), ChatRequest)


@contextlib.asynccontextmanager
async def scene_of(model: Path, **options: Any) -> AsyncIterator[Scene]:
    with Store(8 << 20) as store:
        scene = Scene(model, store, **options)
        with contextlib.closing(scene.reader):
            yield scene
        await scene.must_hold_nothing()


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Sight("llava", tmp_path_factory.mktemp("llava")).path


# ── what a prompt becomes ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", VISION)
@in_a_loop
async def test_placeholders_become_what_transformers_writes_for_these_images(name: str, tmp_path: Path) -> None:
    sight = Sight(name, tmp_path)
    raws = [picture(50, 30), picture(20, 64, seed=1), picture(16, 16, seed=2)]
    parts = [text("first "), part(raws[0]), part(raws[1]), text("then\n"), part(raws[2]), text("what?")]
    expected = sight.inputs([{"role": "user", "content": plain(parts)}], raws)["input_ids"][0].tolist()
    async with scene_of(tmp_path) as scene:
        prompt = await scene.prompt(*parts)
        assert prompt.ids == expected
        for raw, (item, position, length) in zip(raws, prompt.items, strict=True):
            there = prompt.ids[position : position + length].count(sight.stock.config.image_token_id)
            value = item.open(scene.store).value("torch", writable=True)
            (alone,) = [sight.inputs([{"role": "user", "content": [{"type": "image"}]}], [raw])["pixel_values"]]
            assert torch.equal(value["pixel_values"], alone) and value["tokens"] == there
        prompt.release()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
@in_a_loop
async def test_of_images_in_any_format_the_first_frame_counts(
    kind: str, llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [pillow.new("RGB", (30, 30), color) for color in ("red", "blue", "green")]
    raw = io.BytesIO()
    more = {"save_all": True, "append_images": frames[1:]} if kind in ("webp", "gif") else {}
    frames[0].save(raw, kind, **more)
    (tmp_path / "an image").write_bytes(raw.getvalue())
    observed = []
    decode = image_processor.decode_image
    monkeypatch.setattr(image_processor, "decode_image", lambda *args: observed.append(decode(*args)) or observed[-1])
    async with scene_of(llava, allowed_local_media_path=(str(tmp_path),)) as scene:
        lengths = {await scene.length(part(raw.getvalue(), f"image/{kind}"))}
        lengths.add(await scene.length(named(f"file://{tmp_path}/an%20image")))
        assert len(lengths) == 1
        (picture,) = observed  # by whichever way it came, it is the same one
        assert picture.mode == "RGB" and picture.getpixel((15, 15))[0] > 250 and max(picture.getpixel((15, 15))[1:]) < 5


@in_a_loop
async def test_refused_image_ends_the_other_fetches_of_its_request(llava: Path) -> None:
    with contextlib.closing(Elsewhere()) as host:
        host.script = bare(until_gone=True)
        there = named(f"http://127.0.0.1:{host.port}/x.png")
        async with scene_of(llava, allowed_media_domains=(f"127.0.0.1:{host.port}",)) as scene:
            with pytest.raises(ApiError, match="not fetched from this host") as caught:
                await scene.prompt(there, named("http://127.0.0.1/x.png"), there)
            assert (caught.value.status, caught.value.param) == (400, WHERE.format(1))
            await asyncio.to_thread(host.until, 0)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
def gif_of(width: int, height: int, left: int = 0) -> bytes:
    """Its heads, of the whole and of one frame in it, which promise more than there is."""

    def word(number: int) -> bytes:
        return number.to_bytes(2, "little")

    frame = b"\x2c" + word(left) + word(0) + word(10) + word(10) + b"\0\x02\x02\x4c\x01\0"
    return b"GIF89a" + word(width) + word(height) + b"\x80\0\0" + bytes(6) + frame + b"\x3b"


LIMITS = ImageLimits(count=2, nbytes=20_000, pixels=2500)
SMALL = part(picture(20, 20))


@pytest.mark.parametrize(
    ("parts", "status", "wrong", "reason"),
    [
        ([SMALL, SMALL, SMALL], 400, 2, "at most 2 images, this one has 3"),
        ([text("x"), SMALL, part(bytes(20_100))], 413, 2, "at most 20000 bytes"),
        ([SMALL, part(picture(60, 60))], 413, 1, r"at most 2500 pixels, this one has 60 x 60 = 3600"),
        ([part(png_of(10_000, 10_000))], 413, 0, "at most 2500 pixels, this one has 10000 x 10000"),
        ([part(png_of(60_000, 60_000))], 413, 0, "at most 2500 pixels"),
        ([part(gif_of(60_000, 60_000), "image/gif")], 413, 0, "at most 2500 pixels"),
        ([part(gif_of(10, 10, left=9000), "image/gif")], 413, 0, "at most 2500 pixels"),
        ([part(picture(20, 20)[:-300])], 400, 0, "expected an image as PNG"),
        ([part(picture(20, 20)[:30])], 400, 0, "expected an image as PNG"),
        ([part(picture(20, 20)), part(b"<svg/>", "image/png")], 400, 1, "got something else"),
        ([named("data:image/png;base64,iVBO!")], 400, 0, "not base64"),
        ([named("https://example.com/x.png"), SMALL], 400, 0, "not fetched from other hosts"),
        ([named("file:///etc/passwd")], 400, 0, "files are not open"),
    ],
)
@in_a_loop
async def test_an_image_that_is_refused_is_named(
    parts: list[dict[str, Any]], status: int, wrong: int, reason: str, llava: Path
) -> None:
    async with scene_of(llava, image_limits=LIMITS) as scene:
        with pytest.raises(ApiError, match=reason) as caught:
            await scene.prompt(*parts)
        assert (caught.value.status, caught.value.param) == (status, WHERE.format(wrong))
        await scene.must_hold_nothing()
        assert await scene.length(SMALL) > 4, "the next one is taken"


@in_a_loop
async def test_placeholder_in_a_text_is_refused(llava: Path) -> None:
    async with scene_of(llava) as scene:
        with pytest.raises(ApiError, match="<image> in the prompt once for each of 1 images, got 2") as caught:
            await scene.prompt(text(f"look: {placeholder('llava')}"), SMALL)
        assert (caught.value.status, caught.value.param) == (400, "messages")


@in_a_loop
async def test_a_model_that_takes_no_images_says_so() -> None:
    config = EngineConfig(simulated=SimulatedDevice(vocabulary=200))
    assert build_media_prompts(config, ServerOptions(), None) is None
    with contextlib.closing(PromptBuilder(config, NumberTokenizer(200))) as reader:
        output = Conversation.of(chat_request(text("a"), SMALL).messages)
        with pytest.raises(ApiError, match=r"expected text, got an image .*: this model takes none") as caught:
            await reader.conversation(output, True, {})
        assert (caught.value.status, caught.value.param) == (400, WHERE.format(1))
        words = Conversation.of(chat_request(text("a"), text("b")).messages)
        assert (await reader.conversation(words, True, {})).ids == list(b"user: a\nb\nassistant:")


@pytest.mark.parametrize("missing", ["preprocessor_config.json", "tokenizer.json"])
def test_a_model_that_lacks_what_images_take_answers_text(missing: str, tmp_path: Path) -> None:
    sight = Sight("llava", tmp_path)
    (tmp_path / missing).unlink()
    assert build_media_prompts(EngineConfig(model=str(sight.path)), ServerOptions(), None) is None


# ── the loop, and what is held ───────────────────────────────────────────────────────────────────────────────────────
class Slowly:
    """Images are decoded when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()
        self._decode: Callable[..., Any] = image_processor.decode_image
        monkeypatch.setattr(image_processor, "decode_image", self)

    def __call__(self, *args: Any) -> Any:
        self.has_begun.set()
        assert self.goes_on.wait(10), "the loop was held up"
        return self._decode(*args)


@in_a_loop
async def test_the_loop_goes_on_while_an_image_is_made(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly = Slowly(monkeypatch)
    async with scene_of(llava) as scene:
        asyncio.get_running_loop().call_later(0.01, slowly.goes_on.set)
        assert await scene.length(SMALL) > 4


@in_a_loop
async def test_request_cancelled_while_an_image_is_processed_holds_nothing(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = Slowly(monkeypatch)
    async with scene_of(llava) as scene:
        asking = asyncio.ensure_future(scene.prompt(SMALL, part(picture(30, 30)), part(picture(31, 31))))
        while not slowly.has_begun.is_set():
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not any(item.holders for item in scene.store.stats().items)
        slowly.goes_on.set()
        await scene.must_hold_nothing()
