"""Sums of ranks in shared memory: their bits, sizes of more than a part, and the death of a rank."""

import os
import random
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from penstock.engine import _native  # noqa: E402
from tests.support.ranks import shared_memory  # noqa: E402

PART = 1 << 20  # bytes


def in_ranks(size: int, compute: Callable[[int, Any], Any]) -> list[Any]:
    """Returns what each rank computes, in a thread of its own."""
    memory = shared_memory(size)
    ranks = [_native.RankMemory(memory, rank, size, []) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(compute, range(size), ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_add_up_in_float32_and_round_once(size: int, dtype: torch.dtype, seed: int) -> None:
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [0, 1, 3, 4, 17, PART // dtype.itemsize + 5, *(drawn.randrange(2000) for _ in range(60))]
    inputs = [torch.randn(size, count, generator=generator).to(dtype) for count in counts]

    def compute(rank: int, memory: Any) -> list[torch.Tensor]:
        own = [each[rank].clone() for each in inputs]
        for each in own:
            memory.sum(each.data_ptr(), each.numel(), dtype == torch.bfloat16)
        return own

    sums = in_ranks(size, compute)
    for number, each in enumerate(inputs):
        total = each[0].float()
        for rank in range(1, size):
            total = total + each[rank].float()
        for rank in range(size):
            assert torch.equal(sums[rank][number], total.to(dtype)), (counts[number], rank)


def test_ranks_gather_rows_of_all_ranks(seed: int) -> None:
    drawn = random.Random(seed)
    shapes = [(0, 5), (3, 0), (1, 1), (1, 2 * PART + 7), (7, PART // 3)]
    shapes += [(3, drawn.randrange(5000)) for _ in range(9)]
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randint(256, (3, *shape), generator=generator, dtype=torch.uint8) for shape in shapes]

    def compute(rank: int, memory: Any) -> list[torch.Tensor]:
        results = []
        for each in inputs:
            _, rows, nbytes = each.shape
            results.append(torch.empty(rows, 3, nbytes, dtype=torch.uint8))
            memory.gather(each[rank].data_ptr(), rows, nbytes, results[-1].data_ptr())
        return results

    for results in in_ranks(3, compute):
        assert all(torch.equal(result, each.transpose(0, 1)) for result, each in zip(results, inputs, strict=True))


@pytest.mark.parametrize("count", [8, 0])
def test_rank_raises_when_another_rank_ends(count: int) -> None:
    memory, numbers = shared_memory(2), torch.ones(8)
    with subprocess.Popen(["sleep", "600"]) as process:
        pidfds = [os.pidfd_open(os.getpid()), os.pidfd_open(process.pid)]
        kill = threading.Timer(0.3, process.kill)
        try:
            kill.start()
            rank = _native.RankMemory(memory, 0, 2, pidfds)
            with pytest.raises(RuntimeError, match="rank 1 of the model ended in a step"):
                rank.sum(numbers.data_ptr(), count, False)
        finally:
            kill.cancel()
            process.kill()
            for pidfd in pidfds:
                os.close(pidfd)


def test_rank_memory_refuses_what_does_not_fit() -> None:
    memory = shared_memory(2)
    for arguments in ((memory, 2, 2, []), (memory, 0, 3, []), (memory[8:], 0, 2, []), (memory, 0, 65, [])):
        with pytest.raises(ValueError, match="expected"):
            _native.RankMemory(*arguments)
