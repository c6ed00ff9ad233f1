"""Requests that lose their group at a bad time: clients leave, time runs out, servers end, groups stay away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.client.client import ImageInput
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.sampling_params import SamplingParams
from penstock.server.server_launcher import ServerLauncher
from tests import tiers
from tests.crash.comparable_requests import (
    Answer,
    AnyRequest,
    ClientRequest,
    HttpRequest,
    Progress,
    ask_all,
    require_equal,
)
from tests.crash.gated import GATE, fails_when_restarted, starts_behind_the_gate
from tests.crash.migrating import Migrating, migrating
from tests.crash.request_mix import Mix, Shape
from tests.support.engine import START, simulated_device
from tests.support.loops import in_a_loop

SHAPE = Shape("simulated", 1000, tuple(range(40, 62)))
LONG = 1500  # tokens: 4 s and more
WITHIN = 20.0  # seconds, on a busy machine, for what takes a moment
ENDS_WITHIN = 12.0  # seconds: an engine with waiting requests; less than its shutdown_timeout
SIMULATED = simulated_device(step_seconds=0.003, vocabulary=1000)


class Gate:
    """Processes that start behind it wait while it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self) -> None:
        self._path.touch()

    def open(self) -> None:
        self._path.unlink(missing_ok=True)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(tmp_path / "closed")
    monkeypatch.setenv(GATE, str(gate._path))
    yield gate
    gate.open()


def with_workers(life: Callable[..., None], groups: tuple[int, ...] = (0,)) -> Callable[[ServerLauncher], None]:
    def prepare(launcher: ServerLauncher) -> None:
        for unit in launcher.units:
            if unit.is_group and unit._group in groups:
                unit._parts = [(kind, index, life if kind == "worker" else run) for kind, index, run in unit._parts]

    return prepare


@contextlib.asynccontextmanager
async def gated(**options: Any) -> AsyncIterator[Migrating]:
    usual = {"simulated": SIMULATED, "store_nbytes": 8 << 20, "prepare": with_workers(starts_behind_the_gate)}
    async with migrating(**{**usual, **options}) as engine:
        yield engine


