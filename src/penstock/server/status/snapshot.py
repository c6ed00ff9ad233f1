"""Snapshot of a server: plain data that travels as JSON, the source of rates and views.

Counters begin at 0 at the start of the counting process. `snapshot_reader` reads snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from penstock.engine.cluster.counter import Counter, Row
from penstock.server.status.counters import ITEM_FIELDS, PARTS
from penstock.server.status.server_info import ServerInfo

Number: TypeAlias = "int | float"


class ProcessView(msgspec.Struct, frozen=True):
    role: str  # launcher, core, worker, output, bridge, server
    group: int  # means something for core, worker, output and bridge
    index: int
    pid: int  # 0: none now
    incarnation: int  # 0: none has been started; 1: the first
    state: str  # starting, serves, draining, stopped, gone
    cpu_seconds: float
    private_nbytes: int | None  # private memory; None: no process now, or unknown to the kernel
    node: int = 0  # of a bridge: the node of the group; of remote_ranks: the node of the ranks
    life: int = 0  # of an output processor: restarts within the incarnation

    @property
    def restarts(self) -> int:
        """Returns the number of restarts; those of an output processor in former incarnations do not count."""
        return max(self.incarnation - 1, 0) + self.life

    @property
    def is_of_group(self) -> bool:
        return self.role in ("core", "worker", "output", "bridge", "remote_ranks")

    @property
    def key(self) -> tuple[str, int, int]:
        return self.role, self.group, self.index

    @property
    def title(self) -> str:
        place = {"launcher": "", "server": f" {self.index}", "bridge": f" {self.group} to node {self.node}"}
        return self.role + place.get(self.role, f" {self.group}.{self.index}")


class EndView(msgspec.Struct, frozen=True, array_like=True):
    """A live end of a channel."""

    process: str  # its title
    is_sender: bool
    waits: float  # seconds of the present wait: of a sender for room, of a receiver for records; 0: none
    behind: int  # records that a receiver has not released
    records: int = 0  # that a sender has sent
    nbytes: int = 0


class AwaitedView(msgspec.Struct, frozen=True):
    """A process for which processes wait, and that waits for none itself."""

    process: str
    waiters: tuple[str, ...]  # those that wait for a waiter included
    seconds: float  # of the longest wait


class ChannelView(msgspec.Struct, frozen=True):
    name: str
    kind: str  # ring, broadcast, inbox
    records: int  # sent, by all senders
    nbytes: int
    sleeps: int  # of all ends, without records or room
    behind: int  # records held by the slowest receiver
    behind_nbytes: int
    slowest: str  # name of the receiver; empty: none is behind
    blocked: float  # seconds of the longest present wait of a sender for room
    longest_blocked: float  # of the longest wait ever
    spills: int = 0  # records too long for the ring, which went by the pool
    exhaustions: int = 0  # times the pool had no room for a record
    fill: float = 0.0  # share of a lane that the slowest receiver holds
    ends: tuple[EndView, ...] = ()


class HolderView(msgspec.Struct, frozen=True):
    name: str
    blocks: int
    nbytes: int


class StoreView(msgspec.Struct, frozen=True):
    name: str
    nbytes: int  # that fit
    kept_nbytes: int  # under keys
    taken_nbytes: int  # kept, and blocks without a key
    keys: int
    held_keys: int
    hits: int
    misses: int
    puts: int
    evictions: int
    evicted_nbytes: int
    holders: tuple[HolderView, ...]


class CounterView(msgspec.Struct, frozen=True):
    """The declared counters of an engine, or of a server process, by `CounterSpec.key`.

    With labels, `requests` is the sum and `requests.chat.200` the number for these values. A histogram has `…_count`
    and `…_sum`.
    """

    gauges: dict[str, Number]
    counters: dict[str, Number]

    @classmethod
    def of(cls, declared: Iterable[tuple[Counter, Sequence[Row]]]) -> CounterView:
        """Returns what the rows of each counter have, added up."""
        view = cls({}, {})
        for counter, rows in declared:
            key, kind = counter.spec.key, counter.spec.kind
            if kind == "histogram":
                view.counters[f"{key}_count"] = sum(counter.counts(*rows))
                view.counters[f"{key}_sum"] = counter.sum_of(*rows)
            elif kind != "state":
                numbers = view.counters if kind == "counter" else view.gauges
                samples = dict(counter.samples(*rows))
                numbers[key] = sum(samples.values())
                numbers.update({".".join((key, *values)): number for values, number in samples.items() if values})
        return view

    def __getitem__(self, key: str) -> Number:
        return self.gauges[key] if key in self.gauges else self.counters[key]

    def __contains__(self, key: str) -> bool:
        return key in self.gauges or key in self.counters


ZERO = {  # views of rows in which nothing has been counted
    part: CounterView.of((counter, ()) for kind in kinds for counter in kind.DECLARED) for part, kinds in PARTS.items()
}


class ServerSnapshot(msgspec.Struct, frozen=True):
    at: float  # seconds on the monotonic clock of the machine
    time: float  # seconds since 1970
    server_info: ServerInfo
    is_draining: bool
    memory: dict[str, int]  # bytes of segments and kept files by kind, counted once for all processes
    processes: tuple[ProcessView, ...]
    channels: tuple[ChannelView, ...]
    stores: tuple[StoreView, ...]
    engines: tuple[CounterView, ...]
    served: tuple[CounterView, ...]  # what all servers count of each engine
    servers: tuple[CounterView, ...]
    awaited: tuple[AwaitedView, ...] = ()

    def __post_init__(self) -> None:
        for part, zero in ZERO.items():
            for view in getattr(self, part):
                missing = {*zero.gauges, *zero.counters} - {*view.gauges, *view.counters}
                if missing:
                    raise ValueError(f"expected the counters {', '.join(sorted(missing))} at $.{part}")

    def total(self, key: str) -> Number:
        """Returns a counter of all engines or servers."""
        return sum(view[key] for view in (*self.engines, *self.served, *self.servers) if key in view)

    @property
    def shared_nbytes(self) -> int:
        return sum(self.memory.values())

    @property
    def prefix_hit_share(self) -> float | None:
        """Returns the share of prompts' tokens that the prefix caches had; None: none was looked up."""
        queries = self.total("prefix_cache_queries")
        return self.total("prefix_cache_hits") / queries if queries else None

    @property
    def restarts(self) -> int:
        """Returns how often groups and servers were started again. A group restarts as a whole."""
        places = {process.key if process.role == "server" else process.group: 0 for process in self.processes}
        for process in self.processes:
            place = process.key if process.role == "server" else process.group
            places[place] = max(places[place], process.incarnation - 1)
        return sum(places.values())

    @property
    def gone(self) -> int:
        """Returns how many processes have died and are not started again yet."""
        return sum(process.state == "gone" for process in self.processes)

    @property
    def items(self) -> dict[str, Number]:
        """Returns the counts of all servers; empty without a store and without tensors."""
        counts = {how: self.total(f"items.{how}") for how in ITEM_FIELDS}
        return counts if self.stores or any(counts.values()) else {}

    @property
    def coming_back(self) -> dict[int, int]:
        """Returns the lost groups that do not serve yet, and the number of waiting requests."""
        restarted = {process.group for process in self.processes if process.is_of_group and process.incarnation > 1}
        waiting = [int(served["requests_waiting_to_resume"]) for served in self.served]
        return {
            group: waiting[group]
            for group, engine in enumerate(self.engines)
            if engine["engine_incarnation"] == 0 and (waiting[group] or group in restarted)
        }


