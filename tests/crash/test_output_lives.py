"""Output processors that die alone are started again in their place, and the rest of their group does not notice.

Requests of a dead output processor are submitted again by their client; what is asserted of answers is what an
undisturbed run gives.
"""

import asyncio
import os
import signal
import time
from typing import Any

import numpy.typing as npt
import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster.migration_counters import MIGRATION_CAUSES, OUTPUT, MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.messages import SamplingParams
from tests import tiers
from tests.crash.poisoned import run_output
from tests.crash.test_engine_failures import tree_with, use_small_token_rings
from tests.support.engine import PATIENCE, SHAPE, START, Running, answered, prompt, running
from tests.support.loops import in_a_loop

TOKENS = 600
MIGRATED = MigrationCounters.MIGRATIONS + MIGRATION_CAUSES.index(OUTPUT)


class Answers:
    """Requests that are being answered, each by the ids that the device's rule gives."""

    def __init__(self, engine: Running, client: Client, many: int, tokens: int = TOKENS) -> None:
        self._engine, self._tokens = engine, tokens
        self.prompts = [prompt() for _ in range(many)]
        self.tasks = [asyncio.ensure_future(self._ask(client, ids)) for ids in self.prompts]

    async def _ask(self, client: Client, ids: npt.NDArray[Any]) -> list[int]:
        ((actual, _),) = await answered(client, ids, max_tokens=self._tokens, ignore_eos=True)
        return actual

    async def begun(self) -> None:
        row = self._engine.launcher.board.row(0)
        steps = row[StatusBoard.STEPS]
        await self._engine.until(lambda: row[StatusBoard.RUNNING] == len(self.prompts))
        await self._engine.until(lambda: row[StatusBoard.STEPS] > steps + 20)

    async def must_be_exact(self) -> None:
        for ids, outcome in zip(
            self.prompts, await asyncio.wait_for(asyncio.gather(*self.tasks), PATIENCE), strict=True
        ):
            assert outcome == self._engine.rule.answer(ids, self._tokens)


def others(engine: Running) -> set[int]:
    return {child.pid for child in engine.children() if child.member.kind != "output"}


async def must_begin_life(engine: Running, life: int, index: int = 0) -> None:
    def is_there() -> bool:
        lives = [child.member.life for child in engine.children() if child.member.kind == "output"]
        return len(lives) > index and lives[index] == life and not engine.number(StatusBoard.ABSENT_OUTPUTS)

    await engine.until(lambda: engine.number(StatusBoard.ABSENT_OUTPUTS) or is_there())
    await engine.until(is_there, START)


