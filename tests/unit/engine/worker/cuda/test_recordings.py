"""Recordings of steps where memory is short, on the double: each allocation fails in turn, on one rank of two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from tests.support.interpreter import require_interpreter  # noqa: E402

require_interpreter()

from penstock.engine.cluster.process import starting  # noqa: E402
from penstock.engine.worker.cuda.graphs import CudaGraphs, InvalidatedCapture  # noqa: E402
from penstock.engine.worker.cuda.step_graphs import (  # noqa: E402
    INVALIDATED,
    NO_MEMORY,
    RECORDED,
    REFUSED,
    Attempt,
    Recordings,
)
from penstock.engine.worker.cuda.step_room import StepRoom  # noqa: E402
from penstock.engine.worker.cuda.steps import AgreedShortage, CudaSteps  # noqa: E402
from penstock.engine.worker.tensor_parallel import TPGroup  # noqa: E402
from tests.support.cuda_double import CudaDouble  # noqa: E402

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")

SIZES = [1, 2, 4]
NUM_LAYERS = 3


class TwoRanks(TPGroup):
    """The first of two ranks. The other one is `other`: it answers as the test says."""

    def __init__(self, other: Callable[[int], int] = lambda call: RECORDED) -> None:
        super().__init__()
        self.size = 2
        self.operations: list[int] = []  # sizes of tensors that the ranks have added up
        self.num_agreements = 0
        self._other = other

    def all_reduce(self, tensor: Any) -> Any:
        if not self._is_alone:
            self.operations.append(tensor.numel())
        return tensor

    def least(self, number: int) -> int:
        self.num_agreements += 1
        return min(number, self._other(self.num_agreements))


class Model:
    """Steps of a few layers. The ranks add up the results of a layer."""

    def __init__(self, ranks: TPGroup) -> None:
        self.ranks = ranks
        self.waits_in_captures = False
        self._weight = torch.ones(8, device="cuda")
        self._input = torch.ones(max(SIZES), 8, device="cuda")
        self._result = torch.empty_like(self._input)

    def compute(self, size: int) -> Any:
        hidden = self._input[:size]
        if self.waits_in_captures and CudaDouble.current.tape is not None:
            hidden.sum().item()
        for _ in range(NUM_LAYERS):
            hidden = self.ranks.all_reduce(hidden * self._weight)
        return torch.add(hidden, 1, out=self._result[:size])

    def record(self) -> Recordings:
        model: Any = SimpleNamespace(ranks=self.ranks)
        recordings = Recordings(model, CudaGraphs(), SIZES)
        recordings.record(self.compute, "decode")
        return recordings


@pytest.fixture
def double() -> Iterator[CudaDouble]:
    with CudaDouble() as entered:
        yield entered


@pytest.mark.parametrize("size", [1, 2])
def test_allocation_that_fails_costs_one_size(size: int, double: CudaDouble) -> None:
    """Wherever it is: in a trial of one rank, in a trial of all ranks, or while the device records."""
    ranks = TPGroup() if size == 1 else TwoRanks()
    model = Model(ranks)
    before = double.allocated
    assert model.record().sizes == SIZES
    num_allocations = double.allocated - before
    assert num_allocations >= len(SIZES) * NUM_LAYERS * 3
    lacking = set()
    for place in range(1, num_allocations + 1):
        double.fail_at = double.allocated + place
        recordings = model.record()
        assert len(recordings.sizes) == len(SIZES) - 1 and len(recordings) == len(SIZES) - 1, place
        lacking |= set(SIZES) - set(recordings.sizes)
        assert all((recordings.replay(recorded) == 2).all() for recorded in recordings.sizes), place
    assert lacking == set(SIZES)


def test_rank_without_memory_takes_part_in_no_operation_of_all_ranks(double: CudaDouble) -> None:
    """Else the other rank would wait in that operation for ever."""
    model = Model(ranks := TwoRanks())
    double.fail_at = double.allocated + 2
    assert model.record().sizes == [1, 2]
    assert 4 * 8 not in ranks.operations and 2 * 8 in ranks.operations


@pytest.mark.parametrize("call", [1, 2], ids=["in its trial", "while it recorded"])
def test_size_that_another_rank_lacks_is_left_out_here(call: int, double: CudaDouble) -> None:
    """Two agreements for each size, from the largest on."""
    model = Model(TwoRanks(lambda number: NO_MEMORY if number == call else RECORDED))
    assert model.record().sizes == [1, 2]


def test_step_runs_by_the_next_larger_graph_or_without(double: CudaDouble) -> None:
    recordings = Model(TwoRanks(lambda number: NO_MEMORY if number == 3 else RECORDED)).record()
    assert recordings.sizes == [1, 4]
    assert [recordings.padded(size) for size in (1, 2, 4, 5)] == [1, 4, 4, None]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_want_of_memory_of_any_library_leaves_a_size_out(error: Exception) -> None:
    attempt = Attempt()
    with attempt:
        raise error
    assert attempt.state == NO_MEMORY and str(error) in attempt.why


def test_all_ranks_have_no_graphs_if_one_cannot_record(double: CudaDouble) -> None:
    assert Model(TwoRanks(lambda number: REFUSED if number == 4 else RECORDED)).record().sizes == []


@pytest.mark.parametrize("is_own", [True, False], ids=["this rank", "another rank"])
def test_capture_that_is_invalidated_ends_the_start_of_all_ranks(is_own: bool, double: CudaDouble) -> None:
    """Memory could no longer be returned to the device: the worker would end with the first step that runs out."""
    model = Model(TwoRanks(lambda number: INVALIDATED if number == 2 and not is_own else RECORDED))
    model.waits_in_captures = is_own
    with pytest.raises(InvalidatedCapture, match=r"decode step of size 4.*--enforce-eager") as raised, starting():
        model.record()
    assert ("not permitted when stream is capturing" in str(raised.value)) == is_own


def steps_of(ranks: TPGroup) -> CudaSteps:
    """Steps of up to 16 tokens, with 1 MiB a token and 4 MiB for log-probabilities of prompts."""
    steps: Any = object.__new__(CudaSteps)
    steps._model = SimpleNamespace(ranks=ranks, device=torch.device("cuda"))
    steps.state = SimpleNamespace(news_nbytes=lambda: 1 << 10)
    steps._shortage, steps._has_joins = None, False
    steps._room = object.__new__(StepRoom)
    steps._room._sizes = [(size, size << 20) for size in (4, 8, 16)]
    steps._room._scores_nbytes, steps._room._embeds_nbytes, steps._room._slots = 4 << 20, 1 << 20, 4
    return steps


@pytest.mark.parametrize(("own_nbytes", "other_has_room"), [(1 << 20, True), (1 << 29, False)])
def test_step_without_room_on_a_rank_fails_on_all_ranks_before_it(
    own_nbytes: int, other_has_room: bool, double: CudaDouble
) -> None:
    steps = steps_of(TwoRanks(lambda call: int(other_has_room)))
    steps.require_room(16) if other_has_room else None
    double.total_nbytes = double.held_nbytes + own_nbytes
    with pytest.raises(AgreedShortage) as raised:
        steps.require_room(16)
    assert CudaSteps.is_agreed(raised.value) and not CudaSteps.is_agreed(torch.OutOfMemoryError())


@pytest.mark.parametrize(
    ("mib", "tokens", "options", "has_room"),
    [
        (5, 4, {}, True),
        (5, 5, {}, False),
        (9, 5, {}, True),
        (9, 8, {"likeliest": 1}, False),
        (13, 8, {"likeliest": 1}, True),
        (13, 8, {"has_embeds": True}, False),
        (17, 8, {"has_embeds": True}, True),
        (0, 16, {"is_recorded": True}, True),
    ],
)
def test_step_asks_for_the_memory_of_its_own_size(
    mib: int, tokens: int, options: dict[str, Any], has_room: bool, double: CudaDouble
) -> None:
    """A little less than a MiB is for input and joins."""
    steps = steps_of(TwoRanks())
    double.total_nbytes = double.held_nbytes + (mib << 20)
    with contextlib.nullcontext() if has_room else pytest.raises(AgreedShortage):
        steps.require_room(tokens, **options)


def test_shortage_of_a_join_is_agreed_also_before_a_graph(double: CudaDouble) -> None:
    ranks = TwoRanks()
    steps: Any = steps_of(ranks)
    steps.require_room(4, is_recorded=True)
    assert ranks.num_agreements == 0
    steps._shortage, steps._has_joins = torch.OutOfMemoryError("a table"), True
    with pytest.raises(AgreedShortage) as raised:
        steps.require_room(4, is_recorded=True)
    assert str(raised.value.__cause__) == "a table"
    steps.require_room(4, is_recorded=True)
    assert ranks.num_agreements == 1
