"""Tensors in records of vLLM's messages: as buffers, and equal to what was sent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.integrations.vllm.records import decode, encode, tensor_reducers  # noqa: E402


def crossed(body: Any, views: Any = "none") -> Any:
    return decode(b"".join(encode(body, reducers=tensor_reducers())), views)[1]


TENSORS: dict[str, Callable[[], Any]] = {
    "small": lambda: torch.randn(100, 10),
    "large": lambda: torch.randn(1024, 512),
    "bfloat16": lambda: torch.randn(1024, 1024).bfloat16(),
    "float8": lambda: torch.randn(32, 32).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "empty": lambda: torch.empty(0, 8),
    "scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.randn(64, 64).t(),
    "of which the gradient is wanted": lambda: torch.randn(8, requires_grad=True),
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(4), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_equal_and_of_its_class(name: str) -> None:
    sent = TENSORS[name]()
    received = crossed({"tensor": sent})["tensor"]
    assert (type(received), received.dtype, received.shape) == (type(sent), sent.dtype, sent.shape)
    assert received.requires_grad == sent.requires_grad
    if sent.dtype == torch.float8_e4m3fn:
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
    assert torch.equal(received.to_dense() if sent.is_sparse else received, sent.to_dense() if sent.is_sparse else sent)


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_received_tensor_may_be_written_and_its_sender_does_not_see_it(name: str) -> None:
    sent = TENSORS[name]()
    copy, received = sent.clone(), crossed(sent)
    received += 1
    assert torch.equal(sent, copy)


def test_a_large_tensor_is_a_view_where_views_are_asked_for() -> None:
    record = b"".join(encode(sent := torch.randn(1024, 512), reducers=tensor_reducers()))
    received = decode(record, "all")[1]
    begin = np.frombuffer(record, np.uint8).ctypes.data
    assert torch.equal(received, sent)
    assert begin < received.data_ptr() < begin + len(record)


def test_a_large_tensor_lies_beside_the_pickle() -> None:
    first, *_ = encode({"tensor": torch.randn(1024, 512)}, reducers=tensor_reducers())
    assert len(first) < 1000
