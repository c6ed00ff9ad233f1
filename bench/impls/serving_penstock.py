"""Ours: images in a store that servers and workers share; keys by an inbox to the core, by a broadcast to the workers.

The core has no store: it could not touch an image if it wanted to.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import penstock
from bench.harness.phases import Order, Report
from bench.impls import Meet, Seat, Wires, serving
from bench.impls.serving import SERVERS, WORKERS, Images, ServingReport

TIMEOUT = 60.0
ROOM = 2.5  # times all images


class Request(msgspec.Struct, array_like=True, frozen=True):
    request: int
    server: int
    images: tuple[int, ...]  # which, so that a worker can see whether it is the right one
    keys: tuple[bytes, ...]


class Step(msgspec.Struct, array_like=True, frozen=True):
    requests: tuple[Request, ...]


class Done(msgspec.Struct, array_like=True, frozen=True):
    step: int


class Answer(msgspec.Struct, array_like=True, frozen=True):
    request: int


def check() -> None:
    """What it needs is ours."""


def lay(receivers: int, scratch: Path, largest: str, images: str) -> Wires:
    about = Images(int(images), int(largest))
    store = penstock.Store(int(ROOM * sum(about.sizes)), name="images")
    requests = penstock.Inbox(Request, senders=SERVERS, name="requests")
    steps = penstock.Broadcast(Step, receivers=WORKERS, name="steps")
    done = penstock.Inbox(Done, senders=WORKERS, name="done")
    answers = [penstock.Ring(Answer, name="answers") for _ in range(SERVERS)]
    core = (requests, steps, done, answers)
    servers = [(store, requests, answers[index], index, int(images), int(largest)) for index in range(SERVERS)]
    return Wires([core, *servers, *((store, steps, done, index) for index in range(WORKERS))])


def request_nbytes() -> int:
    """Of the frame of a request with one image."""
    from penstock.codec.catalogue import Catalogue
    from penstock.codec.frame import FrameEncoder

    encoded: Any = FrameEncoder(Catalogue(Request)).encode(Request(4_000_123, 3, (99,), (content_key(1, 4, 123),)))
    return sum(map(len, encoded)) if isinstance(encoded, list) else len(encoded)


def content_key(kind: int, rank: int, number: int) -> bytes:
    return bytes([kind, rank]) + number.to_bytes(30, "little")


class Touched:
    """How many bytes of shared memory this process touches meanwhile, by the processor's own account."""

    def __enter__(self) -> Touched:
        Path("/proc/self/clear_refs").write_text("1")
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = 0
        is_shared = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-", line):
                is_shared = "memfd:" in line
            elif is_shared and line.startswith("Referenced:"):
                self.nbytes += int(line.split()[1]) << 10


class Server(serving.Server):
    def __init__(self, wire: tuple[Any, ...], rank: int) -> None:
        self._store, requests, answers, self._index, images, largest = wire
        super().__init__(rank, Images(images, largest))
        self._sender = requests.open_sender(self._index)
        self._answers = answers.open_receiver()
        self._store.pool.join()
        self._held: Any = None

    def fill(self, order: Order) -> Report:
        if self._index == 0:
            for image in range(len(self.images.sizes)):
                self._store.put({"pixels": self.images[image]}, key=content_key(0, 0, image))
        return Report()

    def ask(self, request: int, image: int, is_kept: bool) -> bool:
        key = content_key(0, 0, image) if is_kept else content_key(1, self.rank, request)
        try:
            self._held = self._store.get(key)  # held until the answer is here
            is_hit = True
        except penstock.Missing:
            self._held = self._store.put({"pixels": self.images[image]}, key=key)
            is_hit = False
        self._sender.send(Request(request, self._index, (image,), (key,)), timeout=TIMEOUT)
        return is_hit

    def wait(self) -> None:
        self._answers.receive(timeout=TIMEOUT)
        self._held = None

    def serve(self, order: Order) -> ServingReport:
        with Touched() as touched:
            report = super().serve(order)
        report.touched_nbytes = touched.nbytes
        return report


class Core(serving.Core):
    def __init__(self, wire: tuple[Any, ...]) -> None:
        requests, steps, done, answers = wire
        self._requests = requests.open_receiver()
        self._steps = steps.open_sender()
        self._done = done.open_receiver()
        self._answers = [each.open_sender() for each in answers]

    def take(self) -> list[Any]:
        taken = [self._requests.receive(timeout=TIMEOUT)]
        with suppress(penstock.WouldBlock):
            while True:
                taken.append(self._requests.receive_nowait())
        return taken

    def step(self, requests: list[Any]) -> None:
        self._steps.send(Step(tuple(requests)), timeout=TIMEOUT)
        for _ in range(WORKERS):
            self._done.receive(timeout=TIMEOUT)

    def answer(self, request: Any) -> None:
        self._answers[request.server].send(Answer(request.request), timeout=TIMEOUT)

    def serve(self, order: Order) -> ServingReport:
        with Touched() as touched:
            report = super().serve(order)
        report.touched_nbytes = touched.nbytes
        return report


class Worker(serving.Worker):
    def __init__(self, wire: tuple[Any, ...]) -> None:
        self._store, steps, done, index = wire
        self._steps = steps.open_receiver(index)
        self._sender = done.open_sender(index)
        self._store.pool.join()

    def receive(self) -> list[tuple[int, int, Any]]:
        step = self._steps.receive(timeout=TIMEOUT)
        return [(each.request, image, key) for each in step.requests for image, key in zip(each.images, each.keys)]

    def get(self, token: Any) -> Any:
        return self._store.get(token).value()["pixels"]

    def done(self) -> None:
        self._sender.send(Done(0), timeout=TIMEOUT)


def Sender(wire: tuple[Any, ...], seat: Seat, meet: Meet) -> Core:
    return Core(wire)


def Receiver(wire: tuple[Any, ...], seat: Seat, meet: Meet) -> Server | Worker:
    return Server(wire, seat.rank) if seat.rank <= SERVERS else Worker(wire)
