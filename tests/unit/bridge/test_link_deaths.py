"""Links die: each side's error names the process that caused the end, with the numbers."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock import Broadcast, EndOfChannel, Inbox, PeerDied, Ring
from penstock.bridge import ChannelDeath, InboundChannel, Lane, Link, LinkDied, LinkSpec, OutboundChannel, packets
from penstock.bridge.packets import HEAD, SIZES, packet_head
from tests.conftest import eventually
from tests.support.links import RunningLink, joined, named, packet, running
from tests.support.processes import program

LINK = LinkSpec("link", heartbeat_s=0.05, silence_s=10.0)  # longer than a loaded machine pauses a thread
HASTY = replace(LINK, silence_s=0.5)
SENDER = "end = penstock.attach(hear()).open_sender(int(hear()), name='server 0.1 #1'); say('open'); hear()"


def one_way(source: Any, target: Any, **options: Any) -> tuple[LinkSpec, LinkSpec]:
    home = replace(LINK, name="home", channels=[OutboundChannel("frames", source, **options)])
    away = replace(LINK, name="away", channels=[InboundChannel("frames", target, **options)])
    return home, away


@contextlib.contextmanager
def raw(home: LinkSpec = LINK, away: LinkSpec | None = None) -> Iterator[tuple[RunningLink, socket.socket]]:
    """A side that runs, and the connection of a side that does what the test says."""
    here, there = joined(named(home, "home"), named(away or home, "away"))
    with socket.socket(fileno=os.dup(there._wire.fileno())) as connection:
        there.close()
        side = RunningLink(here)
        yield side, connection
    side.end()


# ── the connection ──
def test_connection_that_ends_without_a_goodbye_is_a_kill() -> None:
    with raw() as (running_link, connection):
        connection.close()
        death = running_link.death()
        assert death.kind == "closed" and death.name == "away" and death.pid == os.getpid()
        assert str(death).startswith(f"link 'link' has died: 'away' (pid {os.getpid()} there) ")
        assert "killed" in death.how


def test_silent_side_is_dead_and_gets_the_reason() -> None:
    began = time.monotonic()
    with raw(HASTY) as (running_link, connection):
        death = running_link.death()
        assert time.monotonic() - began >= 0.45
        assert death.kind == "silent"
        assert "has sent nothing for 0.5 s: it is stopped, or the network is cut" in death.how
        connection.settimeout(5)
        sent = b""
        with pytest.raises(ConnectionResetError):
            while part := connection.recv(1 << 16):
                sent += part
            raise ConnectionResetError  # the end, where the reset has been read already
        assert packet(packets.FATAL, 0, 0, bytes([0]) + b"0.5 s") in sent, "that this side has heard nothing"


def test_side_whose_packets_are_lost_gets_the_reason() -> None:
    with raw() as (running_link, connection):
        connection.sendall(packet(packets.FATAL, 0, 0, bytes([0]) + b"0.3 s"))
        death = running_link.death()
        assert death.kind == "unheard"
        assert "has heard nothing of this side for 0.3 s: the network is cut in that direction" in death.how


def test_any_byte_is_a_sign_of_life() -> None:
    with raw(HASTY) as (running_link, connection):
        frame = packet(packets.HEARTBEAT, 0, 0, bytes(24))
        ended = time.monotonic() + 3 * HASTY.silence_s
        place = 0
        while time.monotonic() < ended:
            connection.send(frame[place : place + 1])
            place = (place + 1) % len(frame)
            time.sleep(0.02)
        assert running_link.is_running
        connection.close()
        assert running_link.death().kind == "closed"


@pytest.mark.parametrize(
    ("packet", "how"),
    [
        (packet_head(packets.FRAME, 0, 0, b"", 1 << 20), "no packet begins with"),
        (packet(99, 0, 0), "no packet begins with"),
        (packet(packets.FRAME, 3, 0, b"x"), "a packet of lane 3 came: it sends by 0"),
        (packet(packets.CREDIT, 0, 0, bytes(8)), "a packet for lane 0 came: there are 0"),
        (packet(packets.WORDS, 2, 0, bytes(16)), "words of lane 2 came: there are 0"),
        (packet(packets.WANT, 0, 0, bytes(32)), "no values cross this link"),
        (packet(packets.VALUE_PART, 0, 0, b"x"), "no values cross this link"),
        (packet(packets.DEATH, 0, 0, b"xyz"), "a death came that is none"),
        (packet(packets.FATAL, 0, 0, b"\x09x"), "the link ends for a reason 9: there are 4"),
        (packet(packets.BYE, 0, 0) + packet(packets.END, 0, 0), "a packet of kind 5 came after its last one"),
    ],
)
def test_protocol_error_ends_the_link_with_its_reason(packet: bytes, how: str) -> None:
    with raw() as (running_link, connection):
        connection.sendall(packet)
        connection.settimeout(5)
        response = b""
        while part := connection.recv(1 << 16):
            response += part
        connection.close()
        death = running_link.death()
        assert death.kind == "protocol" and how in death.how
        assert how.encode() in response


def test_frames_that_do_not_fit_a_lane_break_the_protocol() -> None:
    long = packets.LONG_NBYTES.pack
    for sent, how in (
        (packet(packets.FRAME, 0, 7, b"x"), "a frame came of sender 7 of 'frames', which has no lane here"),
        (packet(packets.FRAME_PART, 0, 0, b"x"), "without a frame"),
        (packet(packets.LONG, 0, 0, long(5)), "announced a frame of 5 bytes"),
        (packet(packets.LONG, 0, 0, long(1 << 60)), "announced a frame of"),
        (2 * (packet(packets.LONG, 0, 0, long(300_000))), "within another one"),
        (packet(packets.LONG, 0, 0, long(300_000)) + packet(packets.END, 0, 0), "ended within a frame"),
        (2 * packet(packets.END, 0, 0), "or twice"),
        (packet(packets.END, 0, 0) + packet(packets.FRAME, 0, 0, b"x"), "came after its end"),
    ):
        target = Ring()
        with raw(*reversed(one_way(Ring(), target))) as (side, connection):
            connection.sendall(sent)
            death = side.death()
            assert death.kind == "protocol" and how in death.how, (how, death.how)


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_packet_that_is_cut_off_is_not_delivered(kind: int) -> None:
    """The prefix of what was sent arrives, whole frames only; a frame that has come in part has never been."""
    target = Ring()
    with raw(*reversed(one_way(Ring(), target))) as (side, connection), target.open_receiver() as receiver:
        connection.sendall(packet(packets.FRAME, 0, 0, b"whole"))
        if kind == packets.FRAME_PART:
            connection.sendall(packet(packets.LONG, 0, 0, packets.LONG_NBYTES.pack(300_000)))
        nbytes = 1000 if kind in (packets.FRAME_PART, packets.FRAME) else max(1, SIZES[kind][1])
        connection.sendall(packet(kind, 0, 0, bytes(nbytes))[: HEAD.size + nbytes // 2 - 1])
        assert receiver.receive(5) == b"whole"
        connection.close()
        assert side.death().kind == "closed"
        side.end()
        with pytest.raises(EndOfChannel):
            receiver.receive(5)


# ── deaths at the ends ──
def test_the_death_of_a_sender_ends_the_link_and_both_sides_name_it() -> None:
    source, target = Ring(name="steps"), Ring()
    with running(*one_way(source, target)) as (home, away), program(SENDER) as core:
        core.say(source.ticket)
        core.say(0)
        assert core.hear() == "open"
        core.kill()
        here, there = home.death(), away.death()
        assert here.kind == "local" and there.kind == "ended"
        for death in (here, there):
            assert "server 0.1 #1" in death.how and str(core.pid) in death.how and "killed" in death.how
        assert "seen by 'home'" in there.how


def test_the_death_of_a_receiver_ends_the_link_and_both_sides_name_it() -> None:
    source, target = Ring(), Ring(name="deltas")
    reader = "end = penstock.attach(hear()).open_receiver(name='server 0.0 #1'); say('open'); hear()"
    with running(*one_way(source, target)) as (home, away), source.open_sender() as sender, program(reader) as server:
        server.say(target.ticket)
        assert server.hear() == "open"
        server.kill()
        with_deadline = time.monotonic() + 5
        while home.is_running and time.monotonic() < with_deadline:
            sender.send(b"x")
            time.sleep(0.005)
        assert "server 0.0 #1" in away.death().how and away.death().kind == "local"
        assert "server 0.0 #1" in home.death().how and home.death().kind == "ended"


def test_forwarded_death_is_reported_at_both_sides_and_the_link_goes_on() -> None:
    source, target = Inbox(senders=2), Inbox(senders=2)
    deaths: dict[str, list[ChannelDeath]] = {"home": [], "away": []}
    home, away = (
        replace(spec, on_death=deaths[spec.name].append) for spec in one_way(source, target, on_death="forward")
    )
    away = replace(away, channels=[replace(away.channels[0], lanes=[Lane(0), Lane(1)])])
    with running(home, away), program(SENDER) as server, target.open_receiver() as receiver:
        server.say(source.ticket)
        server.say(1)
        assert server.hear() == "open"
        server.kill()
        eventually(lambda: deaths["home"] and deaths["away"])
        here, there = deaths["home"][0], deaths["away"][0]
        assert (here.channel, here.index, here.name, here.pid) == ("frames", 1, "server 0.1 #1", server.pid)
        assert there == msgspec.structs.replace(here, is_remote=True)
        with source.open_sender(0) as other:
            other.send(b"on")
            assert receiver.receive(5) == b"on"
    assert len(deaths["home"]) == len(deaths["away"]) == 1


def test_death_is_reported_after_the_last_frames_and_those_of_a_hook() -> None:
    """The bridge does not overtake: what the hook inserts comes behind what the dead process has sent."""
    source, target = Ring(), Ring(capacity=4096)
    links: list[Link] = []
    home, away = one_way(source, target, on_death="forward")
    away = replace(away, on_death=lambda death: links[1].insert("frames", b"it is dead"))
    sending = """
        end = penstock.attach(hear()).open_sender()
        for number in range(60):
            end.send(b'%4d' % number * 100)
        say('sent')
        hear()
    """
    with running(home, away) as both, program(sending) as core:
        links += [side.link for side in both]
        core.say(source.ticket)
        assert core.hear() == "sent"
        core.kill()
        with target.open_receiver() as receiver:
            records = [receiver.receive(5) for _ in range(61)]
    assert [record[:4] for record in records] == [b"%4d" % number for number in range(60)] + [b"it i"]


def test_frames_for_a_dead_receiver_are_dropped_until_the_next_comes() -> None:
    source, target = Ring(), Ring()
    home, away = one_way(source, target, on_death="forward")
    reader = "end = penstock.attach(hear()).open_receiver(); say('open'); hear()"
    with running(home, away) as links, source.open_sender() as sender, program(reader) as server:
        server.say(target.ticket)
        assert server.hear() == "open"
        server.kill()
        eventually(lambda: sender.send(b"lost") or links[1].link.stats().frames_dropped > 0)
        with target.open_receiver() as receiver:
            sender.send(b"found")
            eventually(lambda: receiver.receive(5) == b"found")


def test_a_successor_of_a_sender_that_died_is_forwarded() -> None:
    source, target = Ring(), Ring()
    home, away = one_way(source, target, on_death="forward")
    with running(home, away) as links, target.open_receiver() as receiver:
        for number in range(2):
            with program("end = penstock.attach(hear()).open_sender(); end.send(hear().encode()); hear()") as core:
                core.say(source.ticket)
                core.say(f"from {number}")
                assert receiver.receive(5) == f"from {number}".encode()
                core.kill()
                time.sleep(0)
        assert all(link.is_running for link in links)


def test_a_link_that_died_leaves_its_ends_open() -> None:
    """So that their peers see the death of its process, and no close."""
    source, target = Broadcast(receivers=1), Ring()
    with running(*one_way(source, target)) as (home, away), source.open_sender() as sender:
        with target.open_receiver() as receiver, program(SENDER) as other:
            other.say(Ring().ticket)
            away.link._wire.close(is_aborted=True)
            with pytest.raises((LinkDied, PeerDied)):
                home.outcome()
            sender.send(b"kept")  # the receiver is there, and reads no more
            assert home.death().kind == "closed"
            away.death()
            with pytest.raises(TimeoutError):
                receiver.receive(timeout=0.05)


def test_a_signal_handler_may_stop_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = joined(replace(LINK, name="home"), replace(LINK, name="away"))
    other = RunningLink(away)
    before = signal.signal(signal.SIGUSR1, lambda *_: home.stop("told by a signal"))
    try:
        timer = signal.setitimer  # a signal in the main thread, which runs the link
        previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        timer(signal.ITIMER_REAL, 0.05)
        assert home.run() == "told by a signal"
        signal.signal(signal.SIGALRM, previous)
    finally:
        signal.signal(signal.SIGUSR1, before)
        home.close()
    assert other.outcome() == "told by a signal"
    other.end()
