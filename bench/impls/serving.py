"""Requests with images, from servers through a core to workers: what every way of doing that has in common.

Rank 0 is the core, then come the servers, then the workers. A server sends one request after another and waits for
each answer. The core takes what has come, gives it to all workers as one step, and answers when all of them have read
every image of it. Needs nothing of ours: the peer interpreter imports it too.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import impls
from bench.harness.phases import Order, Report, now
from bench.impls import tensors

SERVERS, WORKERS = 4, 4
SMALLEST_SHARE = 23  # the smallest image is this part of the largest: 1 to 23 MB
PAGE_NBYTES = 4096


def numbers() -> array[int]:
    return array("q")


@dataclass
class ServingReport(Report):
    """A server: `begins` and `dones` of its requests. A worker: `arrivals`, when it has the view, and `reads`."""

    requests: array[int] = field(default_factory=numbers)  # the number of each, in the order of the stamps
    reads: array[int] = field(default_factory=numbers)  # a worker: it has read a byte of each page
    hits: int = 0  # a server: requests with an image that was there already
    touched_nbytes: int = 0  # a server or the core: of shared memory, where that is looked at
    steps: int = 0  # the core


class Images:
    """What the requests are about: distinct, of sizes spread evenly. Parts of one array, so that a server needs one."""

    def __init__(self, images: int, largest: int) -> None:
        smallest = largest // SMALLEST_SHARE
        self.sizes = [
            (smallest + (largest - smallest) * index // max(images - 1, 1)) // PAGE_NBYTES * PAGE_NBYTES
            for index in range(images)
        ]
        self._whole = np.resize(tensors.TILE, largest + images * PAGE_NBYTES)

    def __getitem__(self, image: int) -> np.ndarray[Any, Any]:
        start = image * PAGE_NBYTES
        return self._whole[start : start + self.sizes[image]]


def read(image: int, shown: Any) -> None:
    """Reads a byte of each page. Raises ValueError if that is another image."""
    tensors.read_pages(shown)
    result = tensors.bytes_of(shown)
    first = image * PAGE_NBYTES
    if (result[0], result[-1]) != (first % 251, (first + len(result) - 1) % 251):
        raise ValueError(f"image {image} arrived changed or cut ({len(result)} bytes)")


class End(impls.Sender):
    """Base of server, core and worker."""

    def fill(self, order: Order) -> Report:
        """Puts all images where those are found that are kept; one process does."""
        return Report()


class Server(End):
    """`ask` sends a request for an image, kept or not, and returns whether it was there; `wait` awaits the answer."""

    def __init__(self, rank: int, images: Images) -> None:
        self.rank = rank
        self.images = images
        self._sent = 0

    def ask(self, request: int, image: int, is_kept: bool) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def serve(self, order: Order) -> ServingReport:
        chance = random.Random(self.rank)
        report = ServingReport()
        for _ in range(order.messages):
            self._sent += 1
            request = self.rank * 1_000_000 + self._sent
            image, is_kept = chance.randrange(len(self.images.sizes)), chance.random() < order.share
            report.requests.append(request)
            report.begins.append(now())
            report.hits += self.ask(request, image, is_kept)
            self.wait()
            report.dones.append(now())
        return report


class Core(End):
    """`take` waits for requests and takes what has come; `step` has all workers read them; `answer` answers one."""

    def take(self) -> list[Any]:
        raise NotImplementedError

    def step(self, requests: list[Any]) -> None:
        raise NotImplementedError

    def answer(self, request: Any) -> None:
        raise NotImplementedError

    def serve(self, order: Order) -> ServingReport:
        report = ServingReport()
        left = order.messages * SERVERS
        while left:
            requests = self.take()
            self.step(requests)
            for each in requests:
                self.answer(each)
            left -= len(requests)
            report.steps += 1
        return report


class Worker(End):
    """`receive` waits for a step, as (request, image, what shows it to `get`); `done` says that it has been read."""

    def receive(self) -> list[tuple[int, int, Any]]:
        raise NotImplementedError

    def get(self, token: Any) -> Any:
        return token

    def done(self) -> None:
        raise NotImplementedError

    def serve(self, order: Order) -> ServingReport:
        report = ServingReport()
        left = order.messages * SERVERS
        while left:
            step = self.receive()
            left -= len(step)
            views = []
            for request, _, token in step:
                views.append(self.get(token))
                report.requests.append(request)
                report.arrivals.append(now())
            for (_, image, _), view in zip(step, views, strict=True):
                read(image, view)
                report.reads.append(now())
            del step, views, view, token
            self.done()
        return report
