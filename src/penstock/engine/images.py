"""Images as users send them: decoded, made what the model takes, and put into the store, by threads beside the loop.

    loaded = await images.load(raw, scope)        raw: a PNG, a JPEG, a WebP, or a GIF, of which the first frame counts
    loaded.item, loaded.tokens                    for `Client.submit(…, items=…, scope=scope)`

An image is known by its bytes and by what is made of them: one that has been made is found by its key and not even
decoded. Leaves to the model's own processor what is made of an image, to the scope how long it is held, and to `places`
where its tokens stand in a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock import Missing
from penstock.engine.families import VISION
from penstock.errors import PenstockError
from penstock.tensor import Item, Outgoing, Scope, key_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
TILED = ("idefics3", "smolvlm")  # what these see of an image stands in several places of the prompt
MOST_RATIO = 100  # of an image's sides: processors make the short one as long as they want it, and the long one with it


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of what one request may bring."""

    count: int = 16
    nbytes: int = 20 << 20  # of each, as it was sent
    pixels: int = 40_000_000  # of each: what a few bytes can swell to

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is 1 or more, not {getattr(self, name)!r}")


class ImageRefused(PenstockError):
    """An image that is not taken. `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Loaded(NamedTuple):
    """An image that is ready to travel."""

    item: Item
    tokens: int  # how often the id of an image stands for it in the prompt
    rows: int  # of the tiles that it was cut into; 0: it is whole
    columns: int


class Images:
    """Of one model, for all requests of a process."""

    def __init__(
        self,
        path: str | Path,
        outgoing: Outgoing,
        *,
        limits: ImageLimits | None = None,
        threads: int | None = None,
        most_tokens: int | None = None,
        salt: bytes = b"",
    ) -> None:
        """`path`: the model's directory; `threads`: None for as many as there are processors; `most_tokens`: an image
        that stands for more is refused, and not kept; `salt`: another one, and nothing is shared with those of this
        one.

        Raises ValueError where the model takes no images, or its processor is not there.
        """
        self.limits = limits or ImageLimits()
        self._outgoing = outgoing
        self._most_tokens = most_tokens
        config, self._processor, self._count = _processor_of(Path(path))
        self.image_id: int = config.image_token_id
        self.is_tiled = config.model_type in TILED
        self._is_squared = config.model_type == "llava" and getattr(self._processor, "do_pad", False)
        self._salt = _fingerprint(self._processor) + salt
        self._threads = ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), "images")

    async def load(self, raw: bytes | Callable[[], bytes], scope: Scope) -> Loaded:
        """`raw`: or what reads it, in the same thread. Blocks nobody's loop. The scope holds the image.

        Raises ImageRefused, what reading it raises, and ClosedError if the scope has been released meanwhile.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.load_now, raw, scope)

    def load_now(self, raw: bytes | Callable[[], bytes], scope: Scope) -> Loaded:
        """In this thread."""
        if not isinstance(raw, bytes):
            raw = raw()
        if len(raw) > self.limits.nbytes:
            raise ImageRefused(413, f"an image has at most {self.limits.nbytes} bytes, this one has {len(raw)}")
        key = key_of(raw, salt=self._salt)
        found = self._find(key, scope)
        if found is not None:
            return found
        made = self._make(raw)
        if self._most_tokens is not None and made["tokens"] > self._most_tokens:
            raise ImageRefused(
                400, f"this model has at most {self._most_tokens} tokens, and the image takes {made['tokens']}"
            )
        return _loaded(scope.put(made, key), made)

    def _find(self, key: bytes, scope: Scope) -> Loaded | None:
        store = self._outgoing.store
        try:
            if store is not None:
                with store.get(key) as stored:
                    return _loaded(scope.add(stored, key), stored.value())
        except Missing:
            pass
        return None

    def _make(self, raw: bytes) -> dict[str, Any]:
        picture = _decoded(raw, self.limits.pixels, self._is_squared)
        try:
            made = self._processor(images=picture, return_tensors="np")
            shape = _tiles(made)
            tensors = {name: np.asarray(one) for name, one in made.items() if name not in ("rows", "cols")}
            return {**tensors, "tokens": self._count(tensors), "rows": shape[0], "columns": shape[1]}
        except (ValueError, ArithmeticError, MemoryError) as error:  # of an odd shape, say
            raise ImageRefused(
                400, f"the model's processor takes no image of {picture.width} x {picture.height}: {error}"
            ) from None

    def close(self) -> None:
        """Waits for what is being made."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Images:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loaded(item: Item, made: Mapping[str, Any]) -> Loaded:
    return Loaded(item, made["tokens"], made["rows"], made["columns"])


def _tiles(made: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = made.get("rows"), made.get("cols")
    if rows is None or columns is None:
        return 0, 0
    return int(np.asarray(rows).reshape(-1)[0]), int(np.asarray(columns).reshape(-1)[0])


def _decoded(raw: bytes, most_pixels: int, is_squared: bool) -> Any:
    """As RGB. Its size is looked at before anything is unpacked: what it has, or has when it `is_squared`."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we look at that ourselves
            picture = Image.open(io.BytesIO(raw), formats=FORMATS)
        width, height = picture.size
        if is_squared:
            width = height = max(width, height)
        is_small = width * height <= most_pixels
        is_plain = max(picture.size) <= MOST_RATIO * min(picture.size)
        if is_small and is_plain:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Image.DecompressionBombError as error:
        raise ImageRefused(413, f"an image has at most {most_pixels} pixels: {error}") from None
    except Exception as error:  # whatever its decoder stumbles on
        raise ImageRefused(400, f"no image that can be read as {', '.join(FORMATS)}: {error}") from None
    size = f"{width} x {height}"
    if is_small:
        raise ImageRefused(400, f"an image is at most {MOST_RATIO} times as long as it is wide, this one is {size}")
    raise ImageRefused(413, f"an image has at most {most_pixels} pixels, this one has {size} = {width * height}")


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

    said = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{transformers.__version__} {type(processor).__name__} {said}".encode()).digest()
