"""What every test gets: a seed that a failure shows, waits for conditions, processes that end, nothing left behind.

Tests take `eventually` and `spawn` from here (`from tests.conftest import …`); the rest happens by itself.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.resource_tracker
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

# Before the first import of numpy, here and in every process of a test: its threads take a third of the start of a
# process, and no test multiplies matrices with it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Servers of tests leave the cache directory of the user alone.
os.environ.setdefault("PENSTOCK_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "penstock"))

import pytest

from tests.imports import calls_core, imports_torch

T = TypeVar("T")

KINDS = ("unit", "property", "model", "stress", "crash", "faults", "e2e", "nodes", "ray", "vllm", "clients")
PARTS = {"core": calls_core, "torch": imports_torch}
LEFT_WITHIN = 2.0  # seconds that a process or a mapping may take to go after the test let go of it
ONCE_PER_PROCESS = {"/proc/loadavg"}  # wait.h opens it at the first wait that would spin, and keeps it

has_failed = pytest.StashKey[bool]()
has_left_garbage = True  # when the next test begins; until the first one, whatever was imported has


def pytest_configure() -> None:
    from hypothesis import settings  # here, because spawned processes import this file too, and need no hypothesis

    # A shared machine makes any one example slow, and no test checks speed.
    settings.register_profile("penstock", deadline=None, print_blob=True)
    settings.load_profile("penstock")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in (("--only", "collect"), ("--without", "leave out")):
        parser.addoption(name, choices=list(PARTS), help=f"{what} the test modules that call the core, or import torch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Before the module is imported, so that a process without torch stays without it."""
    if not collection_path.match("test_*.py"):
        return None
    only, without = config.getoption("--only"), config.getoption("--without")
    is_left_out = (only and not PARTS[only](collection_path)) or (without and PARTS[without](collection_path))
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is of the kind that its folder says; what stands in no such folder is a unit test."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        item.add_marker(folder if folder in KINDS else "unit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[has_failed] = True
    return report


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def eventually(condition: Callable[[], T], within: float = 5.0) -> T:
    """Asks until the answer is true, and returns it. Fails when there is none within so many seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"{name} was still {answer!r} after {within:g} s")
        time.sleep(0.001)


@contextlib.contextmanager
def spawn(target: Callable[..., object], *args: Any, within: float = 30.0) -> Iterator[SpawnProcess]:
    """Runs target(*args) in a process of its own, and kills that when the block ends, however it ends.

    Fails when the process is still there after so many seconds: it is killed then, whatever the block is waiting for.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, name=target.__name__)
    overdue = threading.Event()

    def end() -> None:
        if not wait([process.sentinel], timeout=0):  # it runs: its end has not shown on the sentinel
            overdue.set()
            process.kill()

    process.start()
    watchdog = threading.Timer(within, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        watchdog.join()
        process.kill()
        process.join()
        process.close()
    assert not overdue.is_set(), f"{target.__name__} was still running after {within:g} s"


# ── randomness ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number to seed this test's randomness with. The report of a failure says how to have the same again."""
    value = os.environ.get("PENSTOCK_SEED")
    chosen = int(value) if value else random.SystemRandom().randrange(2**32)
    request.node.add_report_section("setup", "seed", f"PENSTOCK_SEED={chosen} repeats this")
    return chosen


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────────────────────────
def descriptors() -> Counter[str]:
    """What our open descriptors lead to. A number alone says nothing: it is given again as soon as it is free."""
    counts: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them is gone already
            target = os.readlink(f"/proc/self/fd/{number}")
            if target not in ONCE_PER_PROCESS:
                counts[f"descriptor of {target}, inode {os.stat(int(number)).st_ino}"] += 1
    return counts


def mappings() -> Counter[str]:
    """Mapped bytes per segment. Not ranges: the kernel splits and merges those as it likes."""
    counts: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock" in line:
            first, last, inode, path = re.fullmatch(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+)\s+(.*)", line).groups()
            counts[f"mapped byte of {path}, inode {inode}"] += int(last, 16) - int(first, 16)
    return counts


def children() -> Counter[str]:
    counts: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread, or a child, that ends while we look
            for pid in (task / "children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                counts[f"child {pid} ({words or 'dead, and nobody waited for it'})"] += 1
    return counts


left_on_purpose: Counter[str] = Counter()  # what a test leaves to the tests after it: tests/support/kept_fork_server.py


def belongings() -> Counter[str]:
    return descriptors() + mappings() + children() - left_on_purpose


@pytest.fixture(scope="session", autouse=True)
def warmed_up() -> None:
    """Starts what a process starts once and keeps: our watcher of deaths, and multiprocessing's tracker."""
    import penstock

    assert Path("/proc/thread-self/children").exists(), "this kernel does not tell who our children are"
    multiprocessing.resource_tracker.ensure_running()
    eventually(lambda: any("resource_tracker" in child for child in children()))  # it has our name until it is itself
    channel = penstock.Ring()
    sender, receiver = channel.open_sender(), channel.open_receiver()
    sender.send(b"x")
    receiver.receive(timeout=1)
    for end in (sender, receiver, channel):
        end.close()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Lets collections of garbage pass over what lives when a module begins.

    After thousands of tests, or with torch, a collection of the whole heap takes a third of a second.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def must_leave_nothing(has_ended_well: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Garbage is collected when something is left, and before a test only when the one before it may have left some.

    A test that passed has left nothing that was not there before it. A failed one has: its traceback holds the frames,
    and they hold what they made, until the next test begins.
    """
    global has_left_garbage
    if has_left_garbage:
        gc.collect()
        has_left_garbage = False
    before = belongings()
    yield
    if not has_ended_well():
        has_left_garbage = True
        return
    deadline = time.monotonic() + LEFT_WITHIN
    while left := belongings() - before:
        if time.monotonic() >= deadline:
            has_left_garbage = True
            pytest.fail("left behind: " + "; ".join(f"{count} x {what}" for what, count in sorted(left.items())))
        gc.collect()
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(warmed_up: None, request: pytest.FixtureRequest) -> Iterator[None]:
    with must_leave_nothing(lambda: not request.node.stash.get(has_failed, False)):
        yield
