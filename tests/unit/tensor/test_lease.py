"""A lease of a value, in a store or inline: what it reads, how long it holds, and what it is when it is released.

What the core reads of a value is what tree.py reads of it; what it does not read, tree.py reads or refuses.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import weakref
from typing import Any

import numpy as np
import pytest

from penstock import ClosedError, DecodeError, Handle, Lease, MemoryExhausted, Scope, Store
from penstock.lowlevel import BlockLease, Ref
from penstock.tensor import plan
from penstock.tensor.lease import HEAD, block_nbytes, read_block, tensors_at, write_value
from tests.support.processes import forked
from tests.support.values import MB, blocks, key

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


def lent(store: Store, block: bytes) -> tuple[Lease, BlockLease]:
    """A value of just these bytes; and a lease of its block, for reading it the other way."""
    with store.pool.take(len(block)) as lease:
        with memoryview(lease) as room:
            room[:] = block
        ref = Ref(*lease.ref_numbers())
        return Lease(store.pool.open(ref)), store.pool.open(ref)


def block_of(store: Store, tree: Any) -> bytes:
    planned = plan(tree)
    with store.pool.take(block_nbytes(planned)) as lease:
        np.frombuffer(memoryview(lease), np.uint8)[:] = 0
        write_value(lease, planned)
        return bytes(memoryview(lease))


def shown(value: Any, inline: bool = False) -> Any:
    """The same for equal trees, and for equal refusals. inline: an array may hold its bytes in another way."""
    if isinstance(value, np.ndarray):
        flags = value.flags.writeable, value.flags.c_contiguous, value.flags.aligned, inline or value.flags.owndata
        return "array", value.dtype.str, value.shape, value.strides, value.tobytes(), flags if value.size else None
    if isinstance(value, dict):
        return "dict", [(type(name), name, shown(item, inline)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shown(item, inline) for item in value]
    return type(value), repr(value)


def outcome(read: Any) -> Any:
    try:
        return shown(read())
    except DecodeError as error:
        return "DecodeError", re.sub(r" at 0x\w+>", ">", str(error))  # an object that is shown by its address


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
@pytest.mark.parametrize("as_", ["numpy", "bits"])
def test_native_and_python_readers_agree_on_values(tree: Any, as_: Any) -> None:
    with Store(MB) as store:
        stored, lease = lent(store, block_of(store, tree))
        assert shown(stored.value(as_)) == shown(read_block(lease, as_, False))
        assert shown(stored.value(as_)) == shown(stored.value(as_))
        assert shown(stored.value(as_, writable=True)) == shown(read_block(lease, as_, True))


def test_native_and_python_readers_agree_on_damaged_blocks(seed: int) -> None:
    with Store(MB) as store:
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
            expected = outcome(lambda lease=lease: read_block(lease, "numpy", False))
            assert outcome(stored.value) == expected, f"seed {seed}: {bytes(block)!r}"
            refused += expected[0] == "DecodeError"
        assert 300 < refused < 2900


def test_no_array_reaches_beyond_its_block() -> None:
    with Store(MB) as store:
        tree = np.arange(64, dtype=np.uint8)
        block = block_of(store, tree)
        at = tensors_at(HEAD.unpack_from(block)[0])
        for cut in range(1, 65):
            stored, _ = lent(store, block[: at + 64 - cut])
            with pytest.raises(DecodeError, match="expected a tensor within"):
                stored.value()


def test_a_block_that_does_not_begin_at_a_multiple_of_64_is_read_too() -> None:
    with Store(MB) as store:
        for shift in (1, 4, 8, 63):
            block = bytes(shift) + block_of(store, {"x": np.arange(8)})
            with store.pool.take(len(block)) as lease:
                with memoryview(lease) as room:
                    room[:] = block
                ref = Ref(*lease.ref_numbers()).slice(shift, len(block) - shift)
                view = Lease(store.pool.open(ref)).value()["x"]
                assert view.tolist() == list(range(8))
                assert view.flags.aligned and not view.flags.writeable


def test_arrays_keep_a_released_value_and_are_read_only() -> None:
    with Store(MB) as store:
        store.put({"x": np.arange(1000)}, key=key(0))
        lease = store.get(key(0))
        view = lease.value()["x"]
        ref = lease.ref
        lease.release()
        lease.release()
        with pytest.raises(ClosedError):
            lease.value()
        with pytest.raises(ClosedError):
            lease.hold()
        assert lease.ref == ref and lease.nbytes == ref.nbytes
        (item,) = store.stats().items
        assert item.holders == 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(BufferError, match="views"):
            view.base.release()
        part = view[10:20]
        del view
        assert part.tolist() == list(range(10, 20))
        (item,) = store.stats().items
        assert item.holders == 1
        del part
        (item,) = store.stats().items
        assert item.holders == 0


def test_value_of_a_released_block_raises_closed_error() -> None:
    with Store(MB) as store:
        first = store.put(np.arange(9))
        with store.pool.open(first.ref) as block:
            lease = Lease(block)
        with pytest.raises(ClosedError):
            lease.value()
        with pytest.raises(ClosedError):
            lease.hold()


def test_a_value_without_arrays_leaves_its_block_free_to_be_released() -> None:
    with Store(MB) as store:
        first = store.put({"a": [1, 2], "b": "text"})
        with store.pool.open(first.ref) as block:
            assert Lease(block).value() == {"a": [1, 2], "b": "text"}
        assert block.is_released


def test_a_lease_is_made_of_a_block_alone_and_cannot_be_copied_or_pickled() -> None:
    with Store(MB) as store, store.put(np.arange(9)) as lease:
        for wrong in ((), (None,), (b"bytes",), (lease,)):
            with pytest.raises(TypeError):
                Lease(*wrong)  # type: ignore[arg-type]
        for copier in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError):
                copier(lease)


def test_put_counts_as_exhausted_when_it_fails_not_when_it_evicts() -> None:
    with Store(MB) as store:
        before = store.stats().pool.exhaustions
        quarter = np.zeros(store.nbytes // 4 - 4096, np.uint8)
        held = [store.put(quarter, timeout=0) for _ in range(3)]
        store.put(np.zeros(store.nbytes // 8, np.uint8), key=key(0)).release()
        held.append(store.put(quarter, timeout=0))
        assert store.stats().pool.exhaustions == before
        with pytest.raises(MemoryExhausted):
            store.put(quarter, timeout=0)
        assert store.stats().pool.exhaustions == before + 1


# ── of a value that travels inline ──
def inline(value: Any, value_key: bytes | None = None) -> Handle:
    return Handle.from_bytes(bytes(Scope().put(value, key=value_key)))


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
@pytest.mark.parametrize("as_", ["numpy", "bits"])
@pytest.mark.parametrize("writable", [False, True], ids=["views", "copies"])
def test_an_inline_value_is_the_one_that_a_store_shows(tree: Any, as_: Any, writable: bool) -> None:
    with Store(MB) as store:
        assert shown(inline(tree).open().value(as_, writable=writable), inline=True) == shown(
            store.put(tree).value(as_, writable=writable), inline=True
        )


def test_inline_lease_shows_read_only_arrays_until_released() -> None:
    handle = inline({"x": np.arange(1000), "size": 3}, key(1))
    lease = handle.open()
    assert lease.ref is handle and lease.nbytes == handle.nbytes
    view = lease.value()["x"]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    own = lease.value(writable=True)["x"]
    own[:] = 0
    with lease.hold() as held:
        lease.release()
        lease.release()
        for use in (Lease.value, Lease.hold, lambda lease: lease.ref):
            with pytest.raises(ClosedError):
                use(lease)
        assert lease.nbytes == handle.nbytes, "it can still be counted"
        assert held.ref is handle and held.value()["size"] == 3
    with pytest.raises(ClosedError):
        held.value()
    del handle, lease, held
    gc.collect()
    assert view.tolist() == list(range(1000)) and not own.any()


def test_a_lease_of_an_inline_value_holds_its_message() -> None:
    message = Message()
    gone = weakref.ref(message)
    lease = Lease.of_message(message, 7)
    held = lease.hold()
    del message, lease
    assert gone() is not None and held.nbytes == 7
    held.release()
    assert gone() is None


class Message:
    pass


# ── processes ──
def test_a_lease_of_before_a_fork_is_the_parents() -> None:
    with Store(MB) as store:
        lease = store.put(np.arange(9))

        def child() -> None:
            lease.release()

        assert forked(child) == 0
        assert lease.value().tolist() == list(range(9)) and blocks(store) == 1
        with pytest.raises(MemoryExhausted):
            store.put(np.zeros(store.nbytes - 200, np.uint8), timeout=0)
