"""A few processes that do step after step as they are asked to, one of them with a system call that fails.

The director forks them from an interpreter that has imported everything and has neither threads nor segments. It alone
knows what is due: it asks one actor for a step, waits for the answer of another, and judges.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import faulthandler
import gc
import importlib
import os
import pickle
import re
import select
import signal
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock import _native
from tests.conftest import ONCE_PER_PROCESS, eventually
from tests.faults.interposer import CORE, Fault, Interposer

PR_SET_PDEATHSIG = 1
PROMPTLY = 1.0  # seconds until something is received, after it was sent: no wake-up is lost for longer
WAIT = 3.0  # seconds: the deadline of everything that waits
HANG = 8.0  # seconds: no step takes as long
SETTLED = 0.1  # seconds, at most, that an actor is given to fall asleep
ATTEMPTS = 4  # of a step with system calls that fail more than once; before the last of them, they no longer do

# The limit that an error with this errno must name, by any of these words.
LIMITS = {
    "EMFILE": "RLIMIT_NOFILE",
    "ENFILE": "fs.file-max",
    ("clone3", "EAGAIN"): "RLIMIT_NPROC|pids.max",
    ("epoll_ctl", "ENOSPC"): "max_user_watches",
    ("mmap", "ENOMEM"): "RLIMIT_AS|max_map_count",
    ("ftruncate", "EFBIG"): "RLIMIT_FSIZE",
    ("fallocate", "EFBIG"): "RLIMIT_FSIZE",
    ("fallocate", "ENOSPC"): "available|left",
}
# By these the kernel says what a file is not: then what is said of it is right.
EVIDENCE = {("fcntl", "EINVAL"), ("openat", "ENOENT")}
# What an error calls the call that failed, where that is not its name.
CALLED = {
    "openat": "open|reading /proc",
    "clone3": "pthread_create|clone3",
    "futex_wait": "futex",
    "futex_wake": "futex",
    "futex_waitv": "futex",
    "fstat": "stat",
}


class Broken(Exception):
    """An invariant does not hold: which, and how that was seen."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant, self.text = invariant, text


class Changed(AssertionError):
    """Bytes are not what they were."""


class Failure(msgspec.Struct):
    """What a step raised."""

    names: list[str]  # of its class, and of those above it
    text: str
    number: int | None
    trace: str

    def __str__(self) -> str:
        return f"{self.names[0]}: {self.text}"


class Reply(msgspec.Struct):
    value: Any
    failure: Failure | None
    fired: int
    blocked: int  # signals
    counts: dict[tuple[str, int], int]  # of calls until now, where they are only counted


class Own:
    """What an actor keeps between its steps."""

    def __init__(self, name: str, interposer: Interposer) -> None:
        self.name = name
        self.interposer = interposer
        self.held: list[Any] = []
        self.is_counting = False
        self.loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this actor has no {name}")


# ── within an actor ──────────────────────────────────────────────────────────────────────────────────────────────────
def serve(talk: socket.socket, name: str, interposer: Interposer) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    interposer.exempt(True)
    own = Own(name, interposer)
    while packet := talk.recv(1 << 20):
        step, arguments = pickle.loads(packet)
        talk.send(pickle.dumps(perform(own, step, arguments)))


def perform(own: Own, step: Callable[..., Any], arguments: tuple[Any, ...]) -> Reply:
    value, failure = None, None
    own.interposer.exempt(False)
    try:
        value = step(own, *arguments)
    except BaseException as error:
        own.interposer.exempt(True)
        names = [cls.__name__ for cls in type(error).__mro__]
        number = getattr(error, "errno", None)
        failure = Failure(names, str(error), number, "".join(traceback.format_exception(error)))
    finally:
        own.interposer.exempt(True)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    counts = own.interposer.counts() if own.is_counting else {}
    return Reply(value, failure, own.interposer.fired(), len(blocked), counts)


def arm(own: Own, fault: Fault | None) -> None:
    own.is_counting = fault is None
    own.interposer.arm(fault)


def stop(own: Own) -> None:
    own.is_counting = False
    own.interposer.stop()


def close_all(own: Own) -> None:
    """Lets go of everything, in no order that a user would think of."""
    own.held.clear()
    for name, thing in list(vars(own).items()):
        if name not in ("name", "interposer", "held", "loop", "is_counting"):
            delattr(own, name)
            if hasattr(thing, "close"):
                thing.close()
            del thing
    gc.collect()


