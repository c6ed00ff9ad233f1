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
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from bench.harness.run import Run, side_by_side
from bench.impls import Unavailable
from bench.serve_cases.cases import Servers
from bench.vllm_cases import goals, queues, serving, ways
from bench.vllm_cases.ways import AS_IT_IS, OURS, WAYS

CASES = ("serve", "serve-images", "idle", "queue", "large", "steps", "start")
QUICK_CASES = ("serve", "queue", "large", "steps")  # each further one starts three servers
SERVED = {"serve": serving.TEXT, "serve-images": serving.IMAGES, "idle": serving.IDLE}
STARTS = 2  # of each way, in the case `start` alone


class Bench(Run):
    """One run: the servers, and what it has found."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("vllm", options, rounds=7, patience=60.0)
        self.measured = goals.Found()
        self.names = [name for name in WAYS if name in self.named("impl")]
        servers = self.turns(AS_IT_IS, Servers, scratch=self.scratch)
        self.serving = serving.Run(servers, self.measured, self.names)

    def run(self, cases: Sequence[str]) -> None:
        steps: dict[str, Callable[[], None]] = {}
        if {"queue", "large", "steps"} & set(cases):
            steps["queue, large, steps"] = partial(self.run_queues, cases)
        for name in SERVED:
            if name in cases:
                steps[name] = partial(self.serve, name)
        if "start" in cases and "serve-images" not in cases:  # with servers that tell it
            steps["start"] = self.start
        for name, step in steps.items():
            began = time.monotonic()
            self.attempt(name, step)
            self.output.record("duration", name, seconds=time.monotonic() - began)

    def serve(self, name: str) -> None:
        kind = serving.quick(SERVED[name]) if self.options.quick else SERVED[name]
        outcomes = self.serving.measure(kind)
        if kind.is_sleeping:
            self.measured.idle = outcomes.get(kind.loads[0].concurrency)
        else:
            self.measured.served[kind.name] = outcomes

    def start(self) -> None:
        for _ in range(1 if self.options.quick else STARTS):
            self.serving.start_only(serving.IMAGES)

    def run_queues(self, cases: Sequence[str]) -> None:
        scale = queues.QUICK if self.options.quick else queues.Scale()
        turns = self.turns(AS_IT_IS, queues.QueueTurns)
        there = []
        for name in self.names:
            try:
                there.append(ways.find(name, self.scratch / "queue"))
                if name == OURS and "large" in cases:
                    there.append(ways.on_device(there[-1]))
            except Unavailable as reason:
                self.skip(name, reason)
        try:
            turns.start(there)
            if "queue" in cases:
                self.measured.steps, self.measured.paced = queues.run_steps(turns, scale)
            if "steps" in cases:
                self.measured.codec = queues.run_codec(turns, scale)
            if "large" in cases:
                self.measured.tensors = queues.run_tensors(turns, scale)
                self.measured.images, self.measured.memory = queues.run_images(turns, scale)
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
    with Bench(parse(arguments)) as bench:
        bench.run(bench.named("only"))
        return bench.conclude(OURS, goals.targets(bench.measured))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
