"""Seconds from the command `penstock serve` to its first answer, and processor time of all its processes until then.

scripts/bench start [--rounds 5] [MODEL]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_TIMEOUT_S = 120.0
POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory of a model (default: the bundled model)")
    parser.add_argument("--rounds", type=int, default=5, help="starts (5)")
    options = parser.parse_args()
    starts = [start(options.model) for _ in range(options.rounds)]
    for name, values in zip(("first answer, s", "processor time, s"), zip(*starts, strict=True), strict=True):
        print(f"{name:18} median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")


def start(model: str | None) -> tuple[float, float]:
    """Returns the seconds to the first answer, and the processor time of the launcher and its children in seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    command = [sys.executable, "-m", "penstock", "serve", *filter(None, [model]), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
        while not is_answered(f"http://127.0.0.1:{port}/v1/completions", body):
            if process.poll() is not None or time.monotonic() > began + START_TIMEOUT_S:
                raise SystemExit("bench start: the server does not answer")
            time.sleep(POLL_S)
        return time.monotonic() - began, processor_time(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_answered(url: str, body: bytes) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=START_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def processor_time(launcher: int) -> float:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in (launcher, *children)]
    return sum(int(times) for row in fields for times in row[11:13]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
