"""Other processes for unit tests: short programs that share nothing with us but what they are told, line by line."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import PeerDied
from penstock.lowlevel import Peer
from tests.conftest import eventually

PROMISED = 0.1  # seconds: what the package promises about deaths, closing and interrupts

# For a program that is to die of a bad access: under a sanitizer it would report that, and then abort.
DYING = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":handle_segv=0:handle_abort=0"}
IS_SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

# What every program begins with. say() and hear() are its only words with us.
PRELUDE = """
import contextlib, os, resource, signal, sys, threading, time
import penstock
from penstock import lowlevel

def say(*words):
    print(*words, flush=True)

def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit(77)  # our parent is gone, or has had enough of us
    return line.strip()

def wait_for(condition):
    while not condition():
        time.sleep(0.001)
"""


def state_of(pid: int) -> str:
    """As the kernel has it: R runs, S sleeps, T is stopped, Z has ended; empty if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


class Program:
    """A process that says lines and hears lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def hear(self) -> str:
        """The next line that it says. Fails, with its last words, when it ends without saying one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            assert self.process.stderr is not None
            raise AssertionError(f"the program ended (status {status}) saying:\n{self.process.stderr.read()}")
        return line.strip()

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def kill(self, number: int = 9) -> float:
        """Sends a signal, and says when."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def is_stopped(self) -> bool:
        return state_of(self.pid) == "T"

    def end(self) -> int:
        """Lets it end by itself, and returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()

    def errors(self) -> str:
        """What it wrote to stderr; to be asked when it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextlib.contextmanager
def program(source: str, *arguments: object, within: float = 30.0, **options: Any) -> Iterator[Program]:
    """Runs PRELUDE + source, with arguments in sys.argv[1:], in a process that a stranger might have started."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(source), *map(str, arguments)]
    with running(command, within, **options) as started:
        yield started


@contextlib.contextmanager
def running(command: list[str], within: float = 30.0, **options: Any) -> Iterator[Program]:
    """Runs a command, and kills it when the block ends, or when it takes longer than so many seconds."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)
    watchdog = threading.Timer(within, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield Program(process)
    finally:
        watchdog.cancel()
        watchdog.join()
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


def unshared(*command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs unshare(1) with these arguments. Skips the test where no namespace can be made."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare(1)")
    ended = subprocess.run(["unshare", *command], capture_output=True, text=True, timeout=30, **options)
    if "unshare:" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"no namespace to be had here: {ended.stderr.strip()}")
    return ended


@contextlib.contextmanager
def thread(target: Callable[[], object], within: float = 20.0) -> Iterator["Result"]:
    """Runs target in a thread, and awaits the thread at the end of the block."""
    result = Result(target)
    result.start()
    try:
        yield result
    finally:
        result.join(within)
    assert not result.is_alive(), f"a thread was still running {within:g} s after the test had ended"


@contextlib.contextmanager
def threads(*targets: Callable[[], object], within: float = 20.0) -> Iterator[list["Result"]]:
    """Runs each target in a thread of its own, awaits them at the end of the block, and raises the first error."""
    with contextlib.ExitStack() as stack:
        results = [stack.enter_context(thread(target, within)) for target in targets]
        yield results
    for result in results:
        if result.error is not None:
            raise result.error


class Result(threading.Thread):
    """A thread, and what came of it."""

    def __init__(self, target: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = target
        self.value: object = None
        self.error: BaseException | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        try:
            self.value = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()
            del self._work

    def ended(self, within: float = 20.0) -> "Result":
        self.join(within)
        assert not self.is_alive(), f"still running after {within:g} s"
        return self


def forked(work: Callable[[], object], within: float = 20.0) -> int:
    """Runs work in a child of fork(), and returns the child's exit status: 0 when work returned, 1 when it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: we have threads, and know it
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    # Without a thread: while a thread ends, it holds locks of AddressSanitizer, and the next child would inherit them.
    pidfd = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        has_ended = bool(poll.poll(within * 1000))
    finally:
        os.close(pidfd)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert has_ended, f"the child still ran after {within:g} s"
    return os.waitstatus_to_exitcode(status)


def assert_how(error: PeerDied, how: str, peers: Callable[[], Sequence[Peer]], of_end: str = "") -> None:
    """The error, or the table of peers once the kernel has ended the process, names how the peer died. `of_end`: in the
    error, if that says more.

    A death is reported 50 ms after the kernel began it, whether it is done or not.
    """
    if error.how != "the kernel is still ending it":
        assert error.how == (of_end or how)
    eventually(lambda: [peer.how for peer in peers() if peer.pid == error.pid] == [how])


def soon(measure: Callable[[], float], promised: float = PROMISED, tries: int = 5, within: float = 30) -> None:
    """One of at least so many measurements keeps the promise: a busy machine can only make them longer, for seconds."""
    measured = []
    give_up_at = time.monotonic() + within
    while len(measured) < tries or time.monotonic() < give_up_at:
        measured.append(measure())
        if measured[-1] < promised:
            return
    raise AssertionError(f"none was below {promised} s: {', '.join(f'{seconds:.3f}' for seconds in measured)}")
