"""Metrics of channels, store and memory, read for each request of `/metrics`; and the options of the KV cache.

The ends of channels and the store count in shared memory, each in separate words, so reports add no cost to a message
or a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client.registry import Collector

from penstock.channel import Channel
from penstock.engine.cluster.counter import CounterSpec
from penstock.engine.protocol.config import EngineConfig
from penstock.server.http.metrics import Family, family_of, labels_of
from penstock.server.status.counters import PARTS
from penstock.tensor import Store
from penstock.tools.inspect import memory_of

BOTH, SENDERS, RECEIVERS = ("senders", "receivers"), ("senders",), ("receivers",)
BY_END: dict[str, tuple[str, ...]] = {"channel": (), "end": ()}


class ChannelCounter(NamedTuple):
    spec: CounterSpec
    ends: tuple[str, ...]  # that have it
    field: str  # of an end, in the snapshot of its channel


CHANNEL_COUNTERS = (
    ChannelCounter(
        CounterSpec(
            "penstock_channel_records",
            "records that an `end` of a `channel` sent or received; ends are `sender N` and `receiver N`",
            labels=BY_END,
        ),
        BOTH,
        "records",
    ),
    ChannelCounter(
        CounterSpec(
            "penstock_channel_bytes",
            "bytes of the records that an `end` of a `channel` sent or received",
            labels=BY_END,
        ),
        BOTH,
        "nbytes",
    ),
    ChannelCounter(
        CounterSpec(
            "penstock_channel_behind_records",
            "records sent that a receiver has not received",
            "it stays above 0: that process is slow, or [stuck](stuck.md)",
            "gauge",
            labels=BY_END,
        ),
        RECEIVERS,
        "records_behind",
    ),
    ChannelCounter(
        CounterSpec(
            "penstock_channel_longest_wait_seconds",
            "the longest wait of an end",
            "of a sender: a receiver held it up for so long",
            "gauge",
            labels=BY_END,
            unit=1e9,
        ),
        BOTH,
        "longest_wait_ns",
    ),
    ChannelCounter(CounterSpec("penstock_channel_parks", "how often an end slept", labels=BY_END), BOTH, "parks"),
    ChannelCounter(
        CounterSpec("penstock_channel_spills", "records too long for the ring, which went by the pool", labels=BY_END),
        SENDERS,
        "spills",
    ),
    ChannelCounter(
        CounterSpec(
            "penstock_channel_exhaustions",
            "times the pool had no room for a record",
            "it grows: receivers hold long records",
            labels=BY_END,
        ),
        SENDERS,
        "exhaustions",
    ),
)
CACHE_OPTIONS = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override")
CACHE_CONFIG = CounterSpec(
    "vllm:cache_config_info",
    "1, with the options of the KV cache as labels",
    kind="gauge",
    labels={"engine": (), **dict.fromkeys(CACHE_OPTIONS, ())},
)
MEMORY_BYTES = CounterSpec(
    "penstock_memory_bytes",
    "bytes of shared memory of the node by `kind`: `channels`, `stores`, `pages` (of counters), `kv pages` and `kv "
    "ledger` (of kept KV caches), `weights` (of all engines)",
    kind="gauge",
    labels={"kind": ()},
)
STORE_BYTES = CounterSpec(
    "penstock_store_bytes",
    "bytes of the store for images, by `kind`: `size`, `claimed` (memory), `taken` (by values)",
    kind="gauge",
    labels={"kind": ("size", "claimed", "taken")},
)
STORE_VALUES = CounterSpec("penstock_store_values", "values kept under a key", kind="gauge")
STORE_LEASES = CounterSpec(
    "penstock_store_leases", "leases that processes hold", "leases without open requests: a leak", "gauge"
)
STORE_COUNTERS = {  # by the field of `StoreStats`
    "hits": CounterSpec("penstock_store_hits", "values that were found under their key"),
    "misses": CounterSpec(
        "penstock_store_misses",
        "values that had to be made: each value of a request is a hit or a miss, also where it travels inline for want "
        "of room",
        "hits divided by both: the hit rate",
    ),
    "puts": CounterSpec("penstock_store_puts", "values written"),
    "evictions": CounterSpec("penstock_store_evictions", "values evicted", "near puts: the store is too small"),
    "fills_awaited": CounterSpec("penstock_store_fills_awaited", "waits for another process that wrote the same key"),
}


def declared_metrics() -> dict[CounterSpec, tuple[str, ...]]:
    """Returns the labels of each metric, in the order in which documents show them."""
    counted = {
        counter.spec: (*labels_of(counter.spec, kind.SCOPE), *counter.spec.labels)
        for kinds in PARTS.values()
        for kind in kinds
        for counter in kind.DECLARED
        if counter.spec.is_metric
    }
    of_store = (STORE_BYTES, STORE_VALUES, STORE_LEASES, *STORE_COUNTERS.values())
    of_segments = (CACHE_CONFIG, *(counter.spec for counter in CHANNEL_COUNTERS), MEMORY_BYTES, *of_store)
    return {**counted, **{spec: tuple(spec.labels) for spec in of_segments}}


class SegmentMetrics(Collector):
    def __init__(
        self, channels: Sequence[Channel[Any]], store: Store | None, config: EngineConfig, launcher: int
    ) -> None:
        """`launcher`: the pid of the process that has all memory of the node open."""
        self._launcher = launcher
        self._channels = channels
        self._store = store
        options = [str(getattr(config, name)) for name in CACHE_OPTIONS]
        self._engines = [[str(engine), *options] for engine in range(config.all_groups)]

    def collect(self) -> Iterator[Family]:
        yield family_of(CACHE_CONFIG, (), ((labels, 1) for labels in self._engines))
        yield from _of_channels([channel.snapshot() for channel in self._channels])
        yield family_of(MEMORY_BYTES, (), (([kind], nbytes) for kind, nbytes in memory_of(self._launcher).items()))
        if self._store is not None:
            yield from _of_store(self._store)


def _of_channels(snapshots: Sequence[dict[str, Any]]) -> Iterator[Family]:
    for spec, kinds, field in CHANNEL_COUNTERS:
        yield family_of(spec, (), ((labels, end[field] / spec.unit) for labels, end in _ends(snapshots, kinds)))


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
    nbytes = (("size", pool.nbytes), ("claimed", pool.claimed_nbytes), ("taken", pool.taken_nbytes))
    yield family_of(STORE_BYTES, (), (([kind], number) for kind, number in nbytes))
    yield family_of(STORE_VALUES, (), [([], len(stats.items))])
    yield family_of(STORE_LEASES, (), [([], sum(holder.blocks for holder in pool.holders))])
    for field, spec in STORE_COUNTERS.items():
        yield family_of(spec, (), [([], getattr(stats, field))])
