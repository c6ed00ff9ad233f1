"""A reservation: room for one record, filled in place; visible with commit, never after abort."""

import contextlib
import gc
from collections.abc import Iterator

import pytest

import penstock
from penstock import ClosedError, LongRecords, Timeout
from penstock.lowlevel import ByteReceiver, ByteSender
from tests.conftest import eventually
from tests.support.channels import SMALL_POOL, ring
from tests.support.processes import forked, program, thread

SIZES = [0, 1, 1000, 5000]  # the last one is spilled


@pytest.mark.parametrize("nbytes", SIZES)
def test_reservation_is_received_after_commit_only(nbytes: int) -> None:
    with ring() as (_, sender, receiver):
        room = sender.reserve(nbytes)
        assert len(room) == nbytes
        view = memoryview(room)
        view[:] = b"x" * nbytes
        view.release()
        assert receiver.try_receive() is None
        room.commit()
        assert receiver.receive(timeout=1) == b"x" * nbytes
        assert receiver.try_receive() is None


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_exception_in_a_reservation_block_sends_no_record(nbytes: int, error: type[BaseException]) -> None:
    with ring() as (channel, sender, receiver):
        with pytest.raises(error), sender.reserve(nbytes) as room:
            memoryview(room)[:] = b"half" * (nbytes // 4) + b"-" * (nbytes % 4)
            raise error
        assert receiver.try_receive() is None
        sender.send(b"next")
        assert receiver.receive(timeout=1) == b"next"
        assert channel.snapshot()["pool"][0]["blocks"] == 0


@pytest.mark.parametrize("nbytes", SIZES)
def test_exception_in_a_reservation_block_passes_despite_a_live_view(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):

        def fill_half() -> None:
            with sender.reserve(nbytes) as room:
                view = memoryview(room)
                view[: nbytes // 2] = b"x" * (nbytes // 2)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as output:
            fill_half()
        del output  # and with it the frame that holds the view
        gc.collect()
        assert receiver.try_receive() is None
        sender.send(b"next")
        assert receiver.receive(timeout=1) == b"next"
        assert channel.snapshot()["pool"][0]["blocks"] == 0


def test_a_reservation_that_is_dropped_is_aborted() -> None:
    for nbytes in SIZES:
        with ring() as (channel, sender, receiver):
            sender.reserve(nbytes)
            gc.collect()
            sender.send(b"next")
            assert receiver.receive(timeout=1) == b"next"
            assert channel.snapshot()["pool"][0]["blocks"] == 0


@pytest.mark.parametrize("reserved", [100, 1000, 5000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_reservation_commits_as_many_bytes_as_were_written(reserved: int, share: float) -> None:
    written = int(reserved * share)
    with ring(capacity=1 << 14, long_records=LongRecords(inline_limit=2000, pool_nbytes=1 << 16)) as (
        channel,
        sender,
        receiver,
    ):
        for turn in range(200):  # so that it goes round the ring, and the pool is not used up
            room = sender.reserve(reserved, timeout=1)
            with memoryview(room) as view:
                view[:written] = bytes([turn]) * written
            room.commit(written)
            sender.send(b"next")
            assert receiver.receive(timeout=1) == bytes([turn]) * written
            assert receiver.receive(timeout=1) == b"next"
        assert channel.snapshot()["pool"][0]["blocks"] == 0


def test_a_reservation_commits_no_more_bytes_than_it_has() -> None:
    with ring() as (_, sender, receiver):
        room = sender.reserve(100)
        with pytest.raises(ValueError, match="the reservation has 100 bytes: 101 cannot be committed"):
            room.commit(101)
        room.commit(3)
        assert len(receiver.receive(timeout=1)) == 3


def test_a_reservation_ends_once() -> None:
    with ring() as (_, sender, receiver):
        room = sender.reserve(5)
        room.commit()
        room.abort()  # too late: nothing happens
        with pytest.raises(ClosedError, match="has been committed or aborted"):
            room.commit()
        with pytest.raises(BufferError, match="has been committed or aborted"):
            memoryview(room)
        room = sender.reserve(5)
        room.abort()
        with pytest.raises(ClosedError):
            room.commit()
        assert len(receiver.receive(timeout=1)) == 5
        assert receiver.try_receive() is None


def test_commit_waits_for_the_views_to_go() -> None:
    with ring() as (_, sender, receiver):
        room = sender.reserve(4)
        view = memoryview(room)
        view[:] = b"done"
        with pytest.raises(BufferError, match="the reservation has 1 views: drop them first"):
            room.commit()
        assert receiver.try_receive() is None
        view.release()
        room.commit()
        assert receiver.receive(timeout=1) == b"done"


def test_a_sender_has_one_reservation_at_a_time() -> None:
    with ring() as (_, sender, receiver):
        with sender.reserve(5) as room:
            memoryview(room)[:] = b"first"
            for call in (lambda: sender.reserve(5), lambda: sender.send(b"x"), lambda: sender.send_nowait(b"x")):
                with pytest.raises(ValueError, match="a reservation is open: commit or abort it first"):
                    call()
        sender.send(b"second")
        assert [receiver.receive(timeout=1) for _ in range(2)] == [b"first", b"second"]


def test_closing_the_sender_aborts_its_reservation() -> None:
    for nbytes in SIZES:
        with ring() as (channel, sender, receiver):
            room = sender.reserve(nbytes)
            sender.close()
            with pytest.raises(BufferError):
                memoryview(room)
            with pytest.raises(ClosedError):
                room.commit()
            assert list(receiver) == []
            assert channel.snapshot()["pool"][0]["blocks"] == 0


@contextlib.contextmanager
def inbox_of(lanes: int) -> Iterator[tuple[penstock.Inbox, ByteReceiver]]:
    with (
        penstock.Inbox(senders=lanes, capacity=4096, long_records=SMALL_POOL) as inbox,
        inbox.open_receiver() as receiver,
    ):
        yield inbox, receiver


@pytest.mark.parametrize("nbytes", [1, 1000, 5000])
@pytest.mark.parametrize("is_aborted", [False, True], ids=["open", "aborted"])
def test_view_that_outlives_its_sender_overwrites_no_record(nbytes: int, is_aborted: bool) -> None:
    with inbox_of(1) as (inbox, receiver):
        first = inbox.open_sender(name="first")
        first.send(b"before")
        room = first.reserve(nbytes)
        view = memoryview(room)
        if is_aborted:
            room.abort()
        first.close()
        assert first.is_closed
        with inbox.open_sender(name="second") as second:
            for n in range(10):
                second.send(bytes([n]) * nbytes)
                view[:] = b"B" * nbytes
            assert receiver.receive(timeout=1) == b"before"
            assert [receiver.receive(timeout=1) for _ in range(10)] == [bytes([n]) * nbytes for n in range(10)]
            assert inbox.snapshot()["pool"][0]["blocks"] == (1 if nbytes == 5000 else 0)
        view.release()
        assert inbox.snapshot()["pool"][0]["blocks"] == 0
        with inbox.open_sender(name="third") as third:
            third.send(b"C" * nbytes)
            assert receiver.receive(timeout=1) == b"C" * nbytes
        assert list(receiver) == []


def fill(sender: ByteSender, receiver: ByteReceiver, view: memoryview) -> None:
    """Sends until the room that the view keeps is in the way; all is right until then, and the error says it."""
    for n in range(1000):
        view[:] = b"B" * len(view)
        try:
            sender.send(b"%d" % n, timeout=0.01)
        except Timeout as error:
            assert "a view of a reservation by 'first' (pid" in str(error) and "drop the view" in str(error)
            assert n > 10
            return
        assert receiver.receive(timeout=1) == b"%d" % n
    raise AssertionError("the ring was never full")


@pytest.mark.parametrize("before", range(0, 4096, 480))
def test_next_sender_waits_for_the_room_of_a_leftover_view(before: int) -> None:
    with inbox_of(1) as (inbox, receiver):
        with inbox.open_sender(name="first") as first:
            for nbytes in [480] * (before // 480):  # so that the room lies anywhere, also behind a skip
                first.send(bytes(nbytes))
                receiver.receive(timeout=1)
            view = memoryview(first.reserve(992))
        with inbox.open_sender(name="second") as second:
            fill(second, receiver, view)
            with thread(lambda: second.send(b"waits", timeout=20)) as waiting:
                eventually(lambda: inbox.snapshot()["senders"][0]["waiting_ns"] > 15_000_000)
                view.release()
                waiting.ended()
            assert receiver.receive(timeout=1) == b"waits"
            for n in range(20):  # in the ring again, over the room that was kept
                second.send(bytes([n]) * 900)
                assert receiver.receive(timeout=1) == bytes([n]) * 900
            assert inbox.snapshot()["senders"][0]["spills"] > 10


def test_several_senders_of_a_lane_may_leave_views_behind() -> None:
    with inbox_of(1) as (inbox, receiver):
        views = []
        for n in range(5):
            with inbox.open_sender() as sender:
                sender.send(bytes([n]) * 500)
                views.append(memoryview(sender.reserve(500)))
        for view in views:
            view[:] = b"B" * 500
        assert [receiver.receive(timeout=1) for _ in range(5)] == [bytes([n]) * 500 for n in range(5)]
        while views:
            views.pop(0).release()
            assert inbox.snapshot()["pool"][0]["blocks"] == len(views)
        with inbox.open_sender() as sender:
            sender.send(b"last")
            assert receiver.receive(timeout=1) == b"last"


def test_death_frees_the_room_of_a_leftover_view() -> None:
    keeps = """
inbox = penstock.attach(sys.argv[1])
with inbox.open_sender(name="first") as first:
    view = memoryview(first.reserve(992))
say("closed")
hear()
"""
    with inbox_of(1) as (inbox, receiver), program(keeps, inbox.ticket) as other:
        assert other.hear() == "closed"
        with inbox.open_sender(name="second") as second:
            fill(second, receiver, memoryview(bytearray(1)))
            with thread(lambda: second.send(b"waits", timeout=20)) as waiting:
                eventually(lambda: inbox.snapshot()["senders"][0]["waiting_ns"] > 15_000_000)
                other.kill()
                waiting.ended()
            assert receiver.receive(timeout=1) == b"waits"


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_view_that_outlives_its_sender_keeps_no_receiver_waiting(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):
        sender.send(b"last")
        view = memoryview(sender.reserve(nbytes))
        sender.close()
        assert list(receiver) == [b"last"]
        assert [end["state"] for end in channel.snapshot()["senders"]] == ["closed"]
        assert [peer.state for peer in channel.peers()] == ["live", "left"]  # the receiver has closed
        view.release()
        assert [peer.state for peer in channel.peers()] == ["left", "left"]


@pytest.mark.parametrize("nbytes", [1000, 5000])
def test_a_view_keeps_its_room_when_sender_and_reservation_are_dropped(nbytes: int) -> None:
    with penstock.Inbox(senders=1, capacity=4096, long_records=SMALL_POOL) as inbox, inbox.open_receiver() as receiver:
        view = memoryview(inbox.open_sender().reserve(nbytes))
        gc.collect()
        with pytest.raises(ValueError, match="sender 0 of 'inbox' is taken"):
            inbox.open_sender(0)
        view[:] = b"B" * nbytes
        view.release()
        gc.collect()
        with inbox.open_sender(0) as successor:
            successor.send(b"A" * nbytes)
            assert receiver.receive(timeout=1) == b"A" * nbytes


def test_a_room_of_many_views_is_kept_until_the_last_is_dropped() -> None:
    with inbox_of(1) as (inbox, receiver):
        with inbox.open_sender() as first:
            views = [memoryview(first.reserve(100))]
            views += [memoryview(views[0].obj) for _ in range(3)]
        with inbox.open_sender() as second:
            for spills in (1, 2, 3, 4, 4):  # while it is kept, records lie in the pool
                second.send(b"x")
                assert receiver.receive(timeout=1) == b"x"
                assert inbox.snapshot()["senders"][0]["spills"] == spills
                if views:
                    views.pop()


@pytest.mark.parametrize("nbytes", [-1, 2**63, 2**64, 1.5, "5", None], ids=repr)
def test_an_impossible_size_is_refused(nbytes: object) -> None:
    with ring() as (_, sender, receiver):
        with pytest.raises((TypeError, ValueError, penstock.MemoryExhausted)):
            sender.reserve(nbytes)
        sender.send(b"next")
        assert receiver.receive(timeout=1) == b"next"


def test_a_reservation_waits_for_room_and_for_its_deadline() -> None:
    with ring() as (_, sender, receiver):
        for _ in range(4):
            sender.send(b"x" * 960)
        with pytest.raises(Timeout, match="'ring' is full"):
            sender.reserve(960, timeout=0.01)
        receiver.receive(timeout=1)
        with sender.reserve(960, timeout=1) as room:
            memoryview(room)[:] = b"y" * 960


@pytest.mark.parametrize("nbytes", [10, 5000])
@pytest.mark.parametrize("verb", ["commit", "abort", "__exit__"])
def test_a_child_of_fork_does_not_end_its_parents_reservation(nbytes: int, verb: str) -> None:
    with ring() as (channel, sender, receiver):
        room = sender.reserve(nbytes)
        memoryview(room)[:] = b"p" * nbytes

        def end_it() -> None:
            if verb == "abort":
                return room.abort()
            with pytest.raises(ClosedError):
                room.commit() if verb == "commit" else room.__exit__(None, None, None)

        assert forked(end_it) == 0
        assert receiver.try_receive() is None
        assert channel.snapshot()["pool"][0]["blocks"] == (1 if nbytes == 5000 else 0)
        room.commit()
        assert receiver.receive(timeout=1) == b"p" * nbytes
        assert receiver.try_receive() is None
