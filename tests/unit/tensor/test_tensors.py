"""Tensors: as references in messages, copied in once, seen where they lie, and free with the last view of all."""

import array
import copy
import mmap
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock import DecodeError, MemoryExhausted, PeerDied, _native
from penstock.lowlevel import Pool, Ref, StaleRef
from penstock.tensor import TensorRef, Tensors, UnsupportedTensor
from penstock.tensor.kinds import KIND_OF_CODE, KINDS
from tests.conftest import eventually, spawn
from tests.support.processes import thread

SECONDS = 20


class Image(msgspec.Struct, array_like=True, frozen=True):
    number: int
    pixels: TensorRef
    more: list[TensorRef] = []


class Seen(msgspec.Struct, array_like=True, frozen=True):
    number: int
    total: float


def new_pool() -> tuple[Pool, Tensors]:
    """A pool, and tensors that all lie in it, however small."""
    pool = Pool.create(1 << 20, name="tensors")
    pool.join()
    return pool, Tensors(pool, inline_nbytes=0)


def blocks(pool: Pool) -> int:
    return pool.stats().blocks


def there_and_back(tensors: Tensors, given: Any, **options: Any) -> Any:
    assert tensors.pool is not None
    return tensors.view(tensors.put(given, [tensors.pool.peer]), **options)


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


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 16])
@pytest.mark.parametrize("name", shapes())
def test_an_array_of_any_shape_comes_back_equal_and_contiguous(name: str, inline_nbytes: int) -> None:
    pool, _ = new_pool()
    given = shapes()[name]
    before = given.copy()
    back = there_and_back(Tensors(pool, inline_nbytes=inline_nbytes), given)
    assert back.shape == given.shape
    assert back.dtype == given.dtype.newbyteorder("=")
    assert np.array_equal(back, before)
    assert back.flags.c_contiguous
    assert not back.flags.writeable


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.numpy is not None], ids=lambda kind: kind.name)
def test_every_kind_of_number_that_numpy_has_comes_back_as_it_was(seed: int, kind: Any) -> None:
    _, tensors = new_pool()
    raw = np.random.default_rng(seed).integers(0, 2 if kind.name == "bool" else 256, 24 * kind.itemsize, np.uint8)
    given = raw.view(kind.numpy).reshape(2, 3, 4)
    back = there_and_back(tensors, given)
    assert back.dtype == given.dtype
    assert back.tobytes() == given.tobytes()


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


