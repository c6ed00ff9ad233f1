"""The ends of a channel: a native end, which takes and gives records, and the codec of the channel's messages.

On a channel of bytes the native end itself is the end. Leaves to the native core everything that happens to a record.
"""

from __future__ import annotations

from abc import ABCMeta
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, Generic

from penstock import _native
from penstock.errors import EndOfChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self, TypeVar

    from penstock.codec.codecs import Codec

    S = TypeVar("S", contravariant=True, default=Any)
    R = TypeVar("R", covariant=True, default=Any)
else:
    from typing import TypeVar

    S = TypeVar("S", contravariant=True)
    R = TypeVar("R", covariant=True)


def format_repr(item: object, name: str, codec: Codec | None, is_closed: bool) -> str:
    """Returns the repr of an end or a channel."""
    parts = [name, *([] if codec is None else [str(codec)]), *(["closed"] if is_closed else [])]
    return f"{type(item).__name__}({', '.join(parts)})"


class AnyEnd:
    """What the ends of all kinds share. A subclass sets `_end`."""

    _end: _native.Sender | _native.Receiver
    _codec: Codec | None = None  # None: frames, as they are

    @property
    def index(self) -> int:
        """The index of this end among the channel's senders, or receivers."""
        return self._end.index

    @property
    def is_closed(self) -> bool:
        return self._end.is_closed

    def close(self) -> None:
        """Closes this end. Receivers read what a sender has sent, then get EndOfChannel; senders no longer wait for a
        receiver that has closed."""
        self._end.close()

    def fail(self, error: BaseException) -> None:
        """Closes this end by an error: the other side gets PeerDied with the error's class and text, receivers after
        what has been sent. An exception that leaves the `with` block, or a loop over a receiver, does the same.

        Args:
            error: its text may have 200 bytes, and what is longer is cut off.

        Examples:
            >>> ring = Ring()
            >>> ring.open_sender().fail(RuntimeError("no such layer"))
            >>> ring.open_receiver().receive()
            Traceback (most recent call last):
                ...
            penstock.errors.PeerDied: sender 0 of 'ring', ... died: RuntimeError: no such layer
        """
        self._end.fail(error)

    def __repr__(self) -> str:
        return format_repr(self, f"{self.index} of '{self._end.name}'", self._codec, self.is_closed)


