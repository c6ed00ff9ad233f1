"""A scope: where the values of one request lie, how long they are held, and what is counted."""

from __future__ import annotations

import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import ClosedError, Handle, Missing, Scope, Store, UnsupportedTensor
from penstock.tensor import ScopeStats
from penstock.tensor.tree import Plan
from tests.support.processes import program, threads
from tests.support.values import MB, Request, blocks, image, is_not_held, key, shows, travelled

WAYS = pytest.mark.parametrize("value_key", [key(1), None], ids=["with a key", "without a key"])


def images() -> Store:
    return Store(4 * MB, name="images")


# ── what is sent ──
@WAYS
def test_a_value_is_copied_once_and_seen_where_it_lies(value_key: bytes | None) -> None:
    with images() as store:
        with Store.attach(store.ticket) as other, Scope(store) as scope:
            handle = travelled(scope.put(image(1, MB), key=value_key))
            assert handle.key == value_key and not handle.is_inline and handle.nbytes > MB
            with handle.open(other) as lease:
                pixels = lease.value()["pixels"]
                assert shows(lease.value(), 1)
            assert not pixels.flags.writeable and not pixels.flags.owndata
            assert blocks(store) == 1
            scope.release()
            assert (pixels == 1).all(), "gone while it is looked at"
            del pixels
            assert blocks(store) == (1 if value_key else 0), "a value without a key goes with its last lease"
        assert scope.stats() == ScopeStats(handles=1, nbytes=handle.nbytes, puts=1)


def test_value_already_in_the_store_is_not_read_again() -> None:
    with images() as store:
        store.put(image(1), key=key(1)).release()

        class Untouchable:
            def __getattr__(self, name: str) -> Any:
                raise AssertionError(f"it was asked for its {name}")

        with Scope(store) as scope:
            taken = store.stats().pool.takes
            handle = scope.put(Untouchable(), key=key(1))
            assert shows(handle.open(store).value(), 1)
            assert store.stats().pool.takes == taken
            assert scope.stats() == ScopeStats(handles=1, nbytes=handle.nbytes, hits=1)


def test_lease_added_to_a_scope_is_held_by_the_scope() -> None:
    with images() as store:
        store.put(image(1), key=key(1)).release()
        scope = Scope(store)
        with store.get(key(1)) as stored:
            handle = scope.add(stored, key=key(1))
        store.clear()
        assert shows(handle.open(store).value(), 1), "the scope did not hold it by itself"
        scope.release()
        assert blocks(store) == 0
        with pytest.raises(ClosedError):
            Scope(store).add(stored)
        assert scope.stats() == ScopeStats(handles=1, nbytes=handle.nbytes, hits=1)


def test_adding_an_inline_lease_gives_the_handle_it_came_with() -> None:
    handle = travelled(Scope().put(image(1, 400), key=key(1)))
    lease = handle.open()
    with images() as store, Scope(store) as scope:
        again = scope.add(lease)
        assert again is handle
        assert scope.put(object(), key=key(1)) is handle, "its key is known in this scope"
        lease.release()
        assert shows(again.open(store).value(), 1)
        assert scope.stats() == ScopeStats(handles=2, nbytes=2 * handle.nbytes, hits=2)
        assert blocks(store) == 0
        with pytest.raises(ClosedError):
            scope.add(lease)
        scope.release()
        with handle.open() as other, pytest.raises(ClosedError, match="its request has ended"):
            scope.add(other)


def test_a_lease_that_is_added_without_its_key_has_a_handle_without_one() -> None:
    with images() as store, Scope(store) as scope:
        with store.put(image(1), key=key(1)) as lease:
            assert scope.add(lease).key is None
            assert scope.add(lease, key=key(1)).key == key(1)
        assert shows(scope.put(None, key=key(1)).open(store).value(), 1)
        assert (scope.stats().handles, scope.stats().hits) == (3, 3)


# ── what travels inline, and why ──
def test_a_small_value_travels_inline_and_nothing_is_held() -> None:
    with images() as store, Scope(store, inline_nbytes=1000) as scope:
        handle = travelled(scope.put(image(1, 400), key=key(1)))
        assert handle.is_inline and handle.key == key(1)
        assert shows(handle.open().value(), 1)
        assert blocks(store) == 0
        assert not scope.put(image(2, 1000), key=key(2)).is_inline
        stats = scope.stats()
        assert (stats.inline_small, stats.inline, stats.puts, stats.inline_nbytes) == (1, 1, 1, handle.nbytes)