def belongings(own: Own) -> Counter[str]:
    """Descriptors by what they lead to, threads, bytes of segments that are mapped."""
    resources: Counter[str] = Counter()
    gc.collect()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the one that listed them
        if "penstock-faults" not in target and target not in ONCE_PER_PROCESS:
            resources[f"descriptor of {target}"] += 1
    resources["thread"] = len(os.listdir("/proc/self/task"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock" in line:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            resources["mapped byte"] += last - first
    return resources


# ── around the actors ────────────────────────────────────────────────────────────────────────────────────────────────
class Doing:
    """A step that an actor has been asked for. An error that the failing call explains is noted, and the step is tried
    again: it must be possible then."""

    def __init__(self, actor: Actor, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.actor, self.step, self.arguments = actor, step, arguments
        self.reply: Reply | None = None
        self.attempts = 1
        actor.ask(step, arguments)

    def is_done(self) -> bool:
        return self.reply is not None or bool(select.select([self.actor.talk], [], [], 0)[0])

    def settle(self) -> None:
        """Waits until the actor sleeps in this step, or has ended it; not for long: it may be what fails."""
        deadline = time.monotonic() + SETTLED
        while self.reply is None and time.monotonic() < deadline:
            if self.is_done():
                self._hear(HANG, self.step.__name__)
            elif self.actor.is_asleep():
                return
            else:
                time.sleep(0.0005)

    def death(self, what: str = "") -> Any:
        """The result of a step that ends with a death. As long as calls go on failing, a death may be not known; when
        they no longer do, it must be soon."""
        fault = self.actor.stage.fault
        if fault is not None and fault.times > 1 and self.actor.is_victim:
            time.sleep(0.05)
            self.actor.stage.interposer.lift(True)
        return self.result(PROMPTLY, what)

    def result(self, within: float = HANG, what: str = "") -> Any:
        """What the step returned."""
        while self.reply is None:
            self._hear(within, what or self.step.__name__)
        return self.reply.value

    def _hear(self, within: float, what: str) -> None:
        reply = self.actor.answer(within, what)
        if reply.failure is None:
            self.reply = reply
            return
        self.actor.judge(reply, self.step.__name__)
        self.attempts += 1
        if self.attempts > ATTEMPTS:
            raise Broken("error", f"{self.actor.name}: {what} is refused though nothing fails any longer")
        if self.attempts == ATTEMPTS:
            self.actor.stage.interposer.lift(True)
        self.actor.ask(self.step, self.arguments)


class Actor:
    def __init__(self, stage: Stage, name: str, is_victim: bool) -> None:
        self.stage, self.name, self.is_victim = stage, name, is_victim
        self.is_over = False
        self.talk, actor_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for other in [*(actor.talk for actor in stage.actors), self.talk]:
                    other.close()
                serve(actor_side, name, stage.interposer)
            finally:
                os._exit(0)
        actor_side.close()

    # ── steps ──
    def start(self, step: Callable[..., Any], *arguments: Any) -> Doing:
        return Doing(self, step, arguments)

    def do(self, step: Callable[..., Any], *arguments: Any, within: float = HANG) -> Any:
        return self.start(step, *arguments).result(within)

    def ask(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.talk.send(pickle.dumps((step, arguments)))
        except OSError:
            self.has_crashed()

    def answer(self, within: float, what: str) -> Reply:
        began = time.monotonic()
        if not select.select([self.talk], [], [], within)[0]:
            invariant = "wake-up lost" if within < HANG else "hang"
            more = f"; {self.where()}" if within >= HANG else ""
            raise Broken(invariant, f"{self.name}: {what} has not ended after {within:g} s{more}")
        try:
            packet = self.talk.recv(1 << 20)
        except OSError:
            packet = b""
        if not packet:
            self.has_crashed()
        reply: Reply = pickle.loads(packet)
        if self.is_victim:
            self.stage.fired = reply.fired
            for key, count in reply.counts.items():
                ends = self.stage.counts.setdefault(key, [])
                if count not in ends:
                    ends.append(count)
        took = (time.monotonic() - began) * 1000
        failed = f", {reply.fired} calls have failed" if reply.fired else ""
        self.stage.log.append(f"{self.name}.{what} {took:.0f} ms: {reply.failure or 'done'}{failed}")
        if reply.blocked:
            raise Broken(
                "signals blocked", f"{self.name}: {reply.blocked} signals are blocked after {what}: {reply.failure}"
            )
        return reply

    def judge(self, reply: Reply, what: str) -> None:
        """Whether this error may come of the call that fails here."""
        failure, fault = reply.failure, self.stage.fault
        assert failure is not None
        text = f"{self.name}: {what}: {failure}"
        if failure.names[0] == "Changed":
            raise Broken("bytes changed", text)
        if failure.names[0] == "PeerDied" and not any(
            f"pid {actor.pid}" in failure.text for actor in self.stage.dead()
        ):
            raise Broken("living declared dead", text)
        if fault is None or not self.is_victim or not reply.fired:
            raise Broken("error of another", f"{text}\n{failure.trace}")
        if not {"OSError", "MemoryError", "PenstockError"} & set(failure.names):
            raise Broken("error", f"bare {text}\n{failure.trace}")
        if {"PeerDied", "StaleRef", "Missing", "CorruptRecord", "EndOfChannel"} & set(failure.names):
            raise Broken("error", f"says what is not so: {text}")
        if {"Timeout", "WouldBlock"} & set(failure.names):
            raise Broken("wake-up lost", text)
        if (fault.kind, fault.error) in EVIDENCE and "LayoutMismatch" in failure.names:
            return
        reason = os.strerror(getattr(errno, fault.error))
        if reason not in failure.text and fault.error not in failure.text:
            self.stage.remarks.append(f"does not say {fault.error} ({reason}): {text}")
        if fault.caller == CORE:
            self.must_say(CALLED.get(fault.kind, fault.kind), "which call", text, failure)
            for key in (fault.error, (fault.kind, fault.error)):
                if key in LIMITS:
                    self.must_say(LIMITS[key], "which limit", text, failure)
        self.stage.errors.append(text)

    def must_say(self, words: str, what: str, text: str, failure: Failure) -> None:
        if not any(word in failure.text for word in words.split("|")):
            self.stage.remarks.append(f"does not say {what} ({words}): {text}")

    def is_asleep(self) -> bool:
        """In a step, and not because it waits for the next: it sleeps in another system call."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b") ")[2][:1]
            call = Path(f"/proc/{self.pid}/syscall").read_text().split()[0]
        except OSError:
            return False
        return state == b"S" and call not in ("running", self.stage.idle_call)

    # ── ends ──
    def kill(self) -> None:
        self.is_over = True
        os.kill(self.pid, signal.SIGKILL)
        # Not waited for here: how it ended can be read from a zombie only, and from a kernel that still knows.

    def has_crashed(self) -> None:
        self.is_over = True
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        how = (
            f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
            if os.WIFSIGNALED(status)
            else f"status {status >> 8}"
        )
        raise Broken("crash", f"{self.name}: {how}")

    def where(self) -> str:
        """Where it is, for a report."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)
        self.stage.traces.flush()
        return Path(self.stage.traces.name).read_text()[-3000:]

    def close(self) -> None:
        self.talk.close()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


Belongings = dict[int, Counter[str]]  # of each actor, by its number


class Stage:
    """The actors of one case, and what they share."""

    def __init__(
        self, interposer: Interposer, victim: int, fault: Fault | None, usual: Belongings | None = None
    ) -> None:
        self.interposer, self.victim, self.fault = interposer, victim, fault
        interposer.lift(False)
        self.usual = usual  # what each has in the end where nothing fails
        self.actors: list[Actor] = []
        self.log: list[str] = []
        self.errors: list[str] = []  # that were raised for the call that fails
        self.remarks: list[str] = []  # what those do not say
        self.segments: list[int] = []  # descriptors, to look at what is in them
        self.counts: dict[tuple[str, int], list[int]] = {}  # of each kind of call, after each step that made some
        self.fired = 0
        self.idle_call = ""  # the number of the system call in which an actor waits for its next step
        self.left: Belongings = {}
        self.traces = tempfile.NamedTemporaryFile("w", prefix="penstock-faults-")
        faulthandler.register(signal.SIGUSR1, file=self.traces)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            actor.close()
        for fd in self.segments:
            os.close(fd)
        faulthandler.unregister(signal.SIGUSR1)
        self.traces.close()

    def actor(self, name: str) -> Actor:
        is_victim = len(self.actors) == self.victim
        actor = Actor(self, name, is_victim)
        self.actors.append(actor)
        if not self.idle_call:  # the first one: it has nothing to do yet
            eventually(actor.is_asleep)
            self.idle_call = Path(f"/proc/{actor.pid}/syscall").read_text().split()[0]
        if is_victim:
            actor.do(arm, self.fault)
        return actor

    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.is_over]

    def dead(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.is_over]

    # ── what must hold ──
    def look_into(self, actor: Actor, fd: int) -> None:
        """Keeps this segment open, so that what is said in it of the living is seen in the end."""
        self.segments.append(os.open(f"/proc/{actor.pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))

    def snapshots(self) -> list[dict[str, Any]]:
        return [_native.snapshot(os.dup(fd)) for fd in self.segments]

    def must_not_bury_the_living(self) -> None:
        pids = {actor.pid: actor.name for actor in self.living()}
        for snapshot in self.snapshots():
            for peer in snapshot["peers"]:
                if peer["state"] in ("dead", "dying") and peer["pid"] in pids:
                    raise Broken(
                        "living declared dead", f"{pids[peer['pid']]} is {peer['state']} in '{snapshot['name']}'"
                    )

    def must_reap_the_dead(self) -> None:
        pids = {actor.pid: actor.name for actor in self.dead()}

        def remaining() -> list[str]:
            peers = [peer for snapshot in self.snapshots() for peer in snapshot["peers"]]
            return [f"{pids[peer['pid']]} is {peer['state']}" for peer in peers
                    if peer["pid"] in pids and peer["state"] not in ("dead", "left")]  # fmt: skip

        self.eventually_none(remaining, "death unknown")

    def must_be_given_back(self) -> None:
        """All have left or are dead: none of them holds a block, a lock, or a place."""

        def remaining() -> list[str]:
            complaints = []
            for snapshot in self.snapshots():
                name = snapshot["name"]
                complaints += [f"'{name}': peer {peer['name']} is {peer['state']}" for peer in snapshot["peers"]
                          if peer["state"] not in ("left", "dead", "free")]  # fmt: skip
                for pool in snapshot.get("pool", ()):
                    complaints += [f"'{name}': {holder} holds" for holder in pool["holders"]]
                    complaints += [f"'{name}': a lock is held"] * (pool["lock_holder"] >= 0)
            return complaints

        self.eventually_none(remaining, "leak")

    def must_have_no_more(self, actor: Actor) -> None:
        if self.usual is None:
            self.left[self.actors.index(actor)] = actor.do(belongings)
            return
        usual = self.usual.get(self.actors.index(actor), Counter())
        self.eventually_none(
            lambda: [
                f"{actor.name}: {count} x {what} too many" for what, count in (actor.do(belongings) - usual).items()
            ],
            "leak",
        )

    @staticmethod
    def eventually_none(remaining: Callable[[], list[str]], invariant: str) -> None:
        deadline = time.monotonic() + PROMPTLY
        while leftovers := remaining():
            if time.monotonic() > deadline:
                raise Broken(invariant, "; ".join(leftovers))
            time.sleep(0.01)

    def finish(self) -> None:
        """Ends the scene: all leave, and what they leave behind is looked at. Then the victim must see a death."""
        from tests.faults import fault_scenes as scenes

        self.must_not_bury_the_living()
        self.must_reap_the_dead()
        for actor in self.living():
            actor.do(close_all)
        self.must_be_given_back()
        victim = self.actors[self.victim]
        if victim.is_over:
            return
        victim.do(stop)
        for actor in self.living():
            if actor is not victim:
                self.must_have_no_more(actor)
        other = self.actor("witness")
        ticket, _ = victim.do(scenes.open_channel, "ring")
        victim.do(scenes.become_receiver)
        other.do(scenes.attach, ticket)
        other.do(scenes.become_sender)
        other.do(scenes.send, 7, 100)
        victim.do(scenes.receive, 7, within=PROMPTLY)
        waiting = victim.start(scenes.wait_for_death, other.pid)
        time.sleep(0.002)
        other.kill()
        waiting.death("a death")
        victim.do(close_all)
        self.must_have_no_more(victim)


def warm_up() -> None:
    """Imports what actors would import lazily: an import that fails is Python's affair."""
    for name in ("multiprocessing.reduction", "penstock.tensor", "tests.faults.fault_scenes"):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a director has no threads"
    gc.collect()
    gc.freeze()
