"""An output processor between its channels: the core, rank 0 and the servers are played here, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import Timeout, WouldBlock
from penstock.codec import Interned, MessageReceiver, MessageSender
from penstock.codec.follow import Leader, Leading
from penstock.engine import outbox
from penstock.engine.config import EngineConfig, SimulatedDevice
from penstock.engine.output import Output
from penstock.engine.plan import Plan
from penstock.engine.protocol import Abort, Announce, Delta, Halt, SamplingParams, Step, StepDone, Stop, Style, Whole
from penstock.engine.schedule import Schedule
from penstock.engine.text import Vocabulary
from penstock.engine.tree import Member, Tree

A, B = 0, 1
WORDS = Vocabulary([b"a", b"b"])


class Scene:
    def __init__(self, tree: Tree, held: contextlib.ExitStack) -> None:
        group = tree.groups[0]
        self.inbox: MessageReceiver = held.enter_context(group.inbox.receiver(name="core 0.0 #1"))
        self.steps: MessageSender = held.enter_context(group.steps.sender(name="core 0.0 #1"))
        self.results: MessageSender = held.enter_context(group.results.sender(name="worker 0.0 #1"))
        held.enter_context(group.results.receiver(0, name="core 0.0 #1"))
        held.enter_context(group.steps.receiver(0, name="worker 0.0 #1"))
        self.servers = [
            held.enter_context(one.receiver(name=f"server 0.{number} #1")) for number, one in enumerate(tree.servers)
        ]
        self.announced = [
            held.enter_context(group.announced[0].sender(number, name=f"server 0.{number} #1")) for number in range(2)
        ]
        self.output = Output(tree, Member("output", 0, 0, 1), WORDS)
        held.callback(self.output.close)
        self.schedule = Schedule(8, 100, 4)
        self.leader: Leader[Step, Whole] = Leader(self.schedule, 77)
        self.leading = Leading(self.steps, self.leader)
        self.plan = Plan(self.schedule)

    def join(self, request: int, server: int = 0, **params: Any) -> int:
        asked = SamplingParams(**{"max_tokens": None, **params})
        return self.plan.join(request, np.arange(2, dtype=np.int32), Interned(asked), range(10), chunk=2, server=server)

    def step(self, *ids: int) -> None:
        """One step, and its result."""
        self.leading.send(self.plan.finish(77, self.leader.next_number), 1)
        self.results.send(StepDone(77, self.leader.number, np.array(ids, np.int32)), 1)
        assert self.output.turn()


@contextlib.contextmanager
def playing() -> Iterator[Scene]:
    config = EngineConfig(simulated=SimulatedDevice(), api_servers=2, slots=8, block_size=4, step_timeout=1.0)
    with contextlib.ExitStack() as held:
        tree = Tree.lay(config)
        held.callback(tree.close)
        yield Scene(tree, held)


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
        monkeypatch.setattr(outbox, "MOST_KEPT", 3)
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
        scene.leading.send(scene.plan.finish(77, 1), 1)
        scene.results.send(StepDone(77, 2, np.array([A], np.int32)), 1)
        with pytest.raises(RuntimeError, match="expected the StepDone of step 1, got that of 2"):
            scene.output.turn()


def test_a_result_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with playing() as scene:
        scene.join(5)
        scene.leading.send(scene.plan.finish(77, 1), 1)
        with pytest.raises(Timeout):
            scene.output.turn()


def test_it_ends_when_the_core_says_so() -> None:
    with playing() as scene:
        scene.steps.send(Stop(), 1)
        assert not scene.output.turn()
