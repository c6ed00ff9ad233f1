"""Tensors of a device by torch and cuda-bindings: on a device if there is one, else on a driver without a device."""

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import textwrap
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import MemoryExhausted, Store
from penstock.lowlevel import Pool
from penstock.tensor.cuda import (
    CudaPool,
    CudaRef,
    CudaTensors,
    DeviceError,
    HostRef,
    Place,
    Reference,
    Uploads,
    driver_of,
    torch_driver,
    virtual_memory,
)
from penstock.tensor.cuda.driver import StoppedProducer
from penstock.tensor.cuda.torch_driver import LegacyHandle, TorchDriver
from penstock.tensor.cuda.virtual_memory import DescriptorHandle, VirtualMemory, receive_descriptor
from penstock.tensor.kinds import KINDS
from tests.conftest import eventually

# First: where torch or cuda-bindings is missing, this skips the rest.
from tests.support.libcuda import ILLEGAL_ADDRESS, DriverDouble, has_device, open_device
from tests.support.processes import Program, program

# isort: split
import torch

IS_REAL = has_device()
on_two_devices = pytest.mark.skipif(IS_REAL and torch.cuda.device_count() < 2, reason="needs two devices")

MIB = 1 << 20
CYCLES = 200_000_000  # of torch.cuda._sleep: about 0.1 s of a stream's time

# A consumer, which hears a reference and says what it sees. "apart": devices cannot reach each other.
CONSUMER = """
import msgspec, torch
from penstock import Store
from penstock.tensor.cuda import CudaPool, CudaTensors, Reference
from tests.support.libcuda import DriverDouble, use_device

use_device(int(sys.argv[3]))
if "apart" in sys.argv:
    DriverDouble.current.driver.part(0, 1)
pool, host = CudaPool.attach(sys.argv[1], peer_name="consumer"), Store.attach(sys.argv[2])
tensors = CudaTensors(pool, host)
say(msgspec.json.encode(tensors.place).hex())

def received():
    return tensors.view(msgspec.msgpack.decode(bytes.fromhex(hear()), type=Reference))
"""


@pytest.fixture(scope="module")
def double() -> Iterator[DriverDouble | None]:
    """None: there is a device. Lasting descriptors and mappings of a process are opened before the first test."""
    with contextlib.nullcontext() if IS_REAL else open_device() as double:
        with CudaPool.create(MIB) as pool:
            pool.take(1).release()
            torch.zeros(10, device="cuda").sum().item()
            pool.flush(5)
        yield double


@pytest.fixture(autouse=True)
def nothing_is_held(double: DriverDouble | None) -> Iterator[None]:
    yield
    if double is not None:
        assert (double.driver.faults(), double.driver.held()) == ([], {})


@contextlib.contextmanager
def new_pool(nbytes: int, **options: Any) -> Iterator[CudaPool]:
    """A pool that is freed at the end: a consumer that was killed a moment ago may still be a peer."""
    pool = CudaPool.create(nbytes, **options)
    yield pool
    eventually(pool.close)


@contextlib.contextmanager
def consumer(
    source: str, *words: str, nbytes: int = 8 * MIB, device: int = 0, **options: Any
) -> Iterator[tuple[Program, CudaPool, CudaTensors, Place]]:
    """Yields a consumer process, the pool and the tensors of the producer, and the consumer's place."""
    with new_pool(nbytes, **options) as pool, Store(8 * MIB) as host:
        tensors = CudaTensors(pool, host)
        arguments = (pool.ticket, host.ticket, device, *words)
        with program(CONSUMER + textwrap.dedent(source), *arguments, within=90) as other:
            # uuids are bytes, which JSON has in base64
            yield other, pool, tensors, msgspec.json.decode(bytes.fromhex(other.hear()), type=Place)
        eventually(lambda: tensors.flush() and pool.stats().blocks == 0)
        tensors.close()


