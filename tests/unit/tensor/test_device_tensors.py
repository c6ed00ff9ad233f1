"""Tensors of a device: put into slices, made in them, and by host memory for receivers that cannot have those."""

import gc
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import ClosedError, DecodeError, Handle, MemoryExhausted, PeerDied, Scope, Store, UnsupportedTensor
from penstock.lowlevel import BlockLease, Pool, Ref, StaleRef
from penstock.tensor.cuda import CudaPool, CudaRef, CudaTensors, ForeignDevice, HostRef, Place, Reference, Uploads
from tests.conftest import eventually
from tests.support.devices import FakeDriver, Stream
from tests.support.values import MB, blocks

KIB = 1 << 10


class Image(msgspec.Struct, array_like=True, frozen=True):
    number: int
    pixels: CudaRef | HostRef


class Ends:
    """A producer and a consumer in one process, on the same device or on two, which may reach each other."""

    def __init__(self, *, nbytes: int = 64 * KIB, consumer_device: int = 0, peers: tuple[int, ...] = ()) -> None:
        self.device = FakeDriver()
        self.other = self.device if consumer_device == 0 else FakeDriver(consumer_device, peers=peers)
        self.pool = CudaPool.create(nbytes, driver=self.device)
        self.host = Store(MB, name="host")
        self.producer = CudaTensors(self.pool, self.host, driver=self.device, inline_nbytes=64)
        self.consumer_pool = CudaPool.attach(self.pool.ticket, driver=self.other)
        self.their_host = Store.attach(self.host.ticket)
        self.consumer = CudaTensors(self.consumer_pool, self.their_host, driver=self.other)

    def blocks(self) -> tuple[int, int]:
        """On the device, and in host memory."""
        gc.collect()
        self.producer.flush()
        self.consumer.flush()
        return self.pool.stats().blocks, blocks(self.host)

    def close(self) -> None:
        assert self.blocks() == (0, 0)
        for tensors in (self.producer, self.consumer):
            assert tensors.close()
        self.consumer_pool.close()
        assert self.pool.close()
        for store in (self.their_host, self.host):
            store.close()
        assert not self.device.allocated and not self.device.registered and not self.other.registered


def on_device(driver: FakeDriver, array: Any) -> Any:
    return driver.copy_of(np.array(array))


# ── to the same device ──
@pytest.mark.parametrize("device", [0, 3], ids=["by a slice", "by host memory"])
@pytest.mark.parametrize("dtype", ["uint8", "bool", "float16", "float32", "complex128", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1000,), (7, 11, 13)], ids=str)
def test_tensor_arrives_bit_by_bit(dtype: str, shape: tuple[int, ...], device: int) -> None:
    ends = Ends(consumer_device=device)
    source = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place])
    if device == 0:
        assert isinstance(ref, CudaRef)
    else:
        assert isinstance(ref, HostRef) and ref.handle.is_inline == (source.nbytes <= 64)
    view = ends.consumer.view(ref)
    assert view.dtype == source.dtype and view.shape == source.shape and view.tobytes() == source.tobytes()
    assert view.uuid == ends.other.uuid
    del view
    ends.close()


def test_a_tensor_that_is_not_contiguous_is_compacted() -> None:
    ends = Ends()
    whole = on_device(ends.device, np.arange(10_000, dtype=np.int32).reshape(100, 100))
    ref = ends.producer.put(whole[::2, 1::3], [ends.consumer.place])
    assert ref.nbytes == 50 * 33 * 4
    assert (ends.consumer.view(ref) == whole[::2, 1::3]).all()
    ends.close()


def test_writes_of_the_sender_after_put_change_nothing() -> None:
    ends = Ends()
    source = on_device(ends.device, np.full(1000, 1, np.uint8))
    ref = ends.producer.put(source, [ends.consumer.place])
    source[:] = 2
    assert (ends.consumer.view(ref) == 1).all()
    ends.close()


def test_device_references_in_messages_are_validated() -> None:
    ends = Ends(nbytes=KIB)
    with penstock.Ring(Image) as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
        for number, size in enumerate((512, 5000)):  # in a slice; too large for the pool
            source = np.full(size, number, np.uint8)
            sender.send(Image(number, ends.producer.put(on_device(ends.device, source), [ends.consumer.place])))
            received = receiver.receive(timeout=5)
            assert (ends.consumer.view(received.pixels) == source).all()
            assert type(received.pixels) is (CudaRef, HostRef)[number]
    good = CudaRef(1, (4,), bytes(16), Ref(1, 1, 1, 0, 4))
    for wrong in ({"code": 99}, {"shape": (5,)}, {"shape": (-4,)}, {"device": b"short"}):
        forged = msgspec.msgpack.encode([1, *({**msgspec.structs.asdict(good), **wrong}).values()])
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(forged, type=Reference)
    ends.close()


