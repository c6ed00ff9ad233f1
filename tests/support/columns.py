"""Columns of messages, from a few numbers, and the rows of a message."""

import numpy as np
import numpy.typing as npt

from penstock.engine._native import ChunkSender
from penstock.engine.client.stream import OutputChunk, split_delta
from penstock.engine.protocol.messages import Delta


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def slots(*values: int) -> npt.NDArray[np.uint16]:
    return np.array(values, np.uint16)


def chunks_of(delta: Delta) -> list[tuple[int, OutputChunk]]:
    """Returns the request number and the chunk of each row."""
    finished = None if delta.finished is None else delta.finished.rows
    columns = delta.counts, delta.samples, finished
    return list(split_delta(delta, ChunkSender().send(delta.rows, delta.numbers, delta.text, *columns)[0]))
