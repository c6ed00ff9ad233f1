"""vLLM's ways for tensors, in the peer interpreter, with vLLM's own classes and sizes.

how: "queue", its `MessageQueue` as its executor makes it; "arena", the same with the shared-memory arena that one opts
in to; "cache", its multimodal cache in shared memory; its handles go by its `MessageQueue`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from multiprocessing.context import set_spawning_popen
from multiprocessing.synchronize import Lock
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.impls import Meet, Seat, Wires, tensors, vllm_queue

PLACES = 3  # of the largest item

check = vllm_queue.check
python = vllm_queue.python


def lay(receivers: int, scratch: Path, largest: str, how: str) -> Wires:
    return Wires([(str(scratch), int(largest), how)] * (receivers + 1))


def _config(receivers: int, largest: int) -> Any:
    """As much of vLLM's configuration as its caches ask for."""
    multimodal = SimpleNamespace(
        mm_processor_cache_gb=PLACES * (largest + (1 << 20)) / (1 << 30),
        mm_shm_cache_max_object_size_mb=(largest >> 20) + 1,
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=receivers),
        model_config=SimpleNamespace(get_multimodal_config=lambda: multimodal),
    )


def _shared_name(scratch: str) -> None:
    os.environ["VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"] = Path(scratch).name


def _state_of(lock: Lock) -> tuple[Any, ...]:
    """What another process makes the same lock of: multiprocessing gives it only to those that it spawns."""
    set_spawning_popen(lock)
    try:
        state: tuple[Any, ...] = lock.__getstate__()  # type: ignore[assignment]
        return state
    finally:
        set_spawning_popen(None)


def _lock_of(state: tuple[Any, ...]) -> Lock:
    lock = Lock.__new__(Lock)
    lock.__setstate__(state)  # type: ignore[attr-defined]
    return lock


class Sender(vllm_queue.Sender, tensors.Sender):
    def __init__(self, wire: tuple[str, int, str], seat: Seat, meet: Meet) -> None:
        scratch, self._largest, self._how = wire
        self.options = {"enable_shm_tensor_arena": True} if self._how == "arena" else {}
        super().__init__(scratch, seat, meet)
        self.put = self._put_whole
        if self._how == "cache":
            _shared_name(scratch)
            from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache

            self._cache = ShmObjectStoreSenderCache(_config(seat.receivers, self._largest))
            self._lock = multiprocessing.get_context("spawn").Lock()
            meet(_state_of(self._lock))
            self._numbers = itertools.count()
            self.put = self._put_in_cache

    def expect(self, nbytes: int) -> None:
        import torch

        self._tensor = torch.from_numpy(tensors.pattern(nbytes))
        self.send = self._frames.enqueue

    def prepare(self) -> None:
        if self._how == "cache":
            self._key = f"{next(self._numbers):064x}"

    def warm(self) -> None:
        if self._how == "cache":
            ring = self._cache._shm_cache.ring_buffer
            ring.shared_memory.buf[ring.AUTH_SECRET_BYTES :] = bytes(ring.shared_memory.size - ring.AUTH_SECRET_BYTES)
            self._cache._shm_cache.clear()

    def _put_whole(self) -> Any:
        return self._tensor

    def _put_in_cache(self) -> Any:
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

        item = MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=self._tensor, field=MultiModalBatchedField())})
        handle, _ = self._cache.get_and_update_item((item, []), self._key)
        if "address" not in handle:
            raise ValueError(f"vLLM's cache did not take a tensor of {self._tensor.nbytes} bytes")
        return self._key, handle

    def reserved_nbytes(self) -> int:
        arena = self._frames.tensor_arena.total_bytes if self._how == "arena" else 0
        cache = self._cache._shm_cache.ring_buffer.shared_memory.size if self._how == "cache" else 0
        return super().reserved_nbytes() + arena + cache

    def close(self) -> None:
        if self._how == "cache":
            self._cache.close()
        super().close()


class Receiver(vllm_queue.Receiver, tensors.Receiver):
    def __init__(self, wire: tuple[str, int, str], seat: Seat, meet: Meet) -> None:
        scratch, largest, how = wire
        super().__init__(scratch, seat, meet)
        self.held: Any = None
        if how == "cache":
            _shared_name(scratch)
            from vllm.multimodal.cache.shm import ShmObjectStoreReceiverCache

            state = meet(None)[0]
            assert isinstance(state, tuple), "the sender offers its lock"
            self._cache = ShmObjectStoreReceiverCache(_config(seat.receivers, largest), _lock_of(state))
            self.get = self._get_from_cache

    def _get_from_cache(self, token: tuple[str, Any]) -> Any:
        key, handle = token
        return self._cache.get_and_update_item(handle, key)["pixels"].data
