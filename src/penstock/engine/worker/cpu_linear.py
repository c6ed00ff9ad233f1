"""Linear layers of a model on a CPU, with weights packed in the order in which native kernels read them.

The modules stay transformers' own. Each `nn.Linear` in bfloat16 or float32 computes by the kernel; layers that read the
same input (queries, keys and values; gate and up) are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.logs import event
from penstock.engine.worker.cpu_kernels import (
    GatedMlp,
    Product,
    SharedProduct,
    SharedSlice,
    huge_pages,
    kernel_threads,
)

PANEL = 16  # outputs of a panel of packed weights
ALIGNED = 32  # elements: 64 bytes
FLOAT32_KERNELS = ("amx", "avx512_bf16", "avx512", "avx2")  # faster than torch in float32, but for AVX2 with 256 rows
# Layers of a module with the same input.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
MLP = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}  # layers of a gated MLP, their sizes in a trial
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


class LinearGroup(NamedTuple):
    """Layers that read the same input, and are computed as one product."""

    layers: tuple[Any, ...]  # of nn.Linear
    gated: nn.Module | None = None  # the MLP of a gate and an up projection, if the kernel applies the gate
    gate: str = "silu"  # key of GATES

    @property
    def inputs(self) -> int:
        return int(self.layers[0].weight.shape[1])  # of this rank; `in_features` is that of all ranks

    @property
    def outputs(self) -> list[int]:
        return [layer.weight.shape[0] for layer in self.layers]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.layers[0].weight.dtype
        return dtype

    @property
    def size(self) -> int:
        """Elements of 2 bytes of the packed weights."""
        return int(_native.packed_size(self.inputs, sum(self.outputs), self.dtype == torch.float32))


def pack_linears(
    model: nn.Module,
    groups: Sequence[LinearGroup] | None = None,
    buffer: npt.NDArray[np.uint16] | None = None,
    claim: Callable[[int, int], None] | None = None,
    *,
    is_packed: bool = False,
) -> None:
    """Packs linear layers of a model on a CPU: all in bfloat16 or float32, or those of `groups`. Their `weight` loses
    its memory. `buffer`: of `packed_nbytes`; None: memory of this process. `claim`: called before a part of the buffer
    is written. `is_packed`: the buffer has the weights."""
    groups = list(find_groups(model)) if groups is None else groups
    if not groups:
        return
    if buffer is None:  # large pages: with small ones a decode step takes 1.1 to 1.6 times as long
        buffer = np.frombuffer(huge_pages(packed_nbytes(groups)), np.uint16)
    held = [range_of(tensor) for tensor in kept_tensors(model, groups)]
    unpacked = [[layer.weight for layer in group.layers] for group in groups]
    used = 0
    for number, group in enumerate(groups):
        end = used + group.size
        if claim is not None:
            claim(used, end)
        pack_group(group, buffer[used:end], is_packed=is_packed)
        if not is_packed:
            later = [range_of(weight) for weights in unpacked[number + 1 :] for weight in weights]
            forget(unpacked[number], [*held, *later])
        unpacked[number] = []
        used = round_up(end)
    fused = sum(len(group.layers) > 1 for group in groups)
    layers = sum(len(group.layers) for group in groups)
    name = "packed linears mapped" if is_packed else "linears packed"
    event(name, layers=layers, fused=fused, kernel=_native.linear_kernel(), mib=buffer.nbytes >> 20)


def packed_nbytes(groups: Sequence[LinearGroup]) -> int:
    return 2 * sum(round_up(group.size) for group in groups)


def weight_names(model: nn.Module, groups: Sequence[LinearGroup]) -> set[str]:
    """Returns the names of the weights that are packed."""
    packed = {id(layer) for group in groups for layer in group.layers}
    modules = model.named_modules(remove_duplicate=False)
    return {f"{name}.weight" if name else "weight" for name, module in modules if id(module) in packed}


def is_packed(decoder: nn.Module) -> bool:
    """Whether native kernels compute all products with weights of a decoder."""
    return all(
        weight.is_meta or weight.dim() < 2 or isinstance(module, nn.Embedding)
        for module in decoder.modules()
        for weight in module.parameters(recurse=False)
    )


def kept_tensors(model: nn.Module, groups: Sequence[LinearGroup]) -> Iterator[Tensor]:
    """Yields the tensors that the model reads beside packed weights: an embedding may be tied to a layer."""
    packed = {id(layer) for group in groups for layer in group.layers}
    for module in model.modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        yield from (
            tensor for name, tensor in own if not tensor.is_meta and not (name == "weight" and id(module) in packed)
        )


def forget(sources: Sequence[Tensor], read: Sequence[tuple[int, int]]) -> None:
    """Unmaps the pages of packed weights, but those with addresses that are still read."""
    for source in sources:
        begin, end = range_of(source)
        if source.is_contiguous() and not any(first < end and begin < last for first, last in read):
            _native.forget_pages(begin, end - begin)


def range_of(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    if not tensor.is_contiguous():
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def find_groups(model: nn.Module) -> Iterator[LinearGroup]:
    """Yields each packable layer once."""
    grouped: set[int] = set()
    gates: dict[tuple[type, str], str | None] = {}  # of an MLP and its activation
    for module in list(model.modules()):
        for names in TOGETHER:
            layers = tuple(getattr(module, name, None) for name in names)
            if not can_group(layers) or any(id(layer) in grouped for layer in layers):
                continue
            gate = None
            if may_gate(module):
                kind = type(module), repr(module.act_fn)
                if kind not in gates:
                    gates[kind] = find_gate(module)
                gate = gates[kind]
            grouped.update(id(layer) for layer in layers)
            yield LinearGroup(layers) if gate is None else LinearGroup(layers, module, gate)
    for module in model.modules():
        if is_packable(module) and id(module) not in grouped:
            yield LinearGroup((module,))


def is_packable(module: Any) -> bool:
    """Whether a module is a linear layer for the kernel in use. A subclass may compute something else."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    is_fast = weight.dtype == torch.float32 and _native.linear_kernel() in FLOAT32_KERNELS
    is_of_cpu = weight.device.type in ("cpu", "meta")  # meta: not loaded yet
    return (is_fast or weight.dtype == torch.bfloat16) and is_of_cpu and weight.numel() > 0


