"""Turns the frames of a video into the tensors that the model takes, as the video processors of transformers do.

    videos = VideoProcessor(VideoSettings.from_model(path))
    plan = videos.plan(info)                            before decoding
    value = videos.process(frames, plan)                the frames of plan.indices
    video = ProcessedVideo.of(scope.put(value, key=key), value)

Frames are resized by the function of torch that torchvision calls, so their numbers are those of transformers, bit by
bit. Some frames at a time are resized and written to where they stay: the work needs little memory beside its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import Empty
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.video_settings import SMOLVLM, VideoInfo, VideoPlan, VideoSettings
from penstock.tensor import Handle

Frames = npt.NDArray[np.uint8]  # [frames, height, width, 3]: RGB
PIXELS, GRID, SECONDS = "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"  # names that transformers has
CHUNK_NBYTES = 16 << 20  # of frames and of numbers that are in work at a time, or those of one group


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
        numbers_nbytes, frame_nbytes = 4 * 3 * plan.height * plan.width, 3 * height * width
        return group * max(1, CHUNK_NBYTES // (max(numbers_nbytes, frame_nbytes) * group))

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
            chunk = frames[begin * group : (begin + step) * group]
            if self.settings.family == SMOLVLM:
                _write_frames(self.settings, chunk, plan, value["pixel_values"][0, begin : begin + len(chunk)])
            else:
                _write_patches(self.settings, chunk, plan, begin, value[PIXELS])
        if GRID in value:
            patch = self.settings.patch_size
            value[GRID][:] = plan.groups, plan.height // patch, plan.width // patch
        return value


def _empty(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.empty(value.shape, value.dtype) if isinstance(value, Empty) else value for name, value in tree.items()
    }


def _write_frames(settings: VideoSettings, frames: Frames, plan: VideoPlan, out: npt.NDArray[np.float32]) -> None:
    import torch

    torch.from_numpy(out).copy_(_numbers(settings, frames, plan))


def _write_patches(
    settings: VideoSettings, frames: Frames, plan: VideoPlan, begin: int, out: npt.NDArray[np.float32]
) -> None:
    """Writes the patches of some groups of frames. The last group is filled up with its last frame."""
    import torch

    patch, merge, group = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    numbers = _numbers(settings, frames, plan)
    missing = -len(frames) % group
    if missing:
        numbers = torch.cat((numbers, numbers[-1:].expand(missing, -1, -1, -1)))
    groups, rows, columns = len(numbers) // group, plan.height // patch, plan.width // patch
    blocks = numbers.view(groups, group, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    first = begin * rows * columns
    place = torch.from_numpy(out[first : first + groups * rows * columns])
    place.view(blocks.shape).copy_(blocks)


def _numbers(settings: VideoSettings, frames: Frames, plan: VideoPlan) -> Any:
    """Returns frames resized and normalized: a float32 tensor [frames, 3, height, width]."""
    import torch

    pixels = torch.from_numpy(np.array(frames.transpose(0, 3, 1, 2), order="C"))  # a copy: `frames` may be read-only
    if settings.mode:
        if settings.family == SMOLVLM:
            pixels = _resized(pixels, settings.first_size(*pixels.shape[-2:]), settings.mode)
        pixels = _resized(pixels, (plan.height, plan.width), settings.mode)
    numbers = pixels.to(torch.float32)
    if settings.mean is None or settings.std is None:
        return numbers * settings.scale if settings.scale != 1 else numbers
    unit = 1.0 / settings.scale
    mean, std = (torch.tensor(values)[:, None, None] * unit for values in (settings.mean, settings.std))
    return numbers.sub_(mean).div_(std)


def _resized(pixels: Any, size: tuple[int, int], mode: str) -> Any:
    """Returns uint8 pixels [frames, 3, height, width] of another size."""
    import torch
    import torch.nn.functional as F

    if tuple(pixels.shape[-2:]) == size:
        return pixels
    if mode == "bilinear" and not _has_bytes_kernel():
        floats = F.interpolate(pixels.float(), size, mode=mode, align_corners=False, antialias=True)
        return floats.round_().to(torch.uint8)
    return F.interpolate(pixels, size, mode=mode, align_corners=False, antialias=True)


def _has_bytes_kernel() -> bool:
    """Returns whether torch resizes bytes by `bilinear` without detour on this processor, as torchvision decides it."""
    import platform

    import torch

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")