@in_a_loop
async def test_output_killed_twice_restarts_alone_and_answers_stay_exact() -> None:
    async with running(**SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        before = others(engine)
        for life in (1, 2):
            answers = Answers(engine, client, 12)
            await answers.begun()
            began = time.monotonic()
            os.kill(engine.child("output").pid, signal.SIGKILL)
            await answers.must_be_exact()
            print(f"life {life}: all answers were there {time.monotonic() - began:.2f} s after the kill")
            assert engine.child("output").member == ProcessId("output", 0, 0, 1, life)
        assert others(engine) == before and engine.number(StatusBoard.SERVING) == 1
        assert client.counters[0][MIGRATED] == 24 and client.counters[0][MigrationCounters.GIVEN_UP] == 0
        entry = engine.launcher.board.members[-2]
        assert (entry.incarnation, entry.life, entry.pid) == (1, 2, engine.child("output").pid)
        await engine.must_be_empty()


@in_a_loop
async def test_requests_of_the_other_output_go_on_undisturbed() -> None:
    async with running(output_processors=2) as engine, Client(engine.launcher.cluster, 0) as client:
        answers = Answers(engine, client, 12, 1000)
        await answers.begun()
        numbers = set(client._streams)
        os.kill(engine.child("output", 0).pid, signal.SIGKILL)
        await engine.until(lambda: engine.number(StatusBoard.ABSENT_OUTPUTS) == 1)
        steps, row = engine.number(StatusBoard.STEPS), engine.launcher.board.row(0)
        await engine.until(lambda: row[StatusBoard.STEPS] > steps + 50 and row[StatusBoard.ABSENT_OUTPUTS])
        assert {number for number in numbers if number % 2} <= set(client._streams), "one was submitted again"
        assert client.counters[0][MIGRATED] == sum(number % 2 == 0 for number in numbers)
        await answers.must_be_exact()
        assert engine.number(StatusBoard.SERVING) == 1 and not client.counters[0][MigrationCounters.GIVEN_UP]
        await engine.must_be_empty()


def dies_with_the_last_chunk(cluster: Cluster, me: ProcessId) -> None:
    """Has received the end of a request, and has sent nothing of it."""

    def die(tokens: Any) -> None:
        if tokens.ended and not me.life:
            time.sleep(0.2)  # the core closes the request meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    run_output(cluster, me, die)


@in_a_loop
async def test_request_whose_last_chunk_died_with_the_output_is_answered() -> None:
    async with (
        tree_with("output", dies_with_the_last_chunk) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        answers = Answers(engine, client, 3, 30)
        await answers.must_be_exact()
        assert engine.number(StatusBoard.SERVING) == 1 and engine.child("output").member.life == 1
        await engine.must_be_empty()


def hangs(cluster: Cluster, me: ProcessId) -> None:
    """In its first life, after some messages."""
    messages = iter(range(10))

    def hang(_: Any) -> None:
        if me.life == 0 and next(messages, None) is None:
            time.sleep(600)

    run_output(cluster, me, hang)


@in_a_loop
async def test_output_that_makes_no_room_is_killed_by_the_core_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_token_rings(monkeypatch)
    async with tree_with("output", hangs) as engine, Client(engine.launcher.cluster, 0) as client:
        before = others(engine)
        await Answers(engine, client, 4).must_be_exact()
        assert engine.child("output").member.life == 1 and others(engine) == before
        await engine.must_be_empty()


@tiers.needs_all
@in_a_loop
async def test_output_whose_lives_are_short_again_and_again_costs_its_group() -> None:
    async with running() as engine, Client(engine.launcher.cluster, 0) as client:
        for life in range(4):
            await must_begin_life(engine, life)
            engine.child("output").signal(signal.SIGKILL)
        await engine.until(lambda: engine.number(StatusBoard.SERVING) == 2, START)
        await Answers(engine, client, 2, 20).must_be_exact()
        assert engine.child("output").member == ProcessId("output", 0, 0, 2)


@in_a_loop
async def test_tree_that_ends_while_an_output_is_away_leaves_nothing() -> None:
    async with running(output_processors=2) as engine, Client(engine.launcher.cluster, 0) as client:
        answers = Answers(engine, client, 4, 3000)
        await answers.begun()
        engine.child("output", 1).signal(signal.SIGKILL)
        await engine.until(lambda: engine.number(StatusBoard.ABSENT_OUTPUTS) == 2)
        await engine.until(lambda: len(engine.children()) == 4)  # its next life loads
        for task in answers.tasks:
            task.cancel()
        await asyncio.gather(*answers.tasks, return_exceptions=True)


@in_a_loop
async def test_request_that_is_given_up_while_its_output_is_away_leaves_nothing() -> None:
    async with running() as engine, Client(engine.launcher.cluster, 0) as client:
        engine.child("output").signal(signal.SIGKILL)
        await engine.until(lambda: engine.number(StatusBoard.ABSENT_OUTPUTS) == 1)
        streams = [await client.submit(prompt(), SamplingParams(max_tokens=9)) for _ in range(3)]
        await engine.until(lambda: engine.number(StatusBoard.OPEN) == 3)
        for stream in streams[:2]:
            stream.abort()
        await engine.until(lambda: engine.number(StatusBoard.OPEN) <= 1)
        actual = [token async for piece in streams[2] for token in piece.ids]
        assert len(actual) == 9
        await engine.must_be_empty()
