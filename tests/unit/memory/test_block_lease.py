"""A lease of a block: the right to touch it, and the object that exports it; it is free with the last view of all."""

import gc
import weakref

import numpy as np
import pytest

from penstock import ClosedError
from penstock.lowlevel import BlockLease, Pool
from tests.support.processes import DYING, program


def new_pool() -> Pool:
    pool = Pool.create(1 << 16)
    pool.join()
    return pool


def test_a_writable_lease_is_written_through_any_view() -> None:
    pool = new_pool()
    lease = pool.take(16)
    memoryview(lease)[:4] = b"abcd"
    np.frombuffer(lease, np.uint8)[4:8] = 1
    np.frombuffer(lease, np.int64)[1] = -1
    assert bytes(lease) == b"abcd" + b"\1" * 4 + b"\xff" * 8


def test_a_read_only_lease_refuses_every_view_that_could_write() -> None:
    pool = new_pool()
    lease = pool.take(16)
    opened = pool.open(pool.share(lease))
    view = memoryview(opened)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    array = np.frombuffer(opened, np.uint8)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError):
        array.flags.writeable = True
    import ctypes

    with pytest.raises((TypeError, BufferError)):
        (ctypes.c_char * 16).from_buffer(opened)
    with open("/dev/zero", "rb", buffering=0) as zeros, pytest.raises((TypeError, BufferError)):
        zeros.readinto(opened)


def test_the_kernel_refuses_what_gets_round_that_and_only_the_writer_dies() -> None:
    pool = Pool.create(1 << 16)
    source = """
        import ctypes, numpy
        pool = lowlevel.Pool.attach(sys.argv[1])
        lease = pool.open(lowlevel.Ref(*map(int, sys.argv[2:])))
        say(bytes(lease).decode())
        ctypes.memset(numpy.frombuffer(lease, numpy.uint8).ctypes.data, 0, 1)
        say("written")
    """
    with pool.take(5) as lease:
        memoryview(lease)[:] = b"whole"
        ref = pool.share(lease)
        fields = (ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes)
        with program(source, pool.ticket, *fields, env=DYING) as other:
            assert other.hear() == "whole"
            assert other.process.wait() == -11
        assert bytes(lease) == b"whole"
        assert bytes(pool.open(ref)) == b"whole"
    with pool.take(1 << 16, timeout=5):  # what the writer held comes back
        pass


def test_a_taker_may_write_and_so_may_whoever_takes_next_but_not_through_an_old_view() -> None:
    pool = new_pool()
    lease = pool.take(10)
    view = memoryview(lease)
    view.release()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    with pytest.raises(BufferError):
        memoryview(lease)
    with pytest.raises(BufferError):
        np.frombuffer(lease, np.uint8)


def test_views_and_arrays_of_any_shape_keep_the_block() -> None:
    pool = new_pool()
    lease = pool.take(240)
    memoryview(lease)[:] = bytes(range(240))
    array = np.frombuffer(pool.open(pool.share(lease)), np.uint8)
    derived = [
        array[10:20],
        array.reshape(10, 24)[:, 3],
        array.reshape(4, 5, 12).transpose(2, 0, 1)[1:],
        array.view(np.int32)[::-7],
        np.lib.stride_tricks.as_strided(array, (3, 2), (5, 9)),
        np.expand_dims(array, 0),
        array[5:6],
        memoryview(array)[3:7],
        memoryview(array[::2]),
    ]
    expected = [np.asarray(view).copy() for view in derived]
    del array
    lease.release()
    del lease
    while derived:
        assert pool.stats().blocks == 1
        with pool.take(pool.stats().largest_free_nbytes) as other:  # what is free is overwritten
            memoryview(other)[:] = b"\xff" * len(other)
        for view, values in zip(derived, expected):
            assert (np.asarray(view) == values).all()
        view = values = None
        derived.pop()
        expected.pop()
        gc.collect()
    assert pool.stats().blocks == 0


