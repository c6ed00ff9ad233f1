"""Which modules of a stock model native kernels of a CPU compute: norms, attention layers, decoder layers, decoders.

Between the kernels of a layer, Python and torch take a quarter of a decode step. The modules stay transformers' own. A
module is replaced if its parts are native kernels already, and if a trial shows that the module computes what the
kernels do: a norm and an attention layer with drawn numbers, a layer and a decoder with functions in place of their
parts. `cpu_kernels` and `model` have the computations, and `cpu_linear` replaces linear layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.logs import event
from penstock.engine.worker import rope
from penstock.engine.worker.cpu_kernels import GatedMlp, Product, RmsNorm, SharedProduct
from penstock.engine.worker.model import NO_NORM, PROJECTIONS, CosSin, CpuAttention, CpuDecoder, CpuLayer
from penstock.engine.worker.paged_attention import CPU_DTYPES, AttentionStyle, KVCache, KVCacheShape
from penstock.engine.worker.tensor_parallel import TPGroup

NORM_DTYPES = (torch.float32, torch.bfloat16)
EPSILONS = ("variance_epsilon", "eps", "epsilon")  # transformers' names of one number
NORM_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}  # of each output
TRIAL_TOKENS = 4
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of each output, and of the largest one
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
# The parts of a layer with norms of what attention and MLP add (Gemma), in their order.
SANDWICH = (*PARTS[:3], "pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm")
TRIAL_POSITIONS = (0, 5, 77)


def replace_forwards(
    model: nn.Module, parts: Sequence[str], find: Callable[[Any], Callable[..., Any] | None], kind: str
) -> None:
    """Replaces the computation of modules with these parts by what `find` returns. None: the module keeps its own."""
    replaced = stock = 0
    module: Any  # its method is replaced
    for module in model.modules():
        if not all(hasattr(module, name) for name in parts):
            continue
        computation = find(module)
        if computation is None:
            stock += 1
            continue
        module.forward = computation
        replaced += 1
    if replaced or stock:
        event(f"{kind} layers replaced", layers=replaced, stock=stock)


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@torch.inference_mode()
def replace_norms(model: nn.Module) -> None:
    """Replaces the computation of each RMS norm if its class computes what the kernel does, found by a trial."""
    adds_one: dict[type, bool | None] = {}
    replaced = 0
    module: Any  # its method is replaced
    for module in model.modules():
        if not type(module).__name__.endswith("RMSNorm") or (norm := norm_of(module)) is None:
            continue
        kind = type(module)
        if kind not in adds_one:
            adds_one[kind] = find_factor(module, norm)
        if (factor := adds_one[kind]) is not None:
            module.forward = norm._replace(adds_one=factor)
            replaced += 1
    if replaced:
        event("norms replaced", norms=replaced)


def norm_of(module: Any) -> RmsNorm | None:
    """Returns the norm of a module with one weight and one epsilon; None: it is something else."""
    weight = getattr(module, "weight", None)
    epsilons = [getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)]
    if len(epsilons) != 1 or len(list(module.parameters())) != 1 or not isinstance(weight, Tensor):
        return None
    if weight.dtype not in NORM_DTYPES or weight.device.type != "cpu" or weight.dim() != 1:
        return None
    return RmsNorm(weight.detach().contiguous(), epsilons[0], adds_one=False)


def find_factor(module: nn.Module, norm: RmsNorm) -> bool | None:
    """Returns whether the module multiplies by 1 + weight; None: it computes something else than the kernel.

    The trial has weights around 1, as 1 + weight is nearly the weight where weights are large.
    """
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 2, len(norm.weight), generator=drawn), torch.rand(norm.weight.shape, generator=drawn)
    x, weight = x.to(norm.weight.dtype), (weight + 0.5).to(norm.weight.dtype)
    trial = copy.deepcopy(module)
    trial.weight = nn.Parameter(weight, requires_grad=False)
    expected = trial(x)
    if expected.dtype != x.dtype or expected.shape != x.shape:
        return None
    for adds_one in (False, True):
        outputs = RmsNorm(weight, norm.epsilon, adds_one)(x)
        if torch.allclose(outputs, expected, rtol=NORM_TOLERANCES[x.dtype], atol=0.0):
            return adds_one
    return None


# ── attention layers ──────────────────────────────────────────────────────────────────────────────────────────────────
@torch.inference_mode()
def replace_attentions(model: nn.Module) -> None:
    """Replaces the computation of each attention layer that computes what the kernel does. Norms come first."""
    replace_forwards(model, PROJECTIONS, find_attention, "attention")


def find_attention(layer: Any) -> CpuAttention | None:
    """Returns the computation of a layer; None: the layer computes something else than the kernel."""
    weight, size = layer.q_proj.weight, getattr(layer, "head_dim", None)
    if weight.dtype not in CPU_DTYPES or not isinstance(size, int) or size % 2 or size > _native.MAX_ROTARY_SIZE:
        return None
    norms = tuple(getattr(getattr(layer, name, None), "forward", None) for name in ("q_norm", "k_norm"))
    if any(norm is not None and not isinstance(norm, RmsNorm) for norm in norms) or not _is_alike(norms, size):
        return None
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, TRIAL_TOKENS, weight.shape[1], generator=drawn).to(weight.dtype)
    cos, sin = torch.rand(2, 1, TRIAL_TOKENS, size, generator=drawn).to(weight.dtype)
    recorder = Recorder()
    try:
        expected, _ = layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None, paged=recorder)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        # A layer with other arguments or other embeddings, as those of a vision encoder.
        return None
    if len(recorder.calls) != 1:
        return None
    query, key, value, how = recorder.calls[0]
    attention = CpuAttention(layer, how, norms)  # type: ignore[arg-type]
    shape = KVCacheShape(key.shape[1], key.shape[2], value.shape[2])
    keys, values = KVCache({0: shape}, 1, TRIAL_TOKENS, weight.dtype, x.device).layers[0]
    queries = attention.project(x, (cos, sin)).write(torch.arange(TRIAL_TOKENS), keys, values)
    result = layer.o_proj(recorder.attended.reshape(1, TRIAL_TOKENS, -1))
    pairs = ((queries, query), (keys, key), (values, value), (result, expected))
    return attention if all(_is_near(output, stock) for output, stock in pairs) else None


class Recorder:
    """Replaces `PagedAttention` in a trial: keeps what a layer attends with, and returns random numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, AttentionStyle]] = []
        self.attended = torch.empty(0)

    def attend(self, _: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        self.calls.append((query, key, value, how))
        drawn = torch.randn(*query.shape[:2], value.shape[2], generator=torch.Generator().manual_seed(1))
        self.attended = drawn.to(query.dtype)
        return self.attended


def _is_alike(norms: tuple[Any, ...], size: int) -> bool:
    """Whether the norms of queries and keys are of one kind, and of single heads."""
    if norms[0] is None or norms[1] is None:
        return norms[0] is norms[1]
    kinds = {(norm.epsilon, norm.adds_one, len(norm.weight)) for norm in norms}
    return len(kinds) == 1 and len(norms[0].weight) == size


def _is_near(output: Tensor, expected: Tensor) -> bool:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return False
    tolerance = TOLERANCES[output.dtype]
    return torch.allclose(output, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


# ── decoder layers ────────────────────────────────────────────────────────────────────────────────────────────────────
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


def native_layers(decoder: nn.Module) -> list[tuple[nn.Module, CpuLayer]]:
    """Returns the layers of a decoder that are replaced, with their computations."""
    forwards = [(module, vars(module).get("forward")) for module in decoder.modules()]
    return [(module, layer) for module, layer in forwards if isinstance(layer, CpuLayer)]


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


# ── decoders ──────────────────────────────────────────────────────────────────────────────────────────────────────────
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
    kinds = {(layer.attention.dtype, layer.attention.size) for layer in layers}
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
