"""A stock model of `transformers` on one rank: token ids in, hidden states and logits out.

`paged_attention` replaces the attention of its layers. On a CPU, the attention layers, decoder layers and decoders that
`cpu_replacement` has replaced compute here, by native kernels. `model_loader` loads models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from logging import DEBUG
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import Index
from penstock.engine.worker import rope
from penstock.engine.worker.cpu_kernels import Projected, RmsNorm, can_rotate, kernel_threads, rows_of
from penstock.engine.worker.cpu_linear import is_packed
from penstock.engine.worker.kv_pages import KVPages
from penstock.engine.worker.lora import AdapterRun, LoadedAdapters
from penstock.engine.worker.paged_attention import Attention, AttentionStyle, KVCache, PagedAttention, Probe
from penstock.engine.worker.tensor_parallel import TPGroup

if TYPE_CHECKING:  # it imports Triton
    from penstock.engine.worker.cuda.decoder import CudaDecoder

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # of an attention layer
NO_NORM = (0, 0.0, False)
CosSin: TypeAlias = "tuple[Tensor, Tensor]"  # embeddings of positions


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
    """A model that can run a step. `stock` is the model of transformers; `decoder`: computes all layers on a CPU;
    `max_short_prompt`: see `rope.by_row`. `sums_attention`: no rank ends a step before all ranks have written keys and
    values of every layer."""

    def __init__(
        self,
        stock: Any,
        ranks: TPGroup,
        device: torch.device,
        *,
        decoder: CpuDecoder | None,
        max_short_prompt: int | None,
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
        self.max_short_prompt = max_short_prompt
        self._decoder = decoder
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


def find_cuda_decoder(decoder: Any, embeddings: Any, probe: Probe, ranks: TPGroup) -> CudaDecoder | None:
    from penstock.engine.worker.cuda.decoder import find_decoder, log_layers

    computation = find_decoder(decoder, embeddings, probe.shapes, probe.styles, ranks)
    if not ranks.least(int(computation is not None)):  # all ranks compute alike
        computation = None
    log_layers(computation, len(probe.shapes))
    return computation


# ── on a CPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class CpuAttention:
    """The computation of an attention layer."""

    def __init__(self, layer: Any, how: AttentionStyle, norms: tuple[RmsNorm | None, RmsNorm | None]) -> None:
        self._layer = layer
        self._stock = layer.forward
        self.how = how
        self.norms = norms
        self.dtype: torch.dtype = layer.q_proj.weight.dtype
        self.size: int = layer.head_dim

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """The numbers of heads and of KV heads, the sizes of a key and of a value."""
        queries, keys, values = (self._layer.get_submodule(name).weight.shape[0] for name in PROJECTIONS[:3])
        return queries // self.size, keys // self.size, self.size, values * self.size // keys

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        paged, embeddings = options.get("paged"), cast(Any, options.get("position_embeddings"))
        hidden_states: Any = arguments[0] if arguments else options.get("hidden_states")
        if (
            len(arguments) > 1
            or not isinstance(paged, PagedAttention)
            or not can_rotate(hidden_states, embeddings, self.size, self.dtype)
        ):
            return self._stock(*arguments, **options)
        projected = self.project(hidden_states, embeddings)
        attended = paged.attend_written(self._layer.layer_idx, projected.write, self.how)
        return self._layer.o_proj(attended.view(*hidden_states.shape[:-1], -1)), None

    def project(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Projected:
        layer = self._layer
        projected = [module(hidden_states)[0] for module in (layer.q_proj, layer.k_proj, layer.v_proj)]
        rows = [rows_of(each, each.shape[1], self.dtype) for each in projected]
        cos, sin = (rows_of(each[0], each.shape[2], self.dtype).contiguous() for each in position_embeddings)
        return Projected(rows[0], rows[1], rows[2], cos, sin, *self.norms)


class CpuLayer:
    """The computation of a layer."""

    def __init__(
        self,
        layer: Any,
        attention: CpuAttention,
        native: _native.DecoderLayer,
        ranks: TPGroup,
        mlp: tuple[RmsNorm, Any] | None = None,
    ) -> None:
        """`mlp`: a module that the native code does not know, as one of experts is, and the norm before it."""
        self.attention = attention
        self.native = native
        self.ranks = ranks
        self.mlp = mlp
        self.stock = layer.forward

    def __call__(self, hidden_states: Tensor, **options: Any) -> Any:
        paged, embeddings = options.get("paged"), cast(Any, options.get("position_embeddings"))
        step = paged.native_step if isinstance(paged, PagedAttention) else None
        if step is None or not can_rotate(hidden_states, embeddings, self.attention.size, self.attention.dtype):
            return self.stock(hidden_states, **options)
        if self.mlp is None:
            return compute([self.native], step, hidden_states, [embeddings], NO_NORM, self.ranks)
        norm, mlp = self.mlp
        normed = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
        middle = compute([self.native], step, hidden_states, [embeddings], norm.native, self.ranks, normed)
        return middle + mlp(normed)


class CpuDecoder:
    """The computation of all layers of a decoder, and of the norm after them."""

    def __init__(self, decoder: Any, layers: Sequence[CpuLayer], kinds: Sequence[str | None]) -> None:
        """`kinds`: of each layer, see `rope.kinds_of`."""
        self._rotary = decoder.rotary_emb
        self._kinds = kinds
        self._options = {kind: rope.options_of(kind) for kind in kinds}
        self._ranks = layers[0].ranks
        self._size, self._dtype = layers[0].attention.size, layers[0].attention.dtype  # of all heads
        self._layers = [layer.native for layer in layers]
        self._norm: RmsNorm = decoder.norm.forward

    def hidden(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        paged: PagedAttention,
        runs: Sequence[AdapterRun] = (),
        read: Index | None = None,
    ) -> Tensor | None:
        """Returns hidden states [1, tokens, size] of embeddings; None: the step needs the modules of the decoder.
        `runs`: tokens with adapters. `read`: tokens of which the caller reads the hidden states; None: all."""
        step = paged.native_step
        if step is None:
            return None
        if runs:
            step.set_runs(runs)
        if read is not None:
            step.set_read(read)
        of_kinds = {kind: self._rotary(embeds, position_ids, **options) for kind, options in self._options.items()}
        if not all(can_rotate(embeds, embeddings, self._size, self._dtype) for embeddings in of_kinds.values()):
            return None
        embeddings = [of_kinds[kind] for kind in self._kinds]
        return compute(self._layers, step, embeds, embeddings, self._norm.native, self._ranks)


def compute(
    layers: list[_native.DecoderLayer],
    step: _native.AttentionStep,
    x: Tensor,
    position_embeddings: Sequence[CosSin],
    final_norm: tuple[int, float, bool],
    ranks: TPGroup,
    normed: Tensor | None = None,
) -> Tensor:
    """`position_embeddings`: of each layer. `normed`: gets the norm of the result; None: the norm is the result."""
    dense = {id(pair): [each.contiguous() for each in pair] for pair in position_embeddings}  # keeps the memory alive
    addresses = {key: (cos.data_ptr(), sin.data_ptr()) for key, (cos, sin) in dense.items()}
    rotations = [addresses[id(pair)] for pair in position_embeddings]
    rows = rows_of(x, layers[0].size, position_embeddings[0][0].dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = (rows.data_ptr(), rows.stride(0)), rotations, final_norm, out.data_ptr()
    normed_address = 0 if normed is None else normed.data_ptr()
    _native.compute_layers(layers, step, *arguments, kernel_threads(), ranks.memory, normed_address)
    return out
