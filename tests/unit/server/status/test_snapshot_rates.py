"""Rates of a server: what became of it between two moments."""

from typing import Any

import msgspec
import pytest

from penstock.engine.cluster.topology import ProcessId
from penstock.server.status.server_info import ServerInfo
from penstock.server.status.snapshot import (
    ZERO,
    ChannelView,
    CounterView,
    EndView,
    HolderView,
    ProcessView,
    ServerSnapshot,
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
    kinds = {int: 0, float: 0.0, str: "", bool: False, int | None: None, dict[str, int]: {}}
    result = {field.name: kinds.get(field.type, ()) for field in msgspec.structs.fields(kind)}
    return kind(**{**result, **numbers})


def view(part: str, /, **numbers: float) -> CounterView:
    """All numbers of the part are 0, but those that are given."""
    empty = ZERO[part]
    assert numbers.keys() <= {*empty.gauges, *empty.counters} or "requests.chat.429" in numbers
    gauges = {key: number for key, number in numbers.items() if key in empty.gauges}
    counters = {key: number for key, number in numbers.items() if key not in gauges}
    return CounterView({**empty.gauges, **gauges}, {**empty.counters, **counters})


def moment(at: float, **parts: Any) -> ServerSnapshot:
    result: ServerSnapshot = zero(ServerSnapshot, at=at, server_info=NOTICE, **parts)
    return result


def between(seconds: float, before: dict[str, Any], after: dict[str, Any]) -> Any:
    return rates_of(moment(10.0, **before), moment(10.0 + seconds, **after))


def test_counts_become_rates_and_times_become_means() -> None:
    old = view(
        "engines", engine_incarnation=1, engine_steps=100, engine_core_seconds=5e-9, engine_busy_seconds=1.0,
        sampled_tokens=50, computed_tokens=7,
    )  # fmt: skip
    new = view(
        "engines", engine_incarnation=1, engine_steps=300, engine_core_seconds=0.020000005, engine_busy_seconds=2.0,
        engine_idle_seconds=0.1, sampled_tokens=250, computed_tokens=27, num_preemptions=4,
    )  # fmt: skip
    rates = between(2.0, {"engines": (old,)}, {"engines": (new,)})
    (engine,), (times,) = rates.engines, rates.steps
    assert (engine["engine_steps"], engine["num_preemptions"]) == (100.0, 2.0)
    assert (times.device, times.waiting, times.core) == pytest.approx((0.005, 0.0005, 0.0001))
    assert times.step == pytest.approx(times.device + times.waiting)
    assert (rates.total("sampled_tokens"), rates.total("computed_tokens"), rates.seconds) == (100.0, 10.0, 2.0)


def test_rates_count_from_0_after_a_restart_and_are_none_after_the_end() -> None:
    old = view("engines", engine_incarnation=1, engine_steps=1000, sampled_tokens=9000)
    new = view("engines", engine_incarnation=2, engine_steps=1500, sampled_tokens=30)
    rates = between(1.0, {"engines": (old, old)}, {"engines": (new, view("engines"))})
    assert [(each["engine_steps"], each["sampled_tokens"]) for each in rates.engines] == [(1500.0, 30.0), (0.0, 0.0)]
    assert rates.steps[1].step is None and rates.steps[1].core is None


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


def test_rates_know_channels_by_name_and_new_ones_begin_at_0() -> None:
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
    assert [(channel.records, channel.nbytes, channel.sleeps) for channel in rates.channels] == [
        (2, 0, 1),
        (2, 20, 0),
        (4, 0, 0),
    ]
    (store,) = rates.stores
    assert (store.hits, store.misses, store.evictions, store.hit_share) == (15.0, 5.0, 1.0, 0.75)


def test_rates_of_a_channel_are_known_for_each_sender() -> None:
    ends = [
        (EndView("core 0.0", True, 0.0, 0, count, 10 * count), EndView("server 0", False, 0.0, 0, 2 * count, 0))
        for count in (100, 140)
    ]
    old, new = ((zero(ChannelView, name="a", ends=(*pair, EndView("core 1.0", True, 0.0, 0, 5, 50))),) for pair in ends)
    (channel,) = between(2.0, {"channels": old}, {"channels": new}).channels
    assert channel.senders == {"core 0.0": (20.0, 200.0), "core 1.0": (0.0, 0.0)}


def test_means_without_events_are_none() -> None:
    quiet = {
        "servers": (view("servers", requests=3),),
        "served": (view("served"),),
        "stores": (zero(StoreView, name="s", hits=3),),
    }
    rates = between(1.0, quiet, quiet)
    means = (rates.first_piece, rates.gap, rates.stores[0].hit_share)
    assert means == (None, None, None) and rates.total("requests") == 0.0


def test_answers_are_added_up_over_all_servers() -> None:
    old = view("servers", requests=1)
    new = (view("servers", **{"requests": 4, "requests.chat.429": 1}), view("servers", requests=2))
    first = {"time_to_first_token_seconds_count": 4, "time_to_first_token_seconds_sum": 0.6}
    gaps = {"inter_token_latency_seconds_count": 10, "inter_token_latency_seconds_sum": 0.1}
    before = {"servers": (old, old), "served": (view("served"), view("served"))}
    rates = between(2.0, before, {"servers": new, "served": (view("served", **first), view("served", **gaps))})
    assert (rates.total("requests"), rates.refused) == (2.0, 0.5)
    assert (rates.first_piece, rates.gap) == pytest.approx((0.15, 0.01))


def test_rates_need_a_recent_moment_of_the_same_server() -> None:
    other = msgspec.structs.replace(NOTICE, pid=8)
    for before, has_rates in (
        (None, False),
        (moment(9.0), True),
        (moment(1.0), False),  # too long ago
        (moment(10.0), False),
        (msgspec.structs.replace(moment(9.0), server_info=other), False),
    ):
        assert (View.after(before, moment(10.0), 5.0).rates is not None) == has_rates, before


def test_view_of_a_server_survives_json() -> None:
    now = moment(
        10.0,
        processes=(zero(ProcessView, role="core"),),
        engines=(view("engines"),),
        served=(view("served"),),
        servers=(view("servers"),),
        stores=(zero(StoreView, name="s", holders=(HolderView("x", 1, 2),)),),
    )
    observed = View.after(now, msgspec.structs.replace(now, at=11.0), 5.0)
    assert observed.rates is not None
    encoded = msgspec.json.encode(observed)
    assert msgspec.json.decode(encoded, type=View) == observed
    with pytest.raises(msgspec.ValidationError, match=r"expected the counters engine_steps at \$\.engines"):
        msgspec.json.decode(encoded.replace(b"engine_steps", b"engine_stops"), type=View)
