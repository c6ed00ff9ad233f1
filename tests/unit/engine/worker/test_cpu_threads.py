"""How many threads a step has: tried, and kept for steps of its kind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")

from penstock import Timeout  # noqa: E402
from penstock.engine import _native  # noqa: E402
from penstock.engine.worker import cpu_threads, model_runner  # noqa: E402
from penstock.engine.worker.cpu_kernels import kernel_threads, set_threads  # noqa: E402
from penstock.engine.worker.cpu_threads import (  # noqa: E402
    LONG,
    SHORT,
    TRIED,
    TUNE_AFTER_S,
    WORK,
    CpuThreads,
    ThreadMemory,
    TunedThreads,
    tune_threads,
)
from penstock.engine.worker.model import CpuDecoder  # noqa: E402
from penstock.engine.worker.model_runner import ModelRunner, use_threads  # noqa: E402
from penstock.engine.worker.paged_attention import CHUNK_KERNELS  # noqa: E402
from penstock.engine.worker.tensor_parallel import TPGroup  # noqa: E402
from penstock.engine.worker.worker import PendingSteps, Worker  # noqa: E402
from penstock.environment import CACHE_DIR  # noqa: E402
from tests.support.models import build_family  # noqa: E402


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
        monkeypatch.setattr(time, "monotonic_ns", lambda: self._now)
        monkeypatch.setattr(cpu_threads, "others_ns", lambda: 0)

    def compute(self, tokens: int) -> None:
        count = torch.get_num_threads()
        self.tried.append((count, tokens))
        self._now += 1000 * self._microseconds[count][tokens > SHORT]


def used(chosen: CpuThreads, tokens: int) -> int:
    use_threads(chosen, tokens)
    return int(torch.get_num_threads())


def test_short_and_long_steps_have_as_many_threads_as_gain_something(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {8: [900, 1000], 4: [500, 1900], 2: [400, 3700], 1: [600, 7000]})
    chosen = tune_threads(8, machine.compute, TPGroup()).threads
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
        assert tune_threads(2, machine.compute, TPGroup()) == ((1, 2), True), seed


class Loaded(Machine):
    """Other processes take all processors, for long and at random."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, microseconds: dict[int, list[int]], seed: int) -> None:
        super().__init__(monkeypatch, microseconds)
        self._waited = self._worked = 0
        self._chance = random.Random(seed)
        monkeypatch.setattr(cpu_threads, "others_ns", lambda: self._waited)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        monkeypatch.setattr(time, "process_time_ns", lambda: self._worked)

    def compute(self, tokens: int) -> None:
        before = self._now
        super().compute(tokens)
        self._worked += kernel_threads() * (self._now - before)
        waited = round((self._now - before) * self._chance.uniform(1, 30))
        self._waited += waited
        self._now += waited


