"""Blocks kept under a key: found by it, written once, given up when their room is wanted and they are not held.

This is the native store, as the layer above it uses it: a key is 32 bytes, and what is written is bytes.
"""

import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock import ClosedError, MemoryExhausted, Timeout, _native
from penstock.lowlevel import StaleRef
from tests.conftest import eventually
from tests.support.processes import forked, program, soon, thread

NBYTES = 64 << 10


def key(name: object) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


class Kept:
    """A store, and this process in it."""

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

    def held(self) -> int:
        return sum(holder[2] for holder in self.by.stats()["holders"])

    def numbers(self, *which: str) -> tuple[int, ...]:
        stats = self.store.stats()
        return tuple(stats[each] for each in which)


def other_of(peer: Kept) -> Kept:
    """Another peer in the same store, with mappings of its own."""
    return Kept(segment=_native.Segment.adopt(os.dup(peer.segment.fd)))


# A process in the store of sys.argv[1]; it does what it hears.
STRANGER = """
import hashlib
from penstock import _native

def key(name):
    return hashlib.blake2b(name.encode(), digest_size=32).digest()

segment = _native.Segment.attach(*map(int, sys.argv[1:]))
by = _native.Attachment(segment, "stranger")
store = _native.Store(by)
leases = {}
say("ready")
while True:
    word, name, *rest = hear().split()
    if word == "begin":
        is_new, leases[name] = store.begin(key(name), int(rest[0]), 20)
        say("new" if is_new else bytes(leases[name]).decode())
    elif word == "write":
        memoryview(leases[name])[:] = rest[0].encode()
        say("written")
    elif word == "commit":
        say(store.commit(leases[name]))
    elif word == "abandon":
        say(store.abandon(leases[name]))
    elif word == "remove":
        say(store.remove(key(name)))
    elif word == "get":
        leases[name] = store.get(key(name))
        say("miss" if leases[name] is None else bytes(leases[name]).decode())
    elif word == "release":
        leases.pop(name).release()
        say("released")
    elif word == "leave":
        leases.clear()
        del store, by
        say("left")
    elif word == "die":
        _native.arm_point(rest[0], "kill", 1)
        say("armed")
"""


def stranger(peer: Kept) -> Any:
    return program(STRANGER, *peer.segment.ticket())


# ── found, or not ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_was_put_is_found_and_what_was_not_is_missed() -> None:
    peer = Kept()
    assert peer.read("a") is None
    assert peer.put("a", b"content of a")
    assert peer.read("a") == b"content of a"
    assert peer.read("b") is None
    assert other_of(peer).read("a") == b"content of a"
    assert peer.numbers("hits", "misses", "puts") == (2, 1, 1)  # a lookup that no put follows is no miss


def test_what_is_there_is_not_written_again() -> None:
    peer = Kept()
    assert peer.put("a", b"first")
    assert not peer.put("a", b"again")
    assert peer.read("a") == b"first"
    assert peer.blocks() == 1


def test_a_hit_has_the_size_that_was_put_and_cannot_be_written() -> None:
    peer = Kept()
    peer.put("a", b"12345")
    is_new, lease = peer.store.begin(key("a"), 99, 0)
    assert (is_new, lease.nbytes, lease.is_writable) == (False, 5, False)
    assert memoryview(lease).readonly


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, NBYTES - 64, NBYTES - 1, NBYTES])
def test_every_size_from_nothing_to_the_whole_store_is_kept(nbytes: int) -> None:
    peer = Kept()
    content = os.urandom(nbytes)
    assert peer.put("a", content)
    assert peer.read("a") == content
    assert peer.put("b", content), "there is room for one of them: the other goes"
    assert peer.read("b") == content


def test_keys_that_share_a_bucket_are_told_apart() -> None:
    peer = Kept(buckets=1)
    for i in range(40):
        peer.put(i, b"%d" % i)
    for i in range(0, 40, 3):
        assert peer.store.remove(key(i)) == 1
    assert [peer.read(i) for i in range(40)] == [None if i % 3 == 0 else b"%d" % i for i in range(40)]


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


