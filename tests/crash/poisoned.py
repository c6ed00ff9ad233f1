"""Processes that fail when a certain request is in a step, for tests of which request is to blame.

A request is poison if its prompt has POISON. Its worker fails in the step that computes the token at `place` of its
answer, or a later one: so the request fails again wherever it is run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.worker.worker import Worker, device_of

POISON = 950  # an id that other prompts do not have
OTHERS = 900  # so their ids are below this
EARLY, LATE = 0, 24  # places in an answer: in the first step of its prompt; after more tokens than a trial lasts


def raise_error() -> None:
    raise ArithmeticError("the device has failed")


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def abort() -> None:
    os.abort()


def hang() -> None:
    time.sleep(3600)


def _run(cluster: Cluster, me: ProcessId, fail: Any, place: int) -> None:
    device = device_of(cluster, me)
    launch = device.launch
    poison: dict[int, int] = {}  # length of the prompt, by slot

    def launch_or_fail(schedule: Any, step: Any) -> Any:
        if step.left is not None:
            for slot in step.left.tolist():
                poison.pop(slot, None)
        if step.joined is not None:
            for slot in step.joined.slots.tolist():
                poison.pop(slot, None)
                if POISON in schedule.prompts[slot]:
                    poison[slot] = int(np.asarray(schedule.prompts[slot]).size)
        for slot, prompt in poison.items():
            if schedule.counts[slot] and schedule.computed[slot] >= prompt + place:
                fail()
        return launch(schedule, step)

    device.launch = launch_or_fail  # type: ignore[method-assign]
    Worker(cluster, me, device).run()


def raises_early(cluster: Cluster, me: ProcessId) -> None:
    _run(cluster, me, raise_error, EARLY)


def raises_late(cluster: Cluster, me: ProcessId) -> None:
    _run(cluster, me, raise_error, LATE)


def segfaults_late(cluster: Cluster, me: ProcessId) -> None:
    _run(cluster, me, segfault, LATE)


def aborts_early(cluster: Cluster, me: ProcessId) -> None:
    _run(cluster, me, abort, EARLY)


def hangs_late(cluster: Cluster, me: ProcessId) -> None:
    _run(cluster, me, hang, LATE)


def run_output(cluster: Cluster, me: ProcessId, before: Callable[[Any], None]) -> None:
    """An output processor that calls `before` with each message of the core first."""
    from penstock.engine.output.output_processor import OutputProcessor
    from penstock.engine.text.detokenizer import load_vocabulary

    output = OutputProcessor(cluster, me, load_vocabulary(cluster.config))
    process = output._state.process

    def process_after(message: Any) -> Any:
        before(message)
        return process(message)

    output._state.process = process_after  # type: ignore[method-assign]
    while output.process_next():
        pass
    output.close()


def output_raises(cluster: Cluster, me: ProcessId) -> None:
    """An output processor that fails with the first token of the poison."""

    def fail(tokens: Any) -> None:
        if any(POISON in started.context for started in tokens.started):
            raise_error()

    run_output(cluster, me, fail)


def output_raises_at_the_end(cluster: Cluster, me: ProcessId) -> None:
    """An output processor that fails with the end of the poison: no step that the core sends from then on has it."""
    poison: set[int] = set()

    def fail(tokens: Any) -> None:
        for started in tokens.started:
            (poison.add if POISON in started.context else poison.discard)(started.slot)
        if any(end.slot in poison for end in tokens.ended):
            time.sleep(0.05)  # of work, while the core goes on
            raise_error()

    run_output(cluster, me, fail)


def core_raises_at_once(cluster: Cluster, me: ProcessId) -> None:
    """A core that fails when its scheduler gets the poison."""
    from penstock.engine.core.scheduler import Scheduler

    submit = Scheduler.submit

    def submit_or_fail(self: Any, message: Any, *arguments: Any) -> Any:
        if POISON in message.prompt:
            raise_error()
        return submit(self, message, *arguments)

    Scheduler.submit = submit_or_fail  # type: ignore[method-assign]
    from penstock.engine.launcher.launcher import run_core

    run_core(cluster, me)


def core_raises(cluster: Cluster, me: ProcessId) -> None:
    """A core that fails with a result of the poison."""
    from penstock.engine.core.scheduler import Scheduler

    on_result = Scheduler.on_result

    def on_result_or_fail(self: Any, *arguments: Any) -> Any:
        batch = self._batch
        if any(POISON in batch.prompts[slot] for slot in batch.rows.tolist()):
            raise_error()
        return on_result(self, *arguments)

    Scheduler.on_result = on_result_or_fail  # type: ignore[method-assign]
    from penstock.engine.launcher.launcher import run_core

    run_core(cluster, me)
