"""The queue alone: steps back to back and at a pace, steps with a tensor, and one image for all workers.

Each way has one process of vLLM's interpreter, in which `queue_process` forks a core and its workers. Ways take turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.figures import Figures
from bench.harness.turns import Outcome, Turns
from bench.impls import Unavailable
from bench.vllm_cases import ways
from bench.vllm_cases.tables import tell
from bench.vllm_cases.ways import AS_IT_IS, ON_DEVICE, OURS, WAYS
from bench.vs_vllm.peer_process import PeerProcess

GUARD = Path(__file__).resolve().parent.parent / "harness" / "guard.py"
START, ORDER = 180.0, 90.0  # seconds
END = 15.0  # seconds until a guard has ended what it started
MB = 1 << 20
STEPS = {4: 600, 32: 400, 256: 150}  # steps of a round, by requests in each
PACED = {0.02: 40, 0.001: 300}  # steps of a round, by seconds between two
PACED_REQUESTS = 32
VIEWS = "-views"  # of a way's name: tensors as views of shared memory, with vLLM's --enable-shm-tensor-arena


class QueueProcess(PeerProcess):
    """One way's process. Its answer to an order is figures."""

    def __init__(self, way: ways.Way) -> None:
        command = [sys.executable, str(GUARD), way.python, "-m", "bench.vllm_cases.queue_process"]
        super().__init__(command, way.name, {**way.environment, "VLLM_LOGGING_LEVEL": "ERROR"})

    def wait_until_ready(self) -> None:
        """Raises Unavailable."""
        self.receive(START)

    def perform(self, order: Mapping[str, Any]) -> Figures:
        """Raises Unavailable."""
        self.send(dict(order))
        answer = self.receive(ORDER)
        if "failed" in answer:
            raise Unavailable(f"{self.name}: {order}: {answer['failed']}")
        figures: Figures = answer["figures"]
        return figures

    def end(self) -> None:
        self._process.terminate()  # the guard, which ends all of them
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
        super().close()


