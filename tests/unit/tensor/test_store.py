"""One store for all: what was put once is read by everybody, and nobody who holds it loses it."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import MemoryExhausted, Missing, lowlevel
from penstock.lowlevel import StaleRef
from penstock.tensor import Store, UnsupportedTensor, content_key, plan
from tests.conftest import eventually
from tests.support.processes import program

MB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


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


def test_what_was_put_is_got_by_everybody_without_a_copy() -> None:
    with Store(4 * MB) as store, Store.attach(store.ticket) as other:
        put = store.put(key(1), tree(1, MB))
        for one in (store, other):
            with one.get(key(1)) as got:
                value = got.value()
                assert holds(value, 1)
                assert not value["pixels"].flags.writeable and not value["pixels"].flags.owndata
                assert value["pixels"].ctypes.data % 64 == 0
        del value
        assert holds(put.value(), 1)
        assert store.stats().blocks == 1
        put.release()
        assert holds(other.get(key(1)).value(), 1), "gone with its last lease"


def test_a_second_put_of_a_key_copies_nothing_and_gives_the_first() -> None:
    with Store(4 * MB) as store:
        first = store.put(key(1), tree(1))
        second = store.put(key(1), tree(2))
        assert first.ref == second.ref
        assert holds(second.value(), 1)
        assert store.stats().puts == 1


def test_what_is_not_there_is_missing_and_says_so() -> None:
    with Store(MB) as store:
        with pytest.raises(Missing, match="'store' keeps nothing under 0000"):
            store.get(key(7))
        with pytest.raises(KeyError):
            store.get(key(7))
        store.put(key(1), tree(1))
        found = store.get_many([key(1), key(2), key(3)])
        assert list(found) == [key(1)] and holds(found[key(1)].value(), 1)
        assert store.stats().misses == 4
        assert store.remove(key(1)) and not store.remove(key(1))
        found.clear()
        with pytest.raises(Missing):
            store.get(key(1))
        assert store.stats().blocks == 0


@pytest.mark.parametrize("wrong", [b"", b"x" * 31, b"x" * 33, "x" * 32, None, bytearray(32)])
def test_a_key_is_32_bytes(wrong: Any) -> None:
    with Store(MB) as store, pytest.raises(ValueError, match="a key is 32 bytes"):
        store.put(wrong, 1)


def test_room_is_made_of_what_nobody_holds_the_longest_unused_first() -> None:
    with Store(MB) as store:
        nbytes = store.put(key(100), tree(100, 100_000)).nbytes  # names of three digits, so that all are of one size
    with Store(-(-nbytes // 64) * 64 * 8, max_items=64) as store:
        held = store.put(key(100), tree(100, 100_000))
        array = held.value()["pixels"]
        held.release()  # the array still holds it
        for number in range(101, 108):
            store.put(key(number), tree(number, 100_000)).release()
        store.get(key(101)).release()  # used again
        for number, gone in ((120, 102), (121, 103), (122, 104)):
            store.put(key(number), tree(number, 100_000)).release()
            with pytest.raises(Missing):
                store.get(key(gone))
        left = {int.from_bytes(item.key, "big") for item in store.stats().items}
        assert left == {100, 101, 105, 106, 107, 120, 121, 122}
        assert (array == 100).all()
        assert store.stats().evictions == 3


@pytest.mark.parametrize("meanwhile", ["held", "put again", "nothing"])
def test_what_was_chosen_to_go_stays_if_it_is_wanted_by_then(meanwhile: str) -> None:
    source = """
        import numpy as np
        from penstock import _native, MemoryExhausted
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        store.join()
        _native.arm_point("store.chosen", "stop", 1)
        try:
            store.put(bytes(32), {"pixels": np.zeros(150_000, np.int32)}, timeout=0)
            say("put")
        except MemoryExhausted:
            say("full")
    """
    with Store(MB) as store:
        store.put(key(1), tree(1, 600_000)).release()
        with program(source, store.ticket) as other:
            eventually(other.is_stopped, 20)
            held = store.get(key(1)) if meanwhile == "held" else None
            if meanwhile == "put again":  # in the same block, perhaps, and another value in any case
                store.remove(key(1))
                held = store.put(key(1), tree(2, 600_000))
            os.kill(other.pid, signal.SIGCONT)
            assert other.hear() == ("put" if held is None else "full")
        if held is None:
            with pytest.raises(Missing):
                store.get(key(1))
        else:
            assert holds(store.get(key(1)).value(), 2 if meanwhile == "put again" else 1)
        stats = store.stats()
        assert len(stats.items) == 1 and stats.evictions == (held is None)


def test_a_full_store_says_who_holds_what_is_in_the_way() -> None:
    with Store(MB, peer_name="holder") as store:
        held = [store.put(key(number), tree(number, 300_000)) for number in range(3)]
        with pytest.raises(MemoryExhausted, match=r"'holder' \(pid \d+\) holds"):
            store.put(key(9), tree(9, 300_000), timeout=0.01)
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
            store.put(key(9), tree(9, 2 * MB))
        with pytest.raises(Missing):
            store.get(key(9))
        held.pop().release()
        store.put(key(9), tree(9, 300_000))


def test_who_waits_for_room_gets_it_when_it_is_there() -> None:
    with Store(MB) as store:
        held = store.put(key(1), tree(1, 900_000))
        timer = threading.Timer(0.05, held.release)
        timer.start()
        assert holds(store.put(key(2), tree(2, 900_000), timeout=20).value(), 2)
        timer.join()


def test_a_value_that_cannot_be_kept_leaves_nothing() -> None:
    with Store(MB) as store:
        with pytest.raises(UnsupportedTensor, match=r"at \$\['a'\]\[0\]"):
            store.put(key(1), {"a": [object()]})
        assert store.stats().blocks == 0

        class Late(np.ndarray):
            pass

        array = np.zeros(10).view(Late)
        holds_on = store.put(key(1), {"x": array})
        assert np.array_equal(holds_on.value()["x"], np.zeros(10))


def test_a_writer_that_fails_half_way_leaves_the_key_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.tensor import tree as trees

    def fail(*_: Any) -> None:
        raise OSError("half-way")

    with Store(MB) as store:
        with monkeypatch.context() as patch:
            patch.setattr(trees.Plan, "write", fail)
            with pytest.raises(OSError, match="half-way"):
                store.put(key(1), tree(1))
        assert store.stats().blocks == 0
        assert holds(store.put(key(1), tree(1), timeout=0.1).value(), 1)
        assert store.stats().abandoned == 1


def test_a_reference_opens_the_value_elsewhere_and_is_stale_when_it_is_gone() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        put = store.put(key(1), tree(1))
        ref = put.ref
        assert holds(other.open_stored(ref).value(), 1)
        put.release()
        assert holds(other.open_stored(ref).value(), 1)
        store.clear()
        with pytest.raises(StaleRef):
            other.open_stored(ref)


def test_what_is_held_outlives_a_clear() -> None:
    with Store(MB) as store:
        array = store.put(key(1), tree(1)).value()["pixels"]
        assert store.clear() == 1
        with pytest.raises(Missing):
            store.get(key(1))
        second = store.put(key(1), tree(5))
        assert (array == 1).all() and holds(second.value(), 5)
        del array, second
        store.clear()
        assert store.stats().blocks == 0


def test_a_block_without_a_key_takes_the_room_of_what_nobody_holds() -> None:
    with Store(MB) as store:
        for number in range(8):
            store.put(key(number), tree(number, 120_000)).release()
        with store.take(900_000) as lease:
            assert lease.is_writable
            with pytest.raises(MemoryExhausted):
                store.take(900_000)
            with pytest.raises(MemoryExhausted):
                store.take(900_000, timeout=0.08)
        held = store.put(key(1), tree(1, 900_000))
        timer = threading.Timer(0.02, held.release)
        timer.start()
        store.take(900_000, timeout=20).release()
        timer.join()
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
            store.take(2 * MB, timeout=None)


def test_a_value_without_a_key_lives_as_long_as_somebody_holds_it_and_nobody_writes_it() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        lent = store.lend(tree(1, 400_000))
        again = lent.hold()
        with pytest.raises(ValueError, match="read-only"):
            lent.value()["pixels"][0] = 2
        there = other.open_stored(lent.ref)
        lent.release()
        with pytest.raises(penstock.ClosedError):
            lent.hold()
        assert holds(again.value(), 1) and holds(there.value(), 1)
        again.release()
        assert holds(there.value(), 1)
        there.release()
        assert store.stats().blocks == 0 and store.clear() == 0
        with pytest.raises(StaleRef):
            other.open_stored(lent.ref)
        with pytest.raises(MemoryExhausted):
            store.lend(tree(1, 2 * MB))
        assert holds(store.put(key(1), plan(tree(1))).value(), 1), "a plan is as good as its value"


def test_a_ticket_of_a_store_leads_to_a_store() -> None:
    with Store(MB) as store:
        store.put(key(1), tree(1))
        other = penstock.attach(store.ticket)
        assert isinstance(other, Store) and holds(other.get(key(1)).value(), 1)
        other.close()


def test_pins_are_counted_and_hold() -> None:
    with Store(MB) as store:
        with pytest.raises(Missing):
            store.pin(key(1))
        store.put(key(1), tree(1, 400_000)).release()
        store.pin(key(1))
        store.pin(key(1))
        store.unpin(key(1))
        with pytest.raises(MemoryExhausted):
            store.put(key(2), tree(2, 900_000), timeout=0)
        store.unpin(key(1))
        with pytest.raises(Missing, match="has not pinned"):
            store.unpin(key(1))
        store.put(key(2), tree(2, 900_000), timeout=0)


def test_a_block_of_the_same_pool_is_not_a_value() -> None:
    with Store(MB) as store:
        for content in (b"", b"x" * 4, b"\xff" * 200, bytes(64)):
            lease = store.take(len(content))
            memoryview(lease)[:] = content
            with pytest.raises(penstock.DecodeError):
                store.open_stored(store.share(lease)).value()
        with lowlevel.Pool.create(4096) as pool, pytest.raises(lowlevel.LayoutMismatch, match="is not a store"):
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
    assert len(set(keys)) == len(keys) and {len(one) for one in keys} == {32}
    assert content_key(array) == content_key(array.copy()) == content_key(np.arange(24, dtype=np.int32)[:12])
    assert content_key(np.asfortranarray(array.reshape(3, 4))) == content_key(array.reshape(3, 4))
    assert content_key(array, salt=b"tenant a") != content_key(array, salt=b"tenant b") != content_key(array)


# ── many processes ──
def test_one_of_many_that_put_the_same_key_writes_and_all_get_it() -> None:
    source = """
        import numpy as np
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        say("ready")
        hear()
        for number in range(40):
            key = number.to_bytes(32, "big")
            value = store.put(key, {"pixels": np.full(50_000, number, np.int32)}, timeout=20).value()
            assert (value["pixels"] == number).all()
        say("done")
    """
    with Store(32 * MB) as store:
        with program(source, store.ticket) as a, program(source, store.ticket) as b, program(source, store.ticket) as c:
            for one in (a, b, c):
                assert one.hear() == "ready"
            for one in (a, b, c):
                one.say("go")
            for one in (a, b, c):
                assert one.hear() == "done"
        stats = store.stats()
        assert stats.puts == 40 and stats.hits == 80
        assert store.stats().blocks == 40


def test_a_process_that_dies_while_it_holds_gives_it_back_and_the_value_stays() -> None:
    source = """
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1], peer_name="doomed")
        held = store.get(bytes(32)).value()
        say("holding")
        hear()
    """
    with Store(MB) as store:
        store.put(bytes(32), tree(0, 600_000)).release()
        with program(source, store.ticket) as other:
            assert other.hear() == "holding"
            with pytest.raises(MemoryExhausted, match="'doomed'"):
                store.put(key(1), tree(1, 600_000), timeout=0)
            os.kill(other.pid, signal.SIGKILL)
            assert holds(store.put(key(1), tree(1, 600_000), timeout=20).value(), 1)
            with pytest.raises(Missing):
                store.get(bytes(32))


def test_somebody_else_writes_when_the_writer_dies_half_way() -> None:
    source = """
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        is_new, lease = store._store.begin(bytes(32), 5000, 0)
        memoryview(lease)[:2000] = b"x" * 2000
        say("half-way")
        hear()
    """
    with Store(MB) as store, program(source, store.ticket) as other:
        assert other.hear() == "half-way"
        with pytest.raises(Missing):
            store.get(bytes(32))
        with pytest.raises(penstock.Timeout, match=f"is being written by .*{other.pid}"):
            store.put(bytes(32), tree(3), timeout=0.05)
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(store.put(bytes(32), tree(3), timeout=20)))
        thread.start()
        eventually(lambda: store.stats().fills_awaited >= 2)
        os.kill(other.pid, signal.SIGKILL)
        thread.join(20)
        assert holds(got[0].value(), 3)
        assert store.stats().abandoned == 1


@pytest.mark.parametrize("awaited", ["a writer", "room"])
def test_who_waits_in_a_put_is_interrupted_and_has_begun_nothing(awaited: str) -> None:
    source = """
        import numpy as np
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        store.join()
        try:
            say("waiting")
            store.put(bytes(32), {"pixels": np.ones(225_000, np.int32)}, timeout=None)
        except KeyboardInterrupt:
            say("interrupted")
        hear()
    """
    with Store(MB) as store:
        in_the_way: Any = (
            store._store.begin(bytes(32), 1000, 0) if awaited == "a writer" else store.put(key(1), tree(1, 900_000))
        )
        with program(source, store.ticket) as other:
            assert other.hear() == "waiting"
            for _ in range(3):  # others come and go meanwhile, and none of that ends the wait
                store.put(key(2), tree(2)).release()
                store.remove(key(2))
            eventually(lambda: other.state() == "S", 20)
            other.kill(signal.SIGINT)
            assert other.hear() == "interrupted"
            del in_the_way
            assert holds(store.put(bytes(32), tree(3), timeout=0).value(), 3)


def test_a_child_of_fork_has_a_place_and_pins_of_its_own() -> None:
    with Store(MB) as store:
        store.put(key(1), tree(1)).release()
        store.pin(key(1))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if holds(store.get(key(1)).value(), 1) and not store._pins else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        store.unpin(key(1))
        assert store.stats().items[0].holders == 0


def test_threads_put_and_get_at_three_times_the_room(seed: int) -> None:
    errors: list[BaseException] = []
    with Store(MB, max_items=64) as store:

        def work(which: int) -> None:
            chance = random.Random(seed + which)
            try:
                for _ in range(400):
                    number = chance.randrange(120)
                    nbytes = 100 + number * 400
                    try:
                        stored = store.get(key(number))
                    except Missing:
                        stored = store.put(key(number), tree(number, nbytes), timeout=20)
                    assert holds(stored.value(), number)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        stats = store.stats()
        assert stats.evictions > 20 and stats.hits > 100
        keys = [item.key for item in stats.items]
        assert len(set(keys)) == len(keys)


def test_the_first_put_and_get_of_a_process_import_nothing_more() -> None:
    source = """
        import numpy as np
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        before = set(sys.modules)
        with store.put(bytes(32), {"pixels": np.ones((3, 4)), "grid": [1, 2]}, timeout=20) as stored:
            assert stored.value()["pixels"].sum() == 12
        say(*sorted(set(sys.modules) - before))
    """
    with Store(MB) as store, program(source, store.ticket) as other:
        assert other.hear() == ""
