"""Reads a video file with PyAV (FFmpeg): the facts of the container, and the frames at some indices.

    video = VideoFile(file, limits)
    video.info                          frames, frames per second, size: counted before they are decoded
    video.frames([0, 15, 30])[0:2]      decodes the frames 0 to 15

FFmpeg reads a client's file here, and gets as little to do as possible. The container's format is named, and not
guessed; playlists, which name further files, are no allowed format. FFmpeg opens no second file and no connection. Only
codecs of usual videos are decoded, by one thread. Sizes are limited before a frame is allocated, and packets are
counted, as the count in a header may be wrong. A decoder may still crash or never end, and therefore runs in a separate
process: `decoder_process`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.media.media_kind import HEAD, MediaRefused, container_of
from penstock.engine.protocol.option import MAX_SECONDS, MEGAPIXELS, MIB, Option, check_options

CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
DECODERS = (*CODECS, "libdav1d")
NAMES = "H.264, HEVC, VP8, VP9, AV1, MPEG-4"
MAX_RATE = 1000.0  # frames per second; the limit of the duration bounds the frames with it
QUARTER = 90.0  # degrees: a phone stores a portrait video on its side, with the turn in its header


Picture: TypeAlias = npt.NDArray[np.uint8]


class VideoLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the videos of one request."""

    count: Annotated[int, Option(name="limit-mm-per-prompt", ge=0)] = 4
    """Maximum number of videos in a prompt"""
    nbytes: Annotated[int, Option("limits", name="max-video-mb", unit=MIB, ge=1)] = 64 << 20
    """Maximum size of a video, as it is sent"""
    pixels: Annotated[int, Option("limits", name="max-video-megapixels", unit=MEGAPIXELS, ge=1)] = 9_000_000
    """Maximum size of a frame of a video"""  # 4096 x 2160 and less
    seconds: Annotated[float, Option("limits", name="max-video-seconds", metavar="SECONDS", gt=0, le=MAX_SECONDS)] = (
        600.0
    )
    """Maximum duration of a video in seconds"""
    frames: Annotated[int, Option("limits", name="max-video-frames", ge=1)] = 768
    """Maximum number of frames that the model gets of a video"""
    decoder_seconds: Annotated[
        float, Option("limits", name="video-decode-timeout", metavar="SECONDS", gt=0, le=MAX_SECONDS)
    ] = 30.0
    """Seconds after which the process that decodes a video is killed"""

    def __post_init__(self) -> None:
        check_options(self)


class ContainerInfo(NamedTuple):
    frames: int
    fps: float
    width: int  # as displayed: a quarter turn has been applied
    height: int


class VideoFrames:
    """Frames as an array of uint8 [frames, height, width, 3]: each slice is read once, from the first to the last.

    So a decoder has a few frames in memory, and not all that the model gets.
    """

    ndim = 4
    dtype = np.dtype(np.uint8)

    def __init__(self, shape: tuple[int, int, int, int], pictures: Iterator[Picture]) -> None:
        self.shape = shape
        self._pictures = pictures
        self._next = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> Picture:
        """Decodes frames. Raises MediaRefused, MemoryError, and IndexError for frames that have been read."""
        begin, end, step = part.indices(len(self))
        if begin != self._next or step != 1:
            raise IndexError(f"expected frames from {self._next} on, got {part}")
        pictures = np.empty((max(0, end - begin), *self.shape[1:]), np.uint8)
        for place, picture in zip(pictures, self._pictures, strict=False):  # takes no picture beyond the last place
            place[:] = picture
        self._next = max(begin, end)
        return pictures


