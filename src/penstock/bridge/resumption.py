"""How a link goes on over a new connection, when its connection is lost and both processes live.

    connector                                    listener
    its link drops the lost connection
    ResumeOffer: session, bytes received  ──►
                                                 its link drops the old connection, which it may not know to be lost
                                          ◄──    ResumeOffer: session, bytes received
    Introduction: verdict                 ──►
    both sides send again what the other one has not received

A session is one link of two processes. Its name comes from the key of the first handshake, so only these processes know
the name. A side counts the bytes of whole packets; a packet received in part is sent again. No side reads the old
connection after sending the count, so no packet is taken twice. Leaves sockets to the listener.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.bridge.link_errors import BridgeRefused
from penstock.bridge.wire import PlainWire, TlsWire

ENDED_S = 0.3  # to wait for a new connection, where the other process seems to have ended
SUSPEND_S = 1.0  # for the thread of a link to drop its connection
RETRY_S = 0.05  # between two attempts to connect
MAX_LOSSES = 50  # of connections of a link, within …
LOSSES_S = 10.0  # … so many seconds; then the link ends, and what it serves goes on elsewhere
REPLACED = "another process has come in its place"
ENDED = "the link has ended here, or was of another process"


class ResumeOffer(msgspec.Struct, array_like=True, frozen=True):
    session: bytes
    received: int  # bytes of whole packets, since the link began


class NewConnection(NamedTuple):
    wire: PlainWire | TlsWire
    received: int  # by the remote side


class LossLog:
    """Until when a link waits for a new connection, and how often it may lose one."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._nbytes = -1  # of whole packets that had come at the last loss: …
        self._silent_at = 0.0  # … when the link is silent, if no packet has come since

    def has_progressed(self, nbytes: int) -> bool:
        """Returns whether a packet has come whole since the last loss."""
        return nbytes != self._nbytes

    def add(self, lost_at: float, nbytes: int, silent_for: float) -> None:
        if self.has_progressed(nbytes):
            self._nbytes, self._silent_at = nbytes, lost_at - silent_for + self._silence_s
        self._losses.append(lost_at)

    @property
    def storm(self) -> str:
        """Says that there were too many losses; empty: there were not."""
        losses = self._losses
        is_storm = len(losses) == MAX_LOSSES and losses[-1] - losses[0] < LOSSES_S
        return f"{MAX_LOSSES} connections were lost within {losses[-1] - losses[0]:.1f} s" if is_storm else ""

    def deadline(self, *, has_ended: bool) -> float:
        """`has_ended`: the connection was closed, as if the process at the remote side had ended."""
        return min(self._silent_at, self._losses[-1] + ENDED_S) if has_ended else self._silent_at