def test_processor_time_decides_when_all_measurements_are_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        machine = Loaded(monkeypatch, {2: [1500, 6500], 1: [WORK // 2, 2 * WORK]}, seed)
        assert tune_threads(2, machine.compute, TPGroup()) == ((1, 2), False), seed


def test_other_processes_may_use_processors_that_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {2: [1000, 1000], 1: [1290, 1310]})
    monkeypatch.setattr(cpu_threads, "others_ns", lambda: 5 * machine._now)
    for processors, is_certain in [(7, True), (6, False)]:
        monkeypatch.setattr(os, "cpu_count", lambda processors=processors: processors)
        assert tune_threads(2, machine.compute, TPGroup()).is_certain == is_certain


def test_measurement_is_not_certain_where_others_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others_ns = cpu_threads.others_ns
    machine = Machine(monkeypatch, {2: [1000, 1000], 1: [1290, 1310]})
    monkeypatch.setattr(cpu_threads, "others_ns", others_ns)
    for read in (Mock(side_effect=PermissionError), Mock(return_value="cpu 1 2"), Mock(return_value="cpu a b c d e")):
        monkeypatch.setattr(Path, "read_text", read)
        assert not tune_threads(2, machine.compute, TPGroup()).is_certain


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
CERTAIN = TunedThreads(CpuThreads(1, 2), True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_threads_are_remembered_by_their_key_and_limit(cache: Path) -> None:
    memory = ThreadMemory("model", 1)
    assert memory.read(2) is None
    memory.write(CERTAIN)
    assert ThreadMemory("model", 1).read(2) == CERTAIN
    assert ThreadMemory("model", 2).read(2) is None, "another key"
    assert memory.read(1) is None, "more threads than the limit"


def test_disturbed_measurements_are_remembered_for_the_same_launcher(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed = TunedThreads(CpuThreads(2, 2), False)
    ThreadMemory("model").write(disturbed)
    assert ThreadMemory("model").read(2) == disturbed
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert ThreadMemory("model").read(2) is None


@pytest.mark.parametrize("content", [b"", b'{"key":[],"short":1,"long":1}', b'{"key":["model"],"short":0}'])
def test_damaged_or_foreign_file_is_one_line_in_the_log(
    content: bytes, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = ThreadMemory("model")
    memory.write(CERTAIN)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert memory.read(2) is None
    assert [record.getMessage() for record in caplog.records] == ["threads are not remembered"]
    memory.write(CERTAIN)
    assert memory.read(2) == CERTAIN


def test_cache_directory_that_is_a_file_is_no_failure(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_bytes(b"")
    memory = ThreadMemory("model")
    memory.write(CERTAIN)
    assert memory.read(2) is None
    assert {record.getMessage() for record in caplog.records} == {"threads are not remembered"}


def test_model_runner_remembers_measurements_and_repeats_disturbed_ones(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    llama = build_family("llama", tmp_path).path
    results = [TunedThreads(CpuThreads(2, 2), False)] * 2 + [TunedThreads(CpuThreads(1, 2), True)]
    monkeypatch.setattr(model_runner, "tune_threads", lambda *_: results.pop(0))
    monkeypatch.setattr(model_runner, "share", lambda _: 2)
    first = ModelRunner(llama, slots=1, blocks=4)
    assert first.tune_after == TUNE_AFTER_S
    next_life = ModelRunner(llama, slots=1, blocks=4)
    assert len(results) == 2, "a restart measures nothing"
    assert (next_life._threads, next_life.tune_after) == ((2, 2), TUNE_AFTER_S)
    first.tune()
    assert first.tune_after == 2 * TUNE_AFTER_S, "disturbed again"
    first.tune()
    second = ModelRunner(llama, slots=1, blocks=4)
    assert not results
    assert {runner.tune_after for runner in (first, second)} == {None}
    assert second._threads == (1, 2)


def test_model_runner_measures_the_native_decoder(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, bool]] = []
    compute_hidden = CpuDecoder.hidden

    def hidden(decoder: CpuDecoder, embeds: Any, *rest: Any) -> Any:
        result = compute_hidden(decoder, embeds, *rest)
        steps.append((embeds.shape[1], result is not None))
        return result

    def tune(limit: int, compute: Callable[[int], None], _: TPGroup) -> TunedThreads:
        for tokens in TRIED:
            compute(tokens)
        return TunedThreads(CpuThreads(limit, limit), True)

    monkeypatch.setattr(CpuDecoder, "hidden", hidden)
    monkeypatch.setattr(model_runner, "tune_threads", tune)
    monkeypatch.setattr(model_runner, "share", lambda _: 2)
    ModelRunner(build_family("llama", tmp_path).path, slots=1, blocks=4, dtype="bfloat16")
    assert steps == [(TRIED[0], True), (TRIED[1], _native.linear_kernel() in CHUNK_KERNELS)]


def test_worker_tunes_its_device_when_no_step_comes() -> None:
    class Idle:
        tune_after = 0.01
        patience: float | None = None
        tuned = 0

        def receive(self, timeout: float | None) -> None:
            self.patience = timeout
            raise Timeout

        def tune(self) -> None:
            self.tuned += 1

    worker, idle = object.__new__(Worker), Idle()
    worker._device = worker._steps = idle  # type: ignore[assignment]
    worker._pending = PendingSteps(lambda step, pending: None)
    worker._turn()
    assert (idle.patience, idle.tuned) == (Idle.tune_after, 1)


# ── the choice ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_that_takes_long_is_not_tried_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {4: [LONG, 20 * LONG]})
    chosen = tune_threads(4, machine.compute, TPGroup()).threads
    assert (used(chosen, 1), used(chosen, 1000)) == (4, 4)
    assert len(machine.tried) == 4, "each once to be warm, and once to be seen"


def test_one_processor_leaves_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {})
    assert used(tune_threads(1, machine.compute, TPGroup()).threads, 1000) == 1
    assert not machine.tried


def test_the_slowest_rank_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {2: [100, 100], 1: [100, 100]})

    class Slower(TPGroup):
        """Another one takes ten times as long with one thread."""

        def least(self, number: int) -> int:
            is_time = number < 0  # of which the most is wanted
            return 10 * number if is_time and torch.get_num_threads() == 1 else number

    assert used(tune_threads(2, machine.compute, Slower()).threads, 1) == 2
