"""The bridge between two nodes, on the loopback of one machine: frames, values by key, and what an idle link costs.

One way to the last of 4 receivers over there, in turn with a local broadcast, vLLM's queue with remote readers, and
plain ZeroMQ from the sender itself. By itself: `python -m bench.nodes.bridge`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.harness import figures
from bench.harness.figures import Figures
from bench.harness.output import short, short_nbytes
from bench.harness.phases import Order
from bench.harness.run import Run, side_by_side
from bench.harness.targets import Target
from bench.harness.turns import Column, Outcome, Turns
from bench.impls import IMPLEMENTATIONS, PENSTOCK
from bench.impls.penstock_bridge import line_of, start_bridge

BRIDGE, VLLM, ZEROMQ = "penstock-bridge", "vllm-remote", "zeromq-tcp"
WAYS = (PENSTOCK, BRIDGE, VLLM, ZEROMQ)
RECEIVERS = 4
SIZES = (120, 2600)
PACES = (1e-3, 5e-3)
VALUE_NBYTES, RANKS = 64_000_000, 2
IDLE_S = 10.0


def run_frames(run: Run) -> None:
    """One way to the last of 4, by size and pace."""
    turns = run.turns(BRIDGE, Turns)
    available = run.available(IMPLEMENTATIONS[name] for name in WAYS)
    columns: dict[str, Column] = {}
    turns.open(available, RECEIVERS)
    try:
        for pace in PACES[:1] if run.is_quick else PACES:
            for nbytes in SIZES:
                order = Order("paced", nbytes, 60 if run.is_quick else int(0.5 / pace) + 200, pace, False)
                outcome = turns.take(turns.same_order(order), figures.paced, run.rounds)
                keys = ("p50_us", "p99_us", "messages")
                turns.record("bridge", outcome, keys, "p50_us", nbytes=nbytes, pace_ms=pace * 1e3, receivers=RECEIVERS)
                run.results[f"frames {nbytes} {pace:g}"] = outcome
                columns[f"{short_nbytes(nbytes)}, {pace * 1e3:g} ms"] = Column(outcome, _spread, "p50_us")
        turns.table(f"One way to the last of {RECEIVERS}: µs p50 / p99", columns)
        turns.close()
    finally:
        turns.kill()


def _spread(figures: Figures) -> str:
    return f"{short(figures['p50_us'])} / {short(figures['p99_us'])}"


def _link(stores: Sequence[object], pulls: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Two bridge processes for values, which run."""
    home = start_bridge("values-home", [str(stores[0])])
    away = start_bridge("values-away", [line_of(home), str(stores[1]), *pulls])
    for process in (home, away):
        if line_of(process) != "runs":
            raise RuntimeError("a bridge process has not started")
    return [home, away]


def run_values(run: Run) -> None:
    """A value of 64 MB, opened by 2 clients over there at a time; and what the link costs while nothing passes."""
    import numpy as np

    from penstock import MemoryOptions, Store
    from penstock.bridge import PullChannels, Puller

    pulls = PullChannels.open(RANKS)
    memory = MemoryOptions(prefault=True)
    with Store(3 * VALUE_NBYTES, memory=memory) as home, Store(3 * VALUE_NBYTES, memory=memory) as away:
        tickets = [str(pulls.requests.ticket), *(str(answers.ticket) for answers in pulls.answers)]
        bridges = _link([home.ticket, away.ticket], tickets)
        try:
            pullers = [Puller(pulls, client, away) for client in range(RANKS)]
            took: list[float] = []
            for turn in range(2 if run.is_quick else 10):
                key = bytes([turn]) * 32
                home.put(np.full(VALUE_NBYTES, turn, np.uint8), key=key).release()
                began = time.perf_counter()
                threads = [threading.Thread(target=_open, args=(puller, key, turn)) for puller in pullers]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                took.append((time.perf_counter() - began) * 1e3)
                home.remove(key)
                away.remove(key)
            run.results["value"] = statistics.median(took)
            seconds = 2.0 if run.is_quick else IDLE_S
            before = [_cpu_ns(bridge.pid) for bridge in bridges]
            time.sleep(seconds)
            spent = [
                (_cpu_ns(bridge.pid) - first) / 1e9 / seconds for bridge, first in zip(bridges, before, strict=True)
            ]
            run.results["idle"] = max(spent)
            for puller in pullers:
                puller.close()
        finally:
            for bridge in bridges:
                bridge.kill()
                bridge.wait()
    pulls.close()
    run.output.record("value", BRIDGE, nbytes=VALUE_NBYTES, ranks=RANKS, ms=run.results["value"], best_ms=min(took))
    run.output.record("idle", BRIDGE, cores=run.results["idle"])
    run.output.say(
        f"\n64 MB by key, opened by {RANKS} at a time: {run.results['value']:.1f} ms (median of {len(took)}, "
        f"best {min(took):.1f}); an idle side of the link: {run.results['idle']:.5f} cores"
    )


def _open(puller: object, key: bytes, turn: int) -> None:
    from penstock.bridge import Puller

    assert isinstance(puller, Puller)
    with puller.get(key, 30.0) as lease:
        pixels = lease.value()
        if int(pixels[0]) != turn or int(pixels[-1]) != turn:
            raise ValueError("the value has changed on its way")
        del pixels


def _cpu_ns(pid: int) -> int:
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))


CASES = {"bridge": run_frames, "bridge-values": run_values}


def targets(run: Run) -> list[Target]:
    result = []
    for nbytes in SIZES:
        outcome = run.results.get(f"frames {nbytes} {PACES[0]:g}")
        over = ratio = None
        if isinstance(outcome, Outcome) and {PENSTOCK, BRIDGE} <= outcome.rounds.keys():
            over = outcome.figures(BRIDGE)["p50_us"] - outcome.figures(PENSTOCK)["p50_us"]
        if isinstance(outcome, Outcome) and {VLLM, BRIDGE} <= outcome.rounds.keys():
            ratio = outcome.figures(VLLM)["p50_us"] / outcome.figures(BRIDGE)["p50_us"]
        result.append(Target(f"{nbytes} B each ms over a bridge, more than a local broadcast: p50", 120, "µs", over))
        result.append(Target(f"{nbytes} B each ms: vLLM's queue with remote readers over ours", 1, "", ratio, True))
    result.append(Target("an idle side of a link", 0.002, "cores", run.results.get("idle")))
    result.append(Target(f"64 MB by key, opened by {RANKS} over there", 80, "ms", run.results.get("value")))
    return result


def main(arguments: Sequence[str]) -> int:
    options = side_by_side("nodes.bridge", __doc__, [*CASES], [*WAYS]).parse_args(arguments)
    with Run("nodes-bridge", options, rounds=5, patience=60.0) as run:
        for name in run.named("only"):
            CASES[name](run)
        return run.conclude(BRIDGE, targets(run))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
