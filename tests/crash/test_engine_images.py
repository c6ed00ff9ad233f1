"""Servers of the engine die while they put and hold images, and no process holds these images afterwards."""

import asyncio
import contextlib
import os
import signal

import numpy as np

from penstock import Store
from penstock.engine.client.client import Client, ImageInput
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.process import ChildProcess
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.messages import SamplingParams
from tests.support.engine import PATIENCE, SHAPE, START, Running, prompt, running
from tests.support.loops import in_a_loop

NBYTES = 32 << 20
LENGTH = 8  # ids of an image
WITH_STORE = {**SHAPE, "store_nbytes": NBYTES}


def images(number: int) -> list[ImageInput]:
    """One with a key, which others may have too, and one without."""
    pixels = np.full((3, 224, 224), number, np.float32)
    return [
        ImageInput({"pixel_values": pixels}, 0, LENGTH, number.to_bytes(32, "little")),
        ImageInput([pixels], 10, LENGTH),
    ]


async def ask(client: Client, number: int, tokens: int) -> tuple[list[int], list[int]]:
    """What was asked, and the answer."""
    ids = prompt(24)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async with await client.submit(ids, params, values=images(number), timeout=PATIENCE) as stream:
        return ids, [token async for piece in stream for token in piece.ids]


async def must_be_held_by_nobody(engine: Running) -> None:
    """Now, or as soon as the dead have been reaped; and all memory is there for the next processes."""
    store = engine.launcher.cluster.store
    assert store is not None
    await engine.until(lambda: not held(store))
    store.clear()
    assert store.stats().pool.blocks == 0
    store.pool.take(NBYTES).release()


def held(store: Store) -> list[object]:
    stats = store.stats()
    items = stats.items
    strays = stats.pool.blocks - len(items)  # without a key
    return [item for item in items if item.holders or item.is_being_written] + ([strays] if strays else [])


def servers(engine: Running) -> list[ChildProcess]:
    return [child for child in engine.children() if child.member.kind == "server"]


def serve(cluster: Cluster, me: ProcessId) -> None:
    """Asks for ever."""

    async def life() -> None:
        is_over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
        async with Client(cluster, me) as client:
            number = 0
            while not is_over.is_set():
                with contextlib.suppress(EngineError):
                    await asyncio.gather(*(ask(client, (number := number + 1) % 6, 30) for _ in range(4)))

    asyncio.run(life())


@in_a_loop
async def test_servers_die_while_they_put_and_hold_images() -> None:
    async with running(serve, api_server_count=2, **WITH_STORE) as engine:
        store = engine.launcher.cluster.store
        assert store is not None
        for _ in range(3):
            await engine.until(
                lambda: len(servers(engine)) == 2 and engine.number(StatusBoard.OPEN) > 4 and held(store), START
            )
            victim = engine.child("server", 1)
            os.kill(victim.pid, signal.SIGKILL)
            await engine.until(lambda gone=victim.pid: gone not in {child.pid for child in engine.children()})
            await engine.until(lambda: engine.number(StatusBoard.OPEN) <= 4)  # its requests are forgotten
        await engine.until(
            lambda: len(servers(engine)) == 2 and engine.number(StatusBoard.OPEN) > 4, START
        )  # handle SIGTERM
        for unit in engine.launcher.units:
            if not unit.is_group:
                unit.signal(signal.SIGTERM)
        engine.launcher.is_stopping = True  # and the launcher restarts no server
        await engine.until(lambda: not servers(engine))
        await engine.until(lambda: engine.number(StatusBoard.OPEN) == 0)
        await must_be_held_by_nobody(engine)
