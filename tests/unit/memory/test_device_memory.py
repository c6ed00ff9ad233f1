"""Device memory: lent as blocks, reused in stream order, opened once, and returned after any death."""

import contextlib
import gc
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import LayoutMismatch, MemoryExhausted
from penstock.errors import ClosedError, Timeout
from penstock.installing import how_to_install
from penstock.lowlevel import Pool, Ref
from penstock.tensor.cuda import CudaPool, DeviceError, ForeignDevice, NoDevice, driver_of
from penstock.tensor.cuda.pool import Slice
from penstock.tensor.kinds import kind_of
from penstock.tools.inspect.segments import snapshot_of, title_of
from tests.conftest import eventually
from tests.support.devices import FakeDriver, Stream
from tests.support.processes import program, thread

BYTES = kind_of("uint8")
KIB = 1 << 10

# What the other programs begin with: the same pool, on a device of their own process.
CONSUMER = """
import numpy as np
from penstock.tensor.cuda import CudaPool
from penstock.tensor.kinds import kind_of
from tests.support.devices import FakeDriver

def attached(ticket, number=0):
    return CudaPool.attach(ticket, driver=FakeDriver(number), peer_name="consumer")

def opened(pool, words):
    part = pool.open(lowlevel.Ref(*map(int, words.split())))
    return pool.driver.array(part.address, kind_of("uint8"), (part.nbytes,), part)
"""


def new_pool(nbytes: int = 64 * KIB, **options: Any) -> tuple[CudaPool, FakeDriver]:
    driver = FakeDriver()
    return CudaPool.create(nbytes, driver=driver, **options), driver


def filled(pool: CudaPool, nbytes: int, value: int) -> Slice:
    part = pool.take(nbytes)
    array_of(pool, part)[:] = value
    return part


def array_of(pool: CudaPool, part: Slice) -> Any:
    return pool.driver.array(part.address, BYTES, (part.nbytes,), part)


def partner(source: str, *arguments: object) -> Any:
    """Another process, with a fake device of its own."""
    return program(CONSUMER + textwrap.dedent(source), *arguments)


@contextlib.contextmanager
def joined(pool: CudaPool, source: str, number: int = 0) -> Iterator[tuple[Any, int]]:
    """A consumer with a peer of the pool, on a device of this number, and the index of its peer."""
    begin = f"pool = attached(sys.argv[1], {number}); pool.books.join(); say(pool.peer.index)\n"
    with partner(begin + textwrap.dedent(source), pool.ticket) as consumer:
        yield consumer, int(consumer.hear())


def words(ref: Ref) -> str:
    return " ".join(map(str, msgspec.structs.astuple(ref)))


def closed(pool: CudaPool) -> None:
    gc.collect()
    eventually(pool.close)
    assert not pool.driver.allocated and not pool.driver.mapped  # type: ignore[attr-defined]


# ── the books ──
def test_device_pool_takes_no_host_memory_and_reports_device_sizes() -> None:
    pool = CudaPool.create(80 << 30, driver=FakeDriver(memory_nbytes=1 << 40), name="gpu")
    assert pool.nbytes == pool.stats().nbytes == 80 << 30
    assert pool.segment_nbytes < 8 << 20
    part = pool.take(3 << 30)
    status = os.fstat(pool.fd)
    snapshot = snapshot_of(os.getpid(), pool.fd, (status.st_dev, status.st_ino))
    assert snapshot["name"] == "gpu" and snapshot["pool"][0]["taken_nbytes"] == 3 << 30
    with pytest.raises(MemoryExhausted, match=r"80\.0 GiB"):
        pool.take(78 << 30)
    part.release()
    closed(pool)


def test_attach_and_inspect_recognize_a_device_pool() -> None:
    pool, _ = new_pool(name="gpu")
    attached = penstock.attach(pool.ticket)
    assert isinstance(attached, CudaPool) and attached.about == pool.about
    attached.close()
    with pytest.raises(LayoutMismatch, match="expected a pool of host memory, got 'gpu'"):
        Pool.attach(pool.ticket)
    status = os.fstat(pool.fd)
    assert title_of(snapshot_of(os.getpid(), pool.fd, (status.st_dev, status.st_ino))) == "pool of device memory 'gpu'"
    with Pool.create(64 * KIB, name="host") as host:
        status = os.fstat(host.fd)
        assert title_of(snapshot_of(os.getpid(), host.fd, (status.st_dev, status.st_ino))) == "pool 'host'"
    closed(pool)


