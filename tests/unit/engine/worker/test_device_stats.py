"""What rank 0 counts of its device: its time, where the device does not say it, and tokens."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import SimulatedDevice
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.worker.device import EncodingCounts, SamplerOutput
from penstock.engine.worker.grammars import GrammarCounts
from penstock.engine.worker.simulated_device import SimulatedRunner
from penstock.engine.worker.worker import DeviceStats

PARAMS = SamplingParams()


class Bench:
    """Statistics on a page, and a core and a device that are not there."""

    def __init__(self) -> None:
        device: Any = SimpleNamespace(encodings=EncodingCounts(), grammars=GrammarCounts())
        self.page = StatusBoard.create(1)
        self.row = StatusBoard(self.page, writable=True).row(0)
        self.stats = DeviceStats(device, self.row)
        self.schedule = BatchState(8, 1000)
        self.plan = StepBuilder(self.schedule)
        self.number = 0

    @property
    def times(self) -> tuple[int, int]:
        return self.row[StatusBoard.BUSY_NS], self.row[StatusBoard.IDLE_NS]

    @property
    def tokens(self) -> tuple[int, int]:
        return self.row[StatusBoard.COMPUTED], self.row[StatusBoard.SAMPLED]

    def join(self, length: int, **options: int) -> int:
        blocks = range(20 * self.number, 20 * self.number + 20)
        return self.plan.join(self.number, np.arange(length, dtype=np.int32), PARAMS, blocks, **options)

    def launch(self, at: int) -> None:
        self.number += 1
        step = self.plan.build(1, self.number)
        self.schedule.apply(step)
        self.stats.launched(self.schedule, step, at)

    def done(self, at: int) -> None:
        self.stats.done(SamplerOutput(np.zeros(self.schedule.sampled.size, np.int32)), at)

    def step(self, launched: int, done: int) -> None:
        self.launch(launched)
        self.done(done)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    vars(bench).clear()  # the page


def test_a_step_that_is_launched_while_another_runs_begins_when_that_ends(bench: Bench) -> None:
    bench.join(4, chunk=4)
    bench.launch(100)
    bench.launch(105)
    bench.done(110)
    bench.done(118)
    assert bench.times == (18, 0)


def test_time_without_a_step_is_idle_only_when_a_step_is_awaited(bench: Bench) -> None:
    slot = bench.join(4, chunk=4)
    bench.step(100, 110)
    bench.step(113, 120)
    assert bench.times == (17, 3)
    bench.plan.leave(slot)
    bench.step(121, 122)  # no row is left: it computes nothing
    bench.join(4, chunk=4)
    bench.step(900, 905)
    assert bench.times == (22, 3)


def test_tokens_of_prompts_and_of_answers_are_told_apart(bench: Bench) -> None:
    slot = bench.join(10, chunk=6)
    bench.step(0, 1)
    assert bench.tokens[1] == 0
    bench.plan.advance(slot, 4)
    bench.step(1, 2)
    bench.step(2, 3)
    bench.step(3, 4)
    bench.join(7, computed=5, chunk=2)  # the cache has had the others
    bench.step(4, 5)
    assert bench.tokens == (10 + 2, 4 + 1)


def test_the_last_token_of_a_prompt_alone_is_one_of_a_prompt(bench: Bench) -> None:
    bench.join(3)
    for at in range(5):
        bench.step(at, at + 1)
    assert bench.tokens == (3, 3)


def test_time_of_a_simulated_device_is_what_it_says(bench: Bench) -> None:
    now = 128.0
    device = SimulatedRunner(SimulatedDevice(step_seconds=2**-6), 8, clock=lambda: now)
    bench.stats = DeviceStats(device, bench.row)
    device.busy, device.idle = 3.0, 0.5
    bench.join(4, chunk=4)
    bench.step(100, 110)
    bench.step(113, 120)
    assert bench.times == (3_000_000_000, 500_000_000)


def test_counts_go_on_in_the_next_process() -> None:
    page = StatusBoard.create(1)
    row = StatusBoard(page, writable=True).row(0)
    words = [getattr(StatusBoard, name) for name in ("ENCODINGS", "GRAMMARS", "MASKS", "GRAMMARS_OPEN")]
    totals = []
    for life in range(2):
        encodings, grammars = EncodingCounts(), GrammarCounts()
        device: Any = SimpleNamespace(encodings=encodings, grammars=grammars)
        stats = DeviceStats(device, row)
        totals.append([row[word] for word in words])
        batch = BatchState(8, 1000)
        step = StepBuilder(batch).build(1, 1)
        batch.apply(step)
        stats.launched(batch, step, 1)
        encodings.encoded = 3 + life
        if not life:
            vars(grammars).update(open=1, compiled=2, compile_ns=9, masks=5, mask_ns=9)
        stats.done(SamplerOutput(np.zeros(0, np.int32)), 2)
        totals.append([row[word] for word in words])
    assert totals == [[0, 0, 0, 0], [3, 2, 5, 1], [3, 2, 5, 0], [7, 2, 5, 0]]
