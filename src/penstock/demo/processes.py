"""The processes of the demonstration: the core, the workers, the server, and the life that each of them leads.

Leaves to `keeper`: starting them, and starting them again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

import penstock
from penstock import EndOfChannel, MemoryExhausted, PeerDied, PenstockError, StaleRef
from penstock.demo.messages import Done, Hello, Image, Noticed, Step, encode, is_over, received
from penstock.demo.plumbing import Figures, Plumbing

IMAGE_NBYTES = (1 << 20, 8 << 20)
IMAGES_PER_SECOND = 20
HELD = 2  # images that a worker keeps open, so that there is something to give back when it dies
PATIENCE = 10.0  # seconds; whoever does not answer for so long ends the demonstration


class Late(Exception):
    """Somebody neither answers nor dies."""


class Core:
    """Sends a step to all workers, waits for all their answers, and begins again."""

    def __init__(self, plumbing: Plumbing) -> None:
        self.control = plumbing.control.receiver(0, name="core")
        self.submit = plumbing.submit.receiver(name="core")
        self.steps = plumbing.steps.sender(name="core")
        self.answers = plumbing.answers.receiver(name="core")
        self.events = plumbing.events.sender(name="core")
        self.figures = Figures(plumbing.figures, writable=True)
        self.image_decoder = msgspec.msgpack.Decoder(Image)
        self.answer_decoder = msgspec.msgpack.Decoder(Hello | Done)
        self.members: dict[int, int] = {}  # worker -> pid, of those that said hello
        self.waiting: set[int] = set()  # workers that have yet to answer
        self.images: list[Image] = []  # submitted, and not yet sent on
        self.number = 0
        self.noticed: set[int] = set()

    def run(self, rate: int) -> None:
        pace = Pace(rate)
        while not is_over(self.control):
            if not self.members:
                self.take_answer(0.1)
                continue
            self.take_images()
            self.step()
            pace.wait()
        for end in (self.steps, self.submit, self.answers, self.events):
            end.close()

    def take_images(self) -> None:
        try:
            while (record := received(self.submit)) is not None:
                self.images.append(self.image_decoder.decode(record))
        except PeerDied as error:  # and again, until another server has come
            self.notice(error)
        except EndOfChannel:
            pass

    def step(self) -> None:
        began = time.monotonic_ns()
        self.number += 1
        record = encode(Step(self.number, self.images))
        while True:
            self.waiting = set(self.members)
            if not self.waiting:
                return
            try:
                self.steps.send(record, timeout=PATIENCE)
                break
            except PeerDied as error:  # told once for each; the others are still there
                self.notice(error)
        self.images = []
        while self.waiting:
            self.take_answer(PATIENCE)
        self.figures.add_round_trip(time.monotonic_ns() - began)

    def take_answer(self, timeout: float) -> None:
        """Raises Late, and only while somebody is waited for."""
        try:
            answer = self.answer_decoder.decode(self.answers.receive(timeout))
        except PeerDied as error:
            return self.notice(error)
        except EndOfChannel:  # all of them are gone, for the moment
            return time.sleep(0.02)
        except penstock.Timeout:
            if not self.waiting:
                return None
            late = " and ".join(f"worker {one} (pid {self.members[one]})" for one in sorted(self.waiting))
            raise Late(f"no answer to step {self.number} from {late} within {timeout:g} s") from None
        if isinstance(answer, Hello):
            self.members[answer.worker] = answer.pid
            return None
        self.figures.add(answer)
        if answer.step == self.number:
            self.waiting.discard(answer.worker)
        return None

    def notice(self, error: PeerDied) -> None:
        """Both channels tell of one death; who died is no longer waited for."""
        for worker in [worker for worker, pid in self.members.items() if pid == error.pid]:
            del self.members[worker]
            self.waiting.discard(worker)
        if error.pid not in self.noticed:
            self.noticed.add(error.pid)
            with contextlib.suppress(PenstockError):
                self.events.send_nowait(encode(Noticed(error.pid, error.how, time.monotonic_ns())))


def run_core(plumbing: Plumbing, rate: int) -> None:
    Core(plumbing).run(rate)


def run_worker(plumbing: Plumbing, index: int) -> None:
    name = f"worker {index}"
    steps = plumbing.steps.receiver(index, name=name)  # first: what follows an image that we are granted reaches us
    answers = plumbing.answers.sender(index, name=name)
    plumbing.images.join(name)
    decoder = msgspec.msgpack.Decoder(Step)
    answers.send(encode(Hello(index, os.getpid())), timeout=PATIENCE)
    held: deque[npt.NDArray[np.uint64]] = deque(maxlen=HELD)
    while True:
        try:
            step = decoder.decode(steps.receive())
        except EndOfChannel:
            return
        right = wrong = gone = nbytes = 0
        for image in step.images:
            try:
                pixels = words_of(plumbing.images.open(image.ref))
            except StaleRef:  # it was sent before we came, for the one whose place we took
                gone += 1
                continue
            is_right = int(pixels.sum()) == image.checksum
            right, wrong, nbytes = right + is_right, wrong + (not is_right), nbytes + pixels.nbytes
            held.append(pixels)
        with contextlib.suppress(EndOfChannel):
            answers.send(encode(Done(index, step.number, right, wrong, gone, nbytes)), timeout=PATIENCE)


def run_server(plumbing: Plumbing) -> None:
    control = plumbing.control.receiver(1, name="server")
    submit = plumbing.submit.sender(name="server")
    pool = plumbing.images
    pool.join("server")
    pace = Pace(IMAGES_PER_SECOND)
    chance = random.Random()
    while not is_over(control):
        pace.wait()
        workers = [one for one in pool.peers() if one.name.startswith("worker") and one.state in ("live", "stopped")]
        if not workers:
            continue
        nbytes = chance.randrange(*IMAGE_NBYTES) // 8 * 8
        try:
            lease = pool.take(nbytes, timeout=0.5)
        except MemoryExhausted:  # counted in the pool, and shown
            continue
        pixels = words_of(lease)
        pixels[:] = chance.getrandbits(64)
        pixels[:1024] = np.arange(1024, dtype=np.uint64)
        image = Image(pool.share(lease), int(pixels.sum()))
        for peer in workers:
            with contextlib.suppress(PeerDied):
                pool.grant(image.ref, peer)
        del pixels, lease  # the grants keep the block
        try:
            submit.send(encode(image), timeout=PATIENCE)
        except EndOfChannel:
            return


def words_of(lease: penstock.Lease) -> npt.NDArray[np.uint64]:
    """The leased bytes where they lie; the array keeps the lease."""
    return np.frombuffer(cast("Any", lease), np.uint64)


class Pace:
    """So many turns per second, without making up for turns that were missed; 0: no pace."""

    def __init__(self, rate: int) -> None:
        self.interval = 1 / rate if rate > 0 else 0.0
        self.next = time.monotonic()

    def wait(self) -> None:
        now = time.monotonic()
        self.next = max(self.next + self.interval, now - self.interval)
        if self.next > now:
            time.sleep(self.next - now)


def live(run: Callable[..., None], last_words: Connection, arguments: tuple[Any, ...]) -> None:
    """The whole life of a process: does its work, ends with its parent, and says why if it ends otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes `control`
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a process that multiprocessing has started"
    sentinel = parent.sentinel

    def follow_parent() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    try:
        run(*arguments)
    except Exception as error:
        last_words.send_bytes(f"{type(error).__name__}: {error}".encode()[:4096])
        sys.exit(1)
