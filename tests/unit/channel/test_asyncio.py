"""The ends for asyncio: the same semantics, no thread, no polling; what is cancelled or times out loses no record."""

import asyncio
import contextlib
import errno
import functools
import gc
import inspect
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import penstock
from penstock import (
    AsyncReceiver,
    AsyncSender,
    Buffer,
    ClosedError,
    EndOfChannel,
    LongRecords,
    PeerDied,
    Timeout,
    WouldBlock,
)
from penstock.channel import aio
from tests.conftest import eventually
from tests.support.loops import in_a_loop
from tests.support.processes import assert_how, forked, program, soon, thread

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)


def new_ring(**options: object) -> penstock.Ring:
    return penstock.Ring(**{"capacity": 4096, "long_records": SMALL_POOL, **options})


def over_a_ring(**options: object) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """The test gets both ends of a new ring."""

    def decorate(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def main(**fixtures: Any) -> None:
            channel = new_ring(**options)
            async with channel.open_async_sender() as sender, channel.open_async_receiver() as receiver:
                await work(sender, receiver, **fixtures)

        @functools.wraps(work)
        def test(**fixtures: Any) -> None:
            asyncio.run(main(**fixtures))

        _, _, *fixtures = inspect.signature(work).parameters.values()
        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return test

    return decorate


async def waits(task: "asyncio.Task[object]") -> None:
    """Until the task is in its wait: the loop has gone round often enough for it to get there."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()


async def fill(sender: AsyncSender) -> int:
    count = 0
    with contextlib.suppress(WouldBlock):
        while True:
            sender.send_nowait(b"%04d" % count * 240)
            count += 1
    return count


@over_a_ring()
async def test_async_receiver_gets_what_an_async_sender_sends(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    for record in (b"", b"x", b"y" * 5000, [b"a", b"b"], memoryview(b"m")):
        await sender.send(record)
        expected = b"".join(record) if isinstance(record, list) else bytes(record)
        assert await receiver.receive() == expected
    assert (sender.index, receiver.index, receiver.source) == (0, 0, 0)


@over_a_ring()
async def test_next_wait_adds_the_pipe_that_a_loop_refused(
    sender: AsyncSender, receiver: AsyncReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "epoll_ctl")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "add_reader", refuse)
        with pytest.raises(OSError, match="epoll_ctl"):
            await receiver.receive()
    task = asyncio.ensure_future(receiver.receive(timeout=5))
    await waits(task)
    await sender.send(b"woken")
    assert await asyncio.wait_for(task, 2) == b"woken"


@over_a_ring(type=Buffer)
async def test_a_sender_that_waits_for_memory_is_woken_when_a_view_is_released(
    sender: AsyncSender, receiver: AsyncReceiver
) -> None:
    await sender.send(bytes(700_000))
    buffer = await receiver.receive()
    waiting = asyncio.create_task(sender.send(b"s" * 700_000))
    await waits(waiting)
    buffer.release()
    await waiting
    assert await receiver.receive() == Buffer(b"s" * 700_000)


@over_a_ring()
async def test_nowait_raises_when_no_record_or_no_room(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    with pytest.raises(WouldBlock):
        receiver.receive_nowait()
    await sender.send(b"x")
    assert receiver.receive_nowait() == b"x"
    await fill(sender)
    with pytest.raises(WouldBlock):
        sender.send_nowait(b"x" * 960)


@pytest.mark.parametrize("timeout", [0, -1, 0.001, 0.05])
def test_async_timeout_has_the_text_of_the_synchronous_timeout(timeout: float) -> None:
    async def work(sender: AsyncSender, receiver: AsyncReceiver) -> None:
        started = time.monotonic()
        with pytest.raises(Timeout, match="no record for receiver 0 of 'ring' within"):
            await receiver.receive(timeout=timeout)
        assert max(timeout, 0) <= time.monotonic() - started < 5
        await fill(sender)
        with pytest.raises(Timeout, match="'ring' is full for") as output:
            await sender.send(b"x" * 960, timeout=timeout)
        assert (output.value.receiver, output.value.pid, output.value.records_behind) == (0, os.getpid(), 4)

    for type in (bytes, Buffer):
        over_a_ring(type=type)(work)()


@over_a_ring()
async def test_record_that_waits_is_received_with_a_passed_deadline(
    sender: AsyncSender, receiver: AsyncReceiver
) -> None:
    await sender.send(b"there")
    assert await receiver.receive(timeout=0) == b"there"
    await sender.send(b"room", timeout=0)


@over_a_ring()
async def test_cancellation_at_any_moment_loses_and_repeats_no_record(
    sender: AsyncSender, receiver: AsyncReceiver, seed: int
) -> None:
    import random

    choose = random.Random(seed)
    actual: list[bytes] = []
    sent = 0
    for _ in range(500):
        task = asyncio.create_task(receiver.receive())
        for _ in range(choose.randrange(4)):
            await asyncio.sleep(0)
        if choose.random() < 0.6:
            await sender.send(b"%d" % sent)
            sent += 1
        for _ in range(choose.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            actual.append(await task)
    while len(actual) < sent:
        actual.append(await receiver.receive(timeout=5))
    assert actual == [b"%d" % number for number in range(sent)]
    with pytest.raises(WouldBlock):
        receiver.receive_nowait()


@pytest.mark.parametrize("turns", range(8))
@over_a_ring()
async def test_a_cancellation_at_the_moment_of_a_wake_up_is_not_lost(
    sender: AsyncSender, receiver: AsyncReceiver, turns: int
) -> None:
    waiting = asyncio.create_task(receiver.receive(timeout=30))
    await waits(waiting)
    receiver._on_bell()  # for nothing, as when a peer joins
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=1)
    assert done, "the task waits on although it was cancelled"
    assert waiting.cancelled()


@over_a_ring()
async def test_a_deadline_holds_while_another_task_is_in_the_end(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    waiting = asyncio.create_task(receiver.receive())
    await waits(waiting)
    with pytest.raises(Timeout):
        await asyncio.wait_for(receiver.receive(timeout=0.05), 2)
    await sender.send(b"x")
    assert await waiting == b"x"


@over_a_ring()
async def test_cancelled_send_sends_no_record(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    count = await fill(sender)
    for _ in range(20):
        waiting = asyncio.create_task(sender.send(b"cancelled" * 100))
        await waits(waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    for _ in range(count):
        await receiver.receive()
    await sender.send(b"next")
    assert await receiver.receive(timeout=5) == b"next"
    with pytest.raises(WouldBlock):
        receiver.receive_nowait()


@over_a_ring()
async def test_record_goes_to_one_of_the_tasks_that_share_an_end(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    async def consume() -> list[bytes]:
        return [record async for record in receiver]

    tasks = [asyncio.create_task(consume()) for _ in range(4)]
    await asyncio.gather(*(sender.send(b"%d" % number) for number in range(200)))
    sender.close()
    actual = [record for task in tasks for record in await task]
    assert sorted(actual, key=int) == [b"%d" % number for number in range(200)]


@over_a_ring()
async def test_waiting_tasks_are_served_in_order_of_arrival(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    for _ in range(5):
        receiving = [asyncio.create_task(receiver.receive()) for _ in range(5)]
        await waits(receiving[-1])
        for number in range(5):
            await sender.send(b"%d" % number)
        assert await asyncio.gather(*receiving) == [b"0", b"1", b"2", b"3", b"4"]
        count = await fill(sender)
        sending = [asyncio.create_task(sender.send(b"%d" % number * 960)) for number in range(5)]
        await waits(sending[-1])
        for _ in range(count):
            await receiver.receive()
        assert [await receiver.receive() for _ in range(5)] == [b"%d" % number * 960 for number in range(5)]
        await asyncio.gather(*sending)


@pytest.mark.parametrize("end", ["sender", "receiver"])
@over_a_ring()
async def test_closing_an_end_ends_the_waits_of_its_own_tasks(
    sender: AsyncSender, receiver: AsyncReceiver, end: str
) -> None:
    if end == "sender":
        await fill(sender)
    call = (lambda: sender.send(b"x" * 960)) if end == "sender" else receiver.receive
    tasks = [asyncio.create_task(call()) for _ in range(3)]
    await waits(tasks[0])
    (sender if end == "sender" else receiver).close()
    for task in tasks:
        with pytest.raises(ClosedError):
            await asyncio.wait_for(task, 5)
    with pytest.raises(ClosedError):
        await call()


@over_a_ring()
async def test_close_of_the_receiver_ends_a_waiting_async_send(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    await fill(sender)
    waiting = asyncio.create_task(sender.send(b"x" * 960))
    await waits(waiting)
    receiver.close()
    with pytest.raises(EndOfChannel):
        await waiting


def test_ends_serve_several_loops_one_after_another() -> None:
    channel = new_ring()
    sender, receiver = channel.open_async_sender(), channel.open_async_receiver()

    async def exchange(number: int) -> None:
        waiting = asyncio.create_task(receiver.receive())
        second = asyncio.create_task(receiver.receive())  # waits its turn: in every loop anew
        await waits(waiting)
        await sender.send(b"%d" % number)
        await sender.send(b"and")
        assert await asyncio.wait_for(waiting, 5) == b"%d" % number
        assert await asyncio.wait_for(second, 5) == b"and"
        count = await fill(sender)
        full = [asyncio.create_task(sender.send(b"f" * 960)) for _ in range(2)]
        await waits(full[0])
        for _ in range(count + 2):
            await receiver.receive(timeout=5)
        await asyncio.gather(*full)

    for number in range(3):
        asyncio.run(exchange(number))
    sender.close()
    receiver.close()


def test_loop_stopped_while_an_end_waits_leaves_the_next_loop_working() -> None:
    channel = new_ring()
    sender, receiver = channel.open_sender(), channel.open_async_receiver()

    async def give_up() -> None:
        waiting = asyncio.create_task(receiver.receive())  # cancelled by the end of the loop
        await waits(waiting)

    async def go_on() -> bytes:
        return await receiver.receive(timeout=5)

    asyncio.run(give_up())
    sender.send(b"kept")
    assert asyncio.run(go_on()) == b"kept"
    sender.close()
    receiver.close()


@over_a_ring()
async def test_idle_loop_uses_no_processor_time_and_no_thread(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    threads = len(os.listdir("/proc/self/task"))
    waiting = asyncio.create_task(receiver.receive())
    await waits(waiting)

    async def idle() -> float:
        before = time.process_time()
        await asyncio.sleep(0.4)
        return (time.process_time() - before) / 0.4

    measured = [await idle() for _ in range(3)]
    assert min(measured) < 0.01
    assert len(os.listdir("/proc/self/task")) == threads
    assert threading.active_count() == 1
    await sender.send(b"x")
    assert await waiting == b"x"


def test_a_waiting_loop_is_woken_from_another_thread_soon() -> None:
    def measure() -> float:
        channel = new_ring()
        with channel.open_sender() as sender:

            async def main() -> float:
                async with channel.open_async_receiver() as receiver:
                    record = await receiver.receive(timeout=20)
                    assert time.monotonic() > float(record)
                    return time.monotonic() - float(record)

            with thread(lambda: asyncio.run(main())) as waiting:
                eventually(lambda: channel.snapshot()["receivers"][0]["waiting_ns"] > 5_000_000)
                sender.send(b"%.9f" % time.monotonic())
                waiting.ended()
            assert isinstance(waiting.value, float)
            return waiting.value

    soon(measure, 0.02)


@in_a_loop
async def test_waiting_async_end_is_in_the_snapshot() -> None:
    channel = penstock.Ring()
    async with channel.open_async_receiver() as waiting_end:
        task = asyncio.create_task(waiting_end.receive())
        await waits(task)
        assert channel.snapshot()["receivers"][0]["waiting_ns"] > 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert channel.snapshot()["receivers"][0]["waiting_ns"] == 0


# ── with other processes ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_death_of_the_other_end_ends_an_async_wait_within_100_ms(victim: str) -> None:
    source = """
        end = getattr(penstock.attach(sys.argv[1]), f"open_{sys.argv[2]}")(name="victim")
        say("ready")
        hear()
    """

    async def main(channel: penstock.Ring, kill: Callable[[], float]) -> float:
        end: Any = channel.open_async_receiver() if victim == "sender" else channel.open_async_sender()
        async with end:
            if victim == "receiver":
                await fill(end)
            waiting = asyncio.create_task(end.receive() if victim == "sender" else end.send(b"x" * 960))
            await waits(waiting)
            killed_at = kill()
            with pytest.raises(PeerDied) as output:
                await waiting
            took = time.monotonic() - killed_at
            assert output.value.name == "victim"
            assert_how(output.value, "killed by SIGKILL", channel.peers)
            return took

    def measure() -> float:
        channel = new_ring()
        with program(source, channel.ticket, victim) as other:
            assert other.hear() == "ready"
            return asyncio.run(main(channel, other.kill))

    soon(measure)


@in_a_loop
async def test_each_async_receiver_of_a_broadcast_gets_each_record() -> None:
    channel = penstock.Broadcast(receivers=16, capacity=4096, long_records=SMALL_POOL)
    async with channel.open_async_sender() as sender, contextlib.AsyncExitStack() as ends:
        receivers = [await ends.enter_async_context(channel.open_async_receiver()) for _ in range(16)]

        async def consume(receiver: AsyncReceiver) -> list[bytes]:
            return [record async for record in receiver]

        tasks = [asyncio.create_task(consume(receiver)) for receiver in receivers]
        for number in range(200):
            await sender.send(b"%d" % number * (1 if number % 40 else 500), timeout=10)
        sender.close()
        for task in tasks:
            assert await task == [b"%d" % number * (1 if number % 40 else 500) for number in range(200)]


@in_a_loop
async def test_inbox_gets_the_records_of_each_async_sender() -> None:
    channel = penstock.Inbox(senders=8, capacity=4096)
    async with channel.open_async_receiver() as receiver, contextlib.AsyncExitStack() as ends:
        senders = [await ends.enter_async_context(channel.open_async_sender()) for _ in range(8)]

        async def produce(sender: AsyncSender) -> None:
            for number in range(100):
                await sender.send(b"%d" % number * 50)
            sender.close()

        tasks = [asyncio.create_task(produce(sender)) for sender in senders]
        expected = [0] * 8
        async for record in receiver:
            assert record == b"%d" % expected[receiver.source] * 50
            expected[receiver.source] += 1
        assert expected == [100] * 8
        await asyncio.gather(*tasks)


def test_a_child_of_fork_has_none_of_its_parents_ends() -> None:
    channel = new_ring()
    sender, receiver = channel.open_async_sender(), channel.open_async_receiver()

    def use_them() -> None:
        async def main() -> None:
            for work in (lambda: receiver.receive(timeout=5), lambda: sender.send(b"x", timeout=5)):
                with pytest.raises(ClosedError, match="fork"):
                    await work()

        asyncio.run(main())
        sender.close()
        receiver.close()

    assert forked(use_them) == 0

    async def main() -> None:
        await sender.send(b"still")
        assert await receiver.receive(timeout=5) == b"still"

    asyncio.run(main())
    sender.close()
    receiver.close()


# ── a peer that cannot wake this end ─────────────────────────────────────────────────────────────────────────────────
LOOKS_UP_WITHIN = 0.96 + 0.5  # s: what the module states, and what a busy machine adds
IN_A_LOOP = """
    import asyncio
    async def main():
        channel = penstock.attach(sys.argv[1])
        receiver = channel.open_async_receiver(name="loop")
        sender = penstock.attach(sys.argv[2]).open_sender(name="answers")
        say("ready")
        async for record in receiver:
            sender.send(record)
    asyncio.run(main())
"""


def test_async_receiver_gets_records_of_a_sender_without_descriptors() -> None:
    source = """
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        ask, answers = penstock.attach(sys.argv[1]).open_sender(), penstock.attach(sys.argv[2]).open_receiver()
        say("ready")
        hear()
        hogs = []
        with contextlib.suppress(OSError):
            while True:
                hogs.append(os.open("/dev/null", os.O_RDONLY))
        for number in range(5):
            ask.send(b"%d" % number)
            say(answers.receive(timeout=30).decode())
        for fd in hogs:
            os.close(fd)
        ask.close()
    """
    with new_ring() as ring, new_ring() as back, program(source, ring.ticket, back.ticket) as asks:
        assert asks.hear() == "ready"
        with program(IN_A_LOOP, ring.ticket, back.ticket) as loop:
            assert loop.hear() == "ready"
            time.sleep(0.3)
            began = time.monotonic()
            asks.say("go")
            for number in range(5):
                assert asks.hear() == str(number)
                assert time.monotonic() - began < (number + 1) * LOOKS_UP_WITHIN
            assert asks.end() == 0
            assert loop.end() == 0


def test_async_receiver_of_an_unreadable_process_gets_records() -> None:
    source = """
        import asyncio, ctypes
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        ring, back = penstock.Ring(name="ring"), penstock.Ring(name="back")
        if os.fork() == 0:
            with contextlib.suppress(penstock.PeerDied, penstock.EndOfChannel):
                ask, answers = ring.open_sender(), back.open_receiver()
                for number in range(10):
                    time.sleep(0.3 if number == 0 else 0)
                    ask.send(b"%d" % number)
                    began = time.monotonic()
                    answers.receive(timeout=20)
                    say("after", time.monotonic() - began)
            os._exit(0)
        async def main():
            receiver, sender = ring.open_async_receiver(), back.open_sender()
            for _ in range(10):
                sender.send(await receiver.receive(timeout=20))
        asyncio.run(main())
        os.wait()
    """
    with program(source) as other:
        waited = [float(other.hear().split()[1]) for _ in range(10)]
        assert max(waited) < LOOKS_UP_WITHIN, waited
        assert other.end() == 0


# ── delivered ────────────────────────────────────────────────────────────────────────────────────────────────────────
@over_a_ring()
async def test_delivered_messages_come_in_order_beside_other_callbacks(
    sender: AsyncSender, receiver: AsyncReceiver
) -> None:
    actual: list[bytes] = []
    counts: list[int] = []  # how many have come, at each turn of another callback

    def count() -> None:
        counts.append(len(actual))
        asyncio.get_running_loop().call_soon(count)

    records = [b"%d" % number for number in range(50)]
    receiver.deliver(actual.append, lambda error: False)
    count()
    for record in records:
        sender.send_nowait(record)
    while len(actual) < len(records):
        await asyncio.sleep(0)
    assert actual == records
    assert max(later - earlier for earlier, later in itertools.pairwise(counts)) <= aio.MAX_DELIVERED
    await asyncio.sleep(0.01)  # the receiver waits for its pipe
    await sender.send(b"woken")
    while actual[-1] != b"woken":
        await asyncio.sleep(0)


@pytest.mark.parametrize("goes_on", [True, False])
@over_a_ring()
async def test_delivery_goes_on_after_an_error_unless_refused(
    sender: AsyncSender, receiver: AsyncReceiver, goes_on: bool
) -> None:
    actual: list[object] = []

    def handle(record: bytes) -> None:
        actual.append(int(record))

    def fail(error: Exception) -> bool:
        actual.append(type(error))
        return goes_on

    receiver.deliver(handle, fail)
    for record in (b"1", b"no number", b"2"):
        sender.send_nowait(record)
    sender.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert actual[:4] == ([1, ValueError, 2, EndOfChannel] if goes_on else [1, ValueError])


@over_a_ring()
async def test_closed_receiver_delivers_nothing_more(sender: AsyncSender, receiver: AsyncReceiver) -> None:
    actual: list[object] = []

    def handle(record: bytes) -> None:
        actual.append(record)
        receiver.close()

    receiver.deliver(handle, lambda error: actual.append(error) is None)
    with contextlib.suppress(EndOfChannel, ClosedError, PeerDied):
        for _ in range(3):
            sender.send_nowait(b"record")
    await asyncio.sleep(0.01)
    assert actual == [b"record"]


@in_a_loop
async def test_delivery_needs_no_pipe_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio._AsyncEnd, "_ring", staticmethod(lambda end: None))  # no byte is ever seen
    ring, actual = new_ring(), asyncio.Event()
    with contextlib.closing(ring.open_async_receiver()) as receiver, ring.open_sender() as sender:
        receiver.deliver(lambda record: actual.set(), lambda error: False)
        await asyncio.sleep(0.01)
        sender.send(b"polled")
        await asyncio.wait_for(actual.wait(), 20)


# ── dropped ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize("end", ["senders", "receivers"])
@in_a_loop
async def test_end_that_is_dropped_in_a_running_loop_has_died(end: str, has_waited: bool) -> None:
    ring = new_ring()
    dropped = ring.open_async_sender() if end == "senders" else ring.open_async_receiver()
    if has_waited:
        with pytest.raises(Timeout):
            if isinstance(dropped, AsyncSender):
                await fill(dropped)
                await dropped.send(b"x" * 960, timeout=0.01)
            else:
                await dropped.receive(timeout=0.01)
    assert ring.snapshot()[end][0]["state"] == "live"
    del dropped
    gc.collect()
    await asyncio.sleep(0.01)
    assert ring.snapshot()[end][0]["failure"] == "garbage collected without closing"
    eventually(lambda: [peer.state for peer in ring.peers()] == ["left"])  # stays for 50 ms: its process may be ending


@in_a_loop
async def test_waiting_task_keeps_its_end_from_garbage_collection() -> None:
    ring = new_ring()
    sender = ring.open_sender()
    actual: list[bytes] = []

    async def receive() -> None:
        actual.append(await ring.open_async_receiver().receive())

    asyncio.ensure_future(receive())  # noqa: RUF006
    for _ in range(5):
        await asyncio.sleep(0.005)
        gc.collect()
    sender.send(b"kept")
    await asyncio.sleep(0.05)
    assert actual == [b"kept"]
