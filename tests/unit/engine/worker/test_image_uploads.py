"""Images on their way from the store to a CUDA device: on a double of the driver, or on a device."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from penstock import Store  # noqa: E402
from penstock.engine.protocol.messages import FinishReason  # noqa: E402
from penstock.engine.worker import image_encoder  # noqa: E402
from penstock.engine.worker.cuda.pending_step import CudaPendingStep  # noqa: E402
from penstock.engine.worker.image_encoder import DeviceInputs, ImageEncoder, Unusable  # noqa: E402
from penstock.tensor import Handle, Lease  # noqa: E402
from penstock.tensor.cuda import CudaPool, CudaTensors, DeviceScope, Uploads, torch_driver  # noqa: E402
from penstock.tensor.cuda.virtual_memory import VirtualMemory  # noqa: E402
from tests.conftest import eventually  # noqa: E402
from tests.support.libcuda import has_device, open_device  # noqa: E402

pytestmark = pytest.mark.skipif(torch.version.cuda is not None and not has_device(), reason="needs a CUDA device")

CYCLES = 200_000_000  # of torch.cuda._sleep: about 0.1 s of a stream's time
PIXELS = np.arange(3000, dtype=np.float32).reshape(100, 30)


def device_of_tests() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if has_device() else open_device()


def encoder_of(uploads: Uploads | None) -> ImageEncoder:
    text = SimpleNamespace(hidden_size=8)
    stock = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    model: Any = SimpleNamespace(stock=stock, deepstack_layers=0, device=torch.device("cuda", 0), dtype=torch.float16)
    return ImageEncoder(model, lambda handle: pytest.fail("opened"), DeviceInputs(uploads))


def test_image_is_copied_from_the_store_to_the_device_without_a_host_copy() -> None:
    with device_of_tests(), Store(1 << 20) as store:
        uploads = image_encoder.register_store(store)
        assert uploads is not None and uploads.stats.registered_nbytes >= 1 << 20
        encoder = encoder_of(uploads)
        with store.put({"pixels": PIXELS}, key=b"k" * 32) as lease:
            on_device = encoder._upload(lease.value("torch")["pixels"], torch.float16)
        assert on_device.dtype == torch.float16 and (on_device.cpu().numpy() == PIXELS.astype(np.float16)).all()
        assert (uploads.stats.copies, uploads.stats.pageable, uploads.stats.copied_nbytes) == (1, 0, PIXELS.nbytes)
        encoder.release_copied()
        assert uploads.close()


def test_image_outside_the_store_is_copied_by_pinned_memory() -> None:
    """An image that travels inline, and a part that is not contiguous."""
    with device_of_tests() as double, Store(1 << 20) as store:
        uploads = image_encoder.register_store(store)
        assert uploads is not None
        encoder = encoder_of(uploads)
        with store.put({"pixels": PIXELS}, key=b"k" * 32) as lease:
            part = lease.value("torch")["pixels"][:, 3:9]
            with double.watched() if double is not None else contextlib.nullcontext() as report:
                copies = [encoder._upload(torch.from_numpy(PIXELS)), encoder._upload(part)]
            assert report is None or (report.faults, report.pinned) == ([], 2)
            assert (copies[0].cpu().numpy() == PIXELS).all() and (copies[1].cpu().numpy() == PIXELS[:, 3:9]).all()
            del part
        assert uploads.stats.copies == 0 and uploads.close()


def test_store_that_cannot_be_registered_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with device_of_tests(), Store(1 << 20) as store:
        monkeypatch.setattr(Uploads, "refusals", lambda uploads: ["no room for so many pinned pages"])
        assert image_encoder.register_store(store) is None


@pytest.mark.skipif(has_device(), reason="a device shares memory by descriptors, or not")
@pytest.mark.parametrize("is_refused", [True, False])
def test_worker_says_once_that_device_memory_is_shared_by_legacy_handles(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VirtualMemory, "is_supported", lambda *_: not is_refused)
    torch_driver._driver.cache_clear()
    with device_of_tests(), caplog.at_level(logging.INFO, "penstock.engine"):
        image_encoder.device_inputs(torch.device("cuda", 0), None, Handle.open, receives_tensors=True)
    torch_driver._driver.cache_clear()
    fields = [getattr(record, "fields", {}) for record in caplog.records if "legacy handles" in record.message]
    assert fields == ([{"why": "the driver has no memory behind descriptors"}] if is_refused else [])


def test_image_is_released_when_its_step_is_done_and_no_other_follows() -> None:
    with device_of_tests(), Store(1 << 20) as store:
        uploads = image_encoder.register_store(store)
        assert uploads is not None
        encoder = encoder_of(uploads)
        with store.put({"pixels": PIXELS}) as lease:
            torch.cuda._sleep(CYCLES)
            on_device = encoder._upload(lease.value("torch")["pixels"])
        out = torch.zeros((1, 2), dtype=torch.int32, device="cuda")
        step = CudaPendingStep(out, np.zeros(1, np.intp), None, {}, (), encoder.release_copied)
        assert store.pool.stats().blocks == 1, "the device has not copied the image"
        step.result()
        assert store.pool.stats().blocks == 0
        assert (on_device.cpu().numpy() == PIXELS).all() and uploads.close()


def test_tensor_of_a_device_is_encoded_without_a_copy_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(model: Any, tensors: Any, upload: Any, *, is_video: bool) -> list[torch.Tensor]:
        return [upload(tensors["pixel_values"], torch.float16)[:, : tensors["sizes"].sum()]]

    monkeypatch.setattr(image_encoder.vision_inputs, "encode", encode)
    with device_of_tests() as double, Store(1 << 20) as store:

        def open_handle(handle: Handle) -> Lease:
            return handle.open(store)

        inputs = image_encoder.device_inputs(torch.device("cuda", 0), store, open_handle, receives_tensors=True)
        encoder = ImageEncoder(encoder_of(None)._model, open_handle, inputs)
        pool = CudaPool.create(1 << 20)
        with DeviceScope(CudaTensors(pool, store), store) as scope:
            pixels = torch.from_numpy(PIXELS).pin_memory().to("cuda")
            handle = scope.put({"pixel_values": pixels, "sizes": np.array([5, 3])})
            with double.watched() if double is not None else contextlib.nullcontext() as report:
                encoded = encoder.encode(handle, 100)
            assert report is None or (report.faults, report.copies_up, report.copies_back) == ([], 0, 0)
        assert (encoded.cpu().numpy() == PIXELS[:, :8].astype(np.float16)).all()
        with pytest.raises(Unusable) as raised:
            encoder.encode(handle, 100)
        assert raised.value.why == FinishReason.MISSING
        encoder.release_copied()
        assert inputs.received is not None and inputs.uploads is not None
        inputs.received.close()
        eventually(pool.close)
        assert inputs.uploads.close()
