"""Ends in a group: the first death in a channel of one of them ends the waits of all, with that death."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import penstock
from penstock import EndGroup, EndOfChannel, LongRecords, PeerDied, Timeout
from penstock.channel import Channel
from tests.conftest import eventually
from tests.support.processes import DYING, Program, program, soon, thread

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)
# Later than the first look-ups of a waiter, which are 80 ms apart: without a wake-up the death is 0.6 s late.
WAITED_NS = 700_000_000

WORKER = """
steps = penstock.attach(sys.argv[1])
end = steps.open_receiver(1, name="worker 1")
say("ready")
if hear() == "fail":
    end.fail(RuntimeError("no such layer"))
hear()
"""


@contextlib.contextmanager
def worker(steps: Channel) -> Iterator[Program]:
    with program(WORKER, steps.ticket, env=DYING) as other:
        assert other.hear() == "ready"
        yield other


class Core(NamedTuple):
    """A sender of steps to a process, and in its group a receiver of replies from a peer that lives."""

    group: EndGroup
    steps: Channel
    sender: Any
    replies: Channel
    receiver: Any
    living: Any
    other: Program


@contextlib.contextmanager
def core(**options: Any) -> Iterator[Core]:
    steps = penstock.Broadcast(receivers=2, name="steps", **options)
    replies = penstock.Ring(name="replies")
    group = EndGroup()
    with (
        steps.open_sender(group=group) as sender,
        replies.open_receiver(group=group) as receiver,
        steps.open_receiver(0),
        replies.open_sender(name="worker 0") as living,
        worker(steps) as other,
    ):
        yield Core(group, steps, sender, replies, receiver, living, other)


def seconds_until_death(waiting: Any, channel: Channel, role: str, cause: Callable[[], float], pid: int) -> float:
    eventually(lambda: channel.snapshot()[role][0]["waiting_ns"] > WAITED_NS)
    at = cause()
    error = waiting.ended().error
    assert isinstance(error, PeerDied), error
    assert (error.index, error.name, error.pid) == (1, "worker 1", pid)
    assert f"receiver 1 of 'steps', 'worker 1' (pid {pid}), died: {error.how}" in str(error)
    return float(waiting.ended_at - at)


def test_death_ends_a_wait_in_another_channel_of_the_group() -> None:
    def measure() -> float:
        with core() as scene:
            with thread(scene.receiver.receive) as waiting:
                took = seconds_until_death(waiting, scene.replies, "receivers", scene.other.kill, scene.other.pid)
            with pytest.raises(PeerDied) as caught:
                scene.receiver.receive(timeout=10)
            assert caught.value.cause.signal == 9
            return took

    soon(measure)


def test_death_ends_a_wait_for_the_group_itself() -> None:
    def measure() -> float:
        with core() as scene:
            began = time.monotonic()
            scene.group.wait(timeout=0.1)
            assert time.monotonic() >= began + 0.1
            with thread(scene.group.wait) as waiting:
                at = scene.other.kill()
                error = waiting.ended().error
            assert isinstance(error, PeerDied) and error.name == "worker 1" and error.cause.signal == 9
            with pytest.raises(PeerDied):
                scene.group.wait(timeout=0)
            return float(waiting.ended_at - at)

    soon(measure)


def test_exception_of_a_living_process_ends_a_wait_of_the_group() -> None:
    def measure() -> float:
        with core() as scene:

            def fail() -> float:
                at = time.monotonic()
                scene.other.say("fail")
                return at

            with thread(scene.receiver.receive) as waiting:
                took = seconds_until_death(waiting, scene.replies, "receivers", fail, scene.other.pid)
            with pytest.raises(PeerDied, match="died: RuntimeError: no such layer"):
                scene.receiver.receive(timeout=10)
            return took

    soon(measure)


@pytest.mark.parametrize("nbytes", [1000, 600_000], ids=["ring", "pool"])
def test_death_ends_a_wait_for_room_of_the_group(nbytes: int) -> None:
    def measure() -> float:
        outputs = penstock.Ring(name="outputs", capacity=4096, long_records=SMALL_POOL)
        steps, group = penstock.Broadcast(receivers=2, name="steps"), EndGroup()
        with (
            steps.open_sender(group=group),
            outputs.open_receiver(),
            outputs.open_sender(group=group) as sender,
            worker(steps) as other,
        ):
            with thread(lambda: [sender.send(bytes(nbytes)) for _ in range(10)]) as waiting:
                return seconds_until_death(waiting, outputs, "senders", other.kill, other.pid)

    soon(measure)


def test_death_ends_a_wait_of_the_group_in_an_event_loop() -> None:
    def measure() -> float:
        steps, replies, group = penstock.Broadcast(receivers=2, name="steps"), penstock.Ring(), EndGroup()

        async def receive() -> None:
            async with replies.open_async_receiver(group=group) as receiver:
                await receiver.receive()

        with steps.open_sender(group=group), replies.open_sender(), worker(steps) as other:
            with thread(lambda: asyncio.run(receive())) as waiting:
                return seconds_until_death(waiting, replies, "receivers", other.kill, other.pid)

    soon(measure)


def test_waiting_records_are_received_before_the_death_of_the_group() -> None:
    with core() as scene:
        for number in range(3):
            scene.living.send(b"%d" % number)
        scene.other.kill()
        eventually(lambda: "worker 1" in repr(scene.group))
        assert [scene.receiver.receive(timeout=10) for _ in range(3)] == [b"0", b"1", b"2"]
        for _ in range(2):
            with pytest.raises(PeerDied, match="worker 1"):
                scene.receiver.receive(timeout=10)


def test_each_send_in_a_broken_group_raises() -> None:
    with core() as scene:
        scene.other.kill()
        with pytest.raises(PeerDied):
            scene.receiver.receive(timeout=10)
        for _ in range(2):
            with pytest.raises(PeerDied, match="receiver 1 of 'steps', 'worker 1'"):
                scene.sender.send(b"step", timeout=10)


def test_first_death_of_a_group_stays_its_cause() -> None:
    with core() as scene:
        scene.other.kill()
        eventually(lambda: "worker 1" in repr(scene.group))
        scene.living.fail(RuntimeError("connection reset"))
        with pytest.raises(PeerDied, match="receiver 1 of 'steps', 'worker 1'"):
            scene.receiver.receive(timeout=10)


def test_end_outside_of_the_group_waits_on() -> None:
    with core() as scene, penstock.Ring() as ring, ring.open_receiver() as outside:
        scene.other.kill()
        with pytest.raises(PeerDied):
            scene.receiver.receive(timeout=10)
        with pytest.raises(Timeout):
            outside.receive(timeout=0.05)


def test_clean_close_breaks_no_group() -> None:
    with core() as scene:
        scene.living.close()
        with pytest.raises(EndOfChannel):
            scene.receiver.receive(timeout=10)
        scene.sender.send(b"step")
        assert repr(scene.group) == "EndGroup()"


def test_death_that_its_channel_ignores_breaks_no_group() -> None:
    with core(on_receiver_death="ignore") as scene:
        scene.other.kill()
        eventually(lambda: [end["state"] for end in scene.steps.snapshot()["receivers"]] == ["live", "dead"])
        with pytest.raises(Timeout):
            scene.receiver.receive(timeout=0.2)
        scene.sender.send(b"step")


def test_death_before_an_end_was_opened_breaks_no_group() -> None:
    steps, group = penstock.Broadcast(receivers=2, name="steps"), EndGroup()
    with steps.open_receiver(0) as living:
        with worker(steps) as other:
            other.kill()
            eventually(lambda: [end["state"] for end in steps.snapshot()["receivers"]] == ["live", "dead"])
        with steps.open_sender(group=group) as sender:
            sender.send(b"step")
            assert living.receive(timeout=10) == b"step"
            assert repr(group) == "EndGroup()"


def test_successor_of_a_dead_end_mends_no_group() -> None:
    with core() as scene:
        scene.other.kill()
        eventually(lambda: "worker 1" in repr(scene.group))
        with scene.steps.open_receiver(1), pytest.raises(PeerDied, match="worker 1"):
            scene.sender.send(b"step")


ENDING = """
import atexit

class Last:
    def __del__(self, read=os.read):  # while the interpreter ends
        read(0, 1)

def open_and_leave():
    penstock.attach(sys.argv[1]).open_sender(group=penstock.EndGroup())
    say("opened")

last = Last()
atexit.register(open_and_leave)
"""


def test_program_ends_after_the_watcher_dropped_the_last_end_of_a_group() -> None:
    ring = penstock.Ring()
    with program(ENDING, ring.ticket, env=DYING) as other:
        assert other.hear() == "opened"
        eventually(lambda: [peer.state for peer in ring.peers()] == ["left"])
        assert other.end() == 0, other.errors()
