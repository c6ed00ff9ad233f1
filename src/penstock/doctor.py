"""`penstock doctor`: whether this machine has what Penstock needs, one line for each subject.

Starts nothing that stays, and changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import signal
import threading
import time
from typing import NamedTuple

import penstock
from penstock import _native
from penstock.inspect import in_seconds, in_units

# Python has them only where the headers that it was built with had.
NEEDED_OF_PYTHON = {"pidfd_open": os, "P_PIDFD": os, "pidfd_send_signal": signal}


class Finding(NamedTuple):
    """level: "ok", "warning" (slower, or less of it), "missing" (penstock does not work without)."""

    level: str
    subject: str
    text: str


def run() -> int:
    """Prints what is found. Returns 1 where something is missing without which penstock does not work, else 0."""
    findings = [examine() for examine in EXAMINATIONS]
    width = max(len(one.subject) for one in findings)
    for one in findings:
        print(f"{one.level:<8} {one.subject:<{width}}  {one.text}")
    return 1 if any(one.level == "missing" for one in findings) else 0


def examine_build() -> Finding:
    layout = f"layout {_native.LAYOUT_VERSION}, fingerprint {_native.LAYOUT_FINGERPRINT:08x}"
    return Finding("ok", "penstock", f"{penstock.__version__}, {layout}; only processes of one layout can talk")


def examine_kernel() -> Finding:
    release = os.uname().release
    numbers = [int(part) for part in re.findall(r"\d+", release)[:2]]
    is_enough = platform.system() == "Linux" and numbers >= [5, 10]
    return Finding("ok" if is_enough else "missing", "kernel", f"{release} (5.10 or newer is needed)")


def examine_memfd() -> Finding:
    try:
        penstock.Segment.create(1, name="doctor").view().release()
    except (OSError, penstock.PenstockError) as error:
        return Finding("missing", "memfd", f"no segment can be made: {error}")
    return Finding("ok", "memfd", "segments can be made, sealed and mapped; /dev/shm is not used")


def examine_pidfd() -> Finding:
    absent = [name for name, module in NEEDED_OF_PYTHON.items() if not hasattr(module, name)]
    if absent:
        text = f"this Python was built without {' and '.join(absent)}: the engine cannot watch its processes"
        return Finding("missing", "pidfd", f"{text}; take one that was built for Linux 5.4 or newer")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("missing", "pidfd", f"{error}: deaths cannot be seen (a seccomp filter may be in the way)")
    return Finding("ok", "pidfd", "deaths of peers are seen at once")


def examine_futex() -> Finding:
    """One record to a thread that sleeps for it, and how long it took to wake."""
    woken_ns: list[int] = []
    with contextlib.ExitStack() as ends:
        ring = penstock.open_ring("doctor", latency="eco")
        sender, receiver = ring.sender(), ring.receiver()
        ends.callback(sender.close)
        ends.callback(receiver.close)

        def receive() -> None:
            with contextlib.suppress(penstock.Timeout):
                receiver.receive(timeout=2)
                woken_ns.append(time.monotonic_ns())

        sleeper = threading.Thread(target=receive)
        sleeper.start()
        deadline = time.monotonic() + 1
        while ring.snapshot()["receivers"][0]["parks"] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        parks = ring.snapshot()["receivers"][0]["parks"]
        sent_ns = time.monotonic_ns()
        sender.send(b"wake up")
        sleeper.join()
    if parks == 0 or not woken_ns:
        return Finding("missing", "futex", "a thread that waits does not sleep, or is not woken")
    return Finding("ok", "futex", f"a sleeping thread was woken in {in_seconds(woken_ns[0] - sent_ns)}")


def examine_proc() -> Finding:
    try:
        os.readlink("/proc/self/fd/0")
        os.listdir("/proc/self/fd")
    except OSError as error:
        if not os.path.exists("/proc/self/fd"):
            return Finding("missing", "/proc", f"{error}: processes cannot be told apart, tickets lead nowhere")
    if _native.start_ticks(os.getpid()) == 0:
        return Finding("missing", "/proc", "/proc/PID/stat is not readable: a reused pid cannot be told apart")
    if os.getppid() > 0 and _native.start_ticks(os.getppid()) == 0:
        return Finding("warning", "/proc", "other users' processes are hidden: give no tickets to those")
    return Finding("ok", "/proc", "descriptors and starting times of processes can be seen")


def examine_memory() -> Finding:
    available, whose = _native.memory_available()
    limits = [
        f"{name} {in_units(soft)}"
        for name, number in (("address space", resource.RLIMIT_AS), ("file size", resource.RLIMIT_FSIZE))
        if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
    ]
    text = f"{in_units(available)} available, as {whose} leaves them"
    text += f"; limits of this process: {', '.join(limits)}" if limits else ""
    return Finding("ok" if available >= 1 << 30 else "warning", "memory", text)


def examine_cpus() -> Finding:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} usable"
    if usable < 2:
        return Finding("warning", "cpus", f"{text}: waits never spin, every message costs a wake-up")
    return Finding("ok", "cpus", text)


def examine_huge_pages() -> Finding:
    folder = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    total, free = (read_number(f"{folder}/{name}_hugepages") for name in ("nr", "free"))
    if not free:
        return Finding("warning", "huge pages", f"{free} of {total} free: huge_pages=True falls back (vm.nr_hugepages)")
    return Finding("ok", "huge pages", f"{free} of {total} of 2 MiB free")


def examine_numa() -> Finding:
    try:
        with open("/sys/devices/system/node/online") as file:
            nodes = file.read().strip()
    except OSError:
        return Finding("ok", "numa", "this kernel tells of no nodes: numa_node= has no effect")
    return Finding("ok", "numa", f"node{'s' if nodes != '0' else ''} {nodes}")


def read_number(path: str) -> int:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


EXAMINATIONS = (
    examine_build,
    examine_kernel,
    examine_memfd,
    examine_pidfd,
    examine_futex,
    examine_proc,
    examine_memory,
    examine_cpus,
    examine_huge_pages,
    examine_numa,
)