@pytest.fixture(params=["descriptor", "legacy"])
def handles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of handle by which consumers open the memory of a producer."""
    if request.param == "legacy":
        monkeypatch.setattr(VirtualMemory, "is_supported", lambda *_: False)
        torch_driver._driver.cache_clear()
    yield request.param
    torch_driver._driver.cache_clear()


def sent(ref: Reference) -> str:
    return msgspec.msgpack.encode(ref).hex()


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# ── how the real driver asks ──
class Asked:
    """Stands for the driver's interface, and remembers what it was calls."""

    class CUipcMemHandle:
        def __init__(self) -> None:
            self.room = (ctypes.c_char * 64)()

        def getPtr(self) -> int:
            return ctypes.addressof(self.room)

    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def __init__(self, **answers: tuple[Any, ...]) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            return self.answers.get(name, (0,))

        return ask


class Result(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


def asking(cuda: Asked) -> TorchDriver:
    driver = object.__new__(TorchDriver)
    driver._cuda, driver._context, driver._device = cuda, "context", SimpleNamespace(index=0)
    driver._virtual = None
    return driver


def legacy(nbytes: int) -> bytes:
    return msgspec.msgpack.encode(["legacy", bytes(nbytes)])


def test_driver_calls_run_in_the_context_of_the_device() -> None:
    cuda = Asked(cuMemAlloc=(0, 4096))
    assert asking(cuda).allocate(100) == 4096
    assert cuda.calls == ["cuCtxPushCurrent", "cuMemAlloc", "cuCtxPopCurrent"]
    cuda = Asked(cuMemAlloc=(Result(2), None), cuMemGetInfo=(0, 10, 80))
    with pytest.raises(MemoryExhausted, match="10 of its 80 bytes are free") as caught:
        asking(cuda).allocate(100)
    assert (caught.value.requested, caught.value.free) == (100, 10)
    assert cuda.calls == ["cuCtxPushCurrent", "cuMemAlloc", "cuMemGetInfo", "cuCtxPopCurrent"]


def test_ipc_handle_of_less_memory_than_announced_is_closed() -> None:
    cuda = Asked(cuIpcOpenMemHandle=(0, 4096), cuMemGetAddressRange=(0, 4096, 511))
    with pytest.raises(DeviceError, match="of 512 bytes, got 511"):
        asking(cuda).open(legacy(64), 512)
    assert cuda.calls[-2:] == ["cuIpcCloseMemHandle", "cuCtxPopCurrent"]
    whole = asking(Asked(cuIpcOpenMemHandle=(0, 4096), cuMemGetAddressRange=(0, 4096, 512)))
    assert whole.open(legacy(64), 512) == 4096


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (legacy(5), "expected a handle of 64 bytes, got 5"),
        (b"short", "expected the handle of device memory"),
        (msgspec.msgpack.encode(DescriptorHandle("penstock-0", 4096)), "maps no memory behind descriptors"),
    ],
)
def test_handle_that_cannot_be_opened_is_refused(handle: bytes, text: str) -> None:
    with pytest.raises(DeviceError, match=text):
        asking(Asked()).open(handle, 512)


def test_descriptors_are_used_where_the_device_has_both_attributes() -> None:
    names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    attributes = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": number for number, name in enumerate(names)})
    cuda = SimpleNamespace(CUdevice_attribute=attributes)
    for present in itertools.product((0, 1), repeat=2):
        answers = iter(present)
        assert VirtualMemory.is_supported(cuda, lambda *_, of=answers: (next(of),), 0) is all(present)


