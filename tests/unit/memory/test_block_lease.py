"""A lease of a block: the right to touch it, and the object that exports it; it is free with the last view of all."""

import gc
import threading
import time

import numpy as np
import pytest

import penstock
from penstock import ClosedError
from penstock.lowlevel import BlockLease, Pool
from tests.support.processes import DYING, program, thread


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


def test_writing_through_the_address_of_a_read_only_lease_kills_the_writer() -> None:
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


def test_view_of_a_released_lease_is_unusable() -> None:
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


def test_release_with_live_views_is_refused_and_says_how_many() -> None:
    pool = new_pool()
    lease = pool.take(10)
    view, other = memoryview(lease), np.frombuffer(lease, np.uint8)
    with pytest.raises(BufferError, match="the lease has 2 views: drop them first"):
        lease.release()
    view.release()
    with pytest.raises(BufferError, match="the lease has 1 views"), lease:
        pass
    assert not lease.is_released
    assert pool.stats().blocks == 1
    del other
    lease.release()
    assert lease.is_released
    assert pool.stats().blocks == 0


def test_released_lease_is_unusable_and_second_release_changes_nothing() -> None:
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


def test_with_block_releases_the_lease_when_it_raises() -> None:
    pool = new_pool()
    with pytest.raises(ZeroDivisionError), pool.take(10):
        raise ZeroDivisionError
    assert pool.stats().blocks == 0


def test_exception_in_a_with_block_is_not_hidden_by_a_live_view() -> None:
    pool = new_pool()

    def compute() -> None:
        with pool.take(10) as lease:
            view = memoryview(lease)
            view[0] = 1 // 0

    with pytest.raises(ZeroDivisionError):
        compute()
    gc.collect()
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


def test_an_empty_lease_has_an_empty_view() -> None:
    pool = new_pool()
    lease = pool.take(0)
    assert (len(lease), bytes(lease), len(memoryview(lease))) == (0, b"", 0)
    with pool.open(pool.share(lease)) as opened:
        assert bytes(opened) == b""


def test_lease_has_no_constructor_and_cannot_be_pickled() -> None:
    pool = new_pool()
    import copy
    import pickle

    with pytest.raises(TypeError):
        BlockLease()
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            copier(pool.take(1))


# ── copy_into ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_copy_into_copies_the_bytes_of_the_range() -> None:
    pool = Pool.create(1 << 20)
    with pool.take(200_000) as lease:
        content = bytes(i * 7 % 251 for i in range(200_000))
        memoryview(lease)[:] = content
        for start, nbytes in ((0, None), (3, None), (1, 70_000), (199_999, 1), (200_000, None), (200_000, 0), (5, 0)):
            buffer = bytearray(b"?" * 200_001)
            end = 200_000 if nbytes is None else start + nbytes
            assert lease.copy_into(buffer, start, nbytes) == end - start
            assert buffer == content[start:end] + b"?" * (200_001 - (end - start))
        array = np.zeros(200_000, np.uint8)
        assert lease.copy_into(memoryview(array)) == 200_000
        assert array.tobytes() == content


def test_copy_into_copies_nothing_when_the_range_does_not_fit() -> None:
    lease = new_pool().take(16)
    memoryview(lease)[:] = b"0123456789abcdef"
    short = bytearray(b"?" * 15)
    with pytest.raises(ValueError, match="expected a buffer of at least 16 bytes, got one of 15"):
        lease.copy_into(short)
    for start, nbytes in ((17, None), (0, 17), (16, 1), (2**63, 2**63)):
        with pytest.raises(ValueError, match="of a lease of 16 bytes"):
            lease.copy_into(short, start, nbytes)
    with pytest.raises(BufferError):
        lease.copy_into(b"?" * 16)
    with pytest.raises(ValueError, match="contiguous"):
        lease.copy_into(np.zeros((4, 8), np.uint8)[:, ::2])
    objects = np.array([None, None], dtype=object)
    with pytest.raises(TypeError, match="addresses of this process"):
        lease.copy_into(objects)
    assert objects.tolist() == [None, None]
    with pytest.raises(TypeError):
        lease.copy_into("?" * 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        lease.copy_into(short, -1)
    assert short == b"?" * 15
    lease.release()  # no refusal has left an export
    with pytest.raises(ClosedError):
        lease.copy_into(bytearray(16))


def test_copy_into_of_a_record_copies_what_was_sent() -> None:
    for nbytes in (1000, 1 << 20):
        with penstock.Ring() as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
            content = bytes(i * 7 % 251 for i in range(nbytes))
            sender.send(content)
            with receiver.receive_view(timeout=5) as lease:
                part = bytearray(nbytes - 10)
                assert lease.copy_into(part, start=10) == nbytes - 10
                assert part == content[10:]


def test_copy_into_releases_the_interpreter_and_keeps_the_lease() -> None:
    pool = Pool.create(256 << 20)
    buffer = bytearray(256 << 20)

    def copied() -> bool:
        """False: the other thread has released the lease before the copy began."""
        lease, begins, outcome = pool.take(256 << 20), threading.Event(), "released"

        def release() -> None:
            nonlocal outcome
            begins.wait()
            time.sleep(0.01)
            try:
                lease.release()
            except BufferError as error:
                outcome = str(error)

        memoryview(lease)[-5:] = b"there"
        with thread(release):
            begins.set()
            try:
                lease.copy_into(buffer)
            except ClosedError:
                return False
        return outcome == "the lease has 1 views: drop them first" and buffer[-5:] == b"there"

    assert any(copied() for _ in range(5))


def test_released_lease_does_not_keep_the_place_in_its_pool() -> None:
    pool = Pool.create(4096)
    lease = pool.take(10)
    lease.release()
    pool.close()
    watching = Pool.attach(pool.ticket)
    watching.join("watcher")
    assert [peer.state for peer in watching.peers()] == ["left", "live"]
