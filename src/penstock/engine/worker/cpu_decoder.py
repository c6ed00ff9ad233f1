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
from penstock.engine.worker.cpu_attention import CpuAttention
from penstock.engine.worker.cpu_linear import GatedMlp, Product, SharedProduct
from penstock.engine.worker.cpu_norm import RmsNorm
from penstock.engine.worker.cpu_tensors import kernel_threads, replace_forwards, rows_of
from penstock.engine.worker.paged_attention import PagedAttention

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
NO_NORM = (0, 0.0, False)
AdapterRun: TypeAlias = "tuple[int, int, int]"  # number of an adapter, first token, and token behind the last


class CpuLayer:
    """The computation of a layer."""

    def __init__(self, layer: Any, attention: CpuAttention, native: _native.DecoderLayer) -> None:
        self.attention = attention
        self.native = native
        self.stock = layer.forward

    def __call__(self, hidden_states: Tensor, **options: Any) -> Any:
        paged, embeddings = options.get("paged"), options.get("position_embeddings")
        if isinstance(paged, PagedAttention) and self.attention.can_rotate(hidden_states, embeddings):
            step = paged.native_step
            if step is not None:
                return compute([self.native], step, hidden_states, embeddings, NO_NORM)
        return self.stock(hidden_states, **options)


class CpuDecoder:
    """The computation of all layers of a decoder, and of the norm after them."""

    def __init__(self, decoder: Any, layers: Sequence[CpuLayer]) -> None:
        self._rotary = decoder.rotary_emb
        self._attention = layers[0].attention
        self._layers = [layer.native for layer in layers]
        self._norm: RmsNorm = decoder.norm.forward

    def hidden(
        self, embeds: Tensor, position_ids: Tensor, paged: PagedAttention, runs: Sequence[AdapterRun] = ()
    ) -> Tensor | None:
        """Returns hidden states [1, tokens, size] of embeddings; None: the step needs the modules of the decoder.
        `runs`: tokens with adapters."""
        step = paged.native_step
        if step is None:
            return None
        if runs:
            step.set_runs(runs)
        embeddings = self._rotary(embeds, position_ids)
        if not self._attention.can_rotate(embeds, embeddings):
            return None
        return compute(self._layers, step, embeds, embeddings, self._norm.native)


