"""What transformers' own video processors make of videos. They need torchvision, which the tests do without: its
operators fit one build of torch. So their answers are recorded, and compared by `test_video_processor`.

    python -m tests.support.video_references          with torchvision: writes them anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_suffix(".npz")
SMALL = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 4}}
TINY, STD = {**SMALL, "patch_size": 4}, {"image_std": [0.4, 0.5, 0.6]}
SAMPLING = {"fps": 1, "video_size": {"longest_edge": 9}}
SMOL = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}


class Case(NamedTuple):
    """A video, and the file of a video processor."""

    family: str
    file: dict[str, Any]
    frames: int
    fps: float
    height: int
    width: int

    @property
    def video(self) -> npt.NDArray[np.uint8]:
        t, y, x, c = np.ogrid[: self.frames, : self.height, : self.width, :3]
        return ((x * 3 + y * 5 + t * 7) % 256 // (c + 1) + c * 40).astype(np.uint8)


CASES = [
    Case("qwen2_vl", SMALL, 20, 10.0, 48, 64),
    Case("qwen2_vl", {"min_pixels": 56 * 56, "max_pixels": 56 * 112, "fps": 1.0}, 97, 24.0, 60, 24),
    Case("qwen2_5_vl", {**SMALL, "patch_size": 4, "resample": 2, "do_normalize": False}, 5, 3.0, 30, 31),
    Case("qwen2_5_vl", {**TINY, "cap_pixels_per_frame": True, "max_video_tokens": 8}, 44, 8.0, 60, 60),
    Case("qwen2_5_vl", {**SMALL, "num_frames": 7, "image_mean": [0.1, 0.2, 0.3], **STD}, 9, 1.0, 56, 56),
    Case("qwen3_vl", {"size": {"shortest_edge": 4096, "longest_edge": 8192}}, 9, 3.0, 20, 80),
    Case("qwen3_vl", {**TINY, "cap_pixels_per_frame": True, "max_video_tokens": 9}, 77, 29.97, 50, 40),
    Case("qwen3_vl", {**SMALL, "do_rescale": False, "fps": 4}, 6, 2.0, 64, 32),
    Case("smolvlm", {**SMOL, "video_sampling": {**SAMPLING, "max_frames": 64}}, 40, 10.0, 48, 64),
    Case("smolvlm", {**SMOL, "video_sampling": {**SAMPLING, "max_frames": 3}}, 98, 9.8, 64, 31),
]
# Numbers of frames, and frames a second, of videos of which only the sampled frames are compared.
LENGTHS = [
    (2, 30.0),
    (3, 1.0),
    (5, 0.5),
    (31, 29.97),
    (100, 24.0),
    (250, 25.0),
    (1801, 60.0),
    (9000, 30.0),
    (65536, 12.5),
]


def model_in(folder: Path, case: Case) -> Path:
    """Writes config.json and the file of the processor."""
    import transformers

    options: dict[str, Any] = {}
    if case.family == "smolvlm":
        options = {"text_config": {"model_type": "llama"}, "vision_config": {"image_size": 32, "patch_size": 4}}
        options["scale_factor"] = 2
    transformers.AutoConfig.for_model(case.family, **options).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(case.file))
    return folder


def record() -> None:
    import tempfile

    import torch

    if "cpu" in torch.__version__:  # for which the package index has no torchvision with operators
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    of_qwen2: Any = Qwen2VLVideoProcessor
    classes = {"qwen3_vl": Qwen3VLVideoProcessor, "smolvlm": SmolVLMVideoProcessor}
    answers: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            processor = classes.get(case.family, of_qwen2).from_pretrained(model_in(Path(folder), case))
        if case.family.startswith("qwen2") and processor.num_frames is None and processor.fps is None:
            processor.fps = 2.0
        processor.fps = None if processor.num_frames and case.family.startswith("qwen") else processor.fps

        def metadata(frames: int, fps: float) -> VideoMetadata:
            return VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)

        inputs = processor(
            videos=[case.video],
            video_metadata=[metadata(case.frames, case.fps)],
            do_sample_frames=True,
            return_metadata=True,
            return_tensors="pt",
        )
        (about,) = inputs.pop("video_metadata")
        name = "pixel_values" if case.family == "smolvlm" else "pixel_values_videos"
        answers[f"{number} pixels"] = inputs[name].numpy()
        answers[f"{number} indices"] = np.asarray(list(about.frames_indices), int)
        if case.family == "qwen2_5_vl":  # as its processor does
            answers[f"{number} seconds"] = np.array(processor.temporal_patch_size / about.sampled_fps)
        if "video_grid_thw" in inputs:
            answers[f"{number} grid"] = inputs["video_grid_thw"].numpy()
        else:
            assert bool(inputs["pixel_attention_mask"].all()), "ours has no mask"
        lengths = LENGTHS if case.family == "smolvlm" or "num_frames" not in case.file else [(9, 1.0), (64, 2.0)]
        for frames, fps in lengths:
            sampled = processor.sample_frames(metadata(frames, fps), num_frames=processor.num_frames, fps=processor.fps)
            answers[f"{number} of {frames} at {fps}"] = np.asarray(list(sampled), int)
    np.savez_compressed(FILE, **answers)
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    record()
