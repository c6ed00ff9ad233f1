"""References: plain data, checked against segment, block, generation and bounds before every use; and grants."""

import msgspec
import pytest

from penstock import PeerDied
from penstock.lowlevel import Pool, Ref, StaleRef
from tests.conftest import eventually
from tests.support.processes import program
from tests.unit.memory.test_pool import HOLDER


def numbers(ref: Ref) -> tuple[int, ...]:
    return ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes


def new_pool() -> Pool:
    pool = Pool.create(1 << 16, name="refs", peer_name="first")
    pool.join()
    return pool


def peer_of(pool: Pool, name: str) -> Pool:
    """Another peer of the same pool, in this process."""
    other = Pool.attach(pool.ticket, peer_name=name)
    other.join()
    return other


def test_a_reference_is_plain_data_that_travels_in_any_message() -> None:
    pool = new_pool()
    with pool.take(3) as lease:
        memoryview(lease)[:] = b"abc"
        ref = pool.share(lease)
        assert ref == Ref(*numbers(ref))
        assert hash(ref) == hash(Ref(*numbers(ref)))
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=Ref)
        assert decoded == ref
        assert bytes(pool.open(decoded)) == b"abc"
        with pytest.raises(AttributeError):
            ref.nbytes = 5  # type: ignore[misc]


def test_a_slice_names_a_part() -> None:
    pool = new_pool()
    with pool.take(10) as lease:
        memoryview(lease)[:] = b"0123456789"
        ref = pool.share(lease)
        for start in range(11):
            for length in range(11 - start):
                assert bytes(pool.open(ref.slice(start, length))) == b"0123456789"[start : start + length]
        assert bytes(pool.open(ref.slice(2, 6).slice(1, 2))) == b"34"
        for start, length in ((-1, 2), (0, 11), (11, 0), (5, -1), (9, 2), (2**70, 1)):
            with pytest.raises(ValueError):
                ref.slice(start, length)
        with pytest.raises(ValueError):
            ref.slice(2, 3).slice(0, 4)


def test_stale_reference_names_both_generations() -> None:
    pool = new_pool()
    lease = pool.take(10)
    ref = pool.share(lease)
    lease.release()
    with pytest.raises(StaleRef, match="of pool 'refs' is gone"):
        pool.open(ref)
    later = []
    while not later or pool.share(later[-1]).block != ref.block:
        later.append(pool.take(10))
    with pytest.raises(StaleRef) as raised:
        pool.open(ref)
    assert (raised.value.expected, raised.value.actual) == (ref.generation, pool.share(later[-1]).generation)
    assert f"block {ref.block}, generation {ref.generation}, of pool 'refs' is gone" in str(raised.value)
    assert pool.stats().stale_refs >= 2


def test_a_reference_to_another_segment_is_stale() -> None:
    pool = new_pool()
    other = Pool.create(1 << 16)
    with pool.take(10) as lease, other.take(10):
        with pytest.raises(StaleRef, match="another segment"):
            other.open(pool.share(lease))
        with pytest.raises(StaleRef, match="another segment"):
            other.grant(pool.share(lease), other.peer)
        with pytest.raises(StaleRef, match="another segment"):
            other.revoke(pool.share(lease), other.peer)


FIELDS = ["segment", "block", "generation", "offset", "nbytes"]
FORGED = [-1, -(2**31), 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64, 2**200, "1", None, 1.5, b""]


@pytest.mark.parametrize("field", FIELDS)
def test_forged_field_of_a_reference_is_stale(field: str) -> None:
    pool = new_pool()
    with pool.take(100) as lease:
        for value in FORGED:
            forged = msgspec.structs.replace(pool.share(lease), **{field: value})
            for use in (pool.open, lambda ref: pool.grant(ref, pool.peer), lambda ref: pool.revoke(ref, pool.peer)):
                with pytest.raises(StaleRef):
                    use(forged)
        assert pool.stats().holders[0].blocks == 1


def test_a_reference_past_the_ends_of_its_block_is_stale() -> None:
    pool = new_pool()
    before, lease, after = pool.take(100), pool.take(100), pool.take(100)
    ref = pool.share(lease)
    pool.open(ref)
    for offset, nbytes in ((-1, 10), (0, 101), (1, 100), (100, 1), (101, 0), (-64, 100), (64, 100), (0, 2**64 - 1)):
        forged = msgspec.structs.replace(ref, offset=(ref.offset + offset) % 2**64, nbytes=nbytes)
        with pytest.raises(StaleRef, match="lies outside"):
            pool.open(forged)
    assert len(before) == len(after) == 100


