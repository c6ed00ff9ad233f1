"""Kernels compiled for devices without one: nothing spills, and tiles of keys and values are loaded ahead."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from tests.support.interpreter import require_compiler  # noqa: E402

require_compiler()

from penstock.engine.worker.cuda import kernels  # noqa: E402
from penstock.engine.worker.cuda.attention import DeviceKind, HeadSplit, chunk_tiles, row_tiles  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.compiled_kernels import CompiledKernel, compile_kernel  # noqa: E402

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)]
LARGE = [(128, 128), (192, 128), (256, 256)]
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a multiprocessor
MAX_STACK = 16
BLOCK, GROUPS, HEADS = 16, 4, 32
KINDS = ("rows", "chunks")
CASES = [
    *((90, sizes, dtype, kind) for sizes, dtype, kind in itertools.product(SIZES, NAMES, KINDS)),
    *itertools.product((80, 86, 89, 100), LARGE, NAMES, KINDS),
]
PUSHED = [(number, (128, 128), torch.bfloat16, kind) for number in (86, 90) for kind in KINDS]


def compile_attention(
    architecture: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    kind: str,
    *,
    has_all: bool = False,
    block: int = BLOCK,
) -> tuple[CompiledKernel, int]:
    """Returns the kernel, and the positions of a tile."""
    key_size, value_size = sizes
    split, (v0, v1) = HeadSplit.of(key_size), HeadSplit.of(value_size)
    tiles = (
        row_tiles(GROUPS, split, dtype, block)
        if kind == "rows"
        else chunk_tiles(GROUPS, split, dtype, DeviceKind.of(divmod(architecture, 10)))
    )
    pointers = dict.fromkeys(("queries", "keys", "values", "out", "sinks"), NAMES[dtype])
    pointers |= dict.fromkeys(("parts", "stats"), "fp32")
    pointers |= dict.fromkeys(("items", "first_queries", "slots", "starts", "lengths", "table"), "i32")
    constants: dict[str, Any] = {
        "HEADS": HEADS, "GROUPS": GROUPS, "BLOCK": block, "TILE": tiles.tile, "M": tiles.m, "K": key_size,
        "K0": split.low, "K1": split.rest, "V": value_size, "V0": v0, "V1": v1, "WINDOW": 1024 if has_all else 0,
        "SOFTCAP": has_all, "SINKS": has_all, "IS_ROWS": kind == "rows",
    }  # fmt: skip
    kernel = compile_kernel(
        kernels.attend, pointers, constants, tiles.warps,
        floats=("scale", "softcap"), stages=tiles.stages, architecture=architecture,
    )  # fmt: skip
    return kernel, tiles.tile


@pytest.mark.parametrize(("architecture", "sizes", "dtype", "kind"), CASES if tiers.TIER != "push" else PUSHED, ids=str)
def test_attention_spills_nothing_and_loads_ahead(
    architecture: int, sizes: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    kernel, tile = compile_attention(architecture, sizes, dtype, kind)
    assert kernel.stack <= MAX_STACK and kernel.shared <= SHARED[architecture]
    assert "cp.async.c" in kernel.ptx
    if dtype == torch.bfloat16:  # two tiles of keys and values: one is loaded while one is used
        assert kernel.shared >= 2 * 2 * tile * sum(sum(HeadSplit.of(size)) for size in sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES if tiers.TIER != "push" else [(128, 128)], ids=str)
def test_window_softcap_and_sinks_spill_nothing(sizes: tuple[int, int], kind: str) -> None:
    for block in (16, 64):
        kernel, _ = compile_attention(90, sizes, torch.bfloat16, kind, has_all=True, block=block)
        programs = 3 if kind == "rows" and sizes != (192, 128) else 1  # of a multiprocessor
        assert kernel.stack <= MAX_STACK and kernel.shared <= SHARED[90] // programs
        assert "cp.async.c" in kernel.ptx


# Pointers to numbers of the model, other pointers to floats, and constants of each kernel. All others are integers.
OTHERS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "write_state": (kernels.write_state, (), (), {"SIZE": 256}),
    "advance": (kernels.advance, (), (), {"BLOCK": 16, "AXES": 3, "SIZE": 64}),
    "store_ids": (kernels.store_ids, (), (), {"SIZE": 256}),
    "plan_rows": (
        kernels.plan_rows, (), (),
        {"ROWS": 256, "SIZE": 16, "TARGET": 66, "LEAST": 2, "TILE": 64, "WINDOW": 0},
    ),
    "merge": (kernels.merge, ("out",), ("parts", "stats"), {"V": 128, "VP": 128, "SIZE": 4}),
    "add_norm": (
        kernels.add_norm, ("x", "residual", "weight", "out"), (),
        {"SIZE": 8192, "POWER": 8192, "ADDS_ONE": False, "HAS_X": True},
    ),
    "rotate_write": (
        kernels.rotate_write,
        ("qkv", "queries", "keys", "values", "cos", "sin", "query_weight", "key_weight"), (),
        {"HEADS": 32, "KV_HEADS": 8, "P": 64, "K": 128, "HALF": 64, "V": 128, "VP": 1024, "HAS_NORM": True,
         "ADDS_ONE": False},
    ),
    "write_cache": (
        kernels.write_cache, ("key", "value", "keys", "values"), (),
        {"KEY_SIZE": 1024, "KP": 1024, "VALUE_SIZE": 1024, "VP": 1024},
    ),
    "gate": (kernels.gate, ("x", "out"), (), {"SIZE": 3072, "TILE": 1024}),
}  # fmt: skip
TABLES = ("news", "table", "tokens", "computed", "rows", "ids", "positions", "lengths", "places", "slots", "items",
          "firsts", "counts", "params", "out")  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("architecture", SHARED if tiers.TIER != "push" else [90])
def test_other_kernels_spill_nothing(name: str, architecture: int) -> None:
    kernel, numbers, floats, constants = OTHERS[name]
    pointers = dict.fromkeys(TABLES, "i32") | dict.fromkeys(floats, "fp32")
    for dtype in ("bf16", "fp32") if numbers else ("bf16",):
        compiled = compile_kernel(
            kernel,
            pointers | dict.fromkeys(numbers, dtype),
            constants,
            8,
            floats=("epsilon",),
            architecture=architecture,
        )
        assert compiled.stack <= MAX_STACK and compiled.shared <= 48 << 10