class BlockingEnd(AnyEnd):
    """An end that its `with` block closes, by an error if the block raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.__exit__(kind, error, trace)


# ABCMeta, so that the native ends can be registered: they are the ends of bytes, and the same in every method. A Python
# method around the native method would make a call 1.3 times as long, and a ping-pong of 100 bytes 1.06 times.
class Sender(BlockingEnd, Generic[S], metaclass=ABCMeta):
    """The sending end of a channel: `channel.open_sender()`. Threads may share it.

    Examples:
        >>> ring = Ring()
        >>> with ring.open_sender() as sender, ring.open_receiver() as receiver:
        ...     sender.send(b"step")
        ...     receiver.receive()
        b'step'
    """

    _end: _native.Sender
    _codec: Codec

    def __init__(self, end: _native.Sender, codec: Codec) -> None:
        self._end = end
        self._codec = codec

    def send(self, message: S, timeout: float | None = None) -> None:
        """Sends one message, of any size. Blocks while the channel has no room for it. The caller may change what the
        message holds as soon as this returns.

        Args:
            message: of the channel's type; on a channel of bytes or buffers also a list of buffers, sent as one record.
            timeout: seconds to wait for room; None for as long as it takes.

        Raises:
            Timeout: no room in time; the text names the slowest receiver and how far it is behind.
            PeerDied: a receiver's process died. Nothing has been sent: send the message again, for the receivers that
                are left. Raised once for each receiver; without any receiver left, by every call.
            EndOfChannel: all receivers have closed.
            ClosedError: this end is closed.
            MemoryExhausted: the message is larger than the channel's room for long records.
            TypeError: the message is of no class of this channel, one of its fields is an array of another dtype than
                the class says, or it holds an object that cannot be sent. All else, also arrays within lists and other
                structs, is checked where it is received: DecodeError.

        Examples:
            >>> ring = Ring()
            >>> ring.open_sender().send([b"two ", b"parts"])
            >>> ring.open_receiver().receive()
            b'two parts'
        """
        self._end.send(self._codec.encode(message), timeout)

    def send_nowait(self, message: S) -> None:
        """Sends one message if there is room now.

        Args:
            message: as for `send`.

        Raises:
            WouldBlock: no room now, or a stopped process holds a lock of the channel; the text names it.
            PeerDied, EndOfChannel, ClosedError, MemoryExhausted, TypeError: as `send`.

        Examples:
            >>> ring = Ring()
            >>> ring.open_sender().send_nowait(b"step")
            >>> ring.open_receiver().receive()
            b'step'
        """
        self._end.send_nowait(self._codec.encode(message))


class Receiver(BlockingEnd, Generic[R], metaclass=ABCMeta):
    """The receiving end of a channel: `channel.open_receiver()`. Iterating over it ends with the channel, and then
    closes it; `break` does not. Threads may share it: each message goes to one of them.

    Examples:
        >>> ring = Ring()
        >>> with ring.open_sender() as sender:
        ...     sender.send(b"one")
        ...     sender.send(b"two")
        >>> list(ring.open_receiver())
        [b'one', b'two']
    """

    _end: _native.Receiver
    _codec: Codec

    def __init__(self, end: _native.Receiver, codec: Codec) -> None:
        self._end = end
        self._codec = codec
        is_view = codec.record == "view"
        self._receive: Callable[[float | None], Any] = end.receive_view if is_view else end.receive_frame
        self._receive_nowait: Callable[[], Any] = end.receive_view_nowait if is_view else end.receive_frame_nowait
        self._try_receive: Callable[[], Any] = end.try_receive_view if is_view else end.try_receive_frame

    def receive(self, timeout: float | None = None) -> R:
        """Returns the next message. Blocks until there is one.

        The arrays and buffers of a message are read-only. Those of a long message lie in the channel's pool, and hold
        their place in it while they live.

        Args:
            timeout: seconds to wait; None for as long as it takes.

        Raises:
            Timeout: no message in time.
            PeerDied: a sender's process died, and its last message has been received. Raised once for each sender of an
                inbox; in a ring or broadcast by every call, until another process opens the sender.
            EndOfChannel: all senders have ended, and their last messages have been received. In an inbox: each of its
                `senders` has been opened, and has closed or died; a sender that was never opened keeps it from ending.
            DecodeError: the record is not a message of this channel, or a field is not of the type that the class says;
                the text has its path. Later messages are not concerned.
            ClosedError: this end is closed.

        Examples:
            >>> ring = Ring()
            >>> ring.open_sender().send(b"step")
            >>> ring.open_receiver().receive(timeout=1)
            b'step'
        """
        message: R = self._codec.decode(self._receive(timeout))
        return message

    def receive_nowait(self) -> R:
        """Returns the next message if there is one now.

        Raises:
            WouldBlock: there is none now.
            PeerDied, EndOfChannel, DecodeError, ClosedError: as `receive`.

        Examples:
            >>> receiver = Ring().open_receiver()
            >>> receiver.receive_nowait()
            Traceback (most recent call last):
                ...
            penstock.errors.WouldBlock: no record now in 'ring'
        """
        message: R = self._codec.decode(self._receive_nowait())
        return message

    def try_receive(self) -> R | None:
        """Returns the next message if there is one now; None: there is none. A loop that polls saves the error of
        `receive_nowait`, which takes longer than a short message.

        Raises:
            PeerDied, EndOfChannel, DecodeError, ClosedError: as `receive`.

        Examples:
            >>> ring = Ring()
            >>> receiver = ring.open_receiver()
            >>> receiver.try_receive() is None
            True
            >>> ring.open_sender().send(b"step")
            >>> receiver.try_receive()
            b'step'
        """
        record = self._try_receive()
        return None if record is None else self._codec.decode(record)

    @property
    def source(self) -> int:
        """The index of the sender of the message that was received last.

        Examples:
            >>> inbox = Inbox(senders=2)
            >>> inbox.open_sender(1).send(b"from the second")
            >>> receiver = inbox.open_receiver()
            >>> receiver.receive(), receiver.source
            (b'from the second', 1)
        """
        return self._end.source

    def __iter__(self) -> Iterator[R]:
        # Without close(), which `yield from` would call as its generator is abandoned; no message is compared.
        return starmap(self.__next__, repeat(()))

    def __next__(self) -> R:
        try:
            return self.receive()
        except EndOfChannel:
            self._end.exhaust()
            raise StopIteration from None


Sender.register(_native.Sender)
Receiver.register(_native.Receiver)
