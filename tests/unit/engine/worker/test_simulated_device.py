"""The device on a clock: when steps end, what they sample, and how long it had to wait."""

from typing import Any

import numpy as np

from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import SimulatedDevice
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.worker.device import SamplerOutput
from penstock.engine.worker.simulated_device import SimulatedRunner, TokenRule

PARAMS = SamplingParams()
TOLD = SimulatedDevice(step_seconds=2**-6, vocabulary=1000, seed=5)


class Bench:
    """A device, its clock, and a core that is not there."""

    def __init__(self, simulated: SimulatedDevice = TOLD) -> None:
        self.now = 128.0
        self.device = SimulatedRunner(simulated, 8, clock=lambda: self.now)
        self.schedule = BatchState(8, 1000)
        self.plan = StepBuilder(self.schedule)
        self.number = 0

    def join(self, prompt: np.ndarray, **options: int) -> int:
        blocks = range(20 * self.number, 20 * self.number + 20)
        return self.plan.join(self.number, prompt, PARAMS, blocks, chunk=prompt.size, **options)

    def launch(self) -> Any:
        self.number += 1
        step = self.plan.build(1, self.number)
        self.schedule.apply(step)
        return self.device.launch(self.schedule, step)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_step_that_is_launched_while_another_runs_begins_when_that_ends() -> None:
    bench = Bench()
    bench.join(ids(1, 2, 3))
    assert bench.launch().done_at == 128 + 2**-6
    bench.now += 2**-8
    assert bench.launch().done_at == 128 + 2**-5


def test_step_that_takes_no_time_is_done_when_it_is_launched() -> None:
    bench = Bench(SimulatedDevice(step_seconds=0.0))
    bench.join(ids(1, 2, 3))
    assert isinstance(bench.launch(), SamplerOutput)


def test_each_token_may_take_its_time_too() -> None:
    bench = Bench(SimulatedDevice(step_seconds=2**-6, token_seconds=2**-8))
    bench.join(ids(1, 2, 3))
    assert bench.launch().done_at == 128 + 2**-6 + 3 * 2**-8
    assert bench.launch().done_at == 128 + 2**-5 + 4 * 2**-8


def test_idle_is_the_time_from_the_end_of_a_step_to_the_launch_of_the_next() -> None:
    bench = Bench()
    bench.join(ids(1, 2, 3))
    bench.launch()
    assert bench.device.idle == 0  # no step was running before the first
    bench.now += 2**-6 + 2**-8
    bench.launch()
    assert bench.device.idle == 2**-8
    bench.now += 2**-7
    bench.launch()  # in time
    assert bench.device.idle == 2**-8 and bench.device.busy == 3 * 2**-6
    assert bench.device.idle_share == 1 / 13


def test_simulated_device_without_requests_is_not_idle() -> None:
    bench = Bench()
    slot = bench.join(ids(1, 2, 3))
    bench.launch()
    bench.now += 2**-5
    bench.plan.leave(slot)
    assert bench.launch().result().ids.size == 0  # nothing was computed: they left
    bench.now += 50
    bench.join(ids(4))
    assert bench.launch().done_at == bench.now + 2**-6
    assert bench.device.idle == 0


def test_tokens_are_those_of_the_rule_whatever_else_is_in_the_batch() -> None:
    rule, bench = TokenRule(TOLD), Bench()
    first, second = ids(1, 2, 3), ids(9, 8)
    bench.join(first)
    actual: dict[int, list[int]] = {0: [], 1: []}
    for number in range(6):
        if number == 2:
            bench.join(second)
        flight = bench.launch()
        bench.now += 2**-6
        for slot, token in zip(bench.schedule.sampled.tolist(), flight.result().ids.tolist(), strict=True):
            actual[slot].append(token)
    assert actual == {0: rule.answer(first, 6), 1: rule.answer(second, 4)}
    assert len(set(actual[0])) > 3


def test_samples_of_one_prompt_differ_and_seeds_do_too() -> None:
    prompt = ids(1, 2, 3)
    answers = {tuple(TokenRule(TOLD).answer(prompt, 8, sample)) for sample in range(5)}
    answers.add(tuple(TokenRule(SimulatedDevice(vocabulary=1000, seed=6)).answer(prompt, 8)))
    assert len(answers) == 6


def test_simulated_answers_end_at_end_id_with_mean_length_end_one_in() -> None:
    simulated = SimulatedDevice(vocabulary=1000, end_id=7, end_one_in=16)
    lengths = [len(TokenRule(simulated).answer(ids(number), 1000)) for number in range(500)]
    assert 12 < sum(lengths) / len(lengths) < 20
    for number in range(50):
        answer = TokenRule(simulated).answer(ids(number), 1000)
        assert answer[-1] == 7 and answer.index(7) == len(answer) - 1
