"""What lies in a frame beside the struct: arrays of numbers, and plain bytes. Written with one copy, read with none.

Leaves to the frame where they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

# On the wire a kind of number is one of these; 0 is plain bytes.
KINDS: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name)
    for name in (
        "uint8", "bool", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
CODES = {dtype: code for code, dtype in enumerate(KINDS, 1)}
DTYPES = {code: dtype for dtype, code in CODES.items()}
PLAIN = 0


class Part:
    """Bytes that are too many to be copied twice: a field `image: Part`, sent as `Part(anything with a buffer)`.

    What was received is read-only, and holds what it lies in.
    """

    __slots__ = ("view",)

    def __init__(self, buffer: Buffer) -> None:
        self.view = memoryview(buffer)
        if not self.view.c_contiguous:
            self.view = memoryview(self.view.tobytes())
        if self.view.format != "B" or self.view.ndim != 1:
            self.view = self.view.cast("B") if self.view.nbytes else memoryview(b"")

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def __len__(self) -> int:
        return self.view.nbytes

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def __deepcopy__(self, _: Any) -> Part:
        return Part(bytes(self.view))

    def __eq__(self, other: object) -> bool:
        return self.view == other.view if isinstance(other, Part) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Part({self.nbytes} bytes)"
