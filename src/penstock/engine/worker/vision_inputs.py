"""Runs the vision encoder of a model on one image, so that the host never waits for a CUDA device.

Sizes stay on the host: grids, lengths and masks. What an encoder derives from them is computed there, by functions of
transformers, and copied to the device together with the pixels. The stock code would read the sizes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.stock import vision_utils

GRIDS = {"image_grid_thw": "image_", "video_grid_thw": "video_"}  # and the prefix of the encoder's other inputs
ON_HOST = ("cu_seqlens", "cu_window_seqlens")  # lengths by which an encoder cuts its tokens


class Upload(Protocol):
    def __call__(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copies a tensor of the host to the device, in another type if there is one."""


def encode(model: LoadedModel, tensors: Mapping[str, Tensor], upload: Upload, *, is_video: bool) -> list[Tensor]:
    """Returns the vectors [tokens, size] of an image, and those for the first layers (`InputEmbeds`)."""
    stock = model.stock
    if hasattr(stock.base_model, "connector"):
        return [encode_tiles(stock.base_model, tensors["pixel_values"], tensors.get("pixel_attention_mask"), upload)]
    inputs: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in GRIDS:
            inputs[name] = tensor
            for key, part in grid_inputs(stock.base_model.visual, tensor).items():
                inputs[f"{GRIDS[name]}{key}"] = part if key in ON_HOST else upload(part)
        else:
            inputs[name] = upload(tensor, model.dtype if tensor.is_floating_point() else None)
    outcome = (stock.get_video_features if is_video else stock.get_image_features)(**inputs, return_dict=True)
    layers = [outcome.pooler_output, *(getattr(outcome, "deepstack_features", None) or ())]
    return [torch.cat([feature.flatten(0, -2) for feature in features]) for features in layers]


def grid_inputs(encoder: Any, grid: Tensor) -> dict[str, Tensor]:
    """Returns what an encoder of Qwen-VL derives from a grid of patches, by the names of its arguments."""
    merge = encoder.spatial_merge_size
    inputs = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
    }
    if hasattr(encoder, "window_size"):
        sizes = merge, encoder.window_size, encoder.patch_size
        inputs["window_index"], inputs["cu_window_seqlens"] = vision_utils.get_vision_window_index(grid, *sizes)
    if hasattr(encoder, "interpolation_mode"):
        names = "interp_indices", "interp_weights"
        taps = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=encoder.num_grid_per_side,
            mode=encoder.interpolation_mode,
            align_corners=encoder.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        inputs |= dict(zip(names, taps, strict=True))
    elif hasattr(encoder, "num_grid_per_side"):  # transformers 5.10, for one
        names = "bilinear_indices", "bilinear_weights"
        taps = vision_utils.get_vision_bilinear_indices_and_weights(grid, encoder.num_grid_per_side, merge)
        inputs |= dict(zip(names, taps, strict=True))
    return inputs


def encode_tiles(base: Any, pixels: Tensor, mask: Tensor | None, upload: Upload) -> Tensor:
    """Returns the vectors of an image of Idefics3 or SmolVLM. `pixels` [1, tiles, channels, height, width];
    `mask` [1, tiles, height, width]: 0 where a tile is padded. Tiles of zeros are padding, and have no vectors."""
    encoder = base.vision_model
    tiles = pixels.flatten(0, 1)
    is_real = tiles[:, 0, 0].any(1)  # of most tiles, the first row tells
    if not is_real.all():
        is_real = tiles.flatten(1).any(1)
        is_real[0] |= not is_real.any()
        tiles = tiles[is_real]
    size = encoder.patch_size
    patches = torch.ones(tiles.shape[0], tiles.shape[2] // size, tiles.shape[3] // size, dtype=torch.bool)
    if mask is not None and not mask.all():
        real = mask.flatten(0, 1)[is_real]
        patches = real.unfold(1, size, size).unfold(2, size, size).flatten(3).any(-1)
    dtype = encoder.post_layernorm.weight.dtype
    hidden = encoder.embeddings(pixel_values=upload(tiles, dtype), patch_attention_mask=upload(patches))
    attended = None
    if not patches.all():
        attended = upload(patches.flatten(1))[:, None, None].expand(-1, 1, hidden.shape[1], -1)
    hidden = encoder.encoder(inputs_embeds=hidden, attention_mask=attended).last_hidden_state
    vectors: Tensor = base.connector(encoder.post_layernorm(hidden)).flatten(0, 1)
    return vectors
