"""Turns the frames of a video into the tensors that the model takes, as the video processors of transformers do.

    videos = VideoProcessor(VideoSettings.from_model(path))
    plan = videos.plan(info)                            before decoding
    value = videos.process(frames, plan)                the frames of plan.indices
    video = ProcessedVideo.of(scope.put(value, key=key), value)

Native code resizes as torch does and looks numbers up, so tensors are those of transformers, bit by bit, and a decoder
needs no torch. Some frames at a time are resized and written to where they stay: the work needs little memory beside
its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import Empty
from penstock.engine import _native
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.resize import Frames, resize
from penstock.engine.media.video_settings import SMOLVLM, VideoInfo, VideoPlan, VideoSettings
from penstock.tensor import Handle

PIXELS, GRID, SECONDS = "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"  # names that transformers has
CHUNK_NBYTES = 2 << 20  # of frames that are in work at a time, or those of one group: caches hold them
LEVELS = 256  # of a colour


class ProcessedVideo(NamedTuple):
    """A video in the store, or inline, as it goes to the engine."""

    item: Handle
    tokens: int  # of the video in the prompt, in as many equal parts as there are timestamps
    timestamps: tuple[float, ...]  # seconds
    duration: float  # seconds

    @classmethod
    def of(cls, item: Handle, tree: Mapping[str, Any]) -> ProcessedVideo:
        """`tree`: the value of the item."""
        return cls(item, tree["tokens"], tuple(tree["timestamps"]), tree["duration"])


class VideoProcessor:
    """The video processor of one model, without state beside the settings."""

    def __init__(self, settings: VideoSettings) -> None:
        self.settings = settings
        self._numbers = _numbers(settings)

    def plan(self, info: VideoInfo) -> VideoPlan:
        """Returns which frames of a video to decode, and their size. Raises MediaRefused."""
        return self.settings.plan(info)

    def layout(self, plan: VideoPlan) -> dict[str, Any]:
        """Returns the value of a video for `Store.loan`, with tensors that `process` fills."""
        settings = self.settings
        about = {
            "tokens": plan.tokens,
            "timestamps": list(plan.timestamps),
            "duration": plan.duration,
            SECONDS: plan.second_per_group,
        }
        if settings.family == SMOLVLM:
            return {"pixel_values": Empty((1, len(plan.indices), 3, plan.height, plan.width), np.float32), **about}
        patch, group = settings.patch_size, settings.temporal_patch_size
        patches = plan.groups * (plan.height // patch) * (plan.width // patch)
        return {PIXELS: Empty((patches, 3 * group * patch * patch), np.float32), GRID: Empty((1, 3), np.int64), **about}

    def frames_at_once(self, plan: VideoPlan, height: int, width: int) -> int:
        """Returns how many frames of this size `process` reads at a time: its work needs memory for so many."""
        group = self.settings.temporal_patch_size
        frame_nbytes = 3 * max(plan.height * plan.width, height * width)
        return group * max(1, CHUNK_NBYTES // (frame_nbytes * group))

    def process(self, frames: Frames, plan: VideoPlan, out: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the value of a video.

        `frames`: the decoded frames of `plan.indices`. They are read in slices, from the first frame to the last, each
        once: `frames` may decode lazily. `out`: a value of this layout, with arrays of NumPy: filled, and returned.

        Raises MediaRefused for fewer or more frames than planned.
        """
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
            raise ValueError(f"expected uint8 [frames, height, width, 3], got {frames.dtype} {frames.shape}")
        if len(frames) != len(plan.indices):
            reason = f"{len(plan.indices)} frames of the video were wanted, and {len(frames)} could be decoded"
            raise MediaRefused(400, reason)
        value = _empty(self.layout(plan)) if out is None else out
        group = self.settings.temporal_patch_size
        step = self.frames_at_once(plan, *frames.shape[1:3]) // group
        for begin in range(0, plan.groups, step):
            self._write(frames[begin * group : (begin + step) * group], plan, begin, value)
        if GRID in value:
            patch = self.settings.patch_size
            value[GRID][:] = plan.groups, plan.height // patch, plan.width // patch
        return value

    def _write(self, frames: Frames, plan: VideoPlan, begin: int, value: dict[str, Any]) -> None:
        """Writes the patches of some groups of frames, of which `begin` is the first."""
        settings = self.settings
        is_tiled = settings.family == SMOLVLM  # a frame is one patch
        if settings.mode:
            if is_tiled:
                frames = resize(frames, settings.first_size(*frames.shape[1:3]), settings.mode)
            frames = resize(frames, (plan.height, plan.width), settings.mode)
        patch, group = settings.patch_size, settings.temporal_patch_size
        sides = (plan.height, plan.width) if is_tiled else (patch, patch)
        out = value["pixel_values"][0].reshape(len(plan.indices), -1) if is_tiled else value[PIXELS]
        each = (plan.height // sides[0]) * (plan.width // sides[1])
        there = out[begin * each : (begin - (-len(frames) // group)) * each]
        _native.write_patches(np.ascontiguousarray(frames), self._numbers, sides, settings.merge_size, group, there)


def _empty(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.empty(value.shape, value.dtype) if isinstance(value, Empty) else value for name, value in tree.items()
    }


def _numbers(settings: VideoSettings) -> npt.NDArray[np.float32]:
    """Returns the number of each colour and byte, [3, LEVELS], by the operations of transformers in float32."""
    levels = np.broadcast_to(np.arange(LEVELS, dtype=np.float32), (3, LEVELS))
    if settings.mean is None or settings.std is None:
        return levels * np.float32(settings.scale)
    unit = np.float32(1.0 / settings.scale)
    mean, std = (np.array(values, np.float32)[:, None] * unit for values in (settings.mean, settings.std))
    numbers: npt.NDArray[np.float32] = (levels - mean) / std
    return numbers
