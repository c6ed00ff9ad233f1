"""The ends of a channel that carries messages: they take and give objects where the channel's own take and give bytes.

Leaves to the frame how an object becomes bytes, to the channel everything else.
"""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

import msgspec

from penstock import _native
from penstock.channel import AsyncReceiver, AsyncSender
from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import FrameDecoder, FrameEncoder
from penstock.errors import EndOfChannel

_S = TypeVar("_S", bound="_InThreads")
_L = TypeVar("_L", bound="_InLoop")


class _Closing:
    """What all four ends have of the end below them."""

    _end: _native.Sender | _native.Receiver | AsyncSender | AsyncReceiver

    def close(self) -> None:
        self._end.close()

    @property
    def is_closed(self) -> bool:
        return self._end.is_closed

    @property
    def index(self) -> int:
        return self._end.index


class _InThreads(_Closing):
    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InLoop(_Closing):
    async def __aenter__(self: _L) -> _L:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class _Turns:
    """One thread after the other. A thread's deadline counts while it waits for its turn, too.

    An interrupt (Ctrl-C) between any two lines may leave the turn taken. The lock then still has this thread as its
    owner, and the thread's next turn is this one.
    """

    __slots__ = ("_is_ours", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_ours = self._lock._is_owned  # type: ignore[attr-defined]

    def take(self, end: _native.Sender | _native.Receiver, timeout: float | None) -> float | None:
        """Waits for the turn. Returns what is left of the timeout."""
        if self._is_ours() or self._lock.acquire(False):
            return timeout
        if timeout is None:
            self._lock.acquire()
            return None
        began = time.monotonic()
        if not self._lock.acquire(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            end.timeout_error(timeout)
        return max(0.0, timeout - (time.monotonic() - began))

    def give(self) -> None:
        if self._is_ours():
            self._lock.release()


class MessageSender(_InThreads):
    """The end that sends. Threads may share it: their messages go one after the other."""

    _end: _native.Sender

    def __init__(self, native: _native.Sender, catalogue: Catalogue) -> None:
        self._end = native
        self._encoder = FrameEncoder(catalogue)
        self._turns = _Turns()

    def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        """Sends one message. Blocks while there is no room, until `timeout` seconds have passed.

        What it holds may be changed as soon as this returns. Raises TypeError where it is not what its class says, and
        else as `Sender.send` does.
        """
        try:
            timeout = self._turns.take(self._end, timeout)
            self._end.send(self._encoder.encode(message), timeout)
        finally:
            self._turns.give()

    def send_nowait(self, message: msgspec.Struct) -> None:
        """The same, but raises WouldBlock instead of blocking."""
        try:
            self._turns.take(self._end, None)
            self._end.send_nowait(self._encoder.encode(message))
        finally:
            self._turns.give()


class MessageReceiver(_InThreads):
    """The end that receives. Threads may share it: each message goes to one of them."""

    _end: _native.Receiver

    def __init__(self, native: _native.Receiver, catalogue: Catalogue) -> None:
        self._end = native
        self._decoder = FrameDecoder(catalogue)
        self._turns = _Turns()

    def receive(self, timeout: float | None = None) -> Any:
        """The next message. Blocks until there is one, or `timeout` seconds have passed.

        Its arrays and parts are read-only views of its frame: of a copy, or, if it is long, of where it lies in the
        channel's pool, which is held as long as one of them is. Raises DecodeError for bytes that are not a message,
        which costs that message alone, and else as `Receiver.receive` does.
        """
        try:
            timeout = self._turns.take(self._end, timeout)
            return self._decoder.decode(self._end.receive_frame(timeout))
        finally:
            self._turns.give()

    def receive_view(self, timeout: float | None = None) -> Any:
        """The same without any copy: its arrays and parts keep their room in the channel as long as they live."""
        try:
            timeout = self._turns.take(self._end, timeout)
            return self._decoder.decode(self._end.receive_view(timeout))
        finally:
            self._turns.give()

    def receive_nowait(self) -> Any:
        """The same as `receive`, but raises WouldBlock instead of blocking."""
        try:
            self._turns.take(self._end, None)
            return self._decoder.decode(self._end.receive_frame_nowait())
        finally:
            self._turns.give()

    def try_receive(self) -> Any | None:
        """The same, but gives None instead of blocking: an exception costs a hundred times as much as to look."""
        try:
            self._turns.take(self._end, None)
            frame = self._end.try_receive_frame()
            return None if frame is None else self._decoder.decode(frame)
        finally:
            self._turns.give()

    @property
    def source(self) -> int:
        """The sender (its index) of the message that was received last."""
        return self._end.source

    def __iter__(self) -> MessageReceiver:
        return self

    def __next__(self) -> Any:
        try:
            return self.receive()
        except EndOfChannel:
            raise StopIteration from None


class AsyncMessageSender(_InLoop):
    """The sending end in an event loop. The semantics are the MessageSender's."""

    _end: AsyncSender

    def __init__(self, end: AsyncSender, catalogue: Catalogue) -> None:
        self._end = end
        self._encoder = FrameEncoder(catalogue)

    async def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        """Sends one message as it is now; waits for room without holding the loop up. Raises as MessageSender.send."""
        frame = self._encoder.encode(message)
        if self._end.is_busy or not self._end.try_send(frame):
            # The caller goes on while this waits, so the arrays that the frame refers to are copied.
            await self._end.send(frame if isinstance(frame, bytes) else b"".join(frame), timeout)

    def send_nowait(self, message: msgspec.Struct) -> None:
        """The same, but raises WouldBlock instead of waiting."""
        if self._end.is_busy:
            self._end.would_block()
        self._end.send_nowait(self._encoder.encode(message))


class AsyncMessageReceiver(_InLoop):
    """The receiving end in an event loop. The semantics are the MessageReceiver's."""

    _end: AsyncReceiver

    def __init__(self, end: AsyncReceiver, catalogue: Catalogue) -> None:
        self._end = end
        self._decoder = FrameDecoder(catalogue)

    # From the moment at which a frame is there until it is decoded the loop does not run: messages of one sender are
    # decoded in the order in which they came, whichever task waits for them.
    async def receive(self, timeout: float | None = None) -> Any:
        return self._decoder.decode(await self._end.receive_frame(timeout))

    async def receive_view(self, timeout: float | None = None) -> Any:
        return self._decoder.decode(await self._end.receive_view(timeout))

    def receive_nowait(self) -> Any:
        return self._decoder.decode(self._end.receive_frame_nowait())

    @property
    def source(self) -> int:
        return self._end.source

    def __aiter__(self) -> AsyncMessageReceiver:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except EndOfChannel:
            raise StopAsyncIteration from None