def test_a_copy_does_not_keep_the_block() -> None:
    pool = new_pool()
    lease = pool.take(100)
    copied = np.frombuffer(lease, np.uint8).copy()
    raw = bytes(lease)
    gc.collect()
    lease.release()
    assert pool.stats().blocks == 0
    assert (len(copied), len(raw)) == (100, 100)


def test_a_lease_is_given_back_when_it_is_dropped() -> None:
    pool = new_pool()
    lease = pool.take(100)
    assert pool.stats().blocks == 1
    del lease
    assert pool.stats().blocks == 0
    lease = pool.take(100)
    pool.open(pool.share(lease))
    assert pool.stats().blocks == 1
    del lease
    assert pool.stats().blocks == 0


def test_a_lease_in_a_cycle_is_given_back_by_the_collector() -> None:
    pool = new_pool()

    class Node:
        pass

    node = Node()
    node.lease = pool.take(100)  # type: ignore[attr-defined]
    node.self = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None
    assert pool.stats().blocks == 0


def test_release_with_live_views_is_refused_and_says_how_many() -> None:
    pool = new_pool()
    lease = pool.take(10)
    one, other = memoryview(lease), np.frombuffer(lease, np.uint8)
    with pytest.raises(BufferError, match="the lease has 2 views: drop them first"):
        lease.release()
    one.release()
    with pytest.raises(BufferError, match="the lease has 1 views"):
        lease.release()
    assert not lease.is_released
    assert pool.stats().blocks == 1
    del other
    lease.release()
    assert lease.is_released
    assert pool.stats().blocks == 0


def test_a_released_lease_is_of_no_use_and_a_second_release_gives_nothing_back() -> None:
    pool = new_pool()
    lease = pool.take(10)
    opened = pool.open(pool.share(lease))
    lease.release()
    lease.release()
    assert pool.stats().blocks == 1
    for call in (lambda: pool.share(lease), lambda: lease.grant(0), lease.ref_numbers):
        with pytest.raises(ClosedError, match="the lease has been released"):
            call()
    opened.release()
    assert pool.stats().blocks == 0


def test_a_block_ends_the_lease_even_when_it_raises() -> None:
    pool = new_pool()
    with pytest.raises(ZeroDivisionError), pool.take(10):
        raise ZeroDivisionError
    assert pool.stats().blocks == 0


def test_an_exception_in_a_block_is_not_hidden_by_a_view_that_is_still_there() -> None:
    pool = new_pool()

    def compute() -> None:
        with pool.take(10) as lease:
            view = memoryview(lease)
            view[0] = 1 // 0

    with pytest.raises(ZeroDivisionError):
        compute()
    gc.collect()
    assert pool.stats().blocks == 0


def test_several_leases_of_one_block_are_counted() -> None:
    pool = new_pool()
    first = pool.take(10)
    ref = pool.share(first)
    others = [pool.open(ref) for _ in range(1000)]
    first.release()
    while others:
        assert pool.stats().blocks == 1
        others.pop().release()
    assert pool.stats().blocks == 0


def test_a_lease_outlives_its_pool_and_its_attachment() -> None:
    pool = Pool.create(4096)
    lease = pool.take(10)
    view = memoryview(lease)
    view[:] = b"0123456789"
    del pool, lease
    gc.collect()
    assert bytes(view) == b"0123456789"
    view.release()


def test_a_released_lease_does_not_keep_its_pools_place() -> None:
    pool = Pool.create(4096)
    lease = pool.take(10)
    lease.release()
    pool.close()
    watching = Pool.attach(pool.ticket)
    watching.join("watcher")
    assert [peer.state for peer in watching.peers()] == ["left", "live"]


def test_an_empty_lease_has_an_empty_view() -> None:
    pool = new_pool()
    lease = pool.take(0)
    assert (len(lease), bytes(lease), len(memoryview(lease))) == (0, b"", 0)
    with pool.open(pool.share(lease)) as opened:
        assert bytes(opened) == b""


def test_a_lease_cannot_be_made_or_pickled_by_others() -> None:
    pool = new_pool()
    import copy
    import pickle

    with pytest.raises(TypeError):
        BlockLease()
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            copier(pool.take(1))
