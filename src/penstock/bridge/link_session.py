"""One side of a link without sockets and waiting: lanes, words, values, heartbeats, and the end.

A clean end: a side that is done sends BYE, and returns after the BYE of the remote side. A side is done when all
channels of both sides have ended, when the user stops the link, or when BYE has come. Received frames are passed on
first. All exceptions of `run` mean an unclean end, and both sides raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from penstock.bridge import packets
from penstock.bridge.link_errors import LocalFailure, ProtocolError, RemoteFailure
from penstock.bridge.link_lanes import InboundLane, OutboundLane
from penstock.bridge.link_offer import LinkOffer
from penstock.bridge.link_spec import ChannelDeath, LinkSpec, LinkStats
from penstock.bridge.liveness import Liveness
from penstock.bridge.packets import (
    ACK_NBYTES,
    BEAT,
    CREDIT_NBYTES,
    FATAL_CAUSES,
    LONG_NBYTES,
    PacketQueue,
    text_payload,
)
from penstock.bridge.value_exchange import ValueExchange
from penstock.bridge.word_mirror import WordMirror, WordSource
from penstock.errors import PeerDied

End: TypeAlias = "OutboundLane | InboundLane"

ALL_ENDED = "all channels have ended"
AFTER_BYE = (packets.HEARTBEAT, packets.CREDIT, packets.ACK, packets.FATAL)
_death = msgspec.msgpack.Decoder(ChannelDeath)


class LinkSession:
    def __init__(
        self,
        spec: LinkSpec,
        offer: LinkOffer,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the local ends. `offer` is of the remote side. `wake` makes the link's thread call `pump` again."""
        self.spec = spec
        self.queue = PacketQueue()
        self.stats = LinkStats()
        self.outbound: list[OutboundLane] = []
        self.inbound: list[InboundLane] = []
        self.values: ValueExchange | None = None
        self.due_at = 0.0  # when `tick` is to be called
        self.nbytes_acked = 0  # of the remote side's packets
        self.wants_turn = False  # `pump` is to be called: more than frames that have been passed on has come
        self._wake = wake
        self._clock = clock
        self._liveness = Liveness(spec.heartbeat_s, spec.silence_s, clock())
        self._heartbeat = (0, 0)  # the remote side's last one: its clock, and the local side's when it came
        self._best_round_trip_ns = 1 << 62
        self._deaths: dict[tuple[str, bool, int], int] = {}  # the pid of each end's last death
        # Of the end in peace:
        self._stop_reason: str | None = None
        self._said_bye: str | None = None
        self._heard_bye: str | None = None
        self._turn = 0  # of those that send pieces
        self._done_by = 0.0  # from when on frames without room are given up
        try:
            self._open(offer)
        except BaseException:
            self.close()
            raise

    def _open(self, offer: LinkOffer) -> None:
        spec, queue, stats = self.spec, self.queue, self.stats
        there = {channel.name: channel for channel in offer.channels}
        for number, channel in enumerate(spec.outbound):
            lane = OutboundLane(number, channel, there[channel.name], queue, stats, self._on_local_death)
            self.outbound.append(lane)
        here = {channel.name: channel for channel in spec.inbound}
        for number, offered in enumerate(offer.outbound_channels()):  # by the remote side's numbers
            self.inbound.append(InboundLane(number, here[offered.name], queue, stats, self._on_local_death))
        self._sources = [WordSource(lane, words) for lane, words in enumerate(spec.outbound_words)]
        mirrored = {words.name: words for words in spec.inbound_words}
        self._mirrors = [WordMirror(mirrored[words.name]) for words in offer.outbound_words()]
        if spec.values is not None:
            self.values = ValueExchange(spec.values, spec.name, queue, stats, self._wake)

    # ── what goes ──
    def tick(self, now: float) -> None:
        """Sends a heartbeat if one is due."""
        if self._liveness.beat(now):
            clock = time.monotonic_ns()
            sent_ns, came_ns = self._heartbeat
            self.queue.put(packets.HEARTBEAT, payload=BEAT.pack(clock, sent_ns, clock - came_ns))
        self.due_at = min([self._liveness.due_at, *(source.due_at for source in self._sources)])

    def acknowledge(self, nbytes: int) -> None:
        """Says how many bytes of whole packets have come."""
        if nbytes > self.nbytes_acked:
            self.nbytes_acked = nbytes
            self.queue.put(packets.ACK, payload=ACK_NBYTES.pack(nbytes))

    def pump(self, now: float) -> bool:
        """Fills the queue as far as room lasts. Returns whether more waits to be sent."""
        for lane in self.inbound:
            lane.drain()
        if self._said_bye is not None:
            return False
        is_ending = self._stop_reason is not None or self._heard_bye is not None
        values = self.values
        if not is_ending:
            for out in self.outbound:
                out.pump()
            for source in self._sources:
                source.send_changes(self.queue, now)
            if values is not None:
                values.look_again(now)
                values.receive_requests()
                values.answer_announced()
        has_more = self._put_pieces(with_values=not is_ending)
        if is_ending:
            if not has_more and (not self.has_backlog or now >= self._done_by):
                self._say_bye(self._stop_reason if self._stop_reason is not None else self._heard_bye or "")
        elif self._has_ended():
            self._say_bye(ALL_ENDED)
        return has_more

    def _put_pieces(self, *, with_values: bool) -> bool:
        """Puts pieces of long frames and values into the queue, in turn, behind all frames. Returns whether pieces are
        left."""
        long = self._long(with_values)
        if not long:
            return False
        self._turn += 1
        first = self._turn % len(long)
        for each in (*long[first:], *long[:first]):
            each.put_piece()
        return bool(self._long(with_values))

    def _long(self, with_values: bool) -> list[OutboundLane | ValueExchange]:
        """Returns what has pieces to send."""
        long: list[OutboundLane | ValueExchange] = [lane for lane in self.outbound if lane.is_within_frame]
        if with_values and self.values is not None and self.values.has_more:
            long.append(self.values)
        return long

    def retry_at(self) -> float | None:
        """Returns when a lane is to be looked at for which no bell rings; None: no such lane."""
        times = [out.retry_at for out in self.outbound if out.retry_at]
        times += [lane.retry_at for lane in self.inbound if lane.retry_at]
        if self.values is not None and self.values.retry_at:
            times.append(self.values.retry_at)
        return min(times) if times else None

    # ── the end ──
    def stop(self, reason: str) -> None:
        """The local side's user ends the link."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._done_by = self._clock() + self.spec.silence_s

    @property
    def outcome(self) -> str | None:
        """Why the link has ended in peace; None: it has not. What is in the queue is still to be sent."""
        if self._said_bye is None or self._heard_bye is None:
            return None
        if self.has_backlog and self._clock() < self._done_by:
            return None
        return self._stop_reason if self._stop_reason is not None else self._heard_bye

    @property
    def is_over(self) -> bool:
        """Whether both sides have said that they are done."""
        return self._said_bye is not None and self._heard_bye is not None

    def on_loss(self, how: str) -> str:
        """Returns the outcome after the loss of the connection. Raises RemoteFailure if no side is done."""
        if self._heard_bye is not None:
            return self._stop_reason if self._stop_reason is not None else self._heard_bye
        if self._stop_reason is not None:
            return self._stop_reason
        raise RemoteFailure("closed", how)

    def resume(self) -> None:
        """The link goes on over a new connection."""
        self._liveness.resume(self._clock())
        self.due_at = 0.0
        self.stats.resumptions += 1

    @property
    def has_backlog(self) -> bool:
        return any(lane.has_backlog for lane in self.inbound)

    @property
    def is_sending(self) -> bool:
        """Whether frames of the local node are still taken."""
        return self._said_bye is None and self._stop_reason is None and self._heard_bye is None

    def _has_ended(self) -> bool:
        for out in self.outbound:
            if not out.is_over or out.is_within_frame:
                return False
        return bool(self.outbound or self.inbound) and all(lane.is_closed for lane in self.inbound)

    def _say_bye(self, reason: str) -> None:
        self._said_bye = reason
        self.queue.put(packets.BYE, payload=text_payload(reason))

    def put_fatal(self, cause: packets.FatalCause, text: str) -> None:
        """Sends the remote side the reason for the end of the link."""
        self.queue.put(packets.FATAL, payload=bytes([FATAL_CAUSES.index(cause)]) + text_payload(text))

    # ── life ──
    def hear(self) -> None:
        """Bytes have come."""
        self._liveness.hear(self._clock())

    def silent_for(self) -> float:
        return self._liveness.silent_for(self._clock())

    def require_life(self) -> None:
        """Raises RemoteFailure if nothing has come for too long. Call it after a look at the connection."""
        now = self._clock()
        if self._liveness.is_silent(now):
            silent = f"{self._liveness.silent_for(now):.1f} s"
            self.put_fatal("unheard", silent)
            raise RemoteFailure("silent", f"has sent nothing for {silent}: it is stopped, or the network is cut")

    def _on_heartbeat(self, sent_ns: int, echo_ns: int, held_ns: int) -> None:
        now = time.monotonic_ns()
        self._heartbeat = (sent_ns, now)
        if echo_ns and 0 <= held_ns <= now - echo_ns:
            round_trip_ns = self.stats.round_trip_ns = now - echo_ns - held_ns
            if round_trip_ns <= self._best_round_trip_ns:
                self._best_round_trip_ns = round_trip_ns
                self.stats.clock_offset_ns = sent_ns - (now - round_trip_ns // 2)

    # ── what comes ──
    def handle(self, kind: int, lane: int, source: int, payload: memoryview) -> None:
        """Takes a packet. Raises ProtocolError for one that does not fit the link."""
        if self._heard_bye is not None and kind not in AFTER_BYE:
            raise ProtocolError(f"a packet of kind {kind} came after its last one")
        if kind == packets.FRAME:
            if self._inbound_lane(lane).on_frame(source, payload):
                self.wants_turn = True
            return
        self.wants_turn = True
        if kind == packets.CREDIT:
            self._outbound_lane(lane).add_credit(*CREDIT_NBYTES.unpack(payload))
        elif kind == packets.ACK:
            self.queue.acknowledge(*ACK_NBYTES.unpack(payload))
        elif kind == packets.HEARTBEAT:
            self._on_heartbeat(*BEAT.unpack(payload))
        elif kind == packets.WORDS:
            if lane >= len(self._mirrors):
                raise ProtocolError(f"words of lane {lane} came: there are {len(self._mirrors)}")
            self._mirrors[lane].store(payload)
        elif kind == packets.LONG:
            self._inbound_lane(lane).begin_long(source, *LONG_NBYTES.unpack(payload))
        elif kind == packets.FRAME_PART:
            with self._inbound_lane(lane).place(source, len(payload)) as place:
                place[:] = payload
            self._inbound_lane(lane).placed(source, len(payload))
        elif kind == packets.END:
            self._inbound_lane(lane).end()
        elif kind == packets.DEATH:
            self._on_remote_death(lane, bool(source), payload)
        elif kind == packets.BYE:
            self._heard_bye = bytes(payload).decode(errors="replace")
            self._done_by = self._clock() + self.spec.silence_s
        elif kind == packets.FATAL:
            self._on_fatal(payload)
        else:
            self._handle_value(kind, payload)

    def _handle_value(self, kind: int, payload: memoryview) -> None:
        values = self.values
        if values is None:
            raise ProtocolError("no values cross this link")
        if kind == packets.WANT:
            values.on_want(bytes(payload))
        elif kind == packets.VALUE:
            values.on_value(payload)
        elif kind == packets.VALUE_PART:
            values.on_piece(payload)
        elif kind in (packets.TAKE, packets.DECLINE):
            values.on_answer(kind == packets.TAKE)
        else:
            values.on_absent(payload)

    def place(self, kind: int, lane: int, source: int, nbytes: int) -> memoryview | None:
        if kind == packets.FRAME_PART:
            return self._inbound_lane(lane).place(source, nbytes)
        return None if self.values is None else self.values.place(nbytes)

    def placed(self, kind: int, lane: int, source: int, nbytes: int) -> None:
        self.wants_turn = True
        if kind == packets.FRAME_PART:
            self._inbound_lane(lane).placed(source, nbytes)
        elif self.values is not None:
            self.values.placed(nbytes)

    def _inbound_lane(self, lane: int) -> InboundLane:
        if lane >= len(self.inbound):
            raise ProtocolError(f"a packet of lane {lane} came: it sends by {len(self.inbound)}")
        return self.inbound[lane]

    def _outbound_lane(self, lane: int) -> OutboundLane:
        if lane >= len(self.outbound):
            raise ProtocolError(f"a packet for lane {lane} came: there are {len(self.outbound)}")
        return self.outbound[lane]

    def _on_fatal(self, payload: memoryview) -> None:
        index, text = payload[0], bytes(payload[1:]).decode(errors="replace")
        if index >= len(FATAL_CAUSES):
            raise ProtocolError(f"the link ends for a reason {index}: there are {len(FATAL_CAUSES)}")
        cause = FATAL_CAUSES[index]
        how = {
            "unheard": f"has heard nothing of this side for {text}: the network is cut in that direction",
            "ended": f"has ended the link: {text}",
            "damaged": f"has received a packet that was damaged on its way from this side: {text}",
            "protocol": f"says that this side broke the protocol: {text}",
        }[cause]
        raise RemoteFailure(cause, how)

    # ── deaths at the ends ──
    def _on_local_death(self, lane: End, death: PeerDied) -> None:
        if lane.spec.on_death == "end":
            raise LocalFailure(str(death))
        is_receiver = isinstance(lane, InboundLane)
        end = (lane.spec.name, is_receiver, death.index)
        if self._deaths.get(end) == death.pid:
            return  # the last death is raised by every call
        self._deaths[end] = death.pid
        message = ChannelDeath(lane.spec.name, death.index, death.name, death.pid, death.how)
        self.queue.put(packets.DEATH, lane.number, int(is_receiver), msgspec.msgpack.encode(message))
        self._tell(message)

    def _on_remote_death(self, number: int, is_receiver: bool, payload: memoryview) -> None:
        try:
            death = msgspec.structs.replace(_death.decode(payload), is_remote=True)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a death came that is none: {error}") from None
        if is_receiver:
            self._outbound_lane(number)
            self._tell(death)
        else:
            self._inbound_lane(number).after_frames(death.index, lambda: self._tell(death))

    def _tell(self, death: ChannelDeath) -> None:
        if self.spec.on_death is not None:
            self.spec.on_death(death)

    def close(self) -> None:
        """Closes the ends. Their peers see a close, and no death."""
        for out in self.outbound:
            out.close()
        for lane in self.inbound:
            lane.close()
        if self.values is not None:
            self.values.close()
