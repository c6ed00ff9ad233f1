"""The lanes of a link: the frames of a channel go into the channel of equal name on the remote node.

Each lane has credit: the bytes of frames that may be under way, or wait at the remote side for room in the channel.
Without credit the frames stay in the channel of the sending node, and the senders wait, as for any slow receiver. A
slow receiver delays one lane only: the link reads on, heartbeats included.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from penstock import _native
from penstock.bridge import packets
from penstock.bridge.link_errors import LocalFailure, ProtocolError
from penstock.bridge.link_offer import OfferedChannel
from penstock.bridge.link_spec import InboundChannel, LinkStats, OutboundChannel
from penstock.bridge.packets import MAX_PAYLOAD, PacketQueue
from penstock.channel import FrameReceiver, FrameSender, Inbox
from penstock.errors import EndOfChannel, MemoryExhausted, PeerDied

FRAME_COST = 64  # bytes of credit that a frame takes besides its own: frames without a byte are not free
MAX_FRAMES = 64  # of one lane at a time
RETRY_S = 0.02  # between two attempts for which no bell rings
MEMORY_TIMEOUT = 10.0  # seconds that a frame waits for memory of the local node

OnDeath = Callable[["OutboundLane | InboundLane", PeerDied], None]  # raises LocalFailure where the death ends the link


def cost(nbytes: int) -> int:
    return nbytes + FRAME_COST


class OutboundLane:
    """Takes the frames of a channel of the local node."""

    def __init__(
        self,
        number: int,
        spec: OutboundChannel,
        there: OfferedChannel,
        queue: PacketQueue,
        stats: LinkStats,
        on_death: OnDeath,
    ) -> None:
        self.spec = spec
        self.receiver = FrameReceiver(spec.channel, spec.index, name=spec.peer_name)
        self.is_over = False
        self.retry_at = 0.0  # 0: the bell rings
        self.number = number
        self._is_inbox = isinstance(spec.channel, Inbox)
        self._lanes_there = there.lanes
        self._credit = self._window = there.window_nbytes
        self._queue = queue
        self._stats = stats
        self._on_death = on_death
        self._long = memoryview(b"")  # the rest of a long frame
        self._source = 0  # of that frame

    def add_credit(self, nbytes: int) -> None:
        self._credit += nbytes
        if self._credit > self._window:
            excess = self._credit - self._window
            raise ProtocolError(f"it gave back {excess} bytes of credit more than lane {self.number} had")

    @property
    def may_send(self) -> bool:
        return self._credit > 0 and not self._long and not self.is_over and not self.retry_at

    @property
    def is_within_frame(self) -> bool:
        """A long frame has been sent in part."""
        return bool(self._long)

    def pump(self, most: int = MAX_FRAMES) -> None:
        """Puts up to `most` frames into the queue, while credit lasts and the wire keeps up. A long frame is the last
        frame of a call: `put_piece` puts the bytes."""
        if self.is_over or (self.retry_at and time.monotonic() < self.retry_at):
            return
        self.retry_at = 0.0
        queue, receiver = self._queue, self.receiver
        try:
            for _ in range(most):
                if self._credit <= 0 or self._long or not queue.has_room:
                    return
                frame = receiver.try_receive()
                if frame is None:
                    return
                self._put(frame, receiver.source if self._is_inbox else 0)
        except EndOfChannel:
            self.is_over = True
            queue.put(packets.END, self.number)
        except PeerDied as death:
            self._on_death(self, death)
            if not self._is_inbox:  # raised by every call until the sender has a successor
                self.retry_at = time.monotonic() + RETRY_S

    def _put(self, frame: bytes | _native.BlockLease, source: int) -> None:
        nbytes = len(frame)
        if source >= self._lanes_there:
            raise LocalFailure(
                f"sender {source} of '{self.spec.channel.name}' has no lane at the other side, which has "
                f"{self._lanes_there} for channel '{self.spec.name}'"
            )
        self._credit -= nbytes + FRAME_COST
        self._stats.frames_sent += 1
        if nbytes <= MAX_PAYLOAD:
            self._queue.put(packets.FRAME, self.number, source, frame)
        else:
            self._queue.put(packets.LONG, self.number, source, packets.LONG_NBYTES.pack(nbytes))
            self._long, self._source = memoryview(frame), source

    def put_piece(self) -> None:
        """Puts the next piece of a long frame into the queue, if the wire keeps up."""
        if not self._queue.has_room:
            return
        piece, self._long = self._long[:MAX_PAYLOAD], self._long[MAX_PAYLOAD:]
        self._queue.put(packets.FRAME_PART, self.number, self._source, piece)

    def arm(self, has_room: bool) -> bool:
        """Arms the bell, if the lane may send and has room. Returns whether frames may have come already."""
        if not has_room or not self.may_send:
            self.receiver.disarm()
            return False
        if self.receiver.arm():
            if not self.receiver.is_locked_out:
                return True
            self.retry_at = time.monotonic() + RETRY_S
        return False

    def close(self) -> None:
        self._long = memoryview(b"")
        self.receiver.close()


class _LongFrame:
    """A frame that arrives in pieces: in room of the channel, or in memory of the process if the channel is full."""

    def __init__(self, room: _native.Reservation | None, nbytes: int) -> None:
        self.reservation = room
        self.buffer = bytearray(nbytes) if room is None else None
        self.nbytes = nbytes
        self.filled = 0

    def next_place(self, nbytes: int) -> memoryview:
        if self.filled + nbytes > self.nbytes:
            raise ProtocolError(f"a frame of {self.nbytes} bytes came with more")
        with memoryview(self.reservation or self.buffer or b"") as whole:
            return whole[self.filled : self.filled + nbytes]

    def abort(self) -> None:
        if self.reservation is not None:
            self.reservation.abort()


class InboundLane:
    """Sends frames of the remote node into a local channel, with a local sender for each remote sender."""

    def __init__(
        self, number: int, spec: InboundChannel, queue: PacketQueue, stats: LinkStats, on_death: OnDeath
    ) -> None:
        self.spec = spec
        self.is_over = False  # no more frames come
        self.is_closed = False  # … and all have been passed on
        self.retry_at = 0.0
        self.number = number
        self._queue = queue
        self._stats = stats
        self._on_death = on_death
        self.senders = [FrameSender(spec.channel, lane.index, name=lane.name) for lane in spec.lanes]
        self._attempts = range(spec.channel.receivers + 1)
        self._backlogs: list[deque[bytes | bytearray | Callable[[], None]]] = [deque() for _ in spec.lanes]
        self._long: dict[int, _LongFrame] = {}
        self._returned = 0  # credit that is to be given back …
        self._returned_at = spec.window_nbytes / 4  # … from so much on
        self._exhausted_at = 0.0  # when a frame first found no memory; 0: it did not
        self._max_nbytes = self.senders[0].max_nbytes
        self._kept_nbytes = 0

    # ── what comes ──
    def on_frame(self, source: int, payload: memoryview) -> bool:
        """Returns whether the lane is to be drained."""
        if self._long or self.is_over or source >= len(self.senders):
            self._require_next(source)
        self._stats.frames_received += 1
        if self._backlogs[source] or not self._try_send(source, payload):
            self._keep(source, bytes(payload))
            return True
        self._returned += len(payload) + FRAME_COST
        return self._returned >= self._returned_at

    def begin_long(self, source: int, nbytes: int) -> None:
        self._require_next(source)
        if not MAX_PAYLOAD < nbytes <= self._max_nbytes:
            raise ProtocolError(f"it announced a frame of {nbytes} bytes for '{self.spec.channel.name}'")
        room = None if self._backlogs[source] else self._try_reserve(source, nbytes)
        self._long[source] = _LongFrame(room, nbytes)

    def place(self, source: int, nbytes: int) -> memoryview:
        """Returns where the next bytes of the long frame are to lie."""
        if source not in self._long:
            raise ProtocolError(f"a piece of a frame came for '{self.spec.channel.name}' without a frame")
        return self._long[source].next_place(nbytes)

    def placed(self, source: int, nbytes: int) -> None:
        long = self._long[source]
        long.filled += nbytes
        if long.filled < long.nbytes:
            return
        del self._long[source]
        self._stats.frames_received += 1
        if long.reservation is not None:
            long.reservation.commit()
            self._returned += cost(long.nbytes)
        elif long.buffer is not None:
            if self._backlogs[source] or not self._try_send(source, long.buffer):
                self._keep(source, long.buffer)
            else:
                self._returned += cost(long.nbytes)

    def insert(self, source: int, frame: bytes) -> None:
        """Sends a frame of the local side behind the received frames of sender `source`. Takes no credit."""
        if self._backlogs[source] or not self._try_send(source, frame):
            self._keep(source, frame)
            self._returned -= cost(len(frame))

    def after_frames(self, source: int, call: Callable[[], None]) -> None:
        """Calls when all frames that have come of this sender have been passed on."""
        if source < len(self._backlogs) and self._backlogs[source]:
            self._backlogs[source].append(call)
        else:
            call()

    def end(self) -> None:
        if self.is_over or self._long:
            raise ProtocolError(f"channel '{self.spec.name}' ended within a frame, or twice")
        self.is_over = True

    def _require_next(self, source: int) -> None:
        if source >= len(self.senders):
            raise ProtocolError(f"a frame came of sender {source} of '{self.spec.name}', which has no lane here")
        if self.is_over or source in self._long:
            raise ProtocolError(f"a frame of '{self.spec.name}' came after its end, or within another one")

    # ── into the channel ──
    def _try_send(self, source: int, frame: memoryview | bytes | bytearray) -> bool:
        """Returns False if there is no room now. A frame that no process is left to receive is dropped."""
        sender = self.senders[source]
        try:
            for _ in self._attempts:  # each receiver that has died is reported once
                try:
                    is_sent = sender.try_send(frame)
                    self._exhausted_at = 0.0
                    return is_sent
                except PeerDied as death:
                    self._on_death(self, death)
        except EndOfChannel as end:
            if self.spec.on_death == "end":
                raise LocalFailure(str(end)) from None
        except MemoryExhausted as error:
            return self._wait_for_memory(error)
        self._stats.frames_dropped += 1
        return True

    def _try_reserve(self, source: int, nbytes: int) -> _native.Reservation | None:
        """Returns room for a frame; None: the frame is to be kept, and sent as any other."""
        for _ in range(self.spec.channel.receivers):
            try:
                return self.senders[source].try_reserve(nbytes)
            except PeerDied as death:
                self._on_death(self, death)
            except (EndOfChannel, MemoryExhausted):  # raised again when the frame is sent
                break
        return None

    def _wait_for_memory(self, error: MemoryExhausted) -> bool:
        now = time.monotonic()
        self._exhausted_at = self._exhausted_at or now
        if now - self._exhausted_at > MEMORY_TIMEOUT:
            raise LocalFailure(f"no memory for {MEMORY_TIMEOUT:g} s: {error}")
        self.retry_at = now + RETRY_S
        return False

    def _keep(self, source: int, frame: bytes | bytearray) -> None:
        self._backlogs[source].append(frame)
        self._count_kept(len(frame))
        if self._kept_nbytes > self.spec.window_nbytes + self._max_nbytes:
            raise ProtocolError(f"it sent more frames of '{self.spec.name}' than it had credit for")

    def _count_kept(self, nbytes: int) -> None:
        self._kept_nbytes += nbytes
        self._stats.backlog_nbytes += nbytes

    @property
    def has_backlog(self) -> bool:
        return any(self._backlogs)

    def drain(self) -> None:
        """Passes on frames that waited for room, and returns credit; closes the senders at the end of the lane."""
        if self.retry_at and time.monotonic() >= self.retry_at:
            self.retry_at = 0.0
        if self.has_backlog:
            self._drain_backlogs()
        if self._returned >= self._returned_at:
            self._queue.put(packets.CREDIT, self.number, payload=packets.CREDIT_NBYTES.pack(self._returned))
            self._returned = 0
        if self.is_over and not self.is_closed and not self.has_backlog:
            self.close()

    def _drain_backlogs(self) -> None:
        for source, backlog in enumerate(self._backlogs):
            while backlog:
                frame = backlog[0]
                if not isinstance(frame, (bytes, bytearray)):
                    frame()
                elif self._try_send(source, frame):
                    self._count_kept(-len(frame))
                    self._returned += cost(len(frame))
                else:
                    break
                backlog.popleft()

    def arm(self) -> bool:
        """Arms the bells of the senders with waiting frames. Returns whether a channel may have room already."""
        is_ready = False
        for source, backlog in enumerate(self._backlogs):
            if backlog and not self.retry_at and self.senders[source].arm():
                if self.senders[source].is_locked_out:
                    self.retry_at = time.monotonic() + RETRY_S
                else:
                    is_ready = True
        return is_ready

    def abort_frames(self) -> None:
        """Drops frames that have come in part, as if the senders had not begun them."""
        for long in self._long.values():
            long.abort()
        self._long.clear()

    def close(self) -> None:
        self.abort_frames()
        self.is_closed = True
        for sender in self.senders:
            sender.close()
