"""Native kernels of a CPU, and what they read: rows by their addresses, and memory in large pages.

RMS norms and the choice of tokens are computed here; `cpu_linear`, `cpu_attention` and `cpu_decoder` have the other
kernels. The number of the kernels' threads is not always torch's.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import Index
from penstock.engine.worker.grammars import TokenMasks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of glibc's malloc.h
MAX_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
KEPT_NBYTES = 256 << 20  # free memory at the end of the heap
NORM_DTYPES = (torch.float32, torch.bfloat16)
EPSILONS = ("variance_epsilon", "eps", "epsilon")  # transformers' names of one number
NORM_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}  # of each output
NO_MASKS = TokenMasks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), {})
Floats = npt.NDArray[np.float32]
_kernel_threads = 1


def set_threads(count: int, of_torch: int | None = None) -> None:
    """Sets the number of threads of native kernels, and that of torch; None: the same."""
    global _kernel_threads
    _kernel_threads = count
    if torch.get_num_threads() != (of_torch or count):
        torch.set_num_threads(of_torch or count)


def kernel_threads() -> int:
    """Returns the number of threads of native kernels."""
    return _kernel_threads


def rows_of(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor [..., size] as rows of contiguous elements. Raises ValueError for any other tensor."""
    is_plain = type(x) is Tensor and x.device.type == "cpu"  # of another tensor, the address is none of ours
    if not is_plain or x.dtype != dtype or x.shape[-1] != size:
        kind = f"{type(x).__name__} {list(x.shape)} of {x.dtype} on {x.device}"
        raise ValueError(f"expected a Tensor [..., {size}] of {str(dtype).removeprefix('torch.')} on cpu, got a {kind}")
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()


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


def huge_pages(nbytes: int) -> mmap.mmap:
    """Returns memory of zeros, allocated when it is written to, in large pages where the kernel has any."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, that knows of one size only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def keep_freed_memory() -> None:
    """Keeps the memory of freed tensors for the next ones, where the C library is glibc: so a step has no fresh pages.

    Otherwise glibc unmaps each large tensor, and the end of its heap: a step of 2,048 tokens had 27,000 page faults.
    """
    with contextlib.suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        set_option(M_TRIM_THRESHOLD, KEPT_NBYTES)


# ── RMS norms ─────────────────────────────────────────────────────────────────────────────────────────────────────────
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


# ── choice of tokens ──────────────────────────────────────────────────────────────────────────────────────────────────
class SamplingRows(NamedTuple):
    """The rows of a batch: how each of them chooses."""

    temperatures: Floats  # 0: the likeliest id
    top_ks: Index
    top_ps: Floats
    min_ps: Floats

    @classmethod
    def of(cls, slots: Index, temperatures: Floats, top_ks: Index, top_ps: Floats, min_ps: Floats) -> SamplingRows:
        return cls(temperatures[slots], top_ks[slots], top_ps[slots], min_ps[slots])

    def choose(self, logits: Tensor, masks: TokenMasks | None, draws: Floats) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids (int32), whether the logits of a row are not finite, and whether its mask leaves no id. Masks are
        written into the logits."""
        vocabulary, count = logits.shape[1], draws.size
        rows = rows_of(logits.float(), vocabulary, torch.float32)
        if rows.shape[0] != count:
            raise ValueError(f"expected logits of {count} rows, got {rows.shape[0]}")
        ids, results = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.uint8)
        masks = NO_MASKS if masks is None else masks
        _native.choose_tokens(
            rows.data_ptr(), rows.stride(0), vocabulary, *self, draws, masks.rows, masks.bits,
            ids.numpy(), results.numpy(), kernel_threads(),
        )  # fmt: skip
        return ids, results != 0, results == 2
