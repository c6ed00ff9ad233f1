"""Standard streams that a process of the server can write to at any time.

A stream may be closed, on a full disk, without a reader, or a pipe that its reader does not empty. Each of these cases
loses text, and none of them stops a process or changes its exit status.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import time
from socket import MSG_DONTWAIT, MSG_NOSIGNAL, socket
from typing import Any

PATIENCE_S = 0.2  # how long the first write to a full pipe waits for the reader; later writes do not wait
POLL_S = 0.05  # between two attempts of a write
PIPE_BUF = select.PIPE_BUF  # a pipe that is ready takes as many bytes at once


class LossyStream(io.RawIOBase):
    """Writes to a descriptor. A write neither fails nor waits for longer than PATIENCE_S: its text is lost instead."""

    def __init__(self, fd: int) -> None:
        self.lost = 0  # writes since the last call of take_lost()
        self._fd = fd
        self._is_stuck = False
        self._is_torn = False  # the last write was cut off within its line
        mode = os.fstat(fd).st_mode
        self._is_pipe = stat.S_ISFIFO(mode) or os.isatty(fd)
        self._socket = socket(fileno=os.dup(fd)) if stat.S_ISSOCK(mode) else None  # of systemd's journal

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Leaves the descriptor open: it belongs to the process."""
        if self._socket is not None:
            self._socket.close()  # a duplicate
        super().close()

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Returns the length of `data`, also if some of it was lost."""
        rest = memoryview(b"\n" + bytes(data) if self._is_torn else bytes(data))
        nbytes, deadline = len(rest), time.monotonic() + (0.0 if self._is_stuck else PATIENCE_S)
        while rest:
            try:
                rest = rest[self._write_some(rest) :]
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.001)  # a terminal may be ready, and take nothing
                self._wait(POLL_S)
            except OSError:
                break
        self._is_torn = 0 < len(rest) < nbytes or (self._is_torn and len(rest) == nbytes)
        self._is_stuck = bool(rest)
        self.lost += bool(rest)
        return len(data)

    def _write_some(self, rest: memoryview) -> int:
        """Writes without waiting. Raises BlockingIOError, and other OSErrors."""
        if self._socket is not None:
            return self._socket.send(rest, MSG_DONTWAIT | MSG_NOSIGNAL)
        if not self._is_pipe or not os.get_blocking(self._fd):
            return os.write(self._fd, rest)
        # The pipe could not be opened again (see guard). Another process may fill it after the poll.
        if not self._wait(0.0):
            raise BlockingIOError
        return os.write(self._fd, rest[:PIPE_BUF])

    def _wait(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1e3))

    def take_lost(self) -> int:
        """Returns how many writes were lost before the last one, and forgets them; 0 while the stream is stuck."""
        if self._is_stuck:
            return 0
        lost, self.lost = self.lost, 0
        return lost


def guard() -> None:
    """Makes standard output and standard error of this process, and of its children, streams that lose text instead of
    failing or waiting. For the first statements of a process."""
    open_closed_descriptors()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        _open_without_waiting(fd)
        text = io.TextIOWrapper(LossyStream(fd), "utf-8", "backslashreplace", line_buffering=True)  # type: ignore[type-var]
        setattr(sys, name, text)


def open_closed_descriptors() -> None:
    """Opens /dev/null in the place of each standard descriptor that is closed. A segment or a socket would get the
    number otherwise, and text would be written into it."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


def _open_without_waiting(fd: int) -> None:
    """Opens a pipe or a terminal again, so that writes do not wait. O_NONBLOCK of the inherited open file would
    concern all other processes with this file."""
    if not (stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd)):
        return
    with contextlib.suppress(OSError):  # a pipe of another user: each write polls before
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        again = os.open(f"/proc/self/fd/{fd}", flags)
        os.dup2(again, fd)
        os.close(again)


def take_lost(stream: object) -> int:
    """Returns how many writes to a guarded stream were lost before the last one, and forgets them."""
    raw = getattr(stream, "buffer", None)
    return raw.take_lost() if isinstance(raw, LossyStream) else 0


def flush() -> None:
    """Flushes standard output and standard error, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a process without the descriptor
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
