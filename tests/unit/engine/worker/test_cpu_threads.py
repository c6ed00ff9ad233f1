"""How many threads a step has: tried, and kept for steps of its kind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'penstock[engine]'")

from penstock.engine.worker import cpu_threads  # noqa: E402
from penstock.engine.worker.cpu_tensors import kernel_threads, set_threads  # noqa: E402
from penstock.engine.worker.cpu_threads import LONG, SHORT, CpuThreads, tune_threads  # noqa: E402
from penstock.engine.worker.model_runner import use_threads  # noqa: E402
from penstock.engine.worker.tensor_parallel import TPGroup  # noqa: E402


@pytest.fixture(autouse=True)
def as_many_as_before() -> Iterator[None]:
    before, of_torch = kernel_threads(), torch.get_num_threads()
    yield
    set_threads(before, of_torch)


class Machine:
    """On which a step takes as long as is said, by the number of threads and of tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, microseconds: dict[int, list[int]]) -> None:
        self._microseconds, self._now = microseconds, 0
        self.tried: list[tuple[int, int]] = []
        monkeypatch.setattr(cpu_threads.time, "monotonic_ns", lambda: self._now)

    def compute(self, tokens: int) -> None:
        count = torch.get_num_threads()
        self.tried.append((count, tokens))
        self._now += 1000 * self._microseconds[count][tokens > SHORT]


def used(chosen: CpuThreads, tokens: int) -> int:
    use_threads(chosen, tokens)
    return int(torch.get_num_threads())


def test_short_and_long_steps_have_as_many_threads_as_gain_something(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {8: [900, 1000], 4: [500, 1900], 2: [400, 3700], 1: [600, 7000]})
    chosen = tune_threads(8, machine.compute, TPGroup())
    assert [used(chosen, tokens) for tokens in (1, SHORT, SHORT + 1, 1, 5000)] == [2, 2, 8, 2, 8]


def test_torch_has_one_thread_in_a_short_step_without_products_of_torch() -> None:
    chosen = CpuThreads(short=2, long=3)
    for tokens, has_products, expected in [(SHORT, False, (2, 1)), (SHORT, True, (2, 2)), (SHORT + 1, False, (3, 3))]:
        use_threads(chosen, tokens, has_products=has_products)
        assert (kernel_threads(), torch.get_num_threads()) == expected


def test_measurements_that_other_processes_disturb_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other measurement takes twice to four times as long."""
    microseconds = {2: [1000, 1000], 1: [1290, 1310]}
    for seed in range(20):
        chance = random.Random(seed)

        class Disturbed(Machine):
            def compute(self, tokens: int, chance: random.Random = chance) -> None:
                before = self._now
                super().compute(tokens)
                self._now += round((self._now - before) * max(0, chance.uniform(-3, 3)))

        machine = Disturbed(monkeypatch, microseconds)
        assert tune_threads(2, machine.compute, TPGroup()) == (1, 2), seed


def test_a_second_thread_that_gains_little_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {2: [1000, 1000], 1: [1290, 1310]})
    chosen = tune_threads(2, machine.compute, TPGroup())
    assert (used(chosen, 1), used(chosen, 1000)) == (1, 2)


def test_a_step_that_takes_long_is_not_tried_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {4: [LONG, 20 * LONG]})
    chosen = tune_threads(4, machine.compute, TPGroup())
    assert (used(chosen, 1), used(chosen, 1000)) == (4, 4)
    assert len(machine.tried) == 4, "each once to be warm, and once to be seen"


def test_one_processor_leaves_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {})
    assert used(tune_threads(1, machine.compute, TPGroup()), 1000) == 1
    assert not machine.tried


def test_the_slowest_rank_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {2: [100, 100], 1: [100, 100]})

    class Slower(TPGroup):
        """Another one takes ten times as long with one thread."""

        def least(self, number: int) -> int:
            is_time = number < 0  # of which the most is wanted
            return 10 * number if is_time and torch.get_num_threads() == 1 else number

    assert used(tune_threads(2, machine.compute, Slower()), 1) == 2
