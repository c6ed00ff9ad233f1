"""Makes the patches of Qwen-VL's image processors as transformers makes them, bit by bit, in a fraction of its time.

    patches = PatchProcessor.of(processor)        None: a processor of another kind
    patches.process(picture)                      the processor's features of one RGB image

Rescaling and normalization map each byte of a colour to one number, so the processor's own functions make a table of
256 numbers for each colour, in which native code looks images up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engine import _native

LEVELS = 256
COLOURS = 3


def level_numbers(processor: Any) -> npt.NDArray[np.float32]:
    """Returns the number that a processor makes of each byte of each colour: [COLOURS, LEVELS]."""
    levels = np.broadcast_to(np.arange(LEVELS, dtype=np.uint8).reshape(1, 16, 16), (COLOURS, 16, 16))
    if processor.do_rescale:
        levels = processor.rescale(levels, processor.rescale_factor)
    if processor.do_normalize:
        levels = processor.normalize(levels, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(levels, np.float32).reshape(COLOURS, LEVELS)


class PatchProcessor:
    """The work of an image processor of transformers, without state beside the settings."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._factor = processor.patch_size * processor.merge_size
        self._numbers = level_numbers(processor)

    @classmethod
    def of(cls, processor: Any) -> PatchProcessor | None:
        """Returns None for a processor of another class: its steps may differ."""
        from transformers import Qwen2VLImageProcessorPil

        return cls(processor) if type(processor) is Qwen2VLImageProcessorPil else None

    def process(self, picture: Any) -> dict[str, npt.NDArray[Any]]:
        """Returns the tensors of an RGB image of PIL. Raises ValueError for a shape that the processor refuses."""
        processor, pixels = self._processor, np.asarray(picture)
        if processor.do_resize and not self._has_its_size(*pixels.shape[:2]):
            resized = processor.resize(
                np.moveaxis(pixels, -1, 0), processor.size, resample=processor.resample, factor=self._factor
            )
            pixels = np.moveaxis(resized, 0, -1)
        patch, merge, group = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        out = np.empty((rows * columns, COLOURS * group * patch * patch), np.float32)
        frames = np.ascontiguousarray(pixels)[np.newaxis]
        _native.write_patches(frames, self._numbers, (patch, patch), merge, group, out)
        return {
            "pixel_values": out,
            "image_grid_thw": np.array([[1, rows, columns]], np.int64),
        }

    def _has_its_size(self, height: int, width: int) -> bool:
        """Returns whether the processor would resize an image to the size that it has."""
        size = self._processor.size
        is_whole = height % self._factor == 0 and width % self._factor == 0
        return bool(is_whole and size.shortest_edge <= height * width <= size.longest_edge)
