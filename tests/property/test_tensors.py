"""Tensors against copies: whatever view of an array is put, what comes out is what a plain copy of it would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from penstock import Handle, Scope, Store
from penstock.tensor import plan, read
from penstock.tensor.kinds import KINDS
from tests import tiers

NUMPY = [kind.numpy for kind in KINDS if kind.numpy is not None]


@st.composite
def views(draw: st.DrawFn) -> NDArray[Any]:
    """An array, and then a few steps that change how it is seen."""
    dtype = draw(st.sampled_from(NUMPY)).newbyteorder(draw(st.sampled_from("<>")))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
    raw = draw(st.randoms(use_true_random=False)).randbytes(int(np.prod(shape)) * dtype.itemsize)
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    view: Any = np.frombuffer(raw, dtype).reshape(shape) if raw else np.empty(shape, dtype)
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from(("index", "turn", "widen", "flip")))
        if step == "index" and view.ndim:
            view = view[draw(arrays.basic_indices(view.shape, allow_newaxis=True, max_dims=6))]
        elif step == "turn":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif step == "widen" and view.ndim < 6:
            view = np.broadcast_to(view, (2, *view.shape))
        elif step == "flip" and view.ndim:
            view = np.flip(view, draw(st.integers(0, view.ndim - 1)))
    return np.asarray(view)


def same(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    native = expected.astype(expected.dtype.newbyteorder("="))
    return (actual.dtype, actual.shape, actual.tobytes()) == (native.dtype, native.shape, native.tobytes())


@settings(max_examples=tiers.TENSORS_EXAMPLES)
@given(view=views(), inline_nbytes=st.sampled_from((0, 64, 1 << 20)), as_torch=st.booleans())
def test_tensor_equals_a_plain_copy(view: NDArray[Any], inline_nbytes: int, as_torch: bool) -> None:
    with Store(1 << 17) as store:
        with Scope(store, inline_nbytes=inline_nbytes) as scope:
            handle = Handle.from_bytes(bytes(scope.put(view)))
            value = handle.open(store).value()
            own = handle.open(store).value(writable=True)
            assert same(value, view)
            assert same(own, view)
            if as_torch:
                of_torch = torch.from_numpy(view.astype(view.dtype.newbyteorder("=")))
                back = scope.put(of_torch).open(store).value("torch")
                assert back.shape == of_torch.shape
                assert back.numpy().tobytes() == of_torch.numpy().tobytes()
                del back
            del value
        assert store.stats().pool.blocks == 0


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), st.text(), st.binary()
)
trees = st.recursive(
    st.one_of(leaves, views()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(-5, 5)), inner, max_size=4),
    ),
    max_leaves=12,
)


def alike(actual: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return same(actual, expected)
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(alike(actual[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(alike, actual, expected))
    return bool(actual == expected)


@settings(max_examples=tiers.TENSORS_EXAMPLES)
@given(tree=trees)
def test_tree_of_tensors_is_equal_after_a_round_trip(tree: Any) -> None:
    planned = plan(tree)
    buffer = bytearray(planned.nbytes)
    planned.write(buffer)
    assert alike(read(planned.layout, buffer), tree)
