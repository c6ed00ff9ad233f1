"""The parts of a frame beside the struct: arrays of numbers, and buffers. Written with one copy, read without.

The frame decides where parts lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._native import require_numbers
from penstock.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Buffer as Exporter
    from typing_extensions import Self


class Buffer:
    """Bytes that are sent with one copy and received with none.

    A field of a message (`image: Buffer`), or the type of a channel: receivers of a `Ring(Buffer)` get each record as a
    `Buffer` in place. A received buffer is read-only, and holds its place in the channel until release(), or until the
    buffer and all views are gone.

    Args:
        exporter: bytes, an array, or anything else with the buffer protocol.

    Raises:
        TypeError: it has no buffer, or one of objects or pointers.

    Examples:
        >>> ring = Ring(Buffer)
        >>> ring.open_sender().send(Buffer(b"pixels"))
        >>> with ring.open_receiver().receive() as buffer:
        ...     bytes(buffer.view[:3])
        b'pix'
    """

    __slots__ = ("_view",)  # which holds the exporter: the lease of a record, where it was received

    def __init__(self, exporter: Exporter) -> None:
        view = memoryview(exporter)
        if view.format != "B":
            require_numbers(view.format)
        if not view.c_contiguous:
            view = memoryview(view.tobytes())
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B") if view.nbytes else memoryview(b"")
        self._view: memoryview | None = view

    @property
    def view(self) -> memoryview:
        """The bytes, as a memoryview. Raises ClosedError after release()."""
        if self._view is None:
            raise ClosedError("the buffer has been released")
        return self._view

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def release(self) -> None:
        """Gives the place in the channel back, at once or when the last view is gone.

        Examples:
            >>> buffer = Buffer(b"pixels")
            >>> buffer.release()
            >>> buffer
            Buffer(released)
        """
        self._view = None

    def __len__(self) -> int:
        return self.view.nbytes

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def __deepcopy__(self, _: Any) -> Buffer:
        return Buffer(bytes(self.view))

    def __eq__(self, other: object) -> bool:
        return self.view == other.view if isinstance(other, Buffer) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return "Buffer(released)" if self._view is None else f"Buffer({self.nbytes} bytes)"
