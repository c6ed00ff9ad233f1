"""A view of a record: a lease that keeps the bytes where they are, inline or spilled, until the last view is gone."""

import gc
import random

import pytest

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
