"""Adapters of a group are on all of its ranks, or on none."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.engine.cluster.adapter_registry import AdapterList
from penstock.engine.core.adapter_changes import AdapterChanges
from penstock.engine.protocol.lora import Adapter
from penstock.engine.protocol.messages import AdapterChange, AdapterState, Ready

DIGEST = b"d" * 32
LOAD = AdapterChange(1, 7, "sql", "/sql", DIGEST, True)
UNLOAD = AdapterChange(1, 8, "sql", "/sql", DIGEST, False)


class Group:
    """Two ranks. The test sends their answers."""

    def __init__(self) -> None:
        self.holders: set[bytes] = set()  # adapters that open requests have
        scheduler: Any = SimpleNamespace(adapter_errors={}, has_adapter=self.holders.__contains__)
        self.adapters: dict[bytes, str] = scheduler.adapter_errors
        self.sent: list[AdapterChange] = []
        self.answers: list[tuple[int, str]] = []
        self.changes = AdapterChanges(
            scheduler, 2, self.sent.append, lambda server, state: self.answers.append((state.number, state.error))
        )

    def answer(self, rank: int, error: str = "", number: int = 7) -> None:
        self.changes.on_state(AdapterState(DIGEST, error, rank, 1, number))


def test_adapter_is_used_when_all_ranks_have_it() -> None:
    group = Group()
    group.changes.begin(LOAD)
    group.answer(1)
    group.answer(1)
    assert (group.adapters, group.answers) == ({}, [])
    group.answer(0)
    assert (group.adapters, group.answers, group.sent) == ({DIGEST: ""}, [(7, "")], [LOAD])


def test_adapter_that_a_rank_refuses_is_unloaded_on_all() -> None:
    group = Group()
    group.changes.begin(LOAD)
    group.answer(0)
    group.answer(1, "no such file")
    assert group.adapters == {DIGEST: "no such file"} and group.answers == [(7, "no such file")]
    assert [(change.digest, change.is_loaded) for change in group.sent] == [(DIGEST, True), (DIGEST, False)]


def test_adapter_is_unloaded_when_its_last_request_has_ended() -> None:
    group = Group()
    group.adapters[DIGEST] = ""
    group.holders.add(DIGEST)
    group.changes.begin(UNLOAD)
    group.changes.release()
    assert group.adapters == {DIGEST: "the LoRA adapter 'sql' was unloaded"}
    assert (group.answers, group.sent) == ([(8, "")], [])
    group.holders.clear()
    group.changes.release()
    group.changes.release()
    assert group.sent == [UNLOAD]


def test_adapter_that_is_loaded_again_stays() -> None:
    group = Group()
    group.adapters[DIGEST] = ""
    group.holders.add(DIGEST)
    group.changes.begin(UNLOAD)
    again = replace(LOAD, number=9)
    group.changes.begin(again)
    group.answer(0, number=9)
    group.answer(1, number=9)
    group.holders.clear()
    group.changes.release()
    assert group.adapters == {DIGEST: ""} and group.sent == [again]


def test_adapter_that_is_unloaded_during_its_load_does_not_stay() -> None:
    """As when a server has given up a load that takes long."""
    group = Group()
    group.changes.begin(LOAD)
    group.answer(0)
    group.changes.begin(UNLOAD)
    assert (group.answers, group.sent) == ([(8, "")], [LOAD])
    group.answer(1)
    group.changes.release()
    reason = "the LoRA adapter 'sql' was unloaded"
    assert group.adapters == {DIGEST: reason} and group.answers == [(8, ""), (7, reason)]
    assert group.sent == [LOAD, UNLOAD] and not group.changes.leaving


def test_change_of_a_server_that_was_killed_comes_too_late() -> None:
    """Messages of two servers reach a core in any order: here the next server has unloaded, or loaded, already."""
    group, later_load = Group(), replace(LOAD, number=9)
    group.changes.begin(UNLOAD)
    group.changes.begin(LOAD)
    assert group.sent == [] and group.answers == [(8, ""), (7, "another server has changed adapters since")]
    group.changes.begin(later_load)
    group.answer(0, number=9)
    group.answer(1, number=9)
    group.changes.begin(UNLOAD)
    assert group.sent == [later_load] and group.adapters == {DIGEST: ""}


def test_started_group_uses_what_all_of_its_ranks_have() -> None:
    group, lost = Group(), b"l" * 32
    ranks = [
        Ready(0, 1, 1, adapters=(AdapterState(DIGEST), AdapterState(lost, "other files"))),
        Ready(1, 1, 1, adapters=(AdapterState(DIGEST), AdapterState(lost))),
    ]
    named = tuple(Adapter(f"{digest[0]}", "/a", digest) for digest in (DIGEST, lost))
    group.changes.adopt(ranks, AdapterList(named, (Adapter("sql", "/sql", b"u" * 32),)))
    unloaded = "the LoRA adapter 'sql' was unloaded"
    assert group.adapters == {DIGEST: "", lost: "other files", b"u" * 32: unloaded}
    group.changes.release()
    assert group.sent == [] and not group.changes.is_loading


@pytest.mark.parametrize("ranks_with_adapter", [0, 1])
def test_started_group_loads_adapters_that_a_rank_lacks(ranks_with_adapter: int) -> None:
    """A rank read the registry before the adapter was there. The server that loaded the adapter may be dead."""
    group, sql = Group(), Adapter("sql", "/sql", DIGEST)
    states = [(AdapterState(DIGEST),) * (rank < ranks_with_adapter) for rank in range(2)]
    ranks = [Ready(rank, 1, 1, adapters=adapters) for rank, adapters in enumerate(states)]
    group.changes.adopt(ranks, AdapterList((sql,), unsettled=(sql,)))
    assert group.changes.is_loading
    assert [(change.path, change.digest, change.is_loaded) for change in group.sent] == [("/sql", DIGEST, True)]
    for rank in range(2):
        group.changes.on_state(AdapterState(DIGEST, rank=rank))
    assert group.adapters == {DIGEST: ""} and not group.changes.is_loading and not group.answers


def test_started_group_unloads_what_was_unloaded_meanwhile() -> None:
    """One rank had read the registry before the adapter left, the other later."""
    group, sql = Group(), Adapter("sql", "/sql", DIGEST)
    ranks = [Ready(0, 1, 1, adapters=(AdapterState(DIGEST),)), Ready(1, 1, 1)]
    group.changes.adopt(ranks, AdapterList((), unloaded=(sql,), unsettled=(sql,)))
    assert group.adapters == {DIGEST: "the LoRA adapter 'sql' was unloaded"}
    group.changes.release()
    assert [(change.digest, change.is_loaded) for change in group.sent] == [(DIGEST, False)]
