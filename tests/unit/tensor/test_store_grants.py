"""Values that other processes may open once more although their writer holds them no longer; keys given up alone."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import ClosedError, MemoryExhausted, Missing, PeerDied, Scope, Store
from tests.conftest import eventually
from tests.support.processes import forked, program
from tests.support.values import MB, blocks, key

WORKER = """
    store = penstock.Store.attach(sys.argv[1], peer_name="worker")
    say(store.pool.join().index)
"""


def new_store() -> Store:
    return Store(MB, peer_name="writer")


def attached(store: Store, name: str) -> Store:
    other = Store.attach(store.ticket, peer_name=name)
    other.pool.join()
    return other


# ── grant_all ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_grant_all_lets_every_attached_process_open_the_value_once() -> None:
    store = new_store()
    workers = [attached(store, f"worker {i}") for i in range(3)]
    with store.put([b"x" * 1000], key=key(1)) as lease:
        assert store.grant_all(lease) == 3
    for number, worker in enumerate(workers):
        assert not store.evict(key(1)), f"given up before worker {number} has opened it"
        with worker.open(key(1)) as opened:
            assert opened.value() == [b"x" * 1000]
    assert store.evict(key(1))
    assert blocks(store) == 0


def test_grant_all_grants_none_when_no_other_process_is_attached() -> None:
    store = new_store()
    with store.put(1, key=key(1)) as lease:
        assert store.grant_all(lease) == 0
    assert store.evict(key(1))


def test_grant_all_counts_only_the_peers_named() -> None:
    store = new_store()
    first, second = attached(store, "first"), attached(store, "second")
    with store.put(1, key=key(1)) as lease:
        assert store.grant_all(lease, [second.pool.peer]) == 1
        assert store.grant_all(lease, [second.pool.peer.index]) == 1
    first.open(key(1)).release()
    second.open(key(1)).release()
    assert not store.evict(key(1)), "the second was granted it twice"
    second.open(key(1)).release()
    assert store.evict(key(1))


def test_grant_all_grants_none_when_one_of_the_peers_named_is_gone() -> None:
    store = new_store()
    there, gone = attached(store, "there"), attached(store, "gone")
    index = gone.pool.peer.index
    gone.close()
    with store.put(1, key=key(1)) as lease, pytest.raises(PeerDied, match="no grant to 'gone'"):
        store.grant_all(lease, [there.pool.peer.index, index])
    assert store.evict(key(1))


def test_grant_all_passes_over_a_process_that_has_died() -> None:
    store = new_store()
    living = attached(store, "living")
    with program(WORKER, store.ticket) as worker:
        worker.hear()
        with store.put(1, key=key(1)) as lease:
            assert store.grant_all(lease) == 2
            worker.kill()
            eventually(lambda: store.grant_all(lease) == 1)
    while not store.evict(key(1)):
        living.open(key(1)).release()  # a hang here: a grant to the dead process is left


def test_grant_all_grants_none_when_one_peer_has_as_many_as_it_can() -> None:
    store = new_store()
    first, full = attached(store, "first"), attached(store, "full")
    with store.put(1, key=key(1)) as lease:
        for _ in range(15):
            store.grant_all(lease, [full.pool.peer.index] * 4369)
        with pytest.raises(MemoryExhausted, match="65535 grants of block"):
            store.grant_all(lease, [first.pool.peer.index, full.pool.peer.index])
    full.close()
    assert store.evict(key(1)), "the first was granted it, or a grant to one that left is kept"


def test_grant_all_refuses_released_leases_and_inline_values() -> None:
    store = new_store()
    lease = store.put(1, key=key(1))
    lease.release()
    with pytest.raises(ClosedError):
        store.grant_all(lease)
    with Scope() as scope, pytest.raises(ValueError, match="inline"):
        store.grant_all(scope.put(1).open())


def test_grants_of_a_writer_that_dies_end_with_it() -> None:
    store = new_store()
    reader = attached(store, "reader")
    source = """
        store = penstock.Store.attach(sys.argv[1], peer_name="dying")
        say(store.grant_all(store.put(1, key=bytes(32))))
        hear()
    """
    with program(source, store.ticket) as writer:
        assert writer.hear() == "1"
        assert reader.get(bytes(32)).value() == 1
        assert not store.evict(bytes(32))
        writer.kill()
        eventually(lambda: store.evict(bytes(32)))


# ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_open_uses_a_grant_up_and_get_does_not() -> None:
    store = new_store()
    worker = attached(store, "worker")
    with store.put(1, key=key(1)) as lease:
        store.grant_all(lease)
    worker.get(key(1)).release()
    assert not store.evict(key(1))
    with worker.open(key(1)) as opened:
        assert not store.evict(key(1))
        assert opened.value() == 1
    worker.open(key(1)).release()  # without a grant: as get()
    assert store.evict(key(1))


def test_open_of_an_unknown_or_unfinished_key_raises_missing() -> None:
    store = new_store()
    with pytest.raises(Missing, match="'store' keeps nothing under"):
        store.open(key(1))
    with store.loan(key(1), 1), pytest.raises(Missing):
        store.open(key(1))


def test_a_granted_value_is_not_evicted_for_others() -> None:
    store = new_store()
    worker = attached(store, "worker")
    with store.put(b"x" * 600_000, key=key(1)) as lease:
        store.grant_all(lease)
    with pytest.raises(MemoryExhausted):
        store.put(b"y" * 600_000, key=key(2), timeout=0)
    worker.open(key(1)).release()
    store.put(b"y" * 600_000, key=key(2), timeout=0).release()


# ── evict ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_evict_removes_only_unheld_values() -> None:
    store = new_store()
    other = attached(store, "other")
    with store.put(1, key=key(1)):
        assert not other.evict(key(1))
        assert store.get(key(1)).value() == 1
    assert other.evict(key(1))
    assert not other.evict(key(1))
    assert (store.stats().evictions, blocks(store)) == (1, 0)
    with pytest.raises(Missing):
        store.get(key(1))


def test_evict_leaves_values_in_use() -> None:
    store = new_store()
    with store.loan(key(1), [1]) as loan:
        assert not store.evict(key(1))
        loan.commit().release()
    assert store.evict(key(1))
    array = store.put(np.arange(3), key=key(2)).value()
    assert not store.evict(key(2))
    assert array.tolist() == [0, 1, 2]
    del array
    assert store.evict(key(2))


def test_a_child_of_fork_opens_with_grants_of_its_own() -> None:
    store = new_store()
    with store.put(1, key=key(1)) as lease:
        store.grant_all(lease)

    def child() -> None:
        store.pool.join()
        assert store.open(key(1)).value() == 1

    assert forked(child) == 0
    assert store.evict(key(1))
