"""The ends of channels that carry messages or buffers. They are made of the ends that take and give bytes.

Leaves to the frame how an object becomes bytes, to the channel everything else.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from penstock import _native
from penstock.channel import AsyncByteReceiver, AsyncByteSender
from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import FrameDecoder, FrameEncoder
from penstock.errors import EndOfChannel

LOOK_AGAIN = 0.05  # seconds; of a thread that waits for its turn: an interrupt may keep the notice from it

_S = TypeVar("_S", bound="_InThreads")
_L = TypeVar("_L", bound="_InLoop")
_R = TypeVar("_R", bound="_Receiving")
_A = TypeVar("_A", bound="_ReceivingInLoop")


class _Closing:
    """What all four ends have of the end below them."""

    _end: _native.Sender | _native.Receiver | AsyncByteSender | AsyncByteReceiver

    def close(self) -> None:
        self._end.close()

    def fail(self, error: BaseException) -> None:
        self._end.fail(error)

    @property
    def is_closed(self) -> bool:
        return self._end.is_closed

    @property
    def index(self) -> int:
        return self._end.index


class _InThreads(_Closing):
    _end: _native.Sender | _native.Receiver

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.__exit__(kind, error, trace)


class _InLoop(_Closing):
    _end: AsyncByteSender | AsyncByteReceiver

    async def __aenter__(self: _L) -> _L:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end.__aexit__(kind, error, trace)


class _Receiving(_InThreads):
    _end: _native.Receiver

    def receive(self, timeout: float | None = None) -> Any:
        raise NotImplementedError

    @property
    def source(self) -> int:
        return self._end.source

    def __iter__(self: _R) -> _R:
        return self

    def __next__(self) -> Any:
        try:
            return self.receive()
        except EndOfChannel:
            self._end.exhaust()
            raise StopIteration from None


class _ReceivingInLoop(_InLoop):
    _end: AsyncByteReceiver

    async def receive(self, timeout: float | None = None) -> Any:
        raise NotImplementedError

    @property
    def source(self) -> int:
        return self._end.source

    def __aiter__(self: _A) -> _A:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except EndOfChannel:
            self._end.exhaust()
            raise StopAsyncIteration from None


class _Turns:
    """One thread after the other. A thread's deadline counts while it waits for its turn, too.

    An interrupt (Ctrl-C) between any two lines may leave the turn taken. One call of the dictionary takes the turn and
    notes its thread, so the thread's next turn is this one.
    """

    __slots__ = ("_owner", "_returned", "_waiting")

    def __init__(self) -> None:
        self._owner: dict[None, int] = {}
        self._returned = threading.Condition()
        self._waiting = 0  # threads; a thread that returns the turn reads it after that

    def take(self, end: _native.Sender | _native.Receiver, timeout: float | None) -> float | None:
        """Waits for the turn. Returns what is left of the timeout."""
        thread = threading.get_ident()
        if self._owner.setdefault(None, thread) == thread:
            return timeout
        began = time.monotonic()
        left = timeout
        with self._returned:
            self._waiting += 1
            try:
                while self._owner.setdefault(None, thread) != thread:
                    if left is not None and left <= 0:
                        end.timeout_error(timeout or 0.0)
                    self._returned.wait(LOOK_AGAIN if left is None else min(left, LOOK_AGAIN))
                    left = None if timeout is None else timeout - (time.monotonic() - began)
            finally:
                self._waiting -= 1
        return None if left is None else max(0.0, left)

    def give(self) -> None:
        if self._owner.get(None) == threading.get_ident():
            del self._owner[None]
            if self._waiting:
                with self._returned:
                    self._returned.notify()


class MessageSender(_InThreads):
    """Sends messages. Those of several threads go one after the other."""

    _end: _native.Sender

    def __init__(self, native: _native.Sender, catalogue: Catalogue) -> None:
        self._end = native
        self._encoder = FrameEncoder(catalogue)
        self._turns = _Turns()

    def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        try:
            timeout = self._turns.take(self._end, timeout)
            self._end.send(self._encoder.encode(message), timeout)
        finally:
            self._turns.give()

    def send_nowait(self, message: msgspec.Struct) -> None:
        try:
            self._turns.take(self._end, None)
            self._end.send_nowait(self._encoder.encode(message))
        finally:
            self._turns.give()


class MessageReceiver(_Receiving):
    """Receives messages: a short one from a copy of its frame, a long one from where it lies."""

    def __init__(self, native: _native.Receiver, catalogue: Catalogue) -> None:
        self._end = native
        self._decoder = FrameDecoder(catalogue)
        self._turns = _Turns()

    def receive(self, timeout: float | None = None) -> Any:
        try:
            timeout = self._turns.take(self._end, timeout)
            return self._decoder.decode(self._end.receive_frame(timeout))
        finally:
            self._turns.give()

    def receive_nowait(self) -> Any:
        try:
            self._turns.take(self._end, None)
            return self._decoder.decode(self._end.receive_frame_nowait())
        finally:
            self._turns.give()


class AsyncMessageSender(_InLoop):
    _end: AsyncByteSender

    def __init__(self, end: AsyncByteSender, catalogue: Catalogue) -> None:
        self._end = end
        self._encoder = FrameEncoder(catalogue)

    async def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        frame = self._encoder.encode(message)
        if self._end.is_busy or not self._end.try_send(frame):
            await self._end.send(frame, timeout)

    def send_nowait(self, message: msgspec.Struct) -> None:
        if self._end.is_busy:
            self._end.would_block()
        self._end.send_nowait(self._encoder.encode(message))


class AsyncMessageReceiver(_ReceivingInLoop):
    def __init__(self, end: AsyncByteReceiver, catalogue: Catalogue) -> None:
        self._end = end
        self._decoder = FrameDecoder(catalogue)

    # From the moment at which a frame is there until it is decoded the loop does not run: messages of one sender are
    # decoded in the order in which they came, whichever task waits for them.
    async def receive(self, timeout: float | None = None) -> Any:
        return self._decoder.decode(await self._end.receive_frame(timeout))

    def receive_nowait(self) -> Any:
        return self._decoder.decode(self._end.receive_frame_nowait())


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _exported(record: Any) -> Any:
    """The record as the native ends take it: one buffer, or a list of them."""
    if type(record) is Buffer:
        return record.view
    if isinstance(record, (list, tuple)):
        return [piece.view if type(piece) is Buffer else piece for piece in record]
    return record


class BufferSender(_InThreads):
    _end: _native.Sender

    def __init__(self, native: _native.Sender) -> None:
        self._end = native

    def send(self, message: Any, timeout: float | None = None) -> None:
        self._end.send(_exported(message), timeout)

    def send_nowait(self, message: Any) -> None:
        self._end.send_nowait(_exported(message))


class BufferReceiver(_Receiving):
    def __init__(self, native: _native.Receiver) -> None:
        self._end = native

    def receive(self, timeout: float | None = None) -> Buffer:
        return Buffer(self._end.receive_view(timeout))

    def receive_nowait(self) -> Buffer:
        return Buffer(self._end.receive_view_nowait())


class AsyncBufferSender(_InLoop):
    _end: AsyncByteSender

    def __init__(self, end: AsyncByteSender) -> None:
        self._end = end

    async def send(self, message: Any, timeout: float | None = None) -> None:
        await self._end.send(_exported(message), timeout)

    def send_nowait(self, message: Any) -> None:
        self._end.send_nowait(_exported(message))


class AsyncBufferReceiver(_ReceivingInLoop):
    def __init__(self, end: AsyncByteReceiver) -> None:
        self._end = end

    async def receive(self, timeout: float | None = None) -> Buffer:
        return Buffer(await self._end.receive_view(timeout))

    def receive_nowait(self) -> Buffer:
        return Buffer(self._end.receive_view_nowait())
