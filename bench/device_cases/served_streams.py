"""Streams of a server on a device: their latency, and a killed worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from bench.device_cases.device_run import Device
from bench.harness.targets import Target
from bench.serve_cases.cases import Load, run_load
from bench.serve_cases.pauses import Stream, until
from bench.serve_cases.servers import Failed, Ours

TPOT_MS = 2.0  # of a stream that is alone
RESTART_S = 30.0
LEAST_EQUAL = 0.9  # of the answers that a kill may not change: random weights give near ties
MAX_MEMORY_MIB = 2.0  # between the device's free memory before a server and after it
LOAD_S = 90.0
ANSWERED = 60.0  # seconds; for all streams, a restart included
BEFORE_KILL = 5  # events of each stream
FREE_MEMORY = "import torch; print(torch.cuda.mem_get_info()[0])"


def latency(device: Device) -> None:
    with device.serving("bfloat16") as server:
        for requests, at_once in device.scale.streams:
            device.run.attempt(
                f"{at_once} streams",
                lambda requests=requests, at_once=at_once: load_of(device, server, requests, at_once),  # type: ignore[misc]
            )


def load_of(device: Device, server: Ours, requests: int, at_once: int) -> None:
    prompt, answer = map(str, device.scale.stream_tokens)
    before = server.cpu_seconds()
    load = Load(requests, at_once, prompt, answer)
    figures = run_load(server, load, device.run.scratch, at_once, min(at_once, 32), within=LOAD_S)
    cpu = {f"{role}_cpu_s": used - before.get(role, 0.0) for role, used in server.cpu_seconds().items()}
    times = {
        f"{name}_{quantile}_ms": figures[name][quantile] for name in ("tpot", "ttft") for quantile in ("p50", "p99")
    }
    tokens_per_s, cores = figures["output_tokens_per_s"], figures["cpu_cores"]
    headline = "{} streams: TPOT {:.2f} / {:.2f}, TTFT {:.0f} / {:.0f} ms, {:,.0f} tokens/s"
    headline = headline.format(at_once, *times.values(), tokens_per_s)
    device.record("streams", headline, at_once=at_once, **times, tokens_per_s=tokens_per_s, load_cores=cores, **cpu)
    if at_once == 1:
        device.targets.append(Target("TPOT p50 of a stream", TPOT_MS, "ms", times["tpot_p50_ms"], is_speed=True))


# ── a worker is killed ───────────────────────────────────────────────────────────────────────────────────────────────
class TextStream(Stream):
    """A greedy stream that keeps its text."""

    def __init__(self, server: Ours, number: int, tokens: int) -> None:
        super().__init__(server, number, tokens, temperature=0.0, stream_options={"include_usage": True})
        self.text, self.tokens = "", 0

    def on_event(self, data: bytes) -> None:
        chunk = json.loads(data)
        self.text += "".join(choice["text"] for choice in chunk["choices"])
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]


def kill(device: Device) -> None:
    device.model()
    free = free_memory(device)
    with device.serving("float32") as server:
        asyncio.run(killed_streams(device, server))
        if not device.is_rehearsal:
            device.run.attempt("contexts", lambda: contexts_beside_workers(device, server))
    memory_must_be_back(device, free)


async def killed_streams(device: Device, server: Ours) -> None:
    count, tokens = device.scale.killed_streams, device.scale.killed_tokens
    undisturbed = [TextStream(server, number, tokens) for number in range(count)]
    began = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*(stream.run() for stream in undisturbed)), ANSWERED)
    seconds = time.monotonic() - began

    streams = [TextStream(server, number, tokens) for number in range(count)]
    running = asyncio.gather(*(stream.run() for stream in streams))
    await until(lambda: all(len(stream.events) > BEFORE_KILL for stream in streams), running)
    killed, restarted_in = server.kill_worker()
    await until(lambda: restarted_in() is not None, running)
    await asyncio.wait_for(running, ANSWERED)
    restart = restarted_in() or float("nan")
    server.wait_until_whole()
    answered = time.monotonic()
    server.request("POST", "/v1/completions", {"model": "model", "prompt": "hello", "max_tokens": 1})

    log = server.log.read_text(errors="replace")
    pairs = list(zip(streams, undisturbed, strict=True))
    cut = sum(stream.tokens != tokens for pair in pairs for stream in pair)
    equal = sum(ours.text == other.text for ours, other in pairs) / count
    pauses = sorted(stream.pause(killed) for stream in streams)
    device.record(
        "kill", streams=count, tokens=tokens, undisturbed_s=seconds, restart_s=restart, equal=equal,
        pause_p50_s=pauses[count // 2], pause_max_s=pauses[-1], first_answer_ms=(time.monotonic() - answered) * 1e3,
        blocks=[int(text) for text in re.findall(r'"worker ready" blocks=(\d+)', log)],
    )  # fmt: skip
    device.targets += [
        Target("streams of a killed worker without all their tokens", 0, "", cut),
        Target("share with the text of a run without a kill", LEAST_EQUAL, "", equal, is_least=True),
        Target("from the kill until the next core serves", RESTART_S, "s", restart, is_speed=True),
    ]


def contexts_beside_workers(device: Device, server: Ours) -> None:
    """By nvidia-smi where that names the worker, else by open files."""
    roles = {process.pid: role for role, process in server.processes()}
    try:
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
        holders = {int(word) for word in output.split() if word.isdigit()} & roles.keys()
    except (OSError, subprocess.TimeoutExpired):
        holders = set()
    way = "nvidia-smi"
    if "worker" not in {roles[pid] for pid in holders}:
        way, holders = "open files", {pid for pid in roles if has_device_open(pid)}
    device.record("contexts", way=way, roles=sorted(roles[pid] for pid in holders))
    if "worker" not in {roles[pid] for pid in holders}:
        raise Failed(f"{way} do not show that a worker uses the device")
    others = sum(roles[pid] != "worker" for pid in holders)
    device.targets.append(Target("processes beside workers with a context of the device", 0, "", others))


def has_device_open(pid: int) -> bool:
    folder = Path(f"/proc/{pid}/fd")
    try:
        return any(os.readlink(path).startswith("/dev/nvidia-uvm") for path in folder.iterdir())
    except OSError:  # it has ended, or closed a file
        return False


def free_memory(device: Device) -> int:
    """Asks in another process: this one has no context."""
    program = "print(0)" if device.is_rehearsal else FREE_MEMORY
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def memory_must_be_back(device: Device, before: int) -> None:
    deadline = time.monotonic() + 10  # the driver frees it after the end of a process
    while (lost := (before - free_memory(device)) / 2**20) > MAX_MEMORY_MIB and time.monotonic() < deadline:
        time.sleep(0.5)
    device.targets.append(Target("memory of the device that is not back after the end", MAX_MEMORY_MIB, "MiB", lost))
