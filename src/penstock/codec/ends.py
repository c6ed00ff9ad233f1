"""The ends of a channel that carries messages: they take and give objects where the channel's own take and give bytes.

Leaves to the frame how an object becomes bytes, to the channel everything else.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock import _native
from penstock.channel import AsyncReceiver, AsyncSender
from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import FrameDecoder, FrameEncoder
from penstock.errors import EndOfChannel

if TYPE_CHECKING:
    from typing_extensions import Buffer

Greeting = Callable[[], Iterable[msgspec.Struct]]
_S = TypeVar("_S", bound="_InThreads")
_L = TypeVar("_L", bound="_InLoop")


def owned(value: Any) -> Any:
    """A deep copy, of a view too."""
    if isinstance(value, msgspec.Struct):
        made = copy.copy(value)
        for name in value.__struct_fields__:
            msgspec.structs.force_setattr(made, name, owned(getattr(value, name)))
        return made
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(owned, value))
    if type(value) is dict:
        return {owned(key): owned(its) for key, its in value.items()}
    return memoryview(bytes(value)) if isinstance(value, memoryview) else copy.deepcopy(value)


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


class _Sending(_Closing):
    """What both senders have: the frame that is on its way, and what a receiver that came late must be told first."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._encoder = FrameEncoder(catalogue)
        self._admissions = 0
        self._greeting: Greeting | None = None
        self._owes_greeting = False

    @property
    def admissions(self) -> int:
        """How many receivers have been let in since this sender came: they know nothing of what was sent before."""
        return self._admissions

    def greet(self, greeting: Greeting) -> None:
        """The messages that `greeting` gives are sent before the next one, and again whenever a receiver has come late.

        All receivers get them. It is asked when they are sent, so it can tell how things stand then.
        """
        self._greeting = greeting
        self._owes_greeting = True

    def _greetings(self) -> Iterable[msgspec.Struct]:
        self._encoder.names.forget()  # who needs them may have missed what was defined before: they stand alone
        return self._greeting() if self._greeting is not None else ()

    def _overtaken(self, admissions: int) -> None:
        self._encoder.names.forget()
        self._owes_greeting = self._greeting is not None
        self._admissions = admissions  # last: an interrupt before it means that we are told again