class ConnectorResumer:
    """The connector's way to a new connection: connects at once, and then every RETRY_S."""

    is_wanted = False  # only a listener's link drops a connection because the remote side has connected again

    def __init__(self, session: bytes, dial: Callable[[ResumeOffer, float], NewConnection | Exception]) -> None:
        """`dial` tries once, until the deadline, and returns why there is no connection yet. Raises BridgeRefused."""
        self._session = session
        self._dial = dial

    def await_connection(
        self, received: int, seconds_left: Callable[[], float], sleep: Callable[[float], None]
    ) -> NewConnection | str:
        """Returns a new connection, or why the attempts failed. The link reads no more from the old connection. `sleep`
        returns early when the link is woken."""
        offer = ResumeOffer(self._session, received)
        refused_at = 0.0  # first: no process listens there, as far as the network says
        reason = "no time was left"
        while (left := seconds_left()) > 0:
            try:
                connection = self._dial(offer, time.monotonic() + left)
            except BridgeRefused as refusal:
                return str(refusal)
            if isinstance(connection, NewConnection):
                return connection
            reason = str(connection)
            if isinstance(connection, ConnectionRefusedError):
                refused_at = refused_at or time.monotonic()
                if time.monotonic() - refused_at >= ENDED_S:
                    break
            sleep(min(RETRY_S, max(0.0, seconds_left())))
        return reason

    def bind(self, wake: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


class Suspension(NamedTuple):
    """One wait of a link for a new connection. A later wait is a new object, perhaps with an equal count."""

    received: int


class ListenerResumer:
    """The listener's way to a new connection: threads that accept connections meet the thread of the link."""

    def __init__(self, link: str, forget: Callable[[], object]) -> None:
        self.link = link  # its name
        self.is_wanted = False  # the remote side has connected again: the link is to drop its connection
        self._forget = forget
        self._wake: Callable[[], None] = lambda: None
        self._changed = threading.Condition()  # reentrant
        self._suspension: Suspension | None = None
        self._connection: NewConnection | None = None
        self._end = ""  # why no connection can come any more
        self._is_replaced = False

    def bind(self, wake: Callable[[], None]) -> None:
        """`wake` makes the link look at `is_wanted`, and ends its `sleep`."""
        self._wake = wake

    # ── in the thread of the link ──
    def await_connection(
        self, received: int, seconds_left: Callable[[], float], sleep: Callable[[float], None]
    ) -> NewConnection | str:
        """As that of ConnectorResumer."""
        with self._changed:
            self._suspension = Suspension(received)
            self.is_wanted = False
            if self._is_replaced:
                self._end = self._end or REPLACED
            self._changed.notify_all()
        while True:
            left = seconds_left()
            with self._changed:
                if self._connection is not None:
                    connection, self._connection = self._connection, None
                    return connection
                if self._end or left <= 0:
                    self._suspension = None  # a connection that comes now is refused
                    return self._end or "it has not connected again"
            sleep(left)

    def close(self) -> None:
        self._forget()
        self.end(ENDED)
        with self._changed:
            if self._connection is not None:  # the link has ended before it took that
                self._connection.wire.close(is_aborted=True)
                self._connection = None

    # ── in threads that accept ──
    def suspend(self) -> Suspension:
        """Makes the link drop the connection. Returns the number of received bytes. Raises BridgeRefused after the end
        of the link, and TimeoutError while the link is busy: the remote side connects again."""
        deadline = time.monotonic() + SUSPEND_S
        with self._changed:
            while self._suspension is None:  # asked again after another connection has been taken meanwhile
                left = deadline - time.monotonic()
                if self._end:
                    raise BridgeRefused(self._end)
                if left <= 0:
                    raise TimeoutError(f"the link did not drop its connection within {SUSPEND_S:g} s")
                self.is_wanted = True
                self._wake()
                self._changed.wait(left)
            return self._suspension

    def resume(self, suspension: Suspension, connection: NewConnection) -> bool:
        """Gives the link a new connection. Returns False if the link does not wait, or the remote side has the count of
        an earlier loss."""
        with self._changed:
            if self._suspension is not suspension or self._end:
                return False
            self._suspension, self._connection = None, connection
            self._changed.notify_all()
        self._wake()
        return True

    def replace(self) -> None:
        """Notes that a successor of the remote process has come. The link ends when the connection is lost, also if the
        link reads the loss later than the successor comes."""
        with self._changed:
            self._is_replaced = True
            if self._suspension is not None:
                self.end(REPLACED)

    def end(self, reason: str) -> None:
        with self._changed:
            self._end = self._end or reason
            self._changed.notify_all()
        self._wake()


Resumer: TypeAlias = ConnectorResumer | ListenerResumer


class AcceptingThread:
    """Accepts the connections of links that have begun, while no other thread accepts."""

    def __init__(self, accept: Callable[[int], object]) -> None:
        """`accept` returns when the descriptor that it is given is readable."""
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._accept = accept
        self._changed = threading.Condition()
        self._pauses = 0
        self._is_accepting = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)

    def start(self) -> None:
        with self._changed:
            if self._thread.ident is None and not self._is_closed:
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or not self._pauses)
                if self._is_closed:
                    return
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._interrupt)
                self._is_accepting = True
            try:
                self._accept(self._interrupt)
            except OSError:  # the process has no descriptor left
                time.sleep(RETRY_S)
            finally:
                with self._changed:
                    self._is_accepting = False
                    self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._changed:
            self._pauses += 1
            os.eventfd_write(self._interrupt, 1)
            self._changed.wait_for(lambda: not self._is_accepting)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._interrupt, 1)
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._interrupt)
