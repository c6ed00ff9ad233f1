"""Run by pytest of the interpreter that has vLLM: its tensor IPC on a store, through its own encoder and decoder."""

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.v1.engine import core_client, tensor_ipc
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from penstock.integrations.vllm import settings, tensors

tensors.replace(settings.read({"PENSTOCK_VLLM": "tensors", "PENSTOCK_VLLM_TENSOR_MB": "4"}))

PIXELS = torch.arange(300_000, dtype=torch.float32).reshape(3, -1)


def sender() -> tensor_ipc.TensorIpcSender:
    return core_client.TensorIpcSender(None)  # without a queue: nothing may be put into it


def receiver() -> tensor_ipc.TensorIpcReceiver:
    return tensor_ipc.TensorIpcReceiver(None)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "fall_backs", type(settings.fall_backs)())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_tensor_travels_beside_its_message_and_may_be_written(dtype: torch.dtype) -> None:
    pixels = PIXELS.to(dtype).t()  # not contiguous
    frames = MsgpackEncoder(oob_tensor_consumer=sender()).encode({"pixels": pixels})
    assert sum(len(frame) for frame in frames) < 1000
    received = MsgpackDecoder(dict[str, torch.Tensor], oob_tensor_provider=receiver()).decode(frames)["pixels"]
    assert torch.equal(received, pixels)
    received += 1
    assert not settings.fall_backs


def test_any_engine_receives_a_tensor() -> None:
    ours = sender()
    for engine in range(3):
        ours.set_target_engine(engine)
        frames = MsgpackEncoder(oob_tensor_consumer=ours).encode(PIXELS)
        decoder = MsgpackDecoder(torch.Tensor, oob_tensor_provider=receiver())
        assert torch.equal(decoder.decode(frames), PIXELS)
    assert ours.sent is not None
    ours.sent.release_received()
    assert len(ours.sent) == 0


def test_a_tensor_without_room_travels_inline_and_is_counted() -> None:
    ours = sender()
    encoder, decoder = (
        MsgpackEncoder(oob_tensor_consumer=ours),
        MsgpackDecoder(torch.Tensor, oob_tensor_provider=receiver()),
    )
    large = torch.zeros(2_000_000)
    frames = encoder.encode(large)
    assert sum(len(frame) for frame in frames) > large.nbytes
    assert torch.equal(decoder.decode(frames), large)
    unread = [encoder.encode(PIXELS) for _ in range(4)]  # 4.8 MB: the last finds no room
    assert [sum(len(frame) for frame in message) > PIXELS.nbytes for message in unread] == [False, False, False, True]
    assert all(torch.equal(decoder.decode(message), PIXELS) for message in unread)
    assert list(settings.fall_backs.values()) == [2]
    assert [part for part, _ in settings.fall_backs] == ["tensors"]


def test_a_lost_tensor_is_an_error_of_its_request_alone() -> None:
    ours, core = sender(), SimpleNamespace(tensor_ipc_receiver=receiver(), mm_receiver_cache=None)
    decoder = MsgpackDecoder(torch.Tensor, oob_tensor_provider=core.tensor_ipc_receiver)
    lost, intact = (MsgpackEncoder(oob_tensor_consumer=ours).encode(PIXELS) for _ in range(2))
    assert ours.sent is not None
    ours.sent.store.remove(next(iter(ours.sent._sent))[0])
    decoder.decode(lost)
    with pytest.raises(RuntimeError, match="request 7 has lost a tensor on its way"):
        EngineCoreProc.preprocess_add_request(core, SimpleNamespace(request_id="7"))
    assert torch.equal(decoder.decode(intact), PIXELS)
    tensors.refuse_lost_tensors(core, SimpleNamespace(request_id="8"))


def test_strict_makes_a_tensor_without_room_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM_STRICT", "1")
    with pytest.raises(RuntimeError, match="tensors travel inline"):
        MsgpackEncoder(oob_tensor_consumer=sender()).encode(torch.zeros(2_000_000))


def send(results: Any) -> None:
    ours = core_client.TensorIpcSender(None)
    results.put([ours(PIXELS), os.getpid()])
    results.get()


def test_the_store_of_a_sender_that_ended_is_left_with_the_next_new_one() -> None:
    spawn = multiprocessing.get_context("spawn")
    tensors.stores.clear()
    for _ in range(2):
        results: Any = spawn.SimpleQueue()
        process = spawn.Process(target=send, args=(results,))
        process.start()
        meta, _ = results.get()
        assert torch.equal(tensors.receive(receiver(), "float32", (3, 100_000), meta), PIXELS)
        process.kill()
        process.join()
    assert len(tensors.stores) == 1


def configured(tensor_ipc: str = "torch_shm", device: str | None = None, size: int = 2) -> tuple[Any, Any]:
    multimodal = SimpleNamespace(mm_tensor_ipc=tensor_ipc, get_mm_processor_device_type=lambda: device)
    model = SimpleNamespace(multimodal_config=multimodal, verify_with_parallel_config=None)
    return model, SimpleNamespace(world_size_across_dp=size)


def test_several_workers_are_refused_by_vllm_and_not_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    ipcs: list[str] = []

    def checks(self: Any, parallel_config: Any) -> None:
        ipcs.append(self.multimodal_config.mm_tensor_ipc)
        if ipcs[-1] == "torch_shm":
            raise ValueError("mm_tensor_ipc='torch_shm' is not supported")

    monkeypatch.setattr(ModelConfig, "verify_with_parallel_config", checks)
    tensors.let_models_have_several_workers()
    model, parallel = configured()
    ModelConfig.verify_with_parallel_config(model, parallel)
    assert ipcs == ["direct_rpc"]
    assert model.multimodal_config.mm_tensor_ipc == "torch_shm"
    with pytest.raises(
        ValueError, match="not supported"
    ):  # tensors of a device go through vLLM's queue, which has one reader
        ModelConfig.verify_with_parallel_config(*configured(device="cuda"))