def over_http(tokens: int = LONG, *, is_streamed: bool = True) -> HttpRequest:
    body = {"model": "simulated", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": is_streamed}
    return HttpRequest("/v1/completions", body | ({"stream_options": {"include_usage": True}} if is_streamed else {}))


def over_client(tokens: int = LONG, **more: Any) -> ClientRequest:
    images = (ImageInput([np.zeros((3, 64, 64), np.float32)], 0, 8, bytes(32)),)
    return ClientRequest(list(range(20)), SamplingParams(max_tokens=tokens, ignore_eos=True), images=images, **more)


async def kill_group(engine: Migrating, group: int = 0) -> None:
    """Returns when it does not serve any more."""
    victims = [child for child in engine.children() if (child.member.kind, child.member.group) == ("worker", group)]
    victims[0].signal(signal.SIGKILL)
    await engine.until(lambda: engine.serving(group) == 0)


async def begun(engine: Migrating, *requests: AnyRequest) -> tuple[asyncio.Task[list[Answer]], Progress]:
    """Asks, and returns when something of an answer has been delivered to a client."""
    progress = Progress()
    asking = asyncio.ensure_future(ask_all(engine, requests, "", progress))
    await engine.until(lambda: progress.deliveries > 3 * len(requests))
    return asking, progress


def held(engine: Migrating) -> list[object]:
    store = engine.launcher.cluster.store
    assert store is not None
    return [item for item in store.stats().items if item.holders]


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def a_client_that_disconnects_while_its_request_waits_leaves_nothing(engine: Migrating, gate: Gate) -> None:
    gate.close()
    writers = []
    for is_streamed in (True, False):
        body = over_http(is_streamed=is_streamed).body
        _, writer = await engine.connect("/v1/completions", body)
        writers.append(writer)
    asking, _ = await begun(engine, over_client())
    await engine.until(lambda: engine.number(StatusBoard.OPEN) == 3)
    await kill_group(engine)
    await asyncio.sleep(0.3)
    assert held(engine) and engine.engine_client.open_requests == 1
    asking.cancel()
    for writer in writers:
        writer.transport.abort()
    await asyncio.gather(asking, return_exceptions=True)
    await engine.until(lambda: not held(engine))
    assert engine.engine_client.open_requests == 0
    assert engine.serving(0) == 0, "the group serves again: the request did not wait"
    await until_open_over_http(engine, 0)
    gate.open()
    await engine.must_be_whole()


async def until_open_over_http(engine: Migrating, count: int) -> None:
    deadline = time.monotonic() + WITHIN
    while (figure := await engine.total("penstock_open_requests")) != count:
        assert time.monotonic() < deadline, f"{figure} requests are open"
        await asyncio.sleep(0.02)


async def a_request_whose_time_runs_out_while_it_waits_is_answered_504(engine: Migrating, gate: Gate) -> None:
    gate.close()
    request = over_client()
    began = time.monotonic()
    stream = await engine.engine_client.submit(request.prompt, request.params, values=request.images, timeout=1.5)
    await anext(aiter(stream))
    await kill_group(engine)
    with pytest.raises(EngineError) as caught:
        async for _ in stream:
            pass
    assert caught.value.status == 504 and time.monotonic() - began < WITHIN
    assert engine.serving(0) == 0 and not held(engine)
    gate.open()
    await engine.must_be_whole()


async def new_requests_wait_for_the_group_as_others_do(engine: Migrating, gate: Gate) -> None:
    gate.close()
    newcomers = [over_http(20, is_streamed=False), over_http(20), over_client(20)]
    expected = await ask_all(engine, newcomers, "", Progress())
    waiting, _ = await begun(engine, over_http(300), over_client(300))
    await kill_group(engine)
    asking = asyncio.ensure_future(ask_all(engine, newcomers, "", Progress()))
    await until_open_over_http(engine, 3)
    await asyncio.sleep(0.3)  # several looks at the board
    assert not asking.done()
    gate.open()
    answers = await asyncio.wait_for(waiting, START)
    assert not any(answer.error for answer in answers), answers
    require_equal(newcomers, expected, await asyncio.wait_for(asking, START))
    await engine.must_be_whole()


async def a_new_request_whose_client_leaves_while_it_waits_leaves_nothing(engine: Migrating, gate: Gate) -> None:
    gate.close()
    await kill_group(engine)
    asking = asyncio.ensure_future(ask_all(engine, [over_http(), over_client()], "", Progress()))
    await until_open_over_http(engine, 1)
    asking.cancel()
    await until_open_over_http(engine, 0)
    gate.open()
    await engine.must_be_whole()


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def a_server_that_dies_while_its_requests_wait_leaves_none_in_a_core(engine: Migrating, gate: Gate) -> None:
    gate.close()
    waiting, _ = await begun(engine, *[over_http() for _ in range(4)])
    await kill_group(engine)
    await engine.until(lambda: engine.serving(0) == 0)
    engine.child("server").signal(signal.SIGKILL)
    assert all(answer.error for answer in await asyncio.wait_for(waiting, WITHIN))
    gate.open()
    await engine.launcher.serving(START)
    (answer,) = await ask_all(engine, [over_http(20)], "", Progress())
    assert not answer.error, answer
    await engine.must_be_whole()


async def a_server_that_dies_when_its_requests_have_been_sent_again_leaves_none(engine: Migrating, gate: Gate) -> None:
    waiting, _ = await begun(engine, *[over_http() for _ in range(4)], over_client(400))
    victim = engine.child("server")
    await kill_group(engine)
    await engine.until(lambda: engine.number(StatusBoard.OPEN) > 1, START)
    victim.signal(signal.SIGKILL)
    *lost, answered_request = await asyncio.wait_for(waiting, START)
    assert all(answer.error for answer in lost) and not answered_request.error, answered_request
    await engine.until(lambda: victim.pid not in {child.pid for child in engine.children()})
    await engine.must_be_whole()


Scene = Callable[[Migrating, Gate], Awaitable[None]]
SCENES: tuple[Scene, ...] = (
    a_client_that_disconnects_while_its_request_waits_leaves_nothing,
    a_request_whose_time_runs_out_while_it_waits_is_answered_504,
    new_requests_wait_for_the_group_as_others_do,
    a_server_that_dies_while_its_requests_wait_leaves_none_in_a_core,
)
MORE_SCENES: tuple[Scene, ...] = (
    a_new_request_whose_client_leaves_while_it_waits_leaves_nothing,
    a_server_that_dies_when_its_requests_have_been_sent_again_leaves_none,
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "scene",
    [*SCENES, *tiers.only_in_all(*MORE_SCENES)],
    ids=lambda scene: scene.__name__,
)
@in_a_loop
async def test_a_waiting_request_ends_cleanly(scene: Scene, gate: Gate) -> None:
    async with gated() as engine:
        await scene(engine, gate)


# ── trees and groups that do not serve again ─────────────────────────────────────────────────────────────────────────
@pytest.mark.timeout(120)
def test_a_tree_that_is_to_end_answers_waiting_requests_503_and_ends(gate: Gate) -> None:
    async def scene() -> tuple[list[Answer], float]:
        async with gated(shutdown_timeout=60.0, drain=60.0) as engine:
            gate.close()
            waiting, _ = await begun(engine, over_http(is_streamed=False), over_http(), over_client())
            await kill_group(engine)
            began = time.monotonic()
        return await waiting, time.monotonic() - began

    answers, seconds = asyncio.run(scene())
    assert seconds < ENDS_WITHIN
    assert answers[0].status == 503 and all(answer.error for answer in answers), answers


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_broken", [True, pytest.param(False, marks=tiers.needs_all)], ids=["fails", "loads"])
@in_a_loop
async def test_requests_get_503_when_their_group_does_not_serve_in_time(is_broken: bool, gate: Gate) -> None:
    """It fails whenever it starts, or it loads for longer than `--migration-timeout`."""
    prepare = with_workers(fails_when_restarted if is_broken else starts_behind_the_gate)
    async with gated(prepare=prepare, migration_timeout=2.0) as engine:
        gate.close()
        waiting, _ = await begun(engine, over_http(is_streamed=False), over_http(), over_client())
        await kill_group(engine)
        began = time.monotonic()
        answers = await asyncio.wait_for(waiting, 2.0 + WITHIN)
        assert 1.0 < time.monotonic() - began
        assert [answer.status for answer in answers] == [503, 200, 503], answers
        assert all(answer.error for answer in answers) and not held(engine)
        assert engine.engine_client.open_requests == 0
        await until_open_over_http(engine, 0)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.timeout(120)
@pytest.mark.parametrize("limit", [0, pytest.param(1, marks=tiers.needs_all)])
@in_a_loop
async def test_a_request_that_has_migrated_as_often_as_it_may_is_answered_503(limit: int) -> None:
    async with migrating(simulated=SIMULATED, migration_limit=limit) as engine:
        asking, progress = await begun(engine, over_http(), over_client(), over_http(is_streamed=False))
        for _ in range(limit):
            before = progress.deliveries
            await kill_group(engine)
            await engine.until(lambda before=before: progress.deliveries > before + 10, START)
        assert not asking.done()
        await kill_group(engine)
        answers = await asyncio.wait_for(asking, WITHIN)
        assert [answer.status for answer in answers] == [200, 503, 503], answers
        assert all(answer.error for answer in answers)
        await engine.must_be_whole()


@pytest.mark.timeout(120)
@in_a_loop
async def test_request_too_long_to_migrate_gets_503_and_shorter_ones_migrate() -> None:
    async with migrating(simulated=SIMULATED, migration_max_seq_len=600) as engine:
        long = ClientRequest([1] * 590, SamplingParams(max_tokens=LONG, ignore_eos=True))
        short = over_http(200)
        (expected,) = await ask_all(engine, [short], "undisturbed", Progress())
        progress = Progress()
        first = asyncio.ensure_future(ask_all(engine, [long], "", progress))
        await engine.until(lambda: progress.deliveries > 20)
        second, _ = await begun(engine, short)
        await kill_group(engine)
        (refused,) = await asyncio.wait_for(first, WITHIN)
        assert refused.status == 503 and "600" in refused.error, refused
        require_equal([short], [expected], await asyncio.wait_for(second, START))
        await engine.must_be_whole()


# ── several deaths ───────────────────────────────────────────────────────────────────────────────────────────────────
async def undisturbed_and_begun(
    engine: Migrating, seed: int, count: int
) -> tuple[list[AnyRequest], list[Answer], asyncio.Task[list[Answer]]]:
    requests = await Mix(SHAPE, seed).requests(engine, count)
    expected = await ask_all(engine, requests, "undisturbed", Progress())
    asking, _ = await begun(engine, *requests)
    return requests, expected, asking


@pytest.mark.timeout(120)
@in_a_loop
async def test_output_dying_twice_during_resubmission_loses_no_request(seed: int) -> None:
    async with migrating(simulated=SIMULATED) as engine:
        requests, expected, asking = await undisturbed_and_begun(engine, seed, 20)
        killed: set[int] = set()
        for pause in (0.0, 0.02, 0.0):
            await engine.until(lambda: outputs(engine) - killed)
            await asyncio.sleep(pause)
            (pid,) = outputs(engine) - killed
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        require_equal(requests, expected, await asyncio.wait_for(asking, START))
        await engine.must_be_whole()


def outputs(engine: Migrating) -> set[int]:
    return {child.pid for child in engine.children() if child.member.kind == "output"}


@tiers.needs_all
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kinds", [("core", "output"), ("worker", "worker")], ids=" ".join)
@in_a_loop
async def test_two_groups_that_die_at_once_lose_no_request(kinds: tuple[str, str], seed: int) -> None:
    async with migrating(simulated=SIMULATED, data_parallel_size=2) as engine:
        requests, expected, asking = await undisturbed_and_begun(engine, seed, 30)
        for group, kind in enumerate(kinds):
            places = {(child.member.kind, child.member.group): child for child in engine.children()}
            places[kind, group].signal(signal.SIGKILL)
        require_equal(requests, expected, await asyncio.wait_for(asking, START))
        await engine.must_be_whole()


@tiers.needs_all
@pytest.mark.timeout(120)
@in_a_loop
async def test_requests_of_a_group_that_stays_away_go_to_the_other_one(seed: int, gate: Gate) -> None:
    prepare = with_workers(starts_behind_the_gate, (1,))
    async with migrating(simulated=SIMULATED, data_parallel_size=2, prepare=prepare) as engine:
        gate.close()
        requests, expected, asking = await undisturbed_and_begun(engine, seed, 30)
        await kill_group(engine, 1)
        require_equal(requests, expected, await asyncio.wait_for(asking, START))
        assert engine.serving(1) == 0
        gate.open()
        await engine.must_be_whole()


@tiers.needs_all
@pytest.mark.timeout(180)
@in_a_loop
async def test_200_streams_that_are_open_at_a_death_are_all_answered(seed: int) -> None:
    async with migrating(simulated=simulated_device(step_seconds=0.01, vocabulary=1000)) as engine:
        requests = [
            HttpRequest("/v1/completions", {**over_http(400).body, "prompt": f"stream {number} of {seed}"})
            for number in range(200)
        ]
        expected = await ask_all(engine, requests, "undisturbed", Progress())
        asking, _ = await begun(engine, *requests)
        assert engine.number(StatusBoard.OPEN) == 200
        await kill_group(engine)
        require_equal(requests, expected, await asyncio.wait_for(asking, START))
        await engine.must_be_whole()


# ── cached tokens ────────────────────────────────────────────────────────────────────────────────────────────────────
@tiers.needs_all
@pytest.mark.timeout(120)
@in_a_loop
async def test_cached_tokens_are_those_of_the_first_run() -> None:
    """The group that takes the request over has none of its blocks."""
    async with migrating(simulated=SIMULATED) as engine:
        body = {**over_http(300).body, "prompt": "a long prompt " * 20}
        await ask_all(engine, [HttpRequest("/v1/completions", {**body, "max_tokens": 1})], "", Progress())
        asking, _ = await begun(engine, HttpRequest("/v1/completions", body))
        await kill_group(engine)
        (answer,) = await asyncio.wait_for(asking, START)
        assert not answer.error, answer
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] > 200
