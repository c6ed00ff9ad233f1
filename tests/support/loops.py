"""A test as a coroutine, under a watchdog."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

WITHIN = 30.0  # seconds


def in_a_loop(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(scene)
    def test(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(scene(**fixtures), WITHIN))

    return test
