"""Decoders on a CPU: one native call computes a layer, or all layers.

Between the kernels of a layer, Python and torch take a quarter of a decode step. The modules stay transformers' own. A
layer is replaced if its parts are native kernels already, and if a trial shows that the layer connects its parts as
the native code does. A decoder is treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.protocol.columns import Index
from penstock.engine.worker import rope
from penstock.engine.worker.cpu_attention import CpuAttention
from penstock.engine.worker.cpu_kernels import RmsNorm, kernel_threads, replace_forwards, rows_of
from penstock.engine.worker.cpu_linear import GatedMlp, Product, SharedProduct
from penstock.engine.worker.paged_attention import PagedAttention
from penstock.engine.worker.tensor_parallel import TPGroup

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
# The parts of a layer with norms of what attention and MLP add (Gemma), in their order.
SANDWICH = (*PARTS[:3], "pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm")
NO_NORM = (0, 0.0, False)
AdapterRun: TypeAlias = "tuple[int, int, int]"  # number of an adapter, first token, and token behind the last
CosSin: TypeAlias = "tuple[Tensor, Tensor]"  # embeddings of positions
TRIAL_POSITIONS = (0, 5, 77)


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
        paged, embeddings = options.get("paged"), options.get("position_embeddings")
        step = paged.native_step if isinstance(paged, PagedAttention) else None
        if step is None or embeddings is None or not self.attention.can_rotate(hidden_states, embeddings):
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
        self._attention = layers[0].attention
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
        if not all(self._attention.can_rotate(embeds, embeddings) for embeddings in of_kinds.values()):
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


@torch.inference_mode()
def replace_layers(model: nn.Module, ranks: TPGroup) -> None:
    """Replaces the computation of each decoder layer that the native code knows. Norms and attentions come first. With
    several ranks, layers are replaced if the ranks share memory."""
    replace_forwards(model, PARTS, partial(find_layer, ranks=ranks), "decoder")


def find_layer(layer: Any, ranks: TPGroup) -> CpuLayer | None:
    """Returns the computation of a layer; None: the layer computes something else than the native code."""
    parts = SANDWICH if hasattr(layer, SANDWICH[3]) else PARTS
    attention, mlp = layer.self_attn.forward, layer.mlp.forward
    norms = [getattr(layer, name).forward for name in parts if name.endswith("norm")]
    has_gate = isinstance(mlp, GatedMlp)
    if not ranks.sums_in_memory([layer.self_attn.o_proj, *([layer.mlp.down_proj] if has_gate else [])]):
        return None
    if not isinstance(attention, CpuAttention) or not (has_gate or parts is PARTS):
        return None
    dtype = attention.dtype
    if not all(isinstance(norm, RmsNorm) and norm.weight.dtype == dtype for norm in norms):
        return None
    qkv = SharedProduct.of([getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")])
    output = layer.self_attn.o_proj.forward
    gate_up, down = (mlp.product, layer.mlp.down_proj.forward) if has_gate else (None, None)
    if qkv is None or not all(isinstance(each, Product) for each in (output, gate_up, down) if each is not None):
        return None
    if not connects_parts(layer, parts):
        return None
    linears: Any = [qkv.packed, output.packed, *(None if each is None else each.packed for each in (gate_up, down))]
    how = attention.how
    before, after = (norms[::2], norms[1::2]) if parts is SANDWICH else (norms, [None, None])
    all_norms = (before[0], after[0], before[1], after[1], *attention.norms)
    native = _native.DecoderLayer(
        layer.self_attn.layer_idx,
        [NO_NORM if norm is None else norm.native for norm in all_norms],
        tuple(linears),
        attention.heads,
        how.scale,
        how.window or 0,
        how.softcap or 0.0,
        None if how.sinks is None else how.sinks.float().numpy(),
    )
    return CpuLayer(layer, attention, native, ranks, None if has_gate else (norms[1], layer.mlp))


def connects_parts(layer: Any, parts: Sequence[str]) -> bool:
    """Whether a layer connects its parts as the native code does, found by a trial with functions in their place."""
    calls: list[dict[str, Any]] = []

    def attend(hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        return hidden_states.roll(1, -1) + 1, None

    functions: dict[str, Callable[..., Any]] = {
        name: lambda x, factor=factor: x * factor + factor - 3 for name, factor in zip(SANDWICH, (3, 0, 5, 7, 0, 11))
    }
    functions |= {"self_attn": attend, "mlp": lambda x: x.roll(2, -1)}
    names = parts if parts is SANDWICH else (*parts[:2], "", parts[2], parts[3], "")
    ordered: list[Callable[..., Any]] = [functions.get(name, lambda x: x) for name in names]
    norm, _, attended_norm, mlp_norm, mlp, result_norm = ordered
    x = torch.arange(24.0).view(1, 3, 8)
    middle = x + attended_norm(attend(norm(x))[0])
    passed = {"position_embeddings": (x, x), "paged": object()}
    chosen = [functions[name] for name in parts]
    result = with_functions([getattr(layer, name) for name in parts], chosen, lambda: layer(x, **passed))
    if not isinstance(result, Tensor) or not torch.equal(result, middle + result_norm(mlp(mlp_norm(middle)))):
        return False
    return len(calls) == 2 and all(calls[1].get(name) is value for name, value in passed.items())


@torch.inference_mode()
def find_decoder(decoder: Any, ranks: TPGroup) -> CpuDecoder | None:
    """Returns the computation of a decoder; None: the decoder does not connect its layers as the native code does. All
    ranks call it, and compute alike."""
    modules = list(getattr(decoder, "layers", ()))
    layers = [module.forward for module in modules]
    if not ranks.least(int(is_native(decoder, layers))):
        return None
    norm, rotary = decoder.norm, decoder.rotary_emb
    ids, positions = torch.arange(3)[None], torch.tensor([TRIAL_POSITIONS])
    embeds: Tensor = decoder.get_input_embeddings()(ids)
    kinds = rope.kinds_of(rotary)
    embeddings = [rotary(embeds, positions, **rope.options_of(kind)) for kind in kinds]
    trial = Trial(len(layers), embeds.shape[-1])
    states = trial.states_of(embeds)
    numbers: list[int] | None = None
    for inputs in ({"input_ids": ids}, {"inputs_embeds": embeds}):
        options = {"position_ids": positions, "use_cache": False, "paged": object(), "return_dict": True}
        trial.calls.clear()
        result = with_functions(modules, trial.functions, lambda: decoder(**inputs, **options))  # noqa: B023
        if result is None or not torch.equal(result.last_hidden_state, norm(states[-1])):
            return None
        before, numbers = numbers, trial.match(states, embeddings)
        if numbers is None or before not in (None, numbers):
            return None
    return CpuDecoder(decoder, layers, [kinds[number] for number in numbers or ()])


def is_native(decoder: Any, layers: Sequence[Any]) -> bool:
    """Whether native code computes all layers of a decoder, with heads of one size, and the norm after them."""
    norm = getattr(getattr(decoder, "norm", None), "forward", None)
    if not layers or not all(isinstance(layer, CpuLayer) for layer in layers) or not isinstance(norm, RmsNorm):
        return False
    if not all(layer.mlp is None for layer in layers):
        return False
    kinds = {(layer.attention.dtype, layer.attention.heads[2]) for layer in layers}
    return len(kinds) == 1 and norm.weight.dtype == layers[0].attention.dtype and hasattr(decoder, "rotary_emb")


class Trial:
    """Functions in place of layers. Each changes signs and order of the elements, so no sequence of them is another."""

    def __init__(self, layers: int, size: int) -> None:
        self.calls: list[tuple[Tensor, CosSin]] = []  # hidden states, and embeddings of positions
        drawn = torch.Generator().manual_seed(0)
        self.functions = [
            partial(self._compute, torch.randint(2, (size,), generator=drawn) * 2 - 1) for _ in range(layers)
        ]

    def _compute(self, signs: Tensor, hidden_states: Tensor, *, position_embeddings: Any, **_: Any) -> Tensor:
        self.calls.append((hidden_states, position_embeddings))
        return hidden_states.roll(1, -1) * signs

    def states_of(self, embeds: Tensor) -> list[Tensor]:
        """Returns what each function is called with, and the result of the last one."""
        states = [embeds]
        for function in self.functions:
            states.append(function(states[-1], position_embeddings=()))
        return states

    def match(self, states: Sequence[Tensor], embeddings: Sequence[CosSin]) -> list[int] | None:
        """Returns the index of the embeddings with which each function was called; None: a function was called with
        something else than the states."""
        numbers = []
        for (hidden_states, own), state in zip(self.calls, states):
            equal = [number for number, pair in enumerate(embeddings) if all(map(torch.equal, own, pair))]
            if not equal or not torch.equal(hidden_states, state):
                return None
            numbers.append(equal[0])
        return numbers if len(self.calls) == len(self.functions) else None


def with_functions(
    modules: Sequence[Any], functions: Sequence[Callable[..., Any]], trial: Callable[[], Any]
) -> Any | None:
    """Returns the result of a trial with functions in place of what modules compute; None: the trial fails."""
    forwards = [module.forward for module in modules]
    try:
        for module, function in zip(modules, functions, strict=True):
            module.forward = function
        return trial()
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError, KeyError):
        return None  # a module with other arguments, or other results
    finally:
        for module, forward in zip(modules, forwards, strict=True):
            module.forward = forward
