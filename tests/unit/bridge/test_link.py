"""A link between channels of two nodes: frames as they are, in order, exactly once; and its ends in peace."""

import functools
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import penstock
from penstock import Broadcast, Buffer, EndOfChannel, Inbox, Ring, WouldBlock
from penstock.bridge import InboundChannel, Lane, LinkSpec, OutboundChannel
from tests.conftest import eventually
from tests.support.links import running
from tests.support.processes import threads

LINK = LinkSpec("link")


class Number(msgspec.Struct, array_like=True):
    value: int


class Array(msgspec.Struct, array_like=True):
    values: npt.NDArray[np.int64]


def one_way(source: Any, target: Any, **options: Any) -> tuple[LinkSpec, LinkSpec]:
    """A link that takes the frames of one channel into another."""
    return (
        replace(LINK, channels=[OutboundChannel("frames", source)]),
        replace(LINK, channels=[InboundChannel("frames", target, **options)]),
    )


def test_messages_pass_as_they_are_in_their_order() -> None:
    source, target = Broadcast(Number | Array, receivers=1), Broadcast(Number | Array, receivers=2)
    with running(*one_way(source, target)), source.open_sender() as sender:
        receivers = [target.open_receiver(), target.open_receiver()]
        for number in range(300):
            sender.send(Number(number))
        sender.send(Array(np.arange(1000)))
        sender.send(Array(np.arange(1 << 18)))  # 2 MiB: in pieces
        sender.send(Number(-1))
        for receiver in receivers:
            assert [receiver.receive(5).value for _ in range(300)] == list(range(300))
            assert receiver.receive(5).values.sum() == 499_500
            assert np.array_equal(receiver.receive(5).values, np.arange(1 << 18))
            assert receiver.receive(5) == Number(-1)
            receiver.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (64 << 10) + 1, 256 << 10, (256 << 10) + 1, 5 << 20])
def test_a_frame_of_any_length_passes(nbytes: int) -> None:
    source, target = Ring(), Ring()
    frame = np.random.default_rng(nbytes).bytes(nbytes)
    with running(*one_way(source, target)), source.open_sender() as sender, target.open_receiver() as receiver:
        for last in (b"a", b"b"):
            sender.send([frame, last])
            assert receiver.receive(10) == frame + last


def test_forwarded_buffers_are_views_of_the_remote_pool() -> None:
    source, target = Ring(Buffer), Ring(Buffer)
    with running(*one_way(source, target)), source.open_sender() as sender, target.open_receiver() as receiver:
        sender.send(b"x" * 1_000_000)
        assert bytes(receiver.receive(5).view) == b"x" * 1_000_000


def test_each_sender_of_an_inbox_has_its_lane_and_its_order() -> None:
    source, target = Inbox(senders=3), Inbox(senders=8)
    with (
        running(*one_way(source, target, lanes=[Lane(5, "server 0"), Lane(6, "server 1"), Lane(2, "server 2")])),
        target.open_receiver() as receiver,
    ):
        senders = [source.open_sender(index) for index in range(3)]
        with threads(*(functools.partial(send_all, sender, 200) for sender in senders)):
            records: dict[int, list[int]] = {}
            for _ in range(600):
                record = receiver.receive(5)
                records.setdefault(receiver.source, []).append(int(record))
            assert records == {lane: list(range(200)) for lane in (5, 6, 2)}
            names = {end["peer"]: end["state"] for end in target.snapshot()["senders"] if end["state"] == "live"}
            assert len(names) == 3
            assert {peer.name for peer in target.peers()} >= {"server 0", "server 1", "server 2"}
        for sender in senders:
            sender.close()


def send_all(sender: penstock.Sender[bytes], count: int) -> None:
    for number in range(count):
        sender.send(b"%d" % number)


# ── the end in peace ──
def test_both_sides_return_when_all_channels_have_ended() -> None:
    source, target = Ring(), Ring()
    with running(*one_way(source, target)) as (home, away), target.open_receiver() as receiver:
        with source.open_sender() as sender:
            for number in range(50):
                sender.send(b"%d" % number)
        assert [int(record) for record in receiver] == list(range(50))
        assert home.outcome() == away.outcome() == "all channels have ended"


def test_end_of_a_channel_is_forwarded_and_other_channels_go_on() -> None:
    first, second, third, fourth = Ring(), Ring(), Ring(), Ring()
    home = replace(LINK, channels=[OutboundChannel("a", first), OutboundChannel("b", second)])
    away = replace(LINK, channels=[InboundChannel("b", fourth), InboundChannel("a", third)])
    with running(home, away) as (link, _), second.open_sender() as sender, fourth.open_receiver() as receiver:
        first.open_sender().close()
        with pytest.raises(EndOfChannel), third.open_receiver() as ended:
            ended.receive(5)
        sender.send(b"on")
        assert receiver.receive(5) == b"on"
        assert link.is_running


def test_stop_at_either_side_ends_both_and_loses_no_read_record() -> None:
    for side in range(2):
        source, target = Ring(), Ring()
        with (
            running(*one_way(source, target)) as links,
            source.open_sender() as sender,
            target.open_receiver() as receiver,
        ):
            sender.send(b"x" * 3_000_000)
            eventually(lambda links=links: links[0].link.stats().frames_sent == 1)
            links[side].link.stop("no more work")
            assert links[0].outcome() == links[1].outcome() == "no more work"
            assert receiver.receive(5) == b"x" * 3_000_000


def test_a_link_without_channels_lives_until_it_is_stopped() -> None:
    with running(LINK, LINK) as (home, away):
        eventually(lambda: away.link.stats().nbytes_received > 0)  # a heartbeat
        assert home.is_running and away.is_running
        home.link.stop("enough")
        assert away.outcome() == "enough"


def test_stop_waits_at_most_silence_s_for_a_receiver_that_reads_nothing() -> None:
    source, target = Ring(), Ring(capacity=4096)
    home, away = (replace(spec, heartbeat_s=0.05, silence_s=0.2) for spec in one_way(source, target))
    with running(home, away) as links, source.open_sender() as sender, target.open_receiver() as receiver:
        for number in range(100):
            sender.send(b"%4d" % number * 100)
        eventually(lambda: links[1].link.stats().backlog_nbytes > 0)
        links[0].link.stop("enough")
        assert links[0].outcome() == links[1].outcome() == "enough"
        assert int(receiver.receive(1)[:4]) == 0


def test_closing_after_the_end_closes_the_ends() -> None:
    source, target = Ring(), Ring()
    with target.open_receiver() as receiver:
        with running(*one_way(source, target)) as links:
            links[0].link.stop("enough")
            links[1].outcome()
            with pytest.raises(WouldBlock):
                receiver.receive_nowait()
        with pytest.raises(EndOfChannel):
            receiver.receive(5)


# ── counts ──
def test_both_sides_count_what_passes_and_measure_the_round_trip() -> None:
    source, target = Ring(), Ring()
    home, away = (replace(spec, heartbeat_s=0.02) for spec in one_way(source, target))
    with running(home, away) as links, source.open_sender() as sender, target.open_receiver() as receiver:
        sender.send(b"12345")
        receiver.receive(5)
        for side in links:
            eventually(lambda side=side: side.link.stats().round_trip_ns > 0)
        sent, received = links[0].link.stats(), links[1].link.stats()
        assert (sent.frames_sent, received.frames_received) == (1, 1)
        assert sent.nbytes_sent >= 5 and received.heard_s < 2
        assert abs(sent.clock_offset_ns) < 1_000_000_000  # the clocks are the same one: within the round trip
