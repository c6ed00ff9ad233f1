"""Rates between two snapshots of a server: each counter per second, and each time as a share or a mean.

A restarted process counts from 0; the difference is then what it has counted since its start. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.server.status.snapshot import ChannelView, EngineView, ServerSnapshot, StoreView


class ChannelRates(msgspec.Struct, frozen=True):
    records: float  # per second
    nbytes: float
    sleeps: float


class StoreRates(msgspec.Struct, frozen=True):
    hits: float  # per second
    misses: float
    evictions: float
    hit_share: float | None  # of all lookups; None: there was none


class GroupRates(msgspec.Struct, frozen=True):
    steps: float  # per second
    step: float | None  # seconds from the beginning of a step to that of the next; None: there was no step
    device: float | None  # seconds per step in which the device ran
    waiting: float | None  # seconds per step in which the device did not run
    core: float | None  # the core's own seconds per step, most of them while the device ran
    prompt_tokens: float  # per second
    generated_tokens: float
    preemptions: float


class Rates(msgspec.Struct, frozen=True):
    """Rates in the order of the snapshot's own tuples; a process or channel that is new counts from its start."""

    seconds: float  # between the two snapshots
    cpu: tuple[float, ...]  # processors used by each process
    channels: tuple[ChannelRates, ...]
    stores: tuple[StoreRates, ...]
    groups: tuple[GroupRates, ...]
    prompt_tokens: float  # per second, of all groups
    generated_tokens: float
    answered: float  # requests per second
    refused: float
    first_piece: float | None  # seconds, the mean; None: no answer has begun
    gap: float | None  # seconds from token to token, the mean


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
    groups = [_of_group(old, new, seconds) for old, new in zip(before.groups, now.groups, strict=True)]
    used = {(process.key, process.incarnation, process.life): process.cpu_seconds for process in before.processes}
    channels = {channel.name: channel for channel in before.channels}
    stores = {store.name: store for store in before.stores}
    answered, refused, begun, first_seconds, gaps, gap_seconds = (
        _all(now.servers, name) - _all(before.servers, name)
        for name in ("answered", "refused", "first_pieces", "first_seconds", "gaps", "gap_seconds")
    )
    return Rates(
        seconds=seconds,
        cpu=tuple(
            max(process.cpu_seconds - used.get((process.key, process.incarnation, process.life), 0.0), 0.0) / seconds
            for process in now.processes
        ),
        channels=tuple(_of_channel(channels.get(channel.name), channel, seconds) for channel in now.channels),
        stores=tuple(_of_store(stores.get(store.name), store, seconds) for store in now.stores),
        groups=tuple(groups),
        prompt_tokens=sum(group.prompt_tokens for group in groups),
        generated_tokens=sum(group.generated_tokens for group in groups),
        answered=answered / seconds,
        refused=refused / seconds,
        first_piece=_mean(first_seconds, begun),
        gap=_mean(gap_seconds, gaps),
    )


def _of_group(old: EngineView, new: EngineView, seconds: float) -> GroupRates:
    """Returns the rates of a group. Its counters begin at 0 with each incarnation; a group that has ended has none."""
    is_same = old.incarnation == new.incarnation

    def since(name: str) -> int:
        many: int = getattr(new, name) - (getattr(old, name) if is_same else 0)
        return max(many, 0)

    steps, device, idle, core = since("steps"), since("device_ns"), since("idle_ns"), since("core_ns")
    return GroupRates(
        steps=steps / seconds,
        step=_mean((device + idle) / 1e9, steps),
        device=_mean(device / 1e9, steps),
        waiting=_mean(idle / 1e9, steps),
        core=_mean(core / 1e9, steps),
        prompt_tokens=since("prompt_tokens") / seconds,
        generated_tokens=since("generated_tokens") / seconds,
        preemptions=since("preemptions") / seconds,
    )


def _of_channel(old: ChannelView | None, new: ChannelView, seconds: float) -> ChannelRates:
    return ChannelRates(*(_grown(old, new, name) / seconds for name in ("records", "nbytes", "sleeps")))


def _of_store(old: StoreView | None, new: StoreView, seconds: float) -> StoreRates:
    hits, misses, evictions = (_grown(old, new, name) for name in ("hits", "misses", "evictions"))
    return StoreRates(hits / seconds, misses / seconds, evictions / seconds, _mean(hits, hits + misses))


def _grown(old: object, new: object, name: str) -> int:
    """Returns the increase of a counter; one that is lower than before has begun again at 0."""
    before: int = 0 if old is None else getattr(old, name)
    now: int = getattr(new, name)
    return now - before if now >= before else now


def _all(rows: Iterable[object], name: str) -> float:
    return sum(float(getattr(row, name)) for row in rows)


def _mean(whole: float, many: float) -> float | None:
    return whole / many if many > 0 else None
