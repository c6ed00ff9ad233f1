"""Fine-tunes of the model that ships: the same shape, other weights, other answers."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.engine.protocol.config import SHIPPED

SPREAD = 0.02  # of the change; all answers differ from the first ids on, and stay finite


def write_fine_tune(path: Path, seed: int) -> Path:
    """Writes a fine-tune into a folder. Seed 0: the model as it ships."""
    shutil.copytree(SHIPPED, path)
    replace_weights(path, seed)
    return path


def replace_weights(path: Path, seed: int) -> None:
    """Replaces the weights of a model by those of the fine-tune, as a program that deploys models does: the file is
    written beside the other one, and renamed."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(f"{SHIPPED}/model.safetensors")
    torch.manual_seed(seed)
    if seed:
        tensors = {
            name: values + (SPREAD * torch.randn(values.shape)).to(values.dtype) for name, values in tensors.items()
        }
    save_file(tensors, path / "new", {"format": "pt"})
    (path / "new").rename(path / "model.safetensors")
