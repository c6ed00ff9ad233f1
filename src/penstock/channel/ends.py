"""The ends of a channel, as their users see them. What a channel carries decides which class an end is of.

The ends of bytes are native objects. Those of messages and of buffers are made of them in codec/ends.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    S = TypeVar("S", contravariant=True, default=Any)
    R = TypeVar("R", covariant=True, default=Any)
else:
    from typing import TypeVar

    S = TypeVar("S", contravariant=True)
    R = TypeVar("R", covariant=True)


class _AnyEnd(Protocol):
    @property
    def index(self) -> int:
        """The place of this end among the channel's senders, or receivers."""

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...


class Sender(_AnyEnd, Protocol[S]):
    """The sending end of a channel: `channel.open_sender()`. Threads may share it.

    Examples:
        >>> ring = Ring()
        >>> with ring.open_sender() as sender, ring.open_receiver() as receiver:
        ...     sender.send(b"step")
        ...     receiver.receive()
        b'step'
    """

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

    def close(self) -> None:
        """Ends this sender's part of the channel: receivers read what it has sent, then get EndOfChannel."""

    def fail(self, error: BaseException) -> None:
        """Ends this sender's part of the channel by an error: receivers read what it has sent, then get PeerDied with
        the error's class and text. An exception that leaves the `with` block does the same.

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

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> None: ...


class Receiver(_AnyEnd, Protocol[R]):
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

    def close(self) -> None:
        """Leaves the channel: senders no longer wait for this receiver."""

    def fail(self, error: BaseException) -> None:
        """Leaves the channel by an error: senders get PeerDied with the error's class and text. An exception that
        leaves the `with` block or a loop over this receiver does the same.

        Args:
            error: as for `Sender.fail`.

        Examples:
            >>> ring = Ring()
            >>> ring.open_receiver().fail(RuntimeError("no such layer"))
            >>> ring.open_sender().send(b"step")
            Traceback (most recent call last):
                ...
            penstock.errors.PeerDied: receiver 0 of 'ring', ... died: RuntimeError: no such layer
        """

    def __iter__(self) -> Self: ...

    def __next__(self) -> R: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> None: ...


class AsyncSender(_AnyEnd, Protocol[S]):
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

    async def send(self, message: S, timeout: float | None = None) -> None:
        """Sends one message, as it is now. Args and Raises are those of `Sender.send`."""

    def send_nowait(self, message: S) -> None:
        """Sends one message if there is room now. Args and Raises are those of `Sender.send_nowait`."""

    def close(self) -> None:
        """Ends this sender's part of the channel. A task that waits in it gets ClosedError."""

    def fail(self, error: BaseException) -> None:
        """Ends this sender's part of the channel by an error. Args and Raises are those of
        `Sender.fail`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: Any) -> None: ...


class AsyncReceiver(_AnyEnd, Protocol[R]):
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

    async def receive(self, timeout: float | None = None) -> R:
        """Returns the next message. Args and Raises are those of `Receiver.receive`."""

    def receive_nowait(self) -> R:
        """Returns the next message if there is one now. Raises what `Receiver.receive_nowait` does."""

    @property
    def source(self) -> int:
        """The index of the sender of the message that was received last."""

    def close(self) -> None:
        """Leaves the channel. A task that waits in it gets ClosedError."""

    def fail(self, error: BaseException) -> None:
        """Leaves the channel by an error. Args and Raises are those of `Receiver.fail`."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> R: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: Any) -> None: ...
