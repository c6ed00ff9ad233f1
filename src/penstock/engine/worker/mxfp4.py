"""Experts with weights in MXFP4, as gpt-oss has them: decoded into the model's dtype, one expert at a time.

A block is 32 numbers of 4 bits with one scale, a power of two. In bfloat16 the products are exact. The files have a row
for each output of an expert, and the model has a column.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.worker.weight_slices import WeightSlice

BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of the parameter
BLOCK_NBYTES = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth bit is the sign
SCALE_BIAS = 127


def read_experts(
    name: str, blocks: Any, scales: Any, part: WeightSlice | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the weights [experts, inputs, outputs] of all experts, or a rank's slice, on a device that decodes them.
    `blocks` and `scales` are slices of safetensors, of which one expert is read at a time. Raises ValueError for shapes
    of another format."""
    shape, scales_shape = blocks.get_shape(), scales.get_shape()
    if len(shape) != 4 or shape[3] != BLOCK_NBYTES or shape[:3] != scales_shape:
        raise ValueError(
            f"{name}: expected blocks of MXFP4 [experts, outputs, groups, {BLOCK_NBYTES}] and a scale for each, got "
            f"{tuple(shape)} and {tuple(scales_shape)}"
        )
    whole = torch.Size((shape[0], shape[2] * 2 * BLOCK_NBYTES, shape[1]))
    experts = torch.empty(whole if part is None else part.shape(whole), dtype=dtype, device=device)
    pairs, factors = (table.to(device) for table in build_tables())
    for number, expert in enumerate(experts):
        weight = decode(blocks[number].to(device), scales[number].to(device), pairs, factors).t()
        expert.copy_(weight if part is None else part.of(weight, weight.shape, name))
    return experts


def build_tables() -> tuple[Tensor, Tensor]:
    """Returns the two numbers in bfloat16 of each byte, as one number of 32 bits, and the factor of each scale. Numbers
    are four times as large, and factors a fourth: bfloat16 has no 2¹²⁸, which is the largest scale."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], dtype=torch.bfloat16) * 4
    numbers = torch.arange(256)
    pairs = torch.stack((values[numbers & 15], values[numbers >> 4]), dim=-1)  # the low bits come first
    return pairs.view(torch.int32).flatten(), torch.ldexp(torch.ones(256), numbers - SCALE_BIAS - 2).bfloat16()


def decode(blocks: Tensor, scales: Tensor, pairs: Tensor, factors: Tensor) -> Tensor:
    """Returns the weights [outputs, inputs] of one expert, in bfloat16."""
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16).view(*scales.shape, -1)
    return numbers.mul_(factors[scales.int()][..., None]).flatten(-2)
