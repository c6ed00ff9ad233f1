"""Processes to be killed, cheaply: one interpreter that has imported everything forks a child for each.

It has no threads and no segments, so its children begin as a spawned process would, in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
WATCHDOG = 30.0  # seconds that anything at all may take; far above what a busy machine needs


class Child:
    """A process, as the test that had it made sees it: to be talked to, killed, and waited for."""

    def __init__(self, pid: int, fd: int, talk: Connection) -> None:
        self.pid = pid
        self.fd = fd
        self.talk = talk
        self.messages: list[tuple[Any, ...]] = []
        self.has_hung_up = False
        self.is_ready = False  # has said so

    def is_alive(self) -> bool:
        return not select.select([self.fd], [], [], 0)[0]

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended at a point of its own
            signal.pidfd_send_signal(self.fd, number)

    def gone_at(self, within: float = WATCHDOG) -> float:
        """Waits for the end of the process, and returns when that was to be seen."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        assert poll.poll(within * 1000), f"pid {self.pid} still runs; it said {self.heard()[-5:]}"
        return time.monotonic()

    def heard(self) -> list[tuple[Any, ...]]:
        """Everything it has said until now."""
        try:
            while not self.has_hung_up and self.talk.poll():
                self.messages.append(self.talk.recv())
                self.is_ready |= self.messages[-1][0] == "ready"
        except (EOFError, ConnectionResetError):
            self.has_hung_up = True
        for words in self.messages:
            assert words[0] != "failed", f"pid {self.pid}: {words[1]}"
        return self.messages

    def hear(self, word: str, within: float = WATCHDOG) -> tuple[Any, ...]:
        """Waits until it says a sentence that begins with this word, and takes that."""
        deadline = time.monotonic() + within
        while True:
            for words in self.heard():
                if words[0] == word:
                    self.messages.remove(words)
                    return words
            wait = deadline - time.monotonic()
            assert not self.has_hung_up, f"pid {self.pid} ended without saying {word!r}; it said {self.messages}"
            assert wait > 0, f"pid {self.pid} did not say {word!r} within {within} s; it said {self.messages}"
            select.select([self.talk, self.fd], [], [], min(wait, 0.1))

    def close(self) -> None:
        if self.is_alive():
            self.kill()
        self.gone_at()
        os.close(self.fd)
        self.talk.close()


class Zygote:
    """Makes children."""

    def __init__(self) -> None:
        ours, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(remote,), name="zygote")
        self._process.start()
        remote.close()
        self._socket.settimeout(WATCHDOG)
        assert self._socket.recv(16) == b"ready"

    def child(self, target: Callable[..., object], *arguments: Any) -> Child:
        """target(talk, *arguments) in a process of its own; `talk` is a Connection; the Child has the other end."""
        ours, remote = multiprocessing.Pipe()
        socket.send_fds(self._socket, [pickle.dumps((target, arguments))], [remote.fileno()])
        remote.close()
        pid, (fd,), _, _ = socket.recv_fds(self._socket, 16, 1)
        return Child(int(pid), fd, ours)

    def close(self) -> None:
        self._socket.close()
        self._process.join(WATCHDOG)
        self._process.kill()
        self._process.join()
        self._process.close()


def serve(server: socket.socket) -> None:
    import tests.crash.actors  # noqa: F401  what children will need is there before they are

    server.send(b"ready")
    while True:
        packet, fds, _, _ = socket.recv_fds(server, 1 << 16, 1)
        if not packet:
            return
        pid = os.fork()
        if pid == 0:
            server.close()
            run(Connection(fds[0]), packet)
        pidfd = os.pidfd_open(pid)  # before it can be buried, however fast it dies
        socket.send_fds(server, [str(pid).encode()], [pidfd])
        os.close(fds[0])
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run(talk: Connection, packet: bytes) -> None:
    """What a child does, and nothing of what its parent would do after."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        target, arguments = pickle.loads(packet)
        target(talk, *arguments)
    except SystemExit:
        raise  # it wants to end as an interpreter does, with all destructors
    except BaseException:
        talk.send(("failed", traceback.format_exc()))
    talk.close()
    os._exit(0)