def test_a_tensor_made_in_a_slice_is_shared_without_a_copy() -> None:
    ends = Ends()
    memory = ends.producer.empty((10, 100), "float32")
    memory[:] = np.arange(1000).reshape(10, 100)
    whole, part = (ends.producer.share(array, [ends.consumer.place]) for array in (memory, memory[3:5]))
    assert part.where.offset == whole.where.offset + 3 * 400
    assert (ends.consumer.view(part) == memory[3:5]).all()
    assert np.shares_memory(ends.consumer.view(whole), memory)
    assert ends.producer.stats.shares == 2 and ends.producer.stats.puts == 0
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        ends.producer.share(memory[:, 1], [ends.consumer.place])
    with pytest.raises(ValueError, match="outside this pool"):
        ends.producer.share(on_device(ends.device, np.zeros(5)), [ends.consumer.place])
    with pytest.raises(ValueError, match=r"CudaTensors\.put sends to others by host memory"):
        ends.producer.share(memory, [Place(b"x" * 16, None, 1)])
    with pytest.raises(UnsupportedTensor):
        ends.producer.put(np.zeros(5), [ends.consumer.place])
    del memory
    ends.close()


@pytest.mark.parametrize("which", range(4))
def test_used_on_records_the_stream_for_the_right_slice(which: int) -> None:
    """Slices lie next to each other: where one ends, the next one begins."""
    ends = Ends()
    buffers = [ends.producer.empty((512,), "uint8") for _ in range(4)]
    second = Stream("second")
    second.stop()
    ends.producer.used_on(buffers[which], second)
    for index in range(4):
        del buffers[0]
        ends.producer.flush()
        left = 3 - index + (index >= which)
        assert ends.pool.stats().blocks == left, f"slice {index} of 4, and {which} was in use"
    second.go_on()
    ends.close()


def test_dropped_and_revoked_references_hold_nothing() -> None:
    for nbytes in (64 * KIB, 512):  # in slices; by host memory
        ends = Ends(nbytes=nbytes)
        dropped, revoked = (
            ends.producer.put(on_device(ends.device, np.zeros(2000, np.uint8)), [ends.consumer.place]) for _ in "ab"
        )
        ends.consumer.drop(dropped)
        ends.consumer.drop(dropped)
        ends.producer.revoke(revoked, [ends.consumer.place])
        with pytest.raises(StaleRef):
            ends.consumer.view(revoked)
        ends.close()


@pytest.mark.parametrize("nbytes", [100, 2000])
def test_a_tensor_for_no_receiver_is_refused_and_holds_nothing(nbytes: int) -> None:
    ends = Ends(nbytes=KIB)
    with pytest.raises(ValueError, match="expected at least one place"):
        ends.producer.put(on_device(ends.device, np.zeros(nbytes, np.uint8)), [])
    ends.close()


# ── by host memory ──
def test_a_pool_that_is_full_falls_back_to_host_memory_and_counts() -> None:
    ends = Ends(nbytes=2 * KIB)
    held = ends.producer.empty(2 * KIB, "uint8")
    source = np.arange(1500, dtype=np.uint8)
    ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place])
    assert isinstance(ref, HostRef) and not ref.handle.is_inline and ref.nbytes == ref.handle.nbytes > 1500
    view = ends.consumer.view(ref)
    assert (view == source).all() and view.uuid == ends.device.uuid
    assert (ends.producer.stats.overflowed, ends.producer.stats.foreign) == (1, 0)
    with pytest.raises(MemoryExhausted):
        ends.producer.empty(1, "uint8")
    del held
    ends.close()


def test_each_receiver_of_a_tensor_by_host_memory_has_it_once() -> None:
    ends = Ends(consumer_device=3)
    with Store.attach(ends.host.ticket) as third_host:
        third = CudaTensors(None, third_host, driver=FakeDriver(4))
        source = np.arange(5000, dtype=np.uint8)
        ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place, third.place])
        assert isinstance(ref, HostRef) and ends.blocks() == (0, 1)
        assert (ends.consumer.view(ref) == source).all()
        assert ends.blocks() == (0, 1), "the other receiver has not opened it"
        assert (third.view(ref) == source).all()
        gc.collect()
        assert third.flush() and ends.blocks() == (0, 0)
        for tensors in (ends.consumer, third):
            with pytest.raises(StaleRef):
                tensors.view(ref)
        assert third.close()
    ends.close()