def test_device_error_names_the_call_and_the_result() -> None:
    with pytest.raises(DeviceError, match="cuMemHostRegister of device 0: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        asking(Asked(cuMemHostRegister=(Result(2),))).register(4096, 4096)
    assert str(caught.value) == "cuMemHostRegister of device 0: CUDA_ERROR_OUT_OF_MEMORY"


# ── one device ──
def test_every_dtype_arrives_bit_by_bit_and_its_memory_is_opened_once(handles: str) -> None:
    with consumer(
        """
        bases = set()
        while True:
            seen = received()
            bases.add(pool._map().address)
            flat = seen.contiguous().reshape(-1).view(torch.uint8).cpu()
            say(str(seen.dtype), tuple(seen.shape), bytes(flat.numpy()).hex(), len(bases))
            del seen
            tensors.flush()
        """,
        nbytes=64 * MIB,
    ) as (other, pool, tensors, place):
        kind = torch_driver.HANDLES.decode(pool.about.handle)
        assert isinstance(kind, LegacyHandle if handles == "legacy" else DescriptorHandle)
        for kind in KINDS:
            dtype = getattr(torch, kind.name, None)
            if dtype is None or kind.name == "bool" or (kind.name.startswith(("int", "uint")) and kind.code > 22):
                continue
            raw = torch.randint(0, 256, (6, 10 * kind.itemsize), dtype=torch.uint8, device="cuda")
            source = raw.view(dtype)
            ref = tensors.put(source, [place])
            assert isinstance(ref, CudaRef)
            other.say(sent(ref))
            assert other.hear() == f"{dtype} (6, 10) {bytes_of(raw).hex()} 1"


def test_a_slice_is_not_reused_while_kernels_of_another_process_read_it() -> None:
    with consumer(
        f"""
        def flush():  # the producer waits for what is done while we wait for the producer
            while True:
                time.sleep(0.001)
                tensors.flush()

        threading.Thread(target=flush, daemon=True).start()
        stream = torch.cuda.Stream()
        kept = []
        with torch.cuda.stream(stream):
            for _ in range(24):
                seen = received()
                torch.cuda._sleep({CYCLES // 10})
                kept.append(seen.clone())
                del seen  # long before the clone has been made
                say("gone")
        stream.synchronize()
        for one in kept:
            say(one.min().item(), one.max().item())
        hear()
        """
    ) as (other, pool, tensors, place):
        for value in range(24):  # three times what the pool has room for
            ref = tensors.put(torch.full((MIB,), value, dtype=torch.uint8, device="cuda"), [place], timeout=30)
            assert isinstance(ref, CudaRef)
            other.say(sent(ref))
            assert other.hear() == "gone"
        for value in range(24):
            assert other.hear() == f"{value} {value}"
        eventually(lambda: pool.stats().blocks == 0)


def test_shared_tensor_is_the_same_memory_within_a_process() -> None:
    with new_pool(8 * MIB) as pool, Store(MIB) as host:
        tensors = CudaTensors(pool, host)
        tensor = tensors.empty((100, 100), torch.bfloat16)
        tensor.copy_(torch.randn(100, 100))
        shared = tensors.view(tensors.share(tensor, [tensors.place]))
        assert shared.data_ptr() == tensor.data_ptr() and torch.equal(shared, tensor)
        part = shared[1:]
        del tensor, shared
        gc.collect()
        assert tensors.flush(5) and pool.stats().blocks == 1  # a view of a view holds it
        del part
        assert tensors.flush(5) and pool.stats().blocks == 0
        tensors.close()


PRODUCER = """
import msgspec, torch
from penstock import Store
from penstock.tensor.cuda import CudaPool, CudaTensors, Place
from tests.support.libcuda import use_device

use_device(0)
pool = CudaPool.create(1 << 25)
tensors = CudaTensors(pool, Store.attach(sys.argv[1]))
say(pool.ticket)
place = msgspec.json.decode(bytes.fromhex(hear()), type=Place)
for value in (1, 2, 3):
    ref = tensors.put(torch.full((1 << 20,), value, dtype=torch.uint8, device="cuda"), [place])
    say(msgspec.msgpack.encode(ref).hex())
hear()
"""


@contextlib.contextmanager
def producer_of_three() -> Iterator[tuple[Program, CudaPool, CudaTensors, list[Reference]]]:
    """Yields a producer process, its pool and the tensors of the consumer, and references of three tensors."""
    with Store(MIB) as host:
        with program(PRODUCER, host.ticket, within=90) as producer:
            pool = CudaPool.attach(producer.hear())
            tensors = CudaTensors(pool, host)
            producer.say(msgspec.json.encode(tensors.place).hex())
            refs = [msgspec.msgpack.decode(bytes.fromhex(producer.hear()), type=Reference) for _ in range(3)]
            yield producer, pool, tensors, refs
        tensors.close()
        pool.close()


def test_producer_death_with_mapped_memory_is_reported_and_harmless() -> None:
    with producer_of_three() as (producer, _, tensors, refs):
        shared = tensors.view(refs[0])
        producer.kill()
        producer.process.wait()
        with pytest.raises(penstock.PeerDied):
            tensors.view(refs[1])
        assert int(shared.sum().item()) == MIB  # the driver keeps memory that is mapped
        del shared
        assert tensors.flush(5)
        torch.zeros(1000, device="cuda").sum().item()  # our context is whole


def test_memory_of_a_dead_producer_is_closed_without_a_call(double: DriverDouble | None) -> None:
    """A view is let go with work in flight, and the process does not touch the pool again."""
    with producer_of_three() as (producer, pool, tensors, refs):
        shared = tensors.view(refs[0])
        assert pool._mapped is not None
        mapped = weakref.ref(pool._mapped)
        torch.cuda._sleep(CYCLES // 20)
        copy = shared.clone()
        del shared
        assert IS_REAL or mapped() is not None
        producer.kill()
        eventually(lambda: mapped() is None, within=20)
        assert int(copy.sum().item()) == MIB
        if double is not None:
            assert "opened handles" not in double.driver.held()


def test_descriptor_is_sent_by_a_living_producer_alone() -> None:
    pool = CudaPool.create(MIB)
    handle = torch_driver.HANDLES.decode(pool.about.handle)
    assert isinstance(handle, DescriptorHandle) and handle.nbytes >= MIB
    os.close(receive_descriptor(handle.socket))
    eventually(pool.close)
    with pytest.raises(DeviceError, match="expected a producer that lives"):
        receive_descriptor(handle.socket)


def test_stopped_producer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    def receive(name: str) -> int:
        waits.append(name)
        return receive_descriptor(name)

    monkeypatch.setattr(virtual_memory, "receive_descriptor", receive)
    monkeypatch.setattr(virtual_memory, "STOPPED_RETRY_S", 3.0)
    with producer_of_three() as (producer, _, tensors, refs):
        producer.kill(signal.SIGSTOP)
        eventually(producer.is_stopped)
        with pytest.raises(StoppedProducer, match="continue or kill the process"):
            tensors.view(refs[0])
        with pytest.raises(StoppedProducer):
            tensors.view(refs[1])
        assert len(waits) == 1
        producer.kill(signal.SIGCONT)
        time.sleep(virtual_memory.STOPPED_RETRY_S)
        assert int(tensors.view(refs[2])[0].item()) == 3 and len(waits) == 2


CALLS = ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle")

if not IS_REAL:  # a driver that fails when a test wants it

    @pytest.mark.parametrize("call", CALLS)
    def test_pool_that_cannot_be_created_holds_nothing(call: str, double: DriverDouble) -> None:
        before = os.listdir("/proc/self/fd")
        double.driver.fail(call, 1, ILLEGAL_ADDRESS)
        with pytest.raises(DeviceError, match=call):
            CudaPool.create(MIB)
        double.driver.fail_no_more()
        assert double.driver.held() == {} and len(os.listdir("/proc/self/fd")) == len(before)

    @pytest.mark.parametrize("call", CALLS)
    def test_driver_that_refuses_to_share_memory_gives_legacy_handles(call: str, double: DriverDouble) -> None:
        torch_driver._driver.cache_clear()
        double.driver.fail(call, 1, ILLEGAL_ADDRESS)
        try:
            with new_pool(MIB) as pool:
                assert isinstance(torch_driver.HANDLES.decode(pool.about.handle), LegacyHandle)
                assert pool.driver.legacy_reason.startswith(call)
        finally:
            double.driver.fail_no_more()
            torch_driver._driver.cache_clear()

    def test_memory_that_cannot_be_mapped_is_not_held_and_opens_later() -> None:
        calls = ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
        with consumer(
            f"""
            for call in {calls}:
                ref = msgspec.msgpack.decode(bytes.fromhex(hear()), type=Reference)
                DriverDouble.current.driver.fail(call, 1)
                try:
                    tensors.view(ref)
                except penstock.tensor.cuda.DeviceError as error:
                    DriverDouble.current.driver.fail_no_more()
                    say(call in str(error), DriverDouble.current.driver.held())
            say(received().sum().item())
            """
        ) as (other, _, tensors, place):
            for _ in calls:
                other.say(sent(tensors.put(torch.ones(1000, device="cuda"), [place])))
                assert other.hear() == "True {}"
            other.say(sent(tensors.put(torch.ones(1000, device="cuda"), [place])))
            assert other.hear() == "1000.0"


def test_consumer_killed_with_work_in_flight_returns_its_slices() -> None:
    with consumer(
        f"""
        seen = received()
        torch.cuda._sleep({CYCLES * 50})
        copy = seen.clone()
        del seen
        say(tensors.flush())
        hear()
        """
    ) as (other, pool, tensors, place):
        other.say(sent(tensors.put(torch.ones(MIB, device="cuda"), [place])))
        assert other.hear() == "False"
        assert pool.stats().blocks == 1
        other.kill()
        eventually(lambda: pool.stats().blocks == 0, within=20)


# ── host memory ──
def test_view_is_copied_from_registered_memory_and_held_until_then() -> None:
    with Pool.create(8 * MIB) as pool, Uploads(pool) as uploads:
        with pool.take(8 * MIB) as lease:
            with memoryview(lease) as room:
                room[:] = np.arange(8 * MIB, dtype=np.uint8).tobytes()
            ref = pool.share(lease, [pool.peer])
        view = np.frombuffer(pool.open(ref), np.uint8)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        copy = uploads.copy_to_device(view, stream=stream)
        del view
        assert uploads.stats.pageable == 0, uploads.refusals()
        with pytest.raises(MemoryExhausted):
            pool.take(1)
        assert uploads.flush(10)
        pool.take(8 * MIB).release()
        assert bytes_of(copy) == np.arange(8 * MIB, dtype=np.uint8).tobytes()


def test_memory_registered_elsewhere_is_copied_and_torch_accepts_it() -> None:
    driver = driver_of()
    with Pool.create(MIB) as pool:
        mapped = pool._segment.mapping(True, True)
        assert mapped is not None
        driver.register(*mapped)
        with Uploads(pool) as uploads:
            lease = pool.take(1000)
            np.frombuffer(lease, np.uint8)[:] = 5
            assert (uploads.copy_to_device(np.frombuffer(lease, np.uint8)).cpu() == 5).all()
            assert (uploads.stats.refusals, uploads.stats.pageable) == (1, 1)
        torch.zeros(10, device="cuda").sum().item()  # would raise what a runtime call had left behind
        driver.unregister(mapped[0])


# ── two devices ──
@on_two_devices
def test_driver_is_of_the_device_that_is_current_now() -> None:
    first = driver_of()
    torch.cuda.set_device(1)
    try:
        assert driver_of() is driver_of(1) is driver_of(device=1)
        assert driver_of(0) is first and first.uuid != driver_of().uuid
    finally:
        torch.cuda.set_device(0)


OTHER_DEVICE = """
for _ in range(3):
    observed = received()
    from cuda.bindings import driver
    _, flags, is_active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])
    say(observed.device, int(observed.sum().item()), is_active, tensors.stats.fetched)
    tensors.flush(5)
hear()
"""


@on_two_devices
def test_consumer_on_another_device_copies_from_the_pool_without_a_context() -> None:
    with consumer(OTHER_DEVICE, nbytes=64 * MIB, device=1, driver=driver_of(0)) as (other, pool, tensors, place):
        if place.slices is None:
            pytest.skip("needs two devices that reach each other")
        for number in range(3):
            ref = tensors.put(torch.ones(MIB, dtype=torch.uint8, device="cuda:0"), [place])
            assert isinstance(ref, CudaRef) and tensors.stats.peered == number + 1
            other.say(sent(ref))
            assert other.hear() == f"cuda:1 {MIB} 0 {number + 1}"
            eventually(lambda: pool.stats().blocks == 0)  # while the view lives


@pytest.mark.skipif(IS_REAL, reason="needs two devices that a test can part: no device")
def test_consumer_out_of_reach_gets_host_memory_without_a_context() -> None:
    scene = consumer(OTHER_DEVICE, "apart", nbytes=64 * MIB, device=1, driver=driver_of(0))
    with scene as (other, pool, tensors, place):
        ref = tensors.put(torch.ones(MIB, dtype=torch.uint8, device="cuda:0"), [place])
        assert isinstance(ref, HostRef) and pool.stats().takes == 0 and tensors.stats.foreign == 1
        other.say(sent(ref))
        assert other.hear() == f"cuda:1 {MIB} 0 0"