def test_value_of_inline_limit_travels_inline_and_a_larger_in_the_store() -> None:
    with images() as store:
        nbytes = Scope().put(np.zeros(200, np.uint8)).nbytes
        with Scope(store, inline_nbytes=nbytes) as scope:
            assert scope.put(np.zeros(200, np.uint8)).is_inline
            assert not scope.put(np.zeros(201, np.uint8)).is_inline
        with Scope(store, inline_nbytes=0) as scope:
            assert not scope.put(None).is_inline


def test_scope_without_a_store_sends_each_value_inline_once() -> None:
    with Scope() as scope:
        handle_of_store = scope.put(image(1), key=key(1))
        assert scope.put(object(), key=key(1)) is handle_of_store, "it was looked at again"
        handle = travelled(handle_of_store)
    with handle.open() as lease:
        assert shows(lease.value(), 1) and lease.nbytes == handle.nbytes
        pixels = lease.value()["pixels"]
        assert not pixels.flags.writeable and pixels.ctypes.data % 8 == 0
        assert lease.value(writable=True)["pixels"].flags.writeable
    with pytest.raises(ClosedError):
        lease.value()
    assert shows({"pixels": pixels, "grid": [1, 2, 1]}, 1)
    assert scope.stats() == ScopeStats(
        handles=2, nbytes=2 * handle.nbytes, hits=1, inline_without_store=1, inline_nbytes=handle.nbytes
    )


def test_a_value_of_no_bytes_travels_too() -> None:
    with images() as store:
        for value in (None, 5, {"nothing": np.zeros((0, 3))}, []):
            with Scope() as scope:
                value_back = travelled(scope.put(value)).open().value()
                assert value_back["nothing"].shape == (0, 3) if isinstance(value, dict) else value_back == value
            with Scope(store, inline_nbytes=0) as scope:
                value_back = travelled(scope.put(value, key=key(1))).open(store).value()
                assert value_back["nothing"].shape == (0, 3) if isinstance(value, dict) else value_back == value
            store.clear()


@pytest.mark.parametrize("value_key", [key(9), None], ids=["with a key", "without a key"])
def test_a_value_for_which_there_is_no_room_travels_inline(value_key: bytes | None) -> None:
    with images() as store:
        with Scope(store, timeout=0.01) as holds, Scope(store, timeout=0.01) as scope:
            holds.put(image(1, 3 * MB), key=key(1))
            handle = travelled(scope.put(image(2, 2 * MB), key=value_key))
            assert handle.is_inline and shows(handle.open().value(), 2)
            assert scope.stats().inline_full == 1
            holds.release()
            assert not scope.put(image(3, 2 * MB)).is_inline, "there is room again"
            assert scope.stats().inline == 1 and scope.stats().puts == 1
            assert holds.stats().inline == 0, "counts are those of one scope"


def test_value_travels_inline_when_another_process_writes_for_too_long() -> None:
    with images() as store:
        with Store.attach(store.ticket) as other, Scope(store, timeout=0.01) as scope:
            _, lease = other._keeper.begin(key(1), 1000, 0)
            assert scope.put(image(1), key=key(1)).is_inline
            assert scope.stats().inline_full == 1
            other._keeper.abandon(lease)
            lease.release()


def test_value_larger_than_the_store_travels_inline_with_one_warning() -> None:
    with Store(MB, name="small") as store:
        with Scope(store) as scope, Scope(store) as other:
            with pytest.warns(RuntimeWarning, match="does not fit the store 'small'.*travels inline.*raise") as warned:
                handles = [scope.put(image(number, 2 * MB), key=key(number)) for number in range(3)]
                handles.append(other.put(image(3, 2 * MB)))
            assert len(warned) == 1
            assert warned[0].filename == __file__, "the warning does not point at the line that put it"
            for number, handle in enumerate(handles):
                assert shows(travelled(handle).open(store).value(), number)
            assert scope.stats().inline_too_large == 3 and other.stats().inline_too_large == 1
        assert store.stats().evictions == 0


