"""A loan: memory of a store in which one process makes a value, which others see when it is whole, and none changes."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest

from penstock import (
    ClosedError,
    Empty,
    Handle,
    Lease,
    Loan,
    MemoryExhausted,
    Missing,
    Store,
    Timeout,
    UnsupportedTensor,
)
from penstock.tensor import plan
from penstock.tensor.kinds import KINDS
from tests.conftest import eventually
from tests.support.processes import program, thread, threads
from tests.support.values import MB, blocks, key


def spec(nbytes: int = 4000) -> dict[str, Any]:
    return {
        "pixels": Empty((nbytes // 4,), "int32"),
        "grid": [1, 2, 3],
        "mask": (Empty((2, 3), bool), None),
        "given": np.arange(5),
    }


def fill(value: Any, number: int) -> None:
    value["pixels"][:] = number
    value["mask"][0][...] = [[True, False, True], [False, True, False]]


def is_whole(value: Any, number: int) -> bool:
    return bool(
        (value["pixels"] == number).all()
        and value["grid"] == [1, 2, 3]
        and value["mask"][0].tolist() == [[True, False, True], [False, True, False]]
        and value["mask"][1] is None
        and value["given"].tolist() == [0, 1, 2, 3, 4]
    )


def lent(store: Store, key: bytes | None, layout: Any = None, timeout: float | None = 0) -> Loan:
    """A loan: the value is not there."""
    loan = store.loan(key, spec() if layout is None else layout, timeout=timeout)
    assert isinstance(loan, Loan)
    return loan


WAYS = pytest.mark.parametrize("value_key", [key(1), None], ids=["with a key", "without a key"])


def test_a_value_made_in_place_is_got_by_all_where_it_was_written() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        with lent(store, key(1)) as loan:
            value = loan.value()
            assert value["pixels"].flags.writeable and value["pixels"].ctypes.data % 64 == 0
            address = value["pixels"].ctypes.data - store.pool._segment.mapping(True)[0]  # type: ignore[index]
            fill(value, 7)
            with pytest.raises(Missing):
                other.get(key(1))
            del value
            committed = loan.commit()
        assert is_whole(committed.value(), 7) and is_whole(other.get(key(1)).value(), 7)
        assert committed.value()["pixels"].ctypes.data - store.pool._segment.mapping(False)[0] == address  # type: ignore[index]
        assert not committed.value()["pixels"].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            committed.value()["pixels"][0] = 1
        committed.release()
        assert blocks(store) == 1 and store.stats().puts == 1
        assert is_whole(store.put({"other": 1}, key=key(1)).value(), 7), "a put of what was made copies nothing"


def test_loan_without_key_is_filled_in_place_and_ends_with_last_lease() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        with lent(store, None) as loan:
            fill(loan.value(), 7)
            takes = store.stats().pool.takes
            committed = loan.commit()
        assert store.stats().pool.takes == takes == 1, "it was copied"
        there = Handle(None, committed.ref).open(other)
        for lease in (committed, there):
            assert is_whole(lease.value(), 7)
            with pytest.raises(ValueError, match="read-only"):
                lease.value()["pixels"][0] = 1
        committed.release()
        assert is_whole(there.value(), 7) and blocks(store) == 1
        there.release()
        assert blocks(store) == 0 and store.stats().items == () and store.stats().puts == 0
        first, second = lent(store, None), lent(store, None)
        assert blocks(store) == 2, "each loan without a key is another value"
        fill(first.value(), 1)
        fill(second.value(), 2)
        assert is_whole(first.commit().value(), 1) and is_whole(second.commit().value(), 2)


def test_a_value_that_is_there_is_not_made_again() -> None:
    with Store(MB) as store:
        store.put({"a": 1}, key=key(1)).release()
        with store.loan(key(1), spec()) as lease:
            assert isinstance(lease, Lease)
            assert lease.value() == {"a": 1}
        assert store.get(key(1)).value() == {"a": 1}, "leaving what another process has put takes nothing away"
        assert store.stats().puts == 1 and store.stats().items[0].holders == 0


@WAYS
@pytest.mark.parametrize("how", ["left", "raised", "abandoned", "dropped"])
def test_a_value_without_a_commit_was_never_there(how: str, value_key: bytes | None) -> None:
    with Store(MB) as store:
        loan = lent(store, value_key)
        assert blocks(store) == 1
        if how == "left":
            with loan:
                fill(loan.value(), 1)
        elif how == "raised":
            with pytest.raises(OSError, match="half-way"), loan:
                loan.value()["pixels"][:10] = 1
                raise OSError("half-way")
        elif how == "abandoned":
            loan.abandon()
            loan.abandon()
        if how != "dropped":
            assert blocks(store) == 0
            for use in (loan.commit, loan.value):
                with pytest.raises(ClosedError, match="committed or abandoned"):
                    use()
        del loan
        assert blocks(store) == 0 and store.stats().abandoned == (value_key is not None)
        lent(store, value_key, timeout=0).abandon()


@WAYS
def test_array_of_an_abandoned_loan_writes_where_no_reader_looks(value_key: bytes | None) -> None:
    with Store(MB) as store:
        with lent(store, value_key) as loan:
            pixels = loan.value()["pixels"]
        second = store.put({"pixels": np.full(1000, 5, np.int32)}, key=value_key, timeout=0)
        pixels[:] = 9
        assert (second.value()["pixels"] == 5).all()
        assert blocks(store) == 2
        del pixels
        assert blocks(store) == 1


@WAYS
@pytest.mark.parametrize(
    "way",
    [
        lambda pixels: pixels,
        lambda pixels: pixels[5:7],
        lambda pixels: pixels.view(np.recarray),
        memoryview,
        lambda pixels: np.broadcast_to(pixels, (2, 1000)),
        np.from_dlpack,
        lambda pixels: pixels.flat,
    ],
    ids=["whole", "part", "subclass", "memoryview", "broadcast", "dlpack", "iterator"],
)
def test_commit_is_refused_while_a_writable_array_lives(way: Any, value_key: bytes | None) -> None:
    with Store(MB) as store, lent(store, value_key) as loan:
        fill(loan.value(), 3)
        left = way(loan.value()["pixels"])
        for _ in range(2):
            with pytest.raises(BufferError, match="drop them first"):
                loan.commit()
        if value_key is not None:
            with pytest.raises(Missing):
                store.get(value_key)
        assert blocks(store) == 1
        del left
        assert is_whole(loan.commit().value(), 3)
        with pytest.raises(ClosedError):
            loan.commit()


def test_loan_without_key_waits_for_room_and_evicts_unheld_values() -> None:
    with Store(MB) as store:
        for number in range(8):
            store.put(np.zeros(120_000, np.uint8), key=key(number)).release()
        lent(store, None, Empty(900_000, "uint8")).abandon()
        assert len(store.stats().items) <= 1 and store.stats().evictions >= 7
        held = store.put(np.zeros(900_000, np.uint8))
        with pytest.raises(MemoryExhausted, match="holds"):
            lent(store, None, Empty(900_000, "uint8"), timeout=0.01)
        with thread(lambda: lent(store, None, Empty(900_000, "uint8"), timeout=20)) as waiting:
            eventually(lambda: store.stats().pool.exhaustions > 1)
            assert waiting.is_alive()
            held.release()
        loan = waiting.value
        assert isinstance(loan, Loan)
        loan.value()[:] = 7
        assert (loan.commit().value() == 7).all()
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
            store.loan(None, Empty(2 * MB, "uint8"), timeout=None)


@WAYS
def test_loaned_arrays_of_every_dtype_and_shape_do_not_overlap(seed: int, value_key: bytes | None) -> None:
    chance = np.random.default_rng(seed)
    shapes = [(), (0, 3), 7, (2, 3, 5), np.int64(4)]
    specs = [Empty(shapes[index % len(shapes)], kind.name) for index, kind in enumerate(KINDS)]
    with Store(MB) as store:
        with lent(store, value_key, specs) as loan:
            written = []
            for array in loan.value("bits"):
                content = chance.integers(0, 2, array.shape, np.uint8).astype(array.dtype)
                array[...] = content
                written.append(content)
            del array
            committed = loan.commit()
        arrays = committed.value("bits")
        assert [array.shape for array in arrays] == [empty.shape for empty in specs]
        for kind, array, content in zip(KINDS, arrays, written):
            assert array.dtype == (kind.numpy or kind.bits) and np.array_equal(array, content), kind.name


@WAYS
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"a": [Empty(3, "no such")]}, r"at \$\['a'\]\[0\]"),
        ({"a": Empty((3, -1), "int8")}, r"expected sizes .* at \$\['a'\]"),
        ({"a": Empty(-1, "int8")}, r"expected sizes .* at \$\['a'\]"),
        ({"a": Empty((1 << 43, 1 << 43), "int8")}, r"at most 17592186044416 bytes.* at \$\['a'\]"),
        ({"a": Empty(3, object)}, r"addresses of this process at \$\['a'\]"),
        ({"a": object()}, r"at \$\['a'\]"),
    ],
)
def test_impossible_layout_is_refused_with_its_path_and_takes_nothing(
    wrong: Any, words: str, value_key: bytes | None
) -> None:
    with Store(MB) as store:
        with pytest.raises(UnsupportedTensor, match=words):
            store.loan(value_key, wrong)
        assert blocks(store) == 0


def test_put_of_an_empty_spec_is_refused() -> None:
    with Store(MB) as store, pytest.raises(UnsupportedTensor, match=r"has no numbers yet.* at \$\['pixels'\]"):
        store.put(spec(), key=key(1))
    with pytest.raises(UnsupportedTensor, match="has no numbers yet"):
        plan(Empty(3, "int8"))
    with pytest.raises(TypeError):
        Empty((1.5,), "int8")  # type: ignore[arg-type]


def test_put_of_a_key_that_is_being_made_waits_for_the_value() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        actual: list[Any] = []

        def want(number: int) -> None:
            if number % 2:
                actual.append(other.put({"pixels": np.zeros(1000, np.int32)}, key=key(1), timeout=20))
            else:
                second = other.loan(key(1), spec(), timeout=20)
                assert isinstance(second, Lease)
                actual.append(second)

        loan = lent(store, key(1))
        with threads(*(functools.partial(want, number) for number in range(4))):
            eventually(lambda: store.stats().fills_awaited >= 4)
            assert not actual
            with pytest.raises(Timeout, match="is being written by"):
                other.loan(key(1), spec(), timeout=0.01)
            fill(loan.value(), 6)
            committed = loan.commit()
        assert [lease.ref for lease in actual] == [committed.ref] * 4
        assert all(is_whole(lease.value(), 6) for lease in actual)
        assert store.stats().puts == 1


def test_waiter_makes_an_abandoned_value() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        are_loans: list[bool] = []

        def want() -> None:
            with other.loan(key(1), spec(), timeout=20) as loaned:
                are_loans.append(isinstance(loaned, Loan))
                if isinstance(loaned, Loan):
                    fill(loaned.value(), 2)
                    loaned = loaned.commit()
                assert is_whole(loaned.value(), 2)

        loan = lent(store, key(1))
        with threads(*[want] * 4):
            eventually(lambda: store.stats().fills_awaited >= 4)
            loan.abandon()
        assert sorted(are_loans) == [False, False, False, True]


MAKING = """
    from penstock import Store
    from penstock import Empty
    store = Store.attach(sys.argv[1])
    loan = store.loan(bytes.fromhex(sys.argv[2]) or None, {"pixels": Empty(1000, "int32")})
    loan.value()["pixels"][:500] = 1
    say("half-way")
    hear()