class QueueTurns(Turns):
    """The queue processes that are up, taking turns. An order names the process that performs it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.up: dict[str, QueueProcess] = {}

    def start(self, usable: Sequence[ways.Way]) -> None:
        for way in usable:
            self.up[way.name] = QueueProcess(way)
        for name, process in list(self.up.items()):
            try:
                process.wait_until_ready()
            except Unavailable as failure:
                self._leave_out(name, failure)
                self.up.pop(name).end()

    def _up(self) -> Container[str]:
        return {*self.up, *(name + VIEWS for name in self.up)}

    def _turn_of(self, name: str, order: Any, measure: Any) -> list[Figures]:
        process = self.up[name.removesuffix(VIEWS)]
        try:
            return [measure(process, order)]
        except Unavailable as failure:
            self._leave_out(name, failure)
            self.up.pop(process.name).end()
            return []

    def measure(self, orders: Mapping[str, Mapping[str, Any]], rounds: int | None = None) -> Outcome:
        there = {name: order for name, order in orders.items() if name in self._up()}
        return self.take(there, lambda process, order: process.perform(order), rounds or self.rounds)  # type: ignore[arg-type, attr-defined]

    def between_cases(self) -> None:
        """Ends the cores and workers of the case before."""
        for process in self.up.values():
            process.send("close")  # type: ignore[arg-type]
            process.receive(ORDER)

    def end(self) -> None:
        for process in self.up.values():
            process.end()
        self.up.clear()


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    workers: tuple[int, ...] = (1, 2, 4)
    requests: tuple[int, ...] = (4, 32, 256)
    paced_workers: tuple[int, ...] = (1, 2)
    tensor_workers: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = (15 * MB, 32 * MB)
    image_workers: int = 4
    tensors: int = 8  # of a round
    share: float = 1.0  # of the steps of a round
    codec: int = 200  # steps of a round


QUICK = Scale(
    workers=(2,),
    requests=(32,),
    paced_workers=(2,),
    tensor_workers=(2,),
    sizes=(15 * MB,),
    tensors=3,
    share=0.2,
    codec=40,
)


def run_steps(
    turns: QueueTurns, scale: Scale
) -> tuple[dict[tuple[int, int], Outcome], dict[tuple[float, int], Outcome]]:
    """Returns the outcomes back to back, by workers and requests, and those at a pace, by seconds and workers."""
    steps, paced = {}, {}
    for workers in scale.workers:
        for requests in scale.requests:
            count = max(int(STEPS[requests] * scale.share), 10)
            order = {"case": "steps", "workers": workers, "requests": requests, "messages": count}
            outcome = turns.measure(dict.fromkeys(WAYS, order))
            title = f"Back to back, {workers} worker(s), steps of {requests} requests: a step and all replies, µs"
            columns = {"p50": ("round_trip_p50_us", 1.0), "p99": ("round_trip_p99_us", 1.0)}
            tell(turns, "steps", title, outcome, columns, workers=workers, requests=requests)
            steps[workers, requests] = outcome
    for pace, messages in PACED.items():
        for workers in scale.paced_workers:
            count = max(int(messages * scale.share), 20)
            order = {"case": "paced", "workers": workers, "requests": PACED_REQUESTS, "messages": count, "pace": pace}
            outcome = turns.measure(dict.fromkeys(WAYS, order))
            title = f"A step of {PACED_REQUESTS} requests each {pace * 1e3:g} ms, {workers} worker(s), one way"
            columns = {
                "p50, µs": ("one_way_p50_us", 1.0),
                "p99, µs": ("one_way_p99_us", 1.0),
                "cores of each worker": ("worker_cores", 1.0),
            }
            tell(turns, "paced", title, outcome, columns, workers=workers, pace_ms=pace * 1e3)
            paced[pace, workers] = outcome
    turns.between_cases()
    return steps, paced


def run_codec(turns: QueueTurns, scale: Scale) -> dict[int, Outcome]:
    """Returns the outcomes of steps and outputs as changes and as pickles, in one process, by requests."""
    outcomes = {}
    for requests in STEPS:
        order = {"case": "codec", "workers": 0, "requests": requests, "messages": scale.codec}
        both = turns.measure({OURS: order})
        forms = {form: both.part(f"{form}.").rounds[OURS] for form in ("pickle", "change") if OURS in both.rounds}
        outcomes[requests] = outcome = Outcome(forms, both.loads)
        columns = {}
        for what in ("step", "output"):
            columns[f"{what}: B"] = (f"{what}_nbytes", 1.0)
            for key in ("encode", "decode", "both"):
                columns[f"{what}: {key}, µs"] = (f"{what}_{key}_us", 1.0)
        tell(turns, "codec", f"Steps and outputs of {requests} requests", outcome, columns, requests=requests)
    return outcomes


def run_tensors(turns: QueueTurns, scale: Scale) -> dict[tuple[int, int], Outcome]:
    """Returns the outcomes of steps with a tensor, by workers and bytes: as copies, and as views."""
    outcomes = {}
    for workers in scale.tensor_workers:
        for nbytes in scale.sizes:
            copies = {"case": "tensor", "workers": workers, "nbytes": nbytes, "messages": scale.tensors}
            orders = {}
            for name in (AS_IT_IS, OURS):
                orders[name] = copies
                orders[name + VIEWS] = {**copies, "views": True}
            title = f"A step with a tensor of {nbytes // MB} MiB to {workers} workers, all pages read, and all replies"
            columns = {"p50, ms": ("round_trip_p50_us", 1e-3), "p99, ms": ("round_trip_p99_us", 1e-3)}
            outcomes[workers, nbytes] = tell(
                turns, "tensor", title, turns.measure(orders), columns, workers=workers, nbytes=nbytes
            )
        turns.between_cases()
    return outcomes


def run_images(turns: QueueTurns, scale: Scale) -> tuple[dict[int, Outcome], Outcome]:
    """Returns the outcomes of one image to all workers by bytes, and how many times it lies in memory meanwhile.

    vLLM's default has the image in the step; ours has it in vLLM's cache in shared memory, as vLLM can, too. Workers of
    ours on a CPU get copies, which a model may write to; those on a device get views.
    """
    workers, cached = scale.image_workers, "-cache"
    held = {"case": "memory", "workers": workers, "nbytes": scale.sizes[0]}
    memory = turns.measure(dict.fromkeys((AS_IT_IS, OURS, ON_DEVICE), held), rounds=1)
    columns = {"times its size": ("copies", 1.0)}
    title = f"Memory of an image in the cache of vLLM that {workers} workers hold"
    tell(turns, "image_memory", title, memory, columns, workers=workers, nbytes=scale.sizes[0])
    outcomes = {}
    for nbytes in scale.sizes:
        order = {"workers": workers, "nbytes": nbytes, "messages": scale.tensors}
        image = {**order, "case": "image"}
        default = turns.measure({AS_IT_IS: {**order, "case": "tensor"}, OURS: image, ON_DEVICE: image})
        remote = turns.measure({AS_IT_IS: image})
        if AS_IT_IS in remote.rounds:
            default.rounds[AS_IT_IS + cached] = remote.rounds[AS_IT_IS]
        columns = {"p50, ms": ("round_trip_p50_us", 1e-3), "p99, ms": ("round_trip_p99_us", 1e-3)}
        title = f"One image of {nbytes // MB} MiB to {workers} workers, all pages read, and all replies"
        outcomes[nbytes] = tell(turns, "image", title, default, columns, workers=workers, nbytes=nbytes)
    turns.between_cases()
    return outcomes, memory
