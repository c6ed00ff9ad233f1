"""Changes in sequence: each carries leader and number, and a receiver raises OutOfStep for any but the next change.

A change is valid only on top of exactly the state before. A message with the whole state begins a sequence, also after
an interrupt that left open whether a change was sent. The state decides what a change means, and the channel how
messages travel.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Protocol

import msgspec

from penstock.errors import OutOfStep


class Sequenced(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A change, or the whole state. A subclass adds the content."""

    leader: int
    number: Annotated[int, msgspec.Meta(ge=0)]  # of this change, or of the last change in the whole state


class Sends(Protocol):
    def send(self, message: Any, timeout: float | None = None) -> object: ...


class SequenceSender:
    """The leader's side. Raises ValueError for a message that does not come next, and sends nothing then."""

    def __init__(self, sender: Sends, leader: int | None = None) -> None:
        """`leader` distinguishes this leader from the leader before. Default: random; 32 bits take five bytes."""
        self.leader = secrets.randbits(32) if leader is None else leader
        self.number = 0  # of the last change
        self.is_whole_due = True
        self._sender = sender

    @property
    def next_number(self) -> int:
        return self.number + 1

    def send_whole(self, whole: Sequenced, timeout: float | None = None) -> None:
        self._require(whole, self.number)
        self._sender.send(whole, timeout)
        self.is_whole_due = False

    def send(self, change: Sequenced, timeout: float | None = None) -> None:
        """Sends the next change. An error means that it has not been sent.

        An interrupt (KeyboardInterrupt) can come when the change may have been sent: then the whole state is due.
        """
        if self.is_whole_due:
            raise ValueError(f"expected the whole state first, got change {change.number}")
        self._require(change, self.number + 1)
        self.is_whole_due = True  # until it is known whether the change has been sent
        try:
            self._sender.send(change, timeout)
        except Exception:
            self.is_whole_due = False
            raise
        self.number = change.number
        self.is_whole_due = False

    def _require(self, message: Sequenced, number: int) -> None:
        if (message.leader, message.number) != (self.leader, number):
            raise ValueError(
                f"expected number {number} of leader {self.leader:08x}, got {message.number} of {message.leader:08x}"
            )


class SequenceCheck:
    """A receiver's side. After OutOfStep only the whole state brings it back: `begin`."""

    def __init__(self) -> None:
        self._expected: tuple[int, int] | None = None  # leader and number of the next change

    def begin(self, whole: Sequenced) -> None:
        """Sets the receiver's state to the whole state."""
        self._expected = whole.leader, whole.number + 1

    def check(self, change: Sequenced) -> None:
        """Raises OutOfStep unless `change` is the next."""
        expected = self._expected
        if expected != (change.leader, change.number):
            self._expected = None
            raise OutOfStep(expected, (change.leader, change.number))
        self._expected = change.leader, change.number + 1