@pytest.mark.parametrize("nbytes", [0, 31, 33, 64])
def test_a_key_of_another_size_is_refused(nbytes: int) -> None:
    peer = Kept()
    for call in (peer.store.get, peer.store.remove, lambda name: peer.store.begin(name, 1, 0)):
        with pytest.raises(ValueError, match="expected a key of 32 bytes"):
            call(bytes(nbytes))
    assert peer.blocks() == 0


def test_a_pool_without_buckets_keeps_nothing() -> None:
    segment = _native.Segment.create("plain", {"kind": 2, "max_peers": 2, "max_blocks": 4, "pool_nbytes": 4096})
    with pytest.raises(Exception, match="expected a store, got pool 'plain'"):
        _native.Store(_native.Attachment(segment, "me"))


# ── written once ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_being_written_is_not_found_yet() -> None:
    peer = Kept()
    is_new, lease = peer.store.begin(key("a"), 5, 0)
    assert is_new and lease.is_writable
    assert peer.store.get(key("a")) is None
    with pytest.raises(Timeout, match=r"is being written by 'me' \(pid"):
        peer.store.begin(key("a"), 5, 0)
    peer.store.commit(lease)
    assert peer.store.get(key("a")) is not None


def test_whoever_puts_the_same_key_meanwhile_waits_and_gets_a_lease_of_it() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    with thread(lambda: other_of(peer).store.begin(key("a"), 5, 20)) as waiter:
        eventually(lambda: peer.numbers("fills_awaited")[0] > 0)
        assert waiter.is_alive()
        with memoryview(lease) as view:
            view[:] = b"bytes"
        peer.store.commit(lease)
        is_new, other = waiter.ended().value  # type: ignore[misc]
    assert not is_new
    assert bytes(other) == b"bytes"
    assert peer.blocks() == 1


def test_what_another_process_writes_is_awaited_and_had() -> None:
    peer = Kept()
    with stranger(peer) as other:
        assert other.hear() == "ready"
        other.say("begin", "a", 5)
        assert other.hear() == "new"
        with thread(lambda: peer.store.begin(key("a"), 5, 20)) as waiter:
            eventually(lambda: peer.numbers("fills_awaited")[0] > 0)
            other.say("write", "a", "bytes")
            assert other.hear() == "written"
            other.say("commit", "a")
            is_new, lease = waiter.ended().value  # type: ignore[misc]
        assert not is_new
        assert bytes(lease) == b"bytes"


def test_one_of_many_that_wait_writes_what_the_first_abandoned() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    outcomes: list[bool] = []

    def put() -> None:
        outcomes.append(peer.put("a", b"other", 20))

    threads = [threading.Thread(target=put) for _ in range(4)]
    for each in threads:
        each.start()
    eventually(lambda: peer.numbers("fills_awaited")[0] >= 4)
    peer.store.abandon(lease)
    for each in threads:
        each.join(10)
    assert sorted(outcomes) == [False, False, False, True]
    lease.release()
    assert peer.read("a") == b"other"
    assert peer.blocks() == 1
    assert peer.numbers("abandoned") == (1,)


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


def test_what_was_abandoned_comes_back_with_its_lease() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    peer.store.abandon(lease)
    assert peer.blocks() == 1
    lease.release()
    assert peer.blocks() == 0
    assert peer.numbers("abandoned") == (1,)


def test_a_lease_that_goes_without_a_commit_has_abandoned_what_it_wrote() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    with thread(lambda: peer.put("a", b"other", 20)) as waiter:
        eventually(lambda: peer.numbers("fills_awaited")[0] > 0)
        at = time.monotonic()
        lease.release()
        waiter.ended()
        assert waiter.value is True
        assert waiter.ended_at - at < 5
    assert peer.read("a") == b"other"
    assert peer.blocks() == 1


def test_a_writer_that_fails_halfway_leaves_nothing() -> None:
    peer = Kept()

    def write() -> None:
        _, lease = peer.store.begin(key("a"), 5, 0)
        with memoryview(lease) as view:
            view[:2] = b"by"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    gc.collect()
    assert peer.blocks() == 0
    assert peer.put("a", b"whole")


