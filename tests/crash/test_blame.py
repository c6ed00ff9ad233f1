"""A request that fails its worker whenever it runs is answered 500, and the requests beside it as without it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
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
from tests.crash.migrating import Migrating, migrating
from tests.crash.poisoned import (
    OTHERS,
    POISON,
    aborts_early,
    core_raises,
    core_raises_at_once,
    hangs_late,
    output_raises,
    output_raises_at_the_end,
    raises_early,
    raises_late,
    segfaults_late,
)
from tests.crash.request_mix import Mix, Shape
from tests.support.engine import simulated_device
from tests.support.loops import in_a_loop

BESIDE = tiers.choose(32, 64, 64)  # requests
STEP_TIMEOUT = 2.0  # seconds: of a worker that hangs
SHAPE = Shape("simulated", OTHERS, tuple(range(40, 62)), tokens=(150, 300))
Life = Callable[[Cluster, ProcessId], None]


@contextlib.asynccontextmanager
async def with_lives(life: Life, kind: str = "worker", **options: Any) -> AsyncIterator[Migrating]:
    def prepare(launcher: ServerLauncher) -> None:
        for unit in launcher.units:
            unit._parts = [(part, index, life if part == kind else run) for part, index, run in unit._parts]

    simulated = simulated_device(step_seconds=0.005, vocabulary=1000)
    async with migrating(prepare=prepare, simulated=simulated, step_timeout=STEP_TIMEOUT, **options) as engine:
        yield engine


def poison_over_http(*, is_streamed: bool) -> HttpRequest:
    prompt = [*range(20), POISON, 7]
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": is_streamed}
    return HttpRequest("/v1/completions", body)


def poison_over_client(n: int = 2) -> ClientRequest:
    return ClientRequest([5, 6, POISON], SamplingParams(max_tokens=100, n=n, ignore_eos=True))


async def must_blame(engine: Migrating, poison: list[AnyRequest], seed: int) -> list[Answer]:
    """Returns the answers of the poison, of which none is right; all others are."""
    others = await Mix(SHAPE, seed).requests(engine, BESIDE)
    undisturbed = await ask_all(engine, others, "undisturbed", Progress())
    beside = [asyncio.ensure_future(request.ask(engine, "disturbed", Progress())) for request in others]

    def are_all_submitted() -> bool:
        left = [request for request, task in zip(others, beside, strict=True) if not task.done()]
        taken = sum(engine.number(StatusBoard.OPEN, group) for group in range(engine.config.data_parallel_size))
        return taken >= sum(map(prompts_of, left))

    await engine.until(are_all_submitted)  # none of them is refused as no group serves
    answers = await ask_all(engine, poison, "disturbed", Progress())
    require_equal(others, undisturbed, await asyncio.gather(*beside))
    return answers


def prompts_of(request: AnyRequest) -> int:
    prompt = request.body.get("prompt") if isinstance(request, HttpRequest) else None
    return len(prompt) if isinstance(prompt, list) else 1


def errors_of(capfd: pytest.CaptureFixture[str], text: str) -> list[str]:
    """Returns the lines of level error that have the text."""
    return [line for line in capfd.readouterr().err.splitlines() if "level=error" in line and text in line]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "life",
    [
        raises_late,
        pytest.param(segfaults_late, marks=tiers.needs_all),
        pytest.param(aborts_early, marks=tiers.needs_all),
        pytest.param(raises_early, marks=tiers.needs_all),
        pytest.param(hangs_late, marks=tiers.needs_all),
    ],
)
def test_request_that_kills_its_worker_gets_500_and_others_exact_answers(
    life: Life, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        async with with_lives(life) as engine:
            request = poison_over_http(is_streamed=False)
            request.body["request_id"] = "the-poison"
            (answer,) = await must_blame(engine, [request], seed)
            assert answer.status == 500, answer
            await engine.must_be_whole()

    asyncio.run(scene())
    assert errors_of(capfd, "the-poison"), "the log does not name it"


@tiers.needs_all
@pytest.mark.timeout(240)
@in_a_loop
async def test_a_stream_that_kills_its_worker_ends_with_an_error_event(seed: int) -> None:
    async with with_lives(raises_late) as engine:
        (answer,) = await must_blame(engine, [poison_over_http(is_streamed=True)], seed)
        assert answer.status == 200 and re.search(r"internal|blame|failed|500", answer.error), answer
        await engine.must_be_whole()


@tiers.needs_all
@pytest.mark.timeout(240)
@pytest.mark.parametrize("groups", [1, 2])
@in_a_loop
async def test_two_requests_that_kill_their_worker_get_500_and_no_others(groups: int, seed: int) -> None:
    async with with_lives(raises_late, data_parallel_size=groups) as engine:
        poison: list[AnyRequest] = [poison_over_http(is_streamed=False), poison_over_client()]
        answers = await must_blame(engine, poison, seed)
        assert [answer.status for answer in answers] == [500, 500], answers
        await engine.must_be_whole()


@tiers.needs_all
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "life"),
    [
        ("core", core_raises),
        ("core", core_raises_at_once),
        ("output", output_raises),
        ("output", output_raises_at_the_end),
    ],
)
@in_a_loop
async def test_only_the_request_that_kills_another_process_gets_an_error(kind: str, life: Life, seed: int) -> None:
    async with with_lives(life, kind) as engine:
        (answer,) = await must_blame(engine, [poison_over_client(1)], seed)
        assert answer.status == 500, answer
        await engine.must_be_whole()