def test_unsupported_value_is_refused_and_not_held() -> None:
    with images() as store:
        with Scope(store) as scope:
            with pytest.raises(UnsupportedTensor):
                scope.put([object()], key=key(1))
        assert blocks(store) == 0 and scope.stats().handles == 0
        with pytest.raises(ValueError, match="inline_nbytes"):
            Scope(store, inline_nbytes=-1)


@pytest.mark.parametrize("wrong", [b"", b"k" * 31, b"k" * 33, "k" * 32])
def test_a_key_that_is_not_32_bytes_is_refused_and_nothing_is_held(wrong: Any) -> None:
    with images() as store, store.put(image(2)) as lease:
        for scope in (Scope(store, inline_nbytes=0), Scope(store), Scope()):
            with pytest.raises(ValueError, match="expected a key of 32 bytes"):
                scope.put(image(1, 400), key=wrong)
            with pytest.raises(ValueError, match="a key of 32 bytes"):
                scope.add(lease, key=wrong)
            assert scope.stats() == ScopeStats()
        lease.release()
        assert blocks(store) == 0


# ── for how long ──
def test_a_scope_ends_once_however_often_it_is_released() -> None:
    with images() as store:
        scope = Scope(store)
        assert not scope.is_released
        scope.put(image(1), key=key(1))
        assert store.stats().items[0].holders == 1
        with threads(*[scope.release] * 8):
            pass
        assert scope.is_released and is_not_held(store)
        with pytest.raises(ClosedError, match="its request has ended"):
            scope.put(image(1), key=key(1))
        with pytest.raises(ClosedError):
            scope.put(image(2), key=key(2))
        assert store.stats().puts == 1 and is_not_held(store)
        assert scope.stats().handles == 1


def test_a_scope_that_is_forgotten_holds_nothing() -> None:
    with images() as store:
        scope = Scope(store)
        scope.put(image(1))
        assert blocks(store) == 1
        del scope
        assert blocks(store) == 0


def test_an_abort_while_a_value_is_being_copied_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with images() as store:
        write = Plan.write
        for value_key in (key(1), None):
            scope = Scope(store)

            def released_meanwhile(planned: Plan, *where: Any, scope: Scope = scope) -> None:
                scope.release()
                write(planned, *where)

            with monkeypatch.context() as patch:
                patch.setattr(Plan, "write", released_meanwhile)
                with pytest.raises(ClosedError) as raised:
                    scope.put(image(1), key=value_key)
            assert is_not_held(store), f"held for as long as there is {raised!r}"


def test_handle_delivered_twice_is_held_until_its_last_lease_ends() -> None:
    """Several samples of one request, retries, another route."""
    with images() as store:
        scope, retry = Scope(store), Scope(store)
        first = scope.put(image(1), key=key(1))
        assert scope.put(image(2), key=key(1)) == first, "the same key in one request is one value"
        again = retry.put(image(1), key=key(1))
        assert again == first and store.stats().puts == 1 and blocks(store) == 1
        opened = [handle.open(store) for handle in (first, first, travelled(first), again)]
        scope.release()
        assert shows(first.open(store).value(), 1), "the retry holds it"
        retry.release()
        store.clear()
        while opened:
            assert shows(opened[-1].value(), 1)
            opened.pop().release()
        assert blocks(store) == 0
        with pytest.raises(Missing):
            first.open(store)
        assert (scope.stats().handles, scope.stats().puts, scope.stats().hits) == (2, 1, 1)
        assert (retry.stats().handles, retry.stats().puts, retry.stats().hits) == (1, 0, 1)


def put_by_threads(scope: Scope, number: int = 8) -> list[Handle]:
    """Returns the handle that each thread has, or raises its error."""
    gate = threading.Barrier(number)

    def put() -> Handle:
        gate.wait()
        return scope.put(image(1, MB), key=key(1))

    with ThreadPoolExecutor(number) as pool:
        return [task.result() for task in [pool.submit(put) for _ in range(number)]]


def test_threads_that_do_not_wait_for_each_other_have_one_handle_too() -> None:
    """A thread that finds another one writing the key sends the value inline, as it may: with one handle for all."""
    with images() as store:
        with Scope(store, timeout=0) as scope:
            handles = put_by_threads(scope)
            assert len(set(map(bytes, handles))) == 1 and shows(handles[0].open(store).value(), 1)
            stats = scope.stats()
            assert stats.handles == stats.hits + stats.puts + stats.inline_full == 8
            assert store.stats().puts == 1
        assert is_not_held(store)