def test_committed_value_is_read_only_in_the_lease_of_its_writer() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    with memoryview(lease) as view:
        view[:] = b"bytes"
    assert peer.store.commit(lease)
    assert not lease.is_writable
    with memoryview(lease) as view:
        assert view.readonly
        assert bytes(view) == b"bytes"


def test_a_commit_is_refused_while_something_can_still_write() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    view = memoryview(lease)
    with pytest.raises(BufferError, match="1 views"):
        peer.store.commit(lease)
    assert peer.store.get(key("a")) is None, "it is not there"
    view[:] = b"bytes"
    view.release()
    assert peer.store.commit(lease)
    assert peer.read("a") == b"bytes"


def test_only_what_begin_gave_to_write_can_be_committed_and_once() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    peer.store.commit(lease)
    for wrong in (lease, peer.store.get(key("a")), peer.by.take(5), other_of(peer).by.take(5)):
        for call in (peer.store.commit, peer.store.abandon):
            with pytest.raises(ValueError, match="expected a lease of a value that this store lets be written"):
                call(wrong)
    lease.release()
    with pytest.raises(ClosedError):
        peer.store.commit(lease)
    assert peer.names("a") == {"a"}


# ── the death of a writer ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("point", ["", "store.filled", "store.committed"])
def test_value_of_a_dead_writer_is_written_by_a_waiting_process(point: str) -> None:
    """It dies as it writes, or at a point of its commit."""

    def took() -> float:
        peer = Kept()
        with stranger(peer) as other:
            other.hear()
            other.say("begin", "a", 5)
            assert other.hear() == "new"
            with thread(lambda: peer.store.begin(key("a"), 5, 20)) as waiter:
                eventually(lambda: peer.numbers("fills_awaited")[0] > 0)
                if point:
                    other.say("die", "a", point)
                    other.hear()
                    time.sleep(0.4)  # the waiter's own looks are far apart by now
                    at = time.monotonic()
                    other.say("commit", "a")
                else:
                    at = other.kill()
                is_new, lease = waiter.ended().value  # type: ignore[misc]
            assert is_new == lease.is_writable == (point != "store.committed")
            if is_new:
                assert peer.store.commit(lease)
            assert other.process.wait() == -signal.SIGKILL
        assert peer.names("a") == {"a"}
        eventually(lambda: peer.blocks() == 1)
        return waiter.ended_at - at

    soon(took)


def test_what_a_peer_was_writing_when_it_left_is_nobodys() -> None:
    peer = Kept()
    other = other_of(peer)
    _, lease = other.store.begin(key("a"), 5, 0)
    del other, lease
    gc.collect()
    assert peer.put("a", b"bytes")
    assert peer.blocks() == 1


def test_what_a_dead_process_had_put_stays() -> None:
    peer = Kept()
    with stranger(peer) as other:
        other.hear()
        other.say("begin", "a", 5)
        other.hear()
        other.say("write", "a", "bytes")
        other.hear()
        other.say("commit", "a")
        assert other.hear() == "True"
        other.kill()
        other.process.wait()
    eventually(lambda: peer.held() == 0)
    assert peer.read("a") == b"bytes"


def test_one_that_died_with_the_lock_is_in_nobodys_way() -> None:
    peer = Kept()
    peer.put("a", b"bytes")
    with stranger(peer) as other:
        other.hear()
        other.say("die", "a", "store.locked")
        other.hear()
        other.say("get", "a")
        assert other.process.wait() == -signal.SIGKILL
    assert peer.read("a") == b"bytes"
    assert peer.put("b", b"bytes")


@pytest.mark.parametrize("point", ["store.unlinked", "store.half"])
def test_what_was_half_taken_out_is_either_found_or_gone(point: str) -> None:
    peer = Kept(buckets=1)
    for name in "abc":
        peer.put(name, b"bytes")
    with stranger(peer) as other:
        other.hear()
        other.say("die", "b", point)
        other.hear()
        other.say("remove", "b")
        assert other.process.wait() == -signal.SIGKILL
    assert peer.put("b", b"other") == (point == "store.half")
    assert [peer.read(name) for name in "ac"] == [b"bytes", b"bytes"]
    eventually(lambda: peer.blocks() == 3)
    assert len(peer.store.stats()["items"]) == 3


