"""Many threads of several processes put and get by key, at three times what the store has room for.

That no key is there twice at any time is looked at by native/tests/store.cpp; here, at the end. A soak has 10^5.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from pathlib import Path
from typing import Any

from penstock import MemoryExhausted, _native
from tests import tiers
from tests.conftest import eventually, spawn
from tests.support.processes import threads

PROCESSES, THREADS = 4, 4
NBYTES = 4 << 20
KEYS = 400
SHAPE = {"kind": 2, "max_peers": 8, "max_blocks": 256, "has_grants": 1, "pool_nbytes": NBYTES, "buckets": 256}
BYTES = random.Random(4).randbytes(1 << 18)
WATCHDOG = 60.0


def key(name: int) -> bytes:
    return random.Random(name).randbytes(32)


def content(name: int) -> memoryview:
    """Of 0 to 120 KiB, and more often small: 12 MiB in all."""
    nbytes = name * name * 61 % (name % 7 * (20 << 10) + 1)
    start = name * 131
    return memoryview(BYTES)[start : start + nbytes]


def trade(ticket: tuple[int, ...], seed: int, talk: Path) -> None:
    """A process: all its threads are one peer, as those of a server are."""
    by = _native.Attachment(_native.Segment.attach(*ticket), "trader")
    store = _native.Store(by)
    longest = [0.0] * THREADS

    def play(number: int) -> None:
        chance = random.Random(seed * THREADS + number)
        held: list[tuple[Any, int]] = []
        for _ in range(tiers.STORE_OPERATIONS // PROCESSES // THREADS):
            name = int(KEYS * chance.random() ** 2)
            which, nbytes = key(name), len(content(name))
            lease = None
            what = chance.random()
            began = time.perf_counter()
            try:
                if what < 0.02:
                    store.remove(which)
                elif what < 0.3:
                    lease = store.get(which)
                else:
                    is_new, lease = store.begin(which, nbytes, WATCHDOG)
                    if is_new:
                        with memoryview(lease) as view:
                            view[:] = content(name)
                        if what < 0.32:
                            store.abandon(lease)
                            lease = None
                        else:
                            store.commit(lease)
            except MemoryExhausted:
                held.clear()
            longest[number] = max(longest[number], time.perf_counter() - began)
            if lease is not None:
                assert memoryview(lease) == content(name), f"key {name}: not what belongs to it"
                held.append((lease, name))
            del lease
            while len(held) > 2 or (held and chance.random() < 0.5):
                block, name = held.pop(0)
                assert memoryview(block) == content(name), f"key {name}: changed while it was held"
                del block

    with threads(
        *(functools.partial(play, number) for number in range(THREADS)), within=tiers.limit(110.0, soak=590.0)
    ):
        pass
    with talk.open("a") as out:
        print(max(longest), file=out)


def test_at_three_times_the_capacity_each_key_is_there_once_and_whole(seed: int, tmp_path: Path) -> None:
    segment = _native.Segment.create("store", SHAPE)
    by = _native.Attachment(segment, "onlooker")
    store = _native.Store(by)
    talk = tmp_path / "longest"
    began = time.monotonic()
    limit = tiers.limit(120.0, soak=600.0)
    with contextlib.ExitStack() as stack:
        traders = [
            stack.enter_context(spawn(trade, segment.ticket(), seed + number, talk, within=limit))
            for number in range(PROCESSES)
        ]
        for trader in traders:
            trader.join()
        assert [trader.exitcode for trader in traders] == [0] * PROCESSES
    eventually(lambda: by.stats()["holders"] == [])
    stats = store.stats()
    longest = max(map(float, talk.read_text().split()))
    print(
        f"{tiers.STORE_OPERATIONS} operations in {time.monotonic() - began:.1f} s: {stats['hits']} hits, "
        f"{stats['puts']} written, {stats['evictions']} evicted, {stats['fills_awaited']} awaited; "
        f"the longest took {longest * 1000:.1f} ms"
    )
    assert stats["evictions"] > 100 and stats["hits"] > 100
    assert by.stats()["blocks"] == len(stats["items"])
    assert len({item[0] for item in stats["items"]}) == len(stats["items"]), "a key is there twice"
    assert not any(item[-1] for item in stats["items"])
    store.clear()
    by.take(NBYTES, 0).release()
