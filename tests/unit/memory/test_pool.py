"""A pool: any peer takes blocks of any size; a full pool names the holders; released blocks are free again."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock import ClosedError, MemoryExhausted
from penstock.lowlevel import BlockLease, Pool
from tests.support.processes import forked, program, soon, thread, threads

ALIGNMENT = 64

# A process with a pool; it takes what it hears, and lets go of it.
HOLDER = """
pool = lowlevel.Pool.attach(sys.argv[1], peer_name="holder")
leases = []
say("ready", pool.peer.index)
while True:
    word, *numbers = hear().split()
    numbers = list(map(int, numbers))
    if word == "take":
        leases.append(pool.take(numbers[0]))
    elif word == "open":
        leases.append(pool.open(lowlevel.Ref(*numbers)))
    elif word == "read":
        with pool.open(lowlevel.Ref(*numbers)) as lease:
            say(bytes(lease).decode())
    elif word == "release":
        leases.pop().release()
    elif word == "leave":
        leases.clear()
        pool.close()
    say("done")
"""


@pytest.mark.parametrize("nbytes", [1, 63, 100, 4095, 4097, 100_001])
def test_a_pool_of_any_size_can_be_taken_whole(nbytes: int) -> None:
    pool = Pool.create(nbytes)
    with pool.take(nbytes) as lease:
        memoryview(lease)[:] = bytes(nbytes)
    with pytest.raises(MemoryExhausted):
        pool.take(nbytes + ALIGNMENT)


def test_mixed_lifetimes_of_blocks_leave_most_of_the_pool_usable(seed: int) -> None:
    choose = random.Random(seed)
    pool = Pool.create(1 << 22)
    held: list[BlockLease] = []
    refused = 0
    for _ in range(3000):
        while sum(map(len, held)) > 1 << 21:  # half of the pool is in use
            held.pop(choose.randrange(len(held))).release()
        try:
            held.append(pool.take(int(64 * 2 ** choose.uniform(0, 13))))
        except MemoryExhausted:
            refused += 1
    assert refused <= 30  # 1 %


def test_memory_exhausted_names_request_free_bytes_gap_and_holders() -> None:
    pool = Pool.create(1 << 20, name="images", peer_name="server")
    pool.join()
    with program(HOLDER, pool.ticket) as other:
        assert other.hear() == "ready 1"
        other.say("take", 300_000)
        assert other.hear() == "done"
        with pool.take(500_000), pool.take(100_000), pytest.raises(MemoryExhausted) as raised:
            pool.take(400_000)
        error = raised.value
        free = (1 << 20) - 300_032 - 500_032 - 100_032
        assert (error.requested, error.free) == (400_000, free)
        assert 0 < error.largest <= free
        assert "block of 390.6 KiB does not fit pool 'images' (1.0 MiB, 145.0 KiB free, largest gap" in str(error)
        assert error.holders.startswith("'server' (pid")
        assert f"'holder' (pid {other.pid}) holds 293.0 KiB" in error.holders
        assert error.holders in str(error)


def test_more_than_the_pool_has_is_refused_at_once_with_advice() -> None:
    pool = Pool.create(1 << 16)
    for nbytes in ((1 << 16) + 1, 1 << 40, 1 << 63, 1 << 64, 1 << 100):
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes") as raised:
            pool.take(nbytes, timeout=None)
        assert raised.value.free == raised.value.largest == 1 << 16


def test_take_names_max_blocks_when_block_numbers_run_out() -> None:
    pool = Pool.create(1 << 16, max_blocks=3)
    leases = [pool.take(1) for _ in range(3)]
    with pytest.raises(MemoryExhausted, match="all blocks are taken, raise max_blocks"):
        pool.take(1)
    leases.pop().release()
    pool.take(1)


@pytest.mark.parametrize("nbytes", [-1, -(1 << 70), 1.5, "5", None], ids=repr)
def test_a_size_that_is_negative_or_no_whole_number_is_refused(nbytes: Any) -> None:
    error, text = (
        (ValueError, "expected nbytes of a block to be 0 or more") if type(nbytes) is int else (TypeError, None)
    )
    with pytest.raises(error, match=text):
        Pool.create(4096).take(nbytes)


def seconds_from(free: Callable[[], object], pool: Pool) -> float:
    """Returns how long after `free` a wait for the whole pool ends."""
    with thread(lambda: pool.take(4096, timeout=20)) as waiting:
        with pytest.raises(AssertionError):
            waiting.ended(within=0.05)
        freed_at = time.monotonic()
        free()
        waiting.ended()
    assert waiting.error is None
    waiting.value = None
    return waiting.ended_at - freed_at


def test_take_waits_for_a_release_by_another_thread() -> None:
    pool = Pool.create(4096)
    soon(lambda: seconds_from(pool.take(4096).release, pool))


@pytest.mark.parametrize("how", ["leave", "die"])
def test_take_waits_for_a_holder_to_go(how: str) -> None:
    pool = Pool.create(4096)

    def measure() -> float:
        with program(HOLDER, pool.ticket) as other:
            assert other.hear().startswith("ready")
            other.say("take", 4000)
            assert other.hear() == "done"
            return seconds_from(other.kill if how == "die" else lambda: other.say("leave"), pool)

    soon(measure)


def test_take_ends_at_its_deadline() -> None:
    pool = Pool.create(4096)
    lease = pool.take(1)
    for timeout in (0, 0.05):
        started = time.monotonic()
        with pytest.raises(MemoryExhausted):
            pool.take(4096, timeout=timeout)
        assert timeout <= time.monotonic() - started < timeout + 5
    assert len(lease) == 1


def test_take_waits_on_after_a_release_that_is_too_small() -> None:
    pool = Pool.create(64 * 4)
    leases = [pool.take(64) for _ in range(4)]
    with thread(lambda: pool.take(64 * 4, timeout=20)) as waiting:
        while leases:
            assert waiting.is_alive()
            leases.pop().release()
        assert isinstance(waiting.ended().value, BlockLease)
        waiting.value = None


def test_stats_count_blocks_bytes_takes_and_holders() -> None:
    pool = Pool.create(1 << 16, peer_name="one")
    other = Pool.attach(pool.ticket, peer_name="other")
    assert pool.peer.index == 0
    assert other.peer.index == 1
    first, second = pool.take(100), other.take(1000)
    ref = pool.share(first, to=[other.peer])
    opened = other.open(pool.share(first))
    pool.grant(ref, other.peer)
    stats = pool.stats()
    assert stats == other.stats()
    assert (stats.nbytes, stats.claimed_nbytes) == (1 << 16, 1 << 16)
    assert (stats.blocks, stats.taken_nbytes, stats.free_nbytes) == (2, 128 + 1024, (1 << 16) - 1152)
    assert (stats.takes, stats.taken_nbytes_total) == (2, 1100)
    assert (stats.exhaustions, stats.recoveries, stats.stale_refs) == (0, 0, 0)
    assert [tuple(getattr(holder, name) for name in holder.__struct_fields__) for holder in stats.holders] == [
        (0, "one", 1, 100, 0),
        (1, "other", 2, 1100, 1),  # open() used one of its two grants
    ]
    opened.release()
    with pytest.raises(MemoryExhausted):
        pool.take(1 << 16)
    for lease in (first, second):
        lease.release()
    stats = pool.stats()
    assert (stats.blocks, stats.exhaustions) == (1, 1)  # a grant still holds the first
    assert [(holder.name, holder.blocks, holder.granted) for holder in stats.holders] == [("other", 0, 1)]
    other.open(ref).release()
    assert pool.stats().blocks == 0


def test_leases_outlive_a_closed_pool() -> None:
    pool = Pool.create(4096, name="gone")
    watching = Pool.attach(pool.ticket)
    watching.join("watcher")
    with pool:
        lease = pool.take(10)
    for call in (lambda: pool.take(1), pool.stats, pool.peers, lambda: pool.peer, lambda: pool.open(pool.share(lease))):
        with pytest.raises(ClosedError, match="pool 'gone' is closed"):
            call()
    memoryview(lease)[:] = b"0123456789"
    assert [peer.state for peer in watching.peers()] == ["live", "live"]
    lease.release()
    assert [peer.state for peer in watching.peers()] == ["live", "left"]
    assert watching.stats().blocks == 0


def test_forked_child_is_a_new_peer_without_its_parents_leases() -> None:
    pool = Pool.create(4096, peer_name="family")
    lease = pool.take(10)
    memoryview(lease)[:] = b"0123456789"
    ref = pool.share(lease)

    def use_it() -> None:
        assert bytes(lease) == b"0123456789"  # what it has inherited can be read
        with pytest.raises(ClosedError, match="fork"):
            lease.grant(0)
        own = pool.take(100)
        assert pool.peer.index == 1
        assert bytes(pool.open(ref)) == b"0123456789"
        lease.release()
        own.release()
        pool.close()

    assert forked(use_it) == 0
    assert pool.stats().blocks == 1
    assert bytes(pool.open(ref)) == b"0123456789"
    assert [holder.blocks for holder in pool.stats().holders] == [1]
    lease.release()
    assert pool.stats().blocks == 0


def test_a_hundred_threads_take_and_release() -> None:
    pool = Pool.create(1 << 16)

    def work() -> None:
        for _ in range(50):
            with pool.take(3000, timeout=20) as lease:
                memoryview(lease)[:] = bytes(3000)

    with threads(*[work] * 30):
        pass
    stats = pool.stats()
    assert (stats.blocks, stats.takes, stats.largest_free_nbytes) == (0, 1500, 1 << 16)
