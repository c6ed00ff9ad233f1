"""RMS norms of a model on a CPU, by a native kernel instead of seven operations of torch each."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.logs import event
from penstock.engine.worker.cpu_tensors import kernel_threads, rows_of

DTYPES = (torch.float32, torch.bfloat16)
EPSILONS = ("variance_epsilon", "eps", "epsilon")  # transformers' names of one number
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}  # of each output


class RmsNorm(NamedTuple):
    """Computes the norm of tensors [..., size]."""

    weight: Tensor
    epsilon: float
    adds_one: bool

    @property
    def native(self) -> tuple[int, float, bool]:
        """The norm as an argument of native layers. The tensor keeps the address alive."""
        return self.weight.data_ptr(), self.epsilon, self.adds_one

    def __call__(self, x: Tensor) -> Tensor:
        size = self.weight.shape[0]
        rows = rows_of(x, size, self.weight.dtype)
        out = torch.empty(x.shape, dtype=x.dtype)
        addresses = (self.weight.data_ptr(), out.data_ptr())
        how: Any = (self.epsilon, self.adds_one, x.dtype == torch.bfloat16, kernel_threads())
        _native.rms_norm(rows.data_ptr(), rows.stride(0), rows.shape[0], size, *addresses, *how)
        return out


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
    if weight.dtype not in DTYPES or weight.device.type != "cpu" or weight.dim() != 1:
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
        if torch.allclose(outputs, expected, rtol=TOLERANCES[x.dtype], atol=0.0):
            return adds_one
    return None
