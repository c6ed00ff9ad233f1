"""Images of requests, without an engine: what a stream holds, and what a device opens."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import Missing, Store
from penstock.engine.client.client import Client, ImageInput
from penstock.engine.client.stream import EngineError, OutputChunk, OutputStream
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import FinishReason, Inputs, SamplingParams, Submit
from penstock.engine.worker.simulated_device import SimulatedRunner
from penstock.engine.worker.worker import build_result
from penstock.tensor import Handle, Scope
from tests.support.loops import in_a_loop

SIZE, LENGTH = 4, 10  # of a block; ids of an image


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def pixels(number: int = 0) -> dict[str, np.ndarray]:
    return {"pixel_values": np.full((3, 64, 64), number, np.float32)}


def must_be_held_by_nobody(store: Store) -> None:
    items = store.stats().items
    assert not [item for item in items if item.holders or item.is_being_written]
    assert store.stats().pool.blocks == len(items)


def a_store() -> Store:
    return Store(8 << 20)


# ── what a stream holds ──────────────────────────────────────────────────────────────────────────────────────────────
scopes: list[Scope] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    scopes.clear()


def held_by(stream_of: Any, store: Store) -> OutputStream:
    scope = Scope(store, inline_nbytes=0)
    scope.put(pixels(), key=key(1))
    scope.put(pixels())
    stream: OutputStream = stream_of(scope)
    scopes.append(scope)  # the fixture above ends it
    return stream


def fail(stream: OutputStream) -> None:
    stream.fail(EngineError(503, "it died"))


def answer(stream: OutputStream) -> None:
    stream.add(OutputChunk(0, b"a", [1]))
    stream.add(OutputChunk(0, b"b", [2], FinishReason.STOP))


@pytest.mark.parametrize("end", [fail, answer, OutputStream.abort])
def test_ended_stream_releases_its_images_before_it_is_read(end: Any) -> None:
    with a_store() as store:
        stream = held_by(lambda scope: OutputStream(1, 0, 1, 5, 1, scope), store)
        assert store.stats().pool.holders
        end(stream)
        assert stream.is_over and scopes[0].is_released
        must_be_held_by_nobody(store)


def test_a_stream_that_takes_too_long_holds_nothing() -> None:
    with a_store() as store:

        async def scene() -> None:
            stream = held_by(lambda scope: OutputStream(1, 0, 1, 5, 1, scope), store)
            stream.begin(lambda _: None, 0.01)
            with pytest.raises(EngineError):
                await anext(stream)
            must_be_held_by_nobody(store)

        asyncio.run(scene())


@in_a_loop
async def test_requests_that_end_in_a_thousand_ways_leave_nothing_held(seed: int) -> None:
    """No core serves: what is submitted stays in the inbox until it is aborted, or the client closes."""
    chance = random.Random(seed)

    async def send_request(client: Client, number: int) -> None:
        values = [ImageInput(pixels(number), 2, LENGTH, key(number % 20) if number % 3 else None)]
        submitting = asyncio.ensure_future(client.submit(range(20), values=values))
        for _ in range(chance.choice([0, 1, 3, 30])):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            submitting.cancel()
        try:
            stream = await submitting
        except (asyncio.CancelledError, EngineError):
            return
        how = chance.random()
        if how < 0.4:
            stream.abort()
        elif how < 0.7:
            async with stream:
                pass

    cluster = Cluster.open(EngineConfig(simulated=SimulatedDevice(), store_nbytes=4 << 20, output_processors=0))
    assert cluster.store is not None
    try:
        board = StatusBoard(cluster.board, writable=True)
        board.row(0)[StatusBoard.SERVING] = 1
        async with Client(cluster, 0) as client:
            reader = asyncio.ensure_future(drain(cluster))
            for begin in range(0, 1000, 20):
                await asyncio.gather(*(send_request(client, number) for number in range(begin, begin + 20)))
            assert client.open_requests > 0, "some are left open until the client closes"
        reader.cancel()
        stats = cluster.store.stats()
        assert stats.hits and stats.puts
        deadline = time.monotonic() + 5
        while any(item.holders for item in cluster.store.stats().items) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # threads that were putting when their request was cancelled
        must_be_held_by_nobody(cluster.store)
        board.close()
    finally:
        cluster.close()


@in_a_loop
async def test_refused_request_releases_its_images() -> None:
    cluster = Cluster.open(EngineConfig(simulated=SimulatedDevice(), store_nbytes=4 << 20))
    try:
        async with Client(cluster, 0) as client:
            scope = Scope(cluster.store)
            item = scope.put(pixels(), key=key(1))
            for arguments in (
                {"items": ((item, 2, LENGTH),), "scope": scope},
                {"values": [ImageInput(pixels(), 2, LENGTH)]},
            ):
                with pytest.raises(EngineError, match="no group of the engine serves now"):
                    await client.submit(range(20), **arguments)
            assert scope.is_released
        assert cluster.store is not None
        must_be_held_by_nobody(cluster.store)
    finally:
        cluster.close()


async def drain(cluster: Cluster) -> None:
    """A core that listens and answers no request."""
    async with cluster.groups[0].inbox.open_async_receiver(name="core 0.0 #1") as inbox:
        while True:
            await inbox.receive()


# ── what a device opens ──────────────────────────────────────────────────────────────────────────────────────────────
class Opened:
    """A simulated device and its scheduler, and the images that were opened."""

    def __init__(self, store: Store | None, **options: Any) -> None:
        self.items: list[Handle] = []
        self.failed: list[tuple[int, FinishReason]] = []
        self._store = store
        self._schedule = BatchState(4, 64, SIZE)
        self._scheduler = Scheduler(self._schedule, SchedulerConfig(max_model_len=128, max_num_batched_tokens=16))
        simulated = SimulatedDevice(step_seconds=0, **options)
        self._device = SimulatedRunner(simulated, 4, open_handle=self._open)
        self._requests = 0
        self._steps = 0

    def _open(self, item: Handle) -> Any:
        self.items.append(item)
        return item.open(self._store)

    def ask(self, ids: list[int], items: list[Handle], positions: list[int], samples: int = 1) -> None:
        """Until it is answered."""
        places = np.array(positions, np.int32)
        inputs = Inputs(np.array([len(items)], np.int32), tuple(items), places, np.full(len(items), LENGTH, np.int32))
        params = SamplingParams(max_tokens=3, n=samples)
        self._scheduler.submit(Submit(0, self._requests, np.array(ids, np.int32), params, inputs=inputs))
        self._requests += 1
        plan = StepBuilder(self._schedule)
        while self._scheduler.open_requests:
            assert self._scheduler.schedule(plan)
            step = plan.build(1, self._steps)
            self._schedule.apply(step)
            self._scheduler.on_sent(step)
            sampled = self._device.launch(self._schedule, step).result()
            done = build_result(step, sampled)
            self._steps += 1
            self.failed += done.failures()
            self._scheduler.on_result(done)


PROMPT = list(range(40))


def test_image_is_opened_once_and_not_when_its_blocks_are_cached() -> None:
    with a_store() as store:
        device = Opened(store)
        with Scope(store) as scope:
            first, second = scope.put(pixels(1), key=key(1)), scope.put(pixels(2), key=key(2))
            device.ask(PROMPT, [first, second], [1, 29], samples=3)
            assert device.items == [first, second]
            device.ask([*PROMPT, 7], [first, second], [1, 29])
            assert device.items == [first, second]
            other = scope.put(pixels(3), key=key(3))
            device.ask(PROMPT, [first, other], [1, 29])
            assert device.items == [first, second, other] and not device.failed
        must_be_held_by_nobody(store)


def test_inline_images_are_opened_with_and_without_a_key() -> None:
    device = Opened(None)
    with Scope() as scope:
        device.ask(PROMPT, [scope.put(pixels(1)), scope.put(pixels(2), key=key(2))], [1, 25])
    assert len(device.items) == 2 and not device.failed


def test_request_of_an_evicted_image_fails_alone() -> None:
    with a_store() as store:
        device = Opened(store)
        with Scope(store) as scope:
            item, keyless = scope.put(pixels(1), key=key(1)), scope.put(pixels(2))
        store.clear()
        device.ask(PROMPT, [item], [1], samples=2)
        device.ask(PROMPT, [keyless], [1])
        assert [why for _, why in device.failed] == [FinishReason.MISSING] * 3
        with Scope(store) as scope:
            scope.put(pixels(1), key=key(1))
            device.ask(PROMPT, [item], [1])  # a client has put it again: it is found by its key
        assert len(device.failed) == 3
        with pytest.raises(Missing):
            keyless.open(store)


def test_a_device_that_is_told_so_opens_nothing() -> None:
    with a_store() as store:
        device = Opened(store, opens_images=False)
        with Scope(store) as scope:
            device.ask(PROMPT, [scope.put(pixels())], [1])
        assert device.items == []