# ── taken out ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_removed_value_lives_while_it_is_held() -> None:
    peer = Kept()
    peer.put("a", b"bytes")
    lease = peer.store.get(key("a"))
    assert lease is not None
    assert peer.store.remove(key("a")) == 1
    assert peer.read("a") is None
    assert bytes(lease) == b"bytes"
    assert peer.put("a", b"other"), "the key can be written again meanwhile"
    assert bytes(lease) == b"bytes"
    assert peer.blocks() == 2
    lease.release()
    assert peer.blocks() == 1
    assert peer.read("a") == b"other"


def test_all_is_taken_out_at_once() -> None:
    peer = Kept()
    for i in range(10):
        peer.put(i, b"bytes")
    assert peer.store.clear() == 10
    assert peer.store.clear() == 0
    assert peer.blocks() == 0
    assert peer.store.stats()["items"] == []


def test_what_is_taken_out_while_it_is_being_written_is_not_there_after() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), 5, 0)
    with thread(lambda: peer.put("a", b"other", 20)) as waiter:
        eventually(lambda: peer.numbers("fills_awaited")[0] > 0)
        assert peer.store.clear() == 1
        assert waiter.ended().value is True, "the waiter writes it now"
    assert not peer.store.commit(lease)
    assert peer.read("a") == b"other"
    lease.release()
    assert peer.blocks() == 1


def test_a_key_that_is_not_there_cannot_be_taken_out() -> None:
    peer = Kept()
    peer.put("a", b"bytes")
    assert peer.store.remove(key("b")) == 0
    assert peer.read("a") == b"bytes"


# ── given up for room ────────────────────────────────────────────────────────────────────────────────────────────────
def fill_with(peer: Kept, nbytes: int, many: int, between: float = 0.002) -> None:
    for i in range(many):
        peer.put(i, bytes([i]) * nbytes)
        time.sleep(between)


