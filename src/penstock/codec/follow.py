"""State that several processes keep alike: one leads and tells what changes, the others follow.

A change says how the state differs from the one before it, so it means something only to who has exactly that one.
Each carries who leads and its number. A follower whose next change is another one than it awaits is out of step: it
ignores changes until a picture of the whole state comes. Pictures travel among the changes; who is in step passes over
them. Leaves to the state what a change means, and to the channel how messages travel: `Leader` and `Follower` only
decide, `Leading` and `Following` tie them to the ends of a channel.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from penstock.errors import DecodeError, EndOfChannel

PATIENCE = 64  # messages that a follower passes over before it asks again, or doubts whom it follows
FORMER_LEADERS = 8  # that a follower remembers, to know their last messages when they come late


class Change(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """How the state differs from the one before. A subclass adds what has changed."""

    leader: int
    number: Annotated[int, msgspec.Meta(ge=1)]  # one more than that of the change before


class Picture(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The state as a whole. A subclass adds what it is."""

    leader: int
    number: Annotated[int, msgspec.Meta(ge=0)]  # of the last change in it; 0: there was none yet


class Lost(msgspec.Struct, array_like=True, frozen=True):
    """From a follower to its leader: send a picture, I am out of step."""

    who: str
    leader: int | None  # whom it followed; None: nobody yet
    expected: int | None  # the number that it awaited; None: any picture
    found_leader: int
    found: int
    why: str


ChangeT = TypeVar("ChangeT", bound=Change)
PictureT = TypeVar("PictureT", bound=Picture)
ChangeIn = TypeVar("ChangeIn", bound=Change, contravariant=True)


class State(Protocol[ChangeIn, PictureT]):
    """What is led and followed."""

    def apply(self, change: ChangeIn, /) -> None:
        """Becomes the next state; or raises DecodeError, and stays what it was, where the change does not fit it."""

    def become(self, picture: PictureT, /) -> None:
        """Becomes what the picture shows, whatever it was."""

    def picture(self, leader: int, number: int, /) -> PictureT:
        """Shows itself."""


class Verdict(enum.Enum):
    """What a follower did with a message."""

    APPLIED = "the change is in the state now"
    TAKEN = "the state is now what the picture shows"
    PASSED = "a picture of what the state is already"
    REPEATED = "a change that is in the state already"
    LATE = "older than the state, or from a leader that another has followed"
    LOST = "out of step: tell the leader so (Follower.lost)"
    IGNORED = "still out of step, and the leader has been told"


# ── deciding ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Leader(Generic[ChangeT, PictureT]):
    """The side that changes the state."""

    def __init__(self, state: State[ChangeT, PictureT], identity: int | None = None) -> None:
        """`identity` tells this leader from those before and after it; by default it is drawn.

        32 bits take five bytes in every change. A leader that draws what the one before it drew would also have to
        reach the very number that is awaited, to be taken for it.
        """
        self.state = state
        self.identity = secrets.randbits(32) if identity is None else identity
        self.number = 0  # of the last change
        self._pictured = -1  # what `number` was when a picture was made last

    @property
    def next_number(self) -> int:
        return self.number + 1

    def pictures(self) -> list[PictureT]:
        """What brings everybody into step: to be sent now, before the next change."""
        self._pictured = self.number
        return [self.state.picture(self.identity, self.number)]

    def require_next(self, change: ChangeT) -> None:
        """Raises ValueError where this is not our next change."""
        if change.number != self.number + 1 or change.leader != self.identity:
            raise ValueError(
                f"expected change {self.number + 1} of leader {self.identity:08x}, "
                f"got {change.number} of {change.leader:08x}"
            )

    def sent(self, change: ChangeT) -> None:
        """The change has been sent: it is applied here, by the same code as there.

        Raises DecodeError where it does not fit the state. The followers refuse it too, then, and a picture is due.
        """
        self.require_next(change)
        self.number += 1
        self.state.apply(change)

    def doubt(self, change: ChangeT) -> None:
        """Nobody knows whether the change has been sent. It has not happened here; a picture is due.

        The picture has a later number than the change, so that those who have applied it take the picture, too.
        """
        self.number = change.number + 1

    def must_answer(self, lost: Lost) -> bool:
        """Whether a picture is due: not if one was made after what this follower stumbled over."""
        return lost.found_leader != self.identity or lost.found > self._pictured


