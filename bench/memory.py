"""Memory of a server process under large bodies and images, by `penstock serve`; and of the workers of two engines.

    scripts/bench memory [--only server|workers] [--model DIRECTORY] [--requests 8] [--at-once 4] [--rest 60]

Sends prompts of 7 MB to /tokenize and images of 40 megapixels in chats, some at a time, then nothing. Then starts one
and two engines that compute in float32 with weights in bfloat16, and kills a worker.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.run import Run, command_line
from bench.serve_cases import model
from bench.serve_cases.servers import NAME, Ours, Peak
from penstock.engine.client.client import Client
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import SamplingParams
from penstock.tools.inspect import private_nbytes_of

MB = 1e6
TEXT_NBYTES = 7_000_000
SIDES = (7300, 5470)  # just under 40 million pixels
Body = tuple[str, dict[str, Any]]  # path and JSON of a request


def text(number: int) -> Body:
    words = f"{number} is the number of a long text about nothing in particular. "
    return "/tokenize", {"model": NAME, "prompt": words * (TEXT_NBYTES // len(words))}


def picture(number: int, format: str, *, sides: tuple[int, int] = SIDES, **options: Any) -> Body:
    from PIL import Image

    raw = io.BytesIO()
    noise = Image.frombytes("RGB", (64, 64), os.urandom(3 * 64 * 64))
    noise.resize(sides, Image.Resampling.NEAREST).save(raw, format, **options)
    url = f"data:image/{format.lower()};base64,{base64.b64encode(raw.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you see?"}]
    return "/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


KINDS: dict[str, Callable[[int], Body]] = {
    "prompts of 7 MB to /tokenize": text,
    "JPEGs of 40 megapixels": partial(picture, format="JPEG"),
    "progressive JPEGs": partial(picture, format="JPEG", progressive=True),
    "PNGs of 40 megapixels": partial(picture, format="PNG", compress_level=1),
}


def measure(run: Run, server: Ours) -> None:
    server.wait_for_an_answer()
    pid = server.pid_of("server")
    rows: list[tuple[str, list[str]]] = []

    def now() -> float:
        return (private_nbytes_of(pid) or 0) / MB

    def ask(body: Body) -> int:
        path, content = body
        return server.request("POST", path, content)[0]

    def tell(what: str, highest: float, answers: str = "", seconds: float = 0.0) -> None:
        mb = now()
        run.output.record("memory", "penstock", load=what, mb=mb, highest_mb=highest, seconds=seconds)
        rows.append((what, [f"{mb:.0f}", f"{highest:.0f}", answers, f"{seconds:.0f}"]))

    ask(picture(0, "PNG", sides=(64, 64)))
    tell("serves, has seen a small image", now())
    peak = Peak(now, 0.05)
    try:
        for name, body in KINDS.items():
            began = time.monotonic()
            with ThreadPoolExecutor(run.options.at_once) as threads:
                statuses = list(threads.map(lambda number, body=body: ask(body(number)), range(run.options.requests)))
            answers = ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses)))
            tell(name, peak.take(), answers, time.monotonic() - began)
        for _ in range(6):
            time.sleep(run.options.rest / 6)
            tell("then nothing", peak.take(), seconds=run.options.rest / 6)
    finally:
        peak.close()
    run.output.table("Private memory of the server process, MB", ["after", "highest", "answers", "s"], rows)
    others = [(private_nbytes_of(process.pid) or 0) / MB for _, process in server.processes() if process.pid != pid]
    run.output.say(f"other processes: {', '.join(f'{mb:.0f} MB' for mb in others)}")


def proportional_mb(pid: int) -> float:
    """Returns the memory of a process, of which shared pages count in parts."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:")) / MB


async def step_ms(client: Client) -> float:
    """Returns the median time between two ids of an answer."""
    times = []
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    async with await client.submit(np.arange(3, 40, dtype=np.int32), params) as stream:
        async for _ in stream:
            times.append(time.monotonic())
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times)) * 1e3


async def start_engines(path: Path, engines: int, shares: bool) -> dict[str, float]:
    """Starts engines, and kills a worker of the first."""
    config = EngineConfig(
        model=str(path),
        dtype="float32",
        data_parallel_size=engines,
        max_model_len=256,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        share_weights=shares,
    )
    launcher, began = Launcher(config), time.monotonic()
    launcher.start()
    try:
        await launcher.serving(600)
        figures = {"start_s": time.monotonic() - began}
        async with Client(launcher.cluster, 0) as client:
            figures["step_ms"] = await step_ms(client)
        children = [child for unit in launcher.units for child in unit.children.values()]
        workers = [child for child in children if child.member.kind == "worker"]
        figures["mb"] = sum(proportional_mb(child.pid) for child in workers)
        os.kill(workers[0].pid, signal.SIGKILL)
        began = time.monotonic()
        while launcher.board.row(0)[StatusBoard.SERVING] != 2:
            await asyncio.sleep(0.01)
        return {**figures, "restart_s": time.monotonic() - began}
    finally:
        await launcher.stop()


def measure_workers(run: Run) -> None:
    path = run.scratch / model.REAL
    model.make(path, model.REAL)
    rows: list[tuple[str, list[str]]] = []
    for shares in (False, True):
        alone = 0.0
        for engines in (1, 2):
            figures = asyncio.run(start_engines(path, engines, shares))
            alone = alone or figures["mb"]
            run.output.record("workers", "penstock", engines=engines, shares=shares, **figures)
            name = f"{engines} engine{'s' * (engines > 1)}, {'shared' if shares else 'own'} weights"
            texts = [f"{figures['mb']:.0f}", f"{figures['mb'] / alone:.2f}x"]
            rows.append((name, texts + [f"{figures[key]:.1f}" for key in ("start_s", "restart_s", "step_ms")]))
    columns = ["MB", "of one engine", "start, s", "kill to the next life, s", "decode step, ms"]
    run.output.table("Proportional memory of all workers: 0.6B, float32 of bfloat16 files", columns, rows)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("memory", __doc__)
    parser.add_argument("--only", choices=("server", "workers"), help="one of the two (both)")
    parser.add_argument("--model", help="directory of a model that takes images (default: the one that ships)")
    parser.add_argument("--requests", type=int, default=8, help="of each kind (8)")
    parser.add_argument("--at-once", type=int, default=4, help="requests at a time (4)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds without requests, at the end (60)")
    options = parser.parse_args(arguments)
    with Run("memory", options) as run:
        if options.only != "workers":
            server = Ours.of([*filter(None, [options.model])], run.scratch / "log")
            try:
                measure(run, server)
            finally:
                server.stop()
        if options.only != "server":
            measure_workers(run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
