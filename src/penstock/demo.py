"""A demonstration: a core, some workers and a server exchange messages and images, and now and then one is killed.

    server ──ring 'submit': Image──► core ──broadcast 'steps': Step──► worker i
       │                              ▲ └───ring 'events': Noticed──► this process, which starts all of them, and shows
       │                              └────inbox 'answers': Hello, Done───┘              what the segments tell
       └──pool 'images': the bytes lie here once; workers open them by the Ref in the message

Leaves to `inspect`: how numbers are written. Nothing here is needed by anything else.
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
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

import penstock
from penstock import EndOfChannel, MemoryExhausted, PeerDied, PenstockError, Ref, StaleRef, _native
from penstock.inspect import Json, counted, in_seconds, in_units

POOL_NBYTES = 96 << 20
IMAGE_NBYTES = (1 << 20, 8 << 20)
IMAGES_PER_SECOND = 20
HELD = 2  # images that a worker keeps open, so that there is something to give back when it dies
PATIENCE = 10.0  # seconds; whoever does not answer for so long ends the demonstration
MOST_UNTIL_BEGUN = 60.0  # seconds
QUICK = 1.0  # seconds; a process that ends so soon after its start …
MOST_QUICK_ENDS = 3  # … so often in a row is not started again
CHAOS = (8.0, 12.0)  # seconds between two kills


@dataclass(frozen=True)
class Options:
    seconds: float | None
    workers: int
    rate: int  # steps per second; 0: as many as go
    is_plain: bool
    has_chaos: bool


# ── messages, in the order in which they are met ─────────────────────────────────────────────────────────────────────
class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A worker has attached everywhere: from now on it is asked."""

    worker: int
    pid: int


class Image(msgspec.Struct, frozen=True, array_like=True):
    """From the server to the core, and on to the workers: where the bytes lie, never the bytes."""

    ref: Ref
    checksum: int


