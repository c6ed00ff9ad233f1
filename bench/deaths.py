"""How soon a survivor is told of the death of a process, by how much private memory that process has.

The kernel frees that memory before a pidfd says that the process has ended. Beside it, in the same kills: when the
pidfd said so.

    scripts/bench deaths [--gigabytes 0,1,4,8] [--rounds 5] [--json]
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median

import penstock
from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target

TARGET_MS = 100.0
WAIT = 60.0  # seconds for anything at all

PEER = """
import sys, penstock
sender = penstock.attach(sys.argv[1]).open_sender(name="peer")
memory = bytearray(int(float(sys.argv[2]) * (1 << 30)))
for at in range(0, len(memory), 4096):
    memory[at] = 1
sender.send(b"ready")
sys.stdin.readline()
"""


def kill(gigabytes: float) -> tuple[float, float]:
    """Returns after how many milliseconds PeerDied was raised, and the pidfd readable."""
    ring = penstock.Ring(name="deaths")
    with ring.open_receiver(name="survivor") as receiver:
        command = [sys.executable, "-c", PEER, str(ring.ticket), str(gigabytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
            receiver.receive(timeout=WAIT)
            pidfd = os.pidfd_open(peer.pid)
            ended: list[float] = []

            def watch() -> None:
                select.select([pidfd], [], [], WAIT)
                ended.append(time.monotonic())

            watcher = threading.Thread(target=watch)
            watcher.start()
            began = time.monotonic()
            peer.kill()
            try:
                receiver.receive(timeout=WAIT)
            except penstock.PeerDied:
                now = time.monotonic()
            watcher.join()
            os.close(pidfd)
    return (now - began) * 1e3, (ended[0] - began) * 1e3


def targets(run: Run, sizes: Sequence[float]) -> Iterator[Target]:
    rows, worst = [], 0.0
    for gigabytes in sizes:
        times = [kill(gigabytes) for _ in range(run.rounds)]
        outcome, ended = (sorted(each) for each in zip(*times, strict=True))
        worst = max(worst, outcome[-1])
        run.output.record("death", "penstock", gigabytes=gigabytes, told_ms=outcome, pidfd_ms=ended)
        rows.append((f"{gigabytes:g} GB", [short(median(outcome)), short(outcome[-1]), short(median(ended))]))
    run.output.table("Milliseconds after SIGKILL", ["PeerDied, p50", "worst", "pidfd, p50"], rows)
    yield Target("PeerDied after SIGKILL, worst", TARGET_MS, "ms", worst)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("deaths", __doc__)
    parser.add_argument("--gigabytes", default="0,1,4,8", help="private memory of the process (0,1,4,8)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with Run("deaths", options) as run:
        return run.conclude("penstock", targets(run, [float(size) for size in options.gigabytes.split(",")]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