def test_a_kind_that_numpy_has_no_word_for_is_seen_as_unsigned_integers_of_the_same_width() -> None:
    _, tensors = new_pool()
    for name, width in (("bfloat16", 2), ("complex32", 4), ("float8_e4m3fn", 1), ("uint4", 1)):
        raw = bytes(range(12))
        seen = tensors.view(TensorRef.of(name, (12 // width,), raw), "bits")
        assert seen.dtype == np.dtype(f"u{width}")
        assert seen.tobytes() == raw


def test_anything_with_a_buffer_goes_in_as_the_numbers_it_says_it_has() -> None:
    _, tensors = new_pool()
    with mmap.mmap(-1, 4096) as mapped:
        mapped[:3] = b"abc"
        for given, expected in (
            (b"abc", np.array([97, 98, 99], np.uint8)),
            (bytearray(b"ab"), np.array([97, 98], np.uint8)),
            (memoryview(b"abcdef")[::2], np.array([97, 99, 101], np.uint8)),
            (memoryview(b"abcd").cast("c"), np.array([97, 98, 99, 100], np.uint8)),
            (array.array("d", [1.5, 2]), np.array([1.5, 2])),
            (memoryview(bytes(8)).cast("i", (1, 2)), np.zeros((1, 2), np.int32)),
            (memoryview(mapped)[:3], np.array([97, 98, 99], np.uint8)),
            (np.float32(2.5), np.array(2.5, np.float32)),
            (b"", np.empty(0, np.uint8)),
        ):
            back = there_and_back(tensors, given)
            assert back.dtype == expected.dtype
            assert np.array_equal(back, expected)
            del given


class Foreign:
    """An array of some other library, known by its `__dlpack__` alone."""

    def __init__(self, inner: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.inner = inner
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_an_array_of_another_library_goes_in_by_dlpack() -> None:
    _, tensors = new_pool()
    for given in (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.array(5j), np.empty((0, 2))):
        assert np.array_equal(there_and_back(tensors, Foreign(given)), given)


def test_numbers_of_ml_dtypes_go_in_as_what_torch_calls_them_and_come_out_as_they_were() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    _, tensors = new_pool()
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4"):
        given = np.arange(8).astype(getattr(ml_dtypes, name))[::2]
        back = there_and_back(tensors, given)
        assert back.dtype == given.dtype
        assert np.array_equal(back.view("u1"), np.ascontiguousarray(given).view("u1"))
    with pytest.raises(UnsupportedTensor, match="no other process would know it"):
        tensors.put(np.zeros(3, ml_dtypes.float8_e3m4), [])


@pytest.mark.filterwarnings("ignore:Exporting an unversioned DLPack")  # NumPy asks again, without a version
def test_arrays_and_buffers_of_arrow_go_in_as_numbers_or_say_why_not() -> None:
    arrow = pytest.importorskip("pyarrow")
    _, tensors = new_pool()
    assert there_and_back(tensors, arrow.array([1.5, 2.5])).tolist() == [1.5, 2.5]
    assert there_and_back(tensors, arrow.array([1, 2, 3], arrow.int16())[1:]).tolist() == [2, 3]
    assert there_and_back(tensors, arrow.py_buffer(b"ab")).tobytes() == b"ab"
    for given in (arrow.array([1, None]), arrow.array(["x"]), arrow.array([True])):
        with pytest.raises(UnsupportedTensor, match="does not show its numbers"):
            tensors.put(given, [])


def test_what_comes_out_offers_dlpack_and_says_that_it_is_read_only() -> None:
    _, tensors = new_pool()

    class Through:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __dlpack__(self, **options: Any) -> Any:
            assert options["max_version"] >= (1, 0)
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.inner.__dlpack_device__()

    seen = there_and_back(tensors, np.arange(6).reshape(2, 3))
    taken = np.from_dlpack(Through(seen))
    assert taken.ctypes.data == seen.ctypes.data
    assert np.array_equal(taken, seen)
    assert not taken.flags.writeable
    with pytest.raises(BufferError):  # a consumer that asks for DLPack before 1.0 could not know
        seen.__dlpack__()
    assert tensors.pool is not None
    del seen
    assert blocks(tensors.pool) == 1
    del taken
    assert blocks(tensors.pool) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.array([object()]), "addresses of this process"),
        (np.array(["x"]), "text or its fields by themselves"),
        (np.array([b"x"]), "text or its fields by themselves"),
        (np.zeros(2, [("a", "i4")]), "text or its fields by themselves"),
        (np.array(["2020-01-01"], "M8[D]"), r"\.view\('int64'\)"),
        (np.ones(2, np.longdouble), "convert it"),
        (np.ma.masked_array([1, 2], [True, False]), r"send \.data and \.mask"),
        ([1, 2, 3], "a list is no array"),
        ("text", "a str is no array"),
        (None, "a NoneType is no array"),
        (Foreign(np.ones(3), (2, 1)), r"device 2:1 of DLPack, not in host memory: penstock\.tensor\.cuda"),
    ],
    ids=lambda given: None if isinstance(given, str) else type(given).__name__,
)
def test_what_cannot_be_sent_is_refused_and_the_error_says_what_to_do(given: Any, words: str) -> None:
    pool, tensors = new_pool()
    with pytest.raises(UnsupportedTensor, match=words):
        tensors.put(given, [pool.peer])
    assert blocks(pool) == 0


def test_more_dimensions_than_every_numpy_has_are_refused() -> None:
    _, tensors = new_pool()
    view = memoryview(bytes(4)).cast("B", (1,) * 31 + (4,))
    assert there_and_back(tensors, view).shape == (1,) * 31 + (4,)
    with pytest.raises(ValueError, match="at most 32 dimensions, got 33"):
        TensorRef.of("uint8", (1,) * 33, b"x")


# ── copies, and their number ──
def test_what_the_sender_writes_afterwards_is_not_seen() -> None:
    pool, _ = new_pool()
    for nbytes in (8, 80_000):
        for inline_nbytes in (0, 1 << 20):
            given = np.zeros(nbytes // 8)
            some = Tensors(pool, inline_nbytes=inline_nbytes)
            ref = some.put(given, [pool.peer])
            given[:] = 1
            assert not some.view(ref).any()


def test_only_what_a_view_shows_of_its_storage_is_copied() -> None:
    pool, tensors = new_pool()
    whole = np.zeros((1000, 1000), np.uint8)
    ref = tensors.put(whole[::100, :50], [pool.peer])
    assert ref.nbytes == 500
    assert pool.stats().taken_nbytes == 512
    tensors.drop(ref)


def test_a_small_tensor_travels_in_its_reference_and_a_large_one_in_the_pool() -> None:
    pool, _ = new_pool()
    tensors = Tensors(pool, inline_nbytes=100)
    small, large = tensors.put(np.zeros(100, np.uint8), []), tensors.put(np.zeros(101, np.uint8), [pool.peer])
    assert (small.is_inline, large.is_inline) == (True, False)
    assert (small.nbytes, large.nbytes) == (100, 101)
    assert (tensors.stats.puts, tensors.stats.inline, tensors.stats.put_nbytes) == (2, 1, 201)
    assert Tensors(pool, inline_nbytes=0).put(np.empty(0), []).is_inline  # nothing needs no block
    tensors.drop(large)
    assert blocks(pool) == 0


def test_without_a_pool_or_without_room_tensors_travel_inline_and_are_counted() -> None:
    pool, _ = new_pool()
    without = Tensors(None, inline_nbytes=0)
    ref = without.put(np.arange(1000), [])
    assert ref.is_inline
    assert np.array_equal(without.view(ref), np.arange(1000))
    assert without.stats.overflowed == 1
    tensors = Tensors(pool)
    with pool.take(pool.stats().nbytes):
        ref = tensors.put(np.arange(100_000), [pool.peer])
        assert ref.is_inline
        assert tensors.stats.overflowed == 1
        assert np.array_equal(tensors.view(ref), np.arange(100_000))
        strict = Tensors(pool, overflow="raise")
        with pytest.raises(MemoryExhausted, match="does not fit pool 'tensors'"):
            strict.put(np.arange(100_000), [pool.peer])
    assert not tensors.put(np.arange(100_000), [pool.peer]).is_inline
    with pytest.raises(MemoryExhausted, match="no pool"):
        Tensors(None, overflow="raise").put(np.arange(100_000), [])
    with pytest.raises(ValueError, match="there is no pool here"):
        without.view(TensorRef.of("uint8", (1,), Ref(1, 1, 1, 0, 1)))


def test_putting_waits_for_room_as_long_as_it_is_told() -> None:
    pool, _ = new_pool()
    strict = Tensors(pool, overflow="raise")
    with pool.take(pool.stats().nbytes) as lease:
        with pytest.raises(MemoryExhausted):
            strict.put(np.zeros(10_000), [pool.peer], timeout=0.01)
        with thread(lambda: strict.put(np.ones(10_000), [pool.peer], timeout=SECONDS)) as putting:
            eventually(lambda: strict.stats.puts == 2)
            assert putting.is_alive()
            lease.release()
    assert isinstance(putting.value, TensorRef)
    assert strict.view(putting.value).sum() == 10_000


def test_options_are_checked_where_they_enter() -> None:
    pool, _ = new_pool()
    with pytest.raises(ValueError, match="overflow is"):
        Tensors(pool, overflow="block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inline_nbytes is"):
        Tensors(pool, inline_nbytes=-1)
    with pytest.raises(ValueError, match="as_ is"):
        Tensors(pool).view(TensorRef.of("uint8", (1,), b"x"), "jax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nobody would hold the copy"):
        Tensors(pool).put(np.zeros(10_000), [])
    assert blocks(pool) == 0


# ── made in place ──
def test_an_array_made_in_the_pool_is_shared_without_a_copy() -> None:
    pool, tensors = new_pool()
    made = tensors.empty((100, 50), np.float32)
    assert blocks(pool) == 1
    made[:] = np.arange(5000).reshape(100, 50)
    takes = pool.stats().takes
    ref = tensors.share(made, [pool.peer])
    assert (ref.dtype, ref.shape) == ("float32", (100, 50))
    with pytest.raises(ValueError, match="read-only"):
        made[0, 0] = 1
    del made
    assert blocks(pool) == 1  # the grant holds it
    seen = tensors.view(ref)
    assert np.array_equal(seen, np.arange(5000, dtype=np.float32).reshape(100, 50))
    assert pool.stats().takes == takes
    assert tensors.stats.shares == 1
    del seen
    assert blocks(pool) == 0


@pytest.mark.parametrize("made", [lambda array: array.view(np.recarray), memoryview], ids=["subclass", "memoryview"])
def test_what_others_make_of_a_shared_array_cannot_be_written_either(made: Any) -> None:
    pool, tensors = new_pool()
    with pool:
        whole = tensors.empty((1 << 16,), np.uint8)
        other = made(whole)
        tensors.share(other)
        assert not whole.flags.writeable
        assert not np.asarray(other).flags.writeable or isinstance(other, memoryview)
        del whole, other


def test_a_contiguous_part_of_an_array_in_the_pool_is_shared_by_itself() -> None:
    pool, tensors = new_pool()
    made = tensors.empty((10, 100), "int16")
    made[:] = np.arange(1000).reshape(10, 100)
    for part in (made[3:5], made[4], made.reshape(-1)[7:9], made.view(np.uint8)[1], made[2, 3:4], made[:, :][9:]):
        ref = tensors.share(part)
        assert (ref.nbytes, ref.shape) == (part.nbytes, part.shape)
        assert np.array_equal(tensors.view(ref), part)
    with pytest.raises(ValueError, match="not contiguous"):
        tensors.share(made[:, ::2])
    with pytest.raises(ValueError, match="not contiguous"):
        tensors.share(made.T)
    with pytest.raises(ValueError, match="other byte order"):
        tensors.share(made.view(made.dtype.newbyteorder()), [pool.peer])
    beyond = np.lib.stride_tricks.as_strided(made, (11, 100))
    with pytest.raises(ValueError, match="does not lie in this pool"):
        tensors.share(beyond, [pool.peer])
    del part, made, beyond
    assert blocks(pool) == 0


def test_only_an_array_of_this_pool_is_shared_where_it_lies() -> None:
    pool, tensors = new_pool()
    seen = there_and_back(tensors, np.arange(10))
    with Pool.create(1 << 16) as elsewhere:
        for other in (
            np.arange(10),
            Tensors(elsewhere, inline_nbytes=0).empty(10, int),
            seen,
            tensors.empty(1, int)[:0],
        ):
            if other.size:
                with pytest.raises(ValueError, match="does not lie in this pool"):
                    tensors.share(other)
            else:
                assert tensors.share(other).is_inline
        del other
    gone = tensors.empty(10, int)
    address = gone.ctypes.data
    del gone
    assert _native.lease_of(pool.place, address, 1) is None


def test_a_small_array_made_for_the_pool_is_a_plain_one_and_travels_inline() -> None:
    pool, _ = new_pool()
    tensors = Tensors(pool, inline_nbytes=64)
    made = tensors.empty(8, np.int64)
    made[:] = 3
    ref = tensors.share(made, [pool.peer])
    made[:] = 4
    assert ref.is_inline
    assert tensors.view(ref).tolist() == [3] * 8
    assert blocks(pool) == 0


def test_there_is_no_room_for_an_array_in_the_pool_and_the_error_says_so() -> None:
    pool, _ = new_pool()
    with pytest.raises(MemoryExhausted, match="does not fit pool 'tensors'"):
        Tensors(pool).empty(1 << 24, np.uint8)
    with pytest.raises(MemoryExhausted, match="no pool"):
        Tensors(None).empty(1 << 24, np.uint8)
    for shape in (-1, (3, -1), (1 << 43, 1 << 43)):
        with pytest.raises(ValueError):
            Tensors(pool).empty(shape, np.uint8)
    with pytest.raises(UnsupportedTensor):
        Tensors(pool).empty(3, object)


# ── leases ──
def test_the_block_is_free_with_the_last_view_of_it() -> None:
    pool, tensors = new_pool()

    def views(seen: NDArray[Any]) -> Iterator[Any]:
        yield seen
        yield seen[10:20]
        yield seen.reshape(10, -1)[::2]
        yield seen.T
        yield seen.view(np.uint8)[3:]
        yield memoryview(seen)[1:]
        yield np.from_dlpack(seen)
        yield iter(seen)
        yield seen.flat
        yield np.broadcast_to(seen[:1], (5, 5))

    for index in range(10):
        ref = tensors.put(np.arange(100), [pool.peer])
        view = next(one for number, one in enumerate(views(tensors.view(ref))) if number == index)
        assert blocks(pool) == 1
        del view
        assert blocks(pool) == 0, index


def test_views_in_many_threads_each_hold_the_block() -> None:
    pool, tensors = new_pool()
    ref = tensors.put(np.arange(1000), [pool.peer])
    first = tensors.view(ref)
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def look() -> None:
        try:
            start.wait(SECONDS)
            for _ in range(200):
                assert tensors.view(ref)[::7].sum() == 71071
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(SECONDS)
    assert not failures
    assert blocks(pool) == 1
    del first
    assert blocks(pool) == 0


def test_a_writable_view_is_a_copy_and_holds_nothing() -> None:
    pool, tensors = new_pool()
    ref = tensors.put(np.arange(100), [pool.peer, pool.peer])
    own = tensors.view(ref, writable=True)
    own[:] = 0
    assert tensors.view(ref)[99] == 99
    assert blocks(pool) == 0
    assert not own.any()


def test_pickling_a_view_sends_its_bytes_and_never_the_lease() -> None:
    pool, tensors = new_pool()
    seen = there_and_back(tensors, np.arange(1000))
    part = pickle.loads(pickle.dumps(seen[5:7]))
    copied = copy.deepcopy(seen)
    assert len(pickle.dumps(seen[5:7])) < 500
    del seen
    assert blocks(pool) == 0
    assert part.tolist() == [5, 6]
    assert copied[999] == 999
    with pytest.raises(TypeError, match="only while a process is being spawned"):
        pickle.dumps(tensors)


def test_what_is_dropped_unread_or_taken_back_is_free() -> None:
    pool, tensors = new_pool()
    for let_go in (tensors.drop, lambda ref: tensors.revoke(ref, [pool.peer])):
        ref = tensors.put(np.arange(100), [pool.peer])
        assert blocks(pool) == 1
        let_go(ref)
        assert blocks(pool) == 0
    tensors.drop(ref)  # gone already
    tensors.drop(TensorRef.of("uint8", (1,), b"x"))
    tensors.revoke(TensorRef.of("uint8", (1,), b"x"), [pool.peer])


def test_a_copy_for_somebody_who_is_gone_is_an_error_and_holds_nothing() -> None:
    pool, tensors = new_pool()
    with Pool.attach(pool.ticket, peer_name="gone") as other:
        gone = other.join()
    eventually(lambda: gone.index not in [peer.index for peer in pool.peers() if peer.state == "live"])
    with pytest.raises(PeerDied):
        tensors.put(np.arange(100), [pool.peer, gone])
    assert blocks(pool) == 0


# ── what is received is not believed ──
def test_a_stale_or_forged_reference_is_an_error() -> None:
    pool, tensors = new_pool()
    ref = tensors.put(np.arange(100), [pool.peer])
    where = ref.where
    assert isinstance(where, Ref)
    for change in (
        {"segment": 1},
        {"block": 1 << 20},
        {"block": -1},
        {"generation": where.generation + 1},
        {"generation": 1 << 70},
        {"offset": where.offset + 8},
        {"offset": -8},
        {"offset": 1 << 63},
    ):
        with pytest.raises(StaleRef):
            tensors.view(TensorRef(ref.code, ref.shape, msgspec.structs.replace(where, **change)))
    longer = TensorRef(ref.code, (101,), msgspec.structs.replace(where, nbytes=808))
    with pytest.raises(StaleRef, match="outside its block"):
        tensors.view(longer)
    assert tensors.view(ref)[99] == 99
    with pytest.raises(StaleRef):
        tensors.view(ref)


def test_a_reference_that_does_not_begin_where_its_numbers_may_is_seen_through_a_copy() -> None:
    pool, tensors = new_pool()
    ref = tensors.put(np.arange(100, dtype=np.uint8), [pool.peer])
    assert isinstance(ref.where, Ref)
    seen = tensors.view(TensorRef.of("int64", (3,), ref.where.slice(1, 24)))
    assert seen.flags.aligned
    assert not seen.flags.writeable
    assert seen.tobytes() == bytes(range(1, 25))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, (1,), b"x"), "the number of a dtype, 1 to 36, got 0"),
        ((37, (1,), b"x"), "the number of a dtype"),
        ((-1, (1,), b"x"), "the number of a dtype"),
        ((1, (2,), b"x"), r"expected 2 bytes for uint8 \(2,\), got 1"),
        ((5, (1,), b"xyz"), "expected 4 bytes for int32"),
        ((1, (-1, -1), b"x"), "sizes from 0"),
        ((1, (0, -1), b""), "sizes from 0"),
        ((1, (1 << 62, 1 << 62), b""), "sizes from 0"),
        ((1, (1 << 32, 1 << 32), b""), "at most 17592186044416 bytes"),
        ((1, (0, 1 << 40, 1 << 40), b""), "at most 17592186044416 bytes"),
        ((1, (1 << 32, 1 << 32), Ref(1, 1, 1, 0, 0)), "at most 17592186044416 bytes"),
        ((1, (4,), Ref(1, 1, 1, 0, 3)), "expected 4 bytes"),
        ((1, (1,) * 33, b"x"), "at most 32 dimensions"),
        ((2, (3,), b"\x00\x01\x02"), "expected 0 and 1"),
    ],
)
def test_a_reference_that_contradicts_itself_is_refused_where_it_is_made_and_where_it_is_received(
    fields: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        TensorRef(*fields)
    channel = penstock.Ring(Image)
    with channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        sender.send(Image(1, TensorRef.of("uint8", (1,), b"x")))
        receiver.receive(timeout=SECONDS)
        forged = TensorRef.of("uint8", (1,), b"x")
        for name, value in zip(("code", "shape", "where"), fields, strict=True):
            msgspec.structs.force_setattr(forged, name, value)
        sender.send(Image(2, TensorRef.of("uint8", (1,), b"y"), [forged]))
        with pytest.raises(DecodeError, match=words) as told:
            receiver.receive(timeout=SECONDS)
        assert "$.more[0]" in str(told.value)


def test_bytes_that_are_neither_false_nor_true_are_refused_inline_and_true_where_they_lie() -> None:
    pool, tensors = new_pool()
    given = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    seen = tensors.view(tensors.put(given, [pool.peer]))
    assert seen.view(np.uint8).tolist() == [0, 1, 2, 255]
    assert np.flatnonzero(seen).tolist() == [1, 2, 3] and np.arange(4)[seen].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="other bytes as bool"):
        Tensors(None).put(given, [])


