"""Memory and waits while many clients send videos to one server process, as `penstock bench serve` sends them.

    scripts/bench videos [--model DIRECTORY] [--clients 64] [--seconds 1-30] [--media-mb-in-flight 256]

The model is one that takes videos; without it, a tiny Qwen2-VL is made.
Memory is what the server process, the decoder host and its decoders have for themselves: anonymous pages, shared ones
by their shares, and the files of memory in which videos lie. The store is not counted: its size is fixed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.memory import is_ready
from bench.vllm_cases.models import make_multimodal
from penstock.tools.inspect import all_processes
from penstock.tools.inspect.processes import with_descendants

MB = 1e6
PENSTOCK = [sys.executable, "-m", "penstock"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory (default: a tiny one is made)")
    parser.add_argument("--clients", type=int, default=64, help="requests open at a time (64)")
    parser.add_argument("--requests", type=int, help="in all (twice the clients)")
    parser.add_argument("--seconds", default="1-30", help="of each video (1-30)")
    parser.add_argument("--size", default="320x240", help="of its frames (320x240)")
    parser.add_argument("--fps", default="12", help="of each video (12)")
    parser.add_argument("--media-mb-in-flight", type=int, default=256, help="MiB (256)")
    parser.add_argument("--max-concurrent-videos", type=int, default=2, help="decoders (2)")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limits = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in LIMITS]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_multimodal(Path(folder) / "models"))
        process = subprocess.Popen([*PENSTOCK, "serve", model, f"--port={port}", *limits], stdout=subprocess.DEVNULL)
        try:
            measure(f"http://127.0.0.1:{port}", options)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


LIMITS = ("media-mb-in-flight", "max-concurrent-videos")


def measure(url: str, options: argparse.Namespace) -> None:
    while not is_ready(url):
        time.sleep(0.5)
    server = json.load(urllib.request.urlopen(url + "/health"))["servers"][0]["pid"]
    load(url, options, 1, 1, "1")  # the decoder host starts
    watch = Highest(server)
    time.sleep(1.0)
    baseline = watch.memory()
    figures = load(url, options, options.requests or 2 * options.clients, options.clients, options.seconds)
    watch.end()
    budget = options.media_mb_in_flight << 20
    bound = baseline + 1.1 * budget + options.max_concurrent_videos * watch.decoder
    latency = figures["latency"]
    print(f"{options.clients} clients, {figures['requests']} answered, {figures['failed']} failed: {figures['errors']}")
    print(f"{'baseline':44} {baseline / MB:8.0f} MB")
    print(f"{'highest':44} {watch.highest / MB:8.0f} MB")
    print(f"{'a decoder of its own, at most (M)':44} {watch.decoder / MB:8.0f} MB")
    print(f"{'bound: baseline + 1.1 budget + decoders x M':44} {bound / MB:8.0f} MB")
    print(f"{'processes beside the server, at most':44} {watch.processes:8}")
    print(
        f"latency p50 {latency['p50']:.0f} ms, p99 {latency['p99']:.0f} ms; {figures['requests_per_s']:.2f} requests/s"
    )
    ends = re.findall(r'penstock_videos_total\{end="(\w+)",server="0"\} (\d+)', metrics(url))
    print("videos: " + ", ".join(f"{number} {end}" for end, number in ends if number != "0"))


def load(url: str, options: argparse.Namespace, requests: int, clients: int, seconds: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        videos = [
            "--videos=1",
            f"--video-seconds={seconds}",
            f"--video-size={options.size}",
            f"--video-fps={options.fps}",
        ]
        how = [f"--num-prompts={requests}", f"--max-concurrency={clients}", "--input-len=8", "--output-len=4"]
        command = [*PENSTOCK, "bench", "serve", f"--base-url={url}", *videos, *how, "--timeout=600"]
        subprocess.run([*command, f"--result-filename={results}"], stdout=subprocess.DEVNULL, check=False)
        figures: dict[str, Any] = json.loads(results.read_text())["figures"]
        return figures


class Highest:
    """Looks at a server process and its descendants ten times a second."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.highest = self.decoder = 0.0
        self.processes = 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def memory(self) -> float:
        """Returns the bytes of all these processes, and of the videos in files of memory."""
        pids = with_descendants(self._server, all_processes())
        files: dict[int, int] = {}
        total = 0.0
        for pid in pids:
            pages = anonymous(pid)
            total += pages.get("Pss_Anon", 0)
            if parent(pid) not in (self._server, None) and pid != self._server:
                self.decoder = max(self.decoder, pages.get("Private_Dirty", 0))
            files.update(memory_files(pid))
        self.processes = max(self.processes, len(pids) - 1)
        return total + sum(files.values())

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            self.highest = max(self.highest, self.memory())


def anonymous(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return {}
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def memory_files(pid: int) -> Iterator[tuple[int, int]]:
    """Yields the inode and the bytes of each file of memory with a video, or its tensors."""
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            if os.readlink(entry.path).startswith("/memfd:video"):
                status = os.stat(entry.path)
                yield status.st_ino, status.st_blocks * 512
    except OSError:
        return


def metrics(url: str) -> str:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
