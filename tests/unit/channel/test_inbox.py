"""An inbox: many senders, one receiver; in order for each sender, taken in turn among them."""

import contextlib
from collections.abc import Iterator

import pytest

import penstock
from penstock import EndOfChannel, LongRecords, Timeout
from penstock.lowlevel import ByteReceiver, ByteSender

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)


@contextlib.contextmanager
def inbox(count: int, **options: object) -> Iterator[tuple[list[ByteSender], ByteReceiver]]:
    channel = penstock.Inbox(senders=count, **{"capacity": 4096, "long_records": SMALL_POOL, **options})
    with contextlib.ExitStack() as ends:
        senders = [ends.enter_context(channel.open_sender(name=f"api {rank}")) for rank in range(count)]
        yield senders, ends.enter_context(channel.open_receiver())


def test_a_busy_sender_does_not_starve_another() -> None:
    with inbox(3) as (senders, receiver):
        for number in range(20):
            senders[0].send(b"busy %d" % number)
        senders[1].send(b"calm")
        senders[2].send(b"calm too")
        first = [receiver.receive(timeout=1) for _ in range(4)]
        assert {b"calm", b"calm too"} < set(first)


def test_a_full_lane_holds_up_its_own_sender_only() -> None:
    with inbox(2) as (senders, receiver):
        with pytest.raises(Timeout, match="receiver 0, 'pid") as output:
            for _ in range(5):
                senders[0].send(b"x" * 960, timeout=0.01)
        assert output.value.records_behind == 4
        senders[1].send_nowait(b"free")
        assert sorted(receiver.receive(timeout=1) for _ in range(5)) == [b"free", *[b"x" * 960] * 4]


def test_inbox_ends_when_all_senders_have_closed() -> None:
    with inbox(3) as (senders, receiver):
        for rank, sender in enumerate(senders):
            sender.send(b"%d" % rank)
            sender.send(b"%d" % rank * 5000)
            sender.close()
        assert sorted(receiver) == sorted(b"%d" % rank * times for rank in range(3) for times in (1, 5000))
        assert list(receiver) == []
        with pytest.raises(EndOfChannel, match="receiver 0 of 'inbox' has reached the end"):
            receiver.receive_nowait()


def test_inbox_waits_for_a_sender_that_was_not_opened_yet() -> None:
    channel = penstock.Inbox(senders=2)
    with channel.open_receiver() as receiver:
        channel.open_sender().close()
        with pytest.raises(Timeout):
            receiver.receive(timeout=0.01)
        with channel.open_sender() as late:
            late.send(b"late")
        assert list(receiver) == [b"late"]