def test_tensor_in_host_memory_evicts_values_without_a_holder() -> None:
    ends = Ends(consumer_device=3)
    ends.host.put(np.zeros(900_000, np.uint8), key=bytes(32)).release()
    source = np.arange(100_000, dtype=np.uint32)
    ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place])
    assert isinstance(ref, HostRef) and not ref.handle.is_inline
    assert ends.host.stats().items == () and ends.host.stats().evictions == 1
    assert (ends.consumer.view(ref) == source).all()
    ends.close()


def test_without_room_anywhere_a_tensor_travels_in_its_reference() -> None:
    ends = Ends(nbytes=512)
    taken = ends.host.pool.take((1 << 20) - 4096)
    source = np.arange(50_000, dtype=np.uint16)
    ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place])
    assert isinstance(ref, HostRef) and ref.handle.is_inline
    assert ends.producer.stats.overflowed == 1
    assert (ends.consumer.view(ref) == source).all()
    assert ends.consumer.uploads.stats.pageable == 1, "bytes of a message are in no segment"
    ends.consumer.drop(ref)
    ends.producer.revoke(ref, [ends.consumer.place])
    assert (ends.consumer.view(ref) == source).all(), "there is nothing to be given back"
    taken.release()
    ends.close()


@pytest.mark.parametrize("without", ["producer", "consumer"])
def test_without_a_store_on_either_side_a_tensor_travels_in_its_reference(without: str) -> None:
    here, there = FakeDriver(), FakeDriver(3)
    with Store(MB) as store:
        producer = CudaTensors(None, None if without == "producer" else store, driver=here)
        consumer = CudaTensors(None, None if without == "consumer" else store, driver=there)
        assert (consumer.place.store is None) == (without == "consumer") and consumer.place.slices is None
        source = np.arange(50_000, dtype=np.uint16)
        ref = producer.put(on_device(here, source), [consumer.place])
        assert isinstance(ref, HostRef) and ref.handle.is_inline and blocks(store) == 0
        assert (consumer.view(ref) == source).all()
        with pytest.raises(MemoryExhausted, match="have no pool"):
            producer.empty(10, "uint8")
        assert producer.close() and consumer.close()


def test_a_reference_into_a_store_is_refused_without_one() -> None:
    ends = Ends(consumer_device=3)
    ref = ends.producer.put(on_device(ends.device, np.zeros(5000, np.uint8)), [ends.consumer.place])
    storeless = CudaTensors(None, None, driver=ends.other)
    with pytest.raises(ValueError, match=r"expected a store, .*: Handle\.open\(store\)"):
        storeless.view(ref)
    with Store(MB) as another:
        elsewhere = CudaTensors(None, another, driver=ends.other)
        with pytest.raises(StaleRef, match="no longer has the value"):
            elsewhere.view(ref)
        elsewhere.drop(ref)
    ends.consumer.drop(ref)
    ends.close()


def test_a_copy_for_a_receiver_that_is_gone_is_an_error_and_holds_nothing() -> None:
    ends = Ends(consumer_device=3)
    with Store.attach(ends.host.ticket) as gone_host:
        gone = CudaTensors(None, gone_host, driver=FakeDriver(4)).place
    eventually(lambda: gone.store not in [peer.index for peer in ends.host.peers() if peer.state == "live"])
    with pytest.raises(PeerDied):
        ends.producer.put(on_device(ends.device, np.zeros(5000, np.uint8)), [ends.consumer.place, gone])
    ends.close()


def test_a_reference_to_a_value_that_is_no_tensor_is_refused() -> None:
    ends = Ends(consumer_device=3)
    with Scope(ends.host, inline_nbytes=1000) as scope:
        for value in ({"pixels": np.zeros(1000)}, [1, 2], "text", None):
            with pytest.raises(UnsupportedTensor):
                ends.consumer.view(HostRef(scope.put(value)))
    with ends.host.pool.take(4096) as lease:
        memoryview(lease)[:] = b"\xff" * 4096
        ref = ends.host.pool.share(lease)
        with pytest.raises(DecodeError):
            ends.consumer.view(HostRef(Handle(None, ref)))
    ends.close()


