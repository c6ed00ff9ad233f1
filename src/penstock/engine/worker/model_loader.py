"""Loads a stock model of `transformers` from a local directory, on one rank.

`tensor_parallel` shards its weights, `weight_loader` reads them, `cpu_linear` packs them for native kernels, and
`cpu_replacement` finds the modules that native kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import DEBUG
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.cluster.logs import event
from penstock.engine.model_dir import ENCODERS, VISION, require_family
from penstock.engine.protocol.config import require_dtype
from penstock.engine.protocol.lora import Adapter
from penstock.engine.worker import rope, weight_loader
from penstock.engine.worker.cpu_linear import find_groups, pack_linears, packed_nbytes, weight_names
from penstock.engine.worker.cpu_replacement import (
    find_decoder,
    native_layers,
    replace_attentions,
    replace_layers,
    replace_norms,
)
from penstock.engine.worker.lora import load_adapters
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import NAME
from penstock.engine.worker.shared_weights import SharedWeights
from penstock.engine.worker.stock import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    build_on_meta,
    without_compiler,
)
from penstock.engine.worker.tensor_parallel import PLANS, TPGroup, outputs_are_summed, shard
from penstock.engine.worker.weight_slices import HeadSlices, WeightSlice

TEXT_OF = {
    "qwen3_vl": "qwen3"
}  # these families have no plan for their text, which is sharded as that of another family


def load(
    path: Path,
    ranks: TPGroup,
    device: torch.device,
    dtype: str = "auto",
    adapters: Sequence[Adapter] | None = None,
    shared: SharedWeights | None = None,
    *,
    has_head: bool = True,
    require_room: Callable[[Any, TPGroup, torch.device], None] | None = None,
) -> LoadedModel:
    """Loads this rank's shard of a model, and of its adapters; None: LoRA is not enabled. `dtype`: "auto" for that of
    config.json. `shared`: weights of the node, which are mapped, or filled. `has_head`: False for vectors, with hidden
    states as `logits`; the files need no weights of the head. `require_room`: raises ValueError if a CUDA
    device has no room for the model, of which the weights have not been read.

    Raises ValueError if the model is not supported, or cannot be sharded over so many ranks, or a device has no room.
    """
    require_dtype(dtype)
    if not path.is_dir():
        raise ValueError(f"{path}: expected a local directory with config.json and safetensors")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    require_supported(config)
    text = config.get_text_config()
    heads = HeadSlices(text.num_attention_heads, text.num_key_value_heads)
    stored = torch.float32 if quantization_of(config) is None else torch.bfloat16  # where config.json names no dtype
    chosen = (config.dtype or stored) if dtype == "auto" else getattr(torch, dtype)
    kind: Any = AutoModelForImageTextToText if config.model_type in VISION else AutoModelForCausalLM
    own = {"text_config": NAME, "vision_config": "sdpa"} if config.model_type in VISION else NAME
    stock = build_on_meta(lambda: kind.from_config(config, dtype=chosen, attn_implementation=own))
    stock.eval().requires_grad_(False)
    slices = shard(stock, tp_plan(stock), ranks, heads)
    with without_compiler():
        weight_loader.rebuild_buffers(stock, device)
    if not has_head:
        stock.set_output_embeddings(nn.Identity())
    if device.type == "cpu":
        load_on_cpu(stock, path, slices, device, shared)
    else:
        if require_room is not None:
            require_room(stock, ranks, device)
        weight_loader.load(stock, path, slices, device)
    event("weights are loaded", DEBUG)
    replace_patch_convolutions(stock)
    if device.type == "cpu":
        replace_norms(stock)
        replace_attentions(stock)
        replace_layers(stock, ranks)
    layers = native_layers(stock.get_decoder())
    loaded = None if adapters is None else load_adapters(stock, adapters, slices, device, layers)
    max_short_prompt = rope.by_row(stock.get_decoder(), text)
    if max_short_prompt is not None and hasattr(stock.base_model, "get_rope_index"):
        raise ValueError(f"{config.model_type!r} with rope_type longrope is not supported")
    decoder = find_decoder(stock.get_decoder(), ranks)
    sums = ranks.size == 1 or outputs_are_summed(stock, slices)
    model = LoadedModel(
        stock, ranks, device, decoder=decoder, max_short_prompt=max_short_prompt, sums_attention=sums, adapters=loaded
    )
    event("model is loaded", DEBUG)
    return model


def import_family(path: Path) -> None:
    """Imports the modules of a model's family."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    mapping: Any = MODEL_MAPPING if config.model_type in ENCODERS else MODEL_FOR_CAUSAL_LM_MAPPING
    if config.model_type in VISION:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    with torch.device("meta"), without_compiler():
        mapping[type(config)]


def load_on_cpu(
    stock: Any, path: Path, slices: dict[str, WeightSlice], device: torch.device, shared: SharedWeights | None
) -> None:
    """Loads and packs weights, or maps weights that another worker has converted and packed."""
    groups = list(find_groups(stock))
    to_pack = weight_names(stock, groups)
    is_mapped = shared is not None and shared.is_complete
    mapped = shared.tensors if shared is not None and is_mapped else {}
    packed = shared.packed if shared is not None and is_mapped else None
    converted = weight_loader.load(stock, path, slices, device, mapped, to_pack if packed is not None else ())
    if shared is not None and not is_mapped:
        tensors = {name: stock.get_parameter(name) for name in converted if name not in to_pack}
        packed = shared.packed if shared.fill(tensors, packed_nbytes(groups)) else None
    claim = None if shared is None or is_mapped or packed is None else shared.claim
    pack_linears(stock, groups, packed, claim, is_packed=is_mapped and packed is not None)
    if shared is not None:
        shared.complete()


class PatchProduct(NamedTuple):
    """Computes a convolution of patches with the kernel's size: a product, in a twentieth to a sixth of the time."""

    convolution: nn.Conv3d

    def __call__(self, patches: Tensor) -> Tensor:
        layer = self.convolution
        if patches.shape[1:] != layer.weight.shape[1:]:
            raise ValueError(f"expected patches {list(layer.weight.shape[1:])}, got {list(patches.shape[1:])}")
        return F.linear(patches.flatten(1), layer.weight.flatten(1), layer.bias)[..., None, None, None]


def replace_patch_convolutions(model: nn.Module) -> None:
    """Replaces the convolutions of Qwen-VL's encoders: their inputs are cut into patches already."""
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Conv3d]
    for layer in layers:
        if layer.stride == layer.kernel_size:
            layer.forward = PatchProduct(layer)


def tp_plan(stock: Any) -> dict[str, str]:
    """Returns which layers are sharded, and how."""
    other = TEXT_OF.get(stock.config.model_type)
    if other is None:
        text = PLANS.get(stock.config.get_text_config().model_type, {})
    else:
        text = AutoConfig.for_model(other).base_model_tp_plan or {}
    decoder = next(name for name, module in stock.named_modules() if module is stock.get_decoder())
    return {**{f"{decoder}.{layer}": style for layer, style in text.items()}, **stock.tp_plan}


def require_supported(config: Any) -> None:
    text = config.get_text_config()
    text_type = "" if text is config else text.model_type
    require_family(config.model_type, config.architectures or (), quantization_of(config), text_type)


def quantization_of(config: Any) -> Any:
    return getattr(config, "quantization_config", None)
