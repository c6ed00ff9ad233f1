"""Ends of a channel for a process that forwards records unchanged: without encoding, decoding or waiting.

A process that forwards several channels sleeps in `epoll` or `select` on the descriptors of their ends. The native core
lets peers write into the descriptors, and the process decides when to poll: see channel/aio.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.channel.ends import BlockingEnd
from penstock.errors import Timeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from penstock.channel.channel import Channel


class _FrameEnd(BlockingEnd):
    """An end, and the pipe by which it is woken."""

    def __init__(self, channel: Channel[Any], name: str) -> None:
        self._attachment = channel._join(name)  # keeps the pipe open
        self._bell = self._attachment.bell_fd()  # before the end is claimed, which could not be opened a second time

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when an armed end may go on, and sometimes when it may not. What
        is read from it means nothing; it does not block."""
        return self._bell

    def arm(self) -> bool:
        """Asks to be woken by the descriptor. Returns True if there is no need to wait: try again now."""
        return self._end.arm()

    @property
    def is_locked_out(self) -> bool:
        """Whether the last attempt found a lock held by a stopped process, which wakes nothing: try again later."""
        return self._end.is_locked_out

    def disarm(self) -> None:
        """Ends what `arm` asked for: peers no longer write into the descriptor."""
        self._end.disarm(False)


class FrameReceiver(_FrameEnd):
    """A receiver of any channel, for its frames as they are: a process that forwards them needs no class of a message.

    Args:
        channel: a Ring, Broadcast or Inbox.
        index: which of the channel's receivers; None for the first that is free.
        name: of this process, in errors and in `penstock inspect`.

    Raises:
        ValueError, MemoryExhausted: as `open_receiver`.

    Examples:
        >>> ring = Ring()
        >>> with ring.open_sender() as sender, FrameReceiver(ring, name="bridge") as receiver:
        ...     sender.send(b"step")
        ...     receiver.try_receive(), receiver.try_receive()
        (b'step', None)
    """

    _end: _native.Receiver

    def __init__(self, channel: Channel[Any], index: int | None = None, *, name: str = "") -> None:
        super().__init__(channel, name)
        self._end = channel._receiver(index, self._attachment)
        self._has_waited = False
        self._is_woken = False  # the wait is over, which peers have not been told

    def arm(self) -> bool:
        self._end_wait()
        self._has_waited = True
        return self._end.arm()

    def _end_wait(self) -> None:
        if self._is_woken:
            self._has_waited = self._is_woken = False
            self._end.disarm(True)

    def disarm(self) -> None:
        self._end_wait()
        super().disarm()

    def try_receive(self) -> bytes | _native.BlockLease | None:
        """Returns the next frame: a short one copied, a long one where it lies; None: there is none now. After a wait
        the bell may ring until the next call: the first frame is not held up by the end of the wait.

        Raises:
            PeerDied, EndOfChannel, ClosedError: as `Receiver.receive`.
        """
        if self._is_woken:
            self._end_wait()
        frame = self._end.try_receive_frame()
        self._is_woken = self._has_waited and frame is not None
        return frame

    @property
    def source(self) -> int:
        """The index of the sender of the frame that was received last."""
        return self._end.source


class FrameSender(_FrameEnd):
    """A sender of any channel, for frames as another process has encoded them.

    Args:
        channel: a Ring, Broadcast or Inbox. Its receivers check each frame, as always.
        index: which of the channel's senders; None for the first that is free.
        name: of this process, in errors and in `penstock inspect`.

    Raises:
        ValueError, MemoryExhausted: as `open_sender`.

    Examples:
        >>> ring = Ring()
        >>> with FrameSender(ring, name="bridge") as sender:
        ...     sender.try_send(b"step")
        True
        >>> ring.open_receiver().receive()
        b'step'
    """

    _end: _native.Sender

    def __init__(self, channel: Channel[Any], index: int | None = None, *, name: str = "") -> None:
        super().__init__(channel, name)
        self._end = channel._sender(index, self._attachment)
        self._has_waited = False
        self.max_nbytes = channel._segment.pool_nbytes  # of a frame

    def arm(self) -> bool:
        self._has_waited = True
        return self._end.arm()

    def try_send(self, frame: Buffer | Sequence[Buffer]) -> bool:
        """Sends one frame. Returns False if there is no room now.

        Raises:
            PeerDied, EndOfChannel, ClosedError, MemoryExhausted: as `Sender.send`.
        """
        is_sent = self._end.try_send(frame)
        if is_sent and self._has_waited:
            self._has_waited = False
            self._end.disarm(True)
        return is_sent

    def try_reserve(self, nbytes: int) -> _native.Reservation | None:
        """Returns room for one frame, to be filled in place and committed; None: there is none now.

        Raises:
            PeerDied, EndOfChannel, ClosedError, MemoryExhausted: as `Sender.send`.
        """
        try:
            return self._end.reserve(nbytes, 0)
        except Timeout:
            return None
