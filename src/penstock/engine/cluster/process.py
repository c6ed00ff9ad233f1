"""One process of the cluster: its start, its main function, and how its end is seen.

`launcher` decides which processes are started and restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from penstock import DeathCause, PeerDied, _native, stack_dump, standard_streams
from penstock.engine.cluster import logs
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process_end import ProcessEnd, SignalRecord
from penstock.engine.cluster.spawning import SENT_TO_ALL, spawn_process
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.cluster.verdict_board import Cause

PR_SET_PDEATHSIG = 1
PF_EXITING = 0x4  # in the flags of /proc/PID/stat
WORDS_NBYTES = 4096
CANNOT_START = 2  # exit status: another attempt would meet the same error
REMOTE_LOSS = 64  # exit status of a bridge, added to the Cause of the loss
UNGUARDED = (
    "a spawned process runs the file of the program, too: start the engine only in the block of "
    "`if __name__ == '__main__'`"
)
# Errors of files, options, packages and memory. Torch's is no MemoryError, and is known by its name.
LASTING = (
    *(ValueError, TypeError, ImportError, NotImplementedError, MemoryError),
    *(FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError),
)
OUT_OF_MEMORY = "OutOfMemoryError"


class RemoteLoss(Exception):
    """A group of another node serves no more, or the link to it has ended. Raised by its bridge."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class CannotStart(Exception):
    """A process cannot serve, and the next attempt would meet the same error (a file, an option, memory)."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Wraps what a process does before it serves. Raises CannotStart for errors that another attempt would meet."""
    try:
        yield
    except Exception as error:
        if isinstance(error, LASTING) or type(error).__name__ == OUT_OF_MEMORY:
            raise CannotStart(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        raise


class StartedProcess(Protocol):
    """A child process that has been spawned or forked."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def kill(self) -> None: ...
    def join(self) -> None: ...
    def close(self) -> None: ...


Fork = Callable[[Callable[..., object], tuple[Any, ...], str], "StartedProcess | None"]


def prctl(option: int, value: object) -> None:
    """Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(number := ctypes.get_errno(), f"prctl({option}): {os.strerror(number)}")


@dataclass
class ChildProcess:
    """A child process of the launcher, watched by its pidfd."""

    member: ProcessId
    pid: int
    pidfd: int
    is_forked: bool
    _process: StartedProcess
    _last_words: socket.socket
    _end_of_patience: asyncio.TimerHandle | None = None  # set while the process is stopped

    @classmethod
    def start(
        cls,
        member: ProcessId,
        run: Callable[[Cluster, ProcessId], object],
        cluster: Cluster,
        fork: Fork | None = None,
    ) -> ChildProcess:
        """Starts a process by `fork`; where that returns None, or is None, the process is spawned. Raises OSError."""
        words_in, words_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with words_out:
                values = run, words_out, os.getpid(), cluster, member
                forked = None if fork is None else fork(child_main, values, str(member))
                process = spawn_process(child_main, values, str(member)) if forked is None else forked
            assert process.pid is not None, "it has been started"
            try:
                pidfd = os.pidfd_open(process.pid)
            except OSError:  # a process that cannot be watched may not live
                process.kill()
                process.join()
                raise
        except BaseException:
            words_in.close()
            raise
        return cls(member, process.pid, pidfd, forked is not None, process, words_in)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    @property
    def is_stopped(self) -> bool:
        return self._end_of_patience is not None

    @property
    def is_ending(self) -> bool:
        """Returns whether the process is ending, though its pidfd may not say so yet: the kernel frees its memory
        first. Unknown counts as ending: no request is blamed on a guess."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)
        except (OSError, ValueError, IndexError):
            return True

    def check_stopped(self, patience: float) -> None:
        """Kills the process `patience` seconds after it was seen to be stopped, unless it continues before."""
        status = None
        with contextlib.suppress(ChildProcessError):  # it has ended, and its pidfd says so next
            status = os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        if status is None:
            return
        if self._end_of_patience is not None:
            self._end_of_patience.cancel()
            self._end_of_patience = None
        if status.si_code == os.CLD_STOPPED:
            event("process is stopped", logging.WARNING, child=str(self.member), killed_after=patience)
            loop = asyncio.get_running_loop()
            self._end_of_patience = loop.call_later(patience, self.signal, signal.SIGKILL)

    def reap(self, record: SignalRecord) -> ProcessEnd:
        """Releases a process that has ended, and returns why. `record`: what it has left about its signal."""
        if self._end_of_patience is not None:
            self._end_of_patience.cancel()
        self._process.join()
        code = self._process.exitcode or 0
        last_words = ""
        with contextlib.suppress(OSError):  # the process has left no words, and children of the process live
            last_words = self._last_words.recv(WORDS_NBYTES, socket.MSG_DONTWAIT).decode(errors="replace")
        self._last_words.close()
        self._process.close()
        os.close(self.pidfd)
        if code == CANNOT_START and not last_words:  # child_main has not begun
            last_words = UNGUARDED
        cause = Cause(code - REMOTE_LOSS) if code - REMOTE_LOSS in list(Cause) else None
        end = ProcessEnd(DeathCause.of_exit_code(code), code == CANNOT_START, cause, last_words=last_words)
        return end.with_record(record, self.pid)


def child_main(
    run: Callable[[Cluster, ProcessId], object],
    error_socket: socket.socket,
    parent: int,
    cluster: Cluster,
    member: ProcessId,
) -> None:
    """Runs a child process: does its work, ends with its parent, and reports why if it ends otherwise.

    The process ends here, whatever happens to its streams: the teardown of the interpreter would close channel ends.
    """
    end_with_parent(parent)
    # A group ends when its core receives Stop, after the servers have ended; a server handles SIGTERM itself. SIGHUP is
    # for the launcher.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if member.kind != "server":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    standard_streams.guard()
    stack_dump.register()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)
    logs.configure(str(member), cluster.config.log_format, cluster.config.log_level)
    StatusBoard(cluster.board, writable=True).record_fatal_signals(cluster.place_of(member))
    # Peers learn of an error with the end of the process, not before: the launcher must see this process end first.
    _native.leave_abandoned_ends_open()
    try:
        _ends = run(cluster, member)
    except CannotStart as error:
        event("process cannot start", logging.ERROR, error=error)
        event("process cannot start", logging.DEBUG, trace=traceback.format_exc())
        _die(error_socket, str(error), CANNOT_START)
    except RemoteLoss as loss:
        _die(error_socket, str(loss), REMOTE_LOSS + loss.cause)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        # A peer that died reports its own end: the trace of this process explains nothing.
        trace = {} if isinstance(error, PeerDied) else {"trace": traceback.format_exc()}
        event("process failed", logging.ERROR, error=reason, **trace)
        _die(error_socket, reason, 1)
    standard_streams.flush()
    # Taking torch down takes seconds where processors are short. The ends of the process stay open: a sender that
    # closes ends its channel, which the next incarnation uses.
    os._exit(0)


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when its parent ends, and ends it if the parent has ended already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _die(error_socket: socket.socket, reason: str, status: int) -> NoReturn:
    """Exits without closing channel ends, so that peers see a death: closing a sender would end its broadcast."""
    with contextlib.suppress(OSError):  # the launcher has ended, and this process is about to be killed
        error_socket.send(reason.encode()[:WORDS_NBYTES])
    standard_streams.flush()
    os._exit(status)
