"""A message of vLLM as one record: a section of bytes, a pickle, and large buffers beside it. No import of vllm.

    u32 number of buffers, u32 bytes of the section, u64 bytes of the pickle
    the section: a step as what is new (steps.py); mostly empty
    the pickle, protocol 5; empty where the section says all
    for each buffer u64 bytes, u64 flags
    the buffers, each at a multiple of 64 bytes from the record's begin

vLLM promises that what is received may be written, and belongs to its receiver. So a buffer that its sender could
write is copied for each receiver; a buffer that was read-only there is shown where it lies. Where views are asked for,
all are.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.errors import DecodeError
from penstock.tensor.kinds import needed_torch

if TYPE_CHECKING:
    from typing_extensions import Buffer as Exporter

HEAD = struct.Struct("<IIQ")
EACH = struct.Struct("<QQ")
WRITABLE = 1  # flag: the sender could write the buffer
ALIGN = 64
PADDING = bytes(ALIGN)
BESIDE_NBYTES = 1 << 20  # of a buffer that lies beside the pickle; vLLM's own limit

# Which buffers are shown where they lie; copies of all others belong to the receiver.
Views = Literal["all", "readonly", "none"]
Reducers = Mapping[type, Callable[[Any], Any]]


def encode(body: Any, *, section: bytes = b"", reducers: Reducers | None = None) -> list[Any]:
    """Returns the parts of a record, which refer to the buffers of the body and do not copy them.

    With a section, a body of None is not pickled. `reducers` are like those of copyreg, by type.
    """
    file = io.BytesIO()
    file.write(PADDING[: HEAD.size])
    file.write(section)
    buffers: list[memoryview] = []

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BESIDE_NBYTES:
            return True
        buffers.append(raw)
        return False

    if body is not None or not section:
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=is_inside)
        if reducers:
            pickler.dispatch_table = {**copyreg.dispatch_table, **reducers}
        pickler.dump(body)
    pickled_nbytes = file.tell() - HEAD.size - len(section)
    for buffer in buffers:
        file.write(EACH.pack(buffer.nbytes, 0 if buffer.readonly else WRITABLE))
    first = file.getbuffer()
    HEAD.pack_into(first, 0, len(buffers), len(section), pickled_nbytes)
    parts: list[Any] = [first]
    nbytes = first.nbytes
    for buffer in buffers:
        padding = PADDING[: -nbytes % ALIGN]
        parts += [padding, buffer]
        nbytes += len(padding) + buffer.nbytes
    return parts


def decode(record: Exporter, views: Views = "none") -> tuple[bytes, Any]:
    """Returns the section and the body of a record; the body is None where nothing is pickled.

    Raises:
        DecodeError: the record is cut off or longer than its parts, or its pickle cannot be loaded.
    """
    whole = memoryview(record)
    if whole.nbytes < HEAD.size:
        raise DecodeError(f"a record of {whole.nbytes} bytes has no room for its head of {HEAD.size}")
    count, section_nbytes, pickled_nbytes = HEAD.unpack_from(whole)
    table = HEAD.size + section_nbytes + pickled_nbytes
    position = table + count * EACH.size
    if position > whole.nbytes:
        raise DecodeError(
            f"a record of {whole.nbytes:,} bytes is cut off: its head names a section of {section_nbytes:,}, a pickle "
            f"of {pickled_nbytes:,} and {count:,} buffers"
        )
    buffers: list[memoryview] = []
    for index in range(count):
        nbytes, flags = EACH.unpack_from(whole, table + index * EACH.size)
        position += -position % ALIGN
        if position + nbytes > whole.nbytes:
            raise DecodeError(
                f"a record of {whole.nbytes:,} bytes is cut off: buffer {index} of {nbytes:,} begins at {position:,}"
            )
        part = whole[position : position + nbytes]
        is_writable = bool(flags & WRITABLE)
        is_shown = views == "all" or (views == "readonly" and not is_writable)
        buffers.append(part.toreadonly() if is_shown else _copied(part, is_writable))
        position += nbytes
    if position != whole.nbytes:
        raise DecodeError(f"a record of {whole.nbytes:,} bytes is longer than its parts, which end at {position:,}")
    section = bytes(whole[HEAD.size : HEAD.size + section_nbytes])
    if not pickled_nbytes and section_nbytes:
        return section, None
    try:
        return section, pickle.loads(whole[HEAD.size + section_nbytes : table], buffers=buffers)
    except Exception as error:
        raise DecodeError(
            f"the pickle of {pickled_nbytes:,} bytes cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _copied(part: memoryview, is_writable: bool) -> memoryview:
    copy = np.empty(part.nbytes, np.uint8)
    np.copyto(copy, np.frombuffer(part, np.uint8))  # without the interpreter's lock, as bytearray(part) is not
    return copy.data if is_writable else copy.data.toreadonly()


# ── tensors ──
def tensor_reducers() -> Reducers:
    """Returns the reducer that puts a tensor's numbers into a buffer; torch's own copies them into the pickle."""
    return {needed_torch().Tensor: reduce_tensor}


def reduce_tensor(tensor: Any) -> Any:
    torch = needed_torch()

    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    numbers = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return rebuild_tensor, (pickle.PickleBuffer(numbers), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def rebuild_tensor(buffer: Exporter, shape: tuple[int, ...], dtype: str) -> Any:
    """Returns the tensor over this buffer. To write to a view of shared memory is a SIGSEGV."""
    torch = needed_torch()

    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    numbers = np.frombuffer(memoryview(buffer), np.uint8)
    if numbers.flags.writeable:
        tensor = torch.from_numpy(numbers)
    else:
        try:
            tensor = torch.from_dlpack(numbers)
        except BufferError:  # NumPy before 2.1 cannot say "read-only" to another library
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tensor = torch.from_numpy(numbers)
    return tensor.view(getattr(torch, dtype)).view(shape)