def can_group(layers: Sequence[Any]) -> bool:
    """Whether layers can be one product: each layer but the last one of a product fills its panels."""
    if not all(is_packable(layer) for layer in layers) or len(set(layers)) < len(layers):
        return False
    return len({(layer.weight.shape[1], layer.weight.dtype) for layer in layers}) == 1 and all(
        layer.weight.shape[0] % PANEL == 0 for layer in layers
    )


def may_gate(module: Any) -> bool:
    """Whether the layers of a module are those of a gated MLP that the kernel can compute."""
    if dict(module.named_children()).keys() != {*MLP, "act_fn"} or "forward" in vars(module):
        return False
    gate, up, down = (getattr(module, name) for name in MLP)
    if list(module.act_fn.parameters()) or not is_packable(down):
        return False
    return gate.bias is None and up.bias is None and gate.weight.shape == up.weight.shape


@torch.inference_mode()
def find_gate(mlp: Any) -> str | None:
    """Returns the gate with which a module computes down(gate(x) * up(x)), found by a trial with small layers in place
    of the module's own. None: the module computes something else."""
    layers = {name: getattr(mlp, name) for name in MLP}
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, MLP["gate_proj"][0], generator=drawn)
    try:
        for name, (inputs, outputs) in MLP.items():
            layer = nn.Linear(inputs, outputs, bias=False, device="meta")
            layer.weight = nn.Parameter(torch.randn(outputs, inputs, generator=drawn))
            setattr(mlp, name, layer)
        result = type(mlp).forward(mlp, x)
        for name, gate in GATES.items():
            if torch.allclose(result, mlp.down_proj(gate(mlp.gate_proj(x)) * mlp.up_proj(x)), atol=1e-4):
                return name
        return None
    finally:
        for name, layer in layers.items():
            setattr(mlp, name, layer)


def pack_group(group: LinearGroup, buffer: npt.NDArray[np.uint16], *, is_packed: bool = False) -> None:
    is_gated = group.gated is not None
    outputs, dtype = group.outputs, group.dtype
    sizes = group.inputs, sum(outputs)
    kinds = is_gated, dtype == torch.float32, group.gate == "gelu"
    packed = _native.PackedLinear(*sizes, buffer, bias_of(group.layers), *kinds)
    first = 0
    for layer in group.layers:
        shape = layer.weight.shape
        if not is_packed:
            rows = layer.weight.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
            packed.pack(rows, first, 2 if is_gated else 1, kernel_threads())
        first += 1 if is_gated else -(-shape[0] // PANEL)
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    product = Product(packed, dtype)
    if group.gated is not None:
        mlp: Any = group.gated
        mlp.forward = GatedMlp(product, mlp)
        return
    if len(outputs) == 1:
        group.layers[0].forward = product
        return
    shared = SharedProduct(product)
    for layer, size, end in zip(group.layers, outputs, np.cumsum(outputs).tolist(), strict=True):
        layer.forward = SharedSlice(shared, end - size, end)


def bias_of(layers: Sequence[Any]) -> npt.NDArray[np.float32] | None:
    """Returns the biases of all outputs; None: there is no bias."""
    if all(layer.bias is None for layer in layers):
        return None
    biases = [torch.zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias.detach() for layer in layers]
    return torch.cat([bias.float() for bias in biases]).numpy()


def round_up(size: int, unit: int = ALIGNED) -> int:
    return -(-size // unit) * unit
