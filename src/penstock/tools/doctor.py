"""`penstock doctor`: whether this machine has what Penstock needs, one line for each subject.

Starts nothing that stays, and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from penstock import _native, lowlevel
from penstock.engine.cluster.cuda_devices import cuda_devices, torch_build
from penstock.engine.cluster.numa import node_of
from penstock.engine.launcher.preflight import require_model, require_tokenizer
from penstock.engine.model_dir import read_config, with_model_defaults
from penstock.engine.protocol.config import SHIPPED, EngineConfig
from penstock.installing import how_to_install
from penstock.tools.format import in_seconds, in_units

DESCRIPTORS = 4224  # of a server process: four connections for each of 1,024 open requests, and 128 others
PROCESSES = 100  # and threads, of a server with one group: torch has most of them
TORCH_TIMEOUT = 300.0  # seconds; for its import on a cold disk
USUAL_PORT = 8000
# Python has these only where the headers that it was built with had.
NEEDED_OF_PYTHON = {"pidfd_open": os, "P_PIDFD": os, "pidfd_send_signal": signal}


class Finding(NamedTuple):
    """level: "ok", "warning" (slower, or less of it), "missing" (penstock does not work without)."""

    level: str
    subject: str
    text: str


WIDTH = 11  # of the longest subject


def run(model: str, host: str, port: int | None) -> int:
    """Prints what is found, of a model's directory and a port, too. Returns 1 where something is missing, else 0."""
    status = 0
    for finding in _findings(model, host, port):
        print(f"{finding.level:<8} {finding.subject:<{WIDTH}}  {finding.text}", flush=True)
        status |= finding.level == "missing"
    return status


def _findings(model: str, host: str, port: int | None) -> Iterator[Finding]:
    for examine in EXAMINATIONS:
        yield examine()
    yield examine_packages()
    yield examine_videos()
    yield from examine_torch()
    yield examine_port(host, port)
    yield examine_model(model)


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
        lowlevel.Segment.create(1, name="doctor").view().release()
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
        ring = penstock.Ring(name="doctor", latency="eco")
        sender, receiver = ring.open_sender(), ring.open_receiver()
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
    try:
        _native.process_identity()
    except OSError as error:
        return Finding("missing", "/proc", str(error))
    try:
        _native.start_ticks(os.getppid() or os.getpid())
    except OSError:
        return Finding("warning", "/proc", "other users' processes are hidden: give no tickets to those")
    return Finding("ok", "/proc", "descriptors and starting times of processes can be seen")


def examine_memory() -> Finding:
    available, limit = _native.memory_available()
    limits = [
        f"{name} {in_units(soft)}"
        for name, number in (("address space", resource.RLIMIT_AS), ("file size", resource.RLIMIT_FSIZE))
        if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
    ]
    text = f"{in_units(available)} available, as {limit} leaves them"
    text += f"; limits of this process: {', '.join(limits)}" if limits else ""
    return Finding("ok" if available >= 1 << 30 else "warning", "memory", text)


def examine_cpus() -> Finding:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} usable"
    spin_ns, limit = _native.max_spin()
    if not spin_ns:
        return Finding("warning", "cpus", f"{text}: waits never spin, every message costs a wake-up")
    text += f"; waits spin for {in_seconds(spin_ns)} at most"
    return Finding("warning", "cpus", f"{text}: {limit}") if limit else Finding("ok", "cpus", text)


def examine_huge_pages() -> Finding:
    folder = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    total, free = (read_number(f"{folder}/{name}_hugepages") for name in ("nr", "free"))
    if not free:
        return Finding("warning", "huge pages", f"{free} of {total} free: --huge-pages falls back (vm.nr_hugepages)")
    return Finding("ok", "huge pages", f"{free} of {total} of 2 MiB free")


def examine_descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files, and {hard} for a process that asks for more"
    if hard < DESCRIPTORS:
        return Finding(
            "warning", "descriptors", f"{text}: a server of 4096 connections wants {DESCRIPTORS} (ulimit -Hn)"
        )
    return Finding("ok", "descriptors", text)


def examine_processes() -> Finding:
    """Processes and threads, of the control group if it has a limit, and of the user."""
    own, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = Path("/sys/fs/cgroup") / _control_group().lstrip("/")
    pids_max, pids_current = (read_text(str(group / f"pids.{name}")) for name in ("max", "current"))
    texts = [] if own == resource.RLIM_INFINITY else [f"{own} of this user at most"]
    if pids_max.isdecimal():
        texts.insert(0, f"{pids_current} of {pids_max} of the control group")
        if int(pids_max) - int(pids_current or 0) < PROCESSES:
            return Finding("warning", "processes", f"{', '.join(texts)}: a server with a model has about {PROCESSES}")
    return Finding("ok", "processes", ", ".join(texts) or "no limit is seen")


def _control_group() -> str:
    match = re.search(r"^0::(\S+)$", read_text("/proc/self/cgroup"), re.MULTILINE)
    return match[1] if match else "/"


