"""The cases: side by side under the same load, many streams at once, the start, and clients that go.

Leaves to `servers` their processes, and to `penstock bench serve` the load and its times.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.figures import Figures, quantile
from bench.harness.output import short
from bench.harness.turns import Outcome, Turns
from bench.serve_cases.servers import LLAMA, NAME, OURS, PEERS, Failed, Ours, Server, post_of

PATIENCE, REPEATED_PATIENCE = 400.0, 900.0  # seconds; for one load, and one that computes many prompts
GONE = 5.0  # seconds in which an abandoned request is to be gone
COLUMNS = {
    "requests/s": lambda figures: short(figures["requests_per_s"]),
    "tokens/s": lambda figures: short(figures["tokens_per_s"]),
    "TTFT, ms p50 / p99": lambda figures: f"{short(figures['ttft_ms'])} / {short(figures['ttft_p99_ms'])}",
    "TPOT, ms p50 / p99": lambda figures: f"{short(figures['tpot_ms'])} / {short(figures['tpot_p99_ms'])}",
    "latency, ms p50": lambda figures: short(figures["latency_ms"]),
    "front's CPU, s a 1,000 tokens": lambda figures: f"{figures['front_cpu_s']:.3f}",
    "workers'": lambda figures: f"{figures['worker_cpu_s']:.3f}",
    "load's, cores": lambda figures: f"{figures['load_cores']:.2f}",
}
COMPARED = ("requests_per_s", "ttft_ms", "tpot_ms", "front_cpu_s")


@dataclass(frozen=True)
class Load:
    """What `penstock bench serve` is told."""

    requests: int
    concurrency: int
    input_tokens: str = "128"
    output_tokens: str = "128"
    images: int = 0
    is_repeated: bool = False  # prompts are those of the warm-up: both servers keep their prefixes, and decode

    def __str__(self) -> str:
        images = f", {self.images} image each" if self.images else ""
        tokens = f"{self.input_tokens} tokens in, {self.output_tokens} out"
        repeated = ", kept from the load before" if self.is_repeated else ""
        return f"{self.requests} requests, {self.concurrency} at a time, {tokens}{images}{repeated}"

    def within(self, longest: int) -> Load:
        """Returns the load with prompts and answers that fit the model: a prompt may have more tokens than asked."""
        if (int(self.input_tokens) + int(self.output_tokens)) * 4 <= longest * 3:
            return self
        most = longest * 7 // 16
        sizes = {name: str(min(int(getattr(self, name)), most)) for name in ("input_tokens", "output_tokens")}
        return replace(self, **sizes)

    def options(self) -> list[str]:
        output = {
            "num-prompts": self.requests,
            "max-concurrency": self.concurrency,
            "input-len": self.input_tokens,
            "output-len": self.output_tokens,
            "images": self.images,
        }
        if self.is_repeated:  # the last prompt of the warm-up waits for all others
            output["timeout"] = 200
        return [*(f"--{name}={value}" for name, value in output.items()), "--ignore-eos", f"--model={NAME}"]


def run_load(
    server: Server, load: Load, scratch: Path, seed: int, warm_up: int = 0, *, within: float | None = PATIENCE
) -> dict[str, Any]:
    """The figures of one load, after so many requests. Raises Failed where one was not answered."""
    output = scratch / "figures.json"
    command = [sys.executable, "-m", "penstock", "bench", "serve", f"--base-url={server.url}"]
    command += [f"--result-filename={output}", *load.options(), f"--seed={seed}", f"--num-warmups={warm_up}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within, check=False)
    if done.returncode:
        raise Failed(f"{server.name}: {(done.stderr or done.stdout).strip()[-600:]}")
    result: dict[str, Any] = json.loads(output.read_text())["figures"]
    return result


def measured(server: Server, load: Load, scratch: Path, seed: int) -> Figures:
    """One way's turn: what clients saw, and what its processes used for it, what came before the load included."""
    warm_up = load.concurrency
    if load.is_repeated:
        seed = warm_up = 0
        run_load(server, load, scratch, seed, within=REPEATED_PATIENCE)
    before = server.cpu_seconds()
    result = run_load(server, load, scratch, seed, warm_up)
    used = {role: cpu - before.get(role, 0.0) for role, cpu in server.cpu_seconds().items()}
    thousands = (result["output_tokens"] * (1 + warm_up / load.requests)) / 1e3  # of the warm-up, too
    return {
        "requests_per_s": result["requests_per_s"],
        "tokens_per_s": result["output_tokens_per_s"],
        "ttft_ms": result["ttft"]["p50"],
        "ttft_p99_ms": result["ttft"]["p99"],
        "tpot_ms": result["tpot"]["p50"],
        "tpot_p99_ms": result["tpot"]["p99"],
        "itl_p99_ms": result["itl"]["p99"],
        "latency_ms": result["latency"]["p50"],
        "load_cores": result["cpu_cores"],
        "tokens_per_event": result["tokens_per_event"],
        "front_cpu_s": sum(used.get(role, 0.0) for role in server.front) / thousands,
        "worker_cpu_s": used.get("worker", 0.0) / thousands,
        **{f"{role}_cpu_s": cpu / thousands for role, cpu in used.items() if role != "worker"},
    }


