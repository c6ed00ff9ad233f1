"""An output processor between its channels: the core, rank 0 and the servers are played here, in one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import EndOfChannel, PeerDied, Receiver, Sender, Timeout, WouldBlock
from penstock.codec.sequence import SequenceSender
from penstock.engine.cluster import outbox
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.output import output_processor
from penstock.engine.output.detokenizer import Vocabulary
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import (
    Abort,
    Announce,
    Begin,
    Delta,
    Halt,
    SamplingParams,
    Step,
    StepDone,
    Stop,
    Style,
)
from penstock.lowlevel import OutOfStep
from tests.conftest import eventually, spawn
from tests.support.processes import soon, thread

A, B = 0, 1
WORDS = Vocabulary([b"a", b"b"])
FLOOD = 200  # steps of 20 KB


class Scene:
    def __init__(self, tree: Cluster, held: contextlib.ExitStack) -> None:
        group = tree.groups[0]
        self.inbox: Receiver = held.enter_context(group.inbox.open_receiver(name="core 0.0 #1"))
        self.steps: Sender = held.enter_context(group.steps.open_sender(name="core 0.0 #1"))
        self.results: Sender = held.enter_context(group.results.open_sender(name="worker 0.0 #1"))
        held.enter_context(group.results.open_receiver(0, name="core 0.0 #1"))
        self.worker: Receiver = held.enter_context(group.steps.open_receiver(0, name="worker 0.0 #1"))
        self.servers = [
            held.enter_context(one.open_receiver(name=f"server 0.{number} #1"))
            for number, one in enumerate(tree.servers)
        ]
        self.announced = [
            held.enter_context(group.announced[0].open_sender(number, name=f"server 0.{number} #1"))
            for number in range(2)
        ]
        self.output = an_output(tree)
        held.callback(self.output.close)
        self.group = group
        self.schedule = BatchState(8, 1024, 4)
        self.sequence = begun(self.steps, self.schedule)
        self.plan = StepBuilder(self.schedule)

    def join(self, request: int, server: int = 0, prompt: int = 2, **params: Any) -> int:
        asked = SamplingParams(**{"max_tokens": None, **params})
        ids = np.arange(prompt, dtype=np.int32)
        return self.plan.join(request, ids, asked, range(max(10, prompt // 4 + 1)), chunk=prompt, server=server)

    def send_step(self) -> None:
        step = self.plan.build(77, self.sequence.next_number)
        self.sequence.send(step, 1)
        self.schedule.apply(step)

    def send_result(self, number: int, *ids: int) -> None:
        self.results.send(StepDone(77, number, np.array(ids, np.int32)), 1)

    def step(self, *ids: int) -> None:
        """One step, and its result."""
        self.send_step()
        self.send_result(self.sequence.number, *ids)
        assert self.output.turn()


def begun(steps: Sender, schedule: BatchState) -> SequenceSender:
    sequence = SequenceSender(steps, 77)
    sequence.send_whole(Begin(77, 0, schedule.slots, schedule.blocks, schedule.block_size), 1)
    return sequence


@contextlib.contextmanager
def laid() -> Iterator[Cluster]:
    tree = Cluster.open(
        EngineConfig(simulated=SimulatedDevice(), api_server_count=2, max_num_seqs=8, block_size=4, step_timeout=1.0)
    )
    with contextlib.closing(tree):
        yield tree


@contextlib.contextmanager
def playing() -> Iterator[Scene]:
    with laid() as tree, contextlib.ExitStack() as held:
        yield Scene(tree, held)


def an_output(tree: Cluster) -> OutputProcessor:
    return OutputProcessor(tree, ProcessId("output", 0, 0, 1), WORDS)


def turns(of: OutputProcessor) -> None:
    while of.turn():
        pass


def waits(channel: penstock.MessageChannel) -> dict[str, int]:
    """How the output waits there."""
    found: dict[str, int] = channel.snapshot()["receivers"][1]
    return found


def test_each_server_gets_a_delta_of_its_rows() -> None:
    with playing() as scene:
        scene.join(5)
        scene.join(5, server=1)
        scene.step(A, B)
        for server, text in zip(scene.servers, (b"a", b"b"), strict=True):
            delta = server.receive(1)
            assert isinstance(delta, Delta)
            assert (delta.requests.tolist(), delta.text) == ([5], text)


def test_what_was_announced_before_a_request_is_heard_before_its_first_token() -> None:
    with playing() as scene:
        scene.join(5)
        scene.announced[0].send(Announce(0, 5, Style.COMPLETION, b'{"id":"x"'), 1)
        scene.step(A)
        assert scene.servers[0].receive(1).text.startswith(b'data: {"id":"x","choices":[{"index":0,"text":"a"')


def test_the_core_is_told_who_ended_by_a_stop_string() -> None:
    with playing() as scene:
        scene.join(5)
        slot = scene.join(6, stop=("ab",))
        scene.step(A, A)
        scene.step(A, B)
        halt = scene.inbox.receive(1)
        assert isinstance(halt, Halt)
        assert (halt.slots.tolist(), halt.births.tolist()) == ([slot], [1])


def test_a_server_that_takes_nothing_holds_up_nobody_and_its_requests_are_aborted_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with playing() as scene:
        monkeypatch.setattr(outbox, "MAX_KEPT", 3)
        head = b'{"id":"' + b"x" * 20_000 + b'"'  # so that little fits its lane
        for request in (5, 6):
            scene.announced[1].send(Announce(1, request, Style.COMPLETION, head), 1)
            scene.join(request, server=1)
        scene.join(5)
        for _ in range(60):
            scene.step(A, A, A)
            assert scene.servers[0].receive(1).text == b"a"
            with contextlib.suppress(WouldBlock):
                abort = scene.inbox.receive_nowait()
                break
        else:
            pytest.fail("nobody was aborted")
        assert isinstance(abort, Abort)
        assert (abort.server, abort.requests.tolist()) == (1, [5, 6])
        scene.step(A, A, A)
        assert scene.servers[0].receive(1).rows == 1


def test_what_the_core_has_no_room_for_is_kept_and_holds_up_nobody() -> None:
    with playing() as scene:
        slots = [scene.join(request, stop=("ab",)) for request in range(8)]
        scene.step(*[A] * 8)
        send, tries = scene.output._inbox.send_nowait, 0

        def full(message: Any) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise WouldBlock("no room")
            send(message)

        scene.output._inbox.send_nowait = full  # type: ignore[method-assign]
        scene.step(*[B] * 8)
        with pytest.raises(WouldBlock):
            scene.inbox.receive_nowait()
        assert scene.output.turn() and scene.output.turn()  # nothing comes, and it tries again
        assert scene.inbox.receive(1).slots.tolist() == slots


def test_a_result_of_another_step_ends_the_process() -> None:
    with playing() as scene:
        scene.join(5)
        scene.send_step()
        scene.results.send(StepDone(77, 2, np.array([A], np.int32)), 1)
        with pytest.raises(RuntimeError, match="expected the StepDone of step 1, got that of 2"):
            scene.output.turn()


def test_a_step_that_was_missed_ends_the_process() -> None:
    with playing() as scene:
        scene.join(5)
        scene.step(A)
        scene.steps.send(Step(77, 3), 1)
        scene.send_result(3, A)
        with pytest.raises(OutOfStep, match=r"expected change 2 of leader 0000004d, got change 3 of leader 0000004d"):
            turns(scene.output)


def test_a_result_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with playing() as scene:
        scene.join(5)
        scene.send_step()
        with pytest.raises(Timeout, match="a step is without its result for 1 s"):
            turns(scene.output)


def test_it_ends_when_the_core_says_so() -> None:
    with playing() as scene:
        scene.steps.send(Stop(), 1)
        assert not scene.output.turn()


def test_what_is_open_when_the_core_says_stop_is_answered_first() -> None:
    with playing() as scene:
        scene.join(5)
        scene.send_step()
        scene.send_step()
        scene.steps.send(Stop(), 1)
        with thread(lambda: turns(scene.output)) as turning:
            eventually(lambda: waits(scene.group.results)["waiting_ns"])
            for number in (1, 2):
                scene.send_result(number, A)
                assert scene.servers[0].receive(1).text == b"a"
            turning.ended()
        assert turning.error is None


def test_a_result_that_rank_0_takes_with_it_is_not_waited_for() -> None:
    with playing() as scene:
        scene.join(5)
        scene.send_step()
        scene.results.close()
        with pytest.raises(EndOfChannel):
            turns(scene.output)


# ── where it sleeps ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("has_overlap", [True, False])
def test_while_results_come_no_step_wakes_it(has_overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_processor, "LOOK_AGAIN", 10.0)
    with playing() as scene, thread(lambda: turns(scene.output)):
        scene.join(5)
        scene.send_step()
        eventually(lambda: waits(scene.group.results)["waiting_ns"])
        woken = waits(scene.group.steps)["parks"]
        for number in range(1, 20):
            if has_overlap:
                scene.send_step()
            scene.send_result(number, A)
            assert scene.servers[0].receive(1).text == b"a"
            eventually(lambda: waits(scene.group.results)["waiting_ns"])
            if not has_overlap:
                scene.send_step()
        assert waits(scene.group.steps)["parks"] == woken
        scene.steps.send(Stop(), 1)
        scene.send_result(20, A)
        scene.results.close()


def test_while_nothing_is_to_be_done_it_does_not_look_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_processor, "LISTEN_AGAIN", 0.01)
    with playing() as scene:
        scene.join(5)
        scene.step(A)
        assert scene.output.turn()  # none comes
        receive = scene.output._results.receive
        scene.output._results.receive = pytest.fail  # type: ignore[assignment]
        for _ in range(3):
            assert scene.output.turn()
        scene.output._results.receive = receive  # type: ignore[method-assign]
        scene.step(A)
        assert [scene.servers[0].receive(1).text for _ in range(2)] == [b"a", b"a"]


def test_steps_without_results_hold_up_nobody_and_are_answered_in_the_end() -> None:
    """More of them than the channel has room for."""
    with playing() as scene, thread(lambda: turns(scene.output)):
        slot = scene.join(0, prompt=4000)
        for request in range(1, FLOOD + 1):
            scene.send_step()
            assert scene.worker.receive(1)
            scene.plan.leave(slot)
            slot = scene.join(request, prompt=4000)
        for number in range(1, FLOOD + 1):
            scene.send_result(number, A)
            assert number - 1 in scene.servers[0].receive(5).requests
        scene.steps.send(Stop(), 1)


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def send_first_step(steps: Sender) -> None:
    schedule = BatchState(8, 100, 4)
    begun(steps, schedule).send(StepBuilder(schedule).build(77, 1), 5)


def core(tree: Cluster, words: Connection) -> None:
    """Sends a step, and lives on."""
    group = tree.groups[0]
    with group.results.open_receiver(0, name="core 0.0 #1"), group.steps.open_sender(name="core 0.0 #1") as steps:
        send_first_step(steps)
        words.send("sent")
        words.recv()


def rank_0(tree: Cluster, words: Connection) -> None:
    with tree.groups[0].results.open_sender(name="worker 0.0 #1"):
        words.send("there")
        words.recv()


def told_after(process: SpawnProcess, of: OutputProcessor, asleep_on: penstock.MessageChannel, name: str) -> float:
    """Seconds from the end of a process of that name until the output, asleep there, knows of it."""
    with thread(lambda: turns(of)) as turning:
        eventually(lambda: waits(asleep_on)["waiting_ns"])
        process.kill()
        killed_at = time.monotonic()
        turning.ended()
    assert isinstance(turning.error, PeerDied) and turning.error.name == name
    return turning.ended_at - killed_at


@pytest.mark.parametrize("is_answered", [False, True])
def test_the_cores_death_is_told_within_a_tenth_of_a_second_wherever_it_sleeps(is_answered: bool) -> None:
    def measure() -> float:
        ours, theirs = multiprocessing.Pipe()
        with laid() as tree, spawn(core, tree, theirs) as process:
            group = tree.groups[0]
            with group.results.open_sender(name="worker 0.0 #1") as results, closing(an_output(tree)) as mine:
                assert ours.recv() == "sent"
                if is_answered:
                    results.send(StepDone(77, 1, np.zeros(0, np.int32)), 1)
                return told_after(process, mine, group.steps if is_answered else group.results, "core 0.0 #1")

    soon(measure)


def test_the_death_of_rank_0_is_told_within_a_tenth_of_a_second() -> None:
    def measure() -> float:
        ours, theirs = multiprocessing.Pipe()
        with laid() as tree, spawn(rank_0, tree, theirs) as process:
            group = tree.groups[0]
            with group.steps.open_sender(name="core 0.0 #1") as steps, closing(an_output(tree)) as mine:
                assert ours.recv() == "there"
                send_first_step(steps)
                return told_after(process, mine, group.results, "worker 0.0 #1")

    soon(measure)
