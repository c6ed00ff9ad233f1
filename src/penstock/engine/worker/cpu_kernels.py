"""Native kernels of a CPU, and what they read: rows by their addresses, and memory in large pages.

Products with packed weights, RMS norms, rotary embeddings and the choice of tokens are here; attention is in
`paged_attention`, and a call that computes whole layers in `model`. The number of the kernels' threads is not always
torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.protocol.columns import Index
from penstock.engine.worker.grammars import TokenMasks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of glibc's malloc.h
MAX_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
KEPT_NBYTES = 256 << 20  # free memory at the end of the heap
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


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Product:
    """Computes a packed layer for tensors [..., inputs]."""

    def __init__(self, packed: _native.PackedLinear, dtype: torch.dtype) -> None:
        self.packed = packed
        self.dtype = dtype
        self._inputs = packed.inputs
        self._width = packed.results

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`added` [rows, outputs]: is added to x W^T, before a gate."""
        rows = rows_of(x, self._inputs, self.dtype)
        count = rows.shape[0]
        out = torch.empty(*x.shape[:-1], self._width, dtype=self.dtype)
        if count:
            addend = (0, 0) if added is None else (added.data_ptr(), added.stride(0))
            arguments = (rows.data_ptr(), rows.stride(0), count, out.data_ptr(), self._width)
            self.packed.compute(*arguments, kernel_threads(), *addend)
        return out


class GatedMlp(NamedTuple):
    """Computes a gated MLP. `product` is that of the gate and the up projection."""

    product: Callable[[Tensor], Tensor]
    mlp: Any

    def __call__(self, x: Tensor) -> Any:
        return self.mlp.down_proj(self.product(x))


class SharedProduct:
    """Computes several layers of one input at the first call for this input. The other layers take their slices."""

    def __init__(self, product: Product) -> None:
        self.product: Callable[[Tensor], Tensor] = product
        self._x: Tensor | None = None
        self._out: Tensor | None = None
        self._left = 0  # slices that have not been taken
        self.slices = 0

    @staticmethod
    def of(layers: Sequence[nn.Module]) -> Product | None:
        """Returns the product with all results of these layers in this order, and no more; None: there is none."""
        slices = [layer.forward for layer in layers if isinstance(layer.forward, SharedSlice)]
        if len(slices) < len(layers) or len({part.shared for part in slices}) != 1:
            return None
        product = slices[0].shared.product
        ends = [part.end for part in slices]
        assert isinstance(product, Product), "the model has no adapters yet"
        return product if [0, *ends] == [*(part.begin for part in slices), product.packed.results] else None

    def take(self, x: Tensor, begin: int, end: int) -> Tensor:
        if x is not self._x or self._out is None:
            self._x, self._out, self._left = x, self.product(x), self.slices
        out = self._out[..., begin:end]
        self._left -= 1
        if not self._left:
            self._x = self._out = None
        return out


class SharedSlice:
    """Computes one layer of a `SharedProduct`."""

    def __init__(self, shared: SharedProduct, begin: int, end: int) -> None:
        self.shared, self.begin, self.end = shared, begin, end
        shared.slices += 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.shared.take(x, self.begin, self.end)


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


# ── rotary embeddings ─────────────────────────────────────────────────────────────────────────────────────────────────
def can_rotate(hidden_states: Tensor, position_embeddings: Any, size: int, dtype: torch.dtype) -> bool:
    """Whether kernels take these embeddings of positions, for heads of this size and type."""
    if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
        return False
    shape = (1, hidden_states.shape[1], size)
    return hidden_states.dim() == 3 and all(each.shape == shape and each.dtype == dtype for each in position_embeddings)


class Projected(NamedTuple):
    """Queries, keys and values of a step, as a layer's projections give them."""

    query: Tensor  # [tokens, heads * size]
    key: Tensor
    value: Tensor
    cos: Tensor  # [tokens, size]
    sin: Tensor
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Writes keys and values to the places of a layer's cache, and returns the queries [tokens, heads, size]."""
        tokens, size = self.cos.shape
        queries = torch.empty(tokens, self.query.shape[1] // size, size, dtype=self.query.dtype)
        norm = self.query_norm
        _native.rotary(
            _heads(self.query, queries.shape[1], self.query_norm),
            _heads(self.key, keys.shape[1], self.key_norm),
            _heads(self.value, keys.shape[1], None),
            (self.cos.data_ptr(), self.sin.data_ptr()),
            0.0 if norm is None else norm.epsilon,
            norm is not None and norm.adds_one,
            (size, values.shape[2]),
            tokens,
            places.data_ptr(),
            (queries.data_ptr(), keys.data_ptr(), values.data_ptr()),
            queries.dtype == torch.bfloat16,
            kernel_threads(),
        )
        return queries


def _heads(projected: Tensor, count: int, norm: RmsNorm | None) -> tuple[int, int, int, int]:
    return projected.data_ptr(), projected.stride(0), count, 0 if norm is None else norm.weight.data_ptr()


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
