"""Arrival of requests: at random times of their own (open loop), or so many at a time (closed loop).

`prompts` makes the bodies, and `chat_request` sends one.
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
    """A load of requests. Their bodies are built beforehand, as building them would delay the streams.

    `outcomes` has the outcome of each request that was sent, also when the load is cancelled.
    """

    def __init__(self, wire: Wire, bodies: Sequence[Body], ended: Callable[[Outcome], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._wire = wire
        self._bodies = bodies
        self._ended = ended

    async def open(self, rate: float, seed: int) -> None:
        """Sends requests at Poisson arrivals, `rate` a second on average. The time of a request begins when it is due,
        also if it is sent late."""
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
