"""The native store beneath `Store`: chains of keys, the choice of values to evict, wake-ups.

Keys, writers and readers: test_store, test_loan. Deaths: crash/test_kept.
"""

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock import ClosedError, MemoryExhausted, _native
from tests.conftest import eventually
from tests.support.processes import forked, soon, thread

NBYTES = 64 << 10


def key(name: object) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


class Kept:
    """A store and a peer of the store."""

    def __init__(self, nbytes: int = NBYTES, max_blocks: int = 64, buckets: int = 64, segment: Any = None) -> None:
        shape = {
            "kind": 2,
            "max_peers": 8,
            "max_blocks": max_blocks,
            "has_grants": 1,
            "pool_nbytes": nbytes,
            "buckets": buckets,
        }
        self.segment = segment or _native.Segment.create("store", shape)
        self.by = _native.Attachment(self.segment, "me")
        self.store = _native.Store(self.by)

    def put(self, name: object, content: bytes, timeout: float | None = 0) -> bool:
        """Whether it was new."""
        is_new, lease = self.store.begin(key(name), len(content), timeout)
        if is_new:
            with memoryview(lease) as view:
                view[:] = content
            assert self.store.commit(lease)
        lease.release()
        return is_new

    def read(self, name: object) -> bytes | None:
        lease = self.store.get(key(name))
        if lease is None:
            return None
        with lease, memoryview(lease) as view:
            return bytes(view)

    def names(self, *names: object) -> set[object]:
        """Which of these are there; looked at from outside, so that none is used by it."""
        there = {item[0] for item in self.store.stats()["items"] if not item[-1]}
        return {name for name in names if key(name) in there}

    def blocks(self) -> int:
        blocks = self.by.stats()["blocks"]
        assert isinstance(blocks, int)
        return blocks

    def numbers(self, *which: str) -> tuple[int, ...]:
        stats = self.store.stats()
        return tuple(stats[each] for each in which)


def other_of(peer: Kept) -> Kept:
    """Another peer of the store, with separate mappings."""
    return Kept(segment=_native.Segment.adopt(os.dup(peer.segment.fd)))


# ── found, or not ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_that_differ_in_one_bit_are_told_apart() -> None:
    peer = Kept(max_blocks=257, buckets=2, nbytes=NBYTES)
    keys = [bytes(32), *((1 << bit).to_bytes(32, "little") for bit in range(256))]
    for i, each in enumerate(keys):
        is_new, lease = peer.store.begin(each, 2, 0)
        assert is_new
        with memoryview(lease) as view:
            view[:] = i.to_bytes(2, "little")
        peer.store.commit(lease)
        lease.release()
    for i, each in enumerate(keys):
        lease = peer.store.get(each)
        assert lease is not None and bytes(lease) == i.to_bytes(2, "little")


# ── written once ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_waiter_is_woken_by_the_commit_within_what_is_promised() -> None:
    peer = Kept()

    def wakes() -> float:
        name = time.monotonic()
        _, lease = peer.store.begin(key(name), 5, 0)
        before = peer.numbers("fills_awaited")[0]
        with thread(lambda: peer.store.begin(key(name), 5, 20)) as waiter:
            eventually(lambda: peer.numbers("fills_awaited")[0] > before)
            time.sleep(0.3)  # past the first looks of a sleeper: what wakes it now is the bell
            at = time.monotonic()
            peer.store.commit(lease)
            waiter.ended()
            return waiter.ended_at - at

    soon(wakes, promised=0.05)


# ── given up for room ────────────────────────────────────────────────────────────────────────────────────────────────
def fill_with(peer: Kept, nbytes: int, many: int, between: float = 0.002) -> None:
    for i in range(many):
        peer.put(i, bytes([i]) * nbytes)
        time.sleep(between)


def test_small_value_is_evicted_for_a_small_need() -> None:
    peer = Kept()
    peer.put("large", bytes(NBYTES - 2048))
    peer.put("small", bytes(2048))
    time.sleep(0.05)
    assert peer.put("new", bytes(1024))
    assert peer.names("large", "small") == {"large"}