class Step(msgspec.Struct, frozen=True, array_like=True):
    number: int
    images: list[Image]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a worker found: images whose bytes are what the server said, that are not, and that were gone."""

    worker: int
    step: int
    right: int
    wrong: int
    gone: int
    nbytes: int


class Noticed(msgspec.Struct, frozen=True, array_like=True):
    """The core was told of a death."""

    pid: int
    how: str
    at_ns: int


encode = msgspec.msgpack.Encoder().encode


def received(end: penstock.Receiver) -> bytes | None:
    """The next record, if there is one now."""
    record = end.try_receive()
    return record if isinstance(record, bytes) else None


def is_over(control: penstock.Receiver) -> bool:
    try:
        control.try_receive()
    except (EndOfChannel, PeerDied):
        return True
    return False


def words_of(lease: penstock.Lease) -> npt.NDArray[np.uint64]:
    """The leased bytes where they lie; the array keeps the lease."""
    return np.frombuffer(cast("Any", lease), np.uint64)


# ── what they share ──────────────────────────────────────────────────────────────────────────────────────────────────
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


# ── the processes ────────────────────────────────────────────────────────────────────────────────────────────────────
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


# ── starting them, and starting them again ───────────────────────────────────────────────────────────────────────────
class Ended(Exception):
    """The demonstration cannot go on; the text says who ended, and how."""


@dataclass
class Child:
    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    process: SpawnProcess
    last_words: Connection
    started: float = field(default_factory=time.monotonic)
    quick_ends: int = 0

    @classmethod
    def start(cls, name: str, run: Callable[..., None], *arguments: Any) -> Child:
        spawn = multiprocessing.get_context("spawn")
        words_in, words_out = spawn.Pipe(duplex=False)
        process = spawn.Process(target=live, args=(run, words_out, arguments), name=name, daemon=True)
        # A Ctrl-C reaches everybody in this terminal; a child is deaf to it from its first instruction on. The tracker
        # first: starting it takes the mask off again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        words_out.close()
        return cls(name, run, arguments, process, words_in)

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def bury(self) -> str:
        """Of a process that has ended: how, in words."""
        self.process.join()
        code = self.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        with contextlib.suppress(EOFError, OSError):
            if self.last_words.poll():
                how = self.last_words.recv_bytes().decode(errors="replace")
        self.last_words.close()
        self.process.close()
        return how


@dataclass
class Casualty:
    """A worker that died, and what followed."""

    name: str
    worker: int
    pid: int
    killed_ns: int  # 0: not by us
    how: str = ""
    noticed_ns: int = 0
    given_back: str = ""
    successor: int = 0
    epoch: int = 0
    attached_ns: int = 0

    def __str__(self) -> str:
        began = self.killed_ns or self.noticed_ns
        text = f"{self.name} (pid {self.pid}) {'was killed' if self.killed_ns else 'ended unexpectedly: ' + self.how}"
        if self.noticed_ns and self.killed_ns:
            text += f", the core was told after {in_seconds(max(self.noticed_ns - self.killed_ns, 0))} ({self.how})"
        if self.given_back:
            text += f", {self.given_back} given back"
        if self.attached_ns:
            after = in_seconds(max(self.attached_ns - began, 0))
            text += f"; pid {self.successor} took its place under epoch {self.epoch} after {after}"
        return text

    @property
    def is_over(self) -> bool:
        return bool(self.attached_ns)


class Demo:
    """Keeps the processes running, kills one now and then, and gathers what there is to show."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plumbing = Plumbing.lay(options.workers)
        self.figures = Figures(self.plumbing.figures)
        self.control = self.plumbing.control.sender(name="demo")
        self.events = self.plumbing.events.receiver(name="demo")
        self.event_decoder = msgspec.msgpack.Decoder(Noticed)
        self.children: dict[str, Child] = {}
        self.casualties: list[Casualty] = []
        self.messages: deque[str] = deque(maxlen=6)
        self.launched = time.monotonic()
        self.began: float | None = None  # when the first step was seen
        self.next_kill = 0.0
        self.last_sight: Sight | None = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began if self.began is not None else 0.0

    def start(self) -> None:
        self.launch("core", run_core, self.plumbing, self.options.rate)
        for index in range(self.options.workers):
            self.launch(f"worker {index}", run_worker, self.plumbing, index)
        self.launch("server", run_server, self.plumbing)

    def launch(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        self.children[name] = Child.start(name, run, *arguments)

    def turn(self, timeout: float) -> None:
        """Until something happened, or for so many seconds. Raises Ended."""
        sentinels = {child.process.sentinel: child for child in self.children.values()}
        for sentinel in wait(list(sentinels), timeout):
            self.replace(sentinels[sentinel])  # type: ignore[index]  # what comes back is what went in
        self.take_events()
        now = time.monotonic()
        if self.began is None:
            if self.figures[Figures.STEPS] > 0:
                self.began, self.next_kill = now, now + CHAOS[0] / 2 + random.random()
            elif now - self.launched > MOST_UNTIL_BEGUN:
                raise Ended(f"the processes have not found together within {MOST_UNTIL_BEGUN:g} s")
        elif self.options.has_chaos and now >= self.next_kill:
            self.kill_somebody()

    def kill_somebody(self) -> None:
        if any(not one.is_over for one in self.casualties):
            return  # one at a time
        self.next_kill = time.monotonic() + random.uniform(*CHAOS)
        index = random.randrange(self.options.workers)
        child = self.children[f"worker {index}"]
        self.casualties.append(Casualty(child.name, index, child.pid, time.monotonic_ns()))
        os.kill(child.pid, signal.SIGKILL)

    def replace(self, child: Child) -> None:
        pid, lived = child.pid, time.monotonic() - child.started
        how = child.bury()
        del self.children[child.name]
        known = next((one for one in self.casualties if one.pid == pid), None)
        if child.name == "core":
            raise Ended(f"core (pid {pid}) ended: {how}")
        quick_ends = child.quick_ends + 1 if lived < QUICK and known is None else 0
        if quick_ends >= MOST_QUICK_ENDS:
            raise Ended(f"{child.name} ended {quick_ends} times right after its start, the last time: {how}")
        self.launch(child.name, child.run, *child.arguments)
        self.children[child.name].quick_ends = quick_ends
        if known is None and child.name.startswith("worker"):
            known = Casualty(child.name, child.arguments[1], pid, 0, how, time.monotonic_ns())
            self.casualties.append(known)
        if known is None:
            self.messages.append(f"{child.name} (pid {pid}) ended unexpectedly: {how}; started again")
        else:
            known.successor = self.children[child.name].pid

    def take_events(self) -> None:
        try:
            while (record := received(self.events)) is not None:
                noticed = self.event_decoder.decode(record)
                for one in self.casualties:
                    if one.pid == noticed.pid and one.killed_ns:
                        one.noticed_ns, one.how = noticed.at_ns, noticed.how
        except (EndOfChannel, PeerDied):
            pass  # the core is gone, and its sentinel says so next

    def look(self) -> Sight:
        sight = Sight.take(self)
        receivers = sight.channels["steps"]["receivers"]
        joined = {peer["index"]: peer["joined_ns"] for peer in sight.channels["steps"]["peers"]}
        for one in self.casualties:
            if one.is_over:
                continue
            for peer in sight.pool["peers"]:
                if peer["pid"] == one.pid and peer["state"] == "dead":
                    one.given_back = f"{counted(peer['reaped_blocks'], 'block')} ({in_units(peer['reaped_nbytes'])})"
            end = receivers[one.worker]
            if one.successor and end["state"] == "live" and end["pid"] == one.successor:
                one.epoch, one.attached_ns = end["epoch"], joined.get(end["peer"], time.monotonic_ns())
                self.messages.append(str(one))
        self.last_sight = sight
        return sight

    def stop(self) -> list[str]:
        """Ends all, gently at first. Returns who had to be killed."""
        self.control.close()
        deadline = time.monotonic() + 3
        while self.children and (left := deadline - time.monotonic()) > 0:
            gone = wait([child.process.sentinel for child in self.children.values()], left)
            for name in [name for name, child in self.children.items() if child.process.sentinel in gone]:
                self.children.pop(name).bury()
        late = list(self.children)
        for child in self.children.values():
            child.process.kill()
            child.bury()
        self.children.clear()
        self.events.close()
        return late


# ── seeing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Sight:
    """Everything the segments told at one moment, and what became of it since the sight before."""

    at: float
    elapsed: float
    channels: dict[str, Json]
    pool: Json
    pids: dict[str, int]
    counts: dict[str, int]
    round_trips: tuple[float, float]
    before: Sight | None

    @classmethod
    def take(cls, demo: Demo) -> Sight:
        figures = demo.figures
        channels = {channel.name: channel.snapshot() for channel in demo.plumbing.channels}
        pool = dict(_native.snapshot(os.dup(demo.plumbing.images.fd)))
        counts = {
            "steps": figures[Figures.STEPS],
            "right": figures[Figures.RIGHT],
            "wrong": figures[Figures.WRONG],
            "gone": figures[Figures.GONE],
            "read": figures[Figures.NBYTES_READ],
            "written": pool["pool"][0]["taken_nbytes_total"],
            "images": pool["pool"][0]["takes"],
            "messages": sum(end["records"] for one in channels.values() for end in one["receivers"]),
        }
        for name, channel in channels.items():
            counts[f"{name} records"] = sum(end["records"] for end in channel["senders"])
            counts[f"{name} nbytes"] = sum(end["nbytes"] for end in channel["senders"])
            counts[f"{name} parks"] = sum(end["parks"] for end in channel["senders"] + channel["receivers"])
        pids = {child.name: child.pid for child in demo.children.values()}
        before = demo.last_sight
        if before is not None:
            before.before = None  # one is enough
        return cls(
            time.monotonic(), demo.elapsed, channels, pool, pids, counts, figures.round_trips(), before
        )  # fmt: skip

    def rate(self, name: str) -> float:
        if self.before is None:
            return 0.0
        return max(self.counts[name] - self.before.counts[name], 0) / max(self.at - self.before.at, 1e-3)

    def longest_wait(self, channel: str, role: str) -> str:
        return in_seconds(max((end["longest_wait_ns"] for end in self.channels[channel][role]), default=0))

    def state(self, pid: int) -> str:
        states = [peer["state"] for one in self.channels.values() for peer in one["peers"] if peer["pid"] == pid]
        return states[0] if states else "starting"

    def holds(self, pid: int) -> int:
        indices = {peer["index"] for peer in self.pool["peers"] if peer["pid"] == pid}
        return sum(one["nbytes"] for one in self.pool["pool"][0]["holders"] if one["peer"] in indices)

    @property
    def pool_text(self) -> str:
        pool = self.pool["pool"][0]
        return f"{in_units(pool['taken_nbytes'])} of {in_units(pool['nbytes'])} in {pool['blocks']} blocks"

    @property
    def line(self) -> str:
        p50, p99 = self.round_trips
        if self.counts["steps"] == 0:
            return f"{self.elapsed:6.1f} s  starting {len(self.pids)} processes"
        return (
            f"{self.elapsed:6.1f} s  {self.rate('steps'):.0f} steps/s  {self.rate('messages'):.0f} messages/s  "
            f"round trip p50 {in_seconds(p50)} p99 {in_seconds(p99)}  images {self.rate('images'):.0f}/s, "
            f"{self.rate('written') / 1e6:.0f} MB/s written, {self.rate('read') / 1e6:.0f} MB/s read  "
            f"pool {self.pool_text}  longest wait for a step {self.longest_wait('steps', 'receivers')}"
        )


def summary(demo: Demo) -> str:
    sight = demo.look()
    counts = sight.counts
    wrong = f"{counts['wrong']} WRONG" if counts["wrong"] else "none wrong"
    text = (
        f"{sight.elapsed:.1f} s: {counts['steps']} steps, {counts['images']} images ({in_units(counts['written'])}) "
        f"checked {counts['right']} times without a copy ({in_units(counts['read'])}), {wrong}"
    )
    noticed = [one.noticed_ns - one.killed_ns for one in demo.casualties if one.killed_ns and one.noticed_ns]
    if noticed:
        text += f"; {len(noticed)} killed, each noticed within {in_seconds(max(noticed))}"
    return text


def show_plain(demo: Demo) -> Generator[None, None, None]:
    """A line per second."""
    next_line = 0.0
    while True:
        sight = demo.look()
        while demo.messages:
            print(f"{sight.elapsed:6.1f} s  ! {demo.messages.popleft()}", flush=True)
        if sight.at >= next_line:
            print(sight.line, flush=True)
            next_line = max(next_line, sight.at - 1) + 1
        else:
            demo.last_sight = sight.before  # the next line is about a whole second
        yield


def show_live(demo: Demo) -> Generator[None, None, None]:
    """Tables that are drawn anew four times a second, and describe the last second."""
    from rich.live import Live

    history: deque[Sight] = deque(maxlen=4)
    with Live(auto_refresh=False) as screen:
        while True:
            if len(history) == history.maxlen:
                demo.last_sight = history[0]
            sight = demo.look()
            history.append(sight)
            screen.update(drawn(sight, list(demo.messages)), refresh=True)
            yield


def drawn(sight: Sight, messages: list[str]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    channels = Table(box=box.SIMPLE)
    for column in ("channel", "records/s", "MB/s", "sleeps/s", "furthest behind", "longest wait: send", "receive"):
        channels.add_column(column, justify="left" if column == "channel" else "right")
    for name in ("submit", "steps", "answers"):
        channel = sight.channels[name]
        channels.add_row(
            f"{channel['kind']} '{name}'",
            f"{sight.rate(name + ' records'):.0f}",
            f"{sight.rate(name + ' nbytes') / 1e6:.2f}",
            f"{sight.rate(name + ' parks'):.0f}",
            in_units(max(end["furthest_behind_nbytes"] for end in channel["receivers"])),
            sight.longest_wait(name, "senders"),
            sight.longest_wait(name, "receivers"),
        )
    people = Table(box=box.SIMPLE)
    for column in ("process", "pid", "state", "epoch", "holds of the pool"):
        people.add_column(column, justify="left" if column in ("process", "state") else "right")
    epochs = {end["pid"]: end["epoch"] for end in sight.channels["steps"]["receivers"] if end["state"] == "live"}
    for name, pid in sorted(sight.pids.items()):
        epoch = str(epochs.get(pid, ""))
        people.add_row(name, str(pid), sight.state(pid), epoch, in_units(sight.holds(pid)))
    p50, p99 = sight.round_trips
    lines = [
        f"{sight.elapsed:.0f} s   {sight.rate('steps'):.0f} steps/s   {sight.rate('messages'):.0f} messages/s   "
        f"round trip p50 {in_seconds(p50)}, p99 {in_seconds(p99)}",
        f"{sight.rate('images'):.0f} images/s   {sight.rate('written') / 1e6:.0f} MB/s written, "
        f"{sight.rate('read') / 1e6:.0f} MB/s read where they lie   {sight.counts['right']} checksums right, "
        f"{sight.counts['wrong']} wrong",
        f"pool 'images': {sight.pool_text}",
    ]
    events = [Text(f"! {message}", style="yellow") for message in messages]
    return Group(*map(Text, lines), channels, people, *events)


def run(options: Options) -> int:
    """Runs until Ctrl-C, or for so many seconds. 0: all went well."""
    show = show_plain if options.is_plain or not sys.stdout.isatty() else show_live
    if show is show_live:
        try:
            import rich.live  # noqa: F401
        except ImportError:
            show = show_plain
    status = 0
    reason = ""
    demo = Demo(options)
    try:
        demo.start()
        with contextlib.closing(show(demo)) as shown:
            while options.seconds is None or demo.elapsed < options.seconds:
                demo.turn(0.25)
                next(shown)
    except KeyboardInterrupt:
        pass
    except Ended as error:
        status, reason = 1, str(error)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the tidying up
        late = demo.stop()
        signal.signal(signal.SIGINT, before)
    if late and not status:
        status, reason = 1, f"{', '.join(late)} did not end within 3 s and had to be killed"
    if demo.figures[Figures.WRONG] > 0:
        status, reason = 1, reason or "some images were not what was sent"
    print(summary(demo))
    if reason:
        print(f"penstock demo: {reason}", file=sys.stderr)
    return status
