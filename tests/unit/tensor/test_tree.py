"""Trees of tensors: laid out in one piece of memory, read back as views of it; a forged layout is an error."""

import collections
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import DecodeError
from penstock.errors import UnsupportedTensor
from penstock.tensor import plan, read


def test_every_tensor_lies_at_a_multiple_of_64_and_is_compacted() -> None:
    large = np.arange(10_000, dtype=np.int16)
    planned = plan([large[::100], large[:1], large[5000:5010], large[:0]])
    assert [at for at, _ in planned.sources] == [0, 256, 320]  # of 200, 2 and 20 bytes; nothing takes no room
    assert planned.nbytes == 340
    buffer = bytearray(planned.nbytes)
    planned.write(buffer)
    first, second, third, fourth = read(planned.layout, buffer)
    start = first.ctypes.data
    assert [(array.ctypes.data - start) % 64 for array in (first, second, third)] == [0, 0, 0]
    assert first.tolist() == large[::100].tolist()
    assert third.tolist() == list(range(5000, 5010))
    assert fourth.size == 0


def test_views_of_a_tree_are_read_only_and_keep_the_buffer() -> None:
    planned = plan({"a": np.arange(4)})
    buffer = bytearray(planned.nbytes + 64)
    planned.write(buffer, 64)
    array = read(planned.layout, buffer, 64)["a"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    with pytest.raises(ValueError):
        array.flags.writeable = True
    with pytest.raises(BufferError):
        buffer.clear()
    own = read(planned.layout, buffer, 64, writable=True)["a"]
    own[0] = 9
    assert array.tolist() == [0, 1, 2, 3]
    del array
    buffer.clear()
    assert own.tolist() == [9, 1, 2, 3]


def test_a_plan_does_not_fit_less_room_than_it_says() -> None:
    planned = plan([np.arange(4), np.arange(4)])
    with pytest.raises(ValueError):
        planned.write(bytearray(planned.nbytes - 1))


def test_unsupported_leaf_is_refused_with_its_path() -> None:
    endless: list[Any] = []
    endless.append(endless)
    pair = collections.namedtuple("pair", "a b")
    for tree, words in (
        ({"a": [1, {2, 3}]}, r"expected an array .*, got a set at \$\['a'\]\[1\]"),
        ([np.array([object()])], r"addresses of this process at \$\[0\]"),
        ([np.array(["x"])], r"at \$\[0\]"),
        ({"a": 1 << 64}, r"64 bits at \$\['a'\]"),
        ({"a": 10**400}, r"64 bits at \$\['a'\], got one of 1329"),
        ({1 << 64: 0}, "64 bits at"),
        ({1.5: 0}, "keys of str or int, got float at"),
        ([pair(1, 2)], r"would come back as a tuple at \$\[0\]"),
        (endless, "at most 32 levels"),
        (lambda: 0, r"expected an array .*, got a function"),
    ):
        with pytest.raises(UnsupportedTensor, match=words):
            plan(tree)


def test_forged_layout_is_refused_with_its_path() -> None:
    buffer = bytes(256)
    for node, words in (
        ([0, 1, 0, 257], "within 256 bytes"),
        ([0, 1, 64, 193], "within 256 bytes"),
        ([0, 1, 1, 4], "within 256 bytes"),
        ([0, 1, -64, 4], "within 256 bytes"),
        ([0, 1, 1 << 62, 1 << 40], "within 256 bytes"),
        ([0, 1, 0, -1, -1], "sizes from 0"),
        ([0, 1, 0, 1 << 44, 1 << 44], "at most"),
        ([0, 1, 0, 0, 1 << 44, 1 << 44], "at most"),
        ([0, 1, 0, *[1] * 33], "dimensions"),
        ([0, 1, 0, 1.0], "sizes from 0"),
        ([0, 0, 0, 1], "expected a tensor"),
        ([0, 200, 0, 1], "expected a tensor"),
        ([0], "expected a tensor"),
        ([0, 1], "expected a tensor"),
        ([0, True, 0, 1], "expected a tensor"),
        ([], "expected a node"),
        ([4, 1], "expected a node"),
        (["x"], "expected a node"),
        ({"a": 1}, "expected a node"),
        (msgspec.msgpack.Ext(1, b""), "expected a node"),
        ([3, "a"], "expected a node"),
        ([3, "a", 1, "a", 2], "another key"),
        ([3, [1], 1], "another key"),
        ([1, [1, [0, 1, 0, 999]]], r"at \$\[0\]\[0\]"),
        ([3, "k", [0, 1, 0, 999]], r"at \$\['k'\]"),
    ):
        with pytest.raises(DecodeError, match=words):
            read(msgspec.msgpack.encode(node), buffer)
    deep: Any = 0
    for _ in range(500):
        deep = [1, deep]
    for layout in (b"", b"\xc1", b"\x91", msgspec.msgpack.encode(deep), b"\x91" * 100_000 + b"\xc0"):
        with pytest.raises(DecodeError):
            read(layout, buffer)


def test_damaged_layout_is_refused_or_read_within_the_buffer(seed: int) -> None:
    rng = random.Random(seed)
    planned = plan({"a": np.arange(6).reshape(2, 3), "b": [np.ones(3, np.float16), "x", (1, b"y")], "c": np.arange(9)})
    buffer = np.zeros(planned.nbytes, np.uint8)
    planned.write(buffer)
    first, last = buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes
    outcomes = collections.Counter[str]()

    def look(node: Any) -> None:
        if isinstance(node, np.ndarray):
            assert node.nbytes == 0 or first <= node.ctypes.data <= last - node.nbytes
            node.sum()
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
            look(child)

    for _ in range(20_000):
        layout = bytearray(planned.layout)
        for _ in range(rng.randrange(1, 4)):
            layout[rng.randrange(len(layout))] = rng.randrange(256)
        try:
            look(read(layout, buffer))
            outcomes["read"] += 1
        except DecodeError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 100, outcomes
    assert outcomes["refused"] > 100, outcomes
