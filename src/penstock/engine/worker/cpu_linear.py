"""Linear layers of a model on a CPU, with weights packed in the order in which native kernels read them.

The modules stay transformers' own. Each `nn.Linear` in bfloat16 computes by the kernel; layers that read the same input
(queries, keys and values; gate and up) are one product.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.logs import event

PANEL = 16  # outputs of a panel of packed weights
ALIGNED = 32  # elements: 64 bytes
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of a module with the same input
TOLERANCE = 0.02  # of the largest output: rounding of bfloat16 in between, which the fused layer leaves out


class LinearGroup(NamedTuple):
    """Layers that read the same input, and are computed as one product."""

    layers: tuple[nn.Linear, ...]
    gated: nn.Module | None = None  # the MLP whose gate and up projection these are, if the kernel applies the gate

    @property
    def inputs(self) -> int:
        return self.layers[0].in_features

    @property
    def panels(self) -> list[int]:
        """The number of panels of each layer."""
        return [-(-layer.weight.shape[0] // PANEL) for layer in self.layers]

    @property
    def size(self) -> int:
        """Elements of the packed weights."""
        return int(_native.packed_size(self.inputs, sum(self.panels) * PANEL))


def pack_linears(model: nn.Module) -> None:
    """Packs all linear layers in bfloat16 of a model on a CPU. Their `weight` keeps its shape and loses its memory."""
    groups = list(find_groups(model))
    if not groups:
        return
    buffer = huge_pages(sum(round_up(group.size) for group in groups))
    sources = [layer.weight for group in groups for layer in group.layers]
    used = 0
    for group in groups:
        pack_group(group, buffer[used : used + group.size])
        used += round_up(group.size)
    forget(sources, model)
    fused = sum(len(group.layers) > 1 for group in groups)
    layers = sum(len(group.layers) for group in groups)
    event("linears packed", layers=layers, fused=fused, kernel=_native.linear_kernel(), mib=buffer.nbytes >> 20)


def forget(sources: Sequence[Tensor], model: nn.Module) -> None:
    """Unmaps the pages of packed weights, but those that the model still reads: an embedding may be tied to a layer."""
    read = [range_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
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
    is_gate_right: dict[type, bool] = {}
    for module in model.modules():
        for names in TOGETHER:
            layers = tuple(getattr(module, name, None) for name in names)
            if not all(is_packable(layer) for layer in layers) or len({layer.in_features for layer in layers}) > 1:
                continue
            gated = None
            if len(names) == 2:
                if type(module) not in is_gate_right:
                    is_gate_right[type(module)] = computes_gate(module)
                gated = module if is_gate_right[type(module)] else None
            if gated is None and any(layer.weight.shape[0] % PANEL for layer in layers):
                continue
            grouped.update(id(layer) for layer in layers)
            yield LinearGroup(layers, gated)
    for module in model.modules():
        if is_packable(module) and id(module) not in grouped:
            yield LinearGroup((module,))


def is_packable(module: Any) -> bool:
    """Whether a module is a linear layer in bfloat16. A subclass may compute something else."""
    return type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu"


@torch.inference_mode()
def computes_gate(mlp: Any) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x)), found by a trial on random input."""
    layers = [mlp.gate_proj, mlp.up_proj, getattr(mlp, "down_proj", None)]
    if not is_packable(layers[2]) or not isinstance(getattr(mlp, "act_fn", None), (nn.SiLU, _silu_of_transformers())):
        return False
    if any(layer.bias is not None for layer in layers[:2]) or layers[0].weight.shape[0] % PANEL:
        return False
    x = torch.randn(1, 4, layers[0].in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    gate, up = layers[0](x).float(), layers[1](x).float()
    expected = layers[2]((nn.functional.silu(gate) * up).to(torch.bfloat16)).float()
    # without the hooks, which add up what all ranks computed
    found = type(mlp).forward(mlp, x).float() if not layers[2]._forward_hooks else expected
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def pack_group(group: LinearGroup, buffer: npt.NDArray[np.uint16]) -> None:
    is_gated = group.gated is not None
    bias = bias_of(group.layers)
    packed = _native.PackedLinear(group.inputs, sum(group.panels) * PANEL, buffer, bias, is_gated)
    first = 0
    for layer, panels in zip(group.layers, group.panels, strict=True):
        rows = layer.weight.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
        packed.pack(rows, first, 2 if is_gated else 1)
        first += 1 if is_gated else panels
        shape = layer.weight.shape
        layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
    if group.gated is not None:
        mlp: Any = group.gated
        compute_gate = Product(packed, packed.results)
        mlp.forward = lambda x: mlp.down_proj(compute_gate(x))
        return
    outputs = [layer.weight.shape[0] for layer in group.layers]
    product = Product(packed, sum(outputs))
    if len(outputs) == 1:
        group.layers[0].forward = product  # type: ignore[method-assign]
        return
    shared = SharedProduct(product)
    for layer, end in zip(group.layers, np.cumsum(outputs).tolist(), strict=True):
        layer.forward = shared.slice(end - layer.weight.shape[0], end)  # type: ignore[method-assign]


def bias_of(layers: Sequence[nn.Linear]) -> npt.NDArray[np.float32] | None:
    """Returns the biases of all outputs of all panels; None: there is no bias."""
    if all(layer.bias is None for layer in layers):
        return None
    padded = []
    for layer in layers:
        outputs = layer.weight.shape[0]
        bias = torch.zeros(-(-outputs // PANEL) * PANEL)
        if layer.bias is not None:
            bias[:outputs] = layer.bias.detach().float()
        padded.append(bias)
    return torch.cat(padded).numpy()


class Product:
    """Computes a packed layer for tensors [..., inputs]."""

    def __init__(self, packed: _native.PackedLinear, outputs: int) -> None:
        self._packed = packed
        self._inputs = packed.inputs
        self._width = packed.results
        self._outputs = outputs

    def __call__(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor or x.dtype != torch.bfloat16 or x.shape[-1] != self._inputs:
            kind = type(x).__name__
            raise ValueError(
                f"expected a Tensor [..., {self._inputs}] of bfloat16, got a {kind} {list(x.shape)} of {x.dtype}"
            )
        rows = x.reshape(-1, self._inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        count = rows.shape[0]
        out = torch.empty(*x.shape[:-1], self._width, dtype=torch.bfloat16)
        if count:
            arguments = (rows.data_ptr(), rows.stride(0), count, out.data_ptr(), self._width)
            self._packed.compute(*arguments, torch.get_num_threads())
        return out if self._width == self._outputs else out[..., : self._outputs]


class SharedProduct:
    """Computes several layers of one input at the first call for this input. The other layers take their slices."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._x: Tensor | None = None
        self._out: Tensor | None = None
        self._left = 0  # slices that have not been taken
        self._slices = 0

    def slice(self, begin: int, end: int) -> Callable[[Tensor], Tensor]:
        self._slices += 1

        def forward(x: Tensor) -> Tensor:
            if x is not self._x or self._out is None:
                self._x, self._out, self._left = x, self._product(x), self._slices
            out = self._out[..., begin:end]
            self._left -= 1
            if not self._left:
                self._x = self._out = None
            return out

        return forward


def round_up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def huge_pages(size: int) -> npt.NDArray[np.uint16]:
    """Returns zeros in large pages, where the kernel has any: with small ones a decode step takes 1.1 to 1.6 times."""
    pages = mmap.mmap(-1, size * 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, that knows of one size only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint16)


def _silu_of_transformers() -> type:
    from transformers.activations import SiLUActivation

    kind: type = SiLUActivation
    return kind
