"""A video file as its decoder reads it: what is counted, which frames come, and what is refused."""

import io
import os
import random
import struct
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av")

from penstock.engine.media.media_kind import MATROSKA, MP4, MediaRefused, container_of  # noqa: E402
from penstock.engine.media.video_file import VideoFile, VideoLimits  # noqa: E402
from tests.support.videos import FORMATS, FPS, brightness, turned, video  # noqa: E402
from tests.tiers import VIDEO_MUTATIONS  # noqa: E402

FRAMES = 30
SIZE = (64, 48)


def opened(raw: bytes, **limits: Any) -> VideoFile:
    return VideoFile(io.BytesIO(raw), VideoLimits(**limits))


def refusal(raw: bytes, **limits: Any) -> MediaRefused:
    with pytest.raises(MediaRefused) as caught:
        read = opened(raw, **limits)
        read.frames(range(read.info.frames))[:]
    return caught.value


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("container", "codec"), FORMATS)
def test_frames_of_each_format_are_counted_and_decoded(container: str, codec: str) -> None:
    read = opened(video(FRAMES, SIZE, container, codec))
    assert read.info[:1] + read.info[2:] == (FRAMES, *SIZE)
    assert read.info.fps == pytest.approx(FPS, rel=0.02)
    indices = [0, 7, 8, 29]
    frames = read.frames(indices)[:]
    assert frames.shape == (4, 48, 64, 3) and frames.dtype == np.uint8
    for index, frame in zip(indices, frames, strict=True):
        assert np.abs(frame[24, 50].astype(int) - brightness(index, FRAMES)).max() < 12
        assert frame[24, 10, 0] > 220 and frame[24, 10, 1:].max() < 40


def test_frames_are_those_that_transformers_reads(tmp_path: Any) -> None:
    video_utils = pytest.importorskip("transformers.video_utils")
    path = tmp_path / "a.mp4"
    path.write_bytes(video(FRAMES, SIZE))
    indices = [0, 9, 17, 29]
    expected, metadata = video_utils.read_video_pyav(str(path), lambda **_: np.array(indices))
    read = opened(path.read_bytes())
    assert np.array_equal(read.frames(indices)[:], expected)
    assert (read.info.frames, read.info.fps) == (metadata.total_num_frames, metadata.fps)


def test_frames_are_decoded_as_slices_are_read_and_only_once() -> None:
    frames = opened(video(FRAMES, SIZE)).frames(range(10))
    assert (len(frames), frames.ndim, frames.shape, frames.dtype) == (10, 4, (10, 48, 64, 3), np.uint8)
    whole = opened(video(FRAMES, SIZE)).frames(range(10))[:]
    assert np.array_equal(np.concatenate([frames[0:4], frames[4:9], frames[9:100]]), whole)
    with pytest.raises(IndexError, match="expected frames from 10 on"):
        frames[0:2]
    assert len(frames[10:12]) == 0


def test_video_is_decoded_by_one_thread() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = threads()
    frames = opened(video(FRAMES, SIZE)).frames([0, 9])
    frames[0:1]
    assert threads() <= before, "while the container is open"


def test_a_video_of_a_phone_is_upright() -> None:
    read = opened(turned(video(FRAMES, SIZE)))
    assert (read.info.width, read.info.height) == (48, 64)
    (frame,) = read.frames([0])[:]
    assert frame[5, 24, 0] > 220 and frame[60, 24].max() < 20, "what was on the left is above"


def test_containers_are_known_by_their_first_bytes() -> None:
    assert container_of(video()[:16]) == MP4
    assert container_of(video(FRAMES, SIZE, "webm", "libvpx")[:16]) == MATROSKA
    for head in (b"", b"#EXTM3U\n#EXTINF:1,", b"RIFF\0\0\0\0AVI LIST", b"ffconcat version", b"GIF89a" + bytes(10)):
        assert container_of(head) is None


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("limits", "status", "reason"),
    [
        ({"pixels": 3071}, 413, "a frame of a video has at most 3071 pixels, this one has 64 x 48 = 3072"),
        ({"seconds": 1.5}, 413, "a video has at most 1.5 s, this one has 1.93333"),
        ({"seconds": 0.02}, 413, "a video has at most 20 frames, this one has more"),
    ],
)
def test_a_video_above_a_limit_is_refused_with_both_numbers(limits: dict[str, Any], status: int, reason: str) -> None:
    error = refusal(video(FRAMES, SIZE), **limits)
    assert (error.status, error.reason) == (status, reason)


