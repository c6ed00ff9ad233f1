"""Changes in sequence: each carries its leader and its number, and a receiver that finds another one raises OutOfStep.

A change says how a state differs from the one before it, so it is valid only on top of exactly that state. A message
with the whole state begins a sequence, and begins it anew wherever an interrupt left open whether a change was sent.
Leaves to the state what a change means, and to the channel how messages travel.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Protocol

import msgspec

from penstock.errors import OutOfStep


class Sequenced(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A change, or the whole state. A subclass adds what it says."""

    leader: int
    number: Annotated[int, msgspec.Meta(ge=0)]  # of this change, or of the last change in the whole state


class Sends(Protocol):
    def send(self, message: Any, timeout: float | None = None) -> object: ...


class SequenceSender:
    """The leader's side. Raises ValueError for a message that does not come next, and sends nothing then."""

    def __init__(self, sender: Sends, leader: int | None = None) -> None:
        """`leader` tells this leader from the one before it; by default it is drawn: 32 bits take five bytes."""
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
        """The receiver's state is now this one, whatever it was."""
        self._expected = whole.leader, whole.number + 1

    def check(self, change: Sequenced) -> None:
        """Raises OutOfStep unless this is the next change; it is to be applied otherwise."""
        expected = self._expected
        if expected != (change.leader, change.number):
            self._expected = None
            raise OutOfStep(expected, (change.leader, change.number))
        self._expected = change.leader, change.number + 1
