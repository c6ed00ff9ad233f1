"""The steps of transformers' image processors on a device: an image is uploaded once, as bytes.

    processor = DeviceProcessor(of_transformers, torch.device("cuda", 0))
    features = processor.process(pixels)  # [height, width, 3], of the host

Resizing computes as Pillow does, with the same integer weights, and a table has the number of each byte. The tensors
therefore equal those of the processor on the host, bit by bit (`test_device_processor.py` compares them). This code has
not run on a device, only on doubles of a device.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.media.image_processor import device_steps
from penstock.engine.media.patches import COLOURS, LEVELS, level_numbers
from penstock.engine.media.resize import exact_weights, rounded

SHIFT = 22  # binary places of Pillow's weights
MAX_WEIGHTS = 64  # pairs of lengths with weights on the device

Size = tuple[int, int]


class DeviceFeatures(NamedTuple):
    """The tensors that a model takes of an image."""

    tensors: dict[str, Tensor]  # on the device
    small: dict[str, npt.NDArray[np.int64]]  # on the host
    rows: int = 0  # of tiles
    columns: int = 0


class DeviceProcessor:
    """The work of one image processor. Used by one thread."""

    def __init__(self, processor: Any, device: torch.device) -> None:
        """Raises ValueError for a processor with steps that are not known here."""
        makers = {"crop": self._crop, "patches": self._cut_patches, "tiles": self._cut_tiles}
        steps, self._mode = device_steps(processor)
        self._make_tensors = makers[steps]
        self._processor = processor
        self._device = device
        self._numbers = self._upload(level_numbers(processor).reshape(-1))
        self._colours = self._upload(np.arange(COLOURS, dtype=np.int32).reshape(COLOURS, 1, 1) * LEVELS)
        self._weights = functools.lru_cache(MAX_WEIGHTS)(self._upload_weights)

    def process(self, pixels: npt.NDArray[np.uint8]) -> DeviceFeatures:
        """Raises ValueError for a shape that the processor refuses."""
        return self._make_tensors(self._upload(pixels).permute(2, 0, 1))

    # ── families ──
    def _crop(self, image: Tensor) -> DeviceFeatures:
        """Makes one square of the image, as the processors of CLIP, SigLIP and LLaVA do."""
        processor = self._processor
        if processor.do_pad:
            image = self._squared(image)
        if processor.do_resize:
            image = self._resized(image, _whole_size(image, processor.size))
        if processor.do_center_crop:
            image = _center(image, (processor.crop_size.height, processor.crop_size.width))
        return DeviceFeatures({"pixel_values": self._normalized(image)[None]}, {})

    def _cut_patches(self, image: Tensor) -> DeviceFeatures:
        """Makes the patches of Qwen-VL."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor, size = self._processor, self._processor.size
        patch, merge, group = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        if processor.do_resize:
            height, width = image.shape[1:]
            target = smart_resize(height, width, patch * merge, size.shortest_edge, size.longest_edge)
            image = self._resized(image, target)
        rows, columns = image.shape[1] // patch, image.shape[2] // patch
        parts = self._normalized(image).reshape(COLOURS, rows // merge, merge, patch, columns // merge, merge, patch)
        parts = parts.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        patches = parts.expand(*parts.shape[:5], group, patch, patch).reshape(rows * columns, -1)
        return DeviceFeatures({"pixel_values": patches}, {"image_grid_thw": np.array([[1, rows, columns]], np.int64)})

    def _cut_tiles(self, image: Tensor) -> DeviceFeatures:
        """Makes the tiles of Idefics 3 and SmolVLM. The processor says how large, and calls back to resize."""
        processor = self._processor
        processor.resize = self._resize_tiled
        side, rows, columns = processor.max_image_size["longest_edge"], 0, 0
        if processor.do_resize:
            image = self._resize_tiled(image, processor.size)
        if processor.do_image_splitting:
            image = processor.resize_for_vision_encoder(image, side)
            tiles, rows, columns = processor.split_images(image, processor.max_image_size)
        else:
            tiles = [self._resized(image, (side, side))]
        tensors = {"pixel_values": self._normalized(torch.stack(tiles))[None]}
        if processor.do_pad:  # all tiles have one size: nothing is padded
            shape = (1, len(tiles), *tiles[0].shape[1:])
            tensors["pixel_attention_mask"] = torch.ones(shape, dtype=torch.int64, device=self._device)
        return DeviceFeatures(tensors, {}, rows, columns)

    def _resize_tiled(self, image: Tensor, size: Any, resample: Any = None) -> Tensor:
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3

        if size.longest_edge:
            shape: Any = image
            return self._resized(image, idefics3.get_resize_output_image_size(shape, size.longest_edge))
        return self._resized(image, (size.height, size.width))

    # ── steps ──
    def _resized(self, image: Tensor, size: Size) -> Tensor:
        """Returns the image [colours, height, width] of another height and width, in bytes: first the width."""
        if min(size) < 1:
            raise ValueError(f"expected height and width of 1 or more, got {size}")
        for axis, length in (2, size[1]), (1, size[0]):
            if image.shape[axis] == length:
                continue
            pixels, weights = self._weights(image.shape[axis], length)
            total: Any = 1 << SHIFT - 1
            for index, weight in zip(pixels, weights, strict=True):
                part = image.index_select(axis, index).int()
                total = part.mul_(weight if axis == 2 else weight[:, None]).add_(total)
            image = (total >> SHIFT).clamp_(0, LEVELS - 1).byte()
        return image

    def _upload_weights(self, before: int, after: int) -> tuple[Tensor, Tensor]:
        """Returns, for each pixel that a resized pixel is made of, its numbers and weights: [pixels, after]."""
        first, values = exact_weights(before, after, self._mode)
        pixels = first + np.arange(values.shape[1])[:, None]
        return self._upload(pixels.astype(np.int32)), self._upload(rounded(values.T, SHIFT))

    def _normalized(self, image: Tensor) -> Tensor:
        """Returns the numbers of bytes [..., colours, height, width]."""
        index = image.int() + self._colours
        return self._numbers.index_select(0, index.reshape(-1)).view(index.shape)

    def _squared(self, image: Tensor) -> Tensor:
        """Returns the image in the middle of a square of the mean colour."""
        _, height, width = image.shape
        side, mean = max(height, width), self._processor.image_mean or (0.0, 0.0, 0.0)
        background = np.array([int(level * (LEVELS - 1)) for level in mean], np.uint8)
        square = self._upload(background)[:, None, None].repeat(1, side, side)
        top, left = (side - height) // 2, (side - width) // 2
        square[:, top : top + height, left : left + width] = image
        return square

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _whole_size(image: Tensor, size: Any) -> Size:
    """Returns height and width of an image that is resized as a whole, as transformers computes them."""
    from transformers import image_transforms, image_utils

    height, width = image.shape[1:]
    if size.shortest_edge and size.longest_edge:
        return image_transforms.get_size_with_aspect_ratio((height, width), size.shortest_edge, size.longest_edge)
    if size.shortest_edge:
        short, long = sorted((height, width))
        longest = int(size.shortest_edge * long / short)
        return (size.shortest_edge, longest) if height <= width else (longest, size.shortest_edge)
    if size.max_height and size.max_width:
        return image_utils.get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
    if size.height and size.width:
        return size.height, size.width
    raise ValueError(f"expected the size of resized images, got {size}")


def _center(image: Tensor, size: Size) -> Tensor:
    """Returns the middle of an image, with a black border where the image is smaller."""
    for axis, (length, target) in enumerate(zip(image.shape[1:], size, strict=True), 1):
        before = max(0, math.ceil((target - length) / 2))
        border = (before, max(0, target - length - before))
        image = F.pad(image, (0, 0, *border) if axis == 1 else border)
        image = image.narrow(axis, (length - target) // 2 + before, target)
    return image
