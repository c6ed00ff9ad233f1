"""Images as users send them: decoded, made what the model takes, and put into the store, by threads beside the loop.

    loaded = await images.load(raw, scope)        raw: a PNG, a JPEG, a WebP, or a GIF, of which the first frame counts
    loaded.item, loaded.tokens                    for `Client.submit(…, items=…, scope=scope)`

An image is known by its bytes and by what is made of them: one that has been made is found by its key and not even
decoded. How much work an image is stands in its headers. It has a bound, so what a thread has begun ends soon; and
large ones are decoded by threads of their own, so small ones do not wait for them. The model's own processor makes the
tensors, the scope holds them, and `image_placeholders` places their tokens in a prompt.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock import Missing
from penstock.engine.client.encoded_image import UPRIGHT, EncodedImage
from penstock.engine.client.turns import FairThreadPool
from penstock.engine.model_dir import VISION
from penstock.errors import PenstockError
from penstock.tensor import Item, Outgoing, Scope, key_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
TILED = ("idefics3", "smolvlm")  # what these see of an image stands in several places of the prompt
MAX_PASSES = 32  # over as many pixels as are allowed, for each component: ordinary progressive JPEGs take up to 24
LARGE_PIXELS, LARGE_NBYTES = 4_000_000, 2 << 20  # from here on it takes a thread 0.1 s and more
MAX_RATIO = 100  # of an image's sides: processors make the short one as long as they want it, and the long one with it


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of what one request may bring."""

    count: int = 16
    nbytes: int = 20 << 20  # of each, as it was sent
    pixels: int = 40_000_000  # of each: what a few bytes can swell to

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("nbytes", 1), ("pixels", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise ValueError(f"{name} is {least} or more, not {getattr(self, name)!r}")


class ImageRefused(PenstockError):
    """An image that is not taken. `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class ProcessedImage(NamedTuple):
    """An image that is ready to travel."""

    item: Item
    tokens: int  # how often the id of an image stands for it in the prompt
    rows: int  # of the tiles that it was cut into; 0: it is whole
    columns: int


class ImageProcessor:
    """Of one model, for all requests of a process."""

    def __init__(
        self,
        path: str | Path,
        outgoing: Outgoing,
        *,
        limits: ImageLimits | None = None,
        threads: int | None = None,
        max_tokens: int | None = None,
        salt: bytes = b"",
    ) -> None:
        """`path`: the model's directory; `threads`: None for as many as there are processors; `max_tokens`: an image
        that stands for more is refused, and not kept; `salt`: another one, and nothing is shared with those of this
        one.

        Raises ValueError where the model takes no images, or its processor is not there.
        """
        self.limits = limits or ImageLimits()
        self._outgoing = outgoing
        self._max_tokens = max_tokens
        config, self._processor, self._count = _processor_of(Path(path))
        self.image_id: int = config.image_token_id
        self.is_tiled = config.model_type in TILED
        self._is_squared = config.model_type == "llava" and getattr(self._processor, "do_pad", False)
        self._salt = _fingerprint(self._processor) + salt
        threads = threads or len(os.sched_getaffinity(0))
        self._small, self._large = FairThreadPool(threads, "images"), FairThreadPool(threads, "large images")

    async def load(self, raw: bytes | Callable[[], bytes], scope: Scope) -> ProcessedImage:
        """Returns the image. `raw`: or a function that reads it, in a thread. Does not block the event loop. The scope,
        one for each request, holds the image.

        Cancelled, it is dropped if it has not begun. Raises ImageRefused, what reading it raises, and ClosedError if
        the scope has been released meanwhile.
        """
        loaded = await self._small.run(scope, functools.partial(self._load_small, raw, scope))
        if isinstance(loaded, ProcessedImage):
            return loaded
        return await self._large.run(scope, functools.partial(self._load_large, *loaded, scope))

    def _load_small(
        self, raw: bytes | Callable[[], bytes], scope: Scope
    ) -> ProcessedImage | tuple[bytes, EncodedImage]:
        """The image, or the key of one that is large, and what is to be decoded."""
        if not isinstance(raw, bytes):
            raw = raw()
        if len(raw) > self.limits.nbytes:
            raise ImageRefused(413, f"an image has at most {self.limits.nbytes} bytes, this one has {len(raw)}")
        key = key_of(raw, salt=self._salt)
        image = self._find(key, scope)
        if image is not None:
            return image
        encoded = self._parse(raw)
        if encoded.work > LARGE_PIXELS or len(encoded.data) > LARGE_NBYTES:
            return key, encoded
        return self._load_encoded(key, encoded, scope)

    def _load_large(self, key: bytes, encoded: EncodedImage, scope: Scope) -> ProcessedImage:
        image = self._find(key, scope)  # the same image may have been made while this one waited
        return self._load_encoded(key, encoded, scope) if image is None else image

    def _load_encoded(self, key: bytes, encoded: EncodedImage, scope: Scope) -> ProcessedImage:
        tree = self._make(encoded)
        if self._max_tokens is not None and tree["tokens"] > self._max_tokens:
            raise ImageRefused(
                400, f"this model has at most {self._max_tokens} tokens, and the image takes {tree['tokens']}"
            )
        return _loaded(scope.put(tree, key), tree)

    def _find(self, key: bytes, scope: Scope) -> ProcessedImage | None:
        store = self._outgoing.store
        try:
            if store is not None:
                with store.get(key) as stored:
                    return _loaded(scope.add(stored, key), stored.value())
        except Missing:
            pass
        return None

    def _parse(self, raw: bytes) -> EncodedImage:
        """Raises ImageRefused where decoding it, or what it becomes when it is made a square, would be too much."""
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
            raise ImageRefused(413, f"an image has at most {limit} pixels, {actual}")
        if max(sides) > MAX_RATIO * min(sides):
            actual = f"this one is {sides[0]} x {sides[1]}"
            raise ImageRefused(400, f"an image is at most {MAX_RATIO} times as long as it is wide, {actual}")
        if encoded.work > MAX_PASSES * limit:
            actual = f"this one of {sides[0]} x {sides[1]} has {encoded.scans} scans, which are {encoded.work}"
            raise ImageRefused(400, f"the scans of an image pass over at most {MAX_PASSES * limit} pixels, {actual}")
        return encoded

    def _make(self, encoded: EncodedImage) -> dict[str, Any]:
        picture = _decoded(encoded)
        try:
            features = self._processor(images=picture, return_tensors="np")
            shape = _tiles(features)
            tensors = {name: np.asarray(feature) for name, feature in features.items() if name not in ("rows", "cols")}
            return {**tensors, "tokens": self._count(tensors), "rows": shape[0], "columns": shape[1]}
        except (ValueError, ArithmeticError, MemoryError) as error:  # of an odd shape, say
            raise ImageRefused(
                400, f"the model's processor takes no image of {picture.width} x {picture.height}: {error}"
            ) from None

    def close(self) -> None:
        """Waits for what is being made."""
        self._small.close()
        self._large.close()

    def __enter__(self) -> ImageProcessor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loaded(item: Item, tree: Mapping[str, Any]) -> ProcessedImage:
    return ProcessedImage(item, tree["tokens"], tree["rows"], tree["columns"])


def _tiles(features: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = features.get("rows"), features.get("cols")
    if rows is None or columns is None:
        return 0, 0
    return int(np.asarray(rows).reshape(-1)[0]), int(np.asarray(columns).reshape(-1)[0])


def _decoded(encoded: EncodedImage) -> Any:
    """As RGB, upright."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its size has been looked at
            picture = Image.open(io.BytesIO(encoded.data), formats=(encoded.format,))
        if picture.size != (encoded.width, encoded.height):
            raise ValueError(f"its headers promise {encoded.width} x {encoded.height}, not {picture.size}")
        upright = picture.convert("RGB")
    except Image.DecompressionBombError as error:
        raise ImageRefused(413, f"an image has fewer pixels than Pillow warns of: {error}") from None
    except Exception as error:  # whatever its decoder stumbles on
        raise _unreadable(error) from None
    return upright if encoded.orientation == UPRIGHT else upright.transpose(_turned(encoded.orientation))


def _turned(orientation: int) -> Any:
    from PIL.Image import Transpose

    ways = [Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE]
    return [*ways, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90][orientation - 2]


def _unreadable(why: Exception) -> ImageRefused:
    return ImageRefused(400, f"no image that can be read as {', '.join(FORMATS)}: {why}")


# ── what a family makes of an image ──────────────────────────────────────────────────────────────────────────────────
def _processor_of(path: Path) -> tuple[Any, Any, Any]:
    """The model's configuration, what makes an image's tensors, and what says how many tokens these are."""
    from transformers import AutoConfig, AutoImageProcessor

    of_any_kind: Any = AutoImageProcessor
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type not in VISION:
        raise ValueError(f"{config.model_type!r} takes no images; these do: {', '.join(VISION)}")
    try:
        processor = of_any_kind.from_pretrained(path, local_files_only=True, backend="pil")
    except OSError as error:
        raise ValueError(f"{path}: expected the image processor of a model: {error}") from None
    if config.model_type in TILED:
        processor.return_row_col_info = True
    return config, processor, _COUNTS[config.model_type](config, processor)


def _count_patches(config: Any, _: Any) -> Any:
    """LLaVA's: a token for each patch; its tower may have one more, which is kept or left out."""
    size = config.vision_config.patch_size
    has_class = config.vision_config.model_type == "clip_vision_model"
    more = int(has_class) - int(config.vision_feature_select_strategy == "default")

    def count(tensors: Mapping[str, Any]) -> int:
        height, width = tensors["pixel_values"].shape[-2:]
        return int(height // size) * int(width // size) + more

    return count


def _count_merged(config: Any, processor: Any) -> Any:
    """Qwen's: as the grid says."""
    return lambda tensors: int(tensors["image_grid_thw"].prod()) // processor.merge_size**2


def _count_tiles(config: Any, _: Any) -> Any:
    """Idefics': as many for each tile."""
    each = (config.vision_config.image_size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    return lambda tensors: int(tensors["pixel_values"].shape[1]) * each


_COUNTS = {
    "idefics3": _count_tiles,
    "llava": _count_patches,
    "qwen2_5_vl": _count_merged,
    "qwen2_vl": _count_merged,
    "smolvlm": _count_tiles,
}


def _fingerprint(processor: Any) -> bytes:
    """Of all that decides what becomes of an image."""
    import transformers

    settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{transformers.__version__} {type(processor).__name__} {settings}".encode()).digest()
