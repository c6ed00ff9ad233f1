"""Patches of Qwen-VL's images: those of transformers, bit by bit."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("penstock.engine.worker.stock")
from PIL import Image
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil

from penstock.engine.media.patches import PatchProcessor

SETTINGS: list[dict[str, Any]] = [
    {},
    {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {"patch_size": 28, "min_pixels": 56 * 56, "max_pixels": 1 << 18},
    {"do_normalize": False, "merge_size": 1},
    {"do_rescale": False, "temporal_patch_size": 3},
    {"do_normalize": False, "do_rescale": False, "temporal_patch_size": 1},
]
SIZES = [(56, 56), (448, 448), (28, 2800), (333, 517), (1000, 700), (57, 31)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_patches_are_those_of_transformers_at_every_size(settings: dict[str, Any], seed: int) -> None:
    processor = Qwen2VLImageProcessorPil(**settings)
    patches = PatchProcessor.of(processor)
    assert patches is not None
    random = np.random.default_rng(seed)
    for width, height in SIZES:
        picture = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        expected, features = processor(images=picture, return_tensors="np"), patches.process(picture)
        assert features.keys() == expected.keys()
        for name, tensor in features.items():
            assert tensor.dtype == expected[name].dtype, name
            assert np.array_equal(tensor, expected[name]), f"{name} of {width} x {height}"


def test_patches_refuse_a_shape_that_the_processor_refuses() -> None:
    patches = PatchProcessor.of(Qwen2VLImageProcessorPil())
    assert patches is not None
    with pytest.raises(ValueError, match="aspect ratio"):
        patches.process(Image.new("RGB", (201 * 2, 1)))


def test_patches_are_not_made_for_another_class_of_processor() -> None:
    class Changed(Qwen2VLImageProcessorPil):  # type: ignore[misc]
        pass

    assert PatchProcessor.of(Changed()) is None
    assert PatchProcessor.of(CLIPImageProcessorPil()) is None
