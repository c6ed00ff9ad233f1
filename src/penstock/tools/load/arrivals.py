"""When requests are asked: at times of their own, however the server fares (open), or so many at a time (closed).

Leaves to `prompts` what is asked, and to `chat_request` one of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence

from penstock.tools.load.chat_request import Outcome, ask
from penstock.tools.load.http_client import Wire
from penstock.tools.load.prompts import Body


class Load:
    """Of requests that are made before the first is asked: streams would wait for the making.

    What came of those that were sent stands in `outcomes`, also when it is cancelled.
    """

    def __init__(self, wire: Wire, bodies: Sequence[Body], ended: Callable[[Outcome], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._wire = wire
        self._bodies = bodies
        self._ended = ended

    async def open(self, rate: float, seed: int) -> None:
        """Poisson arrivals, so many a second on average. A request that is sent late is late: its time began."""
        chance = random.Random(f"{seed} arrivals")
        tasks: list[asyncio.Future[None]] = []
        due = time.perf_counter()
        try:
            for body in self._bodies:
                if (left := due - time.perf_counter()) > 0:
                    await asyncio.sleep(left)
                tasks.append(asyncio.ensure_future(self._send(body, due)))
                due += chance.expovariate(rate)
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def closed(self, concurrency: int) -> None:
        """Keeps up to `concurrency` requests open: a task sends its next one when the last one has ended."""
        bodies = iter(self._bodies)
        tasks = [asyncio.ensure_future(self._in_turn(bodies)) for _ in range(min(concurrency, len(self._bodies)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def _in_turn(self, bodies: Iterator[Body]) -> None:
        for body in bodies:
            await self._send(body, time.perf_counter())

    async def _send(self, body: Body, due: float) -> None:
        outcome = Outcome(due)
        self.outcomes.append(outcome)
        await ask(self._wire, *body, outcome)
        self._ended(outcome)


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
