"""The slice of a parameter that a rank has: as wide as on all ranks, padded with zeros, which add nothing to sums.

`tensor_parallel` decides which parameters are sharded, and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # heads are counted without torch, before a process starts
    import torch
    from torch import Tensor


class WeightSlice(NamedTuple):
    """A rank's slice of a parameter in one dimension: ranges, one after the other, each padded with zeros to the width
    that it has on all ranks."""

    dimension: int  # negative: counted from the last
    length: int  # of the whole parameter in it
    ranges: tuple[tuple[int, int], ...]  # begin and end
    width: int  # of each range, with its zeros

    def shape(self, whole: torch.Size) -> list[int]:
        cut = list(whole)
        cut[self.dimension] = len(self.ranges) * self.width
        return cut

    def first(self) -> WeightSlice:
        """Returns the slice of the first part alone, of a parameter with as many equal parts as there are ranges."""
        return self._replace(length=self.length // len(self.ranges), ranges=self.ranges[:1])

    def of(self, source: Any, shape: Sequence[int], name: str) -> Tensor:
        """Cuts the slice from a tensor, or from one in a file. Raises ValueError if `shape` has another length."""
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
    """Returns where a rank's share begins and how wide it is, in whole units. The last shares may exceed `length`."""
    width = -(-length // (size * unit)) * unit
    return rank * width, width


def within(begin: int, width: int, length: int) -> tuple[int, int]:
    """Returns begin and end of a share, within `length`."""
    return min(begin, length), min(begin + width, length)


class HeadSlices(NamedTuple):
    """The attention heads of a rank: query heads, and the key and value heads that these use.

    With more ranks than key heads, several ranks have the same key head. Heads that pad a share are zeros.
    """

    queries: int
    keys: int  # and of values: each is shared by as many of the queries, one after the other

    def require(self, size: int) -> None:
        """Raises ValueError if one of `size` ranks would have no head."""
        if not self._are_enough(size):
            fewer_ranks = max(fewer for fewer in range(1, size) if self._are_enough(fewer))
            raise ValueError(
                f"num_attention_heads is {self.queries} and num_key_value_heads {self.keys}, "
                f"which cannot be cut for {size} ranks: use {fewer_ranks}"
            )

    def _are_enough(self, size: int) -> bool:
        """Returns whether the last of `size` ranks, which has the remainder, has a head."""
        if size <= self.keys:
            return share(self.keys, size - 1, size)[0] < self.keys
        alike, looking = size // self.keys, self.queries // self.keys
        return size % self.keys == 0 and share(looking, alike - 1, alike)[0] < looking

    def _alike(self, size: int) -> int:
        """Returns the number of ranks that have the same key head."""
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