class _Turns:
    """One thread after the other. A thread's deadline counts while it waits for its turn, too.

    Between any two lines an interrupt (Ctrl-C) may leave the turn taken. It is that thread's own, then: the lock knows
    whose it is, and the thread's next turn is this one.
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


class MessageSender(_Sending, _InThreads):
    """The end that sends. Threads may share it: their messages go one after the other."""

    _end: _native.Sender

    def __init__(self, native: _native.Sender, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._end = native
        self._turns = _Turns()

    def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        """Sends one message. Blocks while there is no room, until `timeout` seconds have passed.

        What it holds may be changed as soon as this returns. Raises TypeError where it is not what its class says, and
        else as `Sender.send` does.
        """
        try:
            timeout = self._turns.take(self._end, timeout)
            self._send(message, timeout, True)
        finally:
            self._turns.give()

    def send_nowait(self, message: msgspec.Struct) -> None:
        """The same, but raises WouldBlock instead of blocking."""
        try:
            self._turns.take(self._end, None)
            self._send(message, None, False)
        finally:
            self._turns.give()

    def _send(self, message: msgspec.Struct, timeout: float | None, may_wait: bool) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if self._owes_greeting and not self._greet(deadline, may_wait):
                    continue
                if self._put(self._encoder.encode(message), deadline, may_wait):
                    return
        except BaseException:
            self._encoder.let_go()
            raise

    def _greet(self, deadline: float | None, may_wait: bool) -> bool:
        self._owes_greeting = False
        try:
            for first in self._greetings():
                if not self._put(self._encoder.encode(first), deadline, may_wait):
                    return False
        except BaseException:
            self._owes_greeting = True
            raise
        return True

    def _put(self, frame: Buffer | list[Buffer], deadline: float | None, may_wait: bool) -> bool:
        """Sends a frame. False: not sent, because somebody has come who must be greeted first."""
        while True:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            admissions = self._end.send_if(frame, self._admissions, timeout, may_wait)
            if admissions == self._admissions:
                self._encoder.sent()
                return True
            self._overtaken(admissions)
            if self._owes_greeting:
                return False
            frame = self._encoder.again()


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
            return self._decoder.decode(self._end.receive_frame(timeout), self._end.source)
        finally:
            self._turns.give()

    def receive_view(self, timeout: float | None = None) -> Any:
        """The same without any copy: its arrays and parts keep their room in the channel as long as they live."""
        try:
            timeout = self._turns.take(self._end, timeout)
            return self._decoder.decode(self._end.receive_view(timeout), self._end.source)
        finally:
            self._turns.give()

    def receive_nowait(self) -> Any:
        """The same as `receive`, but raises WouldBlock instead of blocking."""
        try:
            self._turns.take(self._end, None)
            return self._decoder.decode(self._end.receive_frame_nowait(), self._end.source)
        finally:
            self._turns.give()

    def try_receive(self) -> Any | None:
        """The same, but gives None instead of blocking: an exception costs a hundred times as much as to look."""
        try:
            self._turns.take(self._end, None)
            frame = self._end.try_receive_frame()
            return None if frame is None else self._decoder.decode(frame, self._end.source)
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


class AsyncMessageSender(_Sending, _InLoop):
    """The sending end in an event loop. The semantics are the MessageSender's."""

    _end: AsyncSender

    def __init__(self, end: AsyncSender, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._end = end

    async def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        """Sends one message as it is now; waits for room without holding the loop up. Raises as MessageSender.send."""
        if self._end.is_busy:
            message = owned(message)
        attempt = _Attempt(self, message)
        try:
            await self._end.send_by(attempt, timeout)
        except BaseException:
            attempt.abandon()
            raise

    def send_nowait(self, message: msgspec.Struct) -> None:
        """The same, but raises WouldBlock instead of waiting."""
        if self._end.is_busy:
            self._end.would_block()
        attempt = _Attempt(self, message)
        try:
            if not attempt.is_sent():
                self._end.would_block()
        except BaseException:
            attempt.abandon()
            raise


class _Attempt:
    """One message, and what must be sent before it: called until it says that all is sent."""

    def __init__(self, by: AsyncMessageSender, message: msgspec.Struct) -> None:
        self._by = by
        self._message = message
        self._is_begun = self._is_ours = False
        self._before: list[msgspec.Struct] = []
        self._frame: Buffer | list[Buffer] | None = None  # of the first of them that is not sent

    def __call__(self) -> bool:
        if self.is_sent():
            return True
        self._keep()
        return False

    def is_sent(self) -> bool:
        """Sends what there is room for. Whether that was all of it."""
        by = self._by
        self._is_begun = True
        while True:
            if by._owes_greeting and self._frame is None:
                self._before = list(by._greetings())
                by._owes_greeting = False
            if self._frame is None:
                self._frame = by._encoder.encode(self._before[0] if self._before else self._message)
            admissions = by._end.try_send_if(self._frame, by._admissions)
            if admissions is None:
                return False
            if admissions == by._admissions:
                by._encoder.sent()
                self._frame = None
                if not self._before:
                    return True
                self._before.pop(0)
                continue
            by._overtaken(admissions)
            self._frame = None if by._owes_greeting else by._encoder.again()

    def abandon(self) -> None:
        """It is not sent after all. A greeting of which something is left is owed again, whole."""
        if self._is_begun:  # else another one has its turn
            self._by._owes_greeting |= bool(self._before)
            self._by._encoder.let_go()

    def _keep(self) -> None:
        """The caller goes on while we wait: what it gave us must not change under us."""
        self._frame = self._by._encoder.held()
        if not self._is_ours:
            self._message = owned(self._message)
            self._is_ours = True


class AsyncMessageReceiver(_InLoop):
    """The receiving end in an event loop. The semantics are the MessageReceiver's."""

    _end: AsyncReceiver

    def __init__(self, end: AsyncReceiver, catalogue: Catalogue) -> None:
        self._end = end
        self._decoder = FrameDecoder(catalogue)

    # From the moment at which a frame is there until it is decoded the loop does not run: messages of one sender are
    # decoded in the order in which they came, whichever task waits for them.
    async def receive(self, timeout: float | None = None) -> Any:
        return self._decoder.decode(await self._end.receive_frame(timeout), self._end.source)

    async def receive_view(self, timeout: float | None = None) -> Any:
        return self._decoder.decode(await self._end.receive_view(timeout), self._end.source)

    def receive_nowait(self) -> Any:
        return self._decoder.decode(self._end.receive_frame_nowait(), self._end.source)

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
