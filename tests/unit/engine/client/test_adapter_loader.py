"""Adapters are loaded in all groups, also in those that die or are started meanwhile."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.client.adapter_loader import REFUSED, AdapterLoader
from penstock.engine.client.groups import GroupLost
from penstock.engine.client.stream import EngineError, Placement
from penstock.engine.protocol.lora import Adapter
from penstock.engine.protocol.messages import AdapterChange, AdapterState
from tests.support.loops import in_a_loop

SQL = Adapter("sql", "/sql", b"d" * 32)
PATIENCE = 60.0


def after(seconds: float) -> float:
    return time.monotonic() + seconds


class Groups:
    """Answers changes at once, unless `react` does something else."""

    def __init__(self, react: Callable[["Groups", int], str | None]) -> None:
        self.serving = {0: 1, 1: 1}
        self.sent: list[tuple[int, int, bool]] = []  # group, incarnation, and whether to load
        self.numbers: list[int] = []  # of the changes
        self._react = react
        cores: Any = self
        self.loader = AdapterLoader(3, 2, cores, lambda: self.serving)

    async def send(self, place: Placement, change: AdapterChange, until: float) -> None:
        assert (change.server, change.digest) == (3, SQL.digest)
        self.sent.append((place.group, place.incarnation, change.is_loaded))
        self.numbers.append(change.number)
        error = self._react(self, place.group)
        if error is not None:
            self.loader.on_state(AdapterState(change.digest, error, number=change.number))


@in_a_loop
async def test_group_that_dies_meanwhile_loads_an_adapter_in_its_next_life() -> None:
    def react(groups: Groups, group: int) -> str | None:
        if group == 1 and groups.serving[1] == 1:
            del groups.serving[1]
            asyncio.get_running_loop().call_later(0.01, groups.serving.__setitem__, 1, 2)
            return None
        return ""

    groups = Groups(react)
    await groups.loader.load(SQL, PATIENCE)
    assert groups.sent == [(0, 1, True), (1, 1, True), (1, 2, True)]


@in_a_loop
async def test_group_that_cannot_be_reached_is_tried_again() -> None:
    def react(groups: Groups, group: int) -> str:
        if len(groups.sent) == 1:
            groups.serving[group] += 1
            raise GroupLost(503, "it has died")
        return ""

    groups = Groups(react)
    await groups.loader.load(SQL, PATIENCE)
    assert groups.sent == [(0, 1, True), (1, 1, True), (0, 2, True)]


@in_a_loop
async def test_adapter_of_which_groups_die_is_not_loaded_for_ever() -> None:
    def react(groups: Groups, group: int) -> str:
        groups.serving[group] += 1
        raise GroupLost(503, "it has died")

    groups = Groups(react)
    with pytest.raises(EngineError, match="group 0 has died 2 times"):
        await groups.loader.load(SQL, PATIENCE)
    assert [group for group, _, _ in groups.sent] == [0, 1, 0]


@in_a_loop
async def test_adapter_that_a_group_refuses_is_an_error_with_its_reason() -> None:
    groups = Groups(lambda _, group: "no such file" if group else "")
    with pytest.raises(EngineError, match="no such file"):
        await groups.loader.load(SQL, PATIENCE)


@in_a_loop
async def test_group_that_does_not_serve_in_time_is_named() -> None:
    groups = Groups(lambda *_: "")
    del groups.serving[1]
    with pytest.raises(EngineError, match=r"groups \[1\] of the engine have not loaded the adapter"):
        await groups.loader.load(SQL, 0.05)


@pytest.mark.parametrize("is_loaded", [False, True])
@in_a_loop
async def test_adapter_is_settled_where_a_group_serves(is_loaded: bool) -> None:
    groups = Groups(lambda *_: "")
    del groups.serving[0]
    await groups.loader.settle(SQL, after(PATIENCE), is_loaded=is_loaded)
    assert groups.sent == [(1, 1, is_loaded)]


@in_a_loop
async def test_adapter_is_unloaded_in_groups_behind_a_group_that_hangs() -> None:
    groups = Groups(lambda _, group: None if group == 0 else "")
    with pytest.raises(EngineError, match="group 0 has not answered in time"):
        await groups.loader.settle(SQL, after(0.05), is_loaded=False)
    assert groups.sent == [(0, 1, False), (1, 1, False)]


@pytest.mark.parametrize(("is_loaded", "status"), [(False, 503), (True, REFUSED)])
@in_a_loop
async def test_change_that_a_group_refuses_is_an_error_with_its_reason(is_loaded: bool, status: int) -> None:
    groups = Groups(lambda _, group: "another server has changed adapters since" if group == 0 else "")
    with pytest.raises(EngineError, match="another server has changed adapters since") as refused:
        await groups.loader.settle(SQL, after(PATIENCE), is_loaded=is_loaded)
    assert refused.value.status == status and groups.sent == [(0, 1, is_loaded), (1, 1, is_loaded)]


@in_a_loop
async def test_changes_of_all_servers_have_rising_numbers() -> None:
    """A core drops a change of a killed server that comes after a change of the next server."""
    older, newer = Groups(lambda *_: ""), Groups(lambda *_: "")
    await newer.loader.load(SQL, PATIENCE)
    await older.loader.settle(SQL, after(PATIENCE), is_loaded=False)
    numbers = newer.numbers + older.numbers
    assert len(set(numbers)) == 4 and numbers == sorted(numbers)
