"""Run by pytest of the interpreter that has vLLM: its image cache on a store, its fall-backs, and what readers hold."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import shm_object_storage
from vllm.multimodal.cache import shm
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from penstock.integrations.vllm import images, settings
from penstock.integrations.vllm.image_values import ImageValues
from penstock.integrations.vllm.signed_store import SignedStore, store_variable

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "fall_backs", type(settings.fall_backs)())
    monkeypatch.setenv("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "penstock_test")
    monkeypatch.delenv(store_variable("penstock_test"), raising=False)
    for module in (shm_object_storage, shm):  # as replace() does it
        monkeypatch.setattr(module, "SingleWriterShmRingBuffer", images.SingleWriterShmRingBuffer)
        monkeypatch.setattr(module, "SingleWriterShmObjectStorage", images.SingleWriterShmObjectStorage)


def storage(ring: Any, lock: Any = None) -> Any:
    return shm_object_storage.SingleWriterShmObjectStorage(MIB, 1, ring, shm_object_storage.MsgpackSerde, lock)


def item(value: int, nbytes: int = MIB // 2) -> MultiModalKwargsItem:
    pixels = torch.full((nbytes // 4,), value, dtype=torch.float32)
    grid = MultiModalFieldElem(data=torch.arange(300), field=MultiModalBatchedField(keep_on_cpu=True))
    element = MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixels": element, "grid": grid})


def test_writer_without_a_store_and_its_readers_use_vllms_ring_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: Any, **__: Any) -> SignedStore:
        raise MemoryError("no memory left")

    monkeypatch.setattr(SignedStore, "create", create)
    ring = shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test_own", create=True)
    assert type(ring) is images.VllmRing
    writer = storage(ring)
    assert type(writer) is images.VllmStorage
    address, number = writer.put("a", item(1))
    reader = storage(shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test_own"), SimpleNamespace())
    assert type(reader) is images.VllmStorage
    assert writer.get(address, number) == item(1)
    assert list(settings.fall_backs) == [("images", "no store: no memory left")]
    reader.close()
    writer.close()


def test_server_without_a_shareable_store_uses_vllms_ring_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.image_caches, "is_refused", True)
    ring = shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test_own", create=True)
    assert type(ring) is images.VllmRing
    ring.close()


def test_storage_full_of_unopened_values_raises_until_they_are_opened() -> None:
    writer = storage(shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test", create=True))
    reader = storage(shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test"), SimpleNamespace())
    handles = []
    with pytest.raises(MemoryError):
        for number in range(100):
            handles.append((*writer.put(str(number), item(number)), writer.get_signature(str(number)), str(number)))
    assert len(handles) == 8 or len(handles) == 7
    assert list(settings.fall_backs.values()) == [1]
    for number, handle in enumerate(handles):
        assert reader.get(*handle) == item(number)
    writer.put("more", item(1))
    assert sum(writer.is_cached(str(number)) for number in range(len(handles))) == len(handles) - 1
    reader.close()
    writer.close()


def test_views_are_read_from_the_store_but_for_what_stays_on_the_cpu() -> None:
    writer = storage(shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test", create=True))
    handle = writer.put("a", item(1))
    copied = writer.get(*handle)
    copied["pixels"].data += 1  # its own
    tree = writer.store.get(images.KEY.pack(handle[1], handle[0]))
    viewed = ImageValues(has_views=True).decode(tree.value())
    assert viewed == item(1)
    places = [line.split("-", 1) for line in open("/proc/self/maps") if "penstock:vllm images" in line]
    extents = [(int(begin, 16), int(rest.split()[0], 16)) for begin, rest in places]

    def is_in_store(tensor: torch.Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < end for begin, end in extents)

    assert is_in_store(viewed["pixels"].data)
    assert not is_in_store(viewed["grid"].data)
    assert not is_in_store(copied["pixels"].data)
    viewed["grid"].data += 1
    writer.close()


@pytest.mark.parametrize(
    ("views", "on_cpu", "on_device"), [("arena", False, True), ("always", True, True), ("never", False, False)]
)
def test_the_setting_says_where_views_are_safe(
    views: str, on_cpu: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.integrations.vllm import image_values

    for is_cpu, expected in ((True, on_cpu), (False, on_device)):
        monkeypatch.setattr(image_values, "current_platform", SimpleNamespace(is_cpu=lambda is_cpu=is_cpu: is_cpu))
        assert image_values.are_views_safe(settings.Settings(views=views)) == expected


def test_a_fork_server_leaves_vllms_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shm_object_storage, shm):
        monkeypatch.setattr(module, "SingleWriterShmRingBuffer", images.VllmRing)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "forkserver")
    images.replace(settings.Settings())
    assert shm.SingleWriterShmRingBuffer is images.VllmRing
    assert [part for part, _ in settings.fall_backs] == ["images"]


def test_reader_that_cannot_attach_names_the_remedy() -> None:
    os.environ[store_variable("penstock_test")] = "penstock:1:1:1:1:1/1.1.1.0.64"
    with pytest.raises(RuntimeError, match=r"vllm worker .* cannot attach .*PENSTOCK_VLLM=0"):
        shm_object_storage.SingleWriterShmRingBuffer(4 * MIB, "penstock_test")
