"""`/metrics`: the tally of all server processes and the engine's board, as Prometheus reads them.

Leaves the numbers to those who write them: nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from penstock.engine.cluster.status_board import Board
from penstock.server.status.counters import ROUTES, SECONDS, STATUSES, Latency, Row, Tally

TOKENS = (
    ("prompt_tokens", "Tokens of prompts whose answers have come to their end", Row.PROMPT_TOKENS),
    ("cached_tokens", "Those of them that a cache had", Row.CACHED_TOKENS),
    ("completion_tokens", "Tokens of answers", Row.COMPLETION_TOKENS),
)
LATENCIES = (
    ("time_to_first_token_seconds", "From a request to the first piece of its answer", "first"),
    ("inter_token_latency_seconds", "From one token of a sample to the next", "between"),
    ("request_duration_seconds", "From a request to the end of its answer", "whole"),
)
GROUPS = (
    ("group_open_requests", "Requests in a group's core", Board.OPEN),
    ("group_waiting_requests", "Those of them that have no slot yet", Board.WAITING),
    ("group_free_blocks", "Blocks of the cache that are free", Board.FREE_BLOCKS),
    ("group_incarnation", "How often the group was started; 0: it does not serve", Board.SERVING),
)
OF_A_GROUP = (
    ("group_steps", "Steps since the group was started", Board.STEPS, 1.0),
    ("group_own_seconds", "What the core itself spent on them", Board.OWN_NS, 1e9),
    ("group_busy_seconds", "In which the device ran", Board.BUSY_NS, 1e9),
    ("group_idle_seconds", "In which it did not run though it could have", Board.IDLE_NS, 1e9),
)


class Metrics(Collector):
    def __init__(self, tally: Tally, board: Board) -> None:
        self._tally = tally
        self._rows = board.rows
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        servers = list(enumerate(self._tally.rows))
        requests = CounterMetricFamily(
            "penstock_requests", "Answers by route and status", labels=["server", "route", "status"]
        )
        for server, row in servers:
            for route in ROUTES:
                for status in STATUSES:
                    many = row[row.answered(route, status)]
                    if many:
                        requests.add_metric([str(server), route, str(status)], many)
        yield requests
        is_open = GaugeMetricFamily("penstock_open_requests", "Requests that are being answered", labels=["server"])
        for server, row in servers:
            is_open.add_metric([str(server)], row[Row.OPEN])
        yield is_open
        for name, what, word in TOKENS:
            tokens = CounterMetricFamily(f"penstock_{name}", what, labels=["server"])
            for server, row in servers:
                tokens.add_metric([str(server)], row[word])
            yield tokens
        for name, what, of in LATENCIES:
            took = HistogramMetricFamily(f"penstock_{name}", what, labels=["server"])
            for server, row in servers:
                latency: Latency = getattr(row, of)
                bounds = [*map(str, SECONDS), "+Inf"]
                buckets = list(zip(bounds, accumulate(latency.counts), strict=True))
                took.add_metric([str(server)], buckets, latency.seconds)
            yield took
        yield from self._of_groups()

    def _of_groups(self) -> Iterator[GaugeMetricFamily]:
        """Gauges all of them: a group that is started again begins anew."""
        divided = [*((name, what, word, 1.0) for name, what, word in GROUPS), *OF_A_GROUP]
        for name, what, word, unit in divided:
            found = GaugeMetricFamily(f"penstock_{name}", what, labels=["group"])
            for group, row in enumerate(self._rows):
                found.add_metric([str(group)], row[word] / unit)
            yield found