def test_device_pool_exports_no_bytes_and_differs_from_other_pools() -> None:
    pool, _ = new_pool()
    lease = pool.books.take(512)
    with pytest.raises(BufferError, match="do not lie in host memory"):
        memoryview(lease)
    lease.release()
    with Pool.create(64 * KIB) as other, pytest.raises(LayoutMismatch, match="expected a pool of device memory"):
        CudaPool.attach(other.ticket)
    closed(pool)


def test_device_slices_are_aligned_for_vector_loads_and_disjoint() -> None:
    pool, _ = new_pool()
    parts = [filled(pool, nbytes, number) for number, nbytes in enumerate((1, 511, 512, 513, 3000))]
    assert all(part.ref.offset % 512 == 0 for part in parts)
    for number, part in enumerate(parts):
        assert (array_of(pool, part) == number).all()
    del part
    parts.clear()
    closed(pool)


def test_slice_is_released_when_the_driver_has_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, driver = new_pool()
    wrong: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", wrong.append)

    def refuse() -> Stream:
        raise DeviceError("no stream")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "stream", refuse)
        with pytest.raises(DeviceError, match="no stream"):
            pool.take(KIB)
        gc.collect()
    assert pool.flush() and pool.stats().blocks == 0 and not wrong
    closed(pool)


# ── stream order ──
def test_slice_is_reused_only_after_its_stream_work_is_done() -> None:
    pool, driver = new_pool(KIB)
    part = filled(pool, KIB, 1)
    copied = driver.copy_of(np.zeros(KIB, np.uint8))
    driver.current.stop()
    driver.copy(copied, array_of(pool, part))
    part.release()
    with pytest.raises(MemoryExhausted):
        pool.take(KIB)
    assert not pool.flush() and pool.stats().blocks == 1
    driver.current.go_on()
    array_of(pool, pool.take(KIB))[:] = 2
    assert (copied == 1).all(), "somebody else had the slice before it was read"
    closed(pool)


def test_slice_is_released_after_all_streams_that_used_the_slice() -> None:
    pool, driver = new_pool()
    first, second, third = driver.current, Stream("second"), Stream("third")
    part = pool.take(KIB)  # opened on the first
    part.used_on(second)
    for stream in (first, second, third):
        stream.stop()
    with driver.on(third):
        part.release()
    for stream in (third, first, second):
        assert not pool.flush() and pool.stats().blocks == 1, f"given back before {stream.name} was done"
        stream.go_on()
    assert pool.flush() and pool.stats().blocks == 0
    closed(pool)


def test_take_waits_for_slices_in_flight_of_its_own_process() -> None:
    pool, driver = new_pool(KIB)
    part = pool.take(KIB)
    stream = driver.current
    stream.stop()
    part.release()
    with thread(lambda: pool.take(KIB, timeout=60)) as taking:
        eventually(lambda: any(peer["waiting_for_memory_ns"] for peer in pool.books.place.peers()))
        stream.go_on()
        assert isinstance(taking.ended(within=10).value, Slice)
        taking.value.release()
    closed(pool)


def test_sharing_waits_for_the_writing_work_until_its_timeout() -> None:
    pool, driver = new_pool()
    part = pool.take(KIB)
    driver.current.stop()
    with pytest.raises(Timeout, match=r"within 0\.01 s"):
        pool.share(part, [pool.peer], timeout=0.01)
    with thread(lambda: pool.share(part, [pool.peer])) as sharing:
        assert sharing.value is None
        driver.current.go_on()
        assert isinstance(sharing.ended().value, Ref)
        pool.drop(sharing.value)
    part.release()
    with pytest.raises(ClosedError):
        pool.share(part, [pool.peer])
    closed(pool)


