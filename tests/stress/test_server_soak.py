"""No process of a server grows under load, for as long as the tier says."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.tools.inspect import private_nbytes_of  # noqa: E402
from tests import tiers  # noqa: E402
from tests.e2e.test_server import Served, run_server  # noqa: E402
from tests.support.engine import simulated_device  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.serving import LIMITS, SHAPE, Load, must_be_as_before  # noqa: E402

SECONDS = float(os.environ.get("PENSTOCK_SOAK_SECONDS", "0"))
BETWEEN = 1.0  # seconds; from one look to the next
SETTLED = 0.1  # of the time: what is there by then may stay
RSS_NBYTES = 6 << 20  # more than an allocator comes and goes by, less than a byte kept of each token
RSS_SHARE = 0.02
STORE_NBYTES = 32 << 20


@dataclass
class Look:
    """At one process."""

    rss_nbytes: int
    descriptors: int
    threads: int


def looks(served: Served) -> dict[str, Look]:
    looks_by_name = {}
    for child in served.children():
        process = psutil.Process(child.pid)
        looks_by_name[str(child.member)] = Look(process.memory_info().rss, process.num_fds(), process.num_threads())
    return looks_by_name


def shared_nbytes(served: Served) -> tuple[int, int]:
    """Of files with names, which there are none of, and of values in the store."""
    store = served.launcher.cluster.store
    assert store is not None
    named = sum(path.stat().st_size for path in Path("/dev/shm").iterdir() if "penstock" in path.name)
    return named, sum(item.nbytes for item in store.stats().items)


def must_not_grow(settled: list[dict[str, Look]], late: list[dict[str, Look]]) -> None:
    """The most of the last part against the most of the first one that counts."""
    for name in settled[0]:
        before, after = ([look[name] for look in part] for part in (settled, late))
        for what in ("rss_nbytes", "descriptors", "threads"):
            most, then = (max(getattr(look, what) for look in part) for part in (before, after))
            room = RSS_NBYTES + RSS_SHARE * most if what == "rss_nbytes" else 8 if what == "descriptors" else 0
            print(f"{name}: {what} {most:,} -> {then:,}")
            assert then <= most + room, f"{name}: {what} has grown from {most:,} to {then:,}"


def private_nbytes(served: Served) -> dict[str, int]:
    sizes = {str(child.member): private_nbytes_of(child.pid) for child in served.children()}
    return {name: nbytes for name, nbytes in sizes.items() if nbytes is not None}


@pytest.mark.timeout(tiers.limit(2_400, 40_000))
@in_a_loop
async def test_private_memory_does_not_grow_with_the_number_of_requests(seed: int) -> None:
    warm_up, requests, limit_nbytes = tiers.SOAK_REQUESTS

    async def ask(served: Served, seed: int, requests: int) -> dict[str, int]:
        load = Load(served, seed, within=60)
        async with load.running(12) as tasks:
            while len(load.requests) < requests:
                await asyncio.sleep(0.05)
                if tasks.done():
                    tasks.result()
        await must_be_as_before(served)
        assert not [request.error for request in load.requests if request.error]
        return private_nbytes(served)

    shape = {"api_server_count": 1, "data_parallel_size": 1}
    async with run_server(
        LIMITS, simulated=simulated_device(step_seconds=0.001), store_nbytes=STORE_NBYTES, **shape
    ) as served:
        before = await ask(served, seed, warm_up)
        after = await ask(served, seed + 1, requests)
    grown = {name: (after[name] - before[name]) / requests for name in after}
    print("bytes a request:", {name: round(nbytes, 1) for name, nbytes in grown.items()})
    assert sum(grown.values()) <= limit_nbytes, grown


@tiers.needs_soak
@pytest.mark.skipif(SECONDS == 0, reason="PENSTOCK_SOAK_SECONDS=N")
@pytest.mark.timeout(SECONDS + 240)
@in_a_loop
async def test_no_process_grows_under_load(seed: int) -> None:
    async with run_server(
        LIMITS, simulated=simulated_device(step_seconds=0.002), store_nbytes=STORE_NBYTES, **SHAPE
    ) as served:
        load = Load(served, seed)
        all_looks = []
        shared = []
        async with load.running() as tasks:
            deadline = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(BETWEEN)
                all_looks.append(looks(served))
                shared.append(shared_nbytes(served))
                if tasks.done():
                    tasks.result()
        await must_be_as_before(served)
        print(f"{len(load.requests)} answers, {dict(load.gone)}")
        assert not [request.error for request in load.requests if request.error]
        first = max(1, int(SETTLED * len(all_looks)))
        part = (len(all_looks) - first) // 3
        assert part > 0, "too short to tell"
        must_not_grow(all_looks[first : first + part], all_looks[-part:])
        assert max(shared[first:]) == shared[first] == (0, 0)
