"""What the dead held, and what a living one may still do with references of theirs."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

import penstock
from penstock import LongRecords, lowlevel
from tests.conftest import eventually
from tests.crash.zygote import Zygote


def hold_views(talk: Connection, where: str, index: int) -> None:
    """Reads, and keeps views of the last few records, of those in the ring and of those in the pool."""
    held = []
    with penstock.attach(where).open_receiver(index) as receiver:
        talk.send(("ready",))
        count = 0
        while True:
            held.append(receiver.receive_view(timeout=25))
            if len(held[-1]) == 1:
                break
            held = held[-3:]
            count += 1
            if count == 20:
                talk.send(("twenty",))
        held.clear()
    talk.send(("all", count))


def test_one_of_eight_that_dies_with_views_in_its_hands_gives_them_back(zygote: Zygote) -> None:
    with penstock.Broadcast(receivers=8, capacity=1 << 16, long_records=LongRecords(inline_limit=1024)) as channel:
        sender = channel.open_sender()
        children = [zygote.child(hold_views, str(channel.ticket), index) for index in range(8)]
        try:
            for child in children:
                child.hear("ready")
            for number in range(20):
                sender.send(bytes(500 if number % 2 else 5000), timeout=20)
            for child in children:
                child.hear("twenty")
            blocks = channel.snapshot()["pool"][0]["blocks"]
            assert blocks > 0, "nobody holds anything"
            victim = children[3]
            victim.kill()
            victim.gone_at()
            eventually(lambda: channel.snapshot()["receivers"][3]["state"] == "dead")
            with pytest.raises(penstock.PeerDied) as caught:
                sender.send(b"xx", timeout=20)
            assert caught.value.pid == victim.pid
            assert caught.value.held.startswith("1 block (") or caught.value.held.startswith("2 blocks"), caught.value
            for number in range(1000):  # many times round the ring, which waits for no dead receiver
                sender.send(bytes(500 if number % 2 else 5000), timeout=20)
            sender.send(b"x", timeout=20)
            for child in children:
                if child is not victim:
                    assert child.hear("all")[1] == 1020
            for child in children:
                child.gone_at()
            eventually(lambda: channel.snapshot()["pool"][0]["blocks"] == 0)
            pool = channel.snapshot()["pool"][0]
            assert pool["holders"] == []
        finally:
            sender.close()
            for child in children:
                child.close()


def lend_and_wait(talk: Connection, where: str) -> None:
    pool = lowlevel.Pool.attach(where, peer_name="lender")
    lease = pool.take(1000)
    memoryview(lease)[:] = b"l" * 1000
    ref = pool.share(lease)
    talk.send(("ref", ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes, pool.peer.index, pool.peer.epoch))
    talk.recv()


def test_a_reference_of_a_dead_peer_is_stale_and_its_successors_are_not(zygote: Zygote) -> None:
    with lowlevel.Pool.create(1 << 20, max_blocks=1, max_peers=2, name="pool", peer_name="survivor") as pool:
        pool.join()
        before = None
        for round in range(5):
            child = zygote.child(lend_and_wait, str(pool.ticket))
            try:
                _, *numbers, index, epoch = child.hear("ref")
                assert (index, epoch) == (1, round + 1)  # the same place among the peers, in a new epoch
                ref = lowlevel.Ref(*numbers)
                if before is not None:
                    with pytest.raises(lowlevel.StaleRef):
                        pool.open(before)
                held = pool.open(ref)
                child.kill()
                child.gone_at()
                eventually(lambda: {peer.index: peer.state for peer in pool.peers()}[1] == "dead")
                assert bytes(memoryview(held)) == b"l" * 1000  # ours still, though the sender is dead
                held.release()
                with pytest.raises(lowlevel.StaleRef):
                    pool.open(ref)
                before = ref
            finally:
                child.close()
        assert pool.stats().blocks == 0
