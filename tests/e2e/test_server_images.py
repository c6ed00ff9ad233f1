"""Images over the API: OpenAI's own client, against tiny models that see, and what transformers answers with these."""

import asyncio
import contextlib
import io
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")
pillow = pytest.importorskip("PIL.Image")

from penstock import Store  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.media.image_processor import ImageLimits  # noqa: E402
from tests.crash.test_engine_images import held  # noqa: E402
from tests.e2e.test_server import Served, run_server  # noqa: E402
from tests.support.engine import START  # noqa: E402
from tests.support.models import families  # noqa: E402
from tests.support.sights import Sight  # noqa: E402
from tests.unit.engine.media.test_encoded_image import scans_of_nothing  # noqa: E402
from tests.unit.engine.media.test_image_processor import picture  # noqa: E402
from tests.unit.engine.media.test_media_fetcher import Elsewhere, bare, whole  # noqa: E402
from tests.unit.server.images.test_image_prompts import named, part, plain, text  # noqa: E402

COUNT = 10
SIZES = {
    "num_gpu_blocks_override": 256,
    "max_model_len": 480,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 24,
    "dtype": "float32",
    "block_size": 4,
}
MAX_PIXELS = 40_000_000


class Seeing(Served):
    """A served model that sees, and what it is to answer."""

    sight: Sight
    elsewhere: Elsewhere  # a host that is open to clients

    @property
    def store(self) -> Store:
        store = self.launcher.cluster.store
        assert store is not None
        return store

    def body(self, *parts: dict[str, Any], **options: Any) -> dict[str, Any]:
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        usual = {"model": self.sight.path.name, "max_tokens": COUNT, "temperature": 0, "extra_body": extra}
        return {**usual, "messages": [{"role": "user", "content": list(parts)}], **options}

    async def chat(self, *parts: dict[str, Any], **options: Any) -> Any:
        return await self.client.chat.completions.create(**self.body(*parts, **options))

    def want(self, parts: list[dict[str, Any]], *raws: bytes) -> tuple[int, str]:
        return self.sight.answer([{"role": "user", "content": plain(parts)}], raws, COUNT)

    async def must_hold_nothing(self) -> None:
        await self.until(lambda: self.number(StatusBoard.OPEN) == 0)
        await self.until(lambda: not held(self.store))


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def a_conversation_with_images_is_answered_as_transformers_does(engine: Seeing) -> None:
    raws = [picture(50, 30), picture(20, 40, "JPEG", seed=1), picture(16, 16, seed=2)]
    first, second, third = part(raws[0]), part(raws[1], "image/jpeg"), part(raws[2])
    for parts, pictures in (
        ([text("what is it?"), first], raws[:1]),
        ([first, text("and this: "), second, third, text("?")], raws),
    ):
        length, expected = engine.want(parts, *pictures)
        whole = await engine.chat(*parts)
        assert whole.choices[0].message.content == expected
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (length, COUNT)
        events = await engine.chat(*parts, stream=True, stream_options={"include_usage": True})
        *events_before, last = [event async for event in events]
        assert "".join(event.choices[0].delta.content or "" for event in events_before) == expected
        assert last.usage.prompt_tokens == length
        samples = await engine.chat(*parts, n=2)
        assert [choice.message.content for choice in samples.choices] == [expected, expected]
        assert (samples.usage.prompt_tokens, samples.usage.completion_tokens) == (length, 2 * COUNT)
    body = {"messages": [{"role": "user", "content": parts}]}
    assert (await engine.client.post("/../tokenize", body=body, cast_to=object))["count"] == length


async def what_is_said_without_images_is_answered_too(engine: Seeing) -> None:
    _, expected = engine.want([text("hello")])
    for content in ("hello", [text("hello")]):
        messages = [{"role": "user", "content": content}]
        assert (await engine.chat(messages=messages)).choices[0].message.content == expected


async def the_server_does_without_torch(engine: Seeing) -> None:
    mapped = {kind: Path(f"/proc/{engine.child(kind).pid}/maps").read_text() for kind in ("server", "worker")}
    assert "libtorch" in mapped["worker"] and "libtorch" not in mapped["server"]


