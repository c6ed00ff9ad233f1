"""LoRA adapters of tiny models, as PEFT writes them, and the answers of models into which they are merged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.engine.cluster.adapter_files import SETTINGS, WEIGHTS, read_digest
from penstock.engine.protocol.lora import Adapter
from tests.support.models import Asked, Family, _answer, attention_of, transformers

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPREAD = 0.3  # of A and of B


def linear_layers(stock: Any, targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
    return {
        name: module
        for name, module in stock.named_modules()
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear)
    }


def write_adapter(
    path: Path, model: Path, seed: int, *, targets: Sequence[str] = ALL, rank: int = 4, **settings: Any
) -> Adapter:
    """Writes an adapter of a model into a new folder. `settings`: fields of its configuration."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(model)
    chance = torch.Generator().manual_seed(seed)
    ranks = settings.get("rank_pattern", {})
    tensors = {}
    for name, module in linear_layers(stock, targets).items():
        own = next((value for key, value in ranks.items() if re.search(rf"{key}$", name)), rank)
        outputs, inputs = module.weight.shape
        for factor, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            drawn = SPREAD * torch.randn(shape, generator=chance)
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = drawn
    path.mkdir(parents=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": [*targets]}
    (path / SETTINGS).write_text(json.dumps({**fields, "modules_to_save": None, "use_dora": False, **settings}))
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    return Adapter(path.name, str(path), read_digest(path))


def merged_answers(of: Family, adapter: Adapter | None, requests: Sequence[Asked]) -> list[list[int]]:
    """Returns what transformers answers with W + scale * B A in place of each W. None: W alone."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        of.path, dtype=torch.float32, **attention_of(of.name)
    ).eval()
    if adapter is not None:
        merge(stock, Path(adapter.path))
    return [_answer(stock, request, {}) for request in requests]


@torch.no_grad()
def merge(stock: Any, path: Path) -> None:
    from safetensors.torch import load_file

    settings, tensors = json.loads((path / SETTINGS).read_text()), load_file(path / WEIGHTS)
    for name, module in linear_layers(stock, settings["target_modules"]).items():
        a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        alphas = settings.get("alpha_pattern", {}).items()
        alpha = next((value for key, value in alphas if re.search(rf"{key}$", name)), settings["lora_alpha"])
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        module.weight += (scale * b @ a).to(module.weight.dtype)
