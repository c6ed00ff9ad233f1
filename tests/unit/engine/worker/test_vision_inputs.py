"""Vision encoders with inputs of the host: vectors are those of the stock calls, for all sizes and paddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import stock_of

# isort: split
import torch

from penstock.engine.worker import vision_inputs

GRIDS = [(1, 4, 4), (1, 2, 8), (1, 6, 10), (1, 14, 6), (3, 4, 6)]
TILES = 3


def upload(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.to("cpu", dtype)


def compare(stock: Any, tensors: dict[str, torch.Tensor], *, is_video: bool = False) -> None:
    model: Any = SimpleNamespace(stock=stock, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        layers = vision_inputs.encode(model, tensors, upload, is_video=is_video)
        encode = stock.get_video_features if is_video else stock.get_image_features
        outcome = encode(**tensors, return_dict=True)
    expected = [outcome.pooler_output, *(getattr(outcome, "deepstack_features", None) or ())]
    assert len(layers) == len(expected)
    for vectors, features in zip(layers, expected, strict=True):
        assert torch.allclose(vectors, torch.cat([feature.flatten(0, -2) for feature in features]), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_grids_are_encoded_as_by_the_stock_call(name: str) -> None:
    stock = stock_of(name)
    for time, height, width in GRIDS:
        grid = torch.tensor([[time, height, width]])
        pixels = torch.randn(time * height * width, 3 * 2 * 4 * 4)
        if time == 1:
            compare(stock, {"pixel_values": pixels, "image_grid_thw": grid})
        compare(stock, {"pixel_values_videos": pixels, "video_grid_thw": grid}, is_video=True)


def padding(kind: str) -> dict[str, torch.Tensor]:
    pixels = torch.randn(1, TILES, 3, 16, 16)
    mask = torch.ones(1, TILES, 16, 16, dtype=torch.int64)
    if kind == "no mask":
        return {"pixel_values": pixels}
    if kind == "padded":
        mask[0, 1, :, 9:] = 0
        mask[0, 2, 5:] = 0
    if kind == "a tile of zeros":
        pixels[0, 1] = 0
    if kind == "a row of zeros":
        pixels[0, 2, 0, 0] = 0
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
@pytest.mark.parametrize("kind", ["whole", "no mask", "padded", "a tile of zeros", "a row of zeros"])
def test_tiles_are_encoded_as_by_the_stock_call(name: str, kind: str) -> None:
    compare(stock_of(name), padding(kind))


def test_image_of_zeros_has_the_vectors_of_a_tile() -> None:
    compare(stock_of("smolvlm"), {"pixel_values": torch.zeros(1, TILES, 3, 16, 16)})
