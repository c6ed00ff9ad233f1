"""What the core reads of a value is what tree.py reads of it; what it does not read, tree.py reads or refuses."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from penstock.errors import ClosedError, DecodeError
from penstock.lowlevel import Ref
from penstock.tensor import Store, plan
from penstock.tensor.stored import HEAD, Stored, block_nbytes, read_value, tensors_at, write_value

TREES: list[Any] = [
    {"pixels": np.arange(96, dtype=np.uint8).reshape(4, 3, 8), "grid": [1, 16, -16], "name": "µ", "raw": b"\0x"},
    [None, True, False, 0, -1, 1 << 40, -(1 << 40), (1 << 64) - 1, -(1 << 63), 1.5, ""],
    (np.ones((), np.float64), (np.zeros((2, 2), np.complex64), [[]]), {1: {}, -5: np.ones(3, bool)}),
    np.arange(5, dtype=np.int16),
    {"empty": np.zeros((0, 3)), "other": np.ones(2, np.float16)},
    list(range(300)),
    "x" * 300,
    7,
]


def lent(store: Store, block: bytes) -> Any:
    """A value of just these bytes, held; and its lease for who reads it the other way."""
    with store.take(len(block)) as lease:
        with memoryview(lease) as room:
            room[:] = block
        ref = Ref(*lease.ref_numbers())
        return store.open_stored(ref), store.open(ref)


def block_of(store: Store, tree: Any) -> bytes:
    planned = plan(tree)
    with store.take(block_nbytes(planned)) as lease:
        np.frombuffer(memoryview(lease), np.uint8)[:] = 0
        write_value(lease, planned)
        return bytes(memoryview(lease))


def shown(value: Any) -> Any:
    """The same for equal trees, and for equal refusals."""
    if isinstance(value, np.ndarray):
        flags = value.flags.writeable, value.flags.c_contiguous, value.flags.aligned, value.flags.owndata
        return "array", value.dtype.str, value.shape, value.strides, value.tobytes(), flags if value.size else None
    if isinstance(value, dict):
        return "dict", [(type(key), key, shown(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shown(one) for one in value]
    return type(value), repr(value)


def outcome(read: Any) -> Any:
    try:
        return shown(read())
    except DecodeError as error:
        return "DecodeError", re.sub(r" at 0x\w+>", ">", str(error))  # an object that is shown by its address


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
@pytest.mark.parametrize("as_", ["numpy", "bits"])
def test_both_read_the_same_value(tree: Any, as_: Any) -> None:
    with Store(1 << 20) as store:
        stored, lease = lent(store, block_of(store, tree))
        assert shown(stored.value(as_)) == shown(read_value(lease, as_, False))
        assert shown(stored.value(as_)) == shown(stored.value(as_))
        assert shown(stored.value(as_, writable=True)) == shown(read_value(lease, as_, True))


def test_both_say_the_same_of_a_block_of_which_any_byte_is_another(seed: int) -> None:
    with Store(1 << 20) as store:
        chance = random.Random(seed)
        blocks = [block_of(store, tree) for tree in TREES]
        refused = 0
        for _ in range(3000):
            block = bytearray(chance.choice(blocks))
            (layout_nbytes, _) = HEAD.unpack_from(block)
            for _ in range(chance.randint(1, 3)):
                at = (
                    chance.randrange(HEAD.size + layout_nbytes)
                    if chance.random() < 0.95
                    else chance.randrange(HEAD.size)
                )
                block[at] = chance.choice([chance.randrange(256), 0, 1, 64, 0x90, 0xC4, 0xCD, 0xCF, 0xDC, 0xDF, 0xFF])
            stored, lease = lent(
                store, bytes(block[: chance.choice([len(block), len(block), chance.randrange(len(block))])])
            )
            expected = outcome(lambda lease=lease: read_value(lease, "numpy", False))
            assert outcome(stored.value) == expected, f"seed {seed}: {bytes(block)!r}"
            refused += expected[0] == "DecodeError"
        assert 300 < refused < 2900


def test_no_array_reaches_beyond_its_block() -> None:
    with Store(1 << 20) as store:
        tree = np.arange(64, dtype=np.uint8)
        block = block_of(store, tree)
        at = tensors_at(HEAD.unpack_from(block)[0])
        for cut in range(1, 65):
            stored, _ = lent(store, block[: at + 64 - cut])
            with pytest.raises(DecodeError, match="expected a tensor within"):
                stored.value()


def test_a_block_that_does_not_begin_at_a_multiple_of_64_is_read_too() -> None:
    with Store(1 << 20) as store:
        block = b"shifted." + block_of(store, {"x": np.arange(8)})
        with store.take(len(block)) as lease:
            with memoryview(lease) as room:
                room[:] = block
            ref = Ref(*lease.ref_numbers()).slice(8, len(block) - 8)
            assert store.open_stored(ref).value()["x"].tolist() == list(range(8))


def test_arrays_hold_a_value_that_was_released_and_nobody_can_write_them() -> None:
    with Store(1 << 20) as store:
        store.put(bytes(32), {"x": np.arange(1000)})
        stored = store.get(bytes(32))
        seen = stored.value()["x"]
        ref = stored.ref
        stored.release()
        with pytest.raises(ClosedError):
            stored.value()
        with pytest.raises(ClosedError):
            stored.hold()
        assert stored.ref == ref and stored.nbytes == ref.nbytes
        (item,) = store.stats().items
        assert item.holders == 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            seen.flags.writeable = True
        with pytest.raises(BufferError, match="views"):
            seen.base.release()
        part = seen[10:20]
        del seen
        assert part.tolist() == list(range(10, 20))
        (item,) = store.stats().items
        assert item.holders == 1
        del part
        (item,) = store.stats().items
        assert item.holders == 0


def test_a_value_whose_lease_somebody_else_has_released_is_not_shown() -> None:
    with Store(1 << 20) as store:
        first = store.lend(np.arange(9))
        with store.open(first.ref) as lease:
            stored = Stored(lease)
        with pytest.raises(ClosedError):
            stored.value()
        with pytest.raises(ClosedError):
            stored.hold()


def test_a_failure_is_told_though_arrays_still_hold_the_lease() -> None:
    with Store(1 << 20) as store:
        first = store.lend(np.arange(9))
        seen = []
        with pytest.raises(KeyError), store.open(first.ref) as lease:
            seen.append(Stored(lease).value())
            raise KeyError("of whoever reads it")
        first.release()
        assert seen[0].tolist() == list(range(9))


def test_a_value_without_arrays_keeps_nobody_from_releasing_its_lease() -> None:
    with Store(1 << 20) as store:
        first = store.lend({"a": [1, 2], "b": "text"})
        with store.open(first.ref) as lease:
            assert Stored(lease).value() == {"a": [1, 2], "b": "text"}
        assert lease.is_released


def test_a_take_that_finds_no_room_counts_once() -> None:
    with Store(1 << 20) as store:
        before = store.stats().exhaustions
        held = [store.take(store.nbytes // 4) for _ in range(3)]
        store.put(bytes(32), np.zeros(store.nbytes // 8, np.uint8)).release()
        held.append(store.take(store.nbytes // 4))
        assert store.stats().exhaustions == before + 1
