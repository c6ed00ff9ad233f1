"""What vLLM on Penstock was to reach, from what a run found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.harness.figures import Figures, median_figures
from bench.harness.targets import Target
from bench.harness.turns import Outcome
from bench.vllm_cases.queues import MB, VIEWS
from bench.vllm_cases.tables import ratio, ratio_to_better
from bench.vllm_cases.ways import AS_IT_IS, ON_DEVICE, OURS, PARKING

# By requests at a time: the least ratio of requests/s, the most of processor time per request.
SERVED = {4: (1.0, 0.85), 16: (1.3, 0.65), 64: (0.95, 0.85)}
STEPS = {1: 1.0, 2: 1.1, 4: 1.1}  # by workers: the most of vLLM's time
AS_COPIES = {15: 1.05, 32: 0.7}  # by MiB: the most of the time of vLLM's default …
AS_VIEWS = {15: 0.6, 32: 0.15}  # … and as views
SLOW_PACE, FAST_PACE = 0.02, 0.001  # seconds between two steps


@dataclass
class Found:
    """What a run has measured so far."""

    served: dict[str, dict[int, Outcome]] = field(default_factory=dict)  # text, images; by requests at a time
    idle: Outcome | None = None
    steps: dict[tuple[int, int], Outcome] = field(default_factory=dict)  # by workers and requests
    paced: dict[tuple[float, int], Outcome] = field(default_factory=dict)  # by seconds between two, and workers
    tensors: dict[tuple[int, int], Outcome] = field(default_factory=dict)  # by workers and bytes
    images: dict[int, Outcome] = field(default_factory=dict)  # by bytes
    memory: Outcome | None = None
    codec: dict[int, Outcome] = field(default_factory=dict)  # by requests
    starts: list[dict[str, float]] = field(default_factory=list)  # seconds to the first answer, by way, of each case
    reserved: dict[str, Figures] = field(default_factory=dict)  # bytes before the first request, by way


def targets(result: Found) -> Iterator[Target]:
    for kind in ("text", "images"):
        for concurrency, (rate, cpu) in SERVED.items():
            if kind in result.served:
                yield from _served(kind, concurrency, rate, cpu, result.served[kind].get(concurrency))
    yield from _queue(result)
    yield from _tensors(result)
    if result.codec:
        yield from _codec(result.codec.get(256))
    if result.reserved:
        claimed = result.reserved.get(OURS, {}).get("claimed_nbytes")
        yield Target("shared memory claimed at TP 2 before the first request", 32, "MiB",
                     None if claimed is None else claimed / MB)  # fmt: skip
    if result.starts:
        yield Target("seconds to the first answer, of vLLM as it is", 1.05, "x", _start_ratio(result.starts))


def _served(kind: str, concurrency: int, rate: float, cpu: float, outcome: Outcome | None) -> Iterator[Target]:
    about = f"{kind}, {concurrency} at a time"
    yield Target(f"{about}: requests/s, of vLLM as it is", rate, "x",
                 ratio(outcome, OURS, AS_IT_IS, "requests_per_s"), is_least=True)  # fmt: skip
    yield Target(f"{about}: requests/s, of parking after 2 ms", 0.95, "x",
                 ratio(outcome, OURS, PARKING, "requests_per_s"), is_least=True)  # fmt: skip
    for name in ("p50", "p99"):
        figure = ratio_to_better(outcome, OURS, (AS_IT_IS, PARKING), f"latency_{name}_ms")
        yield Target(f"{about}: latency {name}, of the better of both", 1.05, "x", figure)
    yield Target(f"{about}: processor time per request, of vLLM as it is", cpu, "x",
                 ratio(outcome, OURS, AS_IT_IS, "cpu_ms"))  # fmt: skip


def _queue(result: Found) -> Iterator[Target]:
    for (workers, requests), outcome in result.steps.items():
        about = f"back to back, {workers} worker(s), {requests} requests: p50, of vLLM's"
        yield Target(about, STEPS[workers], "x", ratio(outcome, OURS, AS_IT_IS, "round_trip_p50_us"))
    for (pace, workers), outcome in result.paced.items():
        latency = ratio(outcome, OURS, AS_IT_IS, "one_way_p50_us")
        cores = median_figures(outcome.rounds[OURS])["worker_cores"] if OURS in outcome.rounds else None
        slowest, most = paced_limits(pace, latency)
        about = f"each {pace * 1e3:g} ms, {workers} worker(s)"
        yield Target(f"{about}: one way p50, of vLLM's", slowest, "x", latency)
        yield Target(f"{about}: processor of each worker", most, "cores", cores)


def paced_limits(pace: float, latency: float | None) -> tuple[float, float]:
    """Returns the most of vLLM's latency, and the most cores of a worker: a worker that is as fast may use more."""
    if pace == SLOW_PACE:
        return 1.0, 0.02
    is_as_fast = latency is not None and latency <= 1.05
    return (1.05, 0.15) if is_as_fast else (1.25, 0.06)


def _tensors(result: Found) -> Iterator[Target]:
    key = "round_trip_p50_us"
    for (workers, nbytes), outcome in result.tensors.items():
        about = f"{nbytes // MB} MiB in a step, {workers} workers"
        copies, views = AS_COPIES[nbytes // MB], AS_VIEWS[nbytes // MB]
        yield Target(f"{about}: as copies, of vLLM's default", copies, "x", ratio(outcome, OURS, AS_IT_IS, key))
        yield Target(f"{about}: as views, of vLLM's default", views, "x", ratio(outcome, OURS + VIEWS, AS_IT_IS, key))
        figure = ratio(outcome, OURS + VIEWS, AS_IT_IS + VIEWS, key)
        yield Target(f"{about}: as views, of vLLM's arena", 1.05, "x", figure)
    for nbytes, outcome in result.images.items():
        about = f"one image of {nbytes // MB} MiB to 4 workers of a device, of vLLM's default"
        yield Target(about, 0.1, "x", ratio(outcome, ON_DEVICE, AS_IT_IS, key))
    if result.memory is not None:
        rounds = result.memory.rounds.get(ON_DEVICE)
        copies = round(median_figures(rounds)["copies"], 1) if rounds else None
        yield Target(
            "memory of an image that 4 workers of a device hold, times its size (rounded to tenths)", 1, "x", copies
        )


def _codec(outcome: Outcome | None) -> Iterator[Target]:
    """Both objects of a step together."""
    time = nbytes = None
    if outcome is not None and outcome.rounds:
        pickled, changed = (median_figures(outcome.rounds[form]) for form in ("pickle", "change"))

        def ratio_of(unit: str) -> float:
            keys = [f"{what}_{unit}" for what in ("step", "output")]
            return sum(changed[key] for key in keys) / sum(pickled[key] for key in keys)

        time, nbytes = ratio_of("both_us"), ratio_of("nbytes")
    yield Target("step and output of 256 requests: encode + decode, of pickle's time", 0.5, "x", time)
    yield Target("step and output of 256 requests: bytes, of pickle's", 0.05, "x", nbytes)


def _start_ratio(starts: list[dict[str, float]]) -> float | None:
    """Returns the median over the cases in which both were started."""
    ratios = [seconds[OURS] / seconds[AS_IT_IS] for seconds in starts if {OURS, AS_IT_IS} <= seconds.keys()]
    return statistics.median(ratios) if ratios else None
