"""What the longest operations of 4 processes with 4 threads each wait for, at three times what the store has room for.

Told, not judged: a shared machine decides how long. Beside it stands what the same threads wait for when each copies
into memory of its own, without a store: the processor and the interpreter. PENSTOCK_TIER=soak: 10^5 operations.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock import Lease, Loan, MemoryExhausted, Missing, Store
from penstock.tensor import plan
from penstock.tensor.lease import block_nbytes
from tests import tiers
from tests.conftest import eventually, spawn
from tests.support.processes import threads

PROCESSES, THREADS = 4, 4
NBYTES = 64 << 20
LIMIT = tiers.limit(110.0, soak=900.0)
Times = dict[str, list[float]]


def sizes() -> list[int]:
    """Of 4 KB to 8 MB, as many small ones as large ones; three times the store in all."""
    chance, sizes = random.Random(5), list[int]()
    while sum(sizes) < 3 * NBYTES:
        sizes.append(int(4096 * 2048 ** chance.random()))
    return sizes


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(store: Store, number: int, source: np.ndarray, times: Times) -> None:
    """As Store.put, with a look at the clock between its parts."""
    planned = plan({"number": number, "pixels": source})
    began = time.perf_counter()
    is_new, block = store._keeper.begin(key(number), block_nbytes(planned), 20)
    begun = time.perf_counter()
    times["begin" if is_new else "wait for another's copy"].append(begun - began)
    if not is_new:
        lease = Lease(block)
    else:
        with Loan(store.pool, store._keeper, block, planned) as loan:
            copied = time.perf_counter()
            lease = loan.commit()
            times["copy"].append(copied - begun)
            times["commit"].append(time.perf_counter() - copied)
    assert lease.value()["number"] == number


def trade(ticket: str, seed: int, out: Path) -> None:
    store = Store.attach(ticket)
    store.pool.join()
    of_key = sizes()
    source = np.ones(9 << 20, np.uint8)
    split: list[Times] = []

    def play(number: int, times: Times, has_store: bool) -> None:
        chance = random.Random(seed * THREADS + number)
        own = np.ones(9 << 20, np.uint8)
        for _ in range(tiers.STORE_WAITS // PROCESSES // THREADS):
            which = int(len(of_key) * chance.random() ** 2)
            began = time.perf_counter()
            if not has_store:
                if chance.random() < 0.4:
                    np.copyto(own[: of_key[which]], source[: of_key[which]])
                times["a copy of one's own, or nothing"].append(time.perf_counter() - began)
                continue
            try:
                assert store.get(key(which)).value()["number"] == which
                times["get"].append(time.perf_counter() - began)
            except Missing:
                try:
                    put(store, which, source[: of_key[which]], times)
                except MemoryExhausted:
                    times["no room"].append(time.perf_counter() - began)

    for has_store in (False, True):
        split += [defaultdict(list) for _ in range(THREADS)]
        plays = (functools.partial(play, number, times, has_store) for number, times in enumerate(split[-THREADS:]))
        with threads(*plays, within=LIMIT):
            pass
    out.write_bytes(msgspec.msgpack.encode(split))


@pytest.mark.timeout(tiers.limit(120, soak=1000))
def test_processes_put_and_get_three_times_the_capacity(seed: int, tmp_path: Path) -> None:
    parts: Times = defaultdict(list)
    outs = [tmp_path / str(number) for number in range(PROCESSES)]
    with Store(NBYTES) as store:
        with contextlib.ExitStack() as stack:
            traders = [
                stack.enter_context(spawn(trade, str(store.ticket), seed + number, out, within=LIMIT))
                for number, out in enumerate(outs)
            ]
            for trader in traders:
                trader.join()
            assert [trader.exitcode for trader in traders] == [0] * PROCESSES
        eventually(lambda: store.stats().pool.holders == ())
        stats = store.stats()
        assert stats.evictions > 100 and stats.hits > 100
        assert len({item.key for item in stats.items}) == len(stats.items) == stats.pool.blocks
        assert not any(item.is_being_written for item in stats.items)
        store.clear()
        store.pool.take(NBYTES).release()
    for out in outs:
        for times in msgspec.msgpack.decode(out.read_bytes(), type=list[Times]):
            for part, durations in times.items():
                parts[part] += durations
    assert not parts["no room"], "each thread holds one value at a time"
    for part, durations in sorted(parts.items()):
        durations.sort()
        if durations:
            print(
                f"{part:32} {len(durations):7,} times, p50 {durations[len(durations) // 2] * 1e3:8.3f} ms, "
                f"p99.9 {durations[len(durations) * 999 // 1000] * 1e3:6.1f}, longest {durations[-1] * 1e3:6.1f}, "
                f"over 50 ms: {sum(duration > 0.05 for duration in durations)}"
            )