def awaited_processes(channels: Iterable[ChannelView], idle: frozenset[str]) -> tuple[AwaitedView, ...]:
    """Returns the processes at the end of each chain of waits. `idle`: processes without an open request, which wait
    for work. A core that waits for its inbox has no work, too. A worker that waits for a step, while its core waits for
    the worker's result, waits for its device."""
    waits: dict[str, dict[str, float]] = {}  # by process: seconds of the wait of each process that waits for it
    for channel in channels:
        senders, receivers = ([end for end in channel.ends if end.is_sender is side] for side in (True, False))
        slowest = sorted(receivers, key=lambda end: -end.behind)[:1]
        blocked = [(end, slowest) for end in senders if end.waits]
        if not any(end.process.startswith("core") for end in receivers) or channel.kind != "inbox":
            blocked += [(end, senders) for end in receivers if end.waits and not end.behind]
        for end, targets in blocked:
            if end.process not in idle:
                for target in targets:
                    waits.setdefault(target.process, {})[end.process] = end.waits
    for process, waiters in waits.items():
        if process.startswith("core"):
            for worker in waits.keys() & waiters.keys():
                if process in waits[worker]:
                    del waiters[worker]
    waits = {process: waiters for process, waiters in waits.items() if waiters}
    waiting = {waiter for waiters in waits.values() for waiter in waiters}
    return tuple(
        AwaitedView(process, tuple(sorted(_waiters_of(process, waits))), max(waits[process].values()))
        for process in sorted(waits.keys() - waiting - idle)
        if not process.startswith("launcher")
    )


def _waiters_of(process: str, waits: dict[str, dict[str, float]]) -> set[str]:
    waiters, new = set[str](), [process]
    while new:
        new = [waiter for each in new for waiter in waits.get(each, ()) if waiter not in waiters]
        waiters.update(new)
    return waiters
