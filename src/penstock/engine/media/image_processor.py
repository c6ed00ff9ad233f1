"""Decodes the images of requests, runs the model's image processor, and puts the tensors into the store, in threads.

    loaded = await images.load(raw, scope)        raw: a PNG, a JPEG, a WebP, or a GIF, of which the first frame counts
    loaded.item, loaded.tokens                    for `Client.submit(…, items=…, scope=scope)`

An image's key is a hash of its bytes and of the processor's settings: an image that is in the store is not decoded
again. The work of decoding is estimated from the headers and has a limit, so a thread is not busy for long. Large
images have threads of their own, so small images do not wait for them. The scope holds the tensors, and
`media_placeholders` expands their placeholders in the prompt.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from penstock import Missing
from penstock.engine.media.encoded_image import UPRIGHT, EncodedImage
from penstock.engine.media.fair_thread_pool import FairThreadPool
from penstock.engine.media.media_budget import MediaScope
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.patches import PatchProcessor
from penstock.engine.model_dir import VISION
from penstock.engine.protocol.option import MEGAPIXELS, MIB, Option, check_options
from penstock.tensor import Handle, Scope, Store, content_key

if TYPE_CHECKING:  # imported where images are processed on a device
    from penstock.engine.media.device_images import DeviceImages

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
TILED = ("idefics3", "smolvlm")  # what these see of an image stands in several places of the prompt
MAX_PASSES = 32  # over as many pixels as are allowed, for each component: ordinary progressive JPEGs take up to 24
RGB, COPIES = 3, 3  # bytes of a pixel; and of an image: as it is decoded, as RGB and upright, and resized
LARGE_PIXELS, LARGE_NBYTES = 4_000_000, 2 << 20  # from here on it takes a thread 0.1 s and more
MAX_RATIO = 100  # of an image's sides: processors make the short one as long as they want it, and the long one with it

Admission: TypeAlias = AbstractContextManager[object]


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the images of one request."""

    count: Annotated[int, Option(name="limit-mm-per-prompt", ge=0)] = 16
    """Maximum number of images in a prompt"""
    nbytes: Annotated[int, Option("limits", name="max-image-mb", unit=MIB, ge=1)] = 20 << 20
    """Maximum size of an image, as it is sent"""
    pixels: Annotated[int, Option("limits", name="max-image-megapixels", unit=MEGAPIXELS, ge=1)] = 40_000_000
    """Maximum size of a decoded image"""  # a file of a few bytes can decode to many

    def __post_init__(self) -> None:
        check_options(self)


class ProcessedImage(NamedTuple):
    """An image in the store, or inline, as it goes to the engine."""

    item: Handle
    tokens: int  # image tokens in the prompt
    rows: int  # of tiles; 0: the image is not tiled
    columns: int