class Follower(Generic[ChangeT, PictureT]):
    """A side that keeps the state alike. It begins out of step: a picture comes first.

    While `is_in_step` is false the state is not to be used: it is old, or an error has left it half changed.
    """

    def __init__(self, state: State[ChangeT, PictureT], name: str = "", patience: int = PATIENCE) -> None:
        self.state = state
        self.name = name
        self.is_in_step = False
        self.lost: Lost | None = None  # what the leader must be told; None: we are in step, or nothing came yet
        self.ignored = 0  # changes, in all
        self.losses = 0  # how often we fell out of step
        self._patience = patience
        self._leader: int | None = None
        self._next = 0  # number of the change that is awaited
        self._former: deque[int] = deque(maxlen=FORMER_LEADERS)
        self._passed_over = 0  # messages too old for us, in a row
        self._unanswered = 0  # changes since the leader was told
        self._seen: tuple[int, int] | None = None  # leader and number of the last change, while out of step

    @property
    def leader(self) -> int | None:
        """Whose changes these are."""
        return self._leader

    @property
    def number(self) -> int:
        """Of the last change in the state."""
        return self._next - 1

    def take(self, message: Change | Picture) -> Verdict:
        """Takes what came next.

        LOST comes once, and again after every `patience` changes that were ignored. A change or picture that the state
        refuses (DecodeError) makes us lost; any other error of the state goes through, and we are lost as well.
        """
        if isinstance(message, Picture):
            return self._look(message)
        if not self.is_in_step or message.number != self._next or message.leader != self._leader:
            return self._refuse(message)
        self.is_in_step = False  # until it is done
        try:
            self.state.apply(message)  # type: ignore[arg-type]
        except BaseException as error:
            self.losses += 1
            self._seen = (message.leader, message.number)
            return self._failed(message, error)
        self.is_in_step = True
        self._next += 1
        self._passed_over = 0
        return Verdict.APPLIED

    def _look(self, picture: Picture) -> Verdict:
        leader, number = picture.leader, picture.number
        if leader == self._leader:
            if self.is_in_step and number == self.number:
                self._passed_over = 0
                return Verdict.PASSED
            if number < self.number:
                return self._pass_over(picture, Verdict.LATE)
        elif leader in self._former:
            return self._pass_over(picture, Verdict.LATE)
        if not self.is_in_step and self._seen is not None and self._seen[0] == leader and number < self._seen[1]:
            return self._pass_over(picture, Verdict.LATE)  # the next change would find us out of step again
        self.losses += self.is_in_step
        self.is_in_step = False  # until it is done
        try:
            self.state.become(picture)  # type: ignore[arg-type]
        except BaseException as error:
            return self._failed(picture, error)
        if self._leader is not None and self._leader != leader:
            self._former.append(self._leader)
        self._leader, self._next = leader, number + 1
        self.is_in_step, self.lost, self._seen = True, None, None
        self._passed_over = 0
        return Verdict.TAKEN

    def _refuse(self, change: Change) -> Verdict:
        """A change that is not the next one, or that finds us out of step."""
        if change.leader in self._former:
            return self._pass_over(change, Verdict.LATE)
        if self.is_in_step:
            if change.leader == self._leader and change.number < self._next:
                return self._pass_over(change, Verdict.REPEATED)
            self.losses += 1
            self.is_in_step = False
        self.ignored += 1
        self._seen = (change.leader, change.number)
        self._unanswered += 1
        if self.lost is not None and self._unanswered < self._patience:
            return Verdict.IGNORED
        awaited = "a picture"
        if self._leader is not None:
            awaited = f"change {self._next} of leader {self._leader:08x}"
        return self._tell(change, f"expected {awaited}, got change {change.number} of leader {change.leader:08x}")

    def _pass_over(self, message: Change | Picture, verdict: Verdict) -> Verdict:
        """Too old for us. But if nothing else comes any more it is we who are wrong, and any picture is welcome."""
        self._passed_over += 1
        if self._passed_over < self._patience:
            return verdict
        self.losses += self.is_in_step
        self.is_in_step = False
        verdict = self._tell(message, f"{self._patience} messages in a row were older than the state")
        self._leader, self._next, self._seen, self._passed_over = None, 0, None, 0
        self._former.clear()
        return verdict

    def _failed(self, message: Change | Picture, error: BaseException) -> Verdict:
        """The state raised: it is what it was, or half changed."""
        verdict = self._tell(message, f"{type(error).__name__}: {error}")
        if isinstance(error, DecodeError):
            return verdict
        raise error

    def _tell(self, message: Change | Picture, why: str) -> Verdict:
        self._unanswered = 0
        expected = None if self._leader is None else self._next
        self.lost = Lost(self.name, self._leader, expected, message.leader, message.number, why)
        return Verdict.LOST


