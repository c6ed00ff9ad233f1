"""How a client's requests end when something is not as it should be: always, and with the reason."""

import asyncio
import contextlib

import numpy as np
import pytest

from penstock.engine.client.stream import MAX_KEPT_NBYTES, EngineError, OutputChunk, OutputStream
from penstock.engine.cluster.group_ends import MAX_KEPT, Outbox
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import (
    Abort,
    ChunkFormat,
    Delta,
    Failed,
    Finished,
    FinishReason,
    SamplingParams,
    Style,
    Submit,
)
from tests.support.groups import PATIENCE, engine
from tests.support.loops import in_a_loop

CONFIG = EngineConfig(simulated=SimulatedDevice(), output_processors=1)


def end_of(request: int, reason: int, sample: int = 0) -> Delta:
    ends = Finished(np.zeros(1, np.uint16), np.array([reason], np.uint8))
    samples = np.array([sample], np.uint16)
    return Delta(1, np.array([request, 0, 9], np.int32), b"", samples=samples, finished=ends)


@in_a_loop
async def test_request_that_the_engine_gives_up_raises_engine_error() -> None:
    async with engine(output_processors=1) as ([group], client):
        for reason, status in ((FinishReason.MISSING, 503), (FinishReason.ERROR, 500)):
            stream = await client.submit([1], SamplingParams(n=2))
            assert isinstance(await group.receive(), Submit)
            group.output.send(end_of(stream.request, reason), PATIENCE)
            with pytest.raises(EngineError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.status == status
            abort = await group.receive()  # the other sample is in vain
            assert isinstance(abort, Abort) and abort.requests.tolist() == [stream.request]
        assert client.open_requests == 0


@in_a_loop
async def test_a_delta_that_makes_no_sense_ends_all_requests_and_refuses_more() -> None:
    async with engine(output_processors=1) as ([group], client):
        stream = await client.submit([1])
        group.output.send(end_of(stream.request, 77), PATIENCE)
        with pytest.raises(EngineError, match="client of the engine has failed: ValueError: 77"):
            await anext(stream)
        with pytest.raises(EngineError, match="client of the engine has failed"):
            await client.submit([1])
        assert client.open_requests == 0


@in_a_loop
async def test_a_request_tells_the_core_how_its_answer_is_written() -> None:
    async with engine(output_processors=1) as ([group], client):
        chunk_format = ChunkFormat(Style.CHAT, b'{"id":"1"', 2)
        refused = await client.submit([1], chunk_format=chunk_format)
        assert (await group.receive()).chunk_format == chunk_format
        group.core.send(Failed(refused.request, 400, "it is too long"), PATIENCE)
        with pytest.raises(EngineError, match="it is too long"):
            await anext(refused)
        assert client.open_requests == 0


@in_a_loop
async def test_reader_of_a_stream_gets_an_error_when_the_client_closes() -> None:
    async with engine(output_processors=1) as (_, client):
        stream = await client.submit([1])
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
    with pytest.raises(EngineError, match="has been closed"):
        await reading


@in_a_loop
async def test_a_second_reader_is_refused_and_not_left_waiting() -> None:
    stream = OutputStream(1, 0, 1, 5, 1)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task is already reading"):
        await anext(stream)
    stream.fail(EngineError(503, "it died"))
    with pytest.raises(EngineError):
        await first


@in_a_loop
async def test_pieces_of_samples_in_turns_are_given_up_before_they_weigh_much() -> None:
    stream = OutputStream(1, 0, 1, 5, 2)
    pieces = 0
    while not stream.is_over:
        stream.add(OutputChunk(pieces % 2, b"a", [1]))
        pieces += 1
    assert pieces * 200 < MAX_KEPT_NBYTES


@in_a_loop
async def test_reading_makes_room_again_however_long_the_answer_is() -> None:
    stream = OutputStream(1, 0, 1, 5, 1)
    for _ in range(200):
        for _ in range(1000):
            stream.add(OutputChunk(0, b"abcd", [1]))
        assert len((await anext(stream)).ids) == 1000
    assert not stream.is_over


@in_a_loop
async def test_a_time_out_does_not_begin_when_all_is_over() -> None:
    stream = OutputStream(1, 0, 1, 5, 1)
    stream.fail(EngineError(503, "it died"))
    aborted: list[OutputStream] = []
    stream.begin(aborted.append, 0.01)
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="it died"):
        await anext(stream)
    assert aborted == []


def test_full_outbox_of_a_slow_server_still_takes_failures() -> None:
    cluster = Cluster.open(CONFIG)
    receiver = cluster.servers[0].open_receiver(name="server 0.0 #1")
    outbox = Outbox(cluster, ProcessId("output", 0, 0, 1))
    delta = end_of(1, FinishReason.LENGTH)
    sent = 0
    while outbox.send(0, delta):
        sent += 1
        assert sent < 10 * MAX_KEPT + 100_000
    assert not outbox.has_backlog
    assert outbox.send(0, Failed(5, 503, "too slow")) and outbox.send(0, delta)
    while outbox.send(0, delta):
        pass
    last = None
    with contextlib.suppress(Exception):
        while True:
            outbox.flush()
            last = receiver.receive(timeout=1)
    assert isinstance(last, Failed) and last.request == 5
    for end in (receiver, outbox, cluster):
        end.close()
