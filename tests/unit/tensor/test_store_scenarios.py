"""What has gone wrong in the stores and caches of today's engines, as it goes here."""

from __future__ import annotations

import os
import random
import signal

import pytest

from penstock import Handle, MemoryExhausted, Missing, Store
from tests.conftest import eventually
from tests.support.processes import program, thread
from tests.support.values import MB, blocks, image, key, shows


def test_what_a_server_writes_into_its_own_array_after_a_put_is_not_seen() -> None:
    with Store(4 * MB) as store:
        source = image(1)
        stored = store.put(source, key=key(1))
        source["pixels"][:] = 9
        source["grid"][2] = 9
        assert shows(stored.value(), 1) and shows(store.get(key(1)).value(), 1)


def test_retried_request_shares_the_copy_and_ends_only_its_own_scope() -> None:
    with Store(4 * MB) as server, Store.attach(server.ticket) as worker:
        first = server.put(image(1), key=key(1))
        pixels = Handle(None, first.ref).open(worker).value()["pixels"]
        retried = server.put(image(1), key=key(1))
        assert retried.ref == first.ref and blocks(server) == 1
        first.release()  # the first attempt was aborted
        again = Handle(None, retried.ref).open(worker)
        retried.release()
        assert shows(again.value(), 1) and (pixels == 1).all()
        assert server.stats().puts == 1


def test_image_of_several_samples_is_held_until_the_last_ends() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as worker:
        ref = store.put(image(1, 800_000), key=key(1)).ref
        samples = [Handle(None, ref).open(worker).value() for _ in range(4)]
        while samples:
            with pytest.raises(MemoryExhausted):
                store.put(image(2, 800_000), key=key(2), timeout=0)
            assert shows(samples.pop(), 1)
        store.put(image(2, 800_000), key=key(2), timeout=0)
        with pytest.raises(Missing):
            worker.get(key(1))


def test_a_reference_that_is_never_opened_holds_nothing() -> None:
    """A worker never opens the image of a request with a cached prefix."""
    with Store(MB) as store, Store.attach(store.ticket) as worker:
        ref = store.put(image(1, 800_000), key=key(1)).ref
        store.put(image(2, 800_000), key=key(2), timeout=0)
        with pytest.raises(Missing):
            Handle(None, ref).open(worker)


def test_after_a_clear_a_reference_is_a_miss_and_the_value_is_put_again() -> None:
    with Store(4 * MB) as server, Store.attach(server.ticket) as worker:
        held, ref = server.put(image(1), key=key(1)).value(), server.put(image(2), key=key(2)).ref
        assert worker.clear() == 2
        with pytest.raises(Missing):
            Handle(None, ref).open(worker)
        for number in (1, 2):
            with pytest.raises(Missing):
                worker.get(key(number))
            assert shows(server.put(image(number), key=key(number), timeout=0).value(), number)
        assert shows(held, 1), "what was held when it was cleared is still its holder's"


def test_a_get_while_another_process_clears_has_the_whole_or_misses() -> None:
    source = """
        import numpy as np
        from penstock import Store
        store = Store.attach(sys.argv[1])
        say("ready")
        for _ in range(300):
            for number in range(1, 5):
                value = {"pixels": np.full(5000, number, np.int32), "grid": [1, 2, number]}
                store.put(value, key=number.to_bytes(32, "big"))
            store.clear()
        say("done")
    """
    with Store(MB) as store, program(source, store.ticket) as other:
        assert other.hear() == "ready"
        with thread(other.hear) as end:
            hits = missed = 0
            while end.is_alive():
                for number in range(1, 5):
                    try:
                        assert shows(store.get(key(number)).value(), number)
                        hits += 1
                    except Missing:
                        missed += 1
        assert end.value == "done" and missed
        store.clear()
        assert blocks(store) == 0


@pytest.mark.parametrize("point", ["store.opened", "block.locked"])
def test_worker_dead_while_opening_holds_nothing_and_blocks_no_peer(point: str) -> None:
    source = """
        from penstock import _native
        from penstock import Store
        store = Store.attach(sys.argv[1])
        store.pool.join()
        _native.arm_point(sys.argv[2], "kill", 1)
        store.get((1).to_bytes(32, "big"))
    """
    with Store(MB) as store:
        store.put(image(1, 800_000), key=key(1)).release()
        with program(source, store.ticket, point) as worker:
            assert worker.process.wait() == -signal.SIGKILL
        assert shows(store.get(key(1)).value(), 1)
        eventually(lambda: [item.holders for item in store.stats().items] == [0])
        store.put(image(2, 800_000), key=key(2), timeout=5).release()


def test_put_does_not_wait_for_a_process_stopped_in_its_eviction() -> None:
    source = """
        import numpy as np
        from penstock import _native
        from penstock import Store
        store = Store.attach(sys.argv[1])
        store.pool.join()
        _native.arm_point("store.chosen", "stop", 1)
        say("evicting")
        store.put({"pixels": np.zeros(200_000, np.int32), "grid": [1, 2, 0]}, key=bytes(32), timeout=20)
        say("put")
    """
    with Store(MB) as store:
        store.put(image(1, 900_000), key=key(1)).release()
        with program(source, store.ticket) as other:
            assert other.hear() == "evicting"
            eventually(other.is_stopped, 20)
            store.put(image(2, 900_000), key=key(2), timeout=0).release()
            os.kill(other.pid, signal.SIGCONT)
            assert other.hear() == "put"
        assert shows(store.get(bytes(32)).value(), 0)
        stats = store.stats()
        assert stats.evictions == 2 and len(stats.items) == 1


def test_old_values_that_are_held_leave_room_for_others(seed: int) -> None:
    """Working set of three times the store, from 4 KB to a quarter of it, put and got with old ones held all along."""
    chance = random.Random(seed)
    sizes = [int(4096 * 1024 ** chance.random()) for _ in range(400)]
    capacity = 16 * MB
    with Store(capacity, max_items=1024) as store:
        held = [store.put(image(number, 4096), key=key(1000 + number)) for number in range(3)]
        for _ in range(3):
            for number in chance.sample(range(400), 400):
                with store.put(image(number, sizes[number]), key=key(number), timeout=0) as stored:
                    assert shows(stored.value(), number)
        for number, lease in enumerate(held):
            assert shows(lease.value(), number)
        assert store.stats().evictions > 100
        nbytes = sum(item.nbytes for item in store.stats().items)
        assert nbytes > capacity // 2, f"{nbytes} bytes are kept where {capacity} fit: the rest is gaps"