# ── at the ends of a channel ─────────────────────────────────────────────────────────────────────────────────────────
class Sends(Protocol):
    """What `Leading` needs of a sender."""

    def send(self, message: Any, timeout: float | None = None) -> None: ...

    def greet(self, greeting: Callable[[], Iterable[msgspec.Struct]]) -> None: ...


class Receives(Protocol):
    """What `Following` needs of a receiver."""

    def receive(self, timeout: float | None = None) -> Any: ...


class Leading(Generic[ChangeT, PictureT]):
    """A leader at the sending end of a broadcast. Whoever comes late gets a picture before the next change."""

    def __init__(self, sender: Sends, leader: Leader[ChangeT, PictureT]) -> None:
        self.leader = leader
        self._sender = sender
        sender.greet(leader.pictures)

    def send(self, change: ChangeT, timeout: float | None = None) -> None:
        """Sends the change, and applies it. What could not be sent has not happened: the state stays what it was.

        So it does when an interrupt comes so late that the change may have been sent: `leader.next_number` is another
        one then, and a picture goes out before the next change.
        """
        self.leader.require_next(change)
        is_sent = False
        try:
            self._sender.send(change, timeout)
            is_sent = True
            self.leader.sent(change)
        except Exception:
            if is_sent:
                self._sender.greet(self.leader.pictures)
            raise
        except BaseException:
            self.leader.doubt(change)
            self._sender.greet(self.leader.pictures)
            raise

    def hear(self, lost: Lost) -> None:
        """A follower is out of step: a picture goes out before the next change, unless one is on its way already."""
        if self.leader.must_answer(lost):
            self._sender.greet(self.leader.pictures)


class Following(Generic[ChangeT, PictureT]):
    """A follower at the receiving end of a broadcast. `ask` takes a `Lost` to the leader, by whatever way there is."""

    def __init__(
        self, receiver: Receives, follower: Follower[ChangeT, PictureT], ask: Callable[[Lost], object]
    ) -> None:
        self.follower = follower
        self._receiver = receiver
        self._ask = ask

    def receive(self, timeout: float | None = None) -> Any:
        """The next change, applied; or the next message that is neither a change nor a picture.

        Raises as the receiver does. After a DecodeError go on: that a change is missing is found out at the next one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._receiver.receive(timeout)
            if not isinstance(message, (Change, Picture)):
                return message
            verdict = self.follower.take(message)
            if verdict is Verdict.APPLIED:
                return message
            if verdict is Verdict.LOST and self.follower.lost is not None:
                self._ask(self.follower.lost)
            if deadline is not None:
                timeout = max(0.0, deadline - time.monotonic())

    def __iter__(self) -> Following[ChangeT, PictureT]:
        return self

    def __next__(self) -> Any:
        try:
            return self.receive()
        except EndOfChannel:
            raise StopIteration from None
