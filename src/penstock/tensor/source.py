"""The source of a tensor: any object with numbers in readable memory, in a common form, copied once.

The store decides where the copy goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import UnsupportedTensor
from penstock.tensor.kinds import (
    Kind,
    imported,
    kind_of,
    kind_of_numpy,
    nbytes_of,
    needed_torch,
    torch_dtype,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

FEW = 4  # sizes of a last dimension for which as many copies with a step are faster than NumPy's one: 2 to 11 times
IN_HOST_MEMORY = (1, 3, 11)  # of DLPack's devices: CPU, and the pinned memory of CUDA and ROCm


REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError)  # what exporters are seen to raise


class Source(NamedTuple):
    """An array of any library. `write` copies the numbers, C-contiguous."""

    kind: Kind
    shape: tuple[int, ...]
    nbytes: int
    array: Any  # of NumPy, in a dtype that copies as the kind's bytes; or of torch, where only torch can copy it

    def write(self, buffer: Buffer, offset: int = 0) -> None:
        """Copies once, without the GIL if the copy is large. Raises ValueError if `buffer` is too small."""
        if not self.nbytes:
            return
        kind, array = self.kind, self.array
        is_numpy = isinstance(array, np.ndarray)
        dtype = array.dtype.newbyteorder("=") if is_numpy else kind.numpy or kind.bits
        at = np.frombuffer(memoryview(buffer), dtype, self.nbytes // kind.itemsize, offset).reshape(self.shape)
        if is_numpy:
            _copy_by_numpy(at, array)
        else:
            _copy_by_torch(at, array, kind)

    def tobytes(self) -> bytes:
        if isinstance(self.array, np.ndarray) and self.array.dtype.isnative:
            return self.array.tobytes()
        copy = bytearray(self.nbytes)
        self.write(copy)
        return bytes(copy)


def source(array: Any) -> Source:
    """Looks at an array or tensor without copying it. Raises UnsupportedTensor, which says what to do instead."""
    torch = imported("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _of_torch(torch, array)
    if isinstance(array, (np.ndarray, np.generic)):
        return _of_numpy(array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        raise _elsewhere(f"a {type(array).__name__}", "its device")
    try:
        view = memoryview(array)
    except TypeError:
        raise UnsupportedTensor(
            "expected an array of NumPy or torch, or an object with __dlpack__ or the buffer protocol, got a "
            f"{type(array).__name__}"
        ) from None
    try:
        return _of_numpy(np.asarray(view.cast("B") if view.format == "c" else view))
    except (ValueError, RuntimeError, NotImplementedError) as error:  # a format that NumPy does not know
        raise UnsupportedTensor(f"a {type(array).__name__} of format {view.format!r}: {error}") from None


def _of_numpy(array: Any) -> Source:
    masked = imported("numpy.ma")  # NumPy imports it when it is first named, and takes 50 ms for that
    if masked is not None and isinstance(array, getattr(masked, "MaskedArray", ())):
        raise UnsupportedTensor("expected an array without a mask, got a masked array: send .data and .mask")
    numbers = np.asarray(array)
    kind = kind_of_numpy(numbers.dtype)
    if kind.numpy is None:
        numbers = numbers.view(kind.bits.newbyteorder(numbers.dtype.byteorder))
    return Source(kind, numbers.shape, nbytes_of(kind, numbers.shape), numbers)


def _of_torch(torch: Any, tensor: Any) -> Source:
    what = f"a {tensor.dtype} {'tensor' if type(tensor) is torch.Tensor else type(tensor).__name__}"
    if tensor.is_quantized:
        kind_of(tensor.dtype)  # says what to do with it
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UnsupportedTensor(
            f"expected a dense tensor, got {what} of layout {tensor.layout}: send .to_dense(), or its parts"
        )
    if tensor.device.type != "cpu":
        raise _elsewhere(what, str(tensor.device))
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedTensor(f"expected a tensor with numbers, got {what}, which wraps other tensors: send these")
    if tensor.requires_grad:
        raise UnsupportedTensor(
            f"expected a tensor without gradient, got {what} that requires grad: send .detach() of it"
        )
    kind = kind_of(tensor.dtype)
    shape = tuple(tensor.shape)
    nbytes = nbytes_of(kind, shape)
    if nbytes and not tensor.untyped_storage().nbytes():
        raise UnsupportedTensor(f"{what} has lost its storage")
    numbers: Any = tensor
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        numbers = (tensor if kind.numpy is not None else _as_bits(torch, tensor, kind)).numpy()
    return Source(kind, shape, nbytes, numbers)


def _of_dlpack(array: Any) -> Source:
    what = f"a {type(array).__name__}"
    try:
        kind, index = array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else (1, 0)
        if int(kind) not in IN_HOST_MEMORY:
            raise _elsewhere(what, f"device {int(kind)}:{int(index)} of DLPack")
        try:
            numbers = np.from_dlpack(array)
        except REFUSALS:  # torch has words for more kinds of numbers
            torch = needed_torch()
            return _of_torch(torch, torch.from_dlpack(array))
        return _of_numpy(numbers)
    except UnsupportedTensor:
        raise
    except ImportError:
        raise UnsupportedTensor(
            f"NumPy has no dtype for the numbers of {what}: install torch, which may have one"
        ) from None
    except REFUSALS as error:
        raise UnsupportedTensor(f"{what} does not show its numbers: {error}") from None


def _elsewhere(what: str, device: str) -> UnsupportedTensor:
    return UnsupportedTensor(
        f"{what} lies on {device}, not in host memory: penstock.tensor.cuda sends device tensors, .cpu() copies them"
    )


def _as_bits(torch: Any, tensor: Any, kind: Kind) -> Any:
    return tensor.view(getattr(torch, kind.bits.name))


def _copy_by_numpy(at: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> None:
    # Planes that become pixels (CHW seen as HWC): NumPy begins anew for each pixel. The other way is fast.
    if array.ndim > 1 and 1 < array.shape[-1] <= FEW and abs(array.strides[-1]) > abs(array.strides[-2]) > 0:
        for index in range(array.shape[-1]):
            np.copyto(at[..., index], array[..., index])
    else:
        np.copyto(at, array)


def _copy_by_torch(at: np.ndarray[Any, Any], tensor: Any, kind: Kind) -> None:
    torch = imported("torch")
    target = torch.from_numpy(at)
    if tensor.is_conj() or tensor.is_neg():  # these are numbers until they are copied
        target.view(torch_dtype(kind)).copy_(tensor)
    elif kind.numpy is None:
        target.copy_(_as_bits(torch, tensor, kind))
    else:
        target.copy_(tensor)
