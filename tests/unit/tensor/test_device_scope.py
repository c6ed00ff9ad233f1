"""Tensors of a device that travel with a request: held by a scope, viewed or copied by receivers."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest

from penstock import ClosedError, MemoryExhausted, Missing, Store, content_key
from penstock.tensor import Handle, Lease
from penstock.tensor.cuda import CudaPool, CudaTensors, DeviceScope, ForeignDevice, ReceivedTensors
from penstock.tensor.cuda.device_scope import MAX_POOLS
from tests.support.devices import FakeDriver
from tests.support.values import MB, blocks

KIB = 1 << 10
GRID = np.array([[1, 4, 6]])


class Ends:
    """A sender and a receiver in one process. `device` and `peers`: of the receiver."""

    def __init__(self, device: int = 0, peers: tuple[int, ...] = (), nbytes: int = 64 * KIB) -> None:
        self.here = FakeDriver(peers=peers and (device,))
        self.there = self.here if device == 0 else FakeDriver(device, peers=peers)
        self.pool, self.store = CudaPool.create(nbytes, driver=self.here), Store(MB)
        self.tensors = CudaTensors(self.pool, self.store)
        self.received = ReceivedTensors(self.open, driver=self.there)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.held()[0] == 0
        self.received.close()
        assert self.tensors.close() and self.pool.close()
        self.store.close()

    def open(self, handle: Handle) -> Lease:
        return handle.open(self.store)

    def scope(self) -> DeviceScope:
        return DeviceScope(self.tensors, self.store, [self.there.uuid])

    def pixels(self, size: int = 1000) -> Any:
        return self.here.copy_of(np.arange(size, dtype=np.float32))

    def resolve(self, handle: Handle) -> dict[str, Any]:
        with self.open(handle) as lease:
            return self.received.resolve(lease.value())

    def held(self) -> tuple[int, int]:
        """On the device, and in the store."""
        gc.collect()
        self.received.flush()
        self.tensors.flush()
        return self.pool.stats().blocks, blocks(self.store)


@pytest.mark.parametrize(
    ("device", "peers", "counts"),
    [(0, (), (0, 0)), (3, (0,), (0, 1)), (3, (), (1, 0))],
    ids=["on the device", "by peer access", "by the store"],
)
def test_tensor_reaches_a_receiver_by_its_way(device: int, peers: tuple[int, ...], counts: tuple[int, int]) -> None:
    with Ends(device, peers) as ends, ends.scope() as scope:
        handle = scope.put({"pixels": ends.pixels(), "grid": GRID})
        for _ in range(2):  # a retry, or a second rank
            value = ends.resolve(handle)
            assert (value["pixels"] == np.arange(1000)).all() and (value["grid"] == GRID).all()
            assert getattr(value["pixels"], "uuid", None) == (None if counts[0] else ends.there.uuid)
            assert np.shares_memory(value["pixels"], ends.resolve(handle)["pixels"]) == (not counts[1])
        assert ends.tensors.stats.foreign == counts[0] and bool(ends.received.fetched()) == bool(counts[1])
        del value
        scope.release()
        assert ends.held() == (0, 0)


def test_tensor_without_room_in_the_pool_goes_by_the_store() -> None:
    with Ends(nbytes=KIB) as ends, ends.scope() as scope:
        assert (ends.resolve(scope.put({"pixels": ends.pixels()}))["pixels"] == np.arange(1000)).all()
        assert ends.tensors.stats.overflowed == 1
        with pytest.raises(MemoryExhausted, match="neither in a pool of device memory nor in a store"):
            scope.put({"few": ends.pixels(10), "many": ends.pixels(MB)})
        scope.release()
        assert ends.held() == (0, 0)


def test_scope_that_has_ended_has_no_tensors_and_takes_none() -> None:
    with Ends() as ends:
        scope = ends.scope()
        handle = scope.put({"pixels": ends.pixels()})
        view = ends.resolve(handle)["pixels"]
        scope.release()
        assert ends.held() == (1, 0) and (view == np.arange(1000)).all()
        del view
        assert ends.held() == (0, 0)
        with pytest.raises(Missing, match="a tensor of a device is gone"):
            ends.resolve(handle)
        with pytest.raises(ClosedError):
            scope.put({"pixels": ends.pixels()})
        assert ends.held() == (0, 0)


def test_value_with_tensors_of_a_device_is_kept_under_no_key() -> None:
    key = content_key(b"image")
    with Ends() as ends, ends.scope() as scope:
        assert scope.put({"pixels": ends.pixels()}, key=key).key is None
        host = {"pixels": np.zeros(10_000)}
        assert scope.put(host, key=key).key == key and scope.put(np.zeros(10_000)).key is None
        scope.release()
        assert ends.held() == (0, 1)


def test_receiver_keeps_few_senders_and_names_one_out_of_reach() -> None:
    with contextlib.ExitStack() as stack:
        ends, *others = (stack.enter_context(Ends()) for _ in range(MAX_POOLS + 1))
        scope = ends.scope()
        handle = scope.put({"pixels": ends.pixels()})
        far = ReceivedTensors(ends.open, driver=FakeDriver(7))
        with pytest.raises(ForeignDevice), ends.open(handle) as lease:
            far.resolve(lease.value())
        far.close()
        for _ in range(2):  # more senders than a receiver keeps open
            for other in others:
                with other.scope() as their_scope, their_scope.put({"a": other.pixels()}).open(other.store) as lease:
                    assert ends.received.resolve(lease.value())["a"].size == 1000
            assert ends.resolve(handle)["pixels"].size == 1000
        scope.release()
        ends.received.close()  # before the senders end


def test_tensor_of_a_sender_that_is_gone_is_missing() -> None:
    with Ends() as ends:
        other = Ends()
        handle = other.scope().put({"pixels": other.pixels()})
        with other:
            assert other.held() == (0, 0), "the scope was dropped"
        with pytest.raises(Missing, match="a tensor of a device is gone"):
            ends.resolve(handle)
