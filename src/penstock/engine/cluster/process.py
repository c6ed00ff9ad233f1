"""One process of the tree: how it is started, how it lives, and how it is told that it ended.

Leaves to `launcher` who is started, and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple, NoReturn

from penstock import PeerDied
from penstock.engine.cluster import logs
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.topology import Cluster, ProcessId

PR_SET_PDEATHSIG = 1
ASKED_TO_END = {signal.SIGINT, signal.SIGTERM}
WORDS_NBYTES = 4096
CANNOT_START = 2  # exit status: another attempt would meet the same
# Of files, options, packages and memory; and torch's, which is no MemoryError, and nothing here imports torch.
LASTING = (
    *(ValueError, TypeError, ImportError, NotImplementedError, MemoryError),
    *(FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError),
)
OUT_OF_MEMORY = "OutOfMemoryError"


class CannotStart(Exception):
    """What a process needs in order to serve is not there, and will not be at the next attempt."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around what a process does before it serves. Raises CannotStart for errors that another attempt would meet."""
    try:
        yield
    except Exception as error:
        if isinstance(error, LASTING) or type(error).__name__ == OUT_OF_MEMORY:
            raise CannotStart(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        raise


class ProcessEnd(NamedTuple):
    """Of a process."""

    how: str
    is_lasting: bool = False  # it could not start, and cannot at the next attempt


@dataclass
class ChildProcess:
    member: ProcessId
    pid: int
    pidfd: int
    _process: SpawnProcess
    _last_words: Connection
    _end_of_patience: asyncio.TimerHandle | None = None  # it is stopped

    @classmethod
    def start(cls, member: ProcessId, run: Callable[[Cluster, ProcessId], None], tree: Cluster) -> ChildProcess:
        spawn = multiprocessing.get_context("spawn")
        words_in, words_out = spawn.Pipe(duplex=False)
        process = spawn.Process(target=child_main, args=(run, words_out, os.getpid(), tree, member), name=str(member))
        # Signals of the terminal, or of an init system, reach everybody; a child is deaf to them from its first
        # instruction on. The tracker first: starting it takes the mask off again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_END)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        words_out.close()
        assert process.pid is not None, "it has been started"
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # a process that cannot be watched may not live
            process.kill()
            process.join()
            raise
        return cls(member, process.pid, pidfd, process, words_in)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def check_stopped(self, patience: float) -> None:
        """If it has been stopped since the last look, it is killed after so many seconds, unless it goes on."""
        seen = None
        with contextlib.suppress(ChildProcessError):  # it has ended, and its pidfd says so next
            seen = os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        if seen is None:
            return
        if self._end_of_patience is not None:
            self._end_of_patience.cancel()
            self._end_of_patience = None
        if seen.si_code == os.CLD_STOPPED:
            event("process is stopped", logging.WARNING, child=str(self.member), killed_after=patience)
            loop = asyncio.get_running_loop()
            self._end_of_patience = loop.call_later(patience, self.signal, signal.SIGKILL)

    def reap(self) -> ProcessEnd:
        """Of a process that has ended."""
        if self._end_of_patience is not None:
            self._end_of_patience.cancel()
        self._process.join()
        code = self._process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        with contextlib.suppress(EOFError, OSError):
            if self._last_words.poll():
                how = self._last_words.recv_bytes().decode(errors="replace")
        self._last_words.close()
        self._process.close()
        os.close(self.pidfd)
        return ProcessEnd(how, code == CANNOT_START)


def child_main(
    run: Callable[[Cluster, ProcessId], None], error_pipe: Connection, parent: int, tree: Cluster, member: ProcessId
) -> None:
    """The whole life of a process: does its work, ends with its parent, and says why if it ends otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we had asked
        os._exit(1)
    # A group ends when its core is told to, after the servers have; a server decides what a SIGTERM is to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if member.kind != "server":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_TO_END)
    logs.configure(str(member), tree.config.log_format, tree.config.log_level)
    try:
        run(tree, member)
    except CannotStart as error:
        event("process cannot start", logging.ERROR, error=error)
        event("process cannot start", logging.DEBUG, trace=traceback.format_exc())
        _die(error_pipe, str(error), CANNOT_START)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        # The death of another is told by that one: where this one was meanwhile explains nothing.
        trace = {} if isinstance(error, PeerDied) else {"trace": traceback.format_exc()}
        event("process failed", logging.ERROR, error=what, **trace)
        _die(error_pipe, what, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # its work is done and its ends are closed; taking torch down takes seconds where processors are short


def _die(error_pipe: Connection, what: str, status: int) -> NoReturn:
    """It has died, and not closed its ends in peace: a broadcast whose sender has closed is over."""
    error_pipe.send_bytes(what.encode()[:WORDS_NBYTES])
    sys.stderr.flush()
    os._exit(status)
