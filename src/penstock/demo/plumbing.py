"""What the processes of the demonstration share: the channels, the pool of images, and a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import penstock
from penstock.demo.messages import Done

POOL_NBYTES = 96 << 20


@dataclass
class Plumbing:
    """Every channel, the pool, and a few numbers; handed to each process while it is being spawned."""

    control: penstock.Broadcast  # to core and server; nothing is ever sent: its closing says that it is time to end
    submit: penstock.Ring
    steps: penstock.Broadcast
    answers: penstock.Inbox
    events: penstock.Ring
    images: penstock.Pool
    figures: penstock.Segment

    @classmethod
    def lay(cls, workers: int) -> Plumbing:
        return cls(
            penstock.open_broadcast(2, "control", on_receiver_death="ignore"),
            penstock.open_ring("submit"),
            penstock.open_broadcast(workers, "steps", max_peers=64),
            penstock.open_inbox(workers, "answers", max_peers=64),
            penstock.open_ring("events"),
            penstock.Pool.create(POOL_NBYTES, name="images", max_peers=64),
            penstock.Segment.create(Figures.NBYTES, name="figures"),
        )

    @property
    def channels(self) -> list[penstock.Channel]:
        return [self.submit, self.steps, self.answers, self.events, self.control]


class Figures:
    """Counts that the core keeps for whoever looks: they lie in a plain segment, and are read without asking it."""

    RIGHT, WRONG, GONE, NBYTES_READ, STEPS, FIRST = range(6)
    ROUND_TRIPS = 2048  # the latest, in ns, from FIRST on
    NBYTES = 8 * (FIRST + ROUND_TRIPS)

    def __init__(self, segment: penstock.Segment, *, writable: bool = False) -> None:
        self.numbers: npt.NDArray[np.uint64] = np.frombuffer(segment.view(writable=writable), np.uint64)

    def add(self, done: Done) -> None:
        for index, many in enumerate((done.right, done.wrong, done.gone, done.nbytes)):
            self.numbers[index] += np.uint64(many)

    def add_round_trip(self, ns: int) -> None:
        steps = int(self.numbers[self.STEPS])
        self.numbers[self.FIRST + steps % self.ROUND_TRIPS] = ns
        self.numbers[self.STEPS] = steps + 1

    def __getitem__(self, index: int) -> int:
        return int(self.numbers[index])

    def round_trips(self) -> tuple[float, float]:
        """Median and 99th percentile, in ns."""
        many = min(self[self.STEPS], self.ROUND_TRIPS)
        if many == 0:
            return 0.0, 0.0
        p50, p99 = np.percentile(self.numbers[self.FIRST : self.FIRST + many], (50, 99))
        return float(p50), float(p99)
