"""Back-pressure over a link: a slow receiver holds up its own channel, and nothing else; nothing is lost by it."""

import threading
import time
from dataclasses import replace

import pytest

from penstock import Inbox, LongRecords, Ring, Timeout
from penstock.bridge import InboundChannel, Lane, LinkSpec, OutboundChannel, packets
from penstock.bridge.link_errors import ProtocolError
from penstock.bridge.link_lanes import FRAME_COST, OutboundLane
from penstock.bridge.link_offer import OfferedChannel
from penstock.bridge.link_spec import LinkStats
from penstock.bridge.packets import PacketQueue
from tests.conftest import eventually
from tests.support.links import running
from tests.support.processes import threads

# A link that dies of a heartbeat that was held up dies within the test.
QUICK = LinkSpec("link", heartbeat_s=0.05, silence_s=0.7)
WINDOW = 1 << 14


def two_channels(first: Ring, slow: Ring, second: Ring, fast: Ring) -> tuple[LinkSpec, LinkSpec]:
    return (
        replace(QUICK, channels=[OutboundChannel("slow", first), OutboundChannel("fast", second)]),
        replace(
            QUICK,
            channels=[
                InboundChannel("slow", slow, window_nbytes=WINDOW),
                InboundChannel("fast", fast, window_nbytes=WINDOW),
            ],
        ),
    )


def test_receiver_that_reads_nothing_blocks_its_channel_but_no_heartbeat() -> None:
    first, slow, second, fast = (Ring(capacity=1 << 13, name=name) for name in ("a", "slow", "b", "fast"))
    with (
        running(*two_channels(first, slow, second, fast)) as links,
        first.open_sender() as held_up,
        second.open_sender() as sender,
        slow.open_receiver() as reader,
        fast.open_receiver() as receiver,
    ):
        count = 0
        with pytest.raises(Timeout):
            while True:
                held_up.send(b"%4d" % count * 100, timeout=0.3)
                count += 1
        # Both rings and a window are full: and no more than that has left the sender's node.
        assert links[1].link.stats().backlog_nbytes <= WINDOW + 400
        ended = time.monotonic() + 3 * QUICK.silence_s
        number = 0
        while time.monotonic() < ended:
            sender.send(b"%d" % number)
            assert receiver.receive(5) == b"%d" % number
            number += 1
        assert all(link.is_running for link in links)
        received = [int(reader.receive(5)[:4]) for _ in range(count)]
        assert received == list(range(count))
        assert eventually(lambda: links[1].link.stats().backlog_nbytes == 0)


def test_a_long_frame_for_a_full_channel_waits_aside_and_heartbeats_pass() -> None:
    source, target = Ring(name="a"), Ring(name="b", long_records=LongRecords(pool_nbytes=1 << 22, max_records=1))
    home = replace(QUICK, channels=[OutboundChannel("frames", source)])
    away = replace(QUICK, channels=[InboundChannel("frames", target)])
    frames = [bytes([number]) * 3_000_000 for number in range(4)]
    with running(home, away) as links, source.open_sender() as sender, target.open_receiver() as receiver:
        sending = threading.Thread(target=lambda: [sender.send(frame) for frame in frames])
        sending.start()
        eventually(lambda: links[1].link.stats().backlog_nbytes > 0)
        time.sleep(2 * QUICK.silence_s)
        assert all(link.is_running for link in links)
        assert [receiver.receive(10) for _ in frames] == frames
        sending.join()


def test_short_frames_pass_between_parts_of_a_long_frame() -> None:
    """However long it takes until the wire has taken the long frame."""
    queue, stats = PacketQueue(), LinkStats()
    long, short = Ring(), Ring()
    offered = OfferedChannel("x", False, b"", 1, 1 << 20)
    lanes = [
        OutboundLane(number, OutboundChannel(str(number), ring), offered, queue, stats, lambda lane, death: None)
        for number, ring in enumerate((long, short))
    ]
    with long.open_sender() as sender, short.open_sender() as other:
        sender.send(bytes(3 * packets.MAX_PAYLOAD))
        other.send(b"short")
        pieces = 0
        while not pieces or lanes[0].is_within_frame:
            for lane in lanes:
                lane.pump()
            lanes[0].put_piece()
            pieces += 1
            assert queue.nbytes < 2 * packets.MAX_PAYLOAD
            queue.clear()
            other.send(b"short")
            assert stats.frames_sent == 1 + pieces
        assert pieces == 3
    for lane in lanes:
        lane.close()


def test_inbox_senders_without_credit_are_served_later() -> None:
    source, target = Inbox(senders=3, capacity=1 << 12), Inbox(senders=3, capacity=1 << 12)
    home = replace(QUICK, channels=[OutboundChannel("frames", source)])
    away = replace(
        QUICK, channels=[InboundChannel("frames", target, [Lane(0), Lane(1), Lane(2)], window_nbytes=1 << 12)]
    )
    with running(home, away), target.open_receiver() as receiver:
        senders = [source.open_sender(index) for index in range(3)]
        with threads(*(lambda sender=sender: [sender.send(b"%4d" % n * 50) for n in range(300)] for sender in senders)):
            records: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for _ in range(900):
                record = receiver.receive(10)
                records[receiver.source].append(int(record[:4]))
            assert records == {index: list(range(300)) for index in range(3)}
        for sender in senders:
            sender.close()


def test_returning_more_credit_than_was_used_is_a_protocol_error() -> None:
    ring = Ring()
    lane = OutboundLane(
        0,
        OutboundChannel("x", ring),
        OfferedChannel("x", False, b"", 1, 1000),
        PacketQueue(),
        LinkStats(),
        lambda *_: None,
    )
    with ring.open_sender() as sender:
        sender.send(b"frame")
        lane.pump()
    with pytest.raises(ProtocolError, match="1 bytes of credit more"):
        lane.add_credit(FRAME_COST + 6)
    lane.close()
