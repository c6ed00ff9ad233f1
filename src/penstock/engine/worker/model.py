"""A stock model of `transformers`, from a local directory, on one rank: token ids in, hidden states and logits out.

`paged_attention` replaces the attention of its layers, and `tensor_parallel` shards its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from logging import DEBUG
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.cluster.logs import event
from penstock.engine.model_dir import ENCODERS, VISION, require_family
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.config import require_dtype
from penstock.engine.protocol.lora import Adapter
from penstock.engine.worker import rope, weight_loader
from penstock.engine.worker.cpu_attention import replace_attentions
from penstock.engine.worker.cpu_decoder import AdapterRun, find_decoder, replace_layers
from penstock.engine.worker.cpu_kernels import replace_norms
from penstock.engine.worker.cpu_linear import find_groups, is_packed, pack_linears, packed_nbytes, weight_names
from penstock.engine.worker.kv_pages import KVPages
from penstock.engine.worker.lora import LoadedAdapters, load_adapters
from penstock.engine.worker.paged_attention import NAME, Attention, KVCache, PagedAttention, Probe
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


if TYPE_CHECKING:  # it imports Triton
    from penstock.engine.worker.cuda.decoder import CudaDecoder


class InputEmbeds(NamedTuple):
    """The embeddings of a step's tokens, with those of images and videos in their places.

    Qwen3-VL also adds vectors of its vision encoder to the hidden states of these places, after each of the first
    layers (DeepStack).
    """

    tokens: Tensor  # [tokens, size]
    places: Tensor  # of images and videos, among the tokens: indices
    added: tuple[Tensor, ...] = ()  # after each layer: [places, size]


class DeepStack:
    """Adds vectors to the hidden states after each of the first layers of a decoder. The stock way, by a mask of all
    tokens, would wait for a CUDA device twice in each layer."""

    def __init__(self, decoder: Any, layers: int) -> None:
        self.embeds: InputEmbeds | None = None  # of the step
        for number, layer in enumerate(decoder.layers[:layers]):
            layer.register_forward_hook(partial(self._add, number))

    def _add(self, number: int, _layer: nn.Module, _inputs: object, hidden: Tensor) -> Tensor:
        """`hidden` [1, tokens, size]."""
        if self.embeds is None:
            return hidden
        return hidden.index_add(1, self.embeds.places, self.embeds.added[number][None])


class LoadedModel:
    """A model that can run a step. `stock` is the model of transformers; `max_short_prompt`: see `rope.by_row`.
    `sums_attention`: no rank ends a step before all ranks have written keys and values of every layer."""

    def __init__(
        self,
        stock: Any,
        ranks: TPGroup,
        device: torch.device,
        *,
        sums_attention: bool,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self.stock = stock
        self.adapters = adapters
        self.sums_attention = sums_attention
        self.ranks = ranks
        self.device = device
        text = stock.config.get_text_config()
        self.dtype: torch.dtype = stock.dtype
        self.is_packed = is_packed(stock.get_decoder())
        self.vocab_size: int = text.vocab_size
        self.max_length: int = text.max_position_embeddings
        self.image_id: int | None = getattr(stock.config, "image_token_id", None)
        self.video_id: int | None = getattr(
            stock.config, "video_token_id", None
        )  # None: videos are images, or not taken
        vision = getattr(stock.config, "vision_config", None)
        self.deepstack_layers = len(getattr(vision, "deepstack_visual_indexes", ()))
        self._deepstack = DeepStack(stock.get_decoder(), self.deepstack_layers)
        self.max_short_prompt = rope.by_row(stock.get_decoder(), text)
        if self.max_short_prompt is not None and hasattr(stock.base_model, "get_rope_index"):
            raise ValueError(f"{stock.config.model_type!r} with rope_type longrope is not supported")
        self._decoder = find_decoder(stock.get_decoder(), ranks)
        self._cuda_decoder: CudaDecoder | None = None
        probe = self._probe()
        self.shapes = probe.shapes
        groups = {probe.heads[layer] // shape.heads for layer, shape in probe.shapes.items()}
        self.heads = max(probe.heads.values())  # of queries, in a layer
        if device.type == "cuda" and len(groups) > 1:  # items of chunks are the same for all layers
            raise ValueError(
                f"layers with different numbers of query heads for each KV head ({groups}) are not supported"
            )
        if device.type == "cuda":
            self._cuda_decoder = find_cuda_decoder(stock.get_decoder(), stock.get_input_embeddings(), probe, ranks)
        head = stock.get_output_embeddings()
        has_head = not isinstance(head, nn.Identity)
        # One product, with nothing after it but that ranks gather its columns.
        has_bias = getattr(head, "bias", None) is not None
        self._has_plain_head = type(head) is nn.Linear and not has_bias and head not in ranks.summed
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None) if has_head else None

    def _probe(self) -> Probe:
        """Returns how each layer attends, found by running the model once."""
        probe = Probe()
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.hidden(probe, nothing, nothing)
        return probe

    def memory(self, blocks: int, block_size: int, pages: KVPages | None = None) -> KVCache:
        cache = KVCache(self.shapes, blocks, block_size, self.dtype, self.device, pages)
        event("kv cache is mapped", DEBUG, blocks=blocks)
        return cache

    @torch.inference_mode()
    def embeds(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.stock.get_input_embeddings()(ids)
        return embedded

    @torch.inference_mode()
    def hidden(
        self,
        paged: Attention,
        ids: Tensor,
        positions: Tensor,
        embeds: InputEmbeds | None = None,
        runs: Sequence[AdapterRun] = (),
        read: Index | None = None,
    ) -> Tensor:
        """Returns the hidden states of a sequence of tokens: `ids` [tokens], or `embeds` instead of their embeddings;
        `positions` [tokens] or [3, tokens], see `rope`. `runs`: tokens with adapters. `read`: tokens of which the
        caller reads the hidden states; None: all."""
        if self._decoder is not None and isinstance(paged, PagedAttention) and (embeds is None or not embeds.added):
            tokens = self.embeds(ids) if embeds is None else embeds.tokens
            native = self._decoder.hidden(tokens[None], positions.unsqueeze(-2), paged, runs, read)
            if native is not None:
                return native[0]
        if runs and self.adapters is not None:
            with self.adapters.applied(runs, len(ids)):
                return self._run_modules(paged, ids, positions, embeds)
        if self._cuda_decoder is not None and (embeds is None or not embeds.added) and positions.dim() == 1:
            native = self._cuda_decoder.hidden(self.embeds(ids) if embeds is None else embeds.tokens, positions, paged)
            if native is not None:
                return native
        return self._run_modules(paged, ids, positions, embeds)

    def _run_modules(self, paged: Attention, ids: Tensor, positions: Tensor, embeds: InputEmbeds | None) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": ids[None]} if embeds is None else {"inputs_embeds": embeds.tokens[None]}
        self._deepstack.embeds = embeds if embeds is not None and embeds.added else None
        try:
            outcome = self.stock.get_decoder()(
                **inputs, position_ids=positions.unsqueeze(-2), use_cache=False, paged=paged, return_dict=True
            )
        finally:
            self._deepstack.embeds = None
        hidden: Tensor = outcome.last_hidden_state[0]
        return hidden

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type != "cuda" or self._softcap is not None else self.dtype

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits [rows, vocab_size] of hidden states [rows, size], in float32; on a CUDA device, where kernels
        read other types, in the type of the model. `out`: memory for the logits, if the caller has some."""
        head = self.stock.get_output_embeddings()
        if out is not None and self._softcap is None and self._has_plain_head:
            if head in self.ranks.gathered:
                return self.ranks.gather(hidden @ head.weight.t(), self.vocab_size, out)
            return torch.mm(hidden, head.weight.t(), out=out)
        logits: Tensor = head(hidden).to(self.logits_dtype)
        if self._softcap is not None:
            return torch.mul(torch.tanh(logits / self._softcap), self._softcap, out=out)
        return logits if out is None else out.copy_(logits)


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
    states as `logits`; the files need no weights of the head. `require_room`: raises ValueError if a
    CUDA device has no room for the model, of which the weights have not been read.

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
    loaded = None if adapters is None else load_adapters(stock, adapters, slices, device)
    sums_attention = ranks.size == 1 or outputs_are_summed(stock, slices)
    model = LoadedModel(stock, ranks, device, sums_attention=sums_attention, adapters=loaded)
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


def find_cuda_decoder(decoder: Any, embeddings: Any, probe: Probe, ranks: TPGroup) -> CudaDecoder | None:
    from penstock.engine.worker.cuda.decoder import find_decoder, log_layers

    computation = find_decoder(decoder, embeddings, probe.shapes, probe.styles, ranks)
    if not ranks.least(int(computation is not None)):  # all ranks compute alike
        computation = None
    log_layers(computation, len(probe.shapes))
    return computation


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
