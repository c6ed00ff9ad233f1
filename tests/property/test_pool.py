"""A pool against a dict: several peers take, share, open, grant, revoke, release, close and come back, in any order."""

import contextlib
import gc
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock import ClosedError, Lease, MemoryExhausted
from penstock.lowlevel import Pool, Ref, StaleRef
from tests import tiers

NBYTES = 8192
PEERS = 4
BLOCKS = 12
ALIGNMENT = 64


def extent(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Block:
    """What the model knows of one block."""

    def __init__(self, nbytes: int, content: bytes) -> None:
        self.nbytes = nbytes
        self.content = content
        self.held = [0] * PEERS  # leases, by peer
        self.grants = [[0] * PEERS for _ in range(PEERS)]  # [from][to]

    def is_free(self) -> bool:
        return not any(self.held) and not any(map(sum, self.grants))

    def has_right(self, peer: int) -> bool:
        return self.held[peer] > 0 or any(row[peer] for row in self.grants)

    def use_grant(self, peer: int) -> None:
        for row in self.grants:
            if row[peer]:
                row[peer] -= 1
                return

    def forget(self, peer: int) -> None:
        self.held[peer] = 0
        for other in range(PEERS):
            self.grants[peer][other] = self.grants[other][peer] = 0


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.origin = Pool.create(NBYTES, max_blocks=BLOCKS, max_peers=PEERS)
        self.peers: list[Pool] = []
        for index in range(PEERS):
            self.peers.append(Pool.attach(self.origin.ticket, peer_name=f"peer {index}"))
            assert self.peers[index].peer.index == index
        self.blocks: dict[Ref, Block] = {}  # alive, by the reference to all of it
        self.gone: list[Ref] = []
        self.leases: list[tuple[int, Ref, Ref, Lease]] = []  # peer, block, what of it, lease
        self.takes = 0

    def settle(self, ref: Ref) -> None:
        if ref in self.blocks and self.blocks[ref].is_free():
            del self.blocks[ref]
            self.gone.append(ref)

    @rule(peer=st.integers(0, PEERS - 1), nbytes=st.one_of(st.integers(0, 300), st.integers(0, NBYTES + 100)))
    def take(self, peer: int, nbytes: int) -> None:
        stats = self.origin_stats()
        try:
            lease = self.peers[peer].take(nbytes)
        except MemoryExhausted as error:
            assert error.requested == nbytes
            assert len(self.blocks) == BLOCKS or stats.largest_free_nbytes < extent(nbytes)
            return
        self.takes += 1
        assert stats.largest_free_nbytes >= extent(nbytes)
        content = bytes((self.takes + i) % 256 for i in range(nbytes))
        memoryview(lease)[:] = content
        ref = self.peers[peer].share(lease)
        assert ref.nbytes == nbytes
        assert ref not in self.blocks
        assert ref not in self.gone
        self.blocks[ref] = Block(nbytes, content)
        self.blocks[ref].held[peer] = 1
        self.leases.append((peer, ref, ref, lease))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), peer=st.integers(0, PEERS - 1))
    def open(self, data: st.DataObject, peer: int) -> None:
        ref = data.draw(st.sampled_from(list(self.blocks)))
        start = data.draw(st.integers(0, ref.nbytes))
        part = ref.slice(start, data.draw(st.integers(0, ref.nbytes - start)))
        lease = self.peers[peer].open(part)
        self.blocks[ref].use_grant(peer)
        self.blocks[ref].held[peer] += 1
        self.leases.append((peer, ref, part, lease))

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), peer=st.integers(0, PEERS - 1))
    def open_what_is_gone(self, data: st.DataObject, peer: int) -> None:
        ref = data.draw(st.sampled_from(self.gone))
        pool = self.peers[peer]
        for use in (pool.open, lambda ref: pool.grant(ref, 0), lambda ref: pool.revoke(ref, 0)):
            with contextlib.suppress(StaleRef):
                use(ref)
                raise AssertionError(f"{ref} is gone")

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), peer=st.integers(0, PEERS - 1), to=st.integers(0, PEERS - 1))
    def grant(self, data: st.DataObject, peer: int, to: int) -> None:
        ref = data.draw(st.sampled_from(list(self.blocks)))
        try:
            self.peers[peer].grant(ref, to)
        except StaleRef:
            assert not self.blocks[ref].has_right(peer)
        else:
            assert self.blocks[ref].has_right(peer)
            self.blocks[ref].grants[peer][to] += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), peer=st.integers(0, PEERS - 1), to=st.integers(0, PEERS - 1))
    def revoke(self, data: st.DataObject, peer: int, to: int) -> None:
        ref = data.draw(st.sampled_from(list(self.blocks)))
        had = self.blocks[ref].grants[peer][to]
        assert self.peers[peer].revoke(ref, to) == (had > 0)
        self.blocks[ref].grants[peer][to] = max(had - 1, 0)
        self.settle(ref)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        peer, ref, part, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        start = part.offset - ref.offset
        assert bytes(lease) == self.blocks[ref].content[start : start + part.nbytes]
        lease.release()
        if twice:
            lease.release()
        self.blocks[ref].held[peer] -= 1
        self.settle(ref)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_while_a_view_lives(self, data: st.DataObject) -> None:
        _, ref, part, lease = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        view = memoryview(lease)
        with contextlib.suppress(BufferError):
            lease.release()
            raise AssertionError("released under a view")
        start = part.offset - ref.offset
        assert bytes(view) == self.blocks[ref].content[start : start + part.nbytes]
        view.release()

    @rule(peer=st.integers(0, PEERS - 1))
    def leave_and_come_back(self, peer: int) -> None:
        for lease in [entry[3] for entry in self.leases if entry[0] == peer]:
            lease.release()
        self.leases = [entry for entry in self.leases if entry[0] != peer]
        lease = None
        self.peers[peer].close()
        with contextlib.suppress(ClosedError):
            self.peers[peer].stats()
            raise AssertionError("a closed pool can be used")
        for ref, block in list(self.blocks.items()):
            block.forget(peer)
            self.settle(ref)
        gc.collect(0)
        self.peers[peer] = Pool.attach(self.origin.ticket, peer_name=f"peer {peer}")
        assert self.peers[peer].peer.index == peer

    def origin_stats(self):  # type: ignore[no-untyped-def]
        return self.peers[0].stats()

    @invariant()
    def the_numbers_are_the_models(self) -> None:
        if not hasattr(self, "peers"):
            return
        stats = self.origin_stats()
        taken = sum(extent(block.nbytes) for block in self.blocks.values())
        assert (stats.blocks, stats.taken_nbytes, stats.free_nbytes) == (len(self.blocks), taken, NBYTES - taken)
        assert stats.takes == self.takes
        expected = {}
        for peer in range(PEERS):
            held = [block for block in self.blocks.values() if block.held[peer]]
            granted = sum(row[peer] for block in self.blocks.values() for row in block.grants)
            if held or granted:
                expected[peer] = (len(held), sum(block.nbytes for block in held), granted)
        assert {h.peer: (h.blocks, h.nbytes, h.granted) for h in stats.holders} == expected
        places = sorted((ref.offset, extent(ref.nbytes)) for ref in self.blocks)
        for (offset, nbytes), (following, _) in itertools.pairwise(places):
            assert offset + nbytes <= following, "two blocks overlap"
        edges = [0, *(edge for place in places for edge in (place[0], sum(place))), NBYTES]
        assert stats.largest_free_nbytes == max(after - before for before, after in zip(edges[::2], edges[1::2]))

    def teardown(self) -> None:
        if not hasattr(self, "peers"):
            return
        for _, _, _, lease in self.leases:
            lease.release()
        lease = None
        self.leases.clear()
        for pool in self.peers:
            pool.close()
        gc.collect(0)
        watching = Pool.attach(self.origin.ticket)
        stats = watching.stats()
        assert (stats.blocks, stats.free_nbytes, stats.largest_free_nbytes) == (0, NBYTES, NBYTES)


def test_a_pool_is_a_dict_of_blocks() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=tiers.POOL_EXAMPLES, stateful_step_count=50))
