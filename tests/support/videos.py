"""Tiny videos, as PyAV writes them, and what is wrong with some."""

from __future__ import annotations

import functools
import io
import struct
from typing import Any

import av
import numpy as np

FPS = 15
# Each container and codec that is read, with the encoder that writes it here.
FORMATS = (
    ("mp4", "libx264"),
    ("mov", "mpeg4"),
    ("mp4", "libx265"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("matroska", "libx264"),
)


@functools.cache
def video(
    frames: int = 30, size: tuple[int, int] = (64, 48), container: str = "mp4", codec: str = "libx264", fps: int = FPS
) -> bytes:
    """The left half is red, the right half becomes brighter with each frame."""
    file = io.BytesIO()
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), brightness(number, frames), np.uint8)
            pixels[:, : size[0] // 2] = 255, 0, 0
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def brightness(number: int, frames: int) -> int:
    return number * 255 // frames


def repeated(times: int, size: tuple[int, int] = (640, 480)) -> bytes:
    """Returns a WebM that repeats its frames at the same times: few bytes with much work for a decoder."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm", options={"live": "1"}) as out:
        stream: Any = out.add_stream("libvpx", rate=1000, options={"deadline": "realtime", "cpu-used": "8"})
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(30):
            pixels = np.full((size[1], size[0], 3), number, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    head, cluster, clusters = file.getvalue().partition(b"\x1f\x43\xb6\x75")
    return head + (cluster + clusters) * times


def turned(raw: bytes) -> bytes:
    """The same MP4 as a phone writes it that is held upright: to be shown turned to the right."""
    at = raw.index(b"tkhd") + 44  # its matrix, of nine numbers
    turn = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    return raw[:at] + turn + raw[at + len(turn) :]
