"""Dtypes of NumPy, and the code of each on the wire.

A code never changes its meaning. No name can be added here: tensor/kinds.py numbers the dtypes that NumPy lacks from
the next code on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NUMPY_NAMES = (
    *("uint8", "bool", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name) for code, name in enumerate(NUMPY_NAMES, 1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
PLAIN = 0  # the code of plain bytes
MAX_DIMENSIONS = 32  # of an array: NumPy before 2.0 has no more
