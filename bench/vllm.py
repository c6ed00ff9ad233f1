"""vLLM on Penstock beside vLLM: as it is, with readers that park after 2 ms, and ours, in rounds that take turns.

    PENSTOCK_PEER_PYTHON=… scripts/bench vllm    all of it: 25 minutes on 2 quiet processors, 16 GB of memory
    scripts/bench vllm --only serve              vllm serve, text, TP 2: 8 minutes; serve-images: 8; idle: 4
    scripts/bench vllm --only queue,large,steps  the queue alone: 5 minutes
    scripts/bench vllm --quick                   small, one round, without serve-images and idle: 3 minutes
    PENSTOCK_VLLM=1,steps scripts/bench vllm …   ours with other parts; PENSTOCK_VLLM_… likewise

What it starts ends with it, also when it is killed. A case that fails is named with the reason; the others go on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.harness.options import side_by_side
from bench.harness.output import Output
from bench.harness.quiet import Patience, load_between, look
from bench.harness.targets import conclude
from bench.impls import Unavailable
from bench.serve import told_to_end
from bench.serve_cases.cases import Servers
from bench.vllm_cases import goals, queues, serving, ways
from bench.vllm_cases.ways import AS_IT_IS, OURS, WAYS

CASES = ("serve", "serve-images", "idle", "queue", "large", "steps", "start")
QUICK_CASES = ("serve", "queue", "large", "steps")  # each further one starts three servers
SERVED = {"serve": serving.TEXT, "serve-images": serving.IMAGES, "idle": serving.IDLE}
ROUNDS, PATIENCE = 7, 60.0  # seconds, in all, to wait for a quiet machine
STARTS = 2  # of each way, in the case `start` alone


@dataclass
class Bench:
    """One run: its options, and what it has found."""

    options: argparse.Namespace
    output: Output
    scratch: Path
    found: goals.Found = field(default_factory=goals.Found)

    def __post_init__(self) -> None:
        options = self.options
        self.names = [name for name in WAYS if name in options.impl.split(",")]
        self.rounds = options.rounds or (1 if options.quick else ROUNDS)
        self.patience = Patience((0.0 if options.quick else PATIENCE) if options.patience is None else options.patience)
        self.turns = {
            "reference": AS_IT_IS, "rounds": self.rounds, "is_pinned": False, "is_noisy": options.noisy
        }  # fmt: skip
        self.serving = serving.Run(
            Servers(self.output, self.patience, scratch=self.scratch, **self.turns), self.found, self.names
        )

    def run(self, cases: Sequence[str]) -> None:
        steps: dict[str, Callable[[], None]] = {}
        if {"queue", "large", "steps"} & set(cases):
            steps["queue, large, steps"] = partial(self.run_queues, cases)
        for name in SERVED:
            if name in cases:
                steps[name] = partial(self.serve, name)
        if "start" in cases and "serve-images" not in cases:  # whose servers have told it
            steps["start"] = self.start
        for name, step in steps.items():
            began = time.monotonic()
            try:
                step()
            except Exception as failure:
                self.output.say(f"\n{name} failed: {traceback.format_exc()}")
                self.output.record("failed", name, reason=f"{type(failure).__name__}: {failure}")
            self.output.record("duration", name, seconds=time.monotonic() - began)

    def serve(self, name: str) -> None:
        kind = serving.quick(SERVED[name]) if self.options.quick else SERVED[name]
        outcomes = self.serving.measure(kind)
        if kind.is_sleeping:
            self.found.idle = outcomes.get(kind.loads[0].concurrency)
        else:
            self.found.served[kind.name] = outcomes

    def start(self) -> None:
        for _ in range(1 if self.options.quick else STARTS):
            self.serving.start_only(serving.IMAGES)

    def run_queues(self, cases: Sequence[str]) -> None:
        scale = queues.QUICK if self.options.quick else queues.Scale()
        turns = queues.QueueTurns(self.output, self.patience, **self.turns)
        there = []
        for name in self.names:
            try:
                there.append(ways.find(name, self.scratch / "queue"))
                if name == OURS and "large" in cases:
                    there.append(ways.on_device(there[-1]))
            except Unavailable as reason:
                self.output.say(f"skipped {name}: {reason}")
                self.output.record("skipped", name, reason=str(reason))
        try:
            turns.start(there)
            if "queue" in cases:
                self.found.steps, self.found.paced = queues.run_steps(turns, scale)
            if "steps" in cases:
                self.found.codec = queues.run_codec(turns, scale)
            if "large" in cases:
                self.found.tensors = queues.run_tensors(turns, scale)
                self.found.images, self.found.memory = queues.run_images(turns, scale)
        finally:
            turns.end()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = side_by_side("vllm", __doc__, CASES, WAYS, quick="small, one round, and not all cases: does it run?")
    parser.set_defaults(only=None)
    options = parser.parse_args(arguments)
    if options.only is None:
        options.only = ",".join(QUICK_CASES if options.quick else CASES)
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, told_to_end)
    output = Output("vllm", is_json=options.json, folder=options.out)
    output.begin()
    before = look()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = Bench(options, output, Path(scratch))
        bench.run(options.only.split(","))
    return conclude(output, OURS, list(goals.targets(bench.found)), load_between(before, look()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
