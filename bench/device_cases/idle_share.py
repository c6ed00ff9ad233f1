"""How long a device waits between and within decode steps, by torch's profiler: two steps in flight, in one process."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from bench.device_cases.device_run import Device
from bench.harness.targets import Target
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import SamplingParams, Submit
from penstock.engine.worker.worker import build_result

IDLE = 0.03  # of the time of a decode step
LONG_US = 5.0  # of a gap between kernels: the device waits for the host; within a graph, gaps are shorter
BLOCK_SIZE, PROMPT = 16, 64
WARM_UP = 10  # decode steps
CALLS = ("GraphLaunch", "LaunchKernel", "MemcpyAsync", "Synchronize", "Malloc", "Memcpy HtoD", "Memcpy DtoH")


def idle(device: Device) -> None:
    import torch

    is_cuda, steps = device.scale.device == "cuda", device.scale.idle_steps
    tokens = 2 * steps + 4 * WARM_UP
    step = decode(build_runner(device, tokens), device.scale.slots, tokens)

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"] if is_cuda else 0

    def profile(count: int, kinds: Iterable[Any]) -> Any:
        with torch.profiler.profile(activities=list(kinds)) as result:
            for _ in range(count):
                next(step)
            if is_cuda:
                torch.cuda.synchronize()
        return result

    for _ in range(WARM_UP):
        next(step)
    before = allocations()
    for _ in range(steps):
        next(step)
    allocated = (allocations() - before) / steps
    host = torch.profiler.ProfilerActivity.CPU
    kinds = {torch.profiler.ProfilerActivity.CUDA if is_cuda else host}
    of_kernels, of_calls = profile(steps, kinds), profile(WARM_UP, kinds | {host})
    step.close()
    report(device, of_kernels, of_calls, allocated)


def build_runner(device: Device, tokens: int) -> Any:
    from penstock.engine.worker.model_runner import ModelRunner

    slots, per_request = device.scale.slots, -(-(PROMPT + tokens) // BLOCK_SIZE)
    more: dict[str, Any] = {}
    if device.scale.device == "cuda":
        from penstock.engine.worker.cuda.graphs import CudaGraphs

        more = {"recorder": CudaGraphs(), "max_blocks_per_request": per_request}
    return ModelRunner(
        device.model(), slots=slots, device=device.scale.device, dtype="bfloat16", block_size=BLOCK_SIZE,
        max_blocks=slots * per_request, token_budget=8192, **more,
    )  # fmt: skip


def report(device: Device, of_kernels: Any, of_calls: Any, allocations: float) -> None:
    """`of_kernels`: a profile of the device alone; `of_calls`: one of WARM_UP steps, and of the host."""
    import torch

    slots, steps = device.scale.slots, device.scale.idle_steps
    types = torch.autograd.DeviceType  # type: ignore[attr-defined]
    kind = types.CUDA if device.scale.device == "cuda" else types.CPU
    events = [event.time_range for event in of_kernels.events() if event.device_type == kind]
    share, waiting, window = idle_of(sorted((event.start, event.end) for event in events))
    counts: Counter[str] = Counter()
    for event in of_calls.key_averages():
        counts.update({call: event.count for call in CALLS if call in event.key})
    headline = "a step has " + ", ".join(f"{count / WARM_UP:g} {call}" for call, count in sorted(counts.items()))
    device.record(
        "idle", headline, rows=slots, steps=steps, idle_share=share, waiting_share=waiting, window_ms=window / 1e3,
        kernels=len(events) / steps, allocations=allocations,
        **{call.replace(" ", "_"): count / WARM_UP for call, count in counts.items()},
    )  # fmt: skip
    device.targets.append(Target(f"share of time without a kernel, {slots} rows", IDLE, "", share, is_speed=True))
    device.targets.append(Target(f"the same, gaps longer than {LONG_US:g} us alone", IDLE, "", waiting, is_speed=True))
    order = f"{device.scale.device}_time_total"
    device.run.output.say(of_kernels.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=60))


def idle_of(intervals: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the share of time in no interval, the share of long gaps, and the time. The profiler's start disturbs
    the first tenth, which does not count."""
    begin, end = intervals[0][0], max(interval[1] for interval in intervals)
    begin += (end - begin) / 10
    free = long = 0.0
    until = begin
    for first, last in intervals:
        gap = max(0.0, first - until)
        free += gap
        long += gap if gap > LONG_US else 0.0
        until = max(until, last)
    return free / (end - begin), long / (end - begin), end - begin


def decode(runner: Any, rows: int, tokens: int) -> Generator[None, None, None]:
    """Answers as many requests as there are rows. Yields after each launch of a step in which all rows decode."""
    batch = BatchState(rows, runner.blocks, BLOCK_SIZE, -(-(PROMPT + tokens) // BLOCK_SIZE))
    config = SchedulerConfig(max_model_len=PROMPT + tokens, max_num_batched_tokens=8192, has_overlap=True)
    scheduler, builder, numbers = Scheduler(batch, config), StepBuilder(batch), itertools.count(1)
    params = SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=tokens)
    for number in range(rows):
        prompt = np.arange(number + 3, number + 3 + PROMPT, dtype=np.int32)
        scheduler.submit(Submit(0, number, prompt, params))
    flights: deque[Any] = deque()
    while scheduler.open_requests or flights:
        while len(flights) < 2 and scheduler.schedule(builder):
            step = builder.build(1, next(numbers))
            batch.apply(step)
            scheduler.on_sent(step)
            flights.append((step, runner.launch(batch, step)))
            if batch.rows.size == rows and batch.counts.max() == 1 and batch.sampled.size == rows:
                yield
        step, flight = flights.popleft()
        scheduler.on_result(build_result(step, flight.result()))
    raise RuntimeError("all requests have ended: too few tokens for the steps")
