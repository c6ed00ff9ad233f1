"""Processes, or threads, that share a tiny model, and what each of them says that its answers are."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine import _native
from penstock.engine.cluster.rendezvous import Rendezvous
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.worker.encoding_exchange import EncoderOptions
from penstock.engine.worker.model_runner import ModelRunner
from penstock.engine.worker.tensor_parallel import TPGroup
from tests.conftest import spawn
from tests.support.models import BLOCK_SIZE, COUNT, Asked, Family, Told, ask, device, longest, opener

WITHIN = 300.0  # seconds; a test ends before, unless its time is longer


class Work(NamedTuple):
    """What ranks do. `shortages`: bytes that a rank may allocate in a step, by the numbers of rank and step."""

    tokens: int = COUNT
    params: tuple[SamplingParams, ...] = ()
    encoder_mode: str = "weights"
    shortages: Mapping[int, Mapping[int, int]] = {}


WHOLE = Work()


def ranks_must_answer(
    size: int, families: Sequence[Family], folder: Path, some: slice, *, device: str = "cpu", work: Work = WHOLE
) -> None:
    """As transformers did, each of them, to some of the requests: they wait for each other, which takes its time.
    `device`: "cuda" is a double, which all ranks share."""
    expected = [{"answers": of.answers[some], "failed": []} for of in families]
    for rank, result in enumerate(run_ranks(size, families, folder, some, device, work)):
        assert [result[str(of.path)] for of in families] == expected, f"rank {rank}"


def run_ranks(
    size: int,
    families: Sequence[Family],
    folder: Path,
    some: slice,
    device: str,
    work: Work = WHOLE,
) -> list[dict[str, dict[str, Any]]]:
    """Returns what each rank has answered, and which requests failed, by the folder of the model."""
    inputs = {}
    for of in families:
        torch.save(of.images, of.path / "images.pt")
        requests = [
            (request.prompt, [(key.decode(), *place) for key, *place in request.inputs])
            for request in of.requests[some]
        ]
        inputs[str(of.path)] = requests
    (folder / "work").write_text(json.dumps(inputs))
    with contextlib.ExitStack() as stack:
        arguments = (size, str(folder), device, work)
        rendezvous = stack.enter_context(contextlib.closing(Rendezvous.open()))
        ranks = [
            stack.enter_context(spawn(_one_of_them, rank, rendezvous.of_rank(rank), *arguments, within=WITHIN))
            for rank in range(size)
        ]
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * size
    return [json.loads((folder / str(rank)).read_text()) for rank in range(size)]


def _one_of_them(rank: int, rendezvous: Rendezvous, size: int, folder: str, device: str, work: Work) -> None:
    """Answers, and writes down what."""
    with contextlib.ExitStack() as stack:
        if device != "cpu":
            from tests.support.cuda_double import CudaDouble
            from tests.support.interpreter import interpreted_kernels

            for context in (interpreted_kernels(), CudaDouble()):
                stack.enter_context(context)
        _answer(rank, rendezvous, size, folder, device, work)


def _answer(rank: int, rendezvous: Rendezvous, size: int, folder: str, device: str, work: Work) -> None:
    torch.set_num_threads(1)
    ranks = TPGroup(rank, size, rendezvous, device if device == "cpu" else "cuda:0", "gloo")
    assert (ranks.memory is not None) == (device == "cpu"), "the ranks are on one machine"
    results = {}
    for path, raw in json.loads(Path(folder, "work").read_text()).items():
        requests = [
            Asked(prompt, [(key.encode(), *place) for key, *place in inputs], work.tokens) for prompt, inputs in raw
        ]
        ours = ModelRunner(
            path,
            slots=4,
            ranks=ranks,
            device=device,
            token_budget=16 if device != "cpu" else 2048,
            block_size=BLOCK_SIZE,
            blocks=-(-longest(requests) // BLOCK_SIZE),
            open_handle=opener(torch.load(Path(path) / "images.pt")),
            threads=1,
            encoder=EncoderOptions(work.encoder_mode),
        )
        if device != "cpu":
            assert ours._model._cuda_decoder is not None, "the layers are not computed by kernels"
        if rank in work.shortages:
            _run_short(ours, work.shortages[rank])
        result = ask(ours, requests, budget=10, params=work.params)
        results[path] = {"answers": result.answers, "failed": sorted(result.failed)}
    Path(folder, str(rank)).write_text(json.dumps(results))
    ranks.close()


def _run_short(runner: ModelRunner, shortages: Mapping[int, int]) -> None:
    """The double of the device has so many bytes left for the steps with these numbers."""
    from tests.support.cuda_double import CudaDouble

    launch, numbers = runner.launch, itertools.count(1)

    def launch_with_less(*arguments: Any) -> Any:
        double, number = CudaDouble.current, next(numbers)
        total = double.total_nbytes
        if number in shortages:
            double.total_nbytes = double.held_nbytes + shortages[number]
        try:
            return launch(*arguments)
        finally:
            double.total_nbytes = total

    runner.launch = launch_with_less  # type: ignore[method-assign]


class Threads(TPGroup):
    """Ranks of one process, each with a thread: they start at once, and add up without asking the kernel."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier, memory: Any) -> None:
        super().__init__()
        self.rank, self.size = rank, len(shared)
        self.memory = _native.RankMemory(memory, rank, self.size, [])  # of native layers
        self._said, self._barrier = shared, barrier
        self.is_running = False  # while a model is loaded, no other rank is there

    def _all(self, own: Any) -> list[Any]:
        if not self.is_running:
            return [own] * self.size
        self._said[self.rank] = own
        self._barrier.wait()
        everybody = list(self._said)
        self._barrier.wait()
        return everybody

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(sum(self._all(tensor.clone())))

    def gather(self, tensor: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        return torch.cat(self._all(tensor.clone()), dim=-1)[..., :width]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self._all(tensor.clone())[source])

    def least_of_each(self, numbers: list[int]) -> list[int]:
        return [min(each) for each in zip(*self._all(numbers), strict=True)]


def shared_memory(size: int) -> Any:
    file = os.memfd_create("ranks")
    try:
        os.ftruncate(file, _native.rank_memory_nbytes(size))
        return _native.map_file(file, _native.rank_memory_nbytes(size), True)
    finally:
        os.close(file)


def threads_must_answer(size: int, of: Family) -> None:
    """As transformers did, each of them, to the first requests."""
    assert answers_of_threads(size, of, of.requests[:4]) == [of.answers[:4]] * size


def answers_of_threads(size: int, of: Family, requests: Sequence[Asked], **options: Any) -> list[list[list[int]]]:
    return [result.answers for result in results_of_threads(size, of, requests, **options)]


def results_of_threads(size: int, of: Family, requests: Sequence[Asked], **options: Any) -> list[Told]:
    """Of each rank. `options` are the device's, the budget of a step, `of_requests`: adapters of the requests, and the
    file of each rank's weights."""
    budget, adapters = options.pop("budget", 6), options.pop("of_requests", (b"",))
    files = options.pop("weight_files", [None] * size)
    shared, barrier = [None] * size, threading.Barrier(size, timeout=60)
    memory = shared_memory(size)
    ranks = [Threads(rank, shared, barrier, memory) for rank in range(size)]
    devices = [device(of, ranks=group, weight_file=file, **options) for group, file in zip(ranks, files, strict=True)]

    def results(rank: int) -> Told:
        ranks[rank].is_running = True
        try:
            return ask(devices[rank], requests, budget=budget, logprobs=0, adapters=adapters)
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(results, range(size)))
