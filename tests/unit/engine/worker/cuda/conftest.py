"""Kernels are interpreted on the CPU, or compiled without a device: see `tests/support/interpreter.py`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.support.interpreter import interpreted_kernels

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    if not IS_INTERPRETED:
        yield
        return
    with interpreted_kernels():
        yield
