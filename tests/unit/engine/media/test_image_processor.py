"""Images as users send them: what becomes of them, what is not done twice, and what is refused."""

import asyncio
import io
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")
transformers = pytest.importorskip("transformers")
pillow = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'penstock[engine]'")

from penstock import ClosedError, Store  # noqa: E402
from penstock.engine.media import image_processor  # noqa: E402
from penstock.engine.media.encoded_image import EncodedImage  # noqa: E402
from penstock.engine.media.image_processor import ImageLimits, ImageProcessor, MediaRefused  # noqa: E402
from penstock.tensor import Scope  # noqa: E402
from tests.support.models import VISION, stock_of  # noqa: E402
from tests.unit.engine.media.test_encoded_image import scans_of_nothing  # noqa: E402

TILES: dict[str, Any] = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
PATCHES: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}),
    "qwen2_vl": ("Qwen2VLImageProcessorPil", PATCHES),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", PATCHES),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", PATCHES),
    "idefics3": ("Idefics3ImageProcessorPil", TILES),
    "smolvlm": ("SmolVLMImageProcessorPil", TILES),
}


def picture(width: int = 50, height: int = 30, kind: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, len(mode)), np.uint8)
    raw = io.BytesIO()
    pillow.fromarray(noise.squeeze(), mode=None).convert(mode).save(raw, kind)
    return raw.getvalue()


def processor_in(path: Path, name: str, **options: Any) -> None:
    kind, usual = PROCESSORS[name]
    getattr(transformers, kind)(**{**usual, **options}).save_pretrained(path)


def model_in(path: Path, name: str = "llava") -> Path:
    stock = stock_of(name)
    stock.config.save_pretrained(path)
    processor_in(path, name)
    return path


def load(loader: ImageProcessor, scope: Any, *raws: bytes) -> list[image_processor.ProcessedImage]:
    async def all_of_them() -> list[image_processor.ProcessedImage]:
        return await asyncio.gather(*(loader.load(raw, scope) for raw in raws))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_image_becomes_tensors_of_the_model_with_its_number_of_tokens(name: str, kind: str, tmp_path: Path) -> None:
    model_in(tmp_path, name)
    stock = stock_of(name)
    with ImageProcessor(tmp_path, None, threads=2) as loader, Scope() as scope:
        for loaded in load(loader, scope, picture(kind=kind), picture(20, 64, kind), picture(16, 16, kind)):
            value = loaded.item.open().value("torch", writable=True)
            tensors = {name: value for name, value in value.items() if isinstance(value, torch.Tensor)}
            with torch.inference_mode():
                features = stock.get_image_features(**tensors, return_dict=True).pooler_output
            assert loaded.tokens == sum(features_of_image.flatten(0, -2).shape[0] for features_of_image in features)
            tiles = loaded.rows * loaded.columns
            assert tensors["pixel_values"].shape[1] == tiles + 1 if "defics" in name or "smol" in name else not tiles


def test_grey_and_translucent_images_are_images_too(tmp_path: Path) -> None:
    with ImageProcessor(model_in(tmp_path), None, threads=1) as loader, Scope() as scope:
        assert {image.tokens for image in load(loader, scope, picture(mode="L"), picture(mode="RGBA"))} == {4}


def test_known_image_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_in(tmp_path, "idefics3")
    with Store(8 << 20) as store:
        with ImageProcessor(tmp_path, store, threads=2) as loader:
            with Scope(store, inline_nbytes=0) as scope:
                first, same, other = load(loader, scope, picture(), picture(), picture(seed=1))
                assert first == same and first.item.key != other.item.key
            with monkeypatch.context() as patched, Scope(store, inline_nbytes=0) as scope:
                patched.setattr(image_processor, "decode_image", None)
                assert load(loader, scope, picture()) == [first]
                assert store.stats().puts == 2
            assert not any(item.holders for item in store.stats().items)


def test_key_of_an_image_covers_settings_and_salt(tmp_path: Path) -> None:

    def key(**options: Any) -> bytes | None:
        with ImageProcessor(tmp_path, None, threads=1, **options) as loader, Scope() as scope:
            return load(loader, scope, picture())[0].item.key

    model_in(tmp_path)
    first = key()
    assert key() == first and key(salt=b"another") != first
    processor_in(tmp_path, "llava", do_normalize=False)
    assert key() != first


