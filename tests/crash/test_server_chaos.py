"""Processes of a server are killed and stopped in turn, under load: streams of the other processes are exact."""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.cluster.process import ChildProcess
from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status.counters import ProcessCounters
from tests import tiers
from tests.e2e.test_server import Served, run_server
from tests.support.engine import START, simulated_device
from tests.support.loops import in_a_loop
from tests.support.serving import ANSWERED_WITHIN, LIMITS, SHAPE, Asked, Load, Question, must_be_as_before

STEP_TIMEOUT = 2.0  # seconds; a process that is stopped for longer is killed
MODEL_START = 240.0  # seconds; eight processes import torch
MODEL_WITHIN = 120.0  # seconds; until it has answered, while they do
NOTICED = 2.0  # seconds after a blow, on a busy machine: a request that begins later is not concerned
HEALTHY_UPTIME = 2.0  # seconds at the end without a blow: on a busy machine all other requests may be concerned
UNCONCERNED = 0.98  # of those must have been answered …
ALL = 0.75  # … and of all
KINDS = ("server", "core", "worker", "output")
HOWS = ("killed", "stopped", "stopped for long")


@dataclass
class Blow:
    what: str
    at: float
    until: float  # the victim goes on, or is dead


class Chaos:
    def __init__(self, served: Served, load: Load, seed: int, again: float) -> None:
        """`again`: seconds until a victim serves again, on a busy machine."""
        self.served, self.load, self.chance, self.again = served, load, random.Random(seed), again
        self.blows: list[Blow] = []

    def _victims(self, kind: str) -> list[ChildProcess]:
        """The processes that others of their kind can stand in for: all other units are whole."""
        whole = [unit for unit in self.served.launcher.units if self._is_whole(unit)]
        alike = {"server": [unit for unit in whole if not unit.is_group]}
        able = alike.get(kind, [unit for unit in whole if unit.is_group])
        if len(able) < 2:
            return []
        return [child for unit in able for child in unit.children.values() if child.member.kind == kind]

    def _is_whole(self, unit) -> bool:
        if unit.is_group:
            return len(unit.children) == len(unit._parts) and self.served.number(StatusBoard.SERVING, unit._group) > 0
        return len(unit.children) == 1 and self.served.launcher.rows[unit._parts[0][1]][ProcessCounters.SERVING] == 1

    async def strike(self, kind: str, how: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.again
        while not (victims := self._victims(kind)):
            assert loop.time() < deadline, f"who was struck has not come again: {self.blows[-2:]}"
            await asyncio.sleep(0.05)
        victim = self.chance.choice(victims)
        blow = Blow(f"{victim.member} {how}", loop.time(), loop.time())
        self.blows.append(blow)
        if how == "killed":
            victim.signal(signal.SIGKILL)
        else:
            blow.until = float("inf")
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(STEP_TIMEOUT + 0.3 if how == "stopped for long" else self.chance.uniform(0.1, 0.5))
            with contextlib.suppress(OSError):  # it has been killed, and is buried
                victim.signal(signal.SIGCONT)
            blow.until = loop.time()
        await asyncio.sleep(self.chance.uniform(0.3, 1.5))

    async def rage(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + tiers.CHAOS_SECONDS
        async with self.load.running() as load:
            while loop.time() < deadline or len(self.blows) < 2 * len(KINDS):
                for kind in self.chance.sample(KINDS, len(KINDS)):
                    await self.strike(kind, self.chance.choice(HOWS))
                    if load.done():
                        load.result()
            await asyncio.sleep(NOTICED + HEALTHY_UPTIME)

    def is_concerned(self, request: Asked) -> bool:
        return any(request.began - NOTICED <= blow.until and blow.at <= request.ended for blow in self.blows)

    def judge(self) -> None:
        requests = self.load.requests
        unconcerned = [request for request in requests if not self.is_concerned(request)]
        lost = [request for request in unconcerned if request.error]
        well = sum(not request.error for request in requests)
        print(
            f"{len(self.blows)} blows; {well} of {len(requests)} answered; {len(lost)} lost of {len(unconcerned)} that "
            f"no blow concerned; {dict(self.load.gone)}; "
            f"slowest {max(request.ended - request.began for request in requests):.1f} s"
        )
        print(Counter(request.error.split(":")[0] for request in requests), sorted(blow.what for blow in self.blows))
        assert well >= ALL * len(requests) and well > 50 and len(unconcerned) > 20
        assert len(lost) <= (1 - UNCONCERNED) * len(unconcerned), lost
        assert all(self.load.gone[way] for way in ("vanished", "did not read"))


async def in_chaos(
    served: Served, seed: int, question: Callable[[random.Random], Question] | None = None, again: float = START
) -> None:
    load = Load(served, seed, question, ANSWERED_WITHIN if question is None else MODEL_WITHIN)
    chaos = Chaos(served, load, seed, again)
    await chaos.rage()
    await must_be_as_before(served, again)
    chaos.judge()


@pytest.mark.timeout(tiers.CHAOS_SECONDS + 240)
@in_a_loop
async def test_server_answers_undisturbed_clients_and_errors_the_others(seed: int) -> None:
    async with run_server(
        LIMITS, simulated=simulated_device(step_seconds=0.003), step_timeout=STEP_TIMEOUT, **SHAPE
    ) as served:
        await in_chaos(served, seed)


@tiers.needs_soak  # a model takes seconds to come again
@pytest.mark.timeout(tiers.CHAOS_SECONDS + 1500)
@in_a_loop
async def test_server_with_a_model_answers_undisturbed_clients(seed: int, tmp_path: Path) -> None:
    from tests.e2e.test_server_models import save_tokenizer
    from tests.support.models import ENGINE_SIZES, build_family

    build_family("llama", tmp_path)
    save_tokenizer(tmp_path)
    shape = {**SHAPE, "tensor_parallel_size": 1}
    options = {"simulated": None, "model": str(tmp_path), "step_timeout": 5.0, **ENGINE_SIZES, **shape}
    async with run_server(LIMITS, MODEL_START, **options) as served:
        known = []
        for prompt in ("hello", "a story", "abc abc", "one two three"):
            body = {"model": tmp_path.name, "prompt": prompt, "max_tokens": 30, "temperature": 0}
            done = await served.client.completions.create(**body, extra_body={"ignore_eos": True})
            known.append(Question(prompt, 30, done.choices[0].text))
        await in_chaos(served, seed, lambda chance: chance.choice(known), MODEL_START)