def test_what_was_unused_longest_goes_first() -> None:
    peer = Kept()
    fill_with(peer, NBYTES // 4, 4)
    assert peer.read(0) is not None  # used now
    for new in (10, 11, 12):
        assert peer.put(new, bytes(NBYTES // 4))
        time.sleep(0.002)
    assert peer.names(0, 1, 2, 3) == {0}
    assert peer.numbers("evictions", "evicted_nbytes") == (3, 3 * NBYTES // 4)


def test_of_those_unused_equally_long_a_small_one_goes_for_a_small_need() -> None:
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


def test_for_a_large_one_neighbours_go_together_and_no_more_than_must() -> None:
    peer = Kept()
    fill_with(peer, NBYTES // 32, 32, between=0)
    assert peer.put("large", bytes(NBYTES // 4))
    assert len(peer.names(*range(32))) == 24
    assert peer.numbers("evictions") == (8,)
    for i in peer.names(*range(32)):
        assert isinstance(i, int)
        assert peer.read(i) == bytes([i]) * (NBYTES // 32)


def test_what_somebody_holds_is_never_given_up() -> None:
    peer = Kept()
    fill_with(peer, NBYTES // 4, 4)
    leases = [peer.store.get(key(i)) for i in (0, 2)]
    assert peer.put("one", bytes(NBYTES // 4))
    with pytest.raises(MemoryExhausted, match=r"'me' \(pid \d+\) holds 32"):
        peer.put("two", bytes(NBYTES // 2))
    assert peer.names(0, 1, 2, 3, "one") in ({0, 2, 3, "one"}, {0, 2, "one", 1})
    for i, lease in zip((0, 2), leases):
        assert lease is not None and bytes(lease) == bytes([i]) * (NBYTES // 4)


def test_what_is_being_written_is_never_given_up() -> None:
    peer = Kept()
    _, lease = peer.store.begin(key("a"), NBYTES // 2, 0)
    with pytest.raises(MemoryExhausted):
        peer.put("b", bytes(NBYTES // 2 + 64))
    assert peer.put("b", bytes(NBYTES // 2))
    assert peer.store.commit(lease)


def test_what_was_granted_to_somebody_is_not_given_up_before_it_is_opened() -> None:
    peer = Kept()
    other = other_of(peer)
    peer.put("a", bytes(NBYTES))
    lease = peer.store.get(key("a"))
    assert lease is not None
    numbers = lease.ref_numbers()
    lease.grant(other.by.slot)
    lease.release()
    with pytest.raises(MemoryExhausted):
        peer.put("b", bytes(64))
    opened = other.by.open(*numbers)
    opened.release()
    assert peer.put("b", bytes(64))


def test_reference_opens_a_value_until_it_is_evicted() -> None:
    peer = Kept()
    peer.put("a", b"x" * NBYTES)
    lease = peer.store.get(key("a"))
    assert lease is not None
    numbers = lease.ref_numbers()
    lease.release()
    other = other_of(peer)
    with other.by.open(*numbers) as opened:
        with pytest.raises(MemoryExhausted):
            peer.put("b", b"y" * NBYTES)
        assert bytes(opened) == b"x" * NBYTES
    assert peer.put("b", b"y" * NBYTES)
    with pytest.raises(StaleRef):
        other.by.open(*numbers)


def test_open_during_eviction_gives_the_whole_value_or_stale_ref() -> None:
    peer = Kept(nbytes=8 << 10)
    other = other_of(peer)
    over = time.monotonic() + 1.0
    counts = {"opened": 0, "stale": 0}

    def put() -> None:
        i = 0
        while time.monotonic() < over:
            i += 1
            try:
                peer.put(i, bytes([i % 256]) * 4096, 1)
            except MemoryExhausted:  # both are open just now
                continue

    with thread(put):
        while time.monotonic() < over:
            for item in other.store.stats()["items"]:
                lease = other.store.get(item[0])
                if lease is None:
                    continue
                numbers = lease.ref_numbers()
                lease.release()
                try:
                    with other.by.open(*numbers) as opened:
                        content = bytes(opened)
                    assert content == content[:1] * 4096
                    counts["opened"] += 1
                except StaleRef:
                    counts["stale"] += 1
    assert counts["opened"] > 0
    eventually(lambda: peer.held() == 0)


def test_value_is_evicted_when_block_numbers_run_out_before_room() -> None:
    peer = Kept(max_blocks=4)
    for i in range(4):
        peer.put(i, bytes(64))
        time.sleep(0.002)
    assert peer.put("new", bytes(1024))
    assert len(peer.names(*range(4))) == 3


def test_a_number_is_given_up_for_a_gap_that_lies_elsewhere() -> None:
    peer = Kept(max_blocks=3)
    peer.put("free", bytes(64))
    peer.put("held", bytes(64))
    lease = peer.store.get(key("held"))
    high = peer.by.take(NBYTES // 2)
    assert peer.put("new", bytes(NBYTES // 4)), "the gap is between two that are held"
    assert peer.names("free", "held", "new") == {"held", "new"}
    del lease, high


def test_value_larger_than_the_store_is_refused_without_eviction() -> None:
    peer = Kept()
    peer.put("a", b"bytes")
    with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
        peer.store.begin(key("b"), NBYTES + 1, None)
    assert peer.read("a") == b"bytes"


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


def test_waiting_put_gets_room_when_a_holder_dies() -> None:
    def took() -> float:
        peer = Kept()
        peer.put("held", b"x" * NBYTES)
        with stranger(peer) as other:
            other.hear()
            other.say("get", "held")
            other.hear()
            with thread(lambda: peer.put("next", bytes(NBYTES), 20)) as waiter:
                time.sleep(0.5)
                assert waiter.is_alive()
                at = other.kill()
                assert waiter.ended().value is True
        return waiter.ended_at - at

    soon(took)


# ── forks, statistics ────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_the_statistics_say_what_is_there_how_old_it_is_and_who_holds_it() -> None:
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
