"""`/metrics`: every declared counter of servers and engines, in Prometheus' format.

A metric that vLLM also has carries vLLM's name, type, labels and buckets; others are called `penstock_…`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from penstock.engine.cluster.counter import Counter, CounterSet, CounterSpec, Row
from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status.counters import ServerCounters, counter_rows

ENGINE_LABELS = ("model_name", "engine")  # as vLLM has them
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metrics(Collector):
    def __init__(
        self, tally: ServerCounters, board: StatusBoard, model_name: str, segments: Collector | None = None
    ) -> None:
        """`model_name`: the first name by which clients call the model; `segments`: metrics of channels and store."""
        self._rows = counter_rows(board, tally)
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if segments is not None:
            self._registry.register(segments)

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Family]:
        for kind, instances in self._rows.items():
            for counter in kind.DECLARED:
                if counter.spec.is_metric:
                    yield self._family(counter, kind, instances)

    def _family(self, counter: Counter, kind: type[CounterSet], instances: Sequence[Sequence[Row]]) -> Family:
        spec = counter.spec
        names = labels_of(spec, kind.SCOPE)
        if spec.is_total:
            instances = [[row for rows in instances for row in rows]]
        labeled = [
            ([{"model_name": self._model_name}.get(name, str(number)) for name in names], rows)
            for number, rows in enumerate(instances)
        ]
        if spec.kind != "histogram":
            samples = (
                ([*labels, *values], number) for labels, rows in labeled for values, number in counter.samples(*rows)
            )
            return family_of(spec, names, samples)
        family = HistogramMetricFamily(spec.name, spec.help, labels=names)
        for labels, rows in labeled:
            bounds = [*map(str, spec.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(counter.counts(*rows)), strict=True))
            family.add_metric(labels, buckets, counter.sum_of(*rows))
        return family


def labels_of(spec: CounterSpec, scope: str) -> tuple[str, ...]:
    """Returns the labels of a metric that say where it was counted."""
    labels = ENGINE_LABELS if spec.name.startswith("vllm:") else (scope,)
    return labels[: len(labels) - 1] if spec.is_total else labels


def family_of(spec: CounterSpec, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]) -> Family:
    """Returns a counter or gauge. `labels`: those before the labels of the declaration."""
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.name, spec.help, labels=(*labels, *spec.labels))
    for values, number in samples:
        family.add_metric(values, number)
    return family