# ── grants ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("to", [17, 31, 32, 1000, 2**31, 2**32, 2**40, -1])
def test_grant_to_a_peer_that_does_not_exist_is_refused(to: int) -> None:
    pool = new_pool()
    with pool.take(5) as lease:
        with pytest.raises(PeerDied, match=r"no grant to|expected a peer of 'refs'"):
            pool.share(lease, to=[to])
        with pytest.raises(PeerDied, match=r"no grant to|expected a peer of 'refs'"):
            pool.grant(pool.share(lease), to)
        assert pool.stats().holders[0].granted == 0
        assert not pool.revoke(pool.share(lease), to)


def test_grant_to_a_peer_that_left_is_refused_with_its_name() -> None:
    pool = new_pool()
    other = peer_of(pool, "other")
    peer = other.peer
    other.close()
    with pool.take(5) as lease, pytest.raises(PeerDied, match=r"no grant to 'other'.*left"):
        pool.share(lease, to=[peer])


def test_grant_to_a_dead_peer_is_refused_with_its_name() -> None:
    pool = new_pool()
    with program(HOLDER, pool.ticket) as holder, pool.take(5) as lease:
        index = int(holder.hear().split()[1])
        holder.kill()
        eventually(lambda: next(peer.state for peer in pool.peers() if peer.index == index) == "dead")
        with pytest.raises(PeerDied, match=r"no grant to 'holder'.*dead"):
            pool.share(lease, to=[index])


def test_share_with_an_invalid_peer_grants_none() -> None:
    pool = new_pool()
    other = peer_of(pool, "other")
    with pool.take(5) as lease, pytest.raises(PeerDied):
        pool.share(lease, to=[other.peer, 17])
    assert pool.stats().blocks == 0


def test_a_lease_of_another_pool_is_not_shared() -> None:
    pool = new_pool()
    other = Pool.create(4096)
    lease = other.take(5)
    with pytest.raises((ValueError, StaleRef)):
        pool.share(lease, to=[pool.peer])
    with pytest.raises((ValueError, StaleRef)):
        pool.share(lease)


@pytest.mark.parametrize("role", ["giver", "receiver"])
def test_grants_end_when_either_side_dies(role: str) -> None:
    pool = new_pool()
    with program(HOLDER, pool.ticket) as holder:
        index = int(holder.hear().split()[1])
        third = peer_of(pool, "third")
        lease = pool.take(5)
        ref = pool.share(lease, to=[index])
        if role == "giver":
            lease.release()
            holder.say("open", *numbers(ref))
            assert holder.hear() == "done"
        lease.release()
        assert pool.stats().blocks == 1
        holder.kill()
        eventually(lambda: pool.stats().blocks == 0)
        with pytest.raises(StaleRef):
            third.open(ref)


def test_block_is_free_after_the_granted_process_has_read() -> None:
    pool = new_pool()
    with program(HOLDER, pool.ticket) as holder:
        index = int(holder.hear().split()[1])
        for number in range(20):
            lease = pool.take(100)
            memoryview(lease)[:] = b"%0100d" % number
            ref = pool.share(lease, to=[index])
            lease.release()
            holder.say("read", *numbers(ref))
            assert (int(holder.hear()), holder.hear()) == (number, "done")
            assert pool.stats().blocks == 0


def test_unused_grants_counts_granted_blocks_a_peer_has_not_opened() -> None:
    pool = new_pool()
    other, third = peer_of(pool, "other"), peer_of(pool, "third")
    lease = pool.take(5)
    ref = pool.share(lease, to=[other.peer, other.peer])
    assert (pool.unused_grants(ref, other.peer), pool.unused_grants(ref, third.peer)) == (2, 0)
    opened = other.open(ref)
    assert pool.unused_grants(ref, other.peer) == 1
    assert other.unused_grants(ref, other.peer) == 0  # it granted itself nothing
    pool.revoke(ref, other.peer)
    assert pool.unused_grants(ref, other.peer) == 0
    assert pool.unused_grants(ref, 17) == 0
    opened.release()
    lease.release()
    with pytest.raises(StaleRef, match="is gone"):
        pool.unused_grants(ref, other.peer)
