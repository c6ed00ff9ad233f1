"""Who keeps the processes running: starts them, kills a worker now and then, and starts again whoever has ended.

Leaves to `processes` what these do, to `view` how it is shown.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from penstock import EndOfChannel, PeerDied
from penstock.demo.messages import Noticed, received
from penstock.demo.plumbing import Figures, Plumbing
from penstock.demo.processes import live, run_core, run_server, run_worker
from penstock.demo.sight import Sight
from penstock.tools.inspect import counted, in_seconds, in_units

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
        pids = {child.name: child.pid for child in self.children.values()}
        sight = Sight.take(self.plumbing, self.figures, pids, self.elapsed, self.last_sight)
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
