"""Chooses the ids of a step's rows by the kernels of `sampling`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from penstock.engine.worker.cuda import launcher
from penstock.engine.worker.cuda.sampling import GROUP, MAX_KEPT, finish, scan

FEW_ROWS = 8  # up to here, more programs share a row
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class RowParams(NamedTuple):
    """The sampling parameters of a step's rows. `values` (float32, on the device) has a row for each parameter: the
    temperatures, `top_k` (the size of the vocabulary: all ids), `top_p` and `min_p`."""

    values: torch.Tensor
    is_random: bool  # at least one row
    is_cut: bool  # by `top_k`, `top_p` or `min_p`, at least one random row


class TokenChooser:
    """Chooses ids by the kernels. One step at a time: the steps share scratch memory."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._groups = triton.next_power_of_2(triton.cdiv(vocabulary, GROUP.value))
        self._width = 3 * self._groups + MAX_KEPT.value
        self._scratch = torch.empty((rows, self._width), dtype=torch.float32, device=device)

    def compile(self, dtype: torch.dtype) -> None:
        """Compiles the kernels for logits of a type: no step waits for the compiler, which takes seconds."""
        for rows in {1, min(FEW_ROWS + 1, self._scratch.shape[0])}:
            logits = self._scratch.new_zeros((rows, self._vocabulary), dtype=dtype)
            values = self._scratch.new_zeros((4, rows))
            for is_random, is_cut in ((False, False), (True, False), (True, True)):
                draws = values[0] if is_random else None
                self.choose(logits, RowParams(values, is_random, is_cut), draws)

    def choose(
        self,
        logits: torch.Tensor,
        params: RowParams,
        draws: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns an id for each row (int32), and whether the row has failed (bool).

        `draws` is one number of [0, 1) for each row. With `counts`, `draws` has the rows' seeds (int64).
        """
        rows = logits.shape[0]
        if out is None:
            ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
            is_failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
        else:
            ids, is_failed = out
        sizes = {"GROUPS": self._groups, "WIDTH": self._width, "RANDOM": params.is_random}
        n, stride = self._vocabulary, logits.stride(0)
        groups_of_program, warps = (8, 4) if rows <= FEW_ROWS else (64, 8)
        grid = triton.cdiv(triton.cdiv(n, GROUP.value), groups_of_program), rows
        launcher.launch(
            scan, grid, logits, params.values, self._scratch, n, stride, S=groups_of_program, num_warps=warps, **sizes
        )
        launcher.launch(
            finish, (rows,), logits, params.values, draws, counts, self._scratch, ids, is_failed, n, stride,
            params.values.stride(0), SHIFT=SHIFTS[logits.dtype], CUT=params.is_cut,
            num_warps=16 if params.is_cut else 8, **sizes,
        )  # fmt: skip
        return ids, is_failed
