"""Launches Triton kernels. Callers name the module, `launcher.launch`: doubles of a device replace the function."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches a kernel of so many programs on the current stream."""
    kernel[grid](*arguments, **options)
