"""Tensors: copied once into a store or a message, seen where they lie, and free with the last view of all."""

import array
import copy
import ctypes
import functools
import mmap
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import Empty, Handle, Scope, Store, UnsupportedTensor, content_key
from penstock.tensor import plan, source
from penstock.tensor.kinds import KIND_OF_CODE, KIND_OF_NAME, KINDS, numpy_dtype
from tests.support.processes import threads
from tests.support.values import MB, blocks, through

SECONDS = 20
NewStore = Callable[[], Store | None]
IN_A_STORE_AND_INLINE = pytest.mark.parametrize(
    "new_store", [lambda: Store(MB), lambda: None], ids=["in a store", "inline"]
)


# ── what goes in comes out ──
def shapes() -> dict[str, NDArray[Any]]:
    whole = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    return {
        "contiguous": whole,
        "of no dimension": np.array(7.5),
        "empty": np.empty((3, 0, 2), np.float32),
        "transposed": whole.transpose(2, 0, 1),
        "planes as pixels": np.arange(3 * 5 * 7, dtype=np.int16).reshape(3, 5, 7).transpose(1, 2, 0),
        "planes as pixels, reversed": np.arange(4 * 5 * 7, dtype=">i4").reshape(4, 5, 7)[::-1, ::-1].transpose(1, 2, 0),
        "in Fortran's order": np.asfortranarray(whole),
        "strided": whole[::2, 1:4, ::3],
        "reversed": whole[::-1, :, ::-1],
        "broadcast": np.broadcast_to(np.arange(6, dtype=np.int16), (7, 6)),
        "in the other byte order": whole.astype(whole.dtype.newbyteorder()),
        "in the other byte order and strided": whole.astype(whole.dtype.newbyteorder())[:, ::2],
        "one dimension of one": np.ones((1, 1, 1)),
        "a field of records": np.zeros(5, [("a", "i1"), ("b", "f8")])["b"],
        "not aligned": np.frombuffer(bytes(range(33)), np.uint8)[1:].view(np.int64),
        "of many dimensions": np.ones((1,) * 31 + (3,)),
    }


@IN_A_STORE_AND_INLINE
@pytest.mark.parametrize("name", shapes())
def test_an_array_of_any_shape_comes_back_equal_and_contiguous(name: str, new_store: NewStore) -> None:
    store = new_store()
    source = shapes()[name]
    before = source.copy()
    back = through(store, source)
    assert back.shape == source.shape
    assert back.dtype == source.dtype.newbyteorder("=")
    assert np.array_equal(back, before)
    assert back.flags.c_contiguous
    assert not back.flags.writeable


def test_the_number_of_a_kind_on_the_wire_is_never_another() -> None:
    """A number that changes its meaning would be read wrongly by another build; new kinds go to the end."""
    assert " ".join(f"{kind.code}:{kind.name}:{kind.itemsize}" for kind in KINDS) == (
        "1:uint8:1 2:bool:1 3:int8:1 4:int16:2 5:int32:4 6:int64:8 7:uint16:2 8:uint32:4 9:uint64:8 10:float16:2 "
        "11:float32:4 12:float64:8 13:complex64:8 14:complex128:16 15:bfloat16:2 16:complex32:4 17:float8_e4m3fn:1 "
        "18:float8_e4m3fnuz:1 19:float8_e5m2:1 20:float8_e5m2fnuz:1 21:float8_e8m0fnu:1 22:float4_e2m1fn_x2:1 "
        "23:uint1:1 24:uint2:1 25:uint3:1 26:uint4:1 27:uint5:1 28:uint6:1 29:uint7:1 30:int1:1 31:int2:1 32:int3:1 "
        "33:int4:1 34:int5:1 35:int6:1 36:int7:1"
    )
    assert sorted(KIND_OF_CODE) == list(range(1, len(KINDS) + 1))


