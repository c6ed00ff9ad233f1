"""Loads and unloads LoRA adapters in all groups of the engine, for a server process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

from penstock.engine.client.groups import CoreSenders, GroupLost
from penstock.engine.client.stream import EngineError, Placement
from penstock.engine.protocol.lora import Adapter
from penstock.engine.protocol.messages import AdapterChange, AdapterState

POLL_S = 0.1  # seconds; whether the group has died, or serves again
REFUSED = 400  # status of an adapter that a group cannot load
MAX_DEATHS = 2  # of a group that loads an adapter: then the adapter counts as the reason


class AdapterLoader:
    def __init__(self, server: int, groups: int, cores: CoreSenders, serving: Callable[[], dict[int, int]]) -> None:
        """`serving`: returns the groups that serve, each with its incarnation."""
        self._server = server
        self._groups = groups
        self._cores = cores
        self._serving = serving
        self._number = 0
        self._answers: dict[int, asyncio.Future[str]] = {}

    def on_state(self, state: AdapterState) -> None:
        """Handles the answer of a core."""
        answer = self._answers.get(state.number)
        if answer is not None and not answer.done():
            answer.set_result(state.error)

    async def load(self, adapter: Adapter, timeout: float) -> None:
        """Has each group load an adapter, and waits for groups that are started again. Raises EngineError if one cannot
        load the adapter."""
        deadline, deaths, loaded = time.monotonic() + timeout, Counter[int](), dict[int, int]()
        while due := self._without(loaded):
            if time.monotonic() >= deadline:
                raise EngineError(503, f"groups {due} of the engine have not loaded the adapter within {timeout:g} s")
            serving = self._serving()
            ready = [group for group in due if group in serving]
            for group in ready:
                try:
                    error = await self._change(group, serving[group], adapter, is_loaded=True, until=deadline)
                except GroupLost:
                    deaths[group] += 1
                    if deaths[group] == MAX_DEATHS:
                        message = f"group {group} has died {MAX_DEATHS} times while it loaded the adapter"
                        raise EngineError(503, message) from None
                    continue
                if error:
                    raise EngineError(REFUSED, error)
                loaded[group] = serving[group]
            if not ready:
                await asyncio.sleep(POLL_S)

    async def settle(self, adapter: Adapter, until: float, *, is_loaded: bool) -> None:
        """Has each group that serves load an adapter, or unload it when no request has it. Groups that serve later do
        what the registry says. Raises EngineError if a group refuses, or has not answered."""
        changes = [self._settle(*group, adapter, until, is_loaded) for group in self._serving().items()]
        errors = [error for error in await asyncio.gather(*changes, return_exceptions=True) if error is not None]
        # A refusal ends the change, so the error of a group that has to be asked again comes first.
        errors.sort(key=lambda error: isinstance(error, EngineError) and error.status == REFUSED)
        if errors:
            raise errors[0]

    async def _settle(self, group: int, incarnation: int, adapter: Adapter, until: float, is_loaded: bool) -> None:
        with contextlib.suppress(GroupLost):
            error = await self._change(group, incarnation, adapter, is_loaded=is_loaded, until=until)
            if error:
                raise EngineError(REFUSED if is_loaded else 503, error)

    def _without(self, loaded: dict[int, int]) -> list[int]:
        serving = self._serving()
        return [group for group in range(self._groups) if group not in loaded or serving.get(group) != loaded[group]]

    async def _change(self, group: int, incarnation: int, adapter: Adapter, *, is_loaded: bool, until: float) -> str:
        """Returns why the group cannot load or unload the adapter; "": it has. Raises GroupLost and EngineError."""
        # One server at a time changes adapters, and all have one clock: later changes have higher numbers.
        self._number = number = max(self._number + 1, time.monotonic_ns())
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            change = AdapterChange(self._server, number, *adapter, is_loaded)
            await self._cores.send(Placement(0, group, incarnation), change, until)
            while not answer.done():
                await asyncio.wait([answer], timeout=POLL_S)
                if not answer.done() and self._serving().get(group) != incarnation:
                    raise GroupLost(503, f"group {group} has died")
                if not answer.done() and time.monotonic() >= until:
                    raise EngineError(503, f"group {group} has not answered in time")
            return await answer
        finally:
            del self._answers[number]
