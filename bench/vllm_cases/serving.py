"""The same load for `vllm serve` in three ways, in turn: text, images, and text on a device that sleeps.

All servers of a case are up at the same time; those that are not measured are stopped. Loads are made by
`penstock bench serve`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness.figures import Figures
from bench.harness.turns import Outcome, in_turn
from bench.impls import Unavailable
from bench.serve_cases.cases import Load, Servers, run_load
from bench.serve_cases.servers import Failed, Server
from bench.vllm_cases import models, sleeping, ways
from bench.vllm_cases.goals import Found
from bench.vllm_cases.tables import tell
from bench.vllm_cases.vllm_server import AVAILABLE_NBYTES, VllmServer

MAX_WARM_UP = 16  # requests before a load
STEP_MS = 20.0  # of the device that sleeps
ROLES = ("apiserver", "enginecore", "worker")
CACHE = ("--mm-processor-cache-type", "shm", "--mm-processor-cache-gb", "4")
IMAGE_SIZE = "504x504"
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ImageLoad(Load):
    def options(self) -> list[str]:
        return [*super().options(), f"--image-size={IMAGE_SIZE}", "--backend=openai-chat"]


@dataclass(frozen=True)
class Kind:
    """A case: what is served, and what is asked of it."""

    name: str
    loads: tuple[Load, ...]
    is_multimodal: bool = False
    is_sleeping: bool = False

    def start(self, way: ways.Way, folder: Path) -> VllmServer:
        model = models.make_multimodal(folder) if self.is_multimodal else models.make_text(folder)
        options = [*CACHE] if self.is_multimodal else []
        environment = {}
        if self.is_sleeping:
            options += ["--worker-cls", sleeping.WORKER]
            environment[sleeping.VARIABLE] = str(STEP_MS)
        return VllmServer(way, model, folder / f"{self.name}-{way.name}.log", options, environment)

    def plugins(self) -> dict[str, str]:
        return {"penstock_bench_sleeping": "bench.vllm_cases.sleeping:register"} if self.is_sleeping else {}


TEXT = Kind("text", (Load(24, 4, "128", "64"), Load(64, 16, "128", "64"), Load(128, 64, "128", "64")))
IMAGES = Kind(
    "images",
    (ImageLoad(12, 4, "32", "32", 1), ImageLoad(32, 16, "32", "32", 1), ImageLoad(64, 64, "32", "32", 1)),
    is_multimodal=True,
)
IDLE = Kind("idle", (Load(48, 16, "128", "64"),), is_sleeping=True)


def quick(kind: Kind) -> Kind:
    """The same with a sixth of the requests and a quarter of their tokens, at two concurrencies at most."""
    loads = []
    for load in kind.loads[:2]:
        tokens = str(int(load.output_tokens) // 4)
        loads.append(replace(load, requests=load.requests // 6 + load.concurrency // 4, output_tokens=tokens))
    return replace(kind, loads=tuple(loads))


@dataclass
class Run:
    """The servers of a run, and what it has found."""

    servers: Servers
    results: Found
    names: Sequence[str]
    starts: int = field(default=0)  # cases with started servers

    def measure(self, kind: Kind) -> dict[int, Outcome]:
        """Starts the servers of a case and measures its loads; returns the outcomes by requests at a time."""
        try:
            self._start(kind)
            return {load.concurrency: self._measure(kind, load) for load in kind.loads if self.servers.up}
        finally:
            self.stop()

    def start_only(self, kind: Kind) -> None:
        """Starts the servers of a case one after the other, each without the others beside it."""
        try:
            self._start(kind, is_alone=True)
        finally:
            self.stop()

    def stop(self) -> None:
        for server in self.servers.up.values():
            server.stop()
        self.servers.up.clear()

    def _start(self, kind: Kind, *, is_alone: bool = False) -> None:
        """One after the other, as the time is taken. What cannot run here is named, with the reason."""
        servers, output = self.servers, self.servers.output
        folder = servers.scratch / f"{kind.name}-{self.starts}"
        seconds: dict[str, float] = {}
        for name in in_turn(self.names, self.starts):
            with contextlib.ExitStack() as unless_up:
                try:
                    check_memory(1 if is_alone else len(self.names) - len(servers.up))
                    server = kind.start(ways.find(name, folder, kind.plugins()), folder)
                    unless_up.callback(server.stop)
                    server.wait_until_ready()
                    reserved = server.reserved()
                    seconds[name] = server.wait_for_an_answer()
                except (Unavailable, Failed, OSError) as reason:
                    output.say(f"skipped {name}: {reason}")
                    output.record("skipped", name, reason=str(reason))
                    continue
                output.record("start", name, case_of=kind.name, first_answer_s=seconds[name], **reserved)
                if kind.is_multimodal:
                    self.results.reserved[name] = reserved
                if not is_alone:
                    servers.up[name] = server
                    server.rest()
                    unless_up.pop_all()
        self.starts += 1
        self.results.starts.append(seconds)

    def _measure(self, kind: Kind, load: Load) -> Outcome:
        outcome = self.servers.take(self.servers.one_round_of(load), measured, self.servers.rounds)
        columns = {
            "requests/s": ("requests_per_s", 1.0),
            "latency p50, ms": ("latency_p50_ms", 1.0),
            "p99": ("latency_p99_ms", 1.0),
            "TTFT p50, ms": ("ttft_p50_ms", 1.0),
            "TPOT p50, ms": ("tpot_p50_ms", 1.0),
            "processors, ms a request": ("cpu_ms", 1.0),
        }
        if kind.is_sleeping:
            about = {f"{role}, cores": (f"{role}_cores", 1.0) for role in ROLES}
            columns = {**about, "all, cores": ("cores", 1.0), f"idle of {CORES} processors, %": ("idle_share", 100.0)}
            columns |= {"requests/s": ("requests_per_s", 1.0), "TPOT p50, ms": ("tpot_p50_ms", 1.0)}
        return tell(self.servers, f"serve_{kind.name}", f"{kind.name}: {load}", outcome, columns, **vars(load))


def check_memory(servers: int) -> None:
    """Raises Unavailable where so many servers more do not fit: a machine that swaps measures nothing."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if available < servers * AVAILABLE_NBYTES:
        raise Unavailable(
            f"{servers} servers want {servers * AVAILABLE_NBYTES / 1e9:.0f} GB of memory, and {available / 1e9:.1f} GB "
            "are free; --impl with fewer ways needs less"
        )


