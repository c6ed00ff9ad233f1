"""Columns of messages, from a few numbers."""

import numpy as np
import numpy.typing as npt


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def slots(*values: int) -> npt.NDArray[np.uint16]:
    return np.array(values, np.uint16)