def test_eviction_prefers_a_large_old_value_to_small_used_values() -> None:
    peer = Kept()
    peer.put("large", bytes(NBYTES // 2))
    for i in range(8):
        peer.put(i, bytes(NBYTES // 16))
    time.sleep(0.2)
    for i in range(8):
        assert peer.read(i) is not None
    assert peer.put("new", bytes(NBYTES // 4))
    assert peer.names("large", *range(8)) == set(range(8))


def test_neighbours_are_evicted_for_a_large_value() -> None:
    peer = Kept()
    fill_with(peer, NBYTES // 32, 32, between=0)
    assert peer.put("large", bytes(NBYTES // 4))
    assert len(peer.names(*range(32))) == 24
    assert peer.numbers("evictions") == (8,)
    for i in peer.names(*range(32)):
        assert isinstance(i, int)
        assert peer.read(i) == bytes([i]) * (NBYTES // 32)


def test_value_that_is_being_written_is_not_evicted() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), NBYTES // 2, 0)
    with pytest.raises(MemoryExhausted):
        peer.put("b", bytes(NBYTES // 2 + 64))
    assert peer.put("b", bytes(NBYTES // 2))
    assert peer.store.commit(lease)


def test_value_is_evicted_when_block_numbers_run_out_before_room() -> None:
    peer = Kept(max_blocks=4)
    for i in range(4):
        peer.put(i, bytes(64))
        time.sleep(0.002)
    assert peer.put("new", bytes(1024))
    assert len(peer.names(*range(4))) == 3


def test_value_is_evicted_for_its_block_number() -> None:
    peer = Kept(max_blocks=3)
    peer.put("free", bytes(64))
    peer.put("held", bytes(64))
    lease = peer.store.get(key("held"))
    high = peer.by.take(NBYTES // 2)
    assert peer.put("new", bytes(NBYTES // 4)), "the gap is between two that are held"
    assert peer.names("free", "held", "new") == {"held", "new"}
    del lease, high


def test_waiting_put_gets_room_when_a_lease_is_released() -> None:
    peer = Kept()

    def took(name: object) -> float:
        peer.store.clear()
        peer.put("held", bytes(NBYTES))
        lease = peer.store.get(key("held"))
        assert lease is not None
        with thread(lambda: peer.put(name, bytes(NBYTES), 20)) as waiter:
            time.sleep(0.5)  # its own looks are far apart by now
            assert waiter.is_alive()
            at = time.monotonic()
            lease.release()
            assert waiter.ended().value is True
            return waiter.ended_at - at

    soon(lambda: took("next"))


# ── forks, statistics ────────────────────────────────────────────────────────────────────────────────────────────────


def test_stats_have_size_age_and_holders_of_each_value() -> None:
    peer = Kept()
    other = other_of(peer)
    peer.put("a", b"bytes")
    leases = [peer.store.get(key("a")), other.store.get(key("a")), other.store.get(key("a"))]
    _, writing = peer.store.begin(key("b"), 7, 0)
    items = {item[0]: item[1:] for item in peer.store.stats()["items"]}
    assert set(items) == {key("a"), key("b")}
    nbytes, hits, holders, age, idle, is_filling = items[key("a")]
    assert (nbytes, hits, holders, is_filling) == (5, 3, 2, False)
    assert 0 <= idle <= age < 30
    nbytes, hits, holders, age, _, is_filling = items[key("b")]
    assert (nbytes, hits, holders, is_filling) == (7, 0, 1, True)
    assert peer.numbers("hits", "misses", "puts", "evictions", "abandoned") == (3, 2, 2, 0, 0)
    del leases, writing


def test_store_is_refused_in_a_forked_child_and_parent_goes_on() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)

    def child() -> None:
        calls: list[Callable[[], object]] = [
            lambda: peer.store.get(key("a")),
            lambda: peer.store.begin(key("b"), 1, 0),
            lambda: peer.store.commit(lease),
            lambda: peer.store.abandon(lease),
            lambda: peer.store.clear(),
            peer.store.stats,
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="before fork"):
                call()
        lease.release()

    assert forked(child) == 0
    assert peer.store.commit(lease)
    assert peer.read("a") == bytes(5)
