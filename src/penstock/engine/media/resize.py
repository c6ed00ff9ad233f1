"""Resizes frames as torch resizes bytes with antialiasing, bit by bit, without torch.

    smaller = resize(frames, (height, width), "bicubic")

The weights of pixels are integers of 16 bits, as in torch and Pillow: the same on every processor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine import _native

Frames = npt.NDArray[np.uint8]  # [frames, height, width, 3]: RGB
Floats = npt.NDArray[np.float64]
MAX_WEIGHT, MAX_SHIFT = 1 << 15, 22  # of an integer weight; of its binary places


class Weights(NamedTuple):
    """What each pixel of a resized axis is made of."""

    first: npt.NDArray[np.int32]  # pixel
    values: npt.NDArray[np.int16]  # of this pixel and the next ones
    shift: int  # binary places of the values


def resize(frames: Frames, size: tuple[int, int], mode: str) -> Frames:
    """Returns frames of another height and width: first the width is resized, then the height."""
    for axis in (2, 1):
        length = size[axis - 1]
        if frames.shape[axis] != length:
            weights = _weights(frames.shape[axis], length, mode)
            out = np.empty((*frames.shape[:axis], length, *frames.shape[axis + 1 :]), np.uint8)
            _native.resize(np.ascontiguousarray(frames), *weights, axis == 2, out)
            frames = out
    return frames


@functools.lru_cache(maxsize=16)
def _weights(before: int, after: int, mode: str) -> Weights:
    """Returns the weights of `before` pixels in `after`, rounded."""
    first, values = exact_weights(before, after, mode)
    highest = float(values.max())
    shift = next(shift for shift in range(MAX_SHIFT + 1) if shift == MAX_SHIFT or _is_full(highest, shift + 1))
    return Weights(first.astype(np.int32), rounded(values, shift).astype(np.int16), shift)


def exact_weights(before: int, after: int, mode: str) -> tuple[npt.NDArray[np.int64], Floats]:
    """Returns the first pixel that each resized pixel is made of, and the weights of this pixel and the next ones."""
    filter_, reach = FILTERS[mode]
    scale = before / after
    stretch = max(scale, 1.0)
    support = reach * stretch
    centers = scale * (np.arange(after) + 0.5)
    low = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    high = np.minimum((centers + support + 0.5).astype(np.int64), before)
    taps = min(math.ceil(support) * 2 + 1, before)
    high = np.minimum(high, low + taps)
    first = np.minimum(low, before - taps)
    pixels = first[:, None] + np.arange(taps)
    values = filter_((pixels - centers[:, None] + 0.5) / stretch)
    values[(pixels < low[:, None]) | (pixels >= high[:, None])] = 0.0
    values /= values.sum(1, keepdims=True)
    return first, values


def rounded(values: Floats, shift: int) -> npt.NDArray[np.int32]:
    """Returns weights as integers with so many binary places."""
    return (values * (1 << shift) + np.where(values < 0, -0.5, 0.5)).astype(np.int32)


def _is_full(highest: float, shift: int) -> bool:
    return int(0.5 + highest * (1 << shift)) >= MAX_WEIGHT


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _bilinear(x: Floats) -> Floats:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: Floats) -> Floats:
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), np.sinc(x) * np.sinc(x / 3.0), 0.0)


FILTERS: dict[str, tuple[Callable[[Floats], Floats], float]] = {  # and how far a filter reaches, in pixels
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