class ImageProcessor:
    """The image processor of one model, for all requests of a process."""

    def __init__(
        self,
        path: str | Path,
        store: Store | None,
        *,
        limits: ImageLimits | None = None,
        threads: int | None = None,
        max_tokens: int | None = None,
        salt: bytes = b"",
        must_store: bool = False,
        device: DeviceImages | None = None,
    ) -> None:
        """`path`: the model's directory; `threads`: None for one per processor; `max_tokens`: an image with more tokens
        is refused, and not stored; `salt`: images are shared only between processors with the same salt; `must_store`:
        an image for which the store has no room is refused, and does not travel inline; `device`: processes images,
        which threads of this process do otherwise. It is closed with this object.

        Raises ValueError if the model takes no images, or its directory has no image processor, or the device knows no
        steps of that.
        """
        self.limits = limits or ImageLimits()
        self._store = store
        self._max_tokens = max_tokens
        self._must_store = must_store
        self._device = device
        config, self._processor, self._count = read_processor(Path(path))
        if device is not None:
            device_steps(self._processor)
        self._patches = PatchProcessor.of(self._processor)
        self.image_id: int = config.image_token_id
        self.is_tiled = config.model_type in TILED
        self._is_squared = config.model_type == "llava" and getattr(self._processor, "do_pad", False)
        self._salt = _fingerprint(self._processor) + salt
        threads = threads or len(os.sched_getaffinity(0))
        self._small, self._large = FairThreadPool(threads, "images"), FairThreadPool(threads, "large images")

    async def load(
        self, raw: bytes | Callable[[], bytes], scope: Scope, admit: Callable[[int], Awaitable[Admission]] | None = None
    ) -> ProcessedImage:
        """Processes an image in a thread. `raw`: the bytes, or a function that reads the bytes in the thread. The
        request's scope holds the image. `admit`: waits for the bytes of the pixels, and returns a context that holds
        the bytes.

        If cancelled, work that has not begun is dropped. Raises MediaRefused, the errors of `raw()`, and ClosedError if
        the scope was released meanwhile.
        """
        result = await self._small.run(scope, functools.partial(self._find_or_parse, raw, scope))
        if isinstance(result, ProcessedImage):
            return result
        key, encoded = result
        is_large = encoded.work > LARGE_PIXELS or len(encoded.data) > LARGE_NBYTES
        threads = self._large if is_large else self._small
        load = functools.partial(self._load_parsed, key, encoded, scope)
        with contextlib.nullcontext() if admit is None else await admit(COPIES * RGB * encoded.width * encoded.height):
            if self._device is None:
                return await threads.run(scope, load)
            assert isinstance(scope, MediaScope), "a scope that takes leases of slices"
            with await threads.run(scope, functools.partial(self._device.memory_file, encoded.data)) as file:
                item, tree = await self._device.load(key, encoded, file, scope, is_large=is_large)
            self._require_tokens(tree)
            return _loaded(item, tree)

    def _find_or_parse(
        self, raw: bytes | Callable[[], bytes], scope: Scope
    ) -> ProcessedImage | tuple[bytes, EncodedImage]:
        """Returns the image if the store has the image; else key and encoded form."""
        if not isinstance(raw, bytes):
            raw = raw()
        if len(raw) > self.limits.nbytes:
            raise MediaRefused(413, f"an image has at most {self.limits.nbytes} bytes, this one has {len(raw)}")
        key = content_key(raw, salt=self._salt)
        image = self._find(key, scope)
        return (key, self._parse(raw)) if image is None else image

    def _load_parsed(self, key: bytes, encoded: EncodedImage, scope: Scope) -> ProcessedImage:
        image = self._find(key, scope)  # another request may have stored the same image
        return self._load_encoded(key, encoded, scope) if image is None else image

    def _load_encoded(self, key: bytes, encoded: EncodedImage, scope: Scope) -> ProcessedImage:
        tree = self._make(encoded)
        self._require_tokens(tree)
        item = scope.put(tree, key=key)
        if self._must_store and item.is_inline:
            raise no_room(item.nbytes, self._store)
        return _loaded(item, tree)

    def _require_tokens(self, tree: Mapping[str, Any]) -> None:
        limit, tokens = self._max_tokens, tree["tokens"]
        if limit is not None and tokens > limit:
            raise MediaRefused(400, f"this model has at most {limit} tokens, and the image takes {tokens}")

    def _find(self, key: bytes, scope: Scope) -> ProcessedImage | None:
        store = self._store
        try:
            if store is not None:
                with store.get(key) as lease:
                    return _loaded(scope.add(lease, key=key), lease.value())
        except Missing:
            pass
        return None

    def _parse(self, raw: bytes) -> EncodedImage:
        """Raises MediaRefused if decoding the image, or padding it to a square, would exceed a limit."""
        try:
            encoded = EncodedImage.parse(raw)
        except ValueError as error:
            raise _unreadable(error) from None
        sides = width, height = encoded.width, encoded.height
        if self._is_squared:
            width = height = max(sides)
        limit = self.limits.pixels
        if width * height > limit:
            actual = f"this one has {width} x {height} = {width * height}"
            raise MediaRefused(413, f"an image has at most {limit} pixels, {actual}")
        if max(sides) > MAX_RATIO * min(sides):
            actual = f"this one is {sides[0]} x {sides[1]}"
            raise MediaRefused(400, f"an image is at most {MAX_RATIO} times as long as it is wide, {actual}")
        if encoded.work > MAX_PASSES * limit:
            actual = f"this one of {sides[0]} x {sides[1]} has {encoded.scans} scans, which are {encoded.work}"
            raise MediaRefused(400, f"the scans of an image pass over at most {MAX_PASSES * limit} pixels, {actual}")
        return encoded

    def _make(self, encoded: EncodedImage) -> dict[str, Any]:
        picture = decode_image(encoded)
        with refuse_shape(picture.width, picture.height):
            if self._patches is not None:
                features = self._patches.process(picture)
            else:
                features = self._processor(images=picture, return_tensors="np")
            shape = _tiles(features)
            tensors = {name: np.asarray(feature) for name, feature in features.items() if name not in ("rows", "cols")}
            return {**tensors, "tokens": self._count(tensors), "rows": shape[0], "columns": shape[1]}

    def close(self) -> None:
        """Waits for the images that threads are processing."""
        if self._device is not None:
            self._device.close()
        self._small.close()
        self._large.close()

    def __enter__(self) -> ImageProcessor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loaded(item: Handle, tree: Mapping[str, Any]) -> ProcessedImage:
    return ProcessedImage(item, tree["tokens"], tree["rows"], tree["columns"])


@contextlib.contextmanager
def refuse_shape(width: int, height: int) -> Iterator[None]:
    """Raises MediaRefused at an error of the model's processor, which takes no image of an odd shape, say."""
    try:
        yield
    except (ValueError, ArithmeticError, MemoryError) as error:
        raise MediaRefused(400, f"the model's processor takes no image of {width} x {height}: {error}") from None


