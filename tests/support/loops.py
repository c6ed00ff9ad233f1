"""Tests that are coroutines. What waits for ever is ended by the watchdog of every test."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_a_loop(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(scene)
    def test(**fixtures: Any) -> None:
        asyncio.run(scene(**fixtures))

    return test