def test_receiver_on_another_device_gets_host_memory_and_no_slice() -> None:
    ends = Ends(consumer_device=3)
    source = np.arange(5000, dtype=np.float32)
    near = ends.producer.put(on_device(ends.device, source), [ends.producer.place])
    assert isinstance(near, CudaRef)
    with pytest.raises(ForeignDevice):
        ends.consumer.view(near)
    ends.producer.drop(near)
    assert ends.consumer.place.slices is None
    ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place])
    assert isinstance(ref, HostRef) and ends.producer.stats.foreign == 1
    assert ends.pool.stats().takes == 1, "a slice was taken for a receiver that cannot have it"
    view = ends.consumer.view(ref)
    assert (view == source).all() and view.uuid == ends.other.uuid
    assert ends.other.opens == 0 and not ends.other.mapped
    with pytest.raises(ForeignDevice):  # nor is a tensor of theirs put by us
        ends.producer.put(on_device(ends.other, source), [ends.producer.place])
    del view
    ends.close()


def test_receiver_on_a_device_within_reach_copies_the_slice() -> None:
    ends = Ends(consumer_device=3, peers=(0,))
    source = np.arange(5000, dtype=np.float32)
    ref = ends.producer.put(on_device(ends.device, source), [ends.consumer.place, ends.producer.place])
    assert isinstance(ref, CudaRef) and (ends.producer.stats.peered, ends.producer.stats.foreign) == (1, 0)
    ends.other.current.stop()
    view = ends.consumer.view(ref)
    near = ends.producer.view(ref)
    del near
    assert ends.blocks() == (1, 0), "the copy has not begun"
    ends.other.current.go_on()
    ends.other.in_flight.poll()
    assert ends.blocks() == (0, 0), "a copy holds no slice"
    assert view.uuid == ends.other.uuid and (view == source).all()
    assert (ends.consumer.stats.fetched, ends.producer.stats.fetched) == (1, 0)
    made_there = ends.producer.empty(100, "uint8")
    made_there[:] = 7
    assert (ends.consumer.view(ends.producer.share(made_there, [ends.consumer.place])) == 7).all()
    del made_there
    ends.close()


def test_reference_of_another_device_than_the_pools_is_refused() -> None:
    ends = Ends()
    ref = ends.producer.put(on_device(ends.device, np.zeros(5)), [ends.consumer.place])
    assert isinstance(ref, CudaRef)
    with pytest.raises(ForeignDevice, match="and the pool on"):
        ends.consumer.view(msgspec.structs.replace(ref, device=b"x" * 16))
    ends.consumer.drop(ref)
    ends.close()


def test_a_copy_to_host_memory_is_awaited_before_it_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(nbytes=512)
    ends.device.current.stop()
    monkeypatch.setattr("penstock.tensor.cuda.tensors.SHARE_TIMEOUT", 0.01)
    with pytest.raises(penstock.Timeout):
        ends.producer.put(on_device(ends.device, np.zeros(2000)), [ends.consumer.place])
    assert ends.blocks() == (0, 1), "the device may still write there"
    ends.device.current.go_on()
    ends.close()


# ── uploads ──
def lent(pool: Pool, value: int, nbytes: int = 4096) -> Any:
    """Returns a received view, the only holder of its block."""
    with pool.take(nbytes) as lease:
        with memoryview(lease) as room:
            room[:] = bytes([value]) * nbytes
        ref = pool.share(lease, [pool.peer])
    return np.frombuffer(pool.open(ref), np.uint8)


def test_view_dropped_during_a_copy_is_held_until_the_copy_is_done() -> None:
    device = FakeDriver()
    with Pool.create(4096) as pool, Uploads(pool, driver=device) as uploads:
        view = lent(pool, 1)
        device.current.stop()
        copy = uploads.copy_to_device(view)
        del view
        gc.collect()
        with pytest.raises(MemoryExhausted):  # the only block there is
            pool.take(1)
        assert not uploads.flush() and not uploads.close(timeout=0)
        with pytest.raises(ClosedError):
            uploads.copy_to_device(np.zeros(4))
        device.current.go_on()
        assert uploads.flush()
        assert (lent(pool, 2) == 2).all() and (copy == 1).all()


