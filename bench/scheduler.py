"""What the scheduler costs for each step: plan, apply, sent and done, of so many samples that all decode.

scripts/bench scheduler [--steps 1000]    256 and 1,024 samples
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.harness.run import Run, command_line
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Ints, SamplingParams, StepDone, Submit

SAMPLES = (256, 1024)
PARTS = ("plan", "finish", "apply", "sent", "done")
PARAMS = SamplingParams(max_tokens=None)


def times(samples: int, steps: int, waiting: int) -> dict[str, float]:
    """Medians in microseconds, with a step always in flight; and the best tenth, for a machine that is not quiet.

    Prompts end at all places of a block, so that in each step every sixteenth sample fills one and needs another.
    """
    schedule = BatchState(samples, 1 << 17)
    config = SchedulerConfig(max_model_len=1 << 15, max_num_batched_tokens=1 << 16, eos_ids=(2,))
    scheduler, plan = Scheduler(schedule, config), StepBuilder(schedule)
    chance = np.random.default_rng(7)
    for request in range(samples + waiting):
        prompt = chance.integers(3, 50_000, 32 + request % 16, np.int32)
        scheduler.submit(Submit(0, request, prompt, PARAMS, client=f"client {request % 50}"))
    spent: list[list[float]] = []
    ids: list[Ints] = []
    for number in range(1, steps + 1):
        if scheduler.in_flight == 2:
            begin = time.perf_counter()
            scheduler.on_result(StepDone(1, number - 2, ids[-2]))
            done = time.perf_counter() - begin
        at = [time.perf_counter()]
        scheduler.schedule(plan)
        at.append(time.perf_counter())
        step = plan.build(1, number)
        at.append(time.perf_counter())
        schedule.apply(step)
        at.append(time.perf_counter())
        scheduler.on_sent(step)
        at.append(time.perf_counter())
        ids.append(chance.integers(3, 50_000, schedule.sampled.size, np.int32))
        if number > 8:
            spent.append([*np.diff(at), done])
    columns = np.array(spent) * 1e6
    output = dict(zip(PARTS, np.median(columns, axis=0).tolist(), strict=True))
    ours = columns[:, [0, 3, 4]].sum(axis=1)
    return {**output, "plan + sent + done": float(np.median(ours)), "its best tenth": float(np.quantile(ours, 0.1))}


def main(arguments: Sequence[str]) -> int:
    parser = command_line("scheduler", __doc__)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    with Run("scheduler", options) as run:
        for samples in SAMPLES:
            for waiting in (0, 100):
                figures = times(samples, options.steps, waiting)
                named = {f"{name.replace(' ', '_')}_us": value for name, value in figures.items()}
                run.output.record("step", "penstock", samples=samples, waiting=waiting, **named)
                words = ", ".join(f"{name} {value:.0f}" for name, value in figures.items())
                run.output.say(f"{samples} samples, {waiting} requests waiting: {words} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
