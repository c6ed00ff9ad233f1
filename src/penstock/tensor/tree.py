"""Trees: nested dicts, lists and tuples of tensors and small values, laid out in one piece of memory.

    with a plan:   plan(value) ──► layout (bytes to be kept or sent) and nbytes (of memory to be found)
                   plan.write(buffer)        copies every tensor once, each to a multiple of 64
    without one:   read(layout, buffer) ──► the same tree, its tensors views of the buffer
                   read_to_fill(layout, buffer)  the same, to be written in place

The layout is msgpack: None, bool, int, float, str and bytes are themselves; all else is an array that begins with what
it is:   [0, code, offset, size, …]   a tensor        [1, node, …]            a list
         [2, node, …]                 a tuple         [3, key, node, …]       a dict

Nothing in it can be executed, and nothing in it is believed. Leaves to the store where the bytes lie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.errors import DecodeError, UnsupportedTensor
from penstock.tensor.kinds import KIND_OF_CODE, kind_of, nbytes_of
from penstock.tensor.source import Source, source
from penstock.tensor.views import As, copied, view, writable_as

if TYPE_CHECKING:
    from typing_extensions import Buffer

TENSOR, LIST, TUPLE, DICT = range(4)
ALIGN = 64  # of every tensor, from the start of the buffer
MAX_LEVELS = 32
SCALARS = (type(None), bool, int, float, str, bytes)


class Empty:
    """A tensor without numbers yet: a plan reserves the place, and the process that makes the value fills the tensor.

    shape: the sizes, or the only size. dtype: of torch, of NumPy, or a name.

    Examples:
        >>> Store(1 << 20).loan(None, Empty((2, 3), "bfloat16")).value("bits").shape
        (2, 3)
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Iterable[int] | int, dtype: Any) -> None:
        self.shape = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Empty({self.shape}, {self.dtype!r})"


class Plan(NamedTuple):
    """The place of each tensor of a tree. A plan refers to the tensors, and `write` copies their present content."""

    nbytes: int
    layout: bytes
    sources: tuple[tuple[int, Source], ...]

    def write(self, buffer: Buffer, offset: int = 0) -> None:
        """Copies the tensors into a buffer that has `nbytes` from `offset` on. What lies between them is left."""
        for at, tensor in self.sources:
            tensor.write(buffer, offset + at)


def plan(tree: Any, *, is_filled_later: bool = False) -> Plan:
    """Raises UnsupportedTensor, with the path, for what cannot be sent; copies nothing.

    is_filled_later: some of its tensors may be `Empty`, which write() leaves to read_to_fill().
    """
    planned = _Planned(is_filled_later)
    node = planned.node(tree, None, 0)
    return Plan(planned.end, msgspec.msgpack.encode(node), tuple(planned.sources))


def read(layout: Buffer, buffer: Buffer, offset: int = 0, *, as_: As = "numpy", writable: bool = False) -> Any:
    """The tree, its tensors views of the buffer (from `offset` on), which they keep; copies of it if `writable`.

    Raises DecodeError, with the path, where the layout is none, or reaches outside of the buffer.
    """
    return _Read(buffer, offset, as_, copied if writable else view).tree(_decoded(layout), None, 0)


def read_to_fill(layout: Buffer, buffer: Buffer, offset: int = 0, *, as_: As = "numpy") -> Any:
    """Returns the same tree, its tensors writable views of the buffer: readers of the buffer see what is written."""
    return _Read(buffer, offset, as_, writable_as).tree(_decoded(layout), None, 0)


def _decoded(layout: Buffer) -> Any:
    try:
        return msgspec.msgpack.decode(layout)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"expected the layout of a tree: {error}") from None


Path = (
    tuple[Any, Any] | None
)  # from the leaf up: the path of the container, and the key in the container; None: the whole


