"""Kernels between the products of a layer, run by Triton's interpreter, against the modules of transformers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")

from tests.support.interpreter import require_interpreter  # noqa: E402

require_interpreter()

from tests.support.layer_cases import TYPES, check_gate, check_norm, check_rotation, check_write  # noqa: E402


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("has_x", [False, True])
@pytest.mark.parametrize("size", [64, 96, 2048])
def test_norm_of_the_sum_is_that_of_the_module(size: int, has_x: bool, dtype: torch.dtype) -> None:
    check_norm(size, dtype, has_x=has_x)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norm_that_adds_one_is_that_of_gemma(dtype: torch.dtype) -> None:
    check_norm(64, dtype, has_x=True, adds_one=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (6, 2, 64), (7, 1, 128)])
def test_queries_and_keys_are_rotated_and_written(
    heads: int, kv_heads: int, size: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, and a token without a place writes nothing."""
    check_rotation(heads, kv_heads, size, dtype, has_norm=has_norm)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (80, 48)])
def test_keys_and_values_are_written(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    check_write(*sizes, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_gate_is_that_of_the_module(size: int, dtype: torch.dtype) -> None:
    check_gate(size, dtype)
