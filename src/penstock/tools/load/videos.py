"""Videos of the load generator: moving coloured tiles, encoded by PyAV, which the extra `video` installs."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

import numpy as np

from penstock.installing import how_to_install

TILE = 16  # pixels on a side that have one colour
CODECS = ("libx264", "mpeg4")  # the first that this build of FFmpeg has: H.264 is what clients send
KEY_FRAMES = 2.0  # seconds from one to the next


def encode_video(chance: random.Random, seconds: float, width: int, height: int, fps: int) -> bytes:
    """Returns an MP4 of random tiles that move by a pixel each frame. Raises ImportError if PyAV is not installed."""
    try:
        import av
    except ImportError:
        raise ImportError(f"videos need PyAV: {how_to_install('video')}") from None
    rows, columns = -(-height // TILE), -(-width // TILE)
    tiles = np.frombuffer(chance.randbytes(rows * columns * 3), np.uint8).reshape(rows, columns, 3)
    pixels = tiles.repeat(TILE, 0).repeat(TILE, 1)[:height, :width]
    file = io.BytesIO()
    codec = next(name for name in CODECS if name in av.codecs_available)
    with av.open(file, "w", format="mp4") as container:
        options = {"preset": "ultrafast"} if codec == "libx264" else {}
        stream: Any = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.gop_size = max(1, round(KEY_FRAMES * fps))
        for number in range(max(1, round(seconds * fps))):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.roll(pixels, number, 1)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def video_url(chance: random.Random, seconds: float, width: int, height: int, fps: int) -> str:
    """Returns a data URL of such a video."""
    raw = encode_video(chance, seconds, width, height, fps)
    return f"data:video/mp4;base64,{base64.b64encode(raw).decode()}"
