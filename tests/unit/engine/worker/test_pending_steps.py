"""Steps that have been launched: each is answered in its order, and a thread waits for those that are not done."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import pytest

from penstock.engine.protocol.columns import NOTHING
from penstock.engine.worker.device import PendingStep, SamplerOutput
from penstock.engine.worker.worker import PendingSteps
from tests.conftest import eventually

WITHIN = 10.0
DONE = SamplerOutput(NOTHING)
T = TypeVar("T", bound=PendingStep)


class Pending:
    """A step that ends when the test says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.end = threading.Event()
        self._error = error

    def result(self) -> SamplerOutput:
        assert self.end.wait(WITHIN)
        if self._error is not None:
            raise self._error
        return DONE


class Answers:
    """What was answered, in its order, and by which thread."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []
        self.threads: list[str] = []
        self.steps = PendingSteps(self.answer)

    def answer(self, step: Any, sampled: SamplerOutput) -> None:
        assert sampled is DONE
        self.numbers.append(step)
        self.threads.append(threading.current_thread().name)

    def add(self, number: int, pending: T) -> T:
        step: Any = number
        self.steps.add(step, pending)
        return pending


def test_step_that_is_done_at_once_is_answered_without_a_thread() -> None:
    answers = Answers()
    for number in range(3):
        answers.add(number, DONE)
    assert answers.numbers == [0, 1, 2] and not answers.steps.is_waiting()
    assert set(answers.threads) == {threading.current_thread().name}
    assert not [thread for thread in threading.enumerate() if thread.name == "results"]


def test_steps_are_answered_in_the_order_of_their_launches() -> None:
    """The second one ends first, and the third was done when it was launched."""
    answers = Answers()
    first, second = answers.add(1, Pending()), answers.add(2, Pending())
    answers.add(3, DONE)
    second.end.set()
    assert answers.numbers == [] and answers.steps.is_waiting()
    first.end.set()
    answers.steps.finish()
    assert answers.numbers == [1, 2, 3] and set(answers.threads) == {"results"}


def test_step_after_an_answered_one_may_be_answered_at_once() -> None:
    answers = Answers()
    answers.add(1, Pending()).end.set()
    eventually(lambda: not answers.steps.is_waiting())
    answers.add(2, DONE)
    assert answers.numbers == [1, 2] and answers.threads[1] == threading.current_thread().name
    answers.steps.finish()


def test_error_of_the_device_is_raised_where_the_worker_looks() -> None:
    answers = Answers()
    answers.add(1, Pending(ArithmeticError("the device has caught fire"))).end.set()
    with pytest.raises(ArithmeticError, match="caught fire"):
        eventually(lambda: not answers.steps.is_waiting())
    with pytest.raises(ArithmeticError):
        answers.add(2, DONE)
    with pytest.raises(ArithmeticError):
        answers.steps.finish()
    assert answers.numbers == []
