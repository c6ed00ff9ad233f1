"""What the core of a pooling engine sends servers: a row for each request that ends, with the handle of a vector."""

import os

import numpy as np

from penstock.engine.core.step_builder import TokensBuilder
from penstock.engine.output.vector_output import VectorOutput
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Ended, FinishReason, Started, Tokens
from penstock.tensor import Handle, Scope
from tests.support.columns import chunks_of
from tests.unit.engine.core.test_tokens_builder import ints, only, request

CONFIG = EngineConfig(model="m", runner="pooling")


def handle() -> Handle:
    return Scope().put(np.zeros(2), key=os.urandom(32))


def started(slot: int, number: int, server: int = 0, cached: int = 0) -> Started:
    return Started(slot, number, request(number, 1).params, (1,), server=server, cached=cached)


def rows(output: VectorOutput, tokens: Tokens) -> dict[tuple[int, int], tuple[FinishReason | None, Handle | None, int]]:
    outputs = output.process(tokens)
    assert not outputs.aborts
    return {
        (server, number): (chunk.reason, chunk.vector_handle, chunk.cached)
        for server, delta in outputs.deltas
        for number, chunk in chunks_of(delta)
    }


def test_vectors_go_to_the_servers_of_their_requests() -> None:
    output, first, second = VectorOutput(CONFIG), handle(), handle()
    news = (started(3, 7, server=1, cached=16), started(5, 8), started(6, 9))
    assert rows(output, Tokens(ints(), started=news)) == {}
    ends = Ended(5, FinishReason.ERROR), Ended(3, FinishReason.LENGTH), Ended(6, FinishReason.LENGTH)
    slots = np.array([3, 6], np.uint16)
    assert rows(output, Tokens(ints(0, 0), slots, ended=ends, vectors=(first, second))) == {
        (1, 7): (FinishReason.STOP, first, 16),
        (0, 8): (FinishReason.ERROR, None, 0),
        (0, 9): (FinishReason.STOP, second, 0),
    }
    # The slots of the next message are those of the last one, and an aborted request has no row.
    news = started(3, 10), started(6, 11)
    assert rows(output, Tokens(ints(), started=news)) == {}
    tokens = Tokens(ints(0, 0), aborted=(6,), ended=(Ended(3, FinishReason.STOP),), vectors=(second, first))
    assert rows(output, tokens) == {(0, 10): (FinishReason.STOP, second, 0)}


def test_vectors_of_ended_samples_are_left_out() -> None:
    builder, vectors = TokensBuilder(8, 1), [handle() for _ in range(3)]
    slots = np.array([1, 3, 4])
    tokens = only(builder.build(slots, ints(0, 0, 0), np.array([0, 2]), None, [], (), vectors))
    assert tokens.vectors == (vectors[0], vectors[2])
    assert tokens.slots is not None and tokens.slots.tolist() == [1, 4]
