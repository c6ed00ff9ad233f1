"""What the dead held, and what a living one may still do with references of theirs."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

from penstock import lowlevel
from tests.conftest import eventually
from tests.crash.zygote import Zygote


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
