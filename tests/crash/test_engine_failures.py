"""Processes of the engine that fail by themselves, at the worst moment: clients are told, and the group goes on."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Timeout
from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.launcher import launcher as launcher_module
from penstock.engine.launcher.back_off import BackOff
from penstock.engine.launcher.launcher import ClusterFailed, Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Abort, SamplingParams, Step, Submit
from penstock.engine.worker import worker
from penstock.engine.worker.device import PendingStep, SamplerOutput
from penstock.engine.worker.worker import Worker, device_of
from tests import tiers
from tests.crash.poisoned import run_output
from tests.crash.test_engine_deaths import must_serve_again
from tests.support.engine import START, Running, answered, prompt, simulated_device
from tests.support.loops import in_a_loop

Life = Callable[[Cluster, ProcessId], None]
STEP_TIMEOUT = 3.0
LAST = 10  # step that goes well


# ── lives that fail in their first incarnation ───────────────────────────────────────────────────────────────────────
def raises_in_a_step(cluster: Cluster, me: ProcessId) -> None:
    device = device_of(cluster, me)
    begin = device.launch

    def launch(schedule: Any, step: Any) -> Any:
        if step.number > LAST and me.incarnation == 1:
            raise ArithmeticError("the device has caught fire")
        return begin(schedule, step)

    device.launch = launch  # type: ignore[method-assign]
    Worker(cluster, me, device).run()


def raises_while_a_thread_waits(cluster: Cluster, me: ProcessId) -> None:
    device = device_of(cluster, me)
    begin = device.launch

    def fail() -> SamplerOutput:
        raise ArithmeticError("the device has caught fire")

    def launch(schedule: Any, step: Any) -> Any:
        pending = begin(schedule, step)
        return SimpleNamespace(result=fail) if step.number > LAST and me.incarnation == 1 else pending

    device.launch = launch  # type: ignore[method-assign]
    Worker(cluster, me, device).run()


class Forgetful(Worker):
    """Misses a step: what comes next is out of step, or nothing comes, and the core finds out by its deadline."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        add = self._pending.add

        def add_and_miss(step: Step, pending: PendingStep) -> None:
            add(step, pending)
            if step.number == LAST:
                self._steps.receive()

        self._pending.add = add_and_miss  # type: ignore[method-assign]


def misses_a_step(cluster: Cluster, me: ProcessId) -> None:
    cls = Forgetful if me.incarnation == 1 else Worker
    cls(cluster, me, device_of(cluster, me)).run()


