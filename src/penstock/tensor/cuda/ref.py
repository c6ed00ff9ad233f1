"""References to device tensors: plain data, ordinary fields of any message. `Reference` is the type for both kinds.

References own nothing. Fields are checked at construction and at receipt; the pool checks the place in memory when a
reference is opened, before any memory is mapped or read.
"""

from __future__ import annotations

import msgspec

from penstock.memory import Ref
from penstock.tensor.handle import Handle
from penstock.tensor.kinds import KIND_OF_CODE, Kind, nbytes_of

UUID_NBYTES = 16


def _require_uuid(uuid: bytes) -> None:
    if type(uuid) is not bytes or len(uuid) != UUID_NBYTES:
        raise ValueError(f"expected the uuid of a device, {UUID_NBYTES} bytes, got {uuid!r:.80}")


class CudaRef(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A tensor that lies in a pool of device memory, C-contiguous.

    Raises ValueError (in a message: DecodeError) where it contradicts itself.
    """

    code: int  # of the kind of its numbers: kinds.py
    shape: tuple[int, ...]
    device: bytes  # its uuid
    where: Ref

    def __post_init__(self) -> None:
        kind = KIND_OF_CODE.get(self.code)
        if kind is None:
            raise ValueError(f"expected the number of a dtype, 1 to {len(KIND_OF_CODE)}, got {self.code!r:.40}")
        expected = nbytes_of(kind, self.shape)
        if self.where.nbytes != expected:
            raise ValueError(f"expected {expected} bytes for {kind.name} {self.shape}, got {self.where.nbytes}")
        _require_uuid(self.device)

    @property
    def kind(self) -> Kind:
        return KIND_OF_CODE[self.code]

    @property
    def nbytes(self) -> int:
        return self.where.nbytes


class HostRef(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A tensor of a device that goes by host memory: for a receiver on another device, or because a pool was full."""

    handle: Handle

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes


Reference = CudaRef | HostRef


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a receiver of tensors: the device that it uses, and its peer index in the pool and in the store.

    The receiver makes it (`CudaTensors.place`) and sends it to each sender.
    """

    device: bytes
    slices: int | None  # None: the receiver cannot have slices of the pool of device memory
    store: int | None

    def __post_init__(self) -> None:
        _require_uuid(self.device)