def examine_numa() -> Finding:
    try:
        with open("/sys/devices/system/node/online") as file:
            nodes = file.read().strip()
    except OSError:
        return Finding("ok", "numa", "this kernel lists no nodes: --numa-node has no effect")
    own = node_of(os.sched_getaffinity(0))
    chosen = "no node" if own is None else f"node {own}"
    return Finding(
        "ok", "numa", f"node{'s' if nodes != '0' else ''} {nodes}; --numa-node auto binds memory to {chosen}"
    )


def read_text(path: str) -> str:
    """Empty: it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def read_number(path: str) -> int:
    try:
        return int(read_text(path))
    except ValueError:
        return 0


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────
def examine_packages() -> Finding:
    """Those of the extra `engine`, whatever their versions."""
    try:
        requirements = [
            requirement
            for requirement in metadata.requires("penstock") or ()
            if 'extra == "engine"' in requirement.replace("'", '"')
        ]
    except metadata.PackageNotFoundError:
        requirements = []
    names = sorted(match[0] for requirement in requirements if (match := re.match(r"[\w.-]+", requirement)))
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        text = f"not installed: {', '.join(missing)}; serve and generate need them: {how_to_install('engine')}"
        return Finding("warning", "engine", text)
    return Finding("ok", "engine", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def examine_videos() -> Finding:
    """PyAV, which servers decode videos with."""
    version = _version("av")
    if version is None:
        text = f"PyAV is not installed: videos in chats are refused: {how_to_install('video')}"
        return Finding("warning", "videos", text)
    return Finding("ok", "videos", f"PyAV {version} decodes them, each in a process of its own")


ASK_TORCH = """
import json, time
began = time.monotonic()
import torch
took = time.monotonic() - began
numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
properties = [torch.cuda.get_device_properties(one) for one in numbers]
print(json.dumps([torch.__version__, torch.version.cuda, took, [[one.name, one.total_memory] for one in properties]]))
"""


def examine_torch() -> Iterator[Finding]:
    """What it says of itself and of devices, in a process of its own."""
    try:
        if torch_build() is None:
            yield Finding("warning", "torch", f"not installed: models are not computed: {how_to_install('engine')}")
            return
        version, cuda, took, devices = _asked_of_torch()
    except Exception as error:  # whatever torch's own files do
        yield Finding("missing", "torch", f"installed, and cannot be imported: {error}")
        return
    built = f"for CUDA {cuda}" if cuda else "without CUDA"
    yield Finding("ok", "torch", f"{version}, built {built}, imported in {took:.1f} s")
    if devices:
        names = ", ".join(f"{name} ({in_units(nbytes)})" for name, nbytes in devices)
        yield Finding("ok", "cuda", f"{len(devices)} device{'' if len(devices) == 1 else 's'}: {names}")
        return
    driver = cuda_devices()
    level = "ok" if driver.number == 0 else "warning"
    yield Finding(level, "cuda", f"torch finds no device: {driver.reason}; models are computed with --device cpu")


def _asked_of_torch() -> tuple[str, str | None, float, list[tuple[str, int]]]:
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT)
    if done.returncode != 0:
        raise ImportError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    answer: Any = json.loads(done.stdout.splitlines()[-1])
    return answer[0], answer[1], answer[2], answer[3]


def examine_port(host: str, port: int | None) -> Finding:
    """Whether a server could listen there now. The usual one may be taken by a server that is meant to run."""
    number = USUAL_PORT if port is None else port
    if not 0 <= number <= 65535:
        return Finding("missing", "port", f"expected 0 to 65535, got {number}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        text = f"{number} of {host}: {error.strerror or error}: penstock serve --port N"
        return Finding("warning" if port is None else "missing", "port", text)
    return Finding("ok", "port", f"{number} of {host} is free")


def examine_model(model: str) -> Finding:
    """Whether a directory could be served, the one that ships if none is given; its weights are not read."""
    try:
        config = with_model_defaults(EngineConfig(model=model or SHIPPED))
        require_model(config)
        require_tokenizer(config)
        directory = Path(config.model)
        whole, _ = read_config(directory / "config.json")
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    except (ValueError, OSError) as error:
        return Finding("missing", "model", str(error))
    name = ", ".join(whole.get("architectures") or [str(whole.get("model_type"))])
    text = f"{directory.name}: {name}, {in_units(weights)} of weights, {config.max_model_len} tokens at most"
    defaults = " ".join(f"{field}={value}" for field, value in config.sampling_defaults.explicit.items())
    text += f"; sampling defaults {defaults}" if defaults else ""
    available, _ = _native.memory_available()
    if weights > available:
        return Finding("warning", "model", f"{text}; the CPU's memory has only {in_units(available)}")
    return Finding("ok", "model", text)


EXAMINATIONS = (
    examine_build,
    examine_kernel,
    examine_memfd,
    examine_pidfd,
    examine_futex,
    examine_proc,
    examine_memory,
    examine_cpus,
    examine_descriptors,
    examine_processes,
    examine_huge_pages,
    examine_numa,
)
