"""Ends for frames as they are: what passes through them is what the ends of messages send and receive."""

import contextlib
import os
import select

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from penstock import Broadcast, ClosedError, EndOfChannel, Inbox, LongRecords, PeerDied, Ring
from penstock.lowlevel import FrameReceiver, FrameSender
from tests.conftest import eventually
from tests.support.processes import program


class Number(msgspec.Struct, array_like=True):
    value: int


class Array(msgspec.Struct, array_like=True):
    values: npt.NDArray[np.int64]


def read_all(end: FrameReceiver | FrameSender) -> None:
    """What was rung before: for an end that has been opened, too."""
    with contextlib.suppress(BlockingIOError):
        os.read(end.fileno(), 4096)


def is_rung(end: FrameReceiver | FrameSender) -> bool:
    return bool(select.select([end.fileno()], [], [], 0)[0])


def test_frames_forwarded_to_another_channel_are_messages_there() -> None:
    first, second = Ring(Number | Array), Ring(Number | Array)
    with first.open_sender() as sender, second.open_receiver() as receiver:
        with FrameReceiver(first) as source, FrameSender(second) as target:
            for message in (Number(7), Array(np.arange(3)), Array(np.arange(100_000))):
                sender.send(message)
                frame = source.try_receive()
                assert frame is not None and target.try_send(frame)
            assert receiver.receive(1) == Number(7)
            assert receiver.receive(1).values.tolist() == [0, 1, 2]
            assert receiver.receive(1).values.sum() == sum(range(100_000))
            assert source.try_receive() is None


def test_a_bell_rings_when_a_frame_comes_to_an_armed_receiver() -> None:
    ring = Ring()
    with ring.open_sender() as sender, FrameReceiver(ring) as receiver:
        assert receiver.try_receive() is None
        read_all(receiver)
        assert not receiver.arm()
        assert not is_rung(receiver)
        sender.send(b"a")
        eventually(lambda: is_rung(receiver))
        receiver.disarm()
        read_all(receiver)
        assert receiver.try_receive() == b"a"
        sender.send(b"b")
        assert not is_rung(receiver), "it was not armed"
        assert receiver.arm(), "there is a frame already"
        assert receiver.try_receive() == b"b"


def test_armed_sender_is_woken_when_the_ring_has_room() -> None:
    ring = Ring(capacity=4096)
    with FrameSender(ring) as sender, FrameReceiver(ring) as receiver:
        count = 0
        while sender.try_send(bytes(500)):
            count += 1
        read_all(sender)
        assert count >= 4 and not sender.arm()
        assert not is_rung(sender)
        while receiver.try_receive() is not None:
            pass
        eventually(lambda: is_rung(sender))
        sender.disarm()
        read_all(sender)
        assert sender.try_send(bytes(500))


def test_try_reserve_fills_in_place_or_returns_none() -> None:
    ring = Ring(capacity=4096, long_records=LongRecords(inline_limit=1024, pool_nbytes=1 << 20, max_records=1))
    with FrameSender(ring) as sender, FrameReceiver(ring) as receiver:
        room = sender.try_reserve(100_000)
        assert room is not None
        with memoryview(room) as view:
            view[:5] = b"hello"
        room.commit()
        assert sender.try_reserve(100_000) is None, "the pool has one block"
        frame = receiver.try_receive()
        assert frame is not None and len(frame) == 100_000 and bytes(frame)[:5] == b"hello"
        del frame
        assert eventually(lambda: sender.try_reserve(100_000)) is not None


def test_the_source_of_a_frame_of_an_inbox_is_its_sender() -> None:
    inbox = Inbox(senders=3)
    with FrameReceiver(inbox) as receiver, FrameSender(inbox, 2) as sender:
        assert sender.index == 2
        sender.try_send(b"x")
        assert (receiver.try_receive(), receiver.source) == (b"x", 2)


def test_frame_receiver_has_the_index_it_was_opened_with() -> None:
    with FrameReceiver(Broadcast(receivers=3), 1) as receiver:
        assert receiver.index == 1


def test_frame_receiver_reports_death_close_and_end_of_channel() -> None:
    ring = Ring(name="steps")
    with FrameReceiver(ring, name="bridge") as receiver:
        with program(
            "ring = penstock.attach(hear()); end = ring.open_sender(name='core'); say('open'); hear()"
        ) as core:
            core.say(ring.ticket)
            assert core.hear() == "open"
            core.kill()
            death = eventually(lambda: _death_of(receiver))
            assert (death.name, death.index) == ("core", 0)
    with pytest.raises(ClosedError):
        receiver.try_receive()
    broadcast = Broadcast(receivers=1)
    with FrameReceiver(broadcast) as other:
        FrameSender(broadcast).close()
        with pytest.raises(EndOfChannel):
            other.try_receive()


def _death_of(receiver: FrameReceiver) -> PeerDied | None:
    try:
        receiver.try_receive()
    except PeerDied as death:
        return death
    return None


def test_a_channel_describes_its_messages_for_a_process_that_forwards_them() -> None:
    assert Ring().schema == b""
    assert b"Number" in Ring(Number).schema
    assert Ring(Number).schema == Inbox(Number, senders=2).schema
