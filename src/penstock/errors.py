"""What can go wrong, by whose doing it was. Everything derives from PenstockError; this module imports nothing."""

from __future__ import annotations


class PenstockError(Exception):
    """The base of all errors of this package."""


class ChannelError(PenstockError):
    """Something about a channel, not about what it carries."""


class ClosedError(ChannelError, RuntimeError):
    """You closed this end, or it belongs to the process before a fork()."""


class EndOfChannel(ChannelError):
    """They closed theirs, in peace. Ends a `for` loop."""


class WouldBlock(ChannelError):
    """Only from the *_nowait calls: there is no record, or no room, now."""


class CorruptRecord(ChannelError):
    """The ring does not hold a record where one must be: somebody wrote where it must not."""


class Timeout(PenstockError, TimeoutError):
    """The deadline passed. The text says what was awaited, of whom, and when that peer was last seen."""

    receiver: int | None = None
    pid: int | None = None
    records_behind: int | None = None
    nbytes_behind: int | None = None
    ns_behind: int | None = None


class PeerDied(PenstockError):
    """A process at the other end is gone without having closed. What it held has been given back.

    `index` is which of the channel's senders or receivers it was. `name` is "?" if somebody else has its place among
    the peers by now.
    """

    index: int = 0
    name: str = ""
    pid: int = 0
    how: str = ""
    held: str = ""


class MemoryExhausted(PenstockError, MemoryError):
    """There is not as much memory as was asked for: the numbers say how much there is, and who holds the rest."""

    asked: int = 0
    free: int = 0
    largest: int = 0
    holders: str = ""


class StaleRef(PenstockError):
    """A reference to a block that is gone, or that was never ours."""

    expected: int = 0
    found: int = 0


class Missing(PenstockError, KeyError):
    """Nothing is kept under this key: it never was, or its room was wanted. Put it again."""

    __str__ = Exception.__str__  # KeyError's own would quote the sentence


class LayoutMismatch(PenstockError):
    """What was attached to is not a segment of this build, or is gone."""


class DecodeError(PenstockError, ValueError):
    """A message that is not what it should be, with the path to where it is not.

    `kind` is the class that it was sent as, and `fields` the numbers and texts in it, unchecked, with None in place of
    others: whoever must answer somebody may find there whom. Where not even that can be read, None and nothing.
    """

    kind: type | None = None
    fields: tuple[object, ...] = ()


class OutOfStep(PenstockError):
    """A change does not follow the last one that was received: one was missed or repeated, or has another leader.

    `expected` and `found` are leader and number; `expected` is None before the whole state, which comes first.
    """

    def __init__(self, expected: tuple[int, int] | None, found: tuple[int, int]) -> None:
        wanted = "the whole state" if expected is None else f"change {expected[1]} of leader {expected[0]:08x}"
        super().__init__(f"expected {wanted}, got change {found[1]} of leader {found[0]:08x}")
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[object, ...]:
        return OutOfStep, (self.expected, self.found)
