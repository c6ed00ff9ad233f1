"""A view of a record: a lease that keeps the bytes where they are, inline or spilled, until the last view is gone."""

import gc
import random

import numpy as np
import pytest

import penstock
from penstock import ClosedError, Timeout, WouldBlock
from penstock.lowlevel import BlockLease
from tests.support.channels import ring

SIZES = [0, 1, 1000, 5000]  # the last one is spilled


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_view_shows_the_record(nbytes: int) -> None:
    with ring() as (_, sender, receiver):
        record = random.Random(nbytes).randbytes(nbytes)
        sender.send(record)
        with receiver.receive_view(timeout=1) as lease:
            assert isinstance(lease, BlockLease)
            assert bytes(lease) == record
            assert (len(lease), lease.nbytes, lease.is_writable, lease.is_released) == (nbytes, nbytes, False, False)
        assert lease.is_released


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_view_cannot_be_written_to(nbytes: int) -> None:
    with ring() as (_, sender, receiver):
        sender.send(bytes(nbytes))
        lease = receiver.receive_view(timeout=1)
        view = memoryview(lease)
        array = np.frombuffer(lease, np.uint8) if nbytes else np.array([], np.uint8)
        assert view.readonly
        assert nbytes == 0 or not array.flags.writeable
        if nbytes:
            with pytest.raises(TypeError):
                view[0] = 1
            with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
                array.flags.writeable = True


def test_a_held_view_keeps_its_room_and_then_gives_it_back() -> None:
    with ring() as (_, sender, receiver):
        for letter in b"abcd":
            sender.send(bytes([letter]) * 960)
        views = [receiver.receive_view(timeout=1) for _ in range(4)]
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"e" * 960)
        with pytest.raises(Timeout, match="is 4 records"):
            sender.send(b"e" * 960, timeout=0.01)
        assert [bytes(view) for view in views] == [bytes([letter]) * 960 for letter in b"abcd"]
        views[0].release()
        sender.send_nowait(b"e" * 960)
        assert [bytes(view) for view in views[1:]] == [bytes([letter]) * 960 for letter in b"bcd"]
        assert receiver.receive(timeout=1) == b"e" * 960


def test_views_released_in_any_order_free_room_from_the_oldest_on() -> None:
    with ring() as (channel, sender, receiver):
        for _ in range(4):
            sender.send(b"x" * 960)
        views = [receiver.receive_view(timeout=1) for _ in range(4)]
        for behind, index in ((4, 2), (4, 1), (1, 0), (0, 3)):
            views[index].release()
            assert channel.snapshot()["receivers"][0]["nbytes_behind"] == behind * 992


def test_records_copied_beside_a_held_view_keep_their_room() -> None:
    with ring() as (channel, sender, receiver):
        for _ in range(4):
            sender.send(b"x" * 960)
        view = receiver.receive_view(timeout=1)
        for _ in range(3):
            receiver.receive(timeout=1)
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"y" * 960)
        view.release()
        assert channel.snapshot()["receivers"][0]["nbytes_behind"] == 0
        for _ in range(4):
            sender.send_nowait(b"y" * 960)


@pytest.mark.parametrize("nbytes", [1000, 5000])
def test_last_array_or_slice_of_a_view_releases_its_bytes(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):

        def in_use() -> int:
            observed = channel.snapshot()
            return int(observed["receivers"][0]["nbytes_behind"]) + int(observed["pool"][0]["taken_nbytes"])

        sender.send(np.arange(nbytes // 8, dtype=np.int64))
        lease = receiver.receive_view(timeout=1)
        array = np.frombuffer(lease, np.int64).reshape(5, -1)[1:, ::2].T
        view = memoryview(lease)[8:16]
        with pytest.raises(BufferError, match="the lease has 2 views: drop them first"):
            lease.release()
        del lease
        gc.collect()
        assert in_use() > 0
        assert array[0, 0] == nbytes // 8 // 5
        assert view.tobytes() == (1).to_bytes(8, "little")
        del array
        assert in_use() > 0
        view.release()
        assert in_use() == 0


def test_view_outlives_its_receiver() -> None:
    for nbytes in (1000, 5000):
        with ring() as (channel, sender, receiver):
            sender.send(b"x" * nbytes)
            lease = receiver.receive_view(timeout=1)
            receiver.close()
            del receiver
            gc.collect()
            assert bytes(lease) == b"x" * nbytes
            sender.close()
            assert bytes(lease) == b"x" * nbytes
            lease.release()
            observed = channel.snapshot()
            assert observed["receivers"][0]["state"] == "closed"
            assert observed["pool"][0]["blocks"] == 0


def test_a_view_outlives_the_channel() -> None:
    channel = penstock.Ring()
    sender, receiver = channel.open_sender(), channel.open_receiver()
    sender.send(b"inline")
    sender.send(b"s" * 100_000)
    short, long = receiver.receive_view(timeout=1), receiver.receive_view(timeout=1)
    del channel, sender, receiver
    gc.collect()
    assert bytes(short) == b"inline"
    assert bytes(long) == b"s" * 100_000


def test_views_of_several_receivers_are_independent() -> None:
    channel = penstock.Broadcast(receivers=2, capacity=4096)
    with channel.open_sender() as sender, channel.open_receiver() as item, channel.open_receiver() as other:
        for _ in range(4):
            sender.send(b"x" * 960)
        view = item.receive_view(timeout=1)
        assert [other.receive(timeout=1) for _ in range(4)] == [b"x" * 960] * 4
        with pytest.raises(Timeout) as output:
            sender.send(b"y" * 960, timeout=0.01)
        assert output.value.receiver == 0
        view.release()
        sender.send(b"y" * 960, timeout=1)


def test_views_of_a_sender_do_not_block_another_sender() -> None:
    channel = penstock.Inbox(senders=2, capacity=4096)
    with channel.open_sender() as sender, channel.open_sender() as other, channel.open_receiver() as receiver:
        for _ in range(4):
            sender.send(b"x" * 960)
        views = [receiver.receive_view(timeout=1) for _ in range(4)]
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"y" * 960)
        for _ in range(20):
            other.send(b"z" * 960, timeout=1)
            assert receiver.receive(timeout=1) == b"z" * 960
        for view in views:
            view.release()
        sender.send_nowait(b"y" * 960)


def test_inline_record_cannot_be_shared() -> None:
    with ring() as (_, sender, receiver):
        sender.send(b"x")
        lease = receiver.receive_view(timeout=1)
        with pytest.raises(ValueError, match="copy it into a pool"):
            lease.ref_numbers()
        with pytest.raises(ValueError, match="copy it into a pool"):
            lease.grant(0)
        lease.release()
        with pytest.raises(ClosedError, match="the lease has been released"):
            lease.ref_numbers()
