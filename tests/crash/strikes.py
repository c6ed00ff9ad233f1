"""Kills processes of groups while requests are answered, and compares the answers with those of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.cluster.process import ChildProcess
from tests.crash.comparable_requests import AnyRequest, Progress, ask_all, require_equal
from tests.crash.migrating import Migrating

GROUP_KINDS = ("worker", "core", "output")


@dataclass
class Strike:
    what: str
    at: float


class Strikes:
    """Kills processes of groups with SIGKILL: each after a random share of what an undisturbed run delivers."""

    def __init__(self, engine: Migrating, seed: int, progress: Progress, deliveries: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._progress = progress
        self._deliveries = deliveries  # of the undisturbed run
        self.done: list[Strike] = []

    async def run(self, kinds: Sequence[str], *, at_once: float = 0.0) -> None:
        """Kills one process of each of these kinds, in this order. `at_once`: the share of strikes that wait for
        nothing, so that they may hit a group that is still starting."""
        shares = sorted(self._random.uniform(0.02, 0.8) for _ in kinds)
        for kind, share in zip(kinds, shares, strict=True):
            if self.done and self._random.random() < at_once:
                await asyncio.sleep(self._random.uniform(0.0, 0.5))
            else:
                while self._progress.deliveries < share * self._deliveries or not self._victims(kind):
                    await asyncio.sleep(0.002)
                await asyncio.sleep(self._random.uniform(0.0, 0.03))
            if victims := self._victims(kind, must_serve=False):
                self._kill(self._random.choice(victims))

    def _victims(self, kind: str, must_serve: bool = True) -> list[ChildProcess]:
        return [
            child
            for child in self._engine.children()
            if child.member.kind == kind and (not must_serve or self._engine.serving(child.member.group))
        ]

    def _kill(self, victim: ChildProcess) -> None:
        self.done.append(Strike(str(victim.member), time.monotonic()))
        victim.signal(signal.SIGKILL)


def shuffled_kinds(seed: int, kinds: Sequence[str] = GROUP_KINDS) -> Iterator[str]:
    """Yields kinds of processes without end, each as often as the others."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(list(kinds), len(kinds))


async def compare(
    engine: Migrating, requests: Sequence[AnyRequest], kinds: Sequence[str], seed: int, at_once: float = 0.0
) -> list[Strike]:
    """Asks all requests twice, with strikes the second time. Fails with the differences of each request."""
    progress = Progress()
    began = time.monotonic()
    undisturbed = await ask_all(engine, requests, f"undisturbed {seed}", progress)
    between = time.monotonic()
    errors = [
        f"{request}: {answer.error}" for request, answer in zip(requests, undisturbed, strict=True) if answer.error
    ]
    assert not errors, errors
    counted = Progress()
    strikes = Strikes(engine, seed, counted, progress.deliveries)
    striking = asyncio.ensure_future(strikes.run(kinds, at_once=at_once))
    try:
        disturbed = await ask_all(engine, requests, f"disturbed {seed}", counted)
    finally:
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
    if striking.done() and not striking.cancelled():
        striking.result()
    print(
        f"{len(requests)} requests: {between - began:.1f} s undisturbed, {time.monotonic() - between:.1f} s with "
        f"{[strike.what for strike in strikes.done]}"
    )
    require_equal(requests, undisturbed, disturbed)
    assert strikes.done, "no process was killed before all requests were answered"
    return strikes.done
