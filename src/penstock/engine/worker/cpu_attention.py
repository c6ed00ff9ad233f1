"""Decode attention on a CPU: a native kernel reads the keys and values of each row in their cache blocks.

Nothing is gathered, padded or masked, which would be most of the cost of a decode step. `paged_attention` calls it, and
computes chunks of several tokens itself, as products of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine import _native
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints
from penstock.engine.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from penstock.engine.worker.paged_attention import AttentionStyle

DTYPES = (torch.float32, torch.bfloat16)
WORTH_A_THREAD = 4_000_000  # products: a third of a millisecond, several times what it takes to wake a thread


class CpuRows(NamedTuple):
    """The rows of a step that compute one token each, with the positions that each attends to."""

    table: Ints  # block table [rows, width]
    firsts: Index  # first position
    lengths: Index  # position after the last

    @property
    def positions(self) -> int:
        """Returns the number of positions that all rows attend to."""
        return int((self.lengths - self.firsts).sum())


def rows_of(batch: InputBatch, window: int | None) -> CpuRows:
    return CpuRows(batch.table, batch.firsts(window), batch.lengths)


class CpuKVCache:
    """The KV cache of all layers, as arrays for the native kernel."""

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], block_size: int) -> None:
        self._layers = {layer: (_numbers(keys), _numbers(values)) for layer, (keys, values) in layers.items()}
        self._block_size = block_size
        self._others: ThreadPoolExecutor | None = None

    def attend(self, layer: int, query: Tensor, attended: Tensor, rows: CpuRows, how: AttentionStyle) -> None:
        """Computes attention for the first rows of `query` [tokens, heads, size], into the first rows of `attended`."""
        count = rows.lengths.size
        keys, values = self._layers[layer]
        sinks = None if how.sinks is None else how.sinks.float().numpy()
        vectors = (_numbers(query[:count]), keys, values, _numbers(attended[:count]))
        arguments = (*vectors, *rows, self._block_size, how.scale, how.softcap or 0.0, sinks)
        threads, parts = torch.get_num_threads(), 1
        if threads > 1:
            products = rows.positions * query.shape[1] * (keys.shape[2] + values.shape[2])
            parts = max(1, min(threads, products // WORTH_A_THREAD))
        if parts == 1:
            return _native.paged_attention(*arguments)
        if self._others is None:
            self._others = ThreadPoolExecutor(threads - 1, "attention")
        others = [self._others.submit(_native.paged_attention, *arguments, part, parts) for part in range(1, parts)]
        _native.paged_attention(*arguments, 0, parts)
        for other in others:
            other.result()
        return None


def _numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """Returns an array of the tensor's own memory; of bfloat16, which NumPy does not know, an array of the bits."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)