def test_unclosed_uploads_hold_views_and_unregister_after_the_copies() -> None:
    device = FakeDriver()
    with Pool.create(4096) as pool:
        uploads = Uploads(pool, driver=device)
        device.current.stop()
        copy = uploads.copy_to_device(lent(pool, 1))
        del uploads
        gc.collect()
        with pytest.raises(MemoryExhausted):  # the only block there is
            pool.take(1)
        assert device.registered and len(device.in_flight) == 1
        device.current.go_on()
        assert device.in_flight.poll() == 0
        assert not device.registered and (copy == 1).all()
        pool.take(1).release()
        idle = Uploads(pool, driver=device)
        idle.copy_to_device(lent(pool, 2))
        del idle
        gc.collect()
        assert not device.registered and not len(device.in_flight)


def test_memory_is_registered_once_from_first_copy_to_close() -> None:
    device = FakeDriver()
    with Pool.create(1 << 16, name="a") as pool, Store(1 << 16) as store:
        uploads = Uploads(pool, store, driver=device)
        assert not device.registered
        for value in range(3):
            assert (uploads.copy_to_device(lent(pool, value)) == value).all()
        assert len(device.registered) == 1
        key = b"k" * 32
        stored = store.put({"pixels": np.full(500, 9, np.int16)}, key=key)
        assert (uploads.copy_to_device(stored.value()["pixels"]) == 9).all()
        assert len(device.registered) == 2
        assert all(map(device.is_registered, device.uploaded_from))
        assert (uploads.stats.copies, uploads.stats.pageable, uploads.stats.refusals) == (4, 0, 0)
        assert uploads.stats.registered_nbytes == sum(device.registered.values()) >= 2 << 16
        stored.release()
        assert uploads.close() and uploads.close()
        assert not device.registered and uploads.stats.registered_nbytes == 0


def test_memory_can_be_registered_before_the_first_copy() -> None:
    device = FakeDriver()
    with Pool.create(1 << 16) as pool, Store(1 << 16) as store, Uploads(pool, store, driver=device) as uploads:
        uploads.register()
        assert len(device.registered) == 2 and not uploads.refusals()
        assert uploads.is_registered(lent(pool, 1)) and not uploads.is_registered(np.zeros(9))
        assert len(device.registered) == 2


def test_a_block_that_this_process_writes_is_copied_from_where_it_lies() -> None:
    device = FakeDriver()
    with Pool.create(1 << 16) as pool, Uploads(pool, driver=device) as uploads:
        lease: BlockLease = pool.take(100)
        array = np.frombuffer(lease, np.uint8)
        array[:] = 4
        assert (uploads.copy_to_device(array[10:20]) == 4).all()
        assert device.uploaded_from == [array.ctypes.data + 10] and uploads.stats.pageable == 0


def test_unregistrable_memory_is_copied_counted_and_tried_once() -> None:
    device = FakeDriver()
    device.refuses_to_register = True
    with Pool.create(1 << 16) as pool, Uploads(pool, driver=device) as uploads:
        view = lent(pool, 3)
        for _ in range(3):
            assert (uploads.copy_to_device(view, non_blocking=False) == 3).all()
        assert (uploads.stats.copies, uploads.stats.pageable, uploads.stats.refusals) == (3, 3, 1)
        assert uploads.refusals() == ["no context, or no room for so many pinned pages"]
        assert not uploads.is_registered(view)
        assert device.uploaded_from == [view.ctypes.data] * 3
        del view


def test_upload_of_private_memory_is_counted_as_pageable() -> None:
    device = FakeDriver()
    with Pool.create(1 << 16) as pool, Uploads(pool, driver=device) as uploads:
        assert (uploads.copy_to_device(np.arange(10)) == np.arange(10)).all()
        assert uploads.stats.pageable == 1 and not device.registered
        with pytest.raises(UnsupportedTensor, match="expected a contiguous view"):
            uploads.copy_to_device(np.zeros((4, 4))[:, 1])
    with penstock.Ring() as ring, pytest.raises(ValueError, match="got channel"):
        Uploads(ring, driver=device)


def test_upload_runs_on_the_requested_stream() -> None:
    device, stream = FakeDriver(), Stream("copies")
    stream.stop()
    with Pool.create(1 << 16) as pool, Uploads(pool, driver=device) as uploads:
        copy = uploads.copy_to_device(lent(pool, 6), stream=stream)
        assert not uploads.flush()
        stream.go_on()
        eventually(uploads.flush)
        assert (copy == 6).all()