def measured(server: Server, load: Load, scratch: Path, seed: int) -> Figures:
    """One way's turn: what clients saw, and what its processes used for it, requests before the load included."""
    warm_up = min(load.concurrency, MAX_WARM_UP)
    used, busy, began = server.cpu_seconds(), idle_seconds(), time.monotonic()
    result = run_load(server, load, scratch, seed, warm_up)
    wall, idle = time.monotonic() - began, idle_seconds() - busy
    cpu = {role: seconds - used.get(role, 0.0) for role, seconds in server.cpu_seconds().items()}
    figures: Figures = {
        "requests_per_s": result["requests_per_s"],
        "tokens_per_s": result["output_tokens_per_s"],
        "cpu_ms": sum(cpu.values()) / (load.requests + warm_up) * 1e3,
        "cores": sum(cpu.values()) / wall,
        "idle_share": idle / wall / CORES,
        "load_cores": result["cpu_cores"],
        **{f"{role}_cores": cpu.get(role, 0.0) / wall for role in ROLES},
    }
    for name in ("latency", "ttft", "tpot"):
        spread: dict[str, Any] = result[name]
        figures |= {f"{name}_{quantile}_ms": spread[quantile] for quantile in ("p50", "p99")}
    return figures


def idle_seconds() -> float:
    """Returns how long the machine's processors have been idle, all together."""
    with open("/proc/stat") as lines:
        fields = lines.readline().split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
