"""Keeps the engine of a replica: starts `penstock serve`, and ends the engine after any end of the replica.

A separate program, which imports only the standard library. Ray kills the process group of an ended actor, which leaves
an engine no time to drain; and PR_SET_PDEATHSIG follows the thread that started a child, while a replica's constructor
runs in a thread. Therefore the keeper has a session, and starts the launcher from the main thread.

    standard input    held open by the replica; at its end the engine gets SIGTERM, and SIGKILL after `grace` seconds
    standard output   the launcher's pid in a line; after the end of the engine the cause, and the end of the log
    standard error    the log of the engine
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from penstock.errors import DeathCause

PR_SET_PDEATHSIG = 1
LOG_NBYTES = 65536  # read at a time
TAIL_NBYTES = 4096  # of the log, which are kept


class EngineKeeper:
    """The launcher of an engine, as a child process."""

    def __init__(self, command: Sequence[str]) -> None:
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def end_with_keeper() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:  # it died before prctl
                os._exit(1)

        # Ray blocks SIGINT in its workers; an engine is to have the default.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            preexec_fn=end_with_keeper,
        )  # fmt: skip
        assert self._launcher.stdout is not None, "it is a pipe"
        self._log = self._launcher.stdout.fileno()
        os.set_blocking(self._log, False)
        self._tail = b""

    @property
    def pid(self) -> int:
        return self._launcher.pid

    def terminate(self, *_: object) -> None:
        self._launcher.terminate()

    def run(self, grace: float) -> str:
        """Waits for the end of the engine. Returns the cause, and the end of the log."""
        pidfd, poll = os.pidfd_open(self.pid), select.poll()
        for fd in (pidfd, self._log, sys.stdin.fileno()):
            poll.register(fd, select.POLLIN)
        deadline: float | None = None
        while True:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self._log in ready and not self._pass_on_log():
                poll.unregister(self._log)
            if pidfd in ready:
                break
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), LOG_NBYTES):
                poll.unregister(sys.stdin.fileno())
                self.terminate()
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() >= deadline:
                self._launcher.kill()
                deadline = None
        os.close(pidfd)
        self._pass_on_log()
        status = self._launcher.wait()
        return f"{DeathCause.of_exit_code(status)}\n{self._tail.decode(errors='replace').strip()}"

    def _pass_on_log(self) -> bool:
        """Returns whether there may be more."""
        while True:
            try:
                lines = os.read(self._log, LOG_NBYTES)
            except BlockingIOError:
                return True
            if not lines:
                return False
            self._tail = (self._tail + lines)[-TAIL_NBYTES:]
            with contextlib.suppress(OSError):  # the reader has gone, or its disk is full
                os.write(sys.stderr.fileno(), lines)


def main(grace: float, command: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a child would inherit
    keeper = EngineKeeper(command)
    signal.signal(signal.SIGTERM, keeper.terminate)
    _tell_replica(str(keeper.pid))
    _tell_replica(keeper.run(grace))
    return 0


def _tell_replica(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has ended
        os.write(sys.stdout.fileno(), f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
