"""A store claims its pages as values fill it: what is claimed when, what a lack of memory does, deaths meanwhile."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from penstock import Handle, MemoryExhausted, MemoryOptions, Missing, Store
from tests.conftest import eventually
from tests.support.control_groups import memory_group, raise_limit
from tests.support.processes import program
from tests.support.values import MB, blocks, key

MIB = 1 << 20


def claimed(store: Store) -> int:
    """Bytes of memory that the kernel has given to the store's file."""
    return os.fstat(store.fd).st_blocks * 512


def value(number: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.full(nbytes, number % 251, np.uint8)


def test_a_store_claims_little_when_it_is_made_however_large_it_is() -> None:
    for nbytes in (16 * MIB, 4 << 30, 1 << 40):
        with Store(nbytes, max_items=256) as store:
            assert claimed(store) < 2 * MIB
            assert store.segment_nbytes == claimed(store)
            assert store.stats().pool.claimed_nbytes == 0
            assert store.nbytes == nbytes


def test_a_store_that_is_prefaulted_is_claimed_as_a_whole() -> None:
    with Store(16 * MIB, memory=MemoryOptions(prefault=True)) as store:
        assert claimed(store) > 16 * MIB
        before = claimed(store)
        store.put(value(1, 8 * MIB), key=key(1)).release()
        assert claimed(store) == before == store.segment_nbytes


def test_puts_claim_what_they_fill_and_no_more() -> None:
    with Store(256 * MIB, max_items=256) as store:
        empty = claimed(store)
        for number in range(1, 9):
            with store.put(value(number, 3 * MIB), key=key(number)) as lease:
                assert (lease.value() == number).all()
            assert 3 * MIB * number < claimed(store) - empty <= (3 * number + 1) * MIB + 4096
            assert store.segment_nbytes == claimed(store)
        for number in range(1, 9):
            assert (store.get(key(number)).value() == number).all()


def test_room_that_comes_back_is_used_before_more_is_claimed() -> None:
    with Store(256 * MIB) as store:
        store.put(value(1, 8 * MIB), key=key(1)).release()
        after_one = claimed(store)
        for number in range(2, 40):
            assert store.evict(key(number - 1))
            store.put(value(number, 8 * MIB - 100 * number), key=key(number)).release()
        assert claimed(store) == after_one


def test_a_store_that_is_full_evicts_as_one_that_was_claimed_at_once() -> None:
    with Store(16 * MIB) as store:
        for number in range(40):
            with store.put(value(number, 3 * MIB), key=key(number)) as lease:
                assert (lease.value() == number).all()
        assert store.stats().evictions >= 35
        assert store.stats().pool.claimed_nbytes == 16 * MIB
        with pytest.raises(Missing):
            store.get(key(0))
        assert (store.get(key(39)).value() == 39).all()


def test_large_and_small_values_share_a_fully_claimed_store() -> None:
    with Store(16 * MIB) as store:
        store.put(value(0, 16 * MIB - 4096), key=key(0)).release()
        assert store.evict(key(0))
        with store.put(value(1, 2 * MIB)) as large, store.put(value(2, 1000)) as small:
            handles = [Handle(None, lease.ref) for lease in (large, small)]
            offsets = [handle.where.offset for handle in handles if not isinstance(handle.where, bytes)]
        assert offsets[1] == 0 and offsets[0] > 13 * MIB


def test_two_processes_that_fill_a_store_at_once_lose_nothing() -> None:
    source = """
        import numpy as np
        store = penstock.Store.attach(sys.argv[1])
        store.pool.join()
        say("there")
        hear()
        first = int(sys.argv[2])
        for number in range(first, first + 100):
            store.put(np.full(700_001, number, np.uint8), key=bytes([number] * 32)).release()
        say(all((store.get(bytes([n] * 32)).value() == n).all() for n in range(first, first + 100)))
    """
    with Store(256 * MIB, max_items=256) as store:
        empty = claimed(store)
        with program(source, store.ticket, 0) as first, program(source, store.ticket, 100) as other:
            for each in (first, other):
                assert each.hear() == "there"
            for each in (first, other):
                each.say("go")
            for each in (first, other):
                assert each.hear() == "True"
        assert claimed(store) - empty <= 200 * 700_001 + 3 * MIB
        assert store.segment_nbytes == claimed(store)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_process_dead_or_stopped_while_claiming_blocks_no_other_claim(action: str) -> None:
    source = """
        import numpy as np
        from penstock import _native
        store = penstock.Store.attach(sys.argv[1])
        store.pool.join()
        _native.arm_point("pool.claiming", sys.argv[2], 1)
        say("claims")
        store.put(np.ones(5 << 20, np.uint8), key=bytes(32))
    """
    with Store(16 * MIB) as store:
        store.pool.join()
        with program(source, store.ticket, action) as other:
            assert other.hear() == "claims"
            if action == "kill":
                other.process.wait()
                eventually(lambda: blocks(store) == 0)
                assert store.stats().pool.claimed_nbytes == 0, "counted, although no process has said so"
            else:
                eventually(other.is_stopped, 20)
            for number in range(1, 10):
                with store.put(value(number, 3 * MIB), key=key(number), timeout=5) as lease:
                    assert (lease.value() == number).all()
            if action == "kill":
                store.put(value(1, 15 * MIB), key=key(20), timeout=5).release()
                assert claimed(store) == store.segment_nbytes


def test_lack_of_memory_fails_the_put_and_the_store_goes_on() -> None:
    source = """
        import numpy as np
        store = penstock.Store(384 << 20, max_items=256)
        with open(sys.argv[1], "w") as group:
            group.write(str(os.getpid()))
        content = np.ones(4 << 20, np.uint8)
        held = []

        def put(number):
            content[:] = number
            return store.put(content, key=bytes([number] * 32), timeout=0)

        try:
            while True:
                held.append(put(len(held)))
        except penstock.MemoryExhausted as error:
            text = str(error)
            say("more memory for 'store'" in text, "of which 24.0 MiB stay for others" in text, 4 < len(held) < 40)
        count, before = len(held), store.stats().pool.exhaustions
        began = time.monotonic()
        try:
            store.put(content, key=bytes(range(32)), timeout=0.3)
        except penstock.MemoryExhausted as error:
            took = time.monotonic() - began
            attempts = store.stats().pool.exhaustions - before
            say("control group" in str(error), 0.3 <= took < 10, attempts <= 4 + 2 * took / 0.05)
        say(all((lease.value() == number).all() for number, lease in enumerate(held)))
        held.clear()
        for number in range(100, 150):  # others give way among what is claimed
            with put(number) as lease:
                assert (lease.value() == number).all()
        say(store.stats().evictions >= 45, store.stats().pool.claimed_nbytes <= (count + 2) * (4 << 20) + (1 << 20))
        with store.put(np.full(4 << 20, 7, np.uint8), timeout=0) as without_a_key:
            say((without_a_key.value() == 7).all())
        hear()
        before = store.stats().pool.claimed_nbytes
        held = [put(number) for number in range(150, 150 + count + 10)]
        say(store.stats().pool.claimed_nbytes > before, all((x.value() == 150 + i).all() for i, x in enumerate(held)))
    """
    with memory_group(128 * MIB) as group, program(source, group / "cgroup.procs", within=60) as other:
        assert other.hear() == "True True True"
        assert other.hear() == "True True True"
        assert other.hear() == "True"
        assert other.hear() == "True True"
        assert other.hear() == "True"
        raise_limit(group, 512 * MIB)
        other.say("there is more")
        assert other.hear() == "True True"
        assert other.end() == 0


def test_a_put_that_lacks_memory_waits_for_it_to_come_back() -> None:
    source = """
        import numpy as np
        store = penstock.Store(384 << 20, max_items=256)
        with open(sys.argv[1], "w") as group:
            group.write(str(os.getpid()))
        held, content = [], np.ones(8 << 20, np.uint8)
        try:
            while True:
                held.append(store.put(content, timeout=0))
        except penstock.MemoryExhausted:
            say(store.ticket)
        say(store.put(content, timeout=20).nbytes > 8 << 20)
    """
    with memory_group(128 * MIB) as group, program(source, group / "cgroup.procs", within=60) as other:
        with Store.attach(other.hear()) as store:
            before = store.stats().pool.exhaustions
            eventually(lambda: store.stats().pool.exhaustions > before, 20)
        raise_limit(group, 512 * MIB)
        assert other.hear() == "True"
        assert other.end() == 0


def test_value_larger_than_the_store_is_refused_before_claiming() -> None:
    with Store(2 * MIB) as store:
        with pytest.raises(MemoryExhausted, match="raise the pool's nbytes"):
            store.put(value(1, 3 * MIB), key=key(1), timeout=5)
        assert store.stats().pool.claimed_nbytes == 0
    with Store(MB) as small:  # no larger than one granule: claimed at once
        assert claimed(small) == small.segment_nbytes > MB
