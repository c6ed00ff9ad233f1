"""How a model's processor takes videos: which frames, and at what size. Known before a frame is decoded.

    settings = VideoSettings.from_model(path)
    plan = settings.plan(VideoInfo(frames=300, fps=30.0, width=640, height=480))
    plan.indices, plan.tokens, plan.nbytes

The settings are plain data, read from the model's directory as transformers reads settings, with the defaults of
transformers' classes. The classes need torchvision, and torchvision fits one build of torch; the settings need neither.
`video_processor` turns the planned frames into tensors.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.model_dir import VIDEO, expected, read_config

MODES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # of resizing, by Pillow's number in `resample`
MAX_SIDE = 4096  # of SmolVLM's first resizing
MAX_RATIO = 200  # of a frame's sides: Qwen-VL's processors take no longer ones
QWEN2 = ("qwen2_vl", "qwen2_5_vl")
QWEN3, SMOLVLM = "qwen3_vl", "smolvlm"
DEFAULT_FPS = 2.0  # of Qwen-VL: its own tools sample so, and its processors' files name none


Count = Annotated[int, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Size = dict[str, int | None]


class VideoInfo(msgspec.Struct, frozen=True):
    """A video as its container describes it."""

    frames: int
    fps: float  # average
    width: int  # as displayed
    height: int

    @property
    def duration(self) -> float:
        """Returns seconds."""
        return self.frames / self.fps


class VideoPlan(NamedTuple):
    """What a model's processor makes of one video."""

    indices: tuple[int, ...]  # of the frames that it wants, in order
    height: int  # of a frame, resized
    width: int
    groups: int  # of frames that the model sees as one: an encoding has as many times
    tokens: int  # of the video in a prompt, without the texts between its frames
    nbytes: int  # of its tensors
    timestamps: tuple[float, ...]  # seconds, of each group
    duration: float  # seconds
    second_per_group: float


class _Sampling(msgspec.Struct):
    """`video_sampling` of SmolVLM."""

    fps: Positive
    max_frames: Count
    video_size: Size


