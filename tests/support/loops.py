"""Tests that are coroutines. The watchdog of every test ends a coroutine that waits for ever."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_a_loop(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(scene)
    def test(**fixtures: Any) -> None:
        asyncio.run(scene(**fixtures))

    return test


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
