"""One side of a link between two nodes: a receiver and a sender of the local node's channels, in one thread.

The thread sleeps in `epoll` on the bells of the channels and on the connection. Frames pass unchanged. A link serves
one epoch. A connection that is lost while both processes live is made again, without the loss of a frame. When a link
dies, all frames under way are lost, and the service above begins anew. Leaves to the session what packets mean, and to
the listener how a link begins.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.bridge.link_errors import (
    ConnectionClosed,
    DamagedPacket,
    LinkDied,
    LocalFailure,
    LossKind,
    ProtocolError,
    RemoteFailure,
)
from penstock.bridge.link_offer import LinkOffer
from penstock.bridge.link_session import LinkSession
from penstock.bridge.link_spec import LinkSpec, LinkStats, RemoteSide
from penstock.bridge.packets import ACK_AFTER_NBYTES, FatalCause, PacketReader
from penstock.bridge.resumption import ENDED_S, LossLog, Resumer
from penstock.bridge.wire import PlainWire, TlsWire

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

    from penstock.bridge.link_lanes import OutboundLane
    from penstock.bridge.value_exchange import ValueExchange
    from penstock.channel import FrameReceiver

ROUNDS = 8  # of sending, or of reading, before the other begins
CALM_S = 0.005  # without a turn of the loop while frames pass
MAX_EVENTS = 64  # of one sleep
LAST_WORDS_S = 0.2  # to tell the remote side why this one ends the link
READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Link:
    """One side of a link: what `Listener.accept` and `connect` return.

    One thread calls `run`, which forwards until the end; `stop` and `stats` are for any thread.

    Examples:
        >>> steps, received = Ring(), Ring()
        >>> with Listener(("127.0.0.1", 0), secret=bytes(32)) as listener, ThreadPoolExecutor() as threads:
        ...     spec = LinkSpec("steps", channels=[InboundChannel("steps", received)])
        ...     away = threads.submit(connect, listener.address, spec, secret=bytes(32))
        ...     home = listener.accept(LinkSpec("steps", channels=[OutboundChannel("steps", steps)]), timeout=30)
        ...     with home, away.result(), steps.open_sender() as sender:
        ...         runs = [threads.submit(home.run), threads.submit(away.result().run)]
        ...         sender.send(b"step")
        ...         sender.close()
        ...         [run.result() for run in runs]
        ['all channels have ended', 'all channels have ended']
        >>> received.open_receiver().receive()
        b'step'
    """

    def __init__(
        self,
        spec: LinkSpec,
        remote: RemoteSide,
        offer: LinkOffer,
        wire: PlainWire | TlsWire,
        resumer: Resumer | None = None,
    ) -> None:
        """`offer` is the remote side's, of the handshake. Without a `resumer` the link ends with its connection."""
        self.spec = spec
        self.remote = remote
        self._offer = offer
        self._wire = wire
        self._resumer = resumer
        self._session: LinkSession | None = None
        self._reader: PacketReader | None = None
        self._lanes: dict[int, OutboundLane] = {}  # by the descriptor of their bell
        self._poll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop_reason: str | None = None
        self._stop_by = float("inf")  # from when on a link that was stopped waits for no new connection
        self._losses = LossLog(spec.silence_s)
        self.is_connected = True
        self._is_writing = False  # epoll is asked for room of the connection
        self._closing = threading.RLock()  # a signal handler may stop a link that this thread closes
        self._is_closed = False
        if resumer is not None:
            resumer.bind(self._wake)

    def run(self) -> str:
        """Opens the ends, and forwards until both sides are done. Returns why: the reason that either side gave to
        `stop`, or that all channels have ended.

        Raises:
            LinkDied: the link has ended in any other way. The ends are left open: let the process end, so that their
                peers see its death.
            ValueError, MemoryExhausted: an end cannot be opened.
        """
        session = self._session = LinkSession(self.spec, self._offer, self._wake)
        session.stats.clock_offset_ns = self.remote.clock_offset_ns
        self._reader = PacketReader(session)
        try:
            self._register(session)
            return self._loop_to_end(session, self._reader)
        except LocalFailure as failure:
            self._say_last(session, "ended", f"{failure} (seen by '{self.spec.name}')")
            raise self._death("local", str(failure)) from None
        except ProtocolError as error:
            self._say_last(session, error.kind, str(error))
            raise self._death(error.kind, f"{error.how}: {error}") from None
        except RemoteFailure as failure:
            with contextlib.suppress(OSError):
                session.queue.flush(self._wire)  # what says that the local side has heard nothing
            self._wire.close(is_aborted=failure.kind == "silent")
            raise self._death(failure.kind, failure.how) from None
        finally:
            self._reader.drop_place()
            if self._resumer is not None:
                self._resumer.close()
            for lane in session.inbound:
                lane.abort_frames()
            self._close_descriptors()

    def stop(self, reason: str) -> None:
        """Ends the link in peace: frames that have been read are sent, then `run` of both sides returns the reason. May
        be called from any thread, and from a signal handler."""
        self._stop_by = time.monotonic() + ENDED_S
        self._stop_reason = reason
        self._wake()

    def _wake(self) -> None:
        with self._closing:
            if not self._poll.closed:
                os.eventfd_write(self._wakeup, 1)

    def insert(self, channel: str, frame: Buffer, *, source: int = 0) -> None:
        """Sends a frame into an inbound channel, behind all frames of sender `source` of the remote node, and in the
        name of that sender. For `on_death`, in the thread of the link."""
        if self._session is None:
            raise ValueError("the link does not run")
        lane = next(lane for lane in self._session.inbound if lane.spec.name == channel)
        lane.insert(source, bytes(frame))
        self._session.wants_turn = True

    def stats(self) -> LinkStats:
        """Returns what has passed so far."""
        session, reader = self._session, self._reader
        if session is None or reader is None:
            return LinkStats()
        stats = msgspec.structs.replace(session.stats)
        stats.nbytes_sent, stats.nbytes_received = session.queue.nbytes_sent, reader.nbytes
        stats.heard_s = session.silent_for()
        return stats

    def close(self) -> None:
        """Closes the ends and the connection. Peers of the ends see a close, and no death."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if self._resumer is not None:
            self._resumer.close()
        if self._session is not None:
            self._session.close()
            self._session.queue.clear()
        self._wire.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        with self._closing:
            if not self._poll.closed:
                self._poll.close()
                os.close(self._wakeup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    # ── the loop ──
    def _loop_to_end(self, session: LinkSession, reader: PacketReader) -> str:
        """Goes on over the next connection when one is lost."""
        while True:
            try:
                return self._loop(session, reader)
            except (OSError, DamagedPacket) as error:
                outcome = self._resume(session, reader, error)
                if outcome is not None:
                    return outcome

    def _resume(self, session: LinkSession, reader: PacketReader, lost: OSError | DamagedPacket) -> str | None:
        """Awaits a new connection. Returns the outcome if both sides were done. Raises RemoteFailure if none comes, and
        DamagedPacket if no packet has come whole since the last loss: a new connection does not help."""
        lost_at = time.monotonic()
        if not isinstance(lost, DamagedPacket):
            how = f"has lost its connection, or was killed: {lost}"
            with contextlib.suppress(OSError, DamagedPacket):  # what has come before may say why
                while reader.read(self._wire):
                    session.hear()
        elif self._resumer is None or not self._losses.has_progressed(reader.nbytes_whole):
            raise lost
        else:
            how = f"{lost.how}: {lost}"
        if session.is_over or self._resumer is None:
            return session.on_loss(how)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(self._wire.fileno())
        self._wire.close(is_aborted=True)
        self.is_connected = False
        reader.restart()
        self._losses.add(lost_at, reader.nbytes, session.silent_for())
        if self._losses.storm:
            return session.on_loss(f"{how}; {self._losses.storm}")
        by = self._losses.deadline(has_ended=isinstance(lost, (ConnectionClosed, BrokenPipeError)))
        connection = self._resumer.await_connection(
            reader.nbytes, lambda: min(by, max(self._stop_by, lost_at + ENDED_S)) - time.monotonic(), self._sleep
        )
        if isinstance(connection, str):
            if self._stop_reason is not None:
                session.stop(self._stop_reason)
            return session.on_loss(f"{how}; no new connection within {time.monotonic() - lost_at:.1f} s: {connection}")
        self._wire, self.is_connected = connection.wire, True
        session.queue.rewind(connection.received)
        session.resume()
        self._is_writing = False
        self._poll.register(self._wire.fileno(), READABLE)
        if self.spec.on_resume is not None:
            self.spec.on_resume(time.monotonic() - lost_at, str(lost))
        return None

    def _sleep(self, seconds: float) -> None:
        """Until the link is woken. Needs no descriptor."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1e3)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 8)

    def _register(self, session: LinkSession) -> None:
        self._lanes = {lane.receiver.fileno(): lane for lane in session.outbound}
        ends = [*self._lanes, *(sender.fileno() for lane in session.inbound for sender in lane.senders)]
        if session.values is not None and session.values.requests is not None:
            ends.append(session.values.requests.fileno())
        for descriptor in (*ends, self._wakeup):
            self._poll.register(descriptor, select.EPOLLIN)
        self._poll.register(self._wire.fileno(), READABLE)

    def _loop(self, session: LinkSession, reader: PacketReader) -> str:
        """Sends, sleeps and receives until the end."""
        while True:
            now = time.monotonic()
            if self._resumer is not None and self._resumer.is_wanted:
                raise ConnectionResetError("the other side has connected again")
            if now >= session.due_at:
                session.tick(now)
                session.acknowledge(reader.nbytes_whole)
            if self._stop_reason is not None:
                session.stop(self._stop_reason)
            session.wants_turn = False
            has_more = self._send(session, now)
            outcome = session.outcome
            if outcome is not None and not self._has_unsent(session):
                return outcome
            self._pass_on(session, reader, now, self._timeout(session, now, has_more))

    def _pass_on(self, session: LinkSession, reader: PacketReader, now: float, timeout: float) -> None:
        """Sleeps, and passes on received packets: first a frame with a bell that rang. Sleeps again after frames alone,
        for up to CALM_S: a turn of the loop takes several times as long as a frame, on a processor that the receivers
        need."""
        wire, queue, lanes, poll = self._wire, session.queue, self._lanes, self._poll.poll
        connection, is_sending, until = wire.fileno(), session.is_sending, now + timeout
        while True:
            is_readable, rung = wire.has_unread, []
            for descriptor, mask in poll(timeout, MAX_EVENTS):
                if descriptor == connection:
                    is_readable = is_readable or mask & READABLE != 0
                    continue
                if is_sending and descriptor in lanes:
                    lane = lanes[descriptor]
                    lane.pump(1)
                    queue.flush(wire)
                    rung.append(lane)
                else:
                    session.wants_turn = True
                with contextlib.suppress(BlockingIOError):  # before the next look: a ring after that is not lost
                    os.read(descriptor, 4096)
            if is_readable:
                self._read(session, reader)
            clock = time.monotonic()
            if (
                clock >= until
                or clock - now >= CALM_S
                or session.wants_turn
                or wire.has_unread
                or self._has_unsent(session)
                or any(lane.arm(has_room=True) or not lane.may_send for lane in rung)
            ):
                break
            timeout = until - clock
        if not is_readable:
            session.require_life()

    def _send(self, session: LinkSession, now: float) -> bool:
        """Returns whether there is more to send, and room for it."""
        queue, wire = session.queue, self._wire
        for _ in range(ROUNDS):
            has_more = session.pump(now)
            if queue.nbytes:
                queue.flush(wire)
            if not has_more or queue.nbytes:
                break
        if wire.wants_write:
            wire.flush()
        return has_more and not queue.nbytes and queue.has_room

    def _has_unsent(self, session: LinkSession) -> bool:
        return session.queue.nbytes > 0 or self._wire.wants_write

    def _read(self, session: LinkSession, reader: PacketReader) -> None:
        """Raises ConnectionClosed, or a different OSError, if the connection is lost."""
        wire = self._wire
        for _ in range(ROUNDS):
            has_read = reader.read(wire)
            if has_read is None:
                raise ConnectionClosed("it has closed the connection without a word")
            if not has_read:
                break
            session.hear()
            if not reader.is_within_packet and not wire.has_unread:
                break
        if reader.nbytes - session.nbytes_acked >= ACK_AFTER_NBYTES:
            session.acknowledge(reader.nbytes_whole)

    def _timeout(self, session: LinkSession, now: float, has_more: bool) -> float:
        """Returns how long the link may sleep, and arms the events that wake the link before."""
        due_at = session.due_at
        retry_at = session.retry_at()
        timeout = max(0.0, (due_at if retry_at is None else min(due_at, retry_at)) - now)
        if has_more or self._wire.has_unread or self._arm(session):
            timeout = 0.0
        if self._has_unsent(session) != self._is_writing:
            self._is_writing = not self._is_writing
            self._poll.modify(self._wire.fileno(), READABLE | (select.EPOLLOUT if self._is_writing else 0))
        return timeout

    def _arm(self, session: LinkSession) -> bool:
        """Arms the bells of the ends that could go on. Returns whether an end may go on already."""
        is_ready = False
        has_room = session.is_sending and session.queue.has_room
        for lane in session.outbound:
            is_ready |= lane.arm(has_room)
        for in_lane in session.inbound:
            if in_lane.has_backlog:
                is_ready |= in_lane.arm()
        requests = _requests(session.values)
        return is_ready | (requests is not None and requests.arm())

    # ── the end ──
    def _death(self, kind: LossKind, how: str) -> LinkDied:
        return LinkDied.of(kind, self.spec.link, self.remote.name, self.remote.pid, how)

    def _say_last(self, session: LinkSession, cause: FatalCause, text: str) -> None:
        """Sends the reason for the end of the link, if the connection has room soon. Closes the connection when the
        remote side has read the reason: closing with unread bytes may take back sent bytes."""
        session.put_fatal(cause, text)
        deadline = time.monotonic() + LAST_WORDS_S
        rest = memoryview(bytearray(1 << 16))
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                session.queue.flush(self._wire)
                self._wire.flush()
                if not self._has_unsent(session):
                    self._wire.shut_down_writing()
                mask = READABLE | (select.EPOLLOUT if self._has_unsent(session) else 0)
                poll = select.poll()  # needs no descriptor
                poll.register(self._wire.fileno(), mask)
                poll.poll(left * 1e3)
                if self._wire.recv_into(rest) == 0:
                    break
        self._wire.close(is_aborted=True)


def _requests(values: ValueExchange | None) -> FrameReceiver | None:
    return None if values is None else values.requests
