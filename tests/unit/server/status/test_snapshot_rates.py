"""Rates of a server: what became of it between two moments."""

from typing import Any

import msgspec
import pytest

from penstock.engine.cluster.topology import ProcessId
from penstock.server.status.server_info import ServerInfo
from penstock.server.status.snapshot import (
    ChannelView,
    EngineView,
    HolderView,
    ProcessView,
    ServerSnapshot,
    ServerView,
    StoreView,
)
from penstock.server.status.snapshot_rates import View, rates_of

NOTICE = ServerInfo(
    groups_per_node=1,
    version="1", pid=7, name="m", url="http://x:1", started=0.0, processes=(ProcessId("core", 0, 0, 1),),
    max_num_seqs=8, max_num_batched_tokens=64, is_simulated=True,
)  # fmt: skip


def zero(kind: type[Any], /, **numbers: Any) -> Any:
    """All numbers are 0, but those that are given."""
    kinds = {int: 0, float: 0.0, str: "", bool: False, int | None: None}
    found = {one.name: kinds.get(one.type, ()) for one in msgspec.structs.fields(kind)}
    return kind(**{**found, **numbers})


def moment(at: float, **parts: Any) -> ServerSnapshot:
    found: ServerSnapshot = zero(ServerSnapshot, at=at, server_info=NOTICE, **parts)
    return found


def between(seconds: float, before: dict[str, Any], after: dict[str, Any]) -> Any:
    return rates_of(moment(10.0, **before), moment(10.0 + seconds, **after))


def test_counts_become_rates_and_times_become_means() -> None:
    group = {"incarnation": 1}
    old = zero(
        EngineView, **group, steps=100, core_ns=5, device_ns=10**9, idle_ns=0, generated_tokens=50, prompt_tokens=7
    )
    new = zero(
        EngineView, **group, steps=300, core_ns=20_000_005, device_ns=2 * 10**9, idle_ns=10**8, generated_tokens=250,
        prompt_tokens=27, preemptions=4,
    )  # fmt: skip
    rates = between(2.0, {"groups": (old,)}, {"groups": (new,)})
    (one,) = rates.groups
    assert (one.steps, one.generated_tokens, one.prompt_tokens, one.preemptions) == (100.0, 100.0, 10.0, 2.0)
    assert (one.device, one.waiting, one.core) == pytest.approx((0.005, 0.0005, 0.0001))
    assert one.step == pytest.approx(one.device + one.waiting)
    assert (rates.generated_tokens, rates.prompt_tokens, rates.seconds) == (100.0, 10.0, 2.0)


def test_a_group_that_began_anew_counts_from_nothing_and_one_that_has_ended_gives_nothing() -> None:
    old = zero(EngineView, incarnation=1, steps=1000, generated_tokens=9000)
    new = zero(EngineView, incarnation=2, steps=1500, generated_tokens=30)
    rates = between(1.0, {"groups": (old, old)}, {"groups": (new, zero(EngineView))})
    assert [(one.steps, one.generated_tokens) for one in rates.groups] == [(1500.0, 30.0), (0.0, 0.0)]
    assert rates.groups[1].step is None and rates.groups[1].core is None


def test_the_processors_of_a_process_are_those_of_this_incarnation() -> None:
    old = (
        zero(ProcessView, role="core", incarnation=1, cpu_seconds=9.0),
        zero(ProcessView, role="worker", incarnation=1, cpu_seconds=4.0),
    )
    new = (
        zero(ProcessView, role="core", incarnation=2, cpu_seconds=0.5),
        zero(ProcessView, role="worker", incarnation=1, cpu_seconds=5.0),
    )
    assert between(2.0, {"processes": old}, {"processes": new}).cpu == (0.25, 0.5)


def test_channels_and_stores_are_told_apart_by_name_and_a_new_one_counts_from_nothing() -> None:
    old = (zero(ChannelView, name="b", records=10, nbytes=100), zero(ChannelView, name="a", records=5))
    new = (
        zero(ChannelView, name="a", records=9, sleeps=2),
        zero(ChannelView, name="b", records=4, nbytes=40),
        zero(ChannelView, name="c", records=8),
    )
    stores = (
        (zero(StoreView, name="s", hits=10, misses=10),),
        (zero(StoreView, name="s", hits=40, misses=20, evictions=2),),
    )
    rates = between(2.0, {"channels": old, "stores": stores[0]}, {"channels": new, "stores": stores[1]})
    assert [(one.records, one.nbytes, one.sleeps) for one in rates.channels] == [(2, 0, 1), (2, 20, 0), (4, 0, 0)]
    (store,) = rates.stores
    assert (store.hits, store.misses, store.evictions, store.hit_share) == (15.0, 5.0, 1.0, 0.75)


def test_of_what_did_not_happen_there_is_no_mean() -> None:
    quiet = {"servers": (zero(ServerView, answered=3),), "stores": (zero(StoreView, name="s", hits=3),)}
    rates = between(1.0, quiet, quiet)
    assert (rates.first_piece, rates.gap, rates.answered, rates.stores[0].hit_share) == (None, None, 0.0, None)


def test_answers_are_added_up_over_all_servers() -> None:
    old = (zero(ServerView, answered=1), zero(ServerView, answered=1))
    new = (
        zero(ServerView, answered=4, refused=1, first_pieces=2, first_seconds=0.5, gaps=10, gap_seconds=0.1),
        zero(ServerView, answered=2, first_pieces=2, first_seconds=0.1),
    )
    rates = between(2.0, {"servers": old}, {"servers": new})
    assert (rates.answered, rates.refused) == (2.0, 0.5)
    assert (rates.first_piece, rates.gap) == pytest.approx((0.15, 0.01))


def test_rates_are_of_the_same_server_and_of_now() -> None:
    other = msgspec.structs.replace(NOTICE, pid=8)
    for before, has_rates in (
        (None, False),
        (moment(9.0), True),
        (moment(1.0), False),  # too long ago
        (moment(10.0), False),
        (msgspec.structs.replace(moment(9.0), server_info=other), False),
    ):
        assert (View.after(before, moment(10.0), 5.0).rates is not None) == has_rates, before


def test_what_is_seen_travels_as_json() -> None:
    now = moment(
        10.0,
        processes=(zero(ProcessView, role="core"),),
        groups=(zero(EngineView),),
        servers=(zero(ServerView),),
        stores=(zero(StoreView, name="s", holders=(HolderView("x", 1, 2),)),),
    )
    seen = View.after(now, msgspec.structs.replace(now, at=11.0), 5.0)
    assert seen.rates is not None
    assert msgspec.json.decode(msgspec.json.encode(seen), type=View) == seen