def no_room(nbytes: int, store: Store | None) -> MediaRefused:
    """Returns the refusal of an image: the store has no room for its tensors."""
    room = 0 if store is None else store.nbytes
    if nbytes > room:
        return MediaRefused(413, f"the store for images has {room} bytes, the tensors of this one have {nbytes}")
    return MediaRefused(
        503, f"the store for images has no room for {nbytes} bytes now: images of open requests fill it"
    )


def _tiles(features: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = features.get("rows"), features.get("cols")
    if rows is None or columns is None:
        return 0, 0
    return int(np.asarray(rows).reshape(-1)[0]), int(np.asarray(columns).reshape(-1)[0])


def decode_image(encoded: EncodedImage) -> Any:
    """Returns the decoded image, as RGB and upright."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its size has been looked at
            picture = Image.open(io.BytesIO(encoded.data), formats=(encoded.format,))
        if picture.size != (encoded.width, encoded.height):
            raise ValueError(f"the headers say {encoded.width} x {encoded.height}, the decoder says {picture.size}")
        upright = picture.convert("RGB")
    except Image.DecompressionBombError as error:
        raise MediaRefused(413, f"Pillow refuses to decode so many pixels: {error}") from None
    except Exception as error:  # whatever its decoder stumbles on
        raise _unreadable(error) from None
    return upright if encoded.orientation == UPRIGHT else upright.transpose(_turned(encoded.orientation))


def _turned(orientation: int) -> Any:
    from PIL.Image import Transpose

    ways = [Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE]
    return [*ways, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90][orientation - 2]


def _unreadable(why: Exception) -> MediaRefused:
    return MediaRefused(400, f"expected an image as {', '.join(FORMATS)}: {why}")


# ── what a family makes of an image ──────────────────────────────────────────────────────────────────────────────────
def read_processor(path: Path) -> tuple[Any, Any, Any]:
    """Returns the model's configuration, its image processor, and a function that counts the tokens of an image."""
    from transformers import AutoConfig, AutoImageProcessor

    of_any_kind: Any = AutoImageProcessor
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type not in VISION:
        raise ValueError(f"{config.model_type!r} takes no images; model types that do: {', '.join(VISION)}")
    try:
        processor = of_any_kind.from_pretrained(path, local_files_only=True, backend="pil")
    except OSError as error:
        raise ValueError(f"{path}: expected the image processor of a model: {error}") from None
    if config.model_type in TILED:
        processor.return_row_col_info = True
    return config, processor, _COUNTS[config.model_type](config, processor)


def _count_patches(config: Any, _: Any) -> Any:
    """LLaVA has a token for each patch; its vision tower may have a class token, which is kept or left out."""
    size = config.vision_config.patch_size
    has_class = config.vision_config.model_type == "clip_vision_model"
    more = int(has_class) - int(config.vision_feature_select_strategy == "default")

    def count(tensors: Mapping[str, Any]) -> int:
        height, width = tensors["pixel_values"].shape[-2:]
        return int(height // size) * int(width // size) + more

    return count


def _count_merged(config: Any, processor: Any) -> Any:
    """Qwen-VL has a token for each group of merged patches of the grid."""
    return lambda tensors: int(tensors["image_grid_thw"].prod()) // processor.merge_size**2


def _count_tiles(config: Any, _: Any) -> Any:
    """Idefics has the same number of tokens for each tile."""
    each = (config.vision_config.image_size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    return lambda tensors: int(tensors["pixel_values"].shape[1]) * each


# Processors of transformers, and the name of their steps for `DeviceProcessor`.
DEVICE_STEPS = {
    "CLIPImageProcessorPil": "crop",
    "SiglipImageProcessorPil": "crop",
    "LlavaImageProcessorPil": "crop",
    "Qwen2VLImageProcessorPil": "patches",
    "Idefics3ImageProcessorPil": "tiles",
    "SmolVLMImageProcessorPil": "tiles",
}
DEVICE_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def device_steps(processor: Any) -> tuple[str, str]:
    """Returns the steps and the filter of a processor on a device. Raises ValueError if these are not known."""
    kind, resample = type(processor).__name__, processor.resample
    steps, filter_ = DEVICE_STEPS.get(kind), DEVICE_FILTERS.get(2 if resample is None else int(resample))
    is_padded = kind in ("CLIPImageProcessorPil", "SiglipImageProcessorPil") and processor.do_pad
    if steps is None or filter_ is None or is_padded or not (processor.do_rescale or processor.do_normalize):
        raise ValueError(
            f"no device runs the steps of {kind} with these settings: expected --image-processor-device cpu for them"
        )
    return steps, filter_


_COUNTS = {
    "idefics3": _count_tiles,
    "llava": _count_patches,
    "qwen2_5_vl": _count_merged,
    "qwen2_vl": _count_merged,
    "qwen3_vl": _count_merged,
    "smolvlm": _count_tiles,
}


def _fingerprint(processor: Any) -> bytes:
    """Returns a hash of all settings that change an image's tensors."""
    import transformers

    settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{transformers.__version__} {type(processor).__name__} {settings}".encode()).digest()
