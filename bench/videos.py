"""Memory and waits while many clients send videos to one server process, as `penstock bench serve` sends them.

    scripts/bench videos [--model DIRECTORY] [--clients 64] [--seconds 1-30] [--media-mb-in-flight 256]

The model is one that takes videos; without it, a tiny Qwen2-VL is made.
Memory is what the server process, the decoder host and its decoders have for themselves: anonymous pages, shared ones
by their shares, and the files of memory in which videos lie. The store is not counted: its size is fixed.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from bench.serve_cases.cases import Load, run_load
from bench.serve_cases.servers import Ours, Peak
from bench.vllm_cases.models import make_multimodal
from penstock.tools.inspect import all_processes
from penstock.tools.inspect.processes import with_descendants

MB = 1e6
LIMITS = ("media-mb-in-flight", "max-concurrent-videos")


@dataclass(frozen=True)
class Videos(Load):
    seconds: str = "1"  # of each video, or a range
    size: str = "320x240"
    fps: str = "12"

    def options(self) -> list[str]:
        videos = [f"--video-{name}={getattr(self, name)}" for name in ("seconds", "size", "fps")]
        return [*super().options(), "--videos=1", *videos, "--timeout=600"]


class Memory:
    """What a server process, its decoder host and its decoders have; `decoder` and `processes` are highest values."""

    def __init__(self, server: int) -> None:
        self._server = server
        self.decoder = self.processes = 0

    def nbytes(self) -> float:
        """Returns the bytes of all these processes, and of the videos in files of memory."""
        every = all_processes()
        pids = with_descendants(self._server, every)
        files: dict[int, int] = {}
        total = 0
        for pid in pids:
            pages = anonymous(pid)
            total += pages.get("Pss_Anon", 0)
            if pid != self._server and pid in every and every[pid].parent != self._server:
                self.decoder = max(self.decoder, pages.get("Private_Dirty", 0))
            files.update(memory_files(pid))
        self.processes = max(self.processes, len(pids) - 1)
        return total + sum(files.values())


def anonymous(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return {}
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def memory_files(pid: int) -> Iterator[tuple[int, int]]:
    """Yields the inode and the bytes of each file of memory with a video, or its tensors."""
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            if os.readlink(entry.path).startswith("/memfd:video"):
                status = os.stat(entry.path)
                yield status.st_ino, status.st_blocks * 512
    except OSError:
        return


def measure(run: Run, server: Ours) -> Target:
    options, output = run.options, run.output
    server.wait_for_an_answer()
    load = Videos(1, 1, "8", "4", size=options.size, fps=options.fps)
    run_load(server, load, run.scratch, 0)  # the decoder host starts
    memory = Memory(server.pid_of("server"))
    time.sleep(1.0)
    baseline = memory.nbytes()
    peak = Peak(memory.nbytes, 0.1)
    try:
        requests = options.requests or 2 * options.clients
        load = Videos(requests, options.clients, "8", "4", seconds=options.seconds, size=options.size, fps=options.fps)
        figures = run_load(server, load, run.scratch, 1, within=None)
    finally:
        peak.close()
    highest = peak.take()
    bound = baseline + 1.1 * (options.media_mb_in_flight << 20) + options.max_concurrent_videos * memory.decoder
    sizes = {"baseline": baseline, "highest": highest, "decoder": float(memory.decoder), "bound": bound}
    latency: dict[str, float] = figures["latency"]
    rates = {"p50_ms": latency["p50"], "p99_ms": latency["p99"], "requests_per_s": figures["requests_per_s"]}
    mb = {f"{name}_mb": nbytes / MB for name, nbytes in sizes.items()}
    output.record("videos", "penstock", clients=options.clients, processes=memory.processes, **mb, **rates)
    columns = [*sizes, "processes beside the server", *rates]
    cells = [f"{value:.0f}" for value in (*mb.values(), memory.processes, *list(rates.values())[:2])]
    row = (f"{options.clients} clients, {figures['requests']} answered", [*cells, f"{figures['requests_per_s']:.2f}"])
    output.table("Memory of the server process and its decoders, MB", columns, [row])
    metrics = server.request("GET", "/metrics")[1].decode()
    ends = re.findall(r'penstock_videos_total\{end="(\w+)",server="0"\} (\d+)', metrics)
    output.say("videos: " + ", ".join(f"{number} {end}" for end, number in ends if number != "0"))
    return Target("memory, over baseline + 1.1 budget + decoders x M", 1.0, "x", highest / bound)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("videos", __doc__)
    parser.add_argument("--model", help="directory (default: a tiny one is made)")
    parser.add_argument("--clients", type=int, default=64, help="requests open at a time (64)")
    parser.add_argument("--requests", type=int, help="in all (twice the clients)")
    parser.add_argument("--seconds", default="1-30", help="of each video (1-30)")
    parser.add_argument("--size", default="320x240", help="of its frames (320x240)")
    parser.add_argument("--fps", default="12", help="of each video (12)")
    parser.add_argument("--media-mb-in-flight", type=int, default=256, help="MiB (256)")
    parser.add_argument("--max-concurrent-videos", type=int, default=2, help="decoders (2)")
    options = parser.parse_args(arguments)
    limits = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in LIMITS]
    with Run("videos", options) as run:
        model = options.model or str(make_multimodal(run.scratch / "models"))
        server = Ours.of([model, *limits], run.scratch / "log")
        try:
            return run.conclude("penstock", [measure(run, server)])
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