async def the_same_image_is_found_in_the_store(engine: Seeing) -> None:
    image = part(picture(33, 21, seed=9))
    _, expected = engine.want([image, text("a")], picture(33, 21, seed=9))
    before = engine.store.stats()
    assert (await engine.chat(image, text("a"))).choices[0].message.content == expected
    first = engine.store.stats()
    assert (await engine.chat(image, text("a"))).choices[0].message.content == expected
    await engine.chat(image, image, text("another"))
    last = engine.store.stats()
    assert (first.puts, first.hits) == (before.puts + 1, before.hits)
    assert last.puts == first.puts and last.hits > first.hits


async def metrics_say_how_images_travel(engine: Seeing) -> None:
    text = await engine.client.get("/../metrics", cast_to=str)
    numbers = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert numbers['penstock_items_total{how="hit",server="0"}'] > 0
    assert numbers['penstock_items_total{how="put",server="0"}'] == engine.store.stats().puts
    assert not any(number for name, number in numbers.items() if 'how="inline' in name)
    assert numbers['penstock_channel_records_total{channel="steps 0",end="receiver 0"}'] > 0
    assert numbers["penstock_store_hits_total"] == engine.store.stats().hits


async def images_of_any_format_are_seen_wherever_they_lie(engine: Seeing) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        raw = picture(24, 24, kind, seed=4)
        (engine.sight.path / "open" / f"one.{kind}").write_bytes(raw)
        parts = [text("a"), part(raw, f"image/{kind.lower()}")]
        _, expected = engine.want(parts, raw)
        there = named(f"file://{engine.sight.path}/open/one.{kind}")
        for image in (parts[1], there):
            assert (await engine.chat(text("a"), image)).choices[0].message.content == expected, kind


async def what_is_no_image_for_us_is_refused_with_its_place(engine: Seeing) -> None:
    good = part(picture())
    for image, status, words in (
        (named("http://127.0.0.1:1/x.png"), 400, "not fetched from this host"),
        (named("data:image/png;base64,iVBO!"), 400, "not base64"),
        (part(b"hello"), 400, "got something else"),
        (part(picture()[:-500]), 400, "expected an image as PNG"),
        (named(f"file://{engine.sight.path}/open/../config.json"), 400, "not beneath"),
        (named(f"file://{engine.sight.path}/open/one.txt"), 400, "expected an image as PNG"),
        (part(bytes(300_000)), 413, "at most 200000 bytes"),
        (part(scans_of_nothing(400), "image/jpeg"), 400, "2000 x 2000 has 400 scans, which are 1600000000"),
    ):
        with pytest.raises(openai.APIStatusError, match=words) as caught:
            await engine.chat(good, text("a"), image)
        error = caught.value
        assert (error.status_code, error.param) == (status, "messages[0].content[2]")
        assert error.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="at most 3 images") as caught:
        await engine.chat(*[good] * 4)
    assert caught.value.param == "messages[0].content[3]"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 480 tokens") as caught:
        await engine.chat(text("x" * 1000), good)
    assert caught.value.code == "context_length_exceeded"


async def a_client_that_goes_while_its_image_is_made_holds_nothing(engine: Seeing) -> None:
    raw = flat(5000)
    for stream in (True, False):
        total_before = await engine.total("penstock_requests_total", 'status="499"')
        body = engine.body(part(raw), stream=stream)
        _, writer = await engine.connect("/v1/chat/completions", body)
        while await engine.total("penstock_open_requests") < 1:
            await asyncio.sleep(0.01)
        writer.transport.abort()
        began = time.monotonic()
        while await engine.total("penstock_requests_total", 'status="499"') == total_before:
            await asyncio.sleep(0.005)
        print(f"gone after {(time.monotonic() - began) * 1e3:.0f} ms")
        assert engine.number(StatusBoard.OPEN) == 0, "it never came to the engine"


