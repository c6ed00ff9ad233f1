"""What the tensors were to reach, from what a run found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.harness.targets import Target
from bench.harness.turns import Outcome
from bench.tensor_cases.carrying import PRODUCE, STORE, median_of
from bench.tensor_cases.serving import OURS

MB = 1 << 20
OF_DEFAULT = {15: 0.15, 32: 0.1}  # MiB: of the time of vLLM's queue as it is by default
READERS = 4


@dataclass
class Found:
    """What a run has measured so far."""

    carried: dict[int, dict[int, Outcome]] = field(default_factory=dict)  # by receivers and size
    memory: Outcome | None = None
    request_nbytes: float | None = None
    served: dict[float, Outcome] = field(default_factory=dict)  # by the share that is kept

    def figure(self, receivers: int, nbytes: int, name: str, key: str) -> float | None:
        outcome = self.carried.get(receivers, {}).get(nbytes)
        return median_of(outcome, name)[key] if outcome and name in outcome.rounds else None

    def worst(self, name: str, key: str) -> float | None:
        """The largest of that figure over all sizes and receivers."""
        figures = [self.figure(receivers, nbytes, name, key) for receivers, by in self.carried.items() for nbytes in by]
        return max((each for each in figures if each is not None), default=None)


def targets(result: Found) -> Iterator[Target]:
    for receivers in sorted(result.carried):
        yield Target(f"put of 64 MB, warm, of memcpy's bandwidth, {receivers} receivers", 0.85, "x",
                     result.figure(receivers, 64 * MB, STORE, "put_of_memcpy"), is_least=True)  # fmt: skip
    yield Target("make in place + share, p50, any size, any receivers", 30, "µs", result.worst(PRODUCE, "put_p50_us"))
    for receivers in sorted(result.carried):
        gets = [result.figure(receivers, nbytes, STORE, "get_p50_us") for nbytes in result.carried[receivers]]
        most = max((each for each in gets if each is not None), default=None)
        yield Target(f"get of a stored tensor, p50, any size, {receivers} receivers", 15, "µs", most)
    for mib, limit in OF_DEFAULT.items():
        outcome = result.carried.get(READERS, {}).get(mib * MB)
        yield Target(f"{mib} MB tensor to {READERS} workers, request to last view, of vLLM's default", limit, "x",
                     outcome.ratio_if_measured(STORE, "view_p50_us", "vllm-queue") if outcome else None)  # fmt: skip
    memory = result.memory
    copies = round(median_of(memory, STORE)["copies"], 1) if memory and STORE in memory.rounds else None
    yield Target("memory for one image at 4 workers, times its size (rounded to tenths)", 1, "x", copies)
    yield Target("request message with one image, all hits", 200, "B", result.request_nbytes)
    hits = result.served.get(1.0)
    touched = median_of(hits, OURS)["touched_nbytes"] if hits and OURS in hits.rounds else None
    yield Target("shared memory that servers and core touch per request, all hits (control structures)", 0.1, "MB",
                 None if touched is None else touched / 1e6)  # fmt: skip
