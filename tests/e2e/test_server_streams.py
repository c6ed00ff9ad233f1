"""Standard streams that are closed, full or broken cost log lines: answers, restarts and exit status stay the same."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from penstock.server.status.snapshot_reader import SnapshotReader
from tests import tiers
from tests.support.command import SERVE, START, ServerClient, started

OPEN_REQUESTS = 4
SECONDS = 1.0  # that the open requests take
MIGRATIONS = tiers.choose(1, 10, 100)

Streams = Iterator[dict[str, object]]


def shell(redirections: str) -> tuple[str, ...]:
    return ("bash", "-c", f'exec "$@" {redirections}', "bash", *SERVE)


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """A pipe that takes no byte, and is never read."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x")
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


CASES = {
    "stdout closed": shell("2>/dev/null >&-"),
    "all closed": shell("<&- >&- 2>&-"),
    "stderr full disk": shell("2>/dev/full"),
    "both full disk": shell(">/dev/full 2>&1"),
    "stderr broken pipe": shell("2> >(head -c 200 >/dev/null)"),
}


def play(process: "subprocess.Popen[bytes]") -> None:
    """Migrates, kills a worker, and drains, each with open requests."""
    client = ServerClient(process)

    def kill_worker() -> None:
        processes = SnapshotReader(process.pid).take().processes
        os.kill(next(each.pid for each in processes if each.role == "worker"), signal.SIGKILL)

    hang_up: Callable[[], None] = lambda: process.send_signal(signal.SIGHUP)  # noqa: E731
    for disturb in (*[hang_up] * MIGRATIONS, kill_worker):
        before = client.incarnations()
        with client.open_requests(OPEN_REQUESTS, SECONDS) as statuses:
            disturb()
        assert statuses == [200] * OPEN_REQUESTS, disturb
        client.wait_for_restart(before)
    with client.open_requests(OPEN_REQUESTS, SECONDS) as statuses:
        process.terminate()
    assert statuses == [200] * OPEN_REQUESTS
    assert process.wait(START) == 0


@pytest.mark.parametrize("case", ["all closed", *tiers.only_in_all(*(name for name in CASES if name != "all closed"))])
def test_stream_that_takes_no_text_changes_no_answer(case: str) -> None:
    with started(CASES[case]) as process:
        play(process)


def test_full_pipe_that_is_never_read_changes_no_answer() -> None:
    with full_pipe() as pipe, started(SERVE, stdout=pipe, stderr=pipe) as process:
        play(process)


@tiers.needs_all
def test_pipe_that_fills_under_debug_logs_changes_no_answer() -> None:
    reader, writer = os.pipe()
    try:
        with started((*SERVE, "--log-level", "debug"), stdout=writer, stderr=writer) as process:
            play(process)
    finally:
        os.close(reader)
        os.close(writer)


def test_closed_descriptors_are_null_in_every_process() -> None:
    with started(CASES["all closed"]) as process:
        ServerClient(process)
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(processes) >= 4
        targets = {os.readlink(f"/proc/{each.pid}/fd/{fd}") for each in processes for fd in range(3)}
        assert targets == {os.devnull}
        process.terminate()
        assert process.wait(START) == 0