def test_references_with_bytes_changed_at_random_are_views_within_the_pool_or_errors(seed: int) -> None:
    pool, tensors = new_pool()
    rng = random.Random(seed)
    held = tensors.empty((3, 4, 5), np.float32)
    held[:] = 1
    encoded = msgspec.msgpack.encode(tensors.share(held, [pool.peer]))
    decoder = msgspec.msgpack.Decoder(TensorRef)
    outcomes = {"seen": 0, "refused": 0}
    for _ in range(20_000):
        forged = bytearray(encoded)
        for _ in range(rng.randrange(1, 3)):
            forged[rng.randrange(len(forged))] = rng.randrange(256)
        try:
            seen = tensors.view(decoder.decode(forged), "bits")
            assert seen.nbytes <= held.nbytes
            seen.sum()
            outcomes["seen"] += 1
        except (msgspec.ValidationError, msgspec.DecodeError, StaleRef, UnicodeDecodeError):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes


# ── between processes ──
def sum_up(images: Any, answers: Any, tickets: Pool) -> None:
    tensors = Tensors(tickets)
    tickets.join("worker")
    with (
        penstock.attach(images, Image).open_receiver() as receiver,
        penstock.attach(answers, Seen).open_sender() as sender,
    ):
        for image in receiver:
            pixels = tensors.view(image.pixels)
            total = pixels.sum() + sum(tensors.view(one).sum() for one in image.more)
            del pixels
            sender.send(Seen(image.number, float(total)), timeout=SECONDS)


