"""What has gone wrong in the stores and caches of today's engines, as it goes here."""

from __future__ import annotations

import os
import random
import signal

from penstock import Store
from tests.conftest import eventually
from tests.support.processes import program
from tests.support.values import MB, image, key, shows


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
