"""Which part of a parameter a rank has: as much as the others, and zeros where there is not enough.

Zeros change nothing: what they add to a sum is nothing. Leaves to `tensor_parallel` which parameters are cut, and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # heads are counted without torch, before a process starts
    import torch
    from torch import Tensor


class WeightSlice(NamedTuple):
    """A rank's part of a parameter, in one dimension, counted from the last: ranges of it, one after the other, each
    of them filled with zeros up to the width that it has on all ranks."""

    dimension: int
    length: int  # of the whole
    ranges: tuple[tuple[int, int], ...]  # from where to where
    width: int

    def shape(self, whole: torch.Size) -> list[int]:
        cut = list(whole)
        cut[self.dimension] = len(self.ranges) * self.width
        return cut

    def first(self) -> WeightSlice:
        """The same, of what has only the first of as many equal parts as there are ranges."""
        return self._replace(length=self.length // len(self.ranges), ranges=self.ranges[:1])

    def of(self, source: Any, shape: Sequence[int], name: str) -> Tensor:
        """The part, of a tensor, or of one in a file, of that shape. Raises ValueError where that is another length."""
        import torch
        import torch.nn.functional as F

        if shape[self.dimension] != self.length:
            at = len(shape) + self.dimension
            raise ValueError(f"{name}: expected {self.length} in dimension {at}, got a shape of {tuple(shape)}")
        before = (slice(None),) * (len(shape) + self.dimension)
        pieces = []
        for begin, end in self.ranges:
            piece = source[(*before, slice(begin, end))]
            if end - begin < self.width:
                piece = F.pad(piece, [0, 0] * (-self.dimension - 1) + [0, self.width - (end - begin)])
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dimension)


FIRST_ONLY = WeightSlice(-1, 0, (), 0)  # the bias of a sum: one rank adds it, the others add zeros


def share(length: int, rank: int, size: int, unit: int = 1) -> tuple[int, int]:
    """Where a rank's share begins, and how wide it is, in whole units. The last ones may end behind the whole."""
    width = -(-length // (size * unit)) * unit
    return rank * width, width


def within(begin: int, width: int, length: int) -> tuple[int, int]:
    """From where to where, of what is so long."""
    return min(begin, length), min(begin + width, length)


class HeadSlices(NamedTuple):
    """Of attention: a rank has heads of queries, and beside them those of the keys and values that these look at.

    With more ranks than heads of keys, several ranks have the same one. Heads that fill a share up are zeros.
    """

    queries: int
    keys: int  # and of values: each is shared by as many of the queries, one after the other

    def require(self, size: int) -> None:
        """Raises ValueError where not every one of so many ranks would have a head."""
        if not self._are_enough(size):
            fewer_ranks = max(fewer for fewer in range(1, size) if self._are_enough(fewer))
            raise ValueError(
                f"num_attention_heads is {self.queries} and num_key_value_heads {self.keys}, "
                f"which cannot be cut for {size} ranks: use {fewer_ranks}"
            )

    def _are_enough(self, size: int) -> bool:
        """For the last rank, that is, which has what is left over."""
        if size <= self.keys:
            return share(self.keys, size - 1, size)[0] < self.keys
        alike, looking = size // self.keys, self.queries // self.keys
        return size % self.keys == 0 and share(looking, alike - 1, alike)[0] < looking

    def _alike(self, size: int) -> int:
        """How many ranks have the same keys."""
        return max(1, size // self.keys)

    def of_keys(self, dimension: int, length: int, rank: int, size: int) -> WeightSlice:
        alike = self._alike(size)
        begin, width = share(length, rank // alike, size // alike, length // self.keys)
        return WeightSlice(dimension, length, (within(begin, width, length),), width)

    def of_queries(self, dimension: int, length: int, rank: int, size: int) -> WeightSlice:
        alike = self._alike(size)
        begin, together = share(length, rank // alike, size // alike, length // self.keys)
        own, width = share(together, rank % alike, alike, length // self.queries)
        return WeightSlice(dimension, length, (within(begin + own, width, min(begin + together, length)),), width)