def test_dtype_unknown_to_numpy_is_shown_as_unsigned_integers() -> None:
    store = Store(MB)
    for name, width in (("bfloat16", 2), ("complex32", 4), ("float8_e4m3fn", 1), ("uint4", 1)):
        raw = bytes(range(12))
        with store.loan(None, Empty((12 // width,), name)) as loan:
            loan.value("bits").view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
            bits = loan.commit().value("bits")
        assert bits.dtype == np.dtype(f"u{width}")
        assert bits.tobytes() == raw


def test_anything_with_a_buffer_goes_in_as_the_numbers_it_says_it_has() -> None:
    store = Store(MB)
    with mmap.mmap(-1, 4096) as mapped:
        mapped[:3] = b"abc"
        for source, expected in (
            (memoryview(b"abc"), np.array([97, 98, 99], np.uint8)),
            (bytearray(b"ab"), np.array([97, 98], np.uint8)),
            (memoryview(b"abcdef")[::2], np.array([97, 99, 101], np.uint8)),
            (memoryview(b"abcd").cast("c"), np.array([97, 98, 99, 100], np.uint8)),
            (array.array("d", [1.5, 2]), np.array([1.5, 2])),
            (memoryview(bytes(8)).cast("i", (1, 2)), np.zeros((1, 2), np.int32)),
            (memoryview(mapped)[:3], np.array([97, 98, 99], np.uint8)),
            (np.float32(2.5), np.array(2.5, np.float32)),
            (bytearray(), np.empty(0, np.uint8)),
        ):
            back = through(store, source)
            assert back.dtype == expected.dtype
            assert np.array_equal(back, expected)
            del source


class Foreign:
    """An array of some other library, known by its `__dlpack__` alone."""

    def __init__(self, inner: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.inner = inner
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OnDevice:
    """An array of a library that knows CUDA and no DLPack."""

    __cuda_array_interface__ = {"shape": (2,)}  # noqa: RUF012


def test_an_array_of_another_library_goes_in_by_dlpack() -> None:
    for store in (Store(MB), None):
        for numbers in (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.array(5j), np.empty((0, 2))):
            assert np.array_equal(through(store, Foreign(numbers)), numbers)


def test_arrays_of_ml_dtypes_come_back_with_their_dtype() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    store = Store(MB)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4"):
        source = np.arange(8).astype(getattr(ml_dtypes, name))[::2]
        back = through(store, source)
        assert back.dtype == source.dtype
        assert np.array_equal(back.view("u1"), np.ascontiguousarray(source).view("u1"))
    with pytest.raises(UnsupportedTensor, match="convert it, or send its bytes"):
        store.put(np.zeros(3, ml_dtypes.float8_e3m4))


@pytest.mark.filterwarnings("ignore:Exporting an unversioned DLPack")  # NumPy asks again, without a version
def test_arrays_and_buffers_of_arrow_go_in_as_numbers_or_say_why_not() -> None:
    arrow = pytest.importorskip("pyarrow")
    store = Store(MB)
    assert through(store, arrow.array([1.5, 2.5])).tolist() == [1.5, 2.5]
    assert through(store, arrow.array([1, 2, 3], arrow.int16())[1:]).tolist() == [2, 3]
    assert through(store, arrow.py_buffer(b"ab")).tobytes() == b"ab"
    for numbers in (arrow.array([1, None]), arrow.array(["x"]), arrow.array([True])):
        with pytest.raises(UnsupportedTensor, match="does not show its numbers"):
            store.put(numbers)


@IN_A_STORE_AND_INLINE
def test_arrays_offer_read_only_dlpack(new_store: NewStore) -> None:
    store = new_store()

    class Through:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __dlpack__(self, **options: Any) -> Any:
            assert options["max_version"] >= (1, 0)
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.inner.__dlpack_device__()

    array = through(store, np.arange(6).reshape(2, 3))
    taken = np.from_dlpack(Through(array))
    assert taken.ctypes.data == array.ctypes.data
    assert np.array_equal(taken, array)
    assert not taken.flags.writeable
    with pytest.raises(BufferError):  # a consumer that asks for DLPack before 1.0 could not know
        array.__dlpack__()
    if store is not None:
        del array
        assert blocks(store) == 1
        del taken
        assert blocks(store) == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.array([object()]), "addresses of this process"),
        (np.array(["x"]), "send the text or the fields by themselves"),
        (np.array([b"x"]), "send the text or the fields by themselves"),
        (np.zeros(2, [("a", "i4")]), "send the text or the fields by themselves"),
        (np.array(["2020-01-01"], "M8[D]"), r"\.view\('int64'\)"),
        (np.ones(2, np.longdouble), "convert it"),
        (np.ma.masked_array([1, 2], [True, False]), r"send \.data and \.mask"),
        ({1, 2, 3}, "expected an array .*, got a set"),
        (range(3), "expected an array .*, got a range"),
        (object(), "expected an array .*, got a object"),
        (Foreign(np.ones(3), (2, 1)), r"device 2:1 of DLPack, not in host memory: penstock\.tensor\.cuda"),
        (Foreign(np.array(["x"])), "a Foreign does not show its numbers"),
        (OnDevice(), "a OnDevice lies on its device, not in host memory"),
        ((ctypes.c_void_p * 2)(), "a c_void_p_Array_2 of format '<P': '<P' is not a valid PEP 3118 buffer format"),
    ],
    ids=lambda parameter: None if isinstance(parameter, str) else type(parameter).__name__,
)
def test_unsupported_tensor_is_refused_with_advice(source: Any, words: str) -> None:
    with Store(MB) as store:
        for put in (store.put, Scope(store).put, Scope().put):
            with pytest.raises(UnsupportedTensor, match=words):
                put(source)
        assert blocks(store) == 0


def test_more_dimensions_than_every_numpy_has_are_refused() -> None:
    view = memoryview(bytes(4)).cast("B", (1,) * 31 + (4,))
    assert through(Store(MB), view).shape == (1,) * 31 + (4,)
    with pytest.raises(UnsupportedTensor, match="at most 32 dimensions, got 33"):
        plan(Empty((1,) * 33, "uint8"), is_filled_later=True)


# ── copies, and their number ──
def test_later_writes_of_the_sender_do_not_change_the_value() -> None:
    for store in (Store(MB), None):
        for nbytes in (8, 80_000):
            source = np.zeros(nbytes // 8)
            with Scope(store, inline_nbytes=0) as scope:
                handle = scope.put(source)
                source[:] = 1
                assert not handle.open(store).value().any()


def test_only_what_a_view_shows_of_its_storage_is_copied() -> None:
    store = Store(MB)
    whole = np.zeros((1000, 1000), np.uint8)
    lease = store.put(whole[::100, :50])
    assert lease.nbytes == 64 + 500  # the layout has 64
    assert store.stats().pool.taken_nbytes == 64 + 512
    assert 500 < Scope().put(whole[::100, :50]).nbytes < 564


def test_unknown_view_library_is_refused() -> None:
    for lease in (Store(MB).put(np.zeros(3)), Scope().put(np.zeros(3)).open()):
        with pytest.raises(ValueError, match="expected as_ to be"):
            lease.value("jax")  # type: ignore[arg-type]


# ── leases ──


def test_views_in_many_threads_each_hold_the_block() -> None:
    store = Store(MB)
    lease = store.put(np.arange(1000))
    handle = Handle(None, lease.ref)
    start = threading.Barrier(4)

    def look(value: Callable[[], Any]) -> None:
        start.wait(SECONDS)
        for _ in range(200):
            assert value()[::7].sum() == 71071

    ways: list[Callable[[], Any]] = [
        lease.value,
        lambda: lease.hold().value(),
        lambda: handle.open(store).value(),
        lambda: lease.value(writable=True),
    ]
    with threads(*(functools.partial(look, way) for way in ways)):
        pass
    assert blocks(store) == 1
    lease.release()
    assert blocks(store) == 0


def test_a_writable_view_is_a_copy_and_holds_nothing() -> None:
    store = Store(MB)
    with store.put(np.arange(100)) as lease:
        own = lease.value(writable=True)
        own[:] = 0
        assert lease.value()[99] == 99
    assert blocks(store) == 0
    assert not own.any()


def test_pickling_a_view_sends_its_bytes_and_never_the_lease() -> None:
    store = Store(MB)
    array = through(store, np.arange(1000))
    part = pickle.loads(pickle.dumps(array[5:7]))
    copied = copy.deepcopy(array)
    assert len(pickle.dumps(array[5:7])) < 500
    del array
    assert blocks(store) == 0
    assert part.tolist() == [5, 6]
    assert copied[999] == 999
    with pytest.raises(TypeError, match="only while a process is being spawned"):
        pickle.dumps(store)


# ── what is received is not believed ──
@IN_A_STORE_AND_INLINE
def test_bool_bytes_other_than_0_and_1_are_kept_and_count_as_true(new_store: NewStore) -> None:
    store = new_store()
    source = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    array = through(store, source)
    assert array.view(np.uint8).tolist() == [0, 1, 2, 255]
    assert np.flatnonzero(array).tolist() == [1, 2, 3] and np.arange(4)[array].tolist() == [1, 2, 3]


# ── between processes ──
def test_content_of_either_byte_order_has_one_key() -> None:
    for numbers in (np.arange(3), np.empty(0)):
        swapped = numbers.astype(numbers.dtype.newbyteorder())
        assert content_key(swapped) == content_key(numbers)


def test_a_kind_that_numpy_lacks_is_shown_as_ml_dtypes_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named = types.SimpleNamespace(bfloat16=np.dtype("V2"), float8_e5m2=np.dtype("V2"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", named)
    show = numpy_dtype.__wrapped__
    assert show(KIND_OF_NAME["bfloat16"]) == np.dtype("V2")
    assert show(KIND_OF_NAME["float8_e5m2"]) == np.uint8, "a dtype of another size is none of this kind"
    assert show(KIND_OF_NAME["complex32"]) == np.uint32


def test_an_array_of_a_dtype_that_numpy_lacks_goes_in_as_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "kind_of_numpy", lambda dtype: KIND_OF_NAME["bfloat16"])
    bits = np.array([0x3F80, 0x4000], np.uint16)
    assert through(Store(MB), bits, as_="bits").tolist() == bits.tolist()
