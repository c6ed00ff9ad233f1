"""One store for all processes: each process reads the values, and held values stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Handle, Lease, MemoryExhausted, Missing, Store, UnsupportedTensor, content_key, lowlevel
from penstock.lowlevel import StaleRef
from penstock.tensor import plan
from tests.conftest import eventually
from tests.support.processes import forked, program, state_of, thread
from tests.support.values import MB, blocks, key


def tree(number: int, nbytes: int = 1000) -> dict[str, Any]:
    return {
        "pixels": np.full(nbytes // 4, number, np.int32),
        "grid": [1, 2, number],
        "name": f"image {number}",
        "mask": (np.ones(3, np.bool_), None),
    }


def holds(value: Any, number: int) -> bool:
    return bool(
        (value["pixels"] == number).all()
        and value["grid"] == [1, 2, number]
        and value["name"] == f"image {number}"
        and value["mask"][0].all()
        and value["mask"][1] is None
    )


def opened(store: Store, ref: lowlevel.Ref) -> Lease:
    return Lease(store.pool.open(ref))


def test_value_is_read_by_each_process_without_a_copy() -> None:
    with Store(4 * MB) as store, Store.attach(store.ticket) as other:
        put = store.put(tree(1, MB), key=key(1))
        for peer in (store, other):
            with peer.get(key(1)) as actual:
                value = actual.value()
                assert holds(value, 1)
                assert not value["pixels"].flags.writeable and not value["pixels"].flags.owndata
                assert value["pixels"].ctypes.data % 64 == 0
        del value
        assert holds(put.value(), 1)
        assert blocks(store) == 1
        put.release()
        assert holds(other.get(key(1)).value(), 1), "gone with its last lease"


def test_get_of_an_unknown_key_raises_missing() -> None:
    with Store(MB) as store:
        with pytest.raises(Missing, match="'store' keeps nothing under 0000"):
            store.get(key(7))
        with pytest.raises(KeyError):
            store.get(key(7))
        store.put(tree(1), key=key(1))
        assert holds(store.get(key(1)).value(), 1)
        assert store.stats().misses == 1  # of the value that was put
        assert store.remove(key(1)) and not store.remove(key(1))
        with pytest.raises(Missing):
            store.get(key(1))
        assert blocks(store) == 0


@pytest.mark.parametrize("wrong", [b"", b"x" * 31, b"x" * 33, "x" * 32, 7, bytearray(32)])
def test_a_key_is_32_bytes(wrong: Any) -> None:
    with Store(MB) as store:
        for use in (lambda name: store.put(1, key=name), store.get, store.open, store.remove, store.evict):
            with pytest.raises(ValueError, match="expected a key of 32 bytes"):
                use(wrong)
        assert blocks(store) == 0


def test_eviction_takes_unheld_values_least_recently_used_first() -> None:
    with Store(MB) as store:
        nbytes = store.put(
            tree(100, 100_000), key=key(100)
        ).nbytes  # names of three digits, so that all are of one size
    extent = -(-nbytes // 64) * 64
    with Store(8 * extent, max_items=64) as store:
        held = store.put(tree(100, 100_000), key=key(100))
        array = held.value()["pixels"]
        held.release()  # the array still holds it
        for number in range(101, 108):
            store.put(tree(number, 100_000), key=key(number)).release()
        store.get(key(101)).release()  # used again
        for number, gone in ((120, 102), (121, 103), (122, 104)):
            store.put(tree(number, 100_000), key=key(number)).release()
            with pytest.raises(Missing):
                store.get(key(gone))
        left = {int.from_bytes(item.key, "big") for item in store.stats().items}
        assert left == {100, 101, 105, 106, 107, 120, 121, 122}
        assert (array == 100).all()
        assert (store.stats().evictions, store.stats().evicted_nbytes) == (3, 3 * extent)


@pytest.mark.parametrize("meanwhile", ["held", "put again", "nothing"])
def test_chosen_value_stays_when_it_is_held_or_put_meanwhile(meanwhile: str) -> None:
    source = """
        import numpy as np
        from penstock import _native, MemoryExhausted
        from penstock import Store
        store = Store.attach(sys.argv[1])
        store.pool.join()
        _native.arm_point("store.chosen", "stop", 1)
        try:
            store.put({"pixels": np.zeros(150_000, np.int32)}, key=bytes(32), timeout=0)
            say("put")
        except MemoryExhausted:
            say("full")
    """
    with Store(MB) as store:
        store.put(tree(1, 600_000), key=key(1)).release()
        with program(source, store.ticket) as other:
            eventually(other.is_stopped, 20)
            held = store.get(key(1)) if meanwhile == "held" else None
            if meanwhile == "put again":  # in the same block, perhaps, and another value in any case
                store.remove(key(1))
                held = store.put(tree(2, 600_000), key=key(1))
            os.kill(other.pid, signal.SIGCONT)
            assert other.hear() == ("put" if held is None else "full")
        if held is None:
            with pytest.raises(Missing):
                store.get(key(1))
        else:
            assert holds(store.get(key(1)).value(), 2 if meanwhile == "put again" else 1)
        stats = store.stats()
        assert len(stats.items) == 1 and stats.evictions == (held is None)


def test_full_store_names_the_holders() -> None:
    with Store(MB, peer_name="holder") as store:
        held = [store.put(tree(number, 300_000), key=key(number)) for number in range(3)]
        with pytest.raises(MemoryExhausted, match=r"'holder' \(pid \d+\) holds"):
            store.put(tree(9, 300_000), key=key(9), timeout=0.01)
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
            store.put(tree(9, 2 * MB), key=key(9))
        with pytest.raises(Missing):
            store.get(key(9))
        held.pop().release()
        store.put(tree(9, 300_000), key=key(9))


def test_unsupported_value_leaves_no_block() -> None:
    with Store(MB) as store:
        with pytest.raises(UnsupportedTensor, match=r"at \$\['a'\]\[0\]"):
            store.put({"a": [object()]}, key=key(1))
        assert blocks(store) == 0

        class Late(np.ndarray):
            pass

        array = np.zeros(10).view(Late)
        holds_on = store.put({"x": array}, key=key(1))
        assert np.array_equal(holds_on.value()["x"], np.zeros(10))


@pytest.mark.parametrize("value_key", [key(1), None], ids=["with a key", "without a key"])
def test_a_writer_that_fails_half_way_leaves_the_key_to_others(
    monkeypatch: pytest.MonkeyPatch, value_key: bytes | None
) -> None:
    from penstock.tensor import tree as trees

    def fail(*_: Any) -> None:
        raise OSError("half-way")

    with Store(MB) as store:
        with monkeypatch.context() as patch:
            patch.setattr(trees.Plan, "write", fail)
            with pytest.raises(OSError, match="half-way"):
                store.put(tree(1), key=value_key)
        assert blocks(store) == 0
        assert holds(store.put(tree(1), key=value_key, timeout=0.1).value(), 1)
        assert store.stats().abandoned == (value_key is not None)


@pytest.mark.parametrize("take_out", [Store.clear, lambda store: store.remove(key(1))], ids=["clear", "remove"])
def test_held_value_outlives_its_key(take_out: Callable[[Store], int]) -> None:
    with Store(MB) as store:
        array = store.put(tree(1), key=key(1)).value()["pixels"]
        assert take_out(store) == 1
        with pytest.raises(Missing):
            store.get(key(1))
        second = store.put(tree(5), key=key(1))
        assert (array == 1).all() and holds(second.value(), 5)
        del array, second
        store.clear()
        assert blocks(store) == 0


def test_a_value_without_a_key_takes_the_room_of_what_is_not_held() -> None:
    with Store(MB) as store:
        for number in range(8):
            store.put(tree(number, 120_000), key=key(number)).release()
        with store.put(tree(9, 900_000)) as lease:
            assert holds(lease.value(), 9)
            assert store.stats().evictions >= 7
            with pytest.raises(MemoryExhausted):
                store.put(tree(9, 900_000), timeout=0)
            with pytest.raises(MemoryExhausted, match="holds"):
                store.put(tree(9, 900_000), timeout=0.08)
        held = store.put(tree(1, 900_000), key=key(1))
        with thread(lambda: store.put(tree(9, 900_000), timeout=20)) as waiting:
            eventually(lambda: store.stats().pool.exhaustions > 2)
            assert waiting.is_alive()
            held.release()
        lease = waiting.value
        assert isinstance(lease, Lease) and holds(lease.value(), 9)
        with pytest.raises(Missing):
            store.get(key(1))
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
            store.put(tree(9, 2 * MB), timeout=None)


def test_a_block_of_the_pool_makes_no_room() -> None:
    with Store(MB) as store:
        store.put(tree(1, 900_000), key=key(1)).release()
        with pytest.raises(MemoryExhausted):
            store.pool.take(900_000)
        store.put(tree(2, 900_000), timeout=0).release()
        with pytest.raises(Missing):
            store.get(key(1))


def test_value_without_key_is_read_only_and_lives_while_held() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        lent = store.put(tree(1, 400_000))
        again = lent.hold()
        with pytest.raises(ValueError, match="read-only"):
            lent.value()["pixels"][0] = 2
        there = Handle(None, lent.ref).open(other)
        lent.release()
        with pytest.raises(penstock.ClosedError):
            lent.hold()
        assert holds(again.value(), 1) and holds(there.value(), 1)
        again.release()
        assert holds(there.value(), 1)
        there.release()
        assert blocks(store) == 0 and store.clear() == 0
        with pytest.raises(StaleRef):
            opened(other, lent.ref)
        with pytest.raises(Missing):
            Handle(None, lent.ref).open(other)
        with pytest.raises(MemoryExhausted):
            store.put(tree(1, 2 * MB))
        assert holds(store.put(plan(tree(1)), key=key(1)).value(), 1), "a plan is as good as its value"
        assert holds(store.put(plan(tree(1))).value(), 1)


def test_a_block_of_the_same_pool_is_not_a_value() -> None:
    with Store(MB) as store:
        for content in (b"", b"x" * 4, b"\xff" * 200, bytes(64)):
            lease = store.pool.take(len(content))
            memoryview(lease)[:] = content
            for as_, writable in (("numpy", False), ("bits", False), ("numpy", True)):
                with pytest.raises(penstock.DecodeError):
                    opened(store, store.pool.share(lease)).value(as_, writable=writable)  # type: ignore[arg-type]
        with lowlevel.Pool.create(4096) as pool, pytest.raises(penstock.LayoutMismatch, match="expected a store"):
            Store.attach(pool.ticket)


# ── keys ──
def test_keys_tell_contents_apart() -> None:
    array = np.arange(12, dtype=np.int32)
    contents: list[tuple[Any, ...]] = [
        (array,),
        (array.reshape(3, 4),),
        (array.astype(np.float32),),
        (array[::2],),
        (array.tobytes(),),
        ("text",),
        (b"text",),
        (b"te", b"xt"),
        (b"t", b"ext"),
        (b"",),
        (),
        (b"", b""),
        (np.zeros(0),),
    ]
    keys = [content_key(*content) for content in contents]
    assert len(set(keys)) == len(keys) and {len(digest) for digest in keys} == {32}
    assert content_key(array) == content_key(array.copy()) == content_key(np.arange(24, dtype=np.int32)[:12])
    assert content_key(np.asfortranarray(array.reshape(3, 4))) == content_key(array.reshape(3, 4))
    assert content_key(memoryview(array)) == content_key(array)
    assert content_key(memoryview(b"text")) == content_key(b"text") != content_key(memoryview(b"t.e.x.t")[::2])
    assert content_key(array, salt=b"tenant a") != content_key(array, salt=b"tenant b") != content_key(array)


# ── many processes ──
def test_processes_that_put_the_same_key_write_it_once() -> None:
    source = """
        import numpy as np
        from penstock import Store
        store = Store.attach(sys.argv[1])
        say("ready")
        hear()
        for number in range(40):
            key = number.to_bytes(32, "big")
            value = store.put({"pixels": np.full(50_000, number, np.int32)}, key=key, timeout=20).value()
            assert (value["pixels"] == number).all()
        say("done")
    """
    with Store(32 * MB) as store:
        with program(source, store.ticket) as a, program(source, store.ticket) as b, program(source, store.ticket) as c:
            for worker in (a, b, c):
                assert worker.hear() == "ready"
            for worker in (a, b, c):
                worker.say("go")
            for worker in (a, b, c):
                assert worker.hear() == "done"
        stats = store.stats()
        assert stats.puts == 40 and stats.hits == 80
        assert blocks(store) == 40


@pytest.mark.parametrize("awaited", ["a writer", "room", "room without a key"])
def test_a_put_that_waits_is_interrupted_and_has_begun_nothing(awaited: str) -> None:
    source = """
        import numpy as np
        from penstock import Store
        store = Store.attach(sys.argv[1])
        store.pool.join()
        try:
            say("waiting")
            store.put({"pixels": np.ones(225_000, np.int32)}, key=bytes.fromhex(sys.argv[2]) or None, timeout=None)
        except KeyboardInterrupt:
            say("interrupted")
        hear()
    """
    with Store(MB) as store:
        in_the_way: Any = (
            store._keeper.begin(bytes(32), 1000, 0)
            if awaited == "a writer"
            else store.put(tree(1, 900_000), key=key(1))
        )
        with program(source, store.ticket, "" if awaited == "room without a key" else bytes(32).hex()) as other:
            assert other.hear() == "waiting"
            for _ in range(3):  # others come and go meanwhile, and none of that ends the wait
                store.put(tree(2), key=key(2)).release()
                store.remove(key(2))
            eventually(lambda: state_of(other.pid) == "S", 20)
            other.kill(signal.SIGINT)
            assert other.hear() == "interrupted"
            del in_the_way
            assert holds(store.put(tree(3), key=bytes(32), timeout=0).value(), 3)


def test_forked_child_is_a_new_peer_with_its_own_leases() -> None:
    with Store(MB) as store:
        store.put(tree(1), key=key(1)).release()
        held = store.get(key(1))

        def child() -> None:
            with store.get(key(1)) as lease:
                assert holds(lease.value(), 1)
                assert store.stats().items[0].holders == 2
            assert holds(store.put(tree(2)).value(), 2)

        assert forked(child) == 0
        held.release()
        eventually(lambda: store.stats().items[0].holders == 0)
        assert blocks(store) == 1


def test_the_first_put_and_get_of_a_process_import_nothing_more() -> None:
    source = """
        import numpy as np
        from penstock import Store
        store = Store.attach(sys.argv[1])
        before = set(sys.modules)
        with store.put({"pixels": np.ones((3, 4)), "grid": [1, 2]}, key=bytes(32), timeout=20) as lease:
            assert lease.value()["pixels"].sum() == 12
        say(*sorted(set(sys.modules) - before))
    """
    with Store(MB) as store, program(source, store.ticket) as other:
        assert other.hear() == ""
