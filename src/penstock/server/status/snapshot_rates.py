"""Rates between two snapshots of a server: each counter per second, and each time as a share or a mean.

A restarted process counts from 0; the difference is then what it has counted since its start. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.server.status.snapshot import ChannelView, CounterView, ServerSnapshot, StoreView


class ChannelRates(msgspec.Struct, frozen=True):
    records: float  # per second
    nbytes: float
    sleeps: float
    senders: dict[str, tuple[float, float]]  # records and bytes, by process


class StoreRates(msgspec.Struct, frozen=True):
    hits: float  # per second
    misses: float
    evictions: float
    hit_share: float | None  # of all lookups; None: there was none


class StepTimes(msgspec.Struct, frozen=True):
    """Means of an engine's steps, in seconds; None: there was no step."""

    step: float | None  # from the beginning of a step to that of the next
    device: float | None  # in which the device ran
    waiting: float | None  # in which the device did not run
    core: float | None  # the core's own, most of them while the device ran


class Rates(msgspec.Struct, frozen=True):
    """Rates in the order of the snapshot's own tuples; a process or channel that is new counts from its start."""

    seconds: float  # between the two snapshots
    cpu: tuple[float, ...]  # processors used by each process
    channels: tuple[ChannelRates, ...]
    stores: tuple[StoreRates, ...]
    steps: tuple[StepTimes, ...]  # of each engine
    # Each counter per second, and seconds of a histogram per second.
    engines: tuple[dict[str, float], ...]
    served: tuple[dict[str, float], ...]
    servers: tuple[dict[str, float], ...]
    refused: float  # answers per second with an error, or without a response because the client had gone
    first_piece: float | None  # seconds, the mean; None: no answer has begun
    gap: float | None  # seconds from token to token, the mean

    def total(self, key: str) -> float:
        """Returns the rate of a counter of all engines or servers."""
        return _total((*self.engines, *self.served, *self.servers), key)


class View(msgspec.Struct, frozen=True):
    """A snapshot with its rates, as `penstock top` and `/dashboard` show it."""

    moment: ServerSnapshot
    rates: Rates | None  # None: there is no snapshot before it, or that is too long ago

    @classmethod
    def after(cls, before: ServerSnapshot | None, moment: ServerSnapshot, max_seconds: float) -> View:
        """`max_seconds`: between the two snapshots, above which there are no rates."""
        if before is None or before.server_info != moment.server_info or not 0 < moment.at - before.at <= max_seconds:
            return cls(moment, None)
        return cls(moment, rates_of(before, moment))


def rates_of(before: ServerSnapshot, now: ServerSnapshot) -> Rates:
    """Returns the rates between two snapshots of the same server; `now` is later."""
    seconds = now.at - before.at
    engines = tuple(_of_engine(old, new, seconds) for old, new in zip(before.engines, now.engines, strict=True))
    served, servers = (
        tuple(_grown_counters(old, new, seconds) for old, new in zip(old_views, new_views, strict=True))
        for old_views, new_views in ((before.served, now.served), (before.servers, now.servers))
    )
    used = {(process.key, process.incarnation, process.life): process.cpu_seconds for process in before.processes}
    channels = {channel.name: channel for channel in before.channels}
    stores = {store.name: store for store in before.stores}
    return Rates(
        seconds=seconds,
        cpu=tuple(
            max(process.cpu_seconds - used.get((process.key, process.incarnation, process.life), 0.0), 0.0) / seconds
            for process in now.processes
        ),
        channels=tuple(_of_channel(channels.get(channel.name), channel, seconds) for channel in now.channels),
        stores=tuple(_of_store(stores.get(store.name), store, seconds) for store in now.stores),
        steps=tuple(map(_step_times, engines)),
        engines=engines,
        served=served,
        servers=servers,
        refused=sum(rate for server in servers for key, rate in server.items() if _is_refusal(key)),
        first_piece=_mean_of(served, "time_to_first_token_seconds"),
        gap=_mean_of(served, "inter_token_latency_seconds"),
    )


def _of_engine(old: CounterView, new: CounterView, seconds: float) -> dict[str, float]:
    """Returns the rates of an engine. Its counters begin at 0 with each incarnation; one that has ended has none."""
    if old["engine_incarnation"] == new["engine_incarnation"]:
        return _grown_counters(old, new, seconds)
    return {key: number / seconds for key, number in new.counters.items()}


def _grown_counters(old: CounterView, new: CounterView, seconds: float) -> dict[str, float]:
    before = old.counters
    return {key: _growth(before.get(key, 0), number) / seconds for key, number in new.counters.items()}


def _step_times(rates: dict[str, float]) -> StepTimes:
    steps, busy, idle, core = (
        rates[f"engine_{name}"] for name in ("steps", "busy_seconds", "idle_seconds", "core_seconds")
    )
    return StepTimes(
        step=_mean(busy + idle, steps), device=_mean(busy, steps), waiting=_mean(idle, steps), core=_mean(core, steps)
    )


def _is_refusal(key: str) -> bool:
    name, _, status = key.rpartition(".")
    return name.startswith("requests.") and int(status) >= 400


def _total(rates: Iterable[dict[str, float]], key: str) -> float:
    return sum(part.get(key, 0.0) for part in rates)


def _mean_of(rates: Iterable[dict[str, float]], histogram: str) -> float | None:
    return _mean(_total(rates, f"{histogram}_sum"), _total(rates, f"{histogram}_count"))


def _of_channel(old: ChannelView | None, new: ChannelView, seconds: float) -> ChannelRates:
    before = {} if old is None else {end.process: end for end in old.ends if end.is_sender}
    sent: dict[str, tuple[float, float]] = {}
    for end in new.ends:
        if end.is_sender:
            records, nbytes = (_grown(before.get(end.process), end, name) / seconds for name in ("records", "nbytes"))
            sent[end.process] = records, nbytes
    records, nbytes, sleeps = (_grown(old, new, name) / seconds for name in ("records", "nbytes", "sleeps"))
    return ChannelRates(records, nbytes, sleeps, sent)


def _of_store(old: StoreView | None, new: StoreView, seconds: float) -> StoreRates:
    hits, misses, evictions = (_grown(old, new, name) for name in ("hits", "misses", "evictions"))
    return StoreRates(hits / seconds, misses / seconds, evictions / seconds, _mean(hits, hits + misses))


def _grown(old: object, new: object, name: str) -> float:
    return _growth(0 if old is None else getattr(old, name), getattr(new, name))


def _growth(before: float, now: float) -> float:
    """Returns the increase of a counter; one that is lower than before has begun again at 0."""
    return now - before if now >= before else now


def _mean(whole: float, many: float) -> float | None:
    return whole / many if many > 0 else None
