"""The choice of tokens from logits on a CPU: a native call, which reads the logits once or twice."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine import _native
from penstock.engine.protocol.columns import Index
from penstock.engine.worker.cpu_tensors import kernel_threads, rows_of
from penstock.engine.worker.grammars import TokenMasks

NO_MASKS = TokenMasks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), {})
Floats = npt.NDArray[np.float32]


class CpuSampler(NamedTuple):
    """The rows of a batch: how each of them chooses."""

    temperatures: Floats  # 0: the likeliest id
    top_ks: Index
    top_ps: Floats
    min_ps: Floats

    @classmethod
    def of(cls, slots: Index, temperatures: Floats, top_ks: Index, top_ps: Floats, min_ps: Floats) -> CpuSampler:
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
