"""The kernels of sampling, compiled for an H100 without one: no spilled registers, and little shared memory."""

from __future__ import annotations

from tests.support.interpreter import require_compiler

require_compiler()

import pytest  # noqa: E402

from penstock.engine.worker.cuda import sampling  # noqa: E402
from tests.support.compiled_kernels import compile_kernel  # noqa: E402

GROUPS = 2048  # of 151,936 ids
SIZES = {"GROUPS": GROUPS, "WIDTH": 3 * GROUPS + sampling.MAX_KEPT.value}
POINTERS = {"scratch": "fp32", **dict.fromkeys(("slots", "params", "counts", "computed", "out"), "i32")}
TYPES = {"fp32": 0, "bf16": 16, "fp16": 13}  # and their shifts


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "warps"), [(8, 4), (32, 8)])
def test_scan_reads_16_bytes_at_a_time_and_three_programs_share_an_sm(dtype: str, groups: int, warps: int) -> None:
    kernel = compile_kernel(sampling.scan, {**POINTERS, "logits": dtype}, {**SIZES, "S": groups}, warps, fuses=False)
    assert kernel.stack == 0 and kernel.registers <= 65536 // (3 * 32 * warps) and kernel.shared <= 1024
    assert kernel.wide_loads == kernel.global_loads - 6  # the slot, and parameters


@pytest.mark.parametrize("dtype", TYPES)
def test_finish_spills_no_registers(dtype: str) -> None:
    constants = {**SIZES, "SHIFT": TYPES[dtype]}
    kernel = compile_kernel(sampling.finish, {**POINTERS, "logits": dtype}, constants, 16, fuses=False)
    assert kernel.stack == 0 and kernel.registers <= 128 and kernel.shared <= 48 << 10
