"""Standard streams that take no text: a write returns in time, later text arrives whole, and losses are counted."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock import standard_streams
from penstock.engine.cluster import logs
from penstock.standard_streams import LossyStream
from tests.support.processes import program

LINE = b"a line of text\n"
SIZE = 1 << 20  # above the capacity of a pipe and of a socket


@contextlib.contextmanager
def pipe(*, is_blocking: bool) -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(writer, is_blocking)
    os.set_blocking(reader, False)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def drain(reader: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(reader, SIZE):
            data += more
    return data


@pytest.mark.parametrize("is_blocking", [False, True])
def test_full_pipe_loses_text_and_takes_it_when_it_is_read(is_blocking: bool) -> None:
    with pipe(is_blocking=is_blocking) as (reader, writer):
        stream = LossyStream(writer)
        for _ in range(SIZE // len(LINE)):
            assert stream.write(LINE) == len(LINE)
        assert stream.lost and not stream.take_lost(), "a stuck stream reports no loss yet"
        lost, data = stream.lost, drain(reader)
        assert data.count(LINE) == SIZE // len(LINE) - lost
        stream.write(LINE)
        assert drain(reader).endswith(LINE)
        assert (stream.take_lost(), stream.take_lost()) == (lost, 0)


def test_text_that_was_cut_off_ends_its_line() -> None:
    with pipe(is_blocking=False) as (reader, writer):
        stream = LossyStream(writer)
        stream.write(b"x" * SIZE)
        stream.write(b"lost\n")
        assert set(drain(reader)) == set(b"x")
        stream.write(LINE)
        assert drain(reader) == b"\n" + LINE


def test_write_waits_for_a_reader_that_is_slow() -> None:
    with pipe(is_blocking=False) as (reader, writer):
        stream = LossyStream(writer)
        read = bytearray()

        def empty() -> None:
            while len(read) < SIZE:
                time.sleep(0.001)
                read.extend(drain(reader))

        thread = threading.Thread(target=empty)
        thread.start()
        stream.write(b"x" * (SIZE // 2))
        stream.write(b"x" * (SIZE // 2))
        read.extend(bytes(SIZE))
        thread.join()
        assert stream.lost == 0


def test_full_disk_and_missing_reader_lose_text() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = LossyStream(full.fileno())
        assert stream.write(LINE) == len(LINE) and stream.lost == 1
    reader, writer = os.pipe()
    os.close(reader)
    stream = LossyStream(writer)
    assert stream.write(LINE) == len(LINE) and stream.lost == 1
    os.close(writer)


def test_full_socket_loses_text() -> None:
    ours, remote = socket.socketpair()
    with ours, remote:
        stream = LossyStream(ours.fileno())
        stream.write(bytes(10 * SIZE))
        assert stream.lost == 1 and ours.getblocking()
        stream.close()
        ours.getpeername()  # it is open


def test_log_says_how_many_lines_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe(is_blocking=False) as (reader, writer):
        text = standard_streams.io.TextIOWrapper(LossyStream(writer), line_buffering=True)  # type: ignore[type-var]
        monkeypatch.setattr(sys, "stderr", text)
        handlers = logs.LOGGER.handlers[:]
        try:
            logs.configure("test", "text")
            while not text.buffer.lost:
                logs.event("x" * 4000)
            drain(reader)
            logs.event("next", logging.WARNING)
        finally:
            logs.LOGGER.handlers[:] = handlers
        lines = drain(reader).decode().splitlines()
        assert any("event=next" in line for line in lines) and 'event="log lines were lost" lines=1' in lines[-1]


GUARDED = """
    from penstock import standard_streams
    standard_streams.guard()
    import subprocess
    print("x" * 100)
    print("x" * 100, file=sys.stderr)
    subprocess.run([sys.executable, "-c", "import os; [os.fstat(fd) for fd in range(3)]"], check=True)
"""


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_guarded_process_ends_with_status_0(redirection: str) -> None:
    code = "import sys\n" + "\n".join(line.strip() for line in GUARDED.splitlines())
    command = ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", code]
    assert subprocess.run(command, check=False).returncode == 0


def test_guard_leaves_other_users_of_a_pipe_blocking() -> None:
    source = "from penstock import standard_streams; standard_streams.guard(); print(os.get_blocking(2), flush=True)"
    with pipe(is_blocking=True) as (_, writer), program(source) as child:
        assert child.hear() == "False" and os.get_blocking(writer)
        assert os.get_blocking(child.process.stdin.fileno())  # type: ignore[union-attr]