class Servers(Turns):
    """Servers that are up, taking turns. One that fails is named with the reason, and takes no further part."""

    def __init__(self, *arguments: Any, scratch: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scratch = scratch
        self.up: dict[str, Server] = {}
        self._seed = 0  # of a round: the same prompts for all

    def one_round_of(self, load: Load) -> dict[str, Any]:
        return dict.fromkeys(self.up, load)

    def _one_round(self, turn: int, orders: Mapping[str, Any], measure: Callable[..., Figures]) -> dict[str, Figures]:
        self._seed += 1
        return super()._one_round(turn, orders, measure)

    def _up(self) -> Container[str]:
        return self.up

    def _turn_of(self, name: str, order: Any, measure: Callable[..., Figures]) -> list[Figures]:
        server = self.up[name]
        server.go_on()
        try:
            figures = measure(server, order, self.scratch, self._seed)
        except (Failed, OSError, subprocess.TimeoutExpired) as failure:
            self._leave_out(name, failure)
            self.up.pop(name).stop()
            return []
        server.rest()
        return [figures]


def side_by_side(servers: Servers, case: str, load: Load) -> Outcome:
    outcome = servers.take(servers.one_round_of(load), measured, servers.rounds)
    for name in outcome.rounds:
        figures = outcome.figures(name)
        ratios = {}
        if servers.compares(outcome):
            ratios = {f"{key}_ratio_to_{OURS}": outcome.ratio(name, key, OURS) for key in COMPARED}
        quiet = {"foreign_cores": outcome.foreign_cores, "quiet": outcome.is_quiet}
        servers.output.record(case, name, **vars(load), **figures, **ratios, rounds=servers.rounds, **quiet)
    rows = [(name, [cell(outcome.figures(name)) for cell in COLUMNS.values()]) for name in outcome.rounds]
    for peer in (*PEERS, LLAMA):
        if peer in outcome.rounds and servers.compares(outcome):
            ratios = {key: f"×{short(outcome.ratio(peer, key, OURS))}" for key in COMPARED}
            cells = [ratios["requests_per_s"], "", ratios["ttft_ms"], ratios["tpot_ms"]]
            rows.append((f"{peer}, times ours", [*cells, "", ratios["front_cpu_s"], "", ""]))
    servers.output.table(f"{case}: {load}", list(COLUMNS), rows)
    if not outcome.is_quiet:
        verdict = "" if servers.compares(outcome) else "; not compared (--noisy does)"
        servers.output.say(f"  foreign processes took up to {outcome.foreign_cores:.2f} cores in these rounds{verdict}")
    roles_told(servers, outcome)
    return outcome


def roles_told(servers: Servers, outcome: Outcome) -> None:
    """Where the CPU goes."""
    for name in outcome.rounds:
        figures = outcome.figures(name)
        parts = {key.removesuffix("_cpu_s"): value for key, value in figures.items() if key.endswith("_cpu_s")}
        actual = ", ".join(f"{role} {value:.3f}" for role, value in parts.items() if role != "front")
        servers.output.say(f"  {name}: CPU seconds a 1,000 tokens: {actual}")


# ── many streams ─────────────────────────────────────────────────────────────────────────────────────────────────────
def many_streams(servers: Servers, server: Ours, streams: int, tokens: int) -> Figures:
    """All open at once, on one server process: how many are served, and the memory of each."""
    run_load(server, Load(20, 10), servers.scratch, 0)  # memory that every server has
    before = server.resident_nbytes("server")
    with most_resident(server, "server") as observed:
        result = run_load(server, Load(streams, streams, "32", str(tokens)), servers.scratch, 1)
    figures = {
        "streams": streams,
        "served": result["requests"],
        "open_at_once": result["most_open"],
        "growth_kb": (max(observed) - before) / streams / 1e3,
        "server_mb": max(observed) / 1e6,
        "ttft_ms": result["ttft"]["p50"],
        "tpot_ms": result["tpot"]["p50"],
        "tokens_per_s": result["output_tokens_per_s"],
        "load_cores": result["cpu_cores"],
    }
    servers.output.record("streams", OURS, **figures)
    rows = [(OURS, [short(figures[key]) for key in list(figures)[1:]])]
    names = [key.replace("_", " ") for key in list(figures)[1:]]
    servers.output.table(f"{streams:,} streams on one server, simulated device", names, rows)
    return figures


@contextlib.contextmanager
def most_resident(server: Server, role: str) -> Iterator[list[int]]:
    """What the processes of a role have resident, looked at every so often."""
    observed, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.2):
            observed.append(server.resident_nbytes(role))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield observed
    finally:
        is_over.set()
        looking.join()


