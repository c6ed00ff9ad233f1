"""Tensors in a store on their way to one receiver."""

import numpy as np
import pytest

from penstock import MemoryExhausted, Missing, Store
from penstock.integrations.vllm.sent_tensors import SentTensors, receive_value

TENSOR = np.arange(100_000, dtype=np.float32)


def new_store() -> Store:
    return Store(1 << 20, peer_name="api server")


def test_sent_tensor_is_held_until_its_receiver_releases_it() -> None:
    store = new_store()
    sent, receiver = SentTensors(store), Store.attach(store.ticket)
    key = sent.put(TENSOR)
    lease = receive_value(receiver, key)
    sent.release_received()
    assert len(sent) == 0
    assert np.array_equal(lease.value()[0], TENSOR)
    assert store.stats().pool.blocks == 1
    lease.release()
    assert store.stats().pool.blocks == 0


def test_a_sent_tensor_is_received_once() -> None:
    store = new_store()
    sent = SentTensors(store)
    key = sent.put(TENSOR)
    receive_value(store, key)
    with pytest.raises(Missing):
        receive_value(store, key)


def test_unreceived_tensors_make_room_after_the_timeout() -> None:
    store = new_store()
    sent = SentTensors(store, timeout=0.0)
    first, second = (sent.put(TENSOR) for _ in range(2))  # there is room for both
    sent.release_received()
    assert receive_value(store, second).nbytes > TENSOR.nbytes
    sent.put(TENSOR)
    third = sent.put(TENSOR)
    with pytest.raises(Missing):
        receive_value(store, first)
    assert receive_value(store, third).nbytes > TENSOR.nbytes


def test_tensor_without_room_is_refused_until_there_is_room() -> None:
    store = new_store()
    sent = SentTensors(store)
    keys = [sent.put(TENSOR) for _ in range(2)]
    with pytest.raises(MemoryExhausted):
        sent.put(TENSOR, timeout=0.05)
    receive_value(store, keys[0]).release()
    assert receive_value(store, sent.put(TENSOR, timeout=0.05)).nbytes > TENSOR.nbytes
    with pytest.raises(MemoryExhausted):
        sent.put(np.zeros(1 << 20))