class _ProcessorFile(msgspec.Struct):
    """The settings in a processor's file that change a video's tensors. None: the family's default."""

    size: Size | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    max_image_size: Size | None = None
    video_sampling: _Sampling | None = None
    resample: int | None = None
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None
    rescale_factor: Positive | None = None
    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    patch_size: Count | None = None
    temporal_patch_size: Count | None = None
    merge_size: Count | None = None
    min_frames: Count | None = None
    max_frames: Count | None = None
    num_frames: Count | None = None
    fps: Positive | None = None
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: Count | None = None


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
_DEFAULTS: dict[str, dict[str, Any]] = {  # those of transformers' classes
    "qwen2_vl": {
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "max_video_tokens": 128000,
    },
    QWEN3: {
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": HALF,
        "image_std": HALF,
        "max_video_tokens": 768,
    },
    SMOLVLM: {
        "patch_size": 1,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "image_mean": HALF,
        "image_std": HALF,
        "resample": 1,
        "fps": 1.0,
        "num_frames": 64,
        "temporal_patch_size": 1,
        "merge_size": 1,
        "max_video_tokens": 0,
    },
}
_COMMON = {
    "resample": 3,
    "rescale_factor": 1 / 255,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": False,
}


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one model's video processor."""

    family: str  # the model type
    token_id: int  # of a video in a prompt; SmolVLM: that of an image
    size: dict[str, int]  # limits of a frame's pixels, or of its longest side
    frame_side: int  # SmolVLM: of its square frames; else 0
    frame_tokens: int  # SmolVLM: of each frame; else 0
    mode: str  # of resizing, as torch calls it; "": frames are not resized
    scale: float  # of a pixel's number; 1: it stays
    mean: tuple[float, float, float] | None  # None: the numbers are not normalized
    std: tuple[float, float, float] | None
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_frames: int
    max_frames: int
    num_frames: int | None  # to sample; of SmolVLM: at most
    fps: float
    cap_pixels_per_frame: bool
    max_video_tokens: int

    @classmethod
    def from_model(cls, path: str | Path) -> VideoSettings:
        """Reads the settings from a model's directory. Raises ValueError if the model takes no videos, or a file is
        missing or malformed."""
        from transformers import AutoConfig

        path = Path(path)
        family = read_config(path / "config.json")[0].get("model_type")
        if family not in VIDEO:
            raise ValueError(f"{family!r} takes no videos; model types that do: {', '.join(VIDEO)}")
        file, fields = _read_processor_file(path)
        with expected(str(file)):
            read = msgspec.convert(fields, _ProcessorFile)
        return cls._build(family, read, AutoConfig.from_pretrained(path, local_files_only=True), file)

    @classmethod
    def _build(cls, family: str, read: _ProcessorFile, config: Any, file: Path) -> VideoSettings:
        known = {**_COMMON, **_DEFAULTS["qwen2_vl" if family in QWEN2 else family]}
        known |= {name: value for name, value in msgspec.structs.asdict(read).items() if value is not None}
        if family in QWEN2:
            limits = {"shortest_edge": read.min_pixels, "longest_edge": read.max_pixels}
            known["size"] = {**known["size"], **{name: edge for name, edge in limits.items() if edge is not None}}
        elif family == SMOLVLM and read.video_sampling is not None:
            sampling = read.video_sampling
            known |= {"fps": sampling.fps, "num_frames": sampling.max_frames}
            known["size"] = read.size or sampling.video_size
        edges = ("longest_edge",) if family == SMOLVLM else ("shortest_edge", "longest_edge")
        if not all(known["size"].get(edge) for edge in edges):
            raise ValueError(f"{file}: expected a size with {' and '.join(edges)}, got {known['size']}")
        if known["resample"] not in MODES:
            raise ValueError(f"{file}: expected a resample of {', '.join(map(str, MODES))}, got {known['resample']}")
        return cls(
            family=family,
            token_id=config.image_token_id if family == SMOLVLM else config.video_token_id,
            size={edge: known["size"][edge] for edge in edges},
            frame_side=known["max_image_size"]["longest_edge"] if family == SMOLVLM else 0,
            frame_tokens=_count_frame_tokens(config) if family == SMOLVLM else 0,
            mode=MODES[known["resample"]] if known["do_resize"] else "",
            scale=known["rescale_factor"] if known["do_rescale"] else 1.0,
            mean=known["image_mean"] if known["do_normalize"] else None,
            std=known["image_std"] if known["do_normalize"] else None,
            num_frames=known.get("num_frames"),
            fps=known.get("fps") or DEFAULT_FPS,
            **{
                name: known[name]
                for name in ("patch_size", "temporal_patch_size", "merge_size", "min_frames", "max_frames")
            },
            cap_pixels_per_frame=known["cap_pixels_per_frame"],
            max_video_tokens=known["max_video_tokens"],
        )

    @property
    def salt(self) -> bytes:
        """Returns a hash of all settings, for keys of videos."""
        return hashlib.sha256(b"video 1 " + msgspec.json.encode(self, order="deterministic")).digest()

    # ── planning ──
    def plan(self, info: VideoInfo) -> VideoPlan:
        """Returns which frames of a video to decode for the model, and their size. Raises MediaRefused."""
        least = self.temporal_patch_size
        if info.frames < least or not (info.fps > 0 and math.isfinite(info.fps) and math.isfinite(info.duration)):
            actual = f"this one has {info.frames}, at {info.fps} a second"
            raise MediaRefused(400, f"a video has at least {least} frames for this model, {actual}")
        if min(info.width, info.height) < 1:
            raise MediaRefused(400, f"the frames of the video are {info.width} x {info.height}")
        indices = self._sample(info)
        height, width = self._resized(len(indices), info.height, info.width)
        groups = -(-len(indices) // self.temporal_patch_size)
        if self.family == SMOLVLM:
            tokens, numbers = groups * self.frame_tokens, len(indices) * 3 * height * width
        else:
            side = self.patch_size * self.merge_size
            tokens = groups * (height // side) * (width // side)
            numbers = groups * self.temporal_patch_size * 3 * height * width
        return VideoPlan(
            tuple(indices),
            height,
            width,
            groups,
            tokens,
            4 * numbers + 32,
            self._timestamps(indices, info.fps),
            info.duration,
            self.temporal_patch_size / (len(indices) / info.frames * info.fps),
        )

    def _sample(self, info: VideoInfo) -> list[int]:
        """Returns the numbers of the frames that the processor of the family samples."""
        if self.family == SMOLVLM:
            return self._sample_smolvlm(info)
        if self.family == QWEN3:
            count = min(max(int(info.frames / info.fps * self.fps), self.min_frames), self.max_frames)
            count = min(self.num_frames or count, info.frames)
            spread: list[int] = np.linspace(0, info.frames - 1, count).round().astype(int).tolist()
            return spread
        group = self.temporal_patch_size
        if self.num_frames:
            count = round(self.num_frames / group) * group
        else:
            most = min(self.max_frames, info.frames) // group * group
            frames = min(max(info.frames / info.fps * self.fps, self.min_frames), most, info.frames)
            count = math.floor(frames / group) * group
        if not 0 < count <= info.frames:
            raise MediaRefused(400, f"the model samples {count} frames, the video has {info.frames}")
        indices: list[int] = float_steps(info.frames, info.frames / count).astype(np.int32).tolist()
        return [index for index in indices if index < info.frames]

    def _sample_smolvlm(self, info: VideoInfo) -> list[int]:
        """Returns frames between the first and the last second of a video that is long."""
        most = self.num_frames or self.max_frames
        count = max(1, min(round(self.fps * info.duration), most))
        begin, end = 0, info.frames - 1
        if info.duration - 2 > most * self.fps:
            begin, end = int(info.fps), min(int(info.frames - info.fps), end)
            if begin >= end:
                begin, end = 0, info.frames - 1
        indices: list[int] = np.unique(np.linspace(begin, end, count, dtype=int)).tolist()
        return indices

    def _timestamps(self, indices: list[int], fps: float) -> tuple[float, ...]:
        """Returns the middle of the first and the last frame of each group, in seconds."""
        group = self.temporal_patch_size
        padded = [*indices, *indices[-1:] * (-len(indices) % group)]
        return tuple((padded[at] / fps + padded[at + group - 1] / fps) / 2 for at in range(0, len(padded), group))

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        if self.family == SMOLVLM:
            return (self.frame_side, self.frame_side) if self.mode else (height, width)
        factor = self.patch_size * self.merge_size
        if not self.mode:
            if height % factor or width % factor:
                raise MediaRefused(400, f"the sides of a frame are multiples of {factor}, here {width} x {height}")
            return height, width
        if self.family == QWEN3:
            return self._resized_qwen3(frames, height, width)
        limit = self.size["longest_edge"]
        if self.cap_pixels_per_frame:
            total = int(self.max_video_tokens * factor * factor * 0.9)
            limit = max(min(limit, total * self.temporal_patch_size // frames), self._floor)
        return fit_pixels(height, width, factor, 1, 1, self.size["shortest_edge"], limit)

    def _resized_qwen3(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Returns a size by which the pixels of all frames together are limited."""
        factor, group = self.patch_size * self.merge_size, self.temporal_patch_size
        limit = self.size["longest_edge"]
        if self.cap_pixels_per_frame:
            each = min(self.max_video_tokens * factor * factor, limit // frames)
            limit = max(each, self._floor) * frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        rounded = round(frames / group) * group
        return fit_pixels(height, width, factor, frames, rounded, self.size["shortest_edge"], limit)

    @property
    def _floor(self) -> int:
        return int(self.size["shortest_edge"] * 1.05)

    def first_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size of SmolVLM's first resizing: the longest side is as long as wanted, the other one even."""
        side = min(MAX_SIDE, self.size["longest_edge"])
        if width >= height:
            other = int(side / (width / height))
            return max(other + other % 2, 1), side
        other = int(side * (width / height))
        return side, max(other + other % 2, 1)


def float_steps(end: int, step: float) -> npt.NDArray[np.float32]:
    """Returns the multiples of `step` below `end` as `torch.arange` does, bit by bit: a float of 32 bits for each eight
    steps, to which further steps are added, and one for each of the last 15 steps or fewer. The last multiple may be
    rounded up to `end`."""
    count = math.ceil(end / step)
    numbers = np.arange(count)
    added = np.where(numbers < count // 16 * 16, numbers % 8, 0)
    begins = ((numbers - added) * step).astype(np.float32)
    return (begins.astype(np.float64) + added * step).astype(np.float32)


def fit_pixels(
    height: int, width: int, factor: int, frames: int, rounded: int, least: int, most: int
) -> tuple[int, int]:
    """Returns the sides of a frame as multiples of `factor`, with `least` to `most` pixels in all frames together.

    `rounded`: the frames, as they are counted where the sides need no change. Raises MediaRefused for a long frame.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise MediaRefused(400, f"a frame is at most {MAX_RATIO} times as long as it is wide, here {width} x {height}")
    sides = round(height / factor) * factor, round(width / factor) * factor
    pixels = rounded * sides[0] * sides[1]
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        return _multiple(height / shrink, factor), _multiple(width / shrink, factor)
    if pixels < least:
        grow = math.sqrt(least / (frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return sides


def _multiple(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)


def _read_processor_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file with the settings, and these: in the order in which transformers looks for them."""
    whole = path / "processor_config.json"
    if whole.exists():
        fields = read_config(whole)[0].get("video_processor")
        if fields is not None:
            return whole, fields
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (path / name).exists():
            return path / name, read_config(path / name)[0]
    raise ValueError(f"{path}: no video_preprocessor_config.json, and no other file of a processor")


def _count_frame_tokens(config: Any) -> int:
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    return int(patches // config.scale_factor**2)