def png_of(width: int, height: int) -> bytes:
    """Its head, which promises more than there is."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IEND"
    chunks = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (head, end)
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("raws", "status", "reason"),
    [
        ([picture(50, 50)], 413, r"at most 2000 pixels, this one has 50 x 50 = 2500"),
        ([png_of(30_000, 30_000)], 413, r"at most 2000 pixels"),
        ([png_of(10_000, 10_000)], 413, r"at most 2000 pixels, this one has 10000 x 10000 = 100000000"),
        ([bytes(10_001)], 413, r"at most 10000 bytes, this one has 10001"),
        ([b""], 400, r"expected an image as PNG, JPEG, WEBP, GIF"),
        ([b"GIF89a" + bytes(100)], 400, r"expected an image as PNG"),
        ([picture(20, 20)[:-300]], 400, r"expected an image as PNG"),
        ([picture(), b"nonsense"], 400, r"expected an image as PNG"),
    ],
    ids=["pixels", "bomb", "warned of", "bytes", "empty", "gif", "cut off", "one of two"],
)
def test_oversized_or_invalid_image_is_refused(raws: list[bytes], status: int, reason: str, tmp_path: Path) -> None:
    limits = ImageLimits(nbytes=10_000, pixels=2000)
    with ImageProcessor(model_in(tmp_path), None, limits=limits, threads=1) as loader, Scope() as scope:
        with pytest.raises(MediaRefused, match=reason) as caught:
            load(loader, scope, *raws)
        assert caught.value.status == status
        assert load(loader, scope, picture())[0].tokens == 4


def test_image_that_the_model_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_processor, "MAX_RATIO", 1000)
    with ImageProcessor(model_in(tmp_path, "qwen2_vl"), None, threads=1) as loader, Scope() as scope:
        with pytest.raises(MediaRefused, match="takes no image of 1000 x 2: absolute aspect ratio"):
            load(loader, scope, picture(1000, 2))


@pytest.mark.parametrize("name", VISION)
def test_thin_image_is_refused_before_its_short_side_is_enlarged(name: str, tmp_path: Path) -> None:
    with ImageProcessor(model_in(tmp_path, name), None, threads=1) as loader, Scope() as scope:
        for width, height in ((20_000, 2), (2, 20_000)):
            with pytest.raises(MediaRefused, match=f"at most 100 times as long .* this one is {width} x {height}"):
                load(loader, scope, picture(width, height))
        assert load(loader, scope, picture(200, 2))


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, limits = model_in(tmp_path), ImageLimits(pixels=200 * 200)
    with ImageProcessor(model, None, threads=1, limits=limits) as loader, Scope() as scope:
        assert load(loader, scope, scans_of_nothing(32, side=200))
        monkeypatch.setattr(image_processor, "decode_image", None)
        expected = "at most 1280000 pixels, this one of 200 x 200 has 33 scans, which are 1320000"
        with pytest.raises(MediaRefused, match=expected) as caught:
            load(loader, scope, scans_of_nothing(33, side=200))
        assert caught.value.status == 400


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_a_progressive_jpeg_of_as_many_pixels_as_are_allowed_is_taken(mode: str, tmp_path: Path) -> None:
    raw, limits = io.BytesIO(), ImageLimits(pixels=200 * 200)
    pillow.new(mode, (200, 200)).save(raw, "JPEG", progressive=True)
    with ImageProcessor(model_in(tmp_path), None, threads=1, limits=limits) as loader, Scope() as scope:
        assert load(loader, scope, raw.getvalue())[0].tokens == 4


def test_a_small_image_does_not_wait_for_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, has_begun, goes_on = image_processor.decode_image, threading.Event(), threading.Event()

    def slowly(encoded: Any) -> Any:
        if encoded.work > image_processor.LARGE_PIXELS:
            has_begun.set()
            assert goes_on.wait(10), "the small one was not loaded meanwhile"
        return decode(encoded)

    monkeypatch.setattr(image_processor, "decode_image", slowly)
    monkeypatch.setattr(image_processor, "LARGE_PIXELS", 10_000)

    async def run(loader: ImageProcessor) -> None:
        with Scope() as first, Scope() as second:
            large = [asyncio.ensure_future(loader.load(picture(200, 200, seed=seed), first)) for seed in range(3)]
            await asyncio.to_thread(has_begun.wait, 10)
            assert (await loader.load(picture(), second)).tokens == 4
            large[1].cancel()  # its client has gone
            goes_on.set()
            done = await asyncio.gather(*large, return_exceptions=True)
            assert [isinstance(result, image_processor.ProcessedImage) for result in done] == [True, False, True]

    with ImageProcessor(model_in(tmp_path), None, threads=1) as loader:
        asyncio.run(run(loader))


def test_a_large_image_that_was_made_while_it_waited_is_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, decode = [], image_processor.decode_image
    monkeypatch.setattr(image_processor, "decode_image", lambda encoded: decoded.append(1) or decode(encoded))
    monkeypatch.setattr(image_processor, "LARGE_PIXELS", 1000)
    with Store(1 << 20) as store:
        with ImageProcessor(model_in(tmp_path), store, threads=1) as loader, Scope(store, inline_nbytes=0) as scope:
            assert len(set(load(loader, scope, *[picture()] * 16))) == 1
    assert len(decoded) == 1


def test_an_image_that_is_made_a_square_is_as_large_as_that(tmp_path: Path) -> None:
    processor_in(model_in(tmp_path), "llava", do_pad=True)
    limits = ImageLimits(pixels=10_000)
    with ImageProcessor(tmp_path, None, threads=1, limits=limits) as loader, Scope() as scope:
        loader._is_squared = True  # CLIP's processor, which is saved here, knows no squares
        with pytest.raises(MediaRefused, match="at most 10000 pixels, this one has 200 x 200 = 40000"):
            load(loader, scope, picture(200, 10))


def test_an_image_of_more_tokens_than_the_model_takes_is_not_kept(tmp_path: Path) -> None:
    with Store(1 << 20) as store:
        with ImageProcessor(model_in(tmp_path), store, threads=1, max_tokens=3) as loader, Scope(store) as scope:
            with pytest.raises(MediaRefused, match="at most 3 tokens, and the image takes 4"):
                load(loader, scope, picture())
        assert store.stats().puts == 0


def test_image_without_room_is_refused_when_it_must_lie_in_the_store(tmp_path: Path) -> None:
    with Store(64 << 10) as store, ImageProcessor(model_in(tmp_path), store, threads=1, must_store=True) as loader:
        with Scope(store, inline_nbytes=0) as scope:
            item = load(loader, scope, picture())[0].item
            assert not item.is_inline
        store.clear()
        with Scope(store, inline_nbytes=0, timeout=0.0) as scope, store.put(bytes(store.nbytes - item.nbytes)):
            with pytest.raises(MediaRefused, match=r"no room for \d+ bytes now") as full:
                load(loader, scope, picture())
    processor_in(tmp_path, "llava", size={"height": 64, "width": 64}, crop_size={"height": 64, "width": 64})
    with (
        Store(4 << 10) as small,
        ImageProcessor(tmp_path, small, threads=1, must_store=True) as loader,
        Scope(small, inline_nbytes=0) as scope,
        pytest.warns(RuntimeWarning, match="does not fit"),
        pytest.raises(MediaRefused, match="images has 4096 bytes, the tensors of this one have") as large,
    ):
        load(loader, scope, picture())
    assert (full.value.status, large.value.status) == (503, 413)


def test_a_request_that_has_ended_meanwhile_holds_no_image(tmp_path: Path) -> None:
    with Store(1 << 20) as store:
        with ImageProcessor(model_in(tmp_path), store, threads=1) as loader:
            scope = Scope(store, inline_nbytes=0)
            scope.release()
            with pytest.raises(ClosedError):
                load(loader, scope, picture())
        assert not any(item.holders for item in store.stats().items)


def test_image_processor_refuses_models_and_folders_without_images(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama' takes no images"):
        ImageProcessor(tmp_path, None)
    stock_of("llava").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected the image processor of a model"):
        ImageProcessor(tmp_path, None)
    with pytest.raises(
        ValueError, match=r"expected pixels \(--max-image-megapixels\) to be a whole number of 1 or more, got 0"
    ):
        ImageLimits(pixels=0)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_an_image_is_turned_upright_as_its_exif_says(orientation: int, tmp_path: Path) -> None:
    from PIL import Image, ImageOps

    turned = picture(40, 64)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file, upright = io.BytesIO(), io.BytesIO()
    Image.open(io.BytesIO(turned)).save(file, "PNG", exif=exif)
    ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))).save(upright, "PNG")
    with ImageProcessor(model_in(tmp_path, "qwen2_vl"), None, threads=1) as loader, Scope() as scope:
        actual, expected = (
            image.item.open().value() for image in load(loader, scope, file.getvalue(), upright.getvalue())
        )
    for name in ("pixel_values", "image_grid_thw"):
        assert np.array_equal(actual[name], expected[name]), name


def test_an_image_whose_decoder_contradicts_its_headers_is_refused() -> None:
    encoded = EncodedImage.parse(picture(50, 30))
    with pytest.raises(MediaRefused, match="expected an image as PNG") as caught:
        image_processor.decode_image(encoded._replace(width=49))
    assert caught.value.status == 400


def test_an_image_that_pillow_takes_for_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = EncodedImage.parse(picture(50, 30))
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(MediaRefused, match="Pillow refuses to decode so many pixels") as caught:
        image_processor.decode_image(encoded)
    assert caught.value.status == 413
