"""The errors, each named after its cause. All derive from PenstockError; this module imports nothing of penstock."""

from __future__ import annotations

import signal


class PenstockError(Exception):
    """The base of all errors of this package.

    Examples:
        >>> try:
        ...     Store(1 << 20).get(bytes(32))
        ... except PenstockError as error:
        ...     type(error).__name__
        'Missing'
    """


class ChannelError(PenstockError):
    """The base of errors of a channel, as against those of its messages.

    Examples:
        >>> issubclass(ClosedError, ChannelError), issubclass(DecodeError, ChannelError)
        (True, False)
    """


class ClosedError(ChannelError, RuntimeError):
    """This process has closed the end, or the end belongs to the process before a fork().

    Examples:
        >>> sender = Ring().open_sender()
        >>> sender.close()
        >>> sender.send(b"step")
        Traceback (most recent call last):
            ...
        penstock.errors.ClosedError: ...
    """


class EndOfChannel(ChannelError):
    """All ends at the other side were closed; for the receiver of an inbox, each of its `senders` was opened, and has
    closed or died. Ends a `for` loop.

    Examples:
        >>> ring = Ring()
        >>> ring.open_sender().close()
        >>> ring.open_receiver().receive()
        Traceback (most recent call last):
            ...
        penstock.errors.EndOfChannel: ...
    """


class WouldBlock(ChannelError):
    """Only from the *_nowait calls: there is no record, or no room, now.

    Examples:
        >>> Ring().open_receiver().receive_nowait()
        Traceback (most recent call last):
            ...
        penstock.errors.WouldBlock: no record now in 'ring'
    """


class CorruptRecord(ChannelError):
    """The ring holds no record where one must be: a process has overwritten it.

    Examples:
        >>> issubclass(CorruptRecord, ChannelError)
        True
    """


class Timeout(PenstockError, TimeoutError):
    """The deadline passed. The text names the record or room that was awaited, the peer, and when it was last seen.

    Examples:
        >>> Ring().open_receiver().receive(timeout=0.01)
        Traceback (most recent call last):
            ...
        penstock.errors.Timeout: ...
    """

    receiver: int | None = None
    pid: int | None = None
    records_behind: int | None = None
    nbytes_behind: int | None = None
    ns_behind: int | None = None


class DeathCause:
    """Why a process, or an end of a channel, has ended without closing.

    An exception is known by its class and its text, as the end writes them before the process ends. The status or the
    signal of a process is known if the process is a child, until another process reaps it, and from Linux 6.15 on.

    Args:
        text: "RuntimeError: no such layer", "exit status 3", "killed by SIGKILL", "how is not known" and others.

    Examples:
        >>> cause = DeathCause("killed by SIGKILL")
        >>> str(cause), cause.signal, cause.status, cause.exception
        ('killed by SIGKILL', 9, None, None)
        >>> DeathCause("RuntimeError: no such layer").exception
        'RuntimeError'
        >>> DeathCause.of_exit_code(-15), DeathCause.of_exit_code(3).status
        (DeathCause('killed by SIGTERM'), 3)
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def of_exit_code(cls, code: int) -> DeathCause:
        """Of a process of `subprocess` or `multiprocessing`.

        Args:
            code: its `returncode` or `exitcode`; a negative one is that of a signal.

        Examples:
            >>> DeathCause.of_exit_code(-9)
            DeathCause('killed by SIGKILL')
        """
        if code >= 0:
            return cls("exited with status 0" if code == 0 else f"exit status {code}")
        try:
            return cls(f"killed by {signal.Signals(-code).name}")
        except ValueError:
            return cls(f"killed by signal {-code}")

    @property
    def signal(self) -> int | None:
        """The signal that killed the process."""
        name = self.text.removeprefix("killed by ").partition(",")[0]
        is_signal = name != self.text and name in signal.Signals.__members__
        return int(signal.Signals[name]) if is_signal else None

    @property
    def status(self) -> int | None:
        """The exit status of the process."""
        for words in ("exit status ", "exited with status "):
            number = self.text.removeprefix(words).partition(" ")[0]
            if self.text.startswith(words) and number.isdigit():
                return int(number)
        return None

    @property
    def exception(self) -> str | None:
        """The name of the exception's class."""
        name = self.text.partition(":")[0]
        return name if name.replace(".", "").replace("<locals>", "").isidentifier() else None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"DeathCause({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeathCause) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


