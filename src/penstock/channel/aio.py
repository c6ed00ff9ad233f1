"""The ends for asyncio, without a thread. While an end waits, peers wake the end by writing a byte into its pipe, which
the event loop watches.

A peer cannot always write: without a free descriptor, or without permission to look into this process (setuid). A
waiting end therefore polls, too, after LOOK_UP_S and then ever more rarely, down to once in MAX_LOOK_UP_S; after a
successful poll, again after MIN_LOOK_UP_S.

The native core announces a wait without losing a wake-up (arm), and finds the pipe (/proc/PID/fd).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

from penstock import _native
from penstock.channel.ends import AnyEnd, R, S
from penstock.errors import ClosedError, EndOfChannel, WouldBlock

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer, Self

    from penstock.codec.codecs import Codec

LOOK_UP_S = 0.08
MIN_LOOK_UP_S = 0.01
MAX_LOOK_UP_S = 0.96
LOCKED_OUT_S = 0.01  # between two attempts while a stopped peer holds a lock
MAX_DELIVERED = 8  # messages, before other callbacks of the loop have their turn


class _Turn:
    """First come, first served, among the tasks that wait in one end; a place in the line has a deadline too."""

    def __init__(self) -> None:
        self.is_taken = False
        self._line: deque[asyncio.Future[bool]] = deque()

    async def take(self, deadline: float | None) -> bool:
        """False: the deadline passed first."""
        if not self.is_taken:
            self.is_taken = True
            return True
        loop = asyncio.get_running_loop()
        place: asyncio.Future[bool] = loop.create_future()
        self._line.append(place)
        alarm = None
        if deadline is not None:
            alarm = loop.call_later(deadline - time.monotonic(), self._expire, place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.result():
                self.give()  # it had become ours at the moment we were cancelled
            raise
        finally:
            if alarm is not None:
                alarm.cancel()

    @staticmethod
    def _expire(place: asyncio.Future[bool]) -> None:
        if not place.done():
            place.set_result(False)

    def give(self) -> None:
        while self._line:
            place = self._line.popleft()
            if not place.done() and not place.get_loop().is_closed():
                place.set_result(True)
                return
        self.is_taken = False


class _AsyncEnd(AnyEnd):
    """An end and the pipe by which it is woken."""

    def __init__(self, codec: Codec, attachment: _native.Attachment) -> None:
        self._codec = codec
        self._attachment: _native.Attachment | None = attachment  # keeps the pipe open
        self._bell = attachment.bell_fd()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._turn = _Turn()
        self._alarm: asyncio.TimerHandle | None = None  # of the next look-up
        self._look_up_s = LOOK_UP_S
        self._held: list[_AsyncEnd] = []  # this end while a task waits: the alarm holds the end, and so the task

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is None or loop.is_closed():
            return
        if not loop.is_running():
            return self._unregister(loop, self._bell, self._alarm)
        with contextlib.suppress(RuntimeError):  # the loop, perhaps of another thread, was closed meanwhile
            # Until then the attachment keeps the descriptor open: no new file may get the number.
            loop.call_soon_threadsafe(self._unregister, loop, self._bell, self._alarm, self._attachment)

    @staticmethod
    def _unregister(loop: asyncio.AbstractEventLoop, bell: int, alarm: asyncio.TimerHandle | None, *_: object) -> None:
        loop.remove_reader(bell)
        if alarm is not None:
            alarm.cancel()

    async def _wait(self, deadline: float | None, started: float) -> None:
        """Until the pipe is written to, or the deadline, which raises. The caller has armed, and disarms."""
        if deadline is not None and time.monotonic() >= deadline:
            self._end.timeout_error(time.monotonic() - started)
        loop = asyncio.get_running_loop()
        waiter = self._add_waiter(loop)
        alarm = None
        if deadline is not None:
            alarm = loop.call_later(deadline - time.monotonic(), self._wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            self._held.pop()
            if alarm is not None:
                alarm.cancel()

    def _add_waiter(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        if self._loop is not loop:
            self._forget()
            loop.add_reader(self._bell, self._ring, weakref.ref(self))
            self._loop = loop  # after it: where it is refused, the next wait asks again
        waiter = loop.create_future()
        self._waiters.add(waiter)
        self._held.append(self)
        if self._alarm is None:
            self._set_alarm(loop)
        return waiter

    async def _armed(self, deadline: float | None, started: float) -> None:
        """One wait: announces the wait, polls, waits, and withdraws the announcement."""
        try:
            if not self._end.arm():
                await self._wait(deadline, started)
            elif deadline is not None and time.monotonic() >= deadline:
                self._end.timeout_error(time.monotonic() - started)
            else:
                await asyncio.sleep(LOCKED_OUT_S if self._end.is_locked_out else 0)
        finally:
            self._end.disarm(False)

    @staticmethod
    def _wake(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    @staticmethod
    def _ring(reference: weakref.ref[_AsyncEnd]) -> None:
        end = reference()
        if end is not None:
            end._on_bell()

    def _on_bell(self) -> None:
        try:
            os.read(self._bell, 4096)
        except BlockingIOError:
            pass
        self._wake_all()

    def _wake_all(self) -> None:
        for waiter in tuple(self._waiters):
            self._wake(waiter)

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = loop.call_later(self._look_up_s, self._look_up, weakref.ref(self), self._held)

    @staticmethod
    def _look_up(reference: weakref.ref[_AsyncEnd], _: list[_AsyncEnd]) -> None:
        end = reference()
        if end is None:
            return
        end._alarm = None
        if not end._waiters or end._loop is None:
            return  # the next wait sets it again
        try:
            is_ready = end._end.arm()
        except ClosedError:
            is_ready = True
        end._look_up_s = MIN_LOOK_UP_S if is_ready else min(2 * end._look_up_s, MAX_LOOK_UP_S)
        if is_ready:
            end._wake_all()
        if end._loop is not None:  # not closed by a message that was delivered
            end._set_alarm(end._loop)

    def _forget(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._unregister(self._loop, self._bell, self._alarm)
        self._loop = None
        self._alarm = None
        for waiter in tuple(self._waiters):
            if not waiter.get_loop().is_closed():
                self._wake(waiter)

    def close(self) -> None:
        """Closes this end. A task that waits in the end gets ClosedError."""
        self._forget()
        self._attachment = None
        super().close()

    def fail(self, error: BaseException) -> None:
        """Closes this end by an error. Args and Raises are those of `Sender.fail`."""
        self._forget()
        self._attachment = None
        super().fail(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)


def _as_bytes(record: Buffer | Sequence[Buffer]) -> bytes:
    if type(record) is bytes:
        return record
    return b"".join(record if isinstance(record, (list, tuple)) else (record,))


class AsyncSender(_AsyncEnd, Generic[S]):
    """The sending end for asyncio: `channel.open_async_sender()`. Starts no thread, and does not block the loop.

    Examples:
        >>> async def main(ring):
        ...     async with ring.open_async_sender() as sender:
        ...         await sender.send(b"step")
        >>> ring = Ring()
        >>> asyncio.run(main(ring))
        >>> ring.open_receiver().receive()
        b'step'
    """

    _end: _native.Sender
    _codec: Codec

    def __init__(self, end: _native.Sender, codec: Codec, attachment: _native.Attachment) -> None:
        super().__init__(codec, attachment)
        self._end = end

    async def send(self, message: S, timeout: float | None = None) -> None:
        """Sends one message, as it is now. Args and Raises are those of `Sender.send`."""
        record = self._codec.encode(message)
        if not self._turn.is_taken and self._end.try_send(record):
            return
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        record = _as_bytes(record)  # the caller goes on while this waits
        if not await self._turn.take(deadline):
            self._end.timeout_error(time.monotonic() - started)
        try:
            while not self._end.try_send(record):
                await self._armed(deadline, started)
        finally:
            self._end.disarm(True)
            self._turn.give()

    def send_nowait(self, message: S) -> None:
        """Sends one message if there is room now. Args and Raises are those of `Sender.send_nowait`."""
        if self._turn.is_taken:  # by a task that waits for room, and comes first
            raise WouldBlock(f"no room now in '{self._end.name}'")
        self._end.send_nowait(self._codec.encode(message))


class AsyncReceiver(_AsyncEnd, Generic[R]):
    """The receiving end for asyncio: `channel.open_async_receiver()`. `async for` over it ends with the channel.

    Examples:
        >>> async def main(ring):
        ...     async with ring.open_async_receiver() as receiver:
        ...         return await receiver.receive(timeout=1)
        >>> ring = Ring()
        >>> ring.open_sender().send(b"step")
        >>> asyncio.run(main(ring))
        b'step'
    """

    _end: _native.Receiver
    _codec: Codec

    def __init__(self, end: _native.Receiver, codec: Codec, attachment: _native.Attachment) -> None:
        super().__init__(codec, attachment)
        self._end = end
        attempts: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "copy": (end.try_receive, end.receive_nowait),
            "view": (end.try_receive_view, end.receive_view_nowait),
            "frame": (end.try_receive_frame, end.receive_frame_nowait),
        }
        self._try_receive, self._receive_nowait = attempts[codec.record]
        self._delivery: tuple[Callable[[R], object], Callable[[Exception], bool]] | None = None
        self._next_delivery: asyncio.TimerHandle | None = None  # while more messages may have come

    async def receive(self, timeout: float | None = None) -> R:
        """Returns the next message. Args and Raises are those of `Receiver.receive`."""
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        if not await self._turn.take(deadline):
            self._end.timeout_error(time.monotonic() - started)
        try:
            while (record := self._try_receive()) is None:
                await self._armed(deadline, started)
            message: R = self._codec.decode(record)  # before another task runs: messages of a sender stay in order
            return message
        finally:
            self._end.disarm(True)
            self._turn.give()

    def deliver(self, handle: Callable[[R], object], fail: Callable[[Exception], bool]) -> None:
        """Delivers all messages from now on, from callbacks of the running event loop: without a task, which takes as
        long to wake as a short message takes to handle. `close` ends the delivery.

        Args:
            handle: gets each message.
            fail: gets an error of `receive`, or of `handle`; returns whether further messages are to be delivered.

        Raises:
            RuntimeError: no event loop runs.

        Examples:
            >>> async def main(ring):
            ...     async with ring.open_async_receiver() as receiver:
            ...         receiver.deliver(print, lambda error: False)
            ...         await asyncio.sleep(0.01)
            >>> ring = Ring()
            >>> ring.open_sender().send(b"step")
            >>> asyncio.run(main(ring))
            b'step'
        """
        loop = asyncio.get_running_loop()
        self._turn.is_taken = True  # no task receives beside
        self._delivery = handle, fail
        self._add_waiter(loop)  # never woken: it lets the alarm poll
        self._next_delivery = loop.call_later(0.0, self._wake_all)

    def _wake_all(self) -> None:
        if self._delivery is None or self._loop is None:
            return super()._wake_all()
        if self._next_delivery is not None:
            self._next_delivery.cancel()
            self._next_delivery = None
        pause = self._deliver(*self._delivery)
        if pause is not None and self._loop is not None:
            self._next_delivery = self._loop.call_later(pause, self._wake_all)
        return None

    def _deliver(self, handle: Callable[[R], object], fail: Callable[[Exception], bool]) -> float | None:
        """Handles what has come, up to MAX_DELIVERED messages. Returns the seconds until the next attempt; None: the
        pipe announces the next message, or no more is delivered."""
        try:
            self._end.disarm(True)
            for _ in range(MAX_DELIVERED):
                if self._loop is None:  # closed by the message before
                    return None
                record = self._try_receive()
                if record is not None:
                    handle(self._codec.decode(record))
                elif self._end.arm():
                    return LOCKED_OUT_S if self._end.is_locked_out else 0.0
                else:
                    return None
        except Exception as error:
            if not fail(error):
                self._delivery = None
                return None
        return 0.0

    def receive_nowait(self) -> R:
        """Returns the next message if there is one now. Raises what `Receiver.receive_nowait` does."""
        message: R = self._codec.decode(self._receive_nowait())
        return message

    @property
    def source(self) -> int:
        """The index of the sender of the message that was received last."""
        return self._end.source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        try:
            return await self.receive()
        except EndOfChannel:
            self._end.exhaust()
            self.close()  # tasks that share the end get EndOfChannel
            raise StopAsyncIteration from None
