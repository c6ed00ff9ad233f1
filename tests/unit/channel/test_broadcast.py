"""A broadcast: one sender, many receivers, each of which gets every record; the slowest holds it up, by name."""

import contextlib
import time
from collections.abc import Iterator

import pytest

import penstock
from penstock import LongRecords, Timeout, WouldBlock
from penstock.lowlevel import ByteReceiver, ByteSender
from tests.conftest import eventually
from tests.support.processes import program, thread

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)


@contextlib.contextmanager
def broadcast(count: int, **options: object) -> Iterator[tuple[ByteSender, list[ByteReceiver]]]:
    channel = penstock.Broadcast(receivers=count, **{"capacity": 4096, "long_records": SMALL_POOL, **options})
    with contextlib.ExitStack() as ends:
        sender = ends.enter_context(channel.open_sender())
        yield sender, [ends.enter_context(channel.open_receiver(name=f"worker {rank}")) for rank in range(count)]


def test_sixty_four_receivers_share_one_copy_of_a_long_record() -> None:
    channel = penstock.Broadcast(receivers=64, long_records=SMALL_POOL)
    with channel.open_sender() as sender, contextlib.ExitStack() as ends:
        receivers = [ends.enter_context(channel.open_receiver()) for _ in range(64)]
        sender.send(b"s" * 900_000)  # there is no room for two
        views = [receiver.receive_view(timeout=5) for receiver in receivers]
        assert channel.snapshot()["pool"][0]["blocks"] == 1
        for view in views[:-1]:
            assert bytes(view) == b"s" * 900_000
            view.release()
            with pytest.raises(WouldBlock):
                sender.send_nowait(b"t" * 900_000)
        views[-1].release()
        sender.send_nowait(b"t" * 900_000)
        for receiver in receivers:
            assert receiver.receive(timeout=5) == b"t" * 900_000
        assert channel.snapshot()["pool"][0]["blocks"] == 0


def test_timeout_names_the_slowest_receiver() -> None:
    with broadcast(3) as (sender, receivers):
        for _ in range(4):
            sender.send(b"x" * 960)
        receivers[0].receive(timeout=1)
        receivers[2].receive(timeout=1)
        receivers[2].receive(timeout=1)
        with pytest.raises(
            Timeout, match=r"receiver 1, 'worker 1' \(pid \d+\), is 4 records \(3.9 KiB\) behind"
        ) as output:
            sender.send(b"y" * 960, timeout=0.01)
        assert (output.value.receiver, output.value.records_behind, output.value.nbytes_behind) == (1, 4, 4 * 992)
        receivers[1].receive(timeout=1)
        sender.send(b"y" * 960, timeout=1)


def test_other_receivers_read_while_the_slowest_blocks_the_sender() -> None:
    with broadcast(2) as (sender, (reading, stuck)):
        sent = 0
        with contextlib.suppress(WouldBlock):
            while True:
                sender.send_nowait(b"%d" % sent)
                sent += 1
        assert [reading.receive(timeout=1) for _ in range(sent)] == [b"%d" % number for number in range(sent)]
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"more")
        assert stuck.receive(timeout=1) == b"0"
        sender.send_nowait(b"more")
        assert reading.receive(timeout=1) == b"more"


def test_records_wait_for_an_expected_receiver_that_is_absent() -> None:
    channel = penstock.Broadcast(receivers=2, capacity=4096)
    with channel.open_sender() as sender, channel.open_receiver() as first:
        for _ in range(4):
            sender.send(b"x" * 960)
            first.receive(timeout=1)
        with pytest.raises(Timeout, match="receiver 1, which has not attached yet, is 4 records"):
            sender.send(b"x" * 960, timeout=0.01)
        with channel.open_receiver() as second:
            assert [second.receive(timeout=1) for _ in range(4)] == [b"x" * 960] * 4
            sender.send(b"y", timeout=1)
            assert first.receive(timeout=1) == second.receive(timeout=1) == b"y"


def test_ends_are_opened_by_index_or_in_order() -> None:
    channel = penstock.Broadcast(receivers=3)
    with channel.open_receiver(1) as receiver, channel.open_receiver() as zero, channel.open_receiver() as two:
        assert (zero.index, receiver.index, two.index) == (0, 1, 2)
        with pytest.raises(ValueError, match="receiver 0 of 'broadcast' is taken"):
            channel.open_receiver()
        receiver.close()
        with channel.open_receiver() as again:
            assert again.index == 1


# ── waiting for the receivers ────────────────────────────────────────────────────────────────────────────────────────
def test_wait_for_receivers_returns_at_once_when_all_were_opened() -> None:
    for channel in (penstock.Ring(), penstock.Broadcast(receivers=3), penstock.Inbox(senders=2)):
        receivers = [channel.open_receiver() for _ in range(channel.receivers)]
        for timeout in (0, 1, None):
            channel.wait_for_receivers(timeout)
        receivers[0].close()  # it was there
        channel.wait_for_receivers(timeout=0)
        for receiver in receivers:
            receiver.close()


def test_wait_for_receivers_names_the_missing_receivers() -> None:
    with penstock.Broadcast(receivers=4, name="steps") as channel:
        receivers = [channel.open_receiver(index) for index in (1, 2)]
        for timeout, text in ((0, "0"), (0.05, "0.05")):
            began = time.monotonic()
            with pytest.raises(Timeout, match=rf"of the 4 receivers of 'steps', \[0, 3\] were not opened in {text} s$"):
                channel.wait_for_receivers(timeout=timeout)
            assert timeout <= time.monotonic() - began < 5
        for receiver in receivers:
            receiver.close()


def test_wait_for_receivers_waits_for_other_processes() -> None:
    source = """
        channel = penstock.attach(sys.argv[1])
        say("attached")
        hear()
        with channel.open_receiver(int(sys.argv[2])) as receiver:
            say(receiver.receive(timeout=20).decode())
            hear()
    """
    with penstock.Broadcast(receivers=2) as channel, channel.open_sender() as sender:
        with program(source, channel.ticket, 0) as item, program(source, channel.ticket, 1) as other:
            assert (item.hear(), other.hear()) == ("attached", "attached")
            with pytest.raises(Timeout, match=r"\[0, 1\]"):
                channel.wait_for_receivers(timeout=0.05)  # the attached process has not opened one yet
            item.say("open")
            eventually(lambda: channel.snapshot()["receivers"][0]["state"] == "live", within=20)
            with pytest.raises(Timeout, match=r"\[1\]"):
                penstock.attach(channel.ticket).wait_for_receivers(timeout=0.05)
            with thread(lambda: penstock.attach(channel.ticket).wait_for_receivers(timeout=20)) as waiting:
                other.say("open")
                assert waiting.ended().error is None
            sender.send(b"to both")
            assert (item.hear(), other.hear()) == ("to both", "to both")