"""


@pytest.mark.parametrize("by", ["put", "loan"])
def test_waiter_makes_the_value_of_a_dead_process(by: str) -> None:
    with Store(MB) as store, program(MAKING, store.ticket, key(1).hex()) as other:
        assert other.hear() == "half-way"
        with pytest.raises(Missing):
            store.get(key(1))
        value = {"pixels": np.full(1000, 4, np.int32), "grid": [1, 2, 3]}

        def make(timeout: float) -> Lease:
            if by == "put":
                return store.put(value, key=key(1), timeout=timeout)
            with lent(store, key(1), value, timeout) as loan:
                return loan.commit()

        with pytest.raises(Timeout, match=f"is being written by .*{other.pid}"):
            make(0.05)
        with thread(lambda: make(20)) as waiting:
            eventually(lambda: store.stats().fills_awaited >= 2)
            os.kill(other.pid, signal.SIGKILL)
            lease = waiting.ended().value
        assert isinstance(lease, Lease)
        assert (lease.value()["pixels"] == 4).all() and lease.value()["grid"] == [1, 2, 3]
        assert (store.stats().abandoned, store.stats().puts) == (1, 2)
        eventually(lambda: blocks(store) == 1)


def test_a_loan_without_a_key_of_a_dead_process_is_given_back() -> None:
    with Store(MB) as store, program(MAKING, store.ticket, "") as other:
        assert other.hear() == "half-way"
        assert blocks(store) == 1
        os.kill(other.pid, signal.SIGKILL)
        eventually(lambda: blocks(store) == 0)


def test_value_cleared_while_it_is_made_stays_with_its_maker() -> None:
    with Store(MB) as store:
        with lent(store, key(1)) as loan:
            with thread(lambda: store.put({"a": 1}, key=key(1), timeout=20)) as waiting:
                eventually(lambda: store.stats().fills_awaited > 0)
                assert store.clear() == 1
                other = waiting.ended().value
            fill(loan.value(), 8)
            committed = loan.commit()
        assert is_whole(committed.value(), 8)
        assert isinstance(other, Lease) and other.value() == store.get(key(1)).value() == {"a": 1}
        committed.release()
        assert blocks(store) == 1