def test_limits_are_not_exceeded_by_one() -> None:
    assert opened(video(FRAMES, SIZE), pixels=3072, seconds=2.0).info.frames == FRAMES


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "its first bytes are of neither MP4, MOV, WebM nor Matroska"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "its first bytes are of neither"),
        (b"\0\0\0\x18ftypmp42" + bytes(400), "expected a video as MP4"),
        (b"\x1a\x45\xdf\xa3" + bytes(400), "expected a video as MP4"),
        (video()[:400], "Invalid data"),
        (video(FRAMES, SIZE, "webm", "libvpx")[:200], "expected a video"),
    ],
)
def test_invalid_video_is_refused(raw: bytes, reason: str) -> None:
    error = refusal(raw)
    assert error.status == 400 and reason in error.reason and len(error.reason) < 200


def test_a_video_that_ends_early_is_refused_with_the_frame() -> None:
    raw = video(FRAMES, SIZE, "webm", "libvpx")
    read = opened(raw[:-200])
    assert 1 <= read.info.frames < FRAMES
    with pytest.raises(MediaRefused, match=rf"frame 29 of {read.info.frames} cannot be decoded, as the file ends"):
        read.frames([0, 29])[:]


def test_a_file_of_sound_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    assert refusal(file.getvalue()).reason == "expected a video: the file has no stream of pictures"


def test_another_codec_is_refused_by_name() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as out:
        stream: Any = out.add_stream("mjpeg", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        out.mux(stream.encode(None))
    assert "expected a video of H.264, HEVC, VP8, VP9, AV1, MPEG-4, got" in refusal(file.getvalue()).reason


def test_size_known_only_to_the_stream_is_refused_before_allocation() -> None:
    raw = video(4, (640, 480))
    at = raw.rindex(b"avc1") + 28  # of the sample's entry: width and height
    assert struct.unpack_from(">HH", raw, at) == (640, 480)
    lying = raw[:at] + struct.pack(">HH", 64, 48) + raw[at + 4 :]
    assert refusal(lying, pixels=100_000).status in (400, 413)


@pytest.mark.parametrize(
    "bad", [{"count": -1}, {"pixels": 0}, {"nbytes": 1.5}, {"seconds": 0}, {"decoder_seconds": 1e9}]
)
def test_invalid_video_limits_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(TypeError if "nbytes" in bad else ValueError, match=f"expected {next(iter(bad))}"):
        VideoLimits(**bad)


# ── what no program has written ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3))
def test_mutations_are_read_or_refused_in_words(number: int, seed: int) -> None:
    """Each is read to its end within the limits, or is a MediaRefused or MemoryError: never another error, a hang or
    a crash."""
    container, codec = (("mp4", "libx264"), ("webm", "libvpx"), ("mov", "mpeg4"))[number]
    raw = video(6, (32, 32), container, codec)
    chance = random.Random(f"{seed} {number}")
    read = refused = 0
    for _ in range(VIDEO_MUTATIONS // 3):
        mutated = mutate(chance, raw)
        try:
            file = opened(mutated, pixels=100_000, seconds=20.0)
            frames = file.frames(range(0, file.info.frames, 2))
            assert frames[:].size <= 50_000_000
            read += 1
        except MediaRefused as error:
            assert error.status in (400, 413) and error.reason
            refused += 1
        except MemoryError:  # the container asks for too much; its process answers 413
            refused += 1
    assert read > 0 and refused > 0, "it tries both"


def mutate(chance: random.Random, raw: bytes) -> bytes:
    mutated = bytearray(raw)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(mutated))
        what = chance.randrange(5)
        if what == 0:
            mutated[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            mutated[at : at + 4] = chance.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0"))
        elif what == 2:
            del mutated[at : at + chance.randrange(1, 64)]
        elif what == 3:
            mutated[at:at] = mutated[: chance.randrange(1, 64)]
        else:
            mutated[at:] = mutated[at:][: chance.randrange(len(mutated))]
        if len(mutated) < 32:
            break
    return bytes(mutated)