def test_slice_without_a_stream_marker_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, driver = new_pool()
    part = pool.take(KIB)

    def broken(stream: Stream) -> None:
        raise DeviceError("the context is lost")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "record", broken)
        with pytest.raises(DeviceError):
            part.release()
    assert not pool.flush() and pool.stats().blocks == 1 and not pool.close()
    driver.in_flight._entries.clear()  # which the end of the process would do
    closed(pool)


def test_slice_stays_taken_when_a_query_of_its_marker_fails() -> None:
    pool, driver = new_pool()
    driver.current.stop()
    part = pool.take(KIB)
    part.release()
    ((markers, _),) = driver.in_flight._entries
    errors = [DeviceError("lost")]

    def query() -> bool:
        if errors:
            raise errors.pop()
        return True

    markers[0].query = query  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        pool.flush()
    assert pool.stats().blocks == 1
    assert pool.flush() and pool.stats().blocks == 0
    closed(pool)


def test_random_stream_schedules_read_only_their_own_bytes(seed: int) -> None:
    """Slices are written, read on streams that stop and go on, and let go of at once: in any order."""
    chance = random.Random(seed)
    pool, driver = new_pool(16 * KIB)
    streams = [driver.current, Stream("b"), Stream("c")]
    expected: list[tuple[Any, int]] = []
    for number in range(3000):
        stream = chance.choice(streams)
        if chance.random() < 0.2:
            stream.stop() if not stream.is_stopped else stream.go_on()
        value = number % 251
        try:
            part = pool.take(chance.choice((100, 512, 2000, 5000)))
        except MemoryExhausted:
            chance.choice(streams).go_on()
            continue
        array = array_of(pool, part)
        array[:] = value  # by the host, at once: if a reader still had it, it would see this
        into = driver.copy_of(np.zeros(part.nbytes, np.uint8))
        with driver.on(stream):
            driver.copy(into, array)
            if chance.random() < 0.5:
                part.release()
        if not part._streams.count(stream):
            part.used_on(stream)
        expected.append((into, value))
        del array, part
    for stream in streams:
        stream.go_on()
    for into, value in expected:
        assert (into == value).all()
    assert pool.flush() and pool.stats().blocks == 0
    closed(pool)


# ── references ──
def test_stale_or_forged_reference_is_refused_before_mapping() -> None:
    pool, _ = new_pool()
    with joined(
        pool,
        """
        while True:
            try:
                opened(pool, hear())
            except lowlevel.StaleRef as error:
                say("stale", pool.driver.opens)
            else:
                say("opened", pool.driver.opens)
        """,
    ) as (consumer, peer):
        part = pool.take(KIB)
        ref = pool.share(part, [peer])
        change = msgspec.structs.replace
        for forged in (
            change(ref, segment=ref.segment ^ 1),
            change(ref, block=7),
            change(ref, block=1 << 20),
            change(ref, generation=ref.generation + 1),
            change(ref, offset=ref.offset + 512),
            change(ref, nbytes=1 << 40),
        ):
            consumer.say(words(forged))
            assert consumer.hear() == "stale 0", forged
        consumer.say(words(ref))
        assert consumer.hear() == "opened 1"
        part.release()
        eventually(lambda: pool.stats().blocks == 0)
        consumer.say(words(ref))
        assert consumer.hear() == "stale 1"
    closed(pool)


def test_open_from_another_device_raises_and_maps_nothing() -> None:
    pool, _ = new_pool()
    with joined(
        pool,
        """
        try:
            opened(pool, hear())
        except penstock.tensor.cuda.ForeignDevice as error:
            say(error, pool.driver.opens)
        """,
        number=5,
    ) as (consumer, peer):
        ref = pool.share(filled(pool, KIB, 1), [peer])
        consumer.say(words(ref))
        assert consumer.hear().endswith("CudaTensors.place 0")
    closed(pool)


# ── other processes ──
def test_consumer_maps_device_memory_once_for_all_slices() -> None:
    pool, driver = new_pool()
    with joined(
        pool,
        """
        for _ in range(5):
            array = opened(pool, hear())
            say(array[0], array[-1], len(array), pool.driver.opens)
            del array
            pool.flush()
        pool.close()
        say(len(pool.driver.mapped))
        """,
    ) as (consumer, peer):
        for value in range(5):
            ref = pool.share(filled(pool, (value + 1) * KIB, value), [peer])
            consumer.say(words(ref))
            assert consumer.hear() == f"{value} {value} {(value + 1) * KIB} 1"
            eventually(lambda: pool.flush() and pool.stats().blocks == 0)
        assert consumer.hear() == "0"
        assert consumer.end() == 0
    assert driver.opens == 0
    closed(pool)


