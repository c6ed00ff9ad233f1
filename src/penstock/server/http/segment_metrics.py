"""Metrics of channels and of the store, read from their segments when `/metrics` is asked for.

The ends of channels and the store count in shared memory anyway, each in words of its own; so a message or a value
costs no more for being reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.codec import Channel
from penstock.tensor import Store

LABELS = ("channel", "end")
BOTH, SENDERS, RECEIVERS = ("senders", "receivers"), ("senders",), ("receivers",)
# Name, text, the ends that have it, and their field in a snapshot.
COUNTERS = (
    ("records", "Records sent, or received", BOTH, "records"),
    ("bytes", "Bytes sent, or received", BOTH, "nbytes"),
    ("parks", "How often the end slept", BOTH, "parks"),
    ("spills", "Records too long for the ring, which went by the pool", SENDERS, "spills"),
    ("exhaustions", "Times the pool had no room for a record", SENDERS, "exhaustions"),
)
GAUGES = (
    ("behind_records", "Records sent and not yet received", RECEIVERS, "records_behind", 1.0),
    ("longest_wait_seconds", "Longest wait of the end", BOTH, "longest_wait_ns", 1e9),
)
STORE_COUNTERS = (
    ("hits", "Values found under their key", "hits"),
    ("misses", "Values that were looked up, and had to be made", "misses"),
    ("puts", "Values written", "puts"),
    ("evictions", "Values evicted", "evictions"),
    ("fills_awaited", "Waits for another process that wrote the same key", "fills_awaited"),
)

Family = CounterMetricFamily | GaugeMetricFamily


class SegmentMetrics(Collector):
    def __init__(self, channels: Sequence[Channel[Any]], store: Store | None) -> None:
        self._channels = channels
        self._store = store

    def collect(self) -> Iterator[Family]:
        yield from _of_channels([channel.snapshot() for channel in self._channels])
        if self._store is not None:
            yield from _of_store(self._store)


def _of_channels(snapshots: Sequence[dict[str, Any]]) -> Iterator[Family]:
    for name, text, kinds, field in COUNTERS:
        counter = CounterMetricFamily(f"penstock_channel_{name}", text, labels=LABELS)
        for labels, end in _ends(snapshots, kinds):
            counter.add_metric(labels, end[field])
        yield counter
    for name, text, kinds, field, unit in GAUGES:
        gauge = GaugeMetricFamily(f"penstock_channel_{name}", text, labels=LABELS)
        for labels, end in _ends(snapshots, kinds):
            gauge.add_metric(labels, end[field] / unit)
        yield gauge


def _ends(snapshots: Iterable[dict[str, Any]], kinds: Sequence[str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields the labels and the state of each end of these kinds that a process has taken."""
    for snapshot in snapshots:
        for kind in kinds:
            for end in snapshot[kind]:
                if end["state"] != "expected":
                    yield [snapshot["name"], f"{kind.removesuffix('s')} {end['index']}"], end


def _of_store(store: Store) -> Iterator[Family]:
    stats = store.stats()
    pool = stats.pool
    nbytes = GaugeMetricFamily("penstock_store_bytes", "Bytes of the store by kind", labels=["kind"])
    for kind, number in (("size", pool.nbytes), ("claimed", pool.claimed_nbytes), ("taken", pool.taken_nbytes)):
        nbytes.add_metric([kind], number)
    yield nbytes
    yield GaugeMetricFamily("penstock_store_values", "Values that are kept under a key", len(stats.items))
    held = sum(holder.blocks for holder in pool.holders)
    yield GaugeMetricFamily("penstock_store_leases", "Leases that processes hold", held)
    for name, text, field in STORE_COUNTERS:
        yield CounterMetricFamily(f"penstock_store_{name}", text, getattr(stats, field))