class VideoFile:
    """One video file, in the process that decodes it."""

    def __init__(self, file: BinaryIO, limits: VideoLimits) -> None:
        """Reads the container, and the first frame. Raises MediaRefused, and MemoryError."""
        self._file = file
        self._limits = limits
        file.seek(0)
        container = container_of(file.read(HEAD))
        if container is None:
            raise _unreadable("its first bytes are of neither MP4, MOV, WebM nor Matroska")
        self._format = container
        self._quarters = 0
        self.info = self._read_info()

    def frames(self, indices: Sequence[int]) -> VideoFrames:
        """Returns the frames of these indices, increasing. Frames are decoded when they are read."""
        info = self.info
        shape = len(indices), info.height, info.width, 3
        return VideoFrames(shape, self._pictures(indices))

    def _pictures(self, indices: Sequence[int]) -> Iterator[Picture]:
        from av.video.reformatter import VideoReformatter

        reformatter = VideoReformatter()  # of all frames: it is set up at the first frame
        remaining = iter(indices)
        index = next(remaining, None)
        for number, frame in enumerate(self._decode()):
            if number == index:
                yield self._picture(reformatter.reformat(frame, format="rgb24", threads=1), number)
                index = next(remaining, None)
                if index is None:
                    return
        reason = f"frame {index} of {self.info.frames} cannot be decoded, as the file ends before it"
        raise _unreadable(reason)

    def _picture(self, frame: Any, index: int) -> Picture:
        picture: Picture = np.rot90(frame.to_ndarray(), self._quarters)
        if picture.shape[:2] != (self.info.height, self.info.width):
            size = f"{picture.shape[1]} x {picture.shape[0]}"
            raise _unreadable(f"frame {index} is {size}, and the first one {self.info.width} x {self.info.height}")
        return picture

    # ── the container ──
    def _open(self) -> Any:
        import av

        self._file.seek(0)
        options = {
            "format_whitelist": self._format,
            "codec_whitelist": ",".join(DECODERS),
            "protocol_whitelist": "none",
            "max_pixels": str(self._limits.pixels),
        }
        return av.open(self._file, format=self._format.partition(",")[0], options=options)

    def _read_info(self) -> ContainerInfo:
        import av

        try:
            with self._open() as container:
                stream = _video_stream(container)
                self._require_size(stream.codec_context.width, stream.codec_context.height)
                frames, seconds = self._count(container, stream)
                fps = _rate(stream, frames, seconds)
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError, ArithmeticError) as error:
            raise _unreadable(error) from None
        self._require_duration(max(seconds, frames / fps))
        first = next(self._decode(), None)
        if first is None:
            raise _unreadable("it has no frame")
        self._require_size(first.width, first.height)  # the stream's own, and not what the container says
        self._quarters = round(first.rotation / QUARTER) % 4
        width, height = (first.height, first.width) if self._quarters % 2 else (first.width, first.height)
        return ContainerInfo(frames, fps, width, height)

    def _count(self, container: Any, stream: Any) -> tuple[int, float]:
        """Returns the number of frames, and the seconds from the first to the end of the last, by the packets."""
        most = int(self._limits.seconds * MAX_RATE)
        frames = 0
        first = last = None
        for packet in container.demux(stream):
            if not packet.size:
                continue
            frames += not packet.is_discard
            if frames > most:
                raise MediaRefused(413, f"a video has at most {most} frames, this one has more")
            if packet.pts is not None:
                end = packet.pts + (packet.duration or 0)
                first, last = min(first or packet.pts, packet.pts), max(last or end, end)
        if not frames:
            raise MediaRefused(400, "expected a video: its stream has no packets")
        seconds = 0.0 if first is None or last is None else float((last - first) * stream.time_base)
        self._require_duration(seconds)
        return frames, seconds

    def _require_duration(self, seconds: float) -> None:
        if not seconds <= self._limits.seconds:
            raise MediaRefused(413, f"a video has at most {self._limits.seconds:g} s, this one has {seconds:.6g}")

    def _require_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise _unreadable(f"its frames are {width} x {height}")
        limit = self._limits.pixels
        if width * height > limit:
            actual = f"this one has {width} x {height} = {width * height}"
            raise MediaRefused(413, f"a frame of a video has at most {limit} pixels, {actual}")

    # ── frames ──
    def _decode(self) -> Iterator[Any]:
        """Yields the frames in the order of display. Raises MediaRefused."""
        import av

        try:
            with self._open() as container:
                yield from container.decode(_video_stream(container))
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError, ArithmeticError) as error:
            raise _unreadable(error) from None


def _video_stream(container: Any) -> Any:
    """Returns the first stream of moving pictures. Raises MediaRefused."""
    if not container.streams.video:
        raise MediaRefused(400, "expected a video: the file has no stream of pictures")
    stream = container.streams.video[0]
    name = None if stream.codec_context is None else stream.codec_context.name
    if name not in DECODERS:
        raise MediaRefused(400, f"expected a video of {NAMES}, got {name or 'a codec that is not known'}")
    stream.codec_context.thread_count = 1  # PyAV's default is one for each processor
    return stream


def _rate(stream: Any, frames: int, seconds: float) -> float:
    """Returns the average rate: as transformers reads it; or where the container has none, by the packets."""
    fps = float(stream.average_rate or 0)
    if fps <= 0 and seconds > 0:
        fps = frames / seconds
    if not 0 < fps <= MAX_RATE:
        raise ValueError(f"its rate is {fps:g} frames per second")
    return fps


def _unreadable(why: object) -> MediaRefused:
    reason = getattr(why, "strerror", None) or why
    return MediaRefused(400, f"expected a video as MP4, MOV, WebM or Matroska: {reason}")