def test_threads_that_use_a_store_first_at_the_same_time_are_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads could attach at the same time: a value was begun by the one peer, and its commit by the other one
    raised ValueError, so the thread had no handle."""
    attach, attached = penstock._native.Attachment, []

    def attach_slowly(*args: Any) -> Any:
        time.sleep(0.02)
        attached.append(attach(*args))
        return attached[-1]

    with images() as store:
        monkeypatch.setattr(penstock._native, "Attachment", attach_slowly)
        with Scope(store, timeout=None) as scope:
            assert len(set(map(bytes, put_by_threads(scope)))) == 1
            assert len(attached) == len(store.peers()) == 1
            stats = scope.stats()
            assert store.stats().puts == store.stats().misses == stats.puts == 1
            assert stats.handles == stats.hits + stats.puts == 8 and stats.inline == 0
        assert is_not_held(store)
        attached.clear()


def test_forked_child_attaches_when_a_thread_of_its_parent_held_the_lock() -> None:
    from penstock.memory import pool

    with images() as store, pool._attaching:
        held = threading.Thread(target=lambda: pool._attaching.acquire(timeout=0.1))
        held.start()
        child = os.fork()
        if child == 0:
            os._exit(0 if store.stats().puts == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        held.join()


@pytest.mark.parametrize("nbytes", [1 << 16, 2 * MB])
def test_value_without_room_counts_one_miss(nbytes: int) -> None:
    with Store(MB) as store, Scope(store, timeout=0) as full, store.pool.take(store.nbytes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert full.put(image(1, nbytes), key=key(1)).is_inline
            assert (store.stats().misses, store.stats().hits) == (1, 0)
            assert full.put(image(2, nbytes)).is_inline  # without a key nothing is looked up
            assert (store.stats().misses, store.stats().hits) == (1, 0)


# ── processes ──
FORWARDING = """
    import msgspec
    from penstock import Handle

    class Request(msgspec.Struct, array_like=True, frozen=True):
        number: int
        handles: tuple[Handle, ...] = ()

    inbox = penstock.attach(sys.argv[1], Request).open_receiver()
    steps = penstock.attach(sys.argv[2], Request).open_sender()
    say("ready")
    for _ in range(int(sys.argv[3])):
        got = inbox.receive(timeout=20)
        steps.send(got, timeout=20)
    with open("/proc/self/maps") as maps:
        segments = {line.split(None, 5)[5].strip() for line in maps if "memfd:penstock" in line}
    say(*sorted(segments))
    hear()
"""


def test_core_without_a_store_forwards_handles_without_mapping_values() -> None:
    with images() as store:
        with (
            penstock.Ring(Request, name="inbox") as inbox,
            penstock.Ring(Request, name="steps") as steps,
            program(FORWARDING, inbox.ticket, steps.ticket, 3) as core,
        ):
            assert core.hear() == "ready"
            sender, receiver = inbox.open_sender(), steps.open_receiver()
            with Scope(store, inline_nbytes=1000) as scope, Scope() as storeless:
                sent = [
                    Request(0, (scope.put(image(0, MB), key=key(0)), scope.put(image(1, MB)))),
                    Request(1, (scope.put(image(2, 500), key=key(2)),)),
                    Request(2, (storeless.put(image(3, MB), key=key(3)),)),
                ]
                for request in sent:
                    sender.send(request, timeout=20)
                number = inline = 0
                for _ in sent:
                    message = receiver.receive(timeout=20)
                    for handle in message.handles:
                        assert shows(handle.open(store).value(), number)
                        inline += handle.is_inline
                        number += 1
                assert number == 4 and inline == 2
                segments = core.hear()
                assert "inbox" in segments and "steps" in segments and "images" not in segments
                assert {peer.pid for peer in store.peers() if peer.state == "live"} == {store.pool.peer.pid}
            del message, handle
            sender.close()
            receiver.close()
        assert is_not_held(store)


def test_full_store_emits_no_warning() -> None:
    with images() as store:
        with warnings.catch_warnings(), Scope(store, timeout=0.01) as scope:
            warnings.simplefilter("error")
            for number in range(8):
                scope.put(image(number, MB), key=key(number))
            assert scope.stats().inline_full == 5 and scope.stats().puts == 3
