"""Processes of the engine that fail by themselves, at the worst moment: who asked is told, and the group goes on."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.engine import output, worker
from penstock.engine.board import Board
from penstock.engine.client import Client
from penstock.engine.config import EngineConfig
from penstock.engine.directory import vocabulary
from penstock.engine.launch import Launcher, TreeFailed
from penstock.engine.tree import Member, Tree
from penstock.engine.worker import Worker, device_of
from tests.crash.test_engine_deaths import load, must_be_told, must_serve_again
from tests.engine import START, Running, told

Life = Callable[[Tree, Member], None]
STEP_TIMEOUT = 3.0
LAST = 10  # step that goes well


# ── lives that fail in their first incarnation ───────────────────────────────────────────────────────────────────────
def raises_in_a_step(tree: Tree, me: Member) -> None:
    device = device_of(tree, me)
    begin = device.launch

    def launch(schedule: Any, step: Any) -> Any:
        if step.number > LAST and me.incarnation == 1:
            raise ArithmeticError("the device has caught fire")
        return begin(schedule, step)

    device.launch = launch  # type: ignore[method-assign]
    Worker(tree, me, device).run()


class Forgetful(Worker):
    """Misses a step: with that and the next one in flight no more come, so the core finds out by its deadline."""

    def _turn(self) -> None:
        if self._me.incarnation == 1 and self._next == LAST:
            self._following.receive()
        super()._turn()


def misses_a_step(tree: Tree, me: Member) -> None:
    Forgetful(tree, me, device_of(tree, me)).run()


def dies_between_result_and_answer(tree: Tree, me: Member) -> None:
    mine = output.Output(tree, me, vocabulary(tree.config))
    done, results = mine._state.done, iter(range(LAST))

    def die_or(message: Any) -> Any:
        if me.incarnation == 1 and next(results, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return done(message)

    mine._state.done = die_or  # type: ignore[method-assign]
    while mine.turn():
        pass
    mine.close()


def cannot_load(tree: Tree, me: Member) -> None:
    tree.groups[me.group].inbox.sender(tree.worker_lane(me.index), name=str(me))  # so that the core mourns for it
    time.sleep(0.2)
    raise ValueError("there are no weights in '/models/x'")


@contextlib.asynccontextmanager
async def tree_with(kind: str, life: Life, **options: Any) -> AsyncIterator[Running]:
    """In which one process of that kind lives this life."""
    launcher = Launcher(EngineConfig(simulated=told(), step_timeout=STEP_TIMEOUT, **options))
    unit = launcher.units[0]
    at = next(at for at, part in enumerate(unit._parts) if part[0] == kind)
    unit._parts[at] = (*unit._parts[at][:2], life)
    try:
        launcher.start()
        await launcher.serving(START)
        yield Running(launcher)
    finally:
        await launcher.stop()


@pytest.mark.parametrize(
    ("kind", "life"),
    [("worker", raises_in_a_step), ("worker", misses_a_step), ("output", dies_between_result_and_answer)],
)
def test_who_fails_in_the_middle_of_a_step_costs_the_open_requests_and_no_more(kind: str, life: Life) -> None:
    async def scene() -> None:
        async with tree_with(kind, life) as tree, Client(tree.launcher.tree, 0) as client:
            began = asyncio.get_running_loop().time() + (STEP_TIMEOUT if life is misses_a_step else 0)
            await must_be_told(await load(client, 4000), began, life.__name__)
            await must_serve_again(tree, client)
            assert tree.number(Board.SERVING) == 2

    asyncio.run(scene())


def test_a_model_that_cannot_be_loaded_ends_the_tree_with_the_reason_and_not_with_that_of_its_mourners() -> None:
    async def scene() -> None:
        with pytest.raises(TreeFailed, match=r"worker 0\.0 #3 ended 3 times .*: ValueError: there are no weights in"):
            async with tree_with("worker", cannot_load):
                pass

    asyncio.run(scene())


def test_what_is_no_message_costs_the_core_that_message_alone() -> None:
    async def scene() -> None:
        async with tree_with("worker", worker.run) as tree, Client(tree.launcher.tree, 0) as client:
            core = tree.child("core").pid
            sender = client._cores[0]._end  # below the codec
            for frame in (b"", b"\x00", b"\xff" * 9, b"\x00\xc1", bytes(100)):
                await sender.send(frame, 5.0)
            await must_serve_again(tree, client)
            assert tree.child("core").pid == core

    asyncio.run(scene())