def _at(path: Path) -> str:
    """A path in words, $['pixels'][0], which only errors need."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(f"[{key!r}]")
    return "$" + "".join(reversed(keys))


def _require_64_bits(number: int, path: Path) -> None:
    if not -(1 << 63) <= number < 1 << 64:
        raise UnsupportedTensor(
            f"expected an int of at most 64 bits at {_at(path):.80}, got one of {number.bit_length()}"
        )


class _Planned:
    def __init__(self, is_filled_later: bool) -> None:
        self.is_filled_later = is_filled_later
        self.end = 0
        self.sources: list[tuple[int, Source]] = []

    def node(self, value: Any, path: Path, level: int) -> Any:
        if type(value) in SCALARS:
            if type(value) is int:
                _require_64_bits(value, path)
            return value
        if level == MAX_LEVELS:
            raise UnsupportedTensor(
                f"expected at most {MAX_LEVELS} levels (does it contain itself?) at {_at(path):.80}"
            )
        if type(value) is dict or isinstance(value, Mapping):
            node: list[Any] = [DICT]
            for key, item in value.items():
                if type(key) not in (str, int):
                    raise UnsupportedTensor(f"expected keys of str or int, got {type(key).__name__} at {_at(path)}")
                if type(key) is int:
                    _require_64_bits(key, path)
                node += (key, self.node(item, (path, key), level + 1))
            return node
        if isinstance(value, (list, tuple)):
            if hasattr(value, "_fields"):
                raise UnsupportedTensor(
                    f"a {type(value).__name__} would come back as a tuple at {_at(path)}: send a dict"
                )
            return [
                LIST if isinstance(value, list) else TUPLE,
                *(self.node(item, (path, index), level + 1) for index, item in enumerate(value)),
            ]
        return self.tensor(value, path)

    def tensor(self, value: Any, path: Path) -> Any:
        tensor = None
        try:
            if type(value) is Empty:
                if not self.is_filled_later:
                    raise UnsupportedTensor(f"an {value!r} has no numbers yet: fill it in a loan of the store")
                kind, shape = kind_of(value.dtype), value.shape
                nbytes = nbytes_of(kind, shape)
            else:
                tensor = source(value)
                kind, shape, nbytes, _ = tensor
        except (TypeError, ValueError) as error:
            raise UnsupportedTensor(f"{error} at {_at(path)}") from None
        at = self.end + (-self.end & (ALIGN - 1)) if nbytes else self.end
        self.end = at + nbytes
        if tensor is not None and nbytes:
            self.sources.append((at, tensor))
        return [TENSOR, kind.code, at, *shape]


class _Read:
    def __init__(self, buffer: Buffer, offset: int, as_: As, make: Callable[..., Any]) -> None:
        self.buffer = buffer
        self.offset = offset
        self.nbytes = memoryview(buffer).nbytes - offset
        self.as_: As = as_
        self.make = make

    def tree(self, node: Any, path: Path, level: int) -> Any:
        if type(node) in SCALARS:
            return node
        if type(node) is not list or not node or type(node[0]) is not int or level > MAX_LEVELS:
            raise DecodeError(f"expected a node of a tree, got {node!r:.80} at {_at(path):.80}")
        what = node[0]
        if what == TENSOR:
            return self.tensor(node, path)
        if what in (LIST, TUPLE):
            items = [
                item if type(item) in SCALARS else self.tree(item, (path, index), level + 1)
                for index, item in enumerate(node[1:])
            ]
            return items if what == LIST else tuple(items)
        if what != DICT or len(node) % 2 == 0:
            raise DecodeError(f"expected a node of a tree, got {node!r:.80} at {_at(path)}")
        keyed = {}
        for key, item in zip(node[1::2], node[2::2], strict=True):
            if type(key) not in (str, int) or key in keyed:
                raise DecodeError(f"expected another key of str or int, got {key!r:.80} at {_at(path)}")
            keyed[key] = item if type(item) in SCALARS else self.tree(item, (path, key), level + 1)
        return keyed

    def tensor(self, node: list[Any], path: Path) -> Any:
        _, code, offset, *shape = [*node, None, None][: max(3, len(node))]
        kind = KIND_OF_CODE.get(code) if type(code) is int else None
        if kind is None or type(offset) is not int:
            raise DecodeError(f"expected a tensor, got {node!r:.80} at {_at(path)}")
        try:
            nbytes = nbytes_of(kind, tuple(shape))
        except ValueError as error:
            raise DecodeError(f"{error} at {_at(path)}") from None
        if offset < 0 or offset % ALIGN or offset + nbytes > self.nbytes:
            if nbytes:
                raise DecodeError(f"expected a tensor within {self.nbytes} bytes, got {node!r:.80} at {_at(path)}")
            offset = 0
        return self.make(self.buffer, kind, tuple(shape), self.offset + offset, self.as_)