def dies_between_result_and_answer(cluster: Cluster, me: ProcessId) -> None:
    results = iter(range(LAST))

    def die(message: Any) -> None:
        if (me.incarnation, me.life) == (1, 0) and next(results, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    run_output(cluster, me, die)


def cannot_load(cluster: Cluster, me: ProcessId) -> None:
    cluster.groups[me.group].inbox.open_sender(
        cluster.worker_lane(me.index), name=str(me)
    )  # so that the core mourns for it
    time.sleep(0.2)
    raise ValueError("there are no weights in '/models/x'")


def use_small_token_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores have room for few messages to an output processor."""
    Ring = penstock.Ring

    def small(carried: Any, *, name: str, **options: Any) -> Any:
        return Ring(carried, name=name, **options | {"capacity": 4096} if name.startswith("tokens") else options)

    monkeypatch.setattr(penstock, "Ring", small)


@contextlib.asynccontextmanager
async def tree_with(kind: str, life: Life, **options: Any) -> AsyncIterator[Running]:
    """In which one process of that kind lives this life."""
    launcher = Launcher(EngineConfig(simulated=simulated_device(), step_timeout=STEP_TIMEOUT, **options))
    unit = launcher.units[0]
    at = next(at for at, part in enumerate(unit._parts) if part[0] == kind)
    unit._parts[at] = (*unit._parts[at][:2], life)
    try:
        launcher.start()
        await launcher.serving(START)
        yield Running(launcher)
    finally:
        await launcher.stop()


FAILURES = [
    ("worker", raises_in_a_step),
    ("worker", raises_while_a_thread_waits),
    ("worker", misses_a_step),
    ("output", dies_between_result_and_answer),
]


@pytest.mark.parametrize(("kind", "life"), FAILURES)
@in_a_loop
async def test_failure_in_the_middle_of_a_step_changes_no_answer(kind: str, life: Life) -> None:
    async with tree_with(kind, life) as engine, Client(engine.launcher.cluster, 0) as client:
        prompts = [prompt() for _ in range(4)]
        answers = await asyncio.gather(*(answered(client, ids, max_tokens=100, ignore_eos=True) for ids in prompts))
        assert [ids for ((ids, _),) in answers] == [engine.rule.answer(ids, 100) for ids in prompts]
        assert engine.number(StatusBoard.SERVING) == (1 if kind == "output" else 2)


@in_a_loop
async def test_unloadable_model_ends_the_server_with_the_first_reason(quick_restarts: None) -> None:
    with pytest.raises(ClusterFailed, match=r"worker 0\.0 #3 ended 3 times .*: ValueError: there are no weights in"):
        async with tree_with("worker", cannot_load):
            pass


@in_a_loop
async def test_malformed_message_costs_the_core_that_message_alone() -> None:
    async with tree_with("worker", worker.run) as engine, Client(engine.launcher.cluster, 0) as client:
        core = engine.child("core").pid
        sender = client._cores._senders[0]._end  # below the codec
        for frame in (b"", b"\x00", b"\xff" * 9, b"\x00\xc1", bytes(100)):
            sender.send(frame, 5.0)
        await must_serve_again(engine, client)
        assert engine.child("core").pid == core


async def pieces_of(stream: Any) -> list[int]:
    return [token async for piece in stream for token in piece.ids]


@in_a_loop
async def test_malformed_request_is_refused_at_once() -> None:
    async with tree_with("worker", worker.run) as engine, Client(engine.launcher.cluster, 0) as client:
        core = engine.child("core").pid
        wrong: Any = "soon"
        for options in ({"priority": wrong}, {"client": 7}, {"params": SamplingParams(seed=wrong)}):
            with pytest.raises(EngineError, match="expected") as caught:
                await asyncio.wait_for(pieces_of(await client.submit([1, 2, 3], **options)), 10.0)
            assert caught.value.status == 400 and client.open_requests == 0
        await must_serve_again(engine, client)
        assert engine.child("core").pid == core


@pytest.mark.parametrize("outputs", [pytest.param(0, marks=tiers.needs_all), 1])
@in_a_loop
async def test_a_server_speaks_for_itself_alone(outputs: int) -> None:
    shape = {"api_server_count": 2, "output_processors": outputs}
    async with tree_with("worker", worker.run, **shape) as engine:
        async with Client(engine.launcher.cluster, 0) as client, Client(engine.launcher.cluster, 1) as liar:
            pids = {child.pid for child in engine.children()}
            asking = asyncio.ensure_future(pieces_of(await client.submit([1, 2, 3], SamplingParams(max_tokens=300))))
            await engine.until(lambda: engine.number(StatusBoard.OPEN) == 1)
            (request,) = client._streams
            core = liar._cores._senders[0]
            await core.send(Abort(0, np.array([request], np.int32)))
            await core.send(Submit(0, request + 1, np.arange(4, dtype=np.int32), SamplingParams()))
            assert await asyncio.wait_for(asking, 20.0) == engine.rule.answer(np.array([1, 2, 3], np.int32), 300)
            liar._me = ProcessId("server", 0, 0, 1)
            with pytest.raises(EngineError, match="server 1 asked as server 0"):
                await asyncio.wait_for(pieces_of(await liar.submit([4, 5])), 10.0)
            liar._me = ProcessId("server", 0, 1, 1)
            await must_serve_again(engine, client)
            assert {child.pid for child in engine.children()} == pids


@in_a_loop
async def test_timeout_of_an_answer_begins_with_the_call_of_submit() -> None:
    async with tree_with("worker", worker.run) as engine, Client(engine.launcher.cluster, 0) as client:
        send, clock = client._cores._senders[0].send, asyncio.get_running_loop().time

        async def late(message: Any, timeout: float | None = None) -> None:
            await asyncio.sleep(0.3)
            await send(message, timeout)

        client._cores._senders[0].send = late  # type: ignore[method-assign]
        began = clock()
        with pytest.raises(EngineError) as caught:
            await pieces_of(await client.submit([1, 2], SamplingParams(max_tokens=3000), timeout=0.6))
        assert caught.value.status == 504 and clock() - began < 0.85
        for child in engine.children():
            child.signal(signal.SIGSTOP)

        async def full(message: Any, timeout: float | None = None) -> None:
            await asyncio.sleep(timeout or 60)
            raise Timeout("no room")

        client._cores._senders[0].send = full  # type: ignore[method-assign]
        began = clock()
        with pytest.raises(EngineError) as caught:
            await client.submit([1, 2], timeout=0.3)
        assert caught.value.status == 504 and clock() - began < 2.0
        client._cores._senders[0].send = send  # type: ignore[method-assign]
        for child in engine.children():
            child.signal(signal.SIGCONT)


def test_unit_that_fails_again_and_again_starts_after_longer_pauses() -> None:
    back_off = BackOff()

    def pauses(times: int, is_failed_start: bool, lived: float, is_from_outside: bool = False) -> list[float]:
        seconds = []
        for _ in range(times):
            back_off.count(is_failed_start, lived, is_from_outside=is_from_outside)
            seconds.append(back_off.seconds)
        return seconds

    assert pauses(1, False, 1000.0) == [0.0]
    assert pauses(6, False, 5.0) == [0.0, 0.1, 0.5, 1.0, 2.0, 2.0]  # it has served each time
    assert pauses(2, False, 1000.0) == [0.0, 0.0]
    assert pauses(10, True, 5.0) == [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]  # it has not
    assert pauses(1, False, 1000.0) == [0.0]
    assert pauses(10, True, 5.0, is_from_outside=True) == [0.0] * 10
    assert back_off.failed_starts == 10
    assert pauses(2, True, 0.25, is_from_outside=True) == [0.75, 0.75], "one start in a second"
    assert pauses(2, True, 5.0) == [0.1, 0.5], "kills from outside are no failures"


@pytest.mark.parametrize("lived", [30.0, 1e6])
def test_back_off_forgets_failures_before_a_long_life_ended_from_outside(lived: float) -> None:
    back_off = BackOff()
    for is_failed_start in (False, True):
        for _ in range(5):
            back_off.count(is_failed_start, 5.0, is_from_outside=False)
        assert back_off.seconds == (4.0 if is_failed_start else 2.0)
        back_off.count(False, lived, is_from_outside=True)
        back_off.count(False, 5.0, is_from_outside=False)
        assert back_off.seconds == 0.0, "the first failure in a while"
    back_off.count(True, 5.0, is_from_outside=False)
    assert back_off.seconds == 0.1


@in_a_loop
async def test_launcher_forgets_kills_for_want_of_memory_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "OOM_KILL_S", 0.01)
    async with tree_with("worker", worker.run) as engine:
        losses = [unit._loss for unit in engine.launcher.units]
        for loss in losses:
            monkeypatch.setattr(loss, "_count_oom_kills", lambda: 1 << 62)
        await engine.until(lambda: not any(loss.is_maybe_out_of_memory for loss in losses))


@in_a_loop
async def test_an_output_that_takes_no_tokens_delays_the_core_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_token_rings(monkeypatch)
    async with tree_with("worker", worker.run) as engine, Client(engine.launcher.cluster, 0) as client:
        output, began = engine.child("output"), engine.number(StatusBoard.STEPS)
        output.signal(signal.SIGSTOP)
        asking = asyncio.ensure_future(pieces_of(await client.submit([1, 2, 3], SamplingParams(max_tokens=2000))))
        await engine.until(lambda: engine.number(StatusBoard.STEPS) > began + 10)
        sent = -1
        while sent != (sent := engine.number(StatusBoard.STEPS)):
            await asyncio.sleep(0.2)
        assert sent < began + 1500, "the core goes on, though its tokens have no room"
        output.signal(signal.SIGCONT)
        assert await asyncio.wait_for(asking, 30.0) == engine.rule.answer(np.array([1, 2, 3], np.int32), 2000)
        await must_serve_again(engine, client)
        assert engine.number(StatusBoard.SERVING) == 1
