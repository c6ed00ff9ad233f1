"""The same ends for asyncio: they cost no thread and do not poll. Whoever has something for us writes a byte into a
pipe that the event loop watches, and only while we have said that we wait.

Leaves to the native core: saying so without losing a wake-up (arm), and finding our pipe (/proc/PID/fd).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from penstock import _native
from penstock.errors import EndOfChannel

if TYPE_CHECKING:
    from typing_extensions import Buffer

_S = TypeVar("_S", bound="_End")


class _End:
    """An end and the pipe by which it is woken."""

    _end: _native.Sender | _native.Receiver

    def __init__(self, attachment: _native.Attachment) -> None:
        self._attachment: _native.Attachment | None = attachment  # keeps the pipe open
        self._bell = attachment.bell_fd()
        self._woken: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()

    async def _wait(self, deadline: float | None, started: float) -> None:
        """Until the pipe is written to. The caller has armed, and disarms."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._forget()
            self._loop = loop
            self._woken = asyncio.Event()
            loop.add_reader(self._bell, self._on_bell)
        assert self._woken is not None
        self._woken.clear()
        remaining = None if deadline is None else deadline - time.monotonic()
        try:
            await asyncio.wait_for(self._woken.wait(), remaining)
        except (asyncio.TimeoutError, TimeoutError):
            if deadline is None or time.monotonic() < deadline:
                raise
            self._end.timeout_error(time.monotonic() - started)

    def _on_bell(self) -> None:
        try:
            os.read(self._bell, 4096)
        except BlockingIOError:
            pass
        if self._woken is not None:
            self._woken.set()

    def _forget(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._bell)
        self._loop = None
        if self._woken is not None:
            self._woken.set()

    def close(self) -> None:
        """Closes this end. A task that waits in it gets ClosedError."""
        self._forget()
        self._attachment = None
        self._end.close()

    @property
    def is_closed(self) -> bool:
        return self._end.is_closed

    @property
    def index(self) -> int:
        return self._end.index

    async def __aenter__(self: _S) -> _S:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncReceiver(_End):
    """The receiving end in an event loop. The semantics are the Receiver's."""

    _end: _native.Receiver

    def __init__(self, native: _native.Receiver, attachment: _native.Attachment) -> None:
        super().__init__(attachment)
        self._end = native

    async def _receive(self, timeout: float | None, as_view: bool) -> bytes | _native.Lease:
        async with self._turn:
            started = time.monotonic()
            deadline = None if timeout is None else started + timeout
            try:
                while True:
                    found = self._end.try_receive(as_view)
                    if found is not None:
                        return found
                    try:
                        if not self._end.arm():
                            await self._wait(deadline, started)
                    finally:
                        self._end.disarm(False)
            finally:
                self._end.disarm(True)

    async def receive(self, timeout: float | None = None) -> bytes:
        """The next record, copied. Raises as Receiver.receive does."""
        found = await self._receive(timeout, False)
        assert isinstance(found, bytes)
        return found

    async def receive_view(self, timeout: float | None = None) -> _native.Lease:
        """The next record where it lies. Raises as Receiver.receive_view does."""
        found = await self._receive(timeout, True)
        assert isinstance(found, _native.Lease)
        return found

    def receive_nowait(self) -> bytes:
        return self._end.receive_nowait()

    @property
    def source(self) -> int:
        return self._end.source

    def __aiter__(self) -> AsyncReceiver:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except EndOfChannel:
            raise StopAsyncIteration from None


class AsyncSender(_End):
    """The sending end in an event loop. The semantics are the Sender's."""

    _end: _native.Sender

    def __init__(self, native: _native.Sender, attachment: _native.Attachment) -> None:
        super().__init__(attachment)
        self._end = native

    async def send(self, record: Buffer | Sequence[Buffer], timeout: float | None = None) -> None:
        """Sends one record; waits for room without holding the loop up. Raises as Sender.send does."""
        async with self._turn:
            started = time.monotonic()
            deadline = None if timeout is None else started + timeout
            try:
                while not self._end.try_send(record):
                    try:
                        if not self._end.arm():
                            await self._wait(deadline, started)
                    finally:
                        self._end.disarm(False)
            finally:
                self._end.disarm(True)

    def send_nowait(self, record: Buffer | Sequence[Buffer]) -> None:
        self._end.send_nowait(record)
