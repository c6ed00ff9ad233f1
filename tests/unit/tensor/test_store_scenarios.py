"""What has gone wrong in the stores and caches of today's engines, as it goes here."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest

from penstock import MemoryExhausted, Missing
from penstock.lowlevel import StaleRef
from penstock.tensor import Store, TensorRef, Tensors
from tests.conftest import eventually
from tests.support.processes import program, thread

MB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def image(number: int, nbytes: int = 400_000) -> dict[str, Any]:
    return {"pixels": np.full(nbytes // 4, number, np.int32), "grid": [1, 2, number]}


def is_whole(value: Any, number: int) -> bool:
    return bool((value["pixels"] == number).all() and value["grid"] == [1, 2, number])


def test_what_a_server_writes_into_its_own_array_after_a_put_is_not_seen() -> None:
    with Store(4 * MB) as store:
        given = image(1)
        stored = store.put(key(1), given)
        given["pixels"][:] = 9
        given["grid"][2] = 9
        assert is_whole(stored.value(), 1) and is_whole(store.get(key(1)).value(), 1)


def test_a_client_that_retries_the_same_request_makes_no_second_copy_and_ends_no_first_one() -> None:
    with Store(4 * MB) as server, Store.attach(server.ticket) as worker:
        first = server.put(key(1), image(1))
        seen = worker.open_stored(first.ref).value()["pixels"]
        retried = server.put(key(1), image(1))
        assert retried.ref == first.ref and server.stats().blocks == 1
        first.release()  # the first attempt was aborted
        again = worker.open_stored(retried.ref)
        retried.release()
        assert is_whole(again.value(), 1) and (seen == 1).all()
        assert server.stats().puts == 1


def test_several_samples_of_one_image_each_hold_it_and_it_may_go_after_the_last() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as worker:
        ref = store.put(key(1), image(1, 800_000)).ref
        samples = [worker.open_stored(ref).value() for _ in range(4)]
        while samples:
            with pytest.raises(MemoryExhausted):
                store.put(key(2), image(2, 800_000), timeout=0)
            assert is_whole(samples.pop(), 1)
        store.put(key(2), image(2, 800_000), timeout=0)
        with pytest.raises(Missing):
            worker.get(key(1))


def test_a_reference_that_nobody_opens_holds_nothing() -> None:
    """The image of a request whose prefix was computed before: its worker never asks for it."""
    with Store(MB) as store, Store.attach(store.ticket) as worker:
        ref = store.put(key(1), image(1, 800_000)).ref
        store.put(key(2), image(2, 800_000), timeout=0)
        with pytest.raises(StaleRef):
            worker.open_stored(ref)


def test_a_tensor_that_was_granted_and_is_not_needed_is_given_up_without_a_look() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        ref = Tensors(store).put(np.ones(100_000), [other.join()])
        assert store.stats().blocks == 1
        Tensors(other).drop(ref)
        assert store.stats().blocks == 0
        Tensors(other).drop(ref)  # delivered twice


def test_after_a_clear_whoever_has_a_reference_is_told_and_puts_again() -> None:
    with Store(4 * MB) as server, Store.attach(server.ticket) as worker:
        held, ref = server.put(key(1), image(1)).value(), server.put(key(2), image(2)).ref
        assert worker.clear() == 2
        with pytest.raises(StaleRef):
            worker.open_stored(ref)
        for number in (1, 2):
            with pytest.raises(Missing):
                worker.get(key(number))
            assert is_whole(server.put(key(number), image(number), timeout=0).value(), number)
        assert is_whole(held, 1), "what was held when it was cleared is still its holder's"


def test_a_get_while_another_process_clears_has_the_whole_or_misses() -> None:
    source = """
        import numpy as np
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        say("ready")
        for _ in range(300):
            for number in range(1, 5):
                value = {"pixels": np.full(5000, number, np.int32), "grid": [1, 2, number]}
                store.put(number.to_bytes(32, "big"), value)
            store.clear()
        say("done")
    """
    with Store(MB) as store, program(source, store.ticket) as other:
        assert other.hear() == "ready"
        with thread(other.hear) as end:
            found = missed = 0
            while end.is_alive():
                for number in range(1, 5):
                    try:
                        assert is_whole(store.get(key(number)).value(), number)
                        found += 1
                    except Missing:
                        missed += 1
        assert end.value == "done" and missed
        store.clear()
        assert store.stats().blocks == 0


@pytest.mark.parametrize("point", ["store.opened", "block.locked"])
def test_a_worker_that_dies_as_it_opens_a_value_holds_nothing_and_keeps_nobody_waiting(point: str) -> None:
    source = """
        from penstock import _native
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        store.join()
        _native.arm_point(sys.argv[2], "kill", 1)
        store.get((1).to_bytes(32, "big"))
    """
    with Store(MB) as store:
        store.put(key(1), image(1, 800_000)).release()
        with program(source, store.ticket, point) as worker:
            assert worker.process.wait() == -signal.SIGKILL
        assert is_whole(store.get(key(1)).value(), 1)
        eventually(lambda: [item.holders for item in store.stats().items] == [0])
        store.put(key(2), image(2, 800_000), timeout=5).release()


def test_a_put_while_another_process_is_stopped_in_its_eviction_does_not_wait_for_it() -> None:
    source = """
        import numpy as np
        from penstock import _native
        from penstock.tensor import Store
        store = Store.attach(sys.argv[1])
        store.join()
        _native.arm_point("store.chosen", "stop", 1)
        say("evicting")
        store.put(bytes(32), {"pixels": np.zeros(200_000, np.int32), "grid": [1, 2, 0]}, timeout=20)
        say("put")
    """
    with Store(MB) as store:
        store.put(key(1), image(1, 900_000)).release()
        with program(source, store.ticket) as other:
            assert other.hear() == "evicting"
            eventually(other.is_stopped, 20)
            store.put(key(2), image(2, 900_000), timeout=0).release()
            os.kill(other.pid, signal.SIGCONT)
            assert other.hear() == "put"
        assert is_whole(store.get(bytes(32)).value(), 0)
        stats = store.stats()
        assert stats.evictions == 2 and len(stats.items) == 1


def test_an_old_value_that_somebody_holds_is_in_nobodys_way(seed: int) -> None:
    """Working set of three times the store, from 4 KB to a quarter of it, put and got with old ones held all along."""
    chance = random.Random(seed)
    sizes = [int(4096 * 1024 ** chance.random()) for _ in range(400)]
    capacity = 16 * MB
    with Store(capacity, max_items=1024) as store:
        held = [store.put(key(1000 + number), image(number, 4096)) for number in range(3)]
        for _ in range(3):
            for number in chance.sample(range(400), 400):
                with store.put(key(number), image(number, sizes[number]), timeout=0) as stored:
                    assert is_whole(stored.value(), number)
        for number, one in enumerate(held):
            assert is_whole(one.value(), number)
        assert store.stats().evictions > 100
        kept = sum(item.nbytes for item in store.stats().items)
        assert kept > capacity // 2, f"{kept} bytes are kept where {capacity} fit: the rest is gaps"


def test_a_message_says_where_an_image_is_in_less_than_200_bytes() -> None:
    import msgspec

    with Store(4 * MB) as store:
        stored = store.put(key(1), image(1, 3 * MB))
        assert len(msgspec.msgpack.encode((key(1), stored.ref))) < 200
        assert len(msgspec.msgpack.encode(TensorRef.of("int32", (100_000,), stored.ref.slice(0, 400_000)))) < 200
