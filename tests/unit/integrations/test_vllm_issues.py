"""References that were sent, and what is held for them until a receiver opens them."""

import numpy as np
import pytest

from penstock import Handle, Missing, Store, content_key
from penstock.integrations.vllm.issues import Issues

KEY = content_key(b"image")


class Carrier:
    """What carries a reference, as an item of a request does."""


def new_store() -> Store:
    return Store(1 << 20, peer_name="api server")


def core(store: Store) -> Store:
    attached = Store.attach(store.ticket, peer_name="core")
    attached.peers()
    return attached


def is_evictable(store: Store) -> bool:
    """Whether nothing holds the value, and no process was granted it: then all the room can be had."""
    try:
        store.put(np.zeros(1_000_000, np.uint8), timeout=0).release()
    except MemoryError:
        return False
    return True


def issue(store: Store, issues: Issues, carrier: Carrier | None = None) -> Handle:
    lease = store.put(np.arange(100_000, dtype=np.uint8), key=KEY)
    return Handle(None, issues.add(lease, carrier))


def test_issues_hold_a_value_until_one_core_has_opened_its_reference() -> None:
    store = new_store()
    cores = [core(store), core(store)]
    issues = Issues(store, "core")
    handle = issue(store, issues)
    issues.release_opened()
    assert len(issues) == 1
    assert not is_evictable(store)

    lease = handle.open(cores[1])
    issues.release_opened()
    assert len(issues) == 0
    assert not is_evictable(store)  # the core holds it
    lease.release()
    assert is_evictable(store)  # and the other core's grant was revoked


def test_issues_hold_a_value_until_every_sent_reference_is_opened() -> None:
    store = new_store()
    attached = core(store)
    issues = Issues(store, "core")
    handles = [issue(store, issues) for _ in range(3)]
    for handle in handles[:2]:
        handle.open(attached).release()
        issues.release_opened()
        assert not is_evictable(store)
    handles[2].open(attached).release()
    issues.release_opened()
    assert is_evictable(store)


def test_issues_of_two_senders_hold_a_value_until_both_are_opened() -> None:
    """A core that opens a value may use the grant of another sender: the last of both to be opened frees it."""
    store = new_store()
    second = Store.attach(store.ticket, peer_name="api server 2")
    cores = [core(store), core(store)]
    books = [Issues(store, "core"), Issues(second, "core")]
    handles = [issue(store, books[0]), issue(second, books[1])]
    handles[0].open(cores[0]).release()
    for book in books:
        book.release_opened()
    assert not is_evictable(store)
    handles[1].open(cores[1]).release()
    for book in books:
        book.release_opened()
    assert is_evictable(store)


def test_issues_release_a_value_whose_carrier_is_gone_after_the_timeout() -> None:
    store = new_store()
    core(store)
    issues = Issues(store, "core", timeout=0.0)
    carrier = Carrier()
    handle = issue(store, issues, carrier)
    issues.release_opened()
    assert len(issues) == 1  # it may still be sent
    del carrier
    issues.release_opened()
    assert len(issues) == 0
    assert is_evictable(store)
    with pytest.raises(Missing):
        handle.open(store)


def test_issues_keep_a_value_that_was_sent_before_a_core_attached() -> None:
    store = new_store()
    issues = Issues(store, "core")
    handle = issue(store, issues)
    assert not is_evictable(store)
    with handle.open(core(store)) as lease:
        assert lease.value()[99] == 99


def test_issues_hold_nothing_after_they_are_closed() -> None:
    store = new_store()
    issues = Issues(store, "core")
    issue(store, issues)
    issues.close()
    assert is_evictable(store)
