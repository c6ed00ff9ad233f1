"""Messages with types: arrays are copied once and read where they lie."""

import msgspec
import numpy
from numpy.typing import NDArray

import penstock


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


class Submit(msgspec.Struct, array_like=True, frozen=True):
    request: int
    ids: NDArray[numpy.int32]
    sampling: Sampling


with penstock.Ring(Submit) as requests, requests.open_sender() as sender, requests.open_receiver() as receiver:
    sender.send(Submit(1, numpy.arange(40_000, dtype=numpy.int32), Sampling(0.8)))
    submit = receiver.receive(timeout=5)  # submit.ids: a read-only view of shared memory
    assert submit.ids.sum() == sum(range(40_000)) and submit.sampling.temperature == 0.8
