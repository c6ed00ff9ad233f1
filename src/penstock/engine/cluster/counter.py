"""Counters in rows of shared memory, each declared once, in the class of its row.

    class StatusBoard(CounterSet, scope="engine"):
        STEPS = counter("penstock_engine_steps", "Steps since the engine was started", owner=CORE)

    row[StatusBoard.STEPS] = 5

Declarations give the place of each counter in its row, `/metrics`, the snapshot with its rates, `penstock top`, both
dashboards, and the table of metrics in the documentation. Each number is one aligned word of 8 bytes with one writer,
and no two words are read as one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

WORD_NBYTES = 8
LINE_WORDS = 8  # of a cache line
Row: TypeAlias = "memoryview[int]"  # the words of one row
Bounds: TypeAlias = tuple[float, ...]
Kind = Literal["counter", "gauge", "histogram", "state"]

# As vLLM's metrics of the same meaning have them.
FIRST_TOKEN_SECONDS: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_SECONDS: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
LENGTHS: Bounds = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)  # in tokens
STEP_TOKENS: Bounds = tuple(float(1 << power) for power in (0, *range(3, 15)))


@dataclass(frozen=True, eq=False)
class CounterSpec:
    """The declaration of a counter, whatever counts it."""

    name: str  # vllm:… and penstock_…: a metric of that name; others: only in snapshots
    help: str
    look: str = ""  # at it when this is so
    kind: Kind = "counter"
    owner: str = ""  # the process that writes it, where several write a row
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # a word for each combination of their values
    bounds: Bounds = ()  # of a histogram
    unit: float = 1.0  # what is counted, in the unit of the metric: 1e9 for nanoseconds of seconds
    is_total: bool = False  # one number of all engines
    is_kept: bool = False  # a gauge that outlives the process
    value: Callable[[Row], float] | None = None  # computed from other words of the row

    @property
    def key(self) -> str:
        """Returns the name in snapshots."""
        return self.name.removeprefix("vllm:").removeprefix("penstock_")

    @property
    def is_metric(self) -> bool:
        return self.key != self.name

    @property
    def sample_name(self) -> str:
        """Returns the name of the samples of the metric."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def words(self) -> int:
        if self.value is not None:
            return 0
        if self.kind == "histogram":  # a word for each bound, one for larger values, and the sum
            return len(self.bounds) + 2
        return math.prod(map(len, self.labels.values()))


class Observe(Protocol):
    def __call__(self, row: Row, value: float, times: int = 1) -> None: ...


class Counter(int):
    """The index of a counter in its row, with its declaration.

    `at["chat", "200"]` is the index of the word for these values of the labels; `observe` adds to a histogram.
    """

    spec: CounterSpec
    at: dict[str | tuple[str, ...], int]
    observe: Observe

    def __new__(cls, index: int, spec: CounterSpec) -> Counter:
        self = super().__new__(cls, index)
        self.spec = spec
        combinations = product(*spec.labels.values())
        self.at = {values[0] if len(values) == 1 else values: word for word, values in enumerate(combinations, index)}
        self.observe = _observer(index, spec.bounds, spec.unit)
        return self

    # ── reports: the numbers of several rows add up ──
    def samples(self, *rows: Row) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yields the number for each combination of labels. With several labels, those that have not occurred lack."""
        spec = self.spec
        if spec.value is not None:
            yield (), sum(map(spec.value, rows))
            return
        for index, values in enumerate(product(*spec.labels.values()), self):
            number = sum(row[index] for row in rows)
            if number or len(values) < 2:
                yield values, number / spec.unit if spec.unit != 1 else number

    def counts(self, *rows: Row) -> list[int]:
        """Returns a count for each bound, of values up to it and above the one before; and one of values above all."""
        return [sum(row[word] for row in rows) for word in range(self, self + len(self.spec.bounds) + 1)]

    def sum_of(self, *rows: Row) -> float:
        """Returns the sum of the values of a histogram."""
        return sum(row[self + len(self.spec.bounds) + 1] for row in rows) / self.spec.unit


def _observer(first: int, bounds: Bounds, unit: float) -> Observe:
    """Returns a closure: a step of the hot path costs no look-up of attributes of an int."""
    sum_at = first + len(bounds) + 1

    def observe(row: Row, value: float, times: int = 1) -> None:
        row[first + bisect_left(bounds, value)] += times
        row[sum_at] += int(value * unit) * times

    return observe


def counter(name: str, text: str, look: str = "", **spec: Any) -> Counter:
    """Declares a number that only grows, until its writer starts again."""
    return Counter(0, CounterSpec(name, text, look, **spec))


def gauge(name: str, text: str, look: str = "", **spec: Any) -> Counter:
    return Counter(0, CounterSpec(name, text, look, "gauge", **spec))


def histogram(name: str, text: str, look: str = "", *, unit: float = 1e9, **spec: Any) -> Counter:
    """Declares a histogram of seconds with a sum in nanoseconds; or of numbers, with `unit` 1."""
    return Counter(0, CounterSpec(name, text, look, "histogram", unit=unit, **spec))


def state(**spec: Any) -> Counter:
    """Declares a word that processes write for each other, and that no report has."""
    return Counter(0, CounterSpec("", "", kind="state", **spec))


class CounterSet:
    """Base of the classes that declare a row. Counters of the same owner lie together, and begin a cache line."""

    SCOPE: ClassVar[str]  # the label of a row: engine, server
    DECLARED: ClassVar[tuple[Counter, ...]]
    WORDS: ClassVar[int]  # of a row

    def __init_subclass__(cls, scope: str = "") -> None:
        if not scope:
            return
        named = [(name, value.spec) for name, value in vars(cls).items() if isinstance(value, Counter)]
        owners = dict.fromkeys(spec.owner for _, spec in named)
        index, declared = 0, []
        for owner in owners:
            for name, spec in named:
                if spec.owner == owner:
                    declared.append(Counter(index, spec))
                    setattr(cls, name, declared[-1])
                    index += spec.words
            if len(owners) > 1:
                index += -index % LINE_WORDS
        cls.SCOPE, cls.DECLARED, cls.WORDS = scope, tuple(declared), index


class CounterRow(CounterSet):
    """Base of the classes that have one row, as in `row[ProcessCounters.OPEN] += 1`."""

    def __init__(self, words: Any = None) -> None:
        """`words`: where to count; None: in memory of this process."""
        self.words: Row = memoryview(bytearray(self.WORDS * WORD_NBYTES)).cast("Q") if words is None else words

    def __getitem__(self, word: int) -> int:
        number: int = self.words[word]
        return number

    def __setitem__(self, word: int, number: int) -> None:
        self.words[word] = number

    def clear_gauges(self) -> None:
        """Forgets what was open in a process that has ended."""
        for counter in self.DECLARED:
            if counter.spec.kind == "gauge" and not counter.spec.is_kept:
                for word in range(counter, counter + counter.spec.words):
                    self.words[word] = 0
