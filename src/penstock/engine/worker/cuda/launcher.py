"""The launch of a Triton kernel. All kernels are launched here, so that a double of the device can replace it."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)