def test_producer_process_attaches_and_opens_no_handle() -> None:
    pool, driver = new_pool()
    second = CudaPool.attach(pool.ticket, driver=driver)
    assert second.is_producer
    second.books.join()
    ref = pool.share(filled(pool, KIB, 7), [second.peer])
    array = array_of(second, second.open(ref))
    assert (array == 7).all() and driver.opens == 0
    del array
    second.close()
    closed(pool)


def test_close_of_the_producer_waits_for_consumers_to_unmap() -> None:
    pool, driver = new_pool()
    with joined(
        pool,
        """
        array = opened(pool, hear())
        say("opened")
        hear()
        pool.close()
        say(array[0], len(pool.driver.mapped))
        array = None
        pool.driver.in_flight.flush()
        say(len(pool.driver.mapped))
        hear()
        """,
    ) as (consumer, peer):
        part = filled(pool, KIB, 9)
        consumer.say(words(pool.share(part, [peer])))
        assert consumer.hear() == "opened"
        part.release()
        assert not pool.close() and driver.allocated
        consumer.say("close")
        assert consumer.hear() == "9 1"
        assert consumer.hear() == "0"
        eventually(pool.close)
        assert not driver.allocated and not driver.mapped
        assert consumer.process.poll() is None
    with pytest.raises(ClosedError):
        pool.open(Ref(1, 1, 1, 0, 1))


def test_mapped_device_memory_is_not_freed_when_all_slices_are_back() -> None:
    pool, driver = new_pool()
    with joined(
        pool,
        """
        opened(pool, hear())
        say(pool.flush(), len(pool.driver.mapped))
        hear()
        """,
    ) as (consumer, peer):
        consumer.say(words(pool.share(filled(pool, KIB, 1), [peer])))
        assert consumer.hear() == "True 1"
        eventually(lambda: pool.stats().blocks == 0)
        assert not pool.close() and driver.allocated
        consumer.kill()
        eventually(pool.close)
    assert not driver.allocated


def test_open_refuses_device_memory_smaller_than_announced() -> None:
    pool, _ = new_pool(4 * KIB)
    with partner(
        """
        try:
            FakeDriver().open(bytes.fromhex(sys.argv[1]), 1 << 20)
        except penstock.tensor.cuda.DeviceError as error:
            say(error)
        """,
        pool.about.handle.hex(),
    ) as other:
        assert other.hear() == "not the memory that was exported"
    closed(pool)


def test_take_by_a_consumer_is_refused() -> None:
    pool, _ = new_pool()
    with partner(
        """
        try:
            attached(sys.argv[1]).take(1)
        except penstock.tensor.cuda.ForeignDevice as error:
            say(error)
        """,
        pool.ticket,
    ) as consumer:
        assert "takes slices of it" in consumer.hear()
    closed(pool)


def test_device_pool_that_does_not_fit_allocates_nothing() -> None:
    driver = FakeDriver(memory_nbytes=KIB)
    with pytest.raises(MemoryExhausted):
        CudaPool.create(1 << 20, driver=driver)
    assert not driver.allocated


# ── without a device ──
def test_device_calls_name_the_missing_part_without_importing_torch() -> None:
    source = """
import sys
import penstock, penstock.tensor, penstock.tensor.cuda as cuda
assert "torch" not in sys.modules and "cuda.bindings" not in sys.modules
sys.modules["torch"] = None  # as if it were not installed
try:
    cuda.CudaPool.create(1 << 20)
except cuda.NoDevice as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"no tensors of a device: torch is not installed ({how_to_install('cuda')})"


def test_torch_without_cuda_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[torch]'")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NoDevice, match="is built without CUDA"):
        driver_of()
    assert issubclass(NoDevice, penstock.PenstockError) and issubclass(ForeignDevice, penstock.PenstockError)