def compute(
    layers: list[_native.DecoderLayer],
    step: _native.AttentionStep,
    x: Tensor,
    position_embeddings: Any,
    final_norm: tuple[int, float, bool],
) -> Tensor:
    cos, sin = (each.contiguous() for each in position_embeddings)
    rows = rows_of(x, layers[0].size, cos.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    where = (rows.data_ptr(), rows.stride(0)), (cos.data_ptr(), sin.data_ptr())
    _native.compute_layers(layers, step, *where, final_norm, out.data_ptr(), kernel_threads())
    return out


@torch.inference_mode()
def replace_layers(model: nn.Module) -> None:
    """Replaces the computation of each decoder layer that the native code knows. Norms and attentions come first.

    The parts of a layer must have no hooks, as the parts of a layer of several ranks have.
    """
    replace_forwards(model, PARTS, find_layer, "decoder")


def find_layer(layer: Any) -> CpuLayer | None:
    """Returns the computation of a layer; None: the layer computes something else than the native code."""
    attention, mlp = layer.self_attn.forward, layer.mlp.forward
    norms = [layer.input_layernorm.forward, layer.post_attention_layernorm.forward]
    if not isinstance(attention, CpuAttention) or not isinstance(mlp, GatedMlp):
        return None
    assert isinstance(mlp.product, Product), "the model has no adapters yet"
    dtype = mlp.product.dtype
    if not all(isinstance(norm, RmsNorm) and norm.weight.dtype == dtype for norm in norms):
        return None
    qkv = SharedProduct.of([getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")])
    output, down = layer.self_attn.o_proj.forward, layer.mlp.down_proj.forward
    if qkv is None or not isinstance(output, Product) or not isinstance(down, Product) or not connects_parts(layer):
        return None
    how, heads = attention.how, attention.norms
    native = _native.DecoderLayer(
        layer.self_attn.layer_idx,
        [*(norm.native for norm in norms), *(NO_NORM if norm is None else norm.native for norm in heads)],
        (qkv.packed, output.packed, mlp.product.packed, down.packed),
        attention.heads,
        how.scale,
        how.window or 0,
        how.softcap or 0.0,
        None if how.sinks is None else how.sinks.float().numpy(),
    )
    return CpuLayer(layer, attention, native)


def connects_parts(layer: Any) -> bool:
    """Whether a layer connects its parts as the native code does, found by a trial with functions in their place."""
    calls: list[dict[str, Any]] = []

    def attend(hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        return hidden_states.roll(1, -1) + 1, None

    functions: tuple[Callable[..., Any], ...] = (lambda x: x * 3, attend, lambda x: x * 5 + 2, lambda x: x.roll(2, -1))
    norm, _, mlp_norm, mlp = functions
    x = torch.arange(24.0).view(1, 3, 8)
    middle = x + attend(norm(x))[0]
    passed = {"position_embeddings": (x, x), "paged": object()}
    result = with_functions([getattr(layer, name) for name in PARTS], functions, lambda: layer(x, **passed))
    if not isinstance(result, Tensor) or not torch.equal(result, middle + mlp(mlp_norm(middle))):
        return False
    return len(calls) == 2 and all(calls[1].get(name) is value for name, value in passed.items())


@torch.inference_mode()
def find_decoder(decoder: Any) -> CpuDecoder | None:
    """Returns the computation of a decoder; None: the decoder does not connect its layers as the native code does."""
    modules = list(getattr(decoder, "layers", ()))
    layers = [module.forward for module in modules]
    norm, rotary = (getattr(decoder, name, None) for name in ("norm", "rotary_emb"))
    if not layers or not all(isinstance(layer, CpuLayer) for layer in layers) or rotary is None:
        return None
    if not isinstance(norm, nn.Module) or not isinstance(norm.forward, RmsNorm):
        return None
    if norm.forward.weight.dtype != layers[0].attention.dtype:
        return None
    ids = torch.arange(3)[None]
    embeds: Tensor = decoder.get_input_embeddings()(ids)
    embeddings = rotary(embeds, ids)
    trial = Trial(len(layers), embeds.shape[-1])
    states = trial.states_of(embeds)
    expected = [tensor for state in states[:-1] for tensor in (state, *embeddings)]
    for inputs in ({"input_ids": ids}, {"inputs_embeds": embeds}):
        options = {"position_ids": ids, "use_cache": False, "paged": object(), "return_dict": True}
        trial.calls.clear()
        result = with_functions(modules, trial.functions, lambda: decoder(**inputs, **options))  # noqa: B023
        if result is None or not torch.equal(result.last_hidden_state, norm(states[-1])):
            return None
        if len(trial.calls) != len(expected) or not all(map(torch.equal, trial.calls, expected)):
            return None
    return CpuDecoder(decoder, layers)


class Trial:
    """Functions in place of layers. Each changes signs and order of the elements, so no sequence of them is another."""

    def __init__(self, layers: int, size: int) -> None:
        self.calls: list[Tensor] = []  # hidden states, and embeddings of positions
        drawn = torch.Generator().manual_seed(0)
        self.functions = [
            partial(self._compute, torch.randint(2, (size,), generator=drawn) * 2 - 1) for _ in range(layers)
        ]

    def _compute(self, signs: Tensor, hidden_states: Tensor, *, position_embeddings: Any, **_: Any) -> Tensor:
        self.calls += [hidden_states, *position_embeddings]
        return hidden_states.roll(1, -1) * signs

    def states_of(self, embeds: Tensor) -> list[Tensor]:
        """Returns what each function is called with, and the result of the last one."""
        states = [embeds]
        for function in self.functions:
            states.append(function(states[-1], position_embeddings=()))
        return states


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
