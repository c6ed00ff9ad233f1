"""The two processes of a link killed, stopped and cut off: both sides say so in time, and frames are a prefix of what
was sent, whole and in order."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import numpy as np
import pytest

from penstock import Empty, EndOfChannel, PeerDied, Ring, Store, Timeout
from penstock.bridge import (
    InboundChannel,
    LinkDied,
    LinkSpec,
    Listener,
    OutboundChannel,
    PullChannels,
    Puller,
    StoreValues,
    connect,
)
from tests import tiers
from tests.conftest import eventually, spawn
from tests.support.links import SECRET
from tests.support.relay import TO_CONNECTOR, TO_LISTENER, relay

LINK = LinkSpec("link", heartbeat_s=0.1, silence_s=0.6)
NOTICED_S = 2.5  # on a busy machine; the silence is 0.6 s
KILLED_S = 1.0
FRAME = 300  # bytes of each frame but every 20th, which is long


def home_side(parent: Connection, spec: LinkSpec) -> None:
    with Listener(("127.0.0.1", 0), secret=SECRET) as listener:
        parent.send(listener.address)
        report(parent, listener.accept(replace(spec, name="home"), timeout=20))


def away_side(parent: Connection, spec: LinkSpec, address: tuple[str, int]) -> None:
    report(parent, connect(address, replace(spec, name="away"), secret=SECRET, timeout=20))


def report(parent: Connection, link: object) -> None:
    """Runs the link, and ends as a process of a group does: its ends are not closed."""
    parent.send("runs")
    try:
        parent.send(("", link.run(), time.monotonic()))
    except LinkDied as death:
        parent.send((death.kind, str(death), time.monotonic()))
    os._exit(0)


@dataclass
class Side:
    process: SpawnProcess
    parent: Connection

    def hear(self, within: float = 20.0) -> object:
        assert self.parent.poll(within), f"{self.process.name} says nothing"
        return self.parent.recv()

    def end(self, within: float = 10.0) -> tuple[str, str, float]:
        """Cause, text, and when."""
        heard = self.hear(within)
        assert isinstance(heard, tuple)
        return heard

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def two_sides(home: LinkSpec, away: LinkSpec, through: list[object] | None = None) -> Iterator[tuple[Side, Side]]:
    """Both sides run, each in its process; with `through`, by a relay that is put into it."""
    ends = [Pipe(), Pipe()]
    with spawn(home_side, ends[0][1], home, within=60) as first:
        sides = [Side(first, ends[0][0])]
        address = sides[0].hear()
        assert isinstance(address, tuple)
        with relay(address) as relayed:
            if through is not None:
                through.append(relayed)
            reached = address if through is None else relayed.address
            with spawn(away_side, ends[1][1], away, reached, within=60) as second:
                sides.append(Side(second, ends[1][0]))
                for side in sides:
                    assert side.hear() == "runs"
                yield sides[0], sides[1]
    for pair in ends:
        for connection in pair:
            connection.close()


def frame(number: int) -> bytes:
    return b"%8d" % number + bytes(400_000 if number % 20 == 19 else FRAME)


def channels(source: Ring, target: Ring) -> tuple[LinkSpec, LinkSpec]:
    home = replace(LINK, channels=[OutboundChannel("frames", source)])
    return home, replace(LINK, channels=[InboundChannel("frames", target)])


def read_prefix(receiver: object) -> list[bytes]:
    """All that has come by the time at which the bridge over there has died."""
    frames = []
    try:
        while True:
            frames.append(receiver.receive(5))
    except (PeerDied, EndOfChannel):
        return frames


def must_be_prefix(frames: list[bytes], sent: int) -> None:
    assert len(frames) <= sent
    for number, frame_received in enumerate(frames):
        assert frame_received == frame(number)


def send_until_death(sender: object) -> int:
    """Sends frames until the bridge of this node has died. Returns how many."""
    sent = 0
    try:
        while True:
            sender.send(frame(sent), timeout=10)
            sent += 1
    except (PeerDied, EndOfChannel):
        return sent


@pytest.mark.parametrize("victim", [0, 1])
def test_a_side_that_is_killed_is_noticed_at_once_and_frames_are_a_prefix(victim: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(tiers.BRIDGE_DEATHS):
        source, target = Ring(), Ring()
        with two_sides(*channels(source, target)) as sides:
            with source.open_sender() as sender, target.open_receiver() as receiver:
                sender.send(frame(0))
                assert receiver.receive(10) == frame(0), "the link is up"
                count = chance.randrange(1, 120)
                for number in range(1, count):
                    sender.send(frame(number), timeout=10)
                killed_at = time.monotonic()
                sides[victim].signal(signal.SIGKILL)
                cause, text, at = sides[1 - victim].end()
                assert cause == "closed" and "killed" in text
                assert at - killed_at < KILLED_S
                must_be_prefix([frame(0), *read_prefix(receiver)], count)
                assert send_until_death(sender) >= 0


def test_stopped_side_is_noticed_and_finds_its_link_ended() -> None:
    source, target = Ring(), Ring()
    with two_sides(*channels(source, target)) as (home, away):
        with source.open_sender() as sender, target.open_receiver() as receiver:
            sender.send(frame(0))
            assert receiver.receive(5) == frame(0)
            stopped_at = time.monotonic()
            away.signal(signal.SIGSTOP)
            cause, text, at = home.end()
            assert cause == "silent" and "it is stopped, or the network is cut" in text
            assert LINK.silence_s - LINK.heartbeat_s - 0.1 < at - stopped_at < NOTICED_S
            away.signal(signal.SIGCONT)
            cause, text, _ = away.end()
            assert cause in ("unheard", "closed", "silent")  # by what it reads first: it has heard nothing either


@pytest.mark.parametrize("stopped", [0, 1], ids=["home", "away"])
def test_link_goes_on_after_a_reset_while_a_side_is_stopped(stopped: int) -> None:
    source, target = Ring(), Ring()
    between: list[object] = []
    specs = (replace(spec, silence_s=5.0) for spec in channels(source, target))
    with two_sides(*specs, between) as sides:
        with source.open_sender() as sender, target.open_receiver() as receiver:
            for number in range(60):
                if number % 20 == 10:
                    sides[stopped].signal(signal.SIGSTOP)
                    between[0].reset()
                    time.sleep(0.2)
                    sides[stopped].signal(signal.SIGCONT)
                sender.send(frame(number), timeout=10)
                assert receiver.receive(10) == frame(number)
            assert all(side.process.is_alive() and not side.parent.poll() for side in sides)


@pytest.mark.parametrize(
    "directions",
    [
        (TO_LISTENER,),
        pytest.param((TO_CONNECTOR,), marks=tiers.needs_all),
        pytest.param((TO_LISTENER, TO_CONNECTOR), marks=tiers.needs_all),
    ],
)
def test_a_network_that_is_cut_is_noticed_at_both_sides(directions: tuple[int, ...]) -> None:
    """One way lost, too: the side that hears nothing tells the other one."""
    source, target = Ring(), Ring()
    between: list[object] = []
    with two_sides(*channels(source, target), between) as sides:
        with source.open_sender() as sender, target.open_receiver() as receiver:
            for number in range(5):
                sender.send(frame(number))
                assert receiver.receive(5) == frame(number)
            cut_at = time.monotonic()
            between[0].cut(*directions)
            ends = [side.end() for side in sides]
            assert all(at - cut_at < NOTICED_S for *_, at in ends)
            causes = {cause for cause, *_ in ends}
            assert "silent" in causes and causes <= {"silent", "unheard", "closed"}, ends
            must_be_prefix([frame(number) for number in range(5)] + read_prefix(receiver), 5)


def test_a_network_that_is_slow_is_no_death() -> None:
    source, target = Ring(), Ring()
    between: list[object] = []
    with two_sides(*channels(source, target), between) as (home, away):
        with source.open_sender() as sender, target.open_receiver() as receiver:
            between[0].delay_s = 0.2
            for number in range(60):
                sender.send(frame(number))
            for number in range(60):
                assert receiver.receive(10) == frame(number)
            assert home.process.is_alive() and away.process.is_alive()


def test_a_death_within_a_value_leaves_its_key_to_another_writer() -> None:
    pulls = PullChannels.open(1)
    with Store(1 << 27, name="home") as home, Store(1 << 27, name="away") as away:
        home.put(np.zeros(1 << 23), key=bytes(32)).release()
        specs = (replace(LINK, values=StoreValues(home)), replace(LINK, values=StoreValues(away, pulls)))
        between: list[object] = []
        with two_sides(*specs, between) as (first, _):
            puller = Puller(pulls, 0, away)
            with pytest.raises(Timeout):
                between[0].delay_s = 0.02
                puller.get(bytes(32), timeout=0.2)
            eventually(lambda: between[0].nbytes[TO_CONNECTOR] > 1 << 18, within=10)
            first.signal(signal.SIGKILL)
            with pytest.raises((PeerDied, Timeout)):
                puller.get(bytes(32), timeout=10)
            puller.close()
        loan = away.loan(bytes(32), Empty(4, "int64"), timeout=5)
        value = loan.value()
        value[:] = 7
        del value
        assert loan.commit().value().tolist() == [7] * 4
    pulls.close()