async def an_image_on_a_host_that_is_open_to_clients_is_seen(engine: Seeing) -> None:
    remote_picture = picture(36, 20, seed=13)
    engine.elsewhere.script = whole(body=remote_picture)
    there = named(f"http://127.0.0.1:{engine.elsewhere.port}/one.png")
    _, expected = engine.want([text("a"), part(remote_picture)], remote_picture)
    assert (await engine.chat(text("a"), there)).choices[0].message.content == expected
    engine.elsewhere.script = whole("404 Not Found")
    with pytest.raises(
        openai.BadRequestError, match=r"could not be fetched from its host: its status is 404"
    ) as caught:
        await engine.chat(text("a"), there)
    assert caught.value.param == "messages[0].content[1]"


async def a_client_that_goes_takes_its_fetch_with_it(engine: Seeing) -> None:
    engine.elsewhere.script = bare(until_gone=True)
    there = named(f"http://127.0.0.1:{engine.elsewhere.port}/one.png")
    _, writer = await engine.connect("/v1/chat/completions", engine.body(there, there))
    await asyncio.to_thread(engine.elsewhere.until, 2)
    writer.transport.abort()
    await asyncio.to_thread(engine.elsewhere.until, 0)
    assert await engine.total("penstock_open_requests") == 0


def flat(edge: int) -> bytes:
    """Few bytes that take long to decode."""
    raw = io.BytesIO()
    pillow.new("RGB", (edge, edge), "red").save(raw, "PNG")
    return raw.getvalue()


async def a_server_that_dies_holds_no_image_and_the_next_one_finds_it(engine: Seeing) -> None:
    image = part(picture(40, 40, seed=11))
    _, expected = engine.want([image], picture(40, 40, seed=11))
    stream = await engine.chat(image, stream=True, max_tokens=400)
    await anext(aiter(stream))
    puts = engine.store.stats().puts
    assert held(engine.store)
    dead = engine.child("server").pid
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    await engine.until(lambda: not held(engine.store))
    await engine.until(lambda: dead not in {child.pid for child in engine.children()}, START)
    assert (await engine.chat(image, timeout=START)).choices[0].message.content == expected
    assert engine.store.stats().puts == puts


SCENES = (
    a_conversation_with_images_is_answered_as_transformers_does,
    what_is_said_without_images_is_answered_too,
    the_server_does_without_torch,
    the_same_image_is_found_in_the_store,
    metrics_say_how_images_travel,
    images_of_any_format_are_seen_wherever_they_lie,
    what_is_no_image_for_us_is_refused_with_its_place,
    an_image_on_a_host_that_is_open_to_clients_is_seen,
    a_client_that_goes_takes_its_fetch_with_it,
    a_client_that_goes_while_its_image_is_made_holds_nothing,
    a_server_that_dies_holds_no_image_and_the_next_one_finds_it,
)


def play(
    cls: type[Seeing], name: str, path: Path, server_options: dict[str, Any], scenes: Sequence[Any], **options: Any
) -> None:
    """Plays all scenes on one server, as a start takes seconds; the name of a scene stands above its failure."""
    sight = Sight(name, path)
    (path / "open").mkdir()
    (path / "open" / "one.txt").write_text("not an image")

    async def all_scenes(elsewhere: Elsewhere) -> None:
        hosts = {"allowed_media_domains": (f"127.0.0.1:{elsewhere.port}",)}
        server = {**server_options, **hosts, "allowed_local_media_path": (f"{path}/open",)}
        usual = {"simulated": None, "model": str(path), "api_server_count": 1, "store_nbytes": 16 << 20}
        async with run_server(server, 3 * START, **usual, **options, **SIZES) as served:
            served.__class__ = cls
            served.sight, served.elsewhere = sight, elsewhere
            for scene in scenes:
                print(scene.__name__, flush=True)
                await asyncio.wait_for(scene(served), 120)
                await served.must_hold_nothing()

    with contextlib.closing(Elsewhere()) as elsewhere:
        asyncio.run(all_scenes(elsewhere))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", families("llava", "qwen2_vl", "idefics3"))
def test_images_are_seen_refused_and_forgotten(name: str, tmp_path: Path) -> None:
    limits = ImageLimits(count=3, nbytes=200_000, pixels=MAX_PIXELS)
    server_options = {"image_limits": limits, "max_body_nbytes": 2_000_000}
    transport = "store" if name == "llava" else "auto"
    play(Seeing, name, tmp_path, server_options, SCENES if name == "llava" else SCENES[:6], tensor_transport=transport)
