"""vLLM's tensor IPC, from API servers to engine cores, on a Store: the key of a tensor travels in the message itself.

vLLM sends a descriptor for each tensor through one queue, so one engine alone can receive. Here the engine core that
decodes the message opens what it names: sent_tensors.py.

A tensor of a device stays with vLLM's queue. One that finds no room within a second travels inline, in the message.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config import ModelConfig, ParallelConfig
from vllm.v1.engine import tensor_ipc as vllm_tensor_ipc
from vllm.v1.engine.core import EngineCoreProc

from penstock import PenstockError, Store
from penstock.integrations.vllm.deaths import before
from penstock.integrations.vllm.image_values import are_views_safe
from penstock.integrations.vllm.sent_tensors import SentTensors, receive_value
from penstock.integrations.vllm.settings import Settings, fall_back, rebind

PART = "tensors"
MAX_ITEMS = 2048
IN_PLACE, ELSEWHERE = "direct_rpc", "torch_shm"  # vLLM's names for the two ways of a tensor
STORE, KEY = "store", "key"  # fields of what travels in place of a tensor

VllmSender: Any = vllm_tensor_ipc.TensorIpcSender
VllmReceiver: Any = vllm_tensor_ipc.TensorIpcReceiver
receive_from_queue = VllmReceiver.__call__

tensor_nbytes = 0  # replace() sets both, once for the process
has_views = False
stores: dict[str, Store] = {}  # of the senders, by ticket


class TensorIpcSender(VllmSender):  # type: ignore[misc]
    """vLLM's sender, with tensors of the CPU in a store of this process."""

    def __init__(self, queue: Any) -> None:
        super().__init__(queue)
        self.sent: SentTensors | None = None

    def set_target_engine(self, target_engine: int) -> None:
        """Any engine can open the store."""

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        if tensor.device.type != "cpu":
            return super().__call__(tensor)  # type: ignore[no-any-return]
        try:
            if self.sent is None:
                store = Store(tensor_nbytes, name="vllm tensors", peer_name="vllm api server", max_items=MAX_ITEMS)
                self.sent = SentTensors(store)
            key = self.sent.put(tensor)
        except (MemoryError, OSError, ValueError, TypeError) as error:
            fall_back(PART, f"{type(error).__name__} in a store of {tensor_nbytes} bytes: tensors travel inline")
            return None
        return {STORE: str(self.sent.store.ticket), KEY: key}


def receive(self: Any, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> torch.Tensor:
    """In place of `TensorIpcReceiver.__call__`: an engine core makes its receiver before plugins load."""
    if STORE not in meta:
        return receive_from_queue(self, dtype, shape, meta)  # type: ignore[no-any-return]
    try:
        lease = receive_value(attached(meta[STORE]), meta[KEY])
    except (PenstockError, OSError) as error:
        self.lost = error
        return torch.empty(0)
    tensor: torch.Tensor = lease.value("torch")[0]
    return tensor if has_views else torch.clone(tensor)


def refuse_lost_tensors(core: Any, request: Any) -> None:
    """Ends a request with a lost tensor. vLLM's thread of requests survives an error here, and none while it decodes.

    Raises:
        RuntimeError: the sender has given up a tensor of the request, or died.
    """
    receiver = core.tensor_ipc_receiver
    error = getattr(receiver, "lost", None)
    if error is not None:
        receiver.lost = None
        raise RuntimeError(f"request {request.request_id} has lost a tensor on its way: {error}") from error


def attached(ticket: str) -> Store:
    """Returns the store of a sender. The stores of senders that are gone are left with the next new one."""
    store = stores.get(ticket)
    if store is None:
        for old, other in list(stores.items()):
            if all(peer.pid == os.getpid() or peer.state in ("dead", "left") for peer in other.peers()):
                stores.pop(old).close()
        store = stores[ticket] = Store.attach(ticket, peer_name="vllm engine core")
    return store


def let_models_have_several_workers() -> None:
    """vLLM refuses tensor IPC with several workers or engines, as its queue has one reader. Ours may have any number.

    Tensors of a device go through vLLM's queue: where a model's processor runs on one, vLLM's check stays. So it does
    where vLLM checks elsewhere.
    """
    verify = ModelConfig.verify_with_parallel_config

    def verify_with_parallel_config(self: ModelConfig, parallel_config: ParallelConfig) -> None:
        config = self.multimodal_config
        is_ours = config is not None and config.mm_tensor_ipc == ELSEWHERE
        if not is_ours or config.get_mm_processor_device_type() not in (None, "cpu"):
            verify(self, parallel_config)
            return
        config.mm_tensor_ipc = IN_PLACE
        try:
            verify(self, parallel_config)
        finally:
            config.mm_tensor_ipc = ELSEWHERE

    ModelConfig.verify_with_parallel_config = verify_with_parallel_config


def replace(settings: Settings) -> None:
    """Binds our sender over vLLM's, and our receiving in vLLM's receiver."""
    global tensor_nbytes, has_views
    if vllm_tensor_ipc.TensorIpcSender is TensorIpcSender:
        return  # vLLM loads its plugins more than once
    tensor_nbytes, has_views = settings.tensor_mb << 20, are_views_safe(settings)
    let_models_have_several_workers()
    rebind(VllmSender, TensorIpcSender)
    VllmReceiver.__call__ = receive
    before(EngineCoreProc, "preprocess_add_request")(refuse_lost_tensors)