class PeerDied(PenstockError):
    """The other end of the channel was not closed: its process died, or an exception left its `with` block or its loop.
    The memory that a dead process held has been freed.

    `index` is its place among the channel's senders or receivers. `name` is "?" if another process has its place among
    the peers by now.

    Examples:
        >>> ring = Ring()
        >>> receiver = ring.open_receiver()
        >>> with contextlib.suppress(RuntimeError), ring.open_sender() as sender:
        ...     raise RuntimeError("no such layer")
        >>> try:
        ...     receiver.receive()
        ... except PeerDied as death:
        ...     death.index, death.how, death.cause.exception
        (0, 'RuntimeError: no such layer', 'RuntimeError')
    """

    index: int = 0
    name: str = ""
    pid: int = 0
    how: str = ""
    held: str = ""

    @property
    def cause(self) -> DeathCause:
        """`how` as an object: class of an exception, exit status, or signal."""
        return DeathCause(self.how)


class MemoryExhausted(PenstockError, MemoryError):
    """There is less memory than was asked for: the numbers say how much is free, and which peers hold the rest.

    Examples:
        >>> store = Store(1 << 20)
        >>> lease = store.put(np.zeros(100_000))
        >>> store.put(np.zeros(100_000), timeout=0)
        Traceback (most recent call last):
            ...
        penstock.errors.MemoryExhausted: ...
    """

    requested: int = 0
    free: int = 0
    largest: int = 0
    holders: str = ""


class StaleRef(PenstockError):
    """A reference to a block that was freed, or that was not meant for this process.

    Examples:
        >>> pool = Pool.create(1 << 20)
        >>> with pool.take(100) as lease:
        ...     ref = pool.share(lease)
        >>> pool.open(ref)
        Traceback (most recent call last):
            ...
        penstock.errors.StaleRef: ...
    """

    expected: int = 0
    actual: int = 0


class Missing(PenstockError, KeyError):
    """There is no value under this key, or of this handle: it was never put, is still being written, was evicted, or
    had no key and was released. Put it again.

    Examples:
        >>> Store(1 << 20).get(bytes(32))
        Traceback (most recent call last):
            ...
        penstock.errors.Missing: 'store' keeps nothing under 0000000000000000…
    """

    __str__ = Exception.__str__  # KeyError's own would quote the sentence


class LayoutMismatch(PenstockError):
    """The segment to attach to is not of this build's layout, or is gone, or carries something else.

    Examples:
        >>> attach("penstock:1:2:3:4:5")
        Traceback (most recent call last):
            ...
        penstock.errors.LayoutMismatch: ...
    """


class DecodeError(PenstockError, ValueError):
    """A message that does not have the agreed type, with the path of the wrong field.

    `kind` is the class that it was sent as, and `fields` has its numbers and texts, unchecked, with None in place of
    other values, so that an answer can go to its sender. If they cannot be read, `kind` is None and `fields` is empty.

    Examples:
        >>> class Step(msgspec.Struct, array_like=True):
        ...     number: int
        >>> ring = Ring(Step)
        >>> ring.open_sender().send(Step("seven"))
        >>> ring.open_receiver().receive()
        Traceback (most recent call last):
            ...
        penstock.errors.DecodeError: ...
    """

    kind: type | None = None
    fields: tuple[object, ...] = ()


class UnsupportedTensor(PenstockError, TypeError):
    """An object that cannot be sent as a tensor, or not as it is; the text says what to do instead.

    Examples:
        >>> Scope().put({"words": np.array(["a", "b"])})
        Traceback (most recent call last):
            ...
        penstock.errors.UnsupportedTensor: ...
    """


class OutOfStep(PenstockError):
    """A change does not follow the last one that was received: one was missed or repeated, or has another leader.

    `expected` and `found` are leader and number; `expected` is None before the whole state, which comes first.

    Examples:
        >>> raise OutOfStep((7, 2), (7, 4))
        Traceback (most recent call last):
            ...
        penstock.errors.OutOfStep: expected change 2 of leader 00000007, got change 4 of leader 00000007
    """

    def __init__(self, expected: tuple[int, int] | None, actual: tuple[int, int]) -> None:
        expectation = "the whole state" if expected is None else f"change {expected[1]} of leader {expected[0]:08x}"
        super().__init__(f"expected {expectation}, got change {actual[1]} of leader {actual[0]:08x}")
        self.expected = expected
        self.actual = actual

    def __reduce__(self) -> tuple[object, ...]:
        return OutOfStep, (self.expected, self.actual)