def test_a_message_with_tensors_is_an_ordinary_message() -> None:
    pool, _ = new_pool()
    images, answers = penstock.Ring(Image), penstock.Ring(Seen)
    tensors = Tensors(pool)
    pool.join("sender")
    with images, answers, images.open_sender() as sender, answers.open_receiver() as receiver:
        with spawn(sum_up, str(images.ticket), str(answers.ticket), pool):
            worker = eventually(lambda: [peer for peer in pool.peers() if peer.name == "worker"], SECONDS)
            for number in range(50):
                given = np.full((number * 10, 7), number, np.float32)
                made = tensors.empty((300, 10), np.int64)
                made[:] = number
                small = np.arange(number)
                sender.send(
                    Image(
                        number, tensors.put(given, worker), [tensors.share(made, worker), tensors.put(small, worker)]
                    ),
                    timeout=SECONDS,
                )
                del made
                answer = receiver.receive(timeout=SECONDS)
                assert answer == Seen(number, number * number * 70 + 3000 * number + number * (number - 1) / 2)
            eventually(lambda: blocks(pool) == 0)
            ref = tensors.put(np.zeros(10_000), worker)
            assert blocks(pool) == 1
        eventually(lambda: blocks(pool) == 0)  # what was granted to the dead is given back
        with pytest.raises(StaleRef):
            tensors.view(ref)