# ── clients that go ──────────────────────────────────────────────────────────────────────────────────────────────────
def clients_that_go(servers: Servers, server: Ours, times: int) -> Figures:
    """From the reset of a connection in mid-stream until no process knows of its request, and its blocks are free."""
    took = sorted(gone_after(server) * 1e3 for _ in range(times))
    figures = {"gone_p50_ms": quantile(took, 0.5), "gone_most_ms": took[-1], "times": times}
    servers.output.record("gone", OURS, **figures)
    cells = [short(figures["gone_p50_ms"]), short(figures["gone_most_ms"])]
    servers.output.table("A client disconnects, until its request is gone; ms", ["p50", "most"], [(OURS, cells)])
    return figures


def gone_after(server: Ours) -> float:
    """Raises Failed where it is still known of after a while."""
    nothing = server.open_requests()
    body = {"model": NAME, "prompt": "hello", "max_tokens": 1000, "stream": True}
    with socket.create_connection(("127.0.0.1", server.port), GONE) as client:
        client.sendall(post_of("/v1/completions", body))
        text = b""
        while b"data: " not in text:
            text += client.recv(65536) or b"data: "
        if server.open_requests() == nothing:
            raise Failed("a request that is answered is known to nobody")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
        began = time.monotonic()
    while server.open_requests() != nothing:
        if time.monotonic() > began + GONE:
            raise Failed(f"a request whose client has gone is still there after {GONE:g} s")
    return time.monotonic() - began


def starts_told(servers: Servers, seconds: Mapping[str, float]) -> None:
    rows: Sequence[tuple[str, list[str]]] = [(name, [f"{took:.1f}"]) for name, took in seconds.items()]
    for name, took in seconds.items():
        servers.output.record("start", name, first_answer_s=took)
    servers.output.table("From the start of the command to its first answer; s", ["s"], rows)
