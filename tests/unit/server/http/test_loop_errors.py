"""Exceptions in the event loop: one line of the log for each kind, and how often it came."""

import asyncio
import errno
import logging
import os
import resource
import socket
from typing import Any

import pytest

pytest.importorskip("httptools")

from penstock.server.http import loop_errors
from penstock.server.http.loop_errors import LoopErrors


def raise_in(loop: asyncio.AbstractEventLoop, times: int) -> None:
    def fail(number: int) -> None:
        raise OSError(errno.ENOTCONN, f"of client {number}")

    for number in range(times):
        loop.call_soon(fail, number)


class Lines(logging.Handler):
    """What is logged, as events and their fields."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.getMessage(), record.fields))  # type: ignore[attr-defined]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Those of this test, whatever handlers others have left."""
    handler, logger = Lines(), logging.getLogger("penstock.engine")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    return handler.records


def test_equal_exceptions_are_logged_once_with_trace_and_once_counted(
    lines: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_errors, "PERIOD", 0.3)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        raise_in(loop, 63)
        loop.call_exception_handler({"message": "something else"})
        await asyncio.sleep(0)  # all 63 have run
        assert len(lines) == 2
        while len(lines) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.75)  # what does not come again is not said again

    asyncio.run(asyncio.wait_for(scene(), 20))
    (other, without), (first, fields), (again, more) = lines
    assert first == other == again == "error in the event loop" and without == {"message": "something else"}
    assert "of client 0" in fields["error"] and "in fail" in fields["trace"] and "times_more" not in fields
    assert more["times_more"] == 62 and "trace" not in more


def test_connection_without_descriptor_is_logged_with_limit_and_advice(
    lines: list[tuple[str, dict[str, Any]]],
) -> None:

    async def scene() -> None:
        error = OSError(errno.EMFILE, "Too many open files")
        LoopErrors()(
            asyncio.get_running_loop(), {"message": "socket.accept() out of system resource", "exception": error}
        )

    asyncio.run(scene())
    ((name, fields),) = lines
    assert name == "connections are not accepted" and fields["descriptors"] > 0 and "ulimit -n" in fields["remedy"]


def test_listener_closed_while_asyncio_waits_to_accept_is_no_error(lines: list[tuple[str, dict[str, Any]]]) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        limit = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.create_connection(server.sockets[0].getsockname()):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                await wait_for_line()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.close()
        await asyncio.sleep(1.5)  # asyncio's pause is 1 s

    async def wait_for_line() -> None:
        while not lines:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scene(), 20))
    assert [name for name, _ in lines] == ["connections are not accepted"]
