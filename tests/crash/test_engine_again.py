"""Groups and servers that take the places of dead ones, however often: none is taken for another."""

import asyncio
import os
import signal

import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster import topology as trees
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.messages import ChunkFormat, SamplingParams, Style
from tests import tiers
from tests.support.engine import SHAPE, START, Running, answered, prompt, running
from tests.support.loops import in_a_loop

UNANSWERED = 4.0  # seconds; a request of a few tokens
BATCH = 4  # requests that a server submits; it submits the next ones when all are answered
BATCH_TOKENS = 120


async def must_answer(engine: Running, client: Client, tokens: int = 20) -> None:
    ids = prompt()
    assert (await answered(client, ids, max_tokens=tokens))[0][0] == engine.rule.answer(ids, tokens)


async def must_serve(engine: Running, incarnation: int) -> None:
    await engine.until(lambda: engine.number(StatusBoard.SERVING) == incarnation or engine.launcher.has_failed, START)
    await engine.launcher.serving(START)


@in_a_loop
async def test_group_serves_again_when_the_slots_of_its_dead_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table of peers that is full gives the places of the last dead to the next processes: their names are gone."""
    monkeypatch.setattr(trees, "PEERS", 16)
    async with running(**SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        incarnation = 1
        for number in range(tiers.choose(5, 8, 8)):
            victim = [("core", 0), ("worker", 1), ("output", 0), ("worker", 0)][number % 4]
            os.kill(engine.child(*victim).pid, signal.SIGKILL)
            incarnation += victim[0] != "output"
            await must_serve(engine, incarnation)
            await must_answer(engine, client)
        await engine.must_be_empty()


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def ask_for_ever(cluster: Cluster, me: ProcessId) -> None:
    """Ends with an error when one of its requests is not answered in time. Every other one has a `ChunkFormat`."""

    async def life() -> None:
        is_over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
        async with Client(cluster, me) as client:
            params = SamplingParams(max_tokens=BATCH_TOKENS // BATCH, ignore_eos=True)
            while (
                StatusBoard(cluster.board).row(0)[StatusBoard.SERVING] == 0
            ):  # the first server may begin before its group
                await asyncio.sleep(0.01)
            while not is_over.is_set():
                formats = [ChunkFormat(Style.COMPLETION, b'{"id":"1"'), None] * (BATCH // 2)
                streams = [
                    await client.submit(prompt(), params, timeout=UNANSWERED, chunk_format=format_of_request)
                    for format_of_request in formats
                ]
                for stream in streams:
                    async for _ in stream:
                        pass

    asyncio.run(life())


@in_a_loop
async def test_server_in_the_place_of_a_dead_one_is_not_taken_for_it(
    quick_restarts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core and the output see the death after the next server has submitted requests, and after the dead server's
    name is gone from the table of peers."""
    monkeypatch.setattr(trees, "PEERS", 7)
    async with running(ask_for_ever) as engine:
        group = {child.pid for child in engine.children() if child.member.kind != "server"}
        worker = engine.child("worker")
        for incarnation in range(2, 6):
            await engine.until(lambda: engine.number(StatusBoard.OPEN) > 0)
            worker.signal(signal.SIGSTOP)
            engine.child("server").signal(signal.SIGKILL)
            await engine.until(lambda name=f"server 0.0 #{incarnation}": name in who_is_there(engine))
            await asyncio.sleep(0.2)
            worker.signal(signal.SIGCONT)
        survivor = engine.child("server").pid
        sampled = engine.number(StatusBoard.SAMPLED)
        await engine.until(lambda: engine.number(StatusBoard.SAMPLED) > sampled + 10 * BATCH_TOKENS)
        assert engine.child("server").pid == survivor, "its requests were not answered"
        assert group == {child.pid for child in engine.children() if child.member.kind != "server"}, (
            "somebody of it died"
        )


def who_is_there(engine: Running) -> set[str]:
    """At the core's inbox."""
    peers = engine.launcher.cluster.groups[0].inbox.snapshot()["peers"]
    return {peer["name"] for peer in peers if peer["state"] == "live"}
