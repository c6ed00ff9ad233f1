"""Waiting: it ends in a value, a deadline, a close or an interrupt, soon, and costs nothing meanwhile."""

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterable

import pytest

import penstock
from penstock import ClosedError, EndOfChannel, LongRecords, Timeout, WouldBlock, _native
from penstock.channel import Channel
from penstock.lowlevel import ByteReceiver, ByteSender
from tests import tiers
from tests.conftest import eventually
from tests.support.channels import ring
from tests.support.control_groups import control_group
from tests.support.processes import IS_SANITIZED, PROMISED, forked, program, soon, state_of, thread


def fill(sender: ByteSender, nbytes: int = 960) -> int:
    """Sends until there is no room, and says how many records that were."""
    count = 0
    with contextlib.suppress(WouldBlock):
        while True:
            sender.send_nowait(b"%04d" % count + bytes(nbytes - 4))
            count += 1
    return count


def is_waiting(channel: Channel, ends: str) -> bool:
    return any(end["waiting_ns"] > 0 for end in channel.snapshot()[ends])


def is_parked(channel: Channel, ends: str) -> bool:
    """Returns whether an end has waited there for longer than the longest spin."""
    return any(end["waiting_ns"] > 15_000_000 for end in channel.snapshot()[ends])


ALSO = ("receive with a deadline", "iteration", "reserve")  # wait as others do


def without_also(kinds: Iterable[str]) -> list[str]:
    return [kind for kind in kinds if kind not in ALSO]


LATENCIES = ["eco", "auto", "spin"]


# ── a value ends a wait ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("latency", LATENCIES)
def test_a_parked_receiver_is_woken_by_a_record(latency: str) -> None:
    with ring(latency=latency) as (channel, sender, receiver):

        def measure() -> float:
            with thread(receiver.receive) as waiting:
                eventually(lambda: is_parked(channel, "receivers"))
                sent_at = time.monotonic()
                sender.send(b"x")
                assert waiting.ended().value == b"x"
            return waiting.ended_at - sent_at

        soon(measure, 0.02)


@pytest.mark.parametrize(
    ("latency", "nbytes", "last"),
    [
        *((latency, 960, b"last" * 240) for latency in LATENCIES),
        ("auto", 96, b"last" * 24),
        ("auto", 700_000, bytes(600_000)),
    ],
    ids=[*LATENCIES, "room of a small record", "memory"],
)
def test_a_parked_sender_is_woken_by_the_room_of_one_record(latency: str, nbytes: int, last: bytes) -> None:
    with ring(latency=latency) as (channel, sender, receiver):

        def measure() -> float:
            count = fill(sender, nbytes)
            with thread(lambda: sender.send(last)) as waiting:
                eventually(lambda: is_parked(channel, "senders"))
                released_at = time.monotonic()
                receiver.receive_view(timeout=1).release()
                assert waiting.ended().error is None
            numbers = [int(receiver.receive(timeout=1)[:4]) for _ in range(count - 1)]
            assert numbers == list(range(1, count)) and receiver.receive(timeout=1) == last
            return waiting.ended_at - released_at

        soon(measure, 0.02)


def test_an_idle_receiver_costs_next_to_nothing() -> None:
    """In processor time beyond a sleep: some virtual machines account 3 ms for a sleep of 0.5 s."""
    with ring() as (_, _, receiver):

        def wait() -> None:
            with pytest.raises(Timeout):
                receiver.receive(timeout=0.5)

        def processor_time(call: Callable[[], None]) -> float:
            before = time.thread_time()
            call()
            return time.thread_time() - before

        def measure() -> float:
            return (processor_time(wait) - processor_time(lambda: time.sleep(0.5))) / 0.5

        soon(measure, 0.05 if IS_SANITIZED else 0.01)


@pytest.mark.parametrize("timeout", [0, 0.001, 0.05, 0.3])
def test_send_and_receive_keep_their_deadline(timeout: float) -> None:
    with ring() as (_, sender, receiver):

        def measure() -> float:
            started = time.monotonic()
            with pytest.raises(Timeout):
                receiver.receive(timeout=timeout)
            waited = time.monotonic() - started
            assert waited >= timeout
            return waited - timeout

        soon(measure, 0.02)
        fill(sender)
        started = time.monotonic()
        with pytest.raises(Timeout):
            sender.send(b"x" * 900, timeout=timeout)
        assert time.monotonic() - started >= timeout


# ── how long a wait spins ────────────────────────────────────────────────────────────────────────────────────────────
MAX_SPIN_OF_CHILD = """
    with open(sys.argv[1], "w") as group:
        group.write(str(os.getpid()))
    say(penstock._native.max_spin())
"""


def test_wait_spins_briefly_under_a_processor_limit_of_its_cgroup() -> None:
    with control_group("cpu", 150_000) as group:
        below = group / "below"  # without a limit of its own
        below.mkdir()
        try:
            for member in (group, below):
                with program(MAX_SPIN_OF_CHILD, member / "cgroup.procs") as other:
                    assert other.hear() == "(50000, 'a control group limits processor time')"
                    assert other.end() == 0
        finally:
            below.rmdir()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_wait_never_spins_on_the_only_processor() -> None:
    source = """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        say(penstock._native.max_spin())
    """
    with program(source) as other:
        assert other.hear() == "(0, 'there is one processor')"
        assert other.end() == 0


# ── a close ends a wait ──────────────────────────────────────────────────────────────────────────────────────────────
def closed_while(
    waits: Callable[[ByteSender, ByteReceiver], object], ends: str, prepare: Callable[[ByteSender], object]
) -> None:
    def measure() -> float:
        with ring() as (channel, sender, receiver):
            prepare(sender)
            with thread(lambda: waits(sender, receiver)) as waiting:
                eventually(lambda: is_parked(channel, ends))
                closed_at = time.monotonic()
                (sender if ends == "senders" else receiver).close()
                assert isinstance(waiting.ended().error, ClosedError)
                assert time.monotonic() - closed_at < 5
            return waiting.ended_at - closed_at

    soon(measure)


@pytest.mark.parametrize("call", ["receive", "receive_view", "__next__"])
def test_closing_a_receiver_from_another_thread_ends_its_wait(call: str) -> None:
    closed_while(lambda _, receiver: getattr(receiver, call)(), "receivers", lambda _: None)


def test_closing_a_sender_from_another_thread_ends_its_wait_for_room() -> None:
    closed_while(lambda sender, _: sender.send(b"x" * 960), "senders", fill)
    closed_while(lambda sender, _: sender.reserve(960), "senders", fill)


def test_closing_a_sender_from_another_thread_ends_its_wait_for_memory() -> None:
    closed_while(lambda sender, _: sender.send(bytes(700_000)), "senders", lambda sender: sender.send(bytes(700_000)))


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_close_of_the_other_end_ends_a_wait(end: str) -> None:
    def measure() -> float:
        with ring() as (channel, sender, receiver):
            if end == "sender":
                fill(sender)
            work = (lambda: sender.send(b"x" * 960)) if end == "sender" else receiver.receive
            with thread(work) as waiting:
                eventually(lambda: is_parked(channel, f"{end}s"))
                closed_at = time.monotonic()
                (receiver if end == "sender" else sender).close()
                assert isinstance(waiting.ended().error, EndOfChannel)
            return waiting.ended_at - closed_at

    soon(measure)


def test_late_receiver_of_a_full_ring_wakes_the_sender() -> None:
    channel = penstock.Ring(capacity=4096)
    with channel.open_sender() as sender:
        count = fill(sender)
        with thread(lambda: sender.send(b"last" * 240)) as waiting:
            eventually(lambda: is_parked(channel, "senders"))
            with channel.open_receiver() as receiver:
                for _ in range(count):
                    receiver.receive(timeout=1)
                assert receiver.receive(timeout=5) == b"last" * 240
                waiting.ended()


# ── an interrupt ends a wait ─────────────────────────────────────────────────────────────────────────────────────────
INTERRUPTED = """
channel = penstock.Ring(capacity=4096, long_records=penstock.LongRecords(pool_nbytes=1 << 20))
sender, receiver = channel.open_sender(), channel.open_receiver()
pool = lowlevel.Pool.create(1 << 20)
held = pool.take(1 << 20)

def full():
    with contextlib.suppress(penstock.WouldBlock):
        while True:
            sender.send_nowait(bytes(960))

def no_memory():
    sender.send(bytes(700_000))

def other_thread():
    threading.Thread(target=receiver.receive, daemon=True).start()
    wait_for(lambda: channel.snapshot()["receivers"][0]["waiting_ns"])

prepare, wait = {
    "receive": (None, lambda: receiver.receive()),
    "receive with a deadline": (None, lambda: receiver.receive(timeout=30)),
    "receive_view": (None, lambda: receiver.receive_view()),
    "iteration": (None, lambda: list(receiver)),
    "send": (full, lambda: sender.send(bytes(960))),
    "reserve": (full, lambda: sender.reserve(960)),
    "send that waits for memory": (no_memory, lambda: sender.send(bytes(700_000))),
    "take": (None, lambda: pool.take(1, timeout=None)),
    "an end that another thread uses": (other_thread, lambda: receiver.receive()),
}[sys.argv[1]]
if prepare:
    prepare()
said = "said"
for _ in range(5):
    try:
        say("waiting")
        wait()
    except KeyboardInterrupt:
        said = time.monotonic()
    say(said)
    if hear() == "end":
        break
os._exit(0)
"""
KINDS_OF_WAIT = [
    "receive",
    "receive with a deadline",
    "receive_view",
    "iteration",
    "send",
    "reserve",
    "send that waits for memory",
    "take",
    "an end that another thread uses",
]


@pytest.mark.parametrize("kind", [*without_also(KINDS_OF_WAIT), *tiers.only_in_all(*ALSO)])
def test_an_interrupt_is_seen_within_a_tenth_of_a_second(kind: str) -> None:
    with program(INTERRUPTED, kind) as other:

        def measure() -> float:
            assert other.hear() == "waiting"
            eventually(lambda: state_of(other.pid) == "S")
            sent_at = other.kill(signal.SIGINT)
            seen_at = float(other.hear())
            other.say("again")
            return seen_at - sent_at

        soon(measure, PROMISED, tries=4)


def test_signal_handler_runs_during_a_wait_that_goes_on() -> None:
    source = """
        channel = penstock.attach(sys.argv[1])
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"handled\\n"))  # the signal may come within a print
        with channel.open_receiver() as receiver:
            say("waiting")
            say(receiver.receive().decode())
    """
    with penstock.Ring() as channel, channel.open_sender() as sender, program(source, channel.ticket) as other:
        assert other.hear() == "waiting"
        for _ in range(3):
            other.kill(signal.SIGUSR1)
            assert other.hear() == "handled"
        sender.send(b"and on")
        assert other.hear() == "and on"


WAITS = {
    "receive": ("receiver", "receiver.receive()"),
    "receive with a deadline": ("receiver", "receiver.receive(timeout=20)"),
    "receive_view": ("receiver", "receiver.receive_view()"),
    "iteration": ("receiver", "next(receiver)"),
    "send": ("sender", "send_for_ever(b'x' * 1000)"),
    "send that waits for memory": ("sender", "send_for_ever(b'x' * 200_000)"),
    "reserve": ("sender", "reserve_for_ever()"),
}
HANDLES = """
    ring = penstock.Ring(name="handled", capacity=4096, long_records=penstock.LongRecords(pool_nbytes=1 << 20))
    sender, receiver = ring.open_sender(), ring.open_receiver()

    def send_for_ever(record):
        while True:
            sender.send(record)

    def reserve_for_ever():
        while True:
            sender.reserve(1000).commit()

    def wait_and_handle(call, handler):
        signal.signal(signal.SIGALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        try:
            return call()
        except penstock.PenstockError as error:
            return type(error).__name__
"""


@pytest.mark.parametrize("kind", [*without_also(WAITS), *tiers.only_in_all(*ALSO)])
def test_signal_handler_that_closes_an_end_ends_its_wait(kind: str) -> None:
    end, call = WAITS[kind]
    other_end = "receiver" if end == "sender" else "sender"
    source = f"""{HANDLES}
    def close():
        {end}.close()
        say({end}.is_closed, [one["state"] for one in ring.snapshot()["{end}s"]][0])

    say(wait_and_handle(lambda: {call}, close))
    {other_end}.close()
    say([one.state for one in ring.peers()])
    """
    with program(source) as other:
        assert other.hear() == "True closed"
        assert other.hear() == "ClosedError"
        assert other.hear() == "['left', 'left']"
        assert other.end() == 0


def test_signal_handler_may_receive_from_an_end_in_a_wait() -> None:
    source = f"""{HANDLES}
    def handle():
        try:
            receiver.receive_nowait()
        except penstock.WouldBlock:
            say("nothing there")
        for _ in range(2):
            sender.send(b"first")
        say(receiver.receive(timeout=0).decode())
        with receiver.receive_view() as view:
            say(bytes(view).decode())
        sender.send(b"second")

    say(wait_and_handle(receiver.receive, handle).decode())
    """
    with program(source) as other:
        assert [other.hear() for _ in range(4)] == ["nothing there", "first", "first", "second"]
        assert other.end() == 0


def test_a_signal_handler_may_send_from_the_end_in_which_its_thread_waits() -> None:
    source = f"""{HANDLES}
    def handle():
        try:
            sender.send(b"-" * 900, timeout=0.01)
        except penstock.Timeout:
            say("no room")
        say(len(receiver.receive()))
        with sender.reserve(900) as room:
            memoryview(room)[:] = b"h" * 900
        signal.signal(signal.SIGALRM, lambda *_: sender.close())
        signal.setitimer(signal.ITIMER_REAL, 0.15)

    say(wait_and_handle(lambda: send_for_ever(b"x" * 900), handle))
    say([bytes(record[:1]) for record in receiver])
    """
    with program(source) as other:
        assert other.hear() == "no room"
        assert other.hear() == "900"
        assert other.hear() == "ClosedError"
        assert other.hear() == "[b'x', b'x', b'x', b'h']"
        assert other.end() == 0


# ── the end of a program ─────────────────────────────────────────────────────────────────────────────────────────────
DAEMONS = {
    "receives and sends": """
        def receive():
            while True:
                receiver.receive()
        def send():
            while True:
                sender.send(b"x" * 100)
        calls = receive, send
    """,
    "sends and receives what is long": """
        def receive():
            while True:
                receiver.receive()
        def send():
            while True:
                sender.send(b"x" * 200_000)
        calls = receive, send
    """,
    "receives views": """
        def receive():
            while True:
                receiver.receive_view().release()
        def send():
            while True:
                with sender.reserve(100) as room: pass
        calls = receive, send
    """,
    "waits for long": "calls = (receiver.receive,)",
    "waits its turn": "calls = receiver.receive, receiver.receive",
    "puts": """
        store = penstock.Store(1 << 20)
        def put():
            while True:
                store.put(bytes(32), b"x" * 200_000).release()
                store.clear()
        calls = (put,)
    """,
    "takes": """
        pool = lowlevel.Pool.create(1 << 20)
        held = pool.take(1 << 20)
        calls = (lambda: pool.take(1, timeout=30),)
    """,
}
ENDING = """
    import random
    ring = penstock.Ring()
    sender, receiver = ring.open_sender(), ring.open_receiver()
    class Closer:
        def __init__(self, *ends):
            self.ends = ends
        def __del__(self):  # when modules are taken down, long after daemon threads have been stopped
            for end in self.ends:
                end.close()
    {closer}
    {calls}
    for call in calls:
        threading.Thread(target=call, daemon=True).start()
    time.sleep(0.1 + random.random() / 100)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    "closer", [*tiers.only_in_all(""), "closer = Closer(sender, receiver)"], ids=["", "closed at the end"]
)
@pytest.mark.parametrize("kind", DAEMONS)
def test_program_keeps_its_status_with_daemon_threads_inside_calls(kind: str, closer: str) -> None:
    source = ENDING.format(calls=textwrap.indent(textwrap.dedent(DAEMONS[kind]), "    ").lstrip(), closer=closer)
    for _ in range(2):
        with program(source) as other:
            assert other.end() == 3


# ── several threads in one end ───────────────────────────────────────────────────────────────────────────────────────


def test_threads_share_a_sender_and_every_record_arrives_whole() -> None:
    with ring() as (_, sender, receiver):
        with contextlib.ExitStack() as threads:
            for letter in b"abcd":

                def write(letter: int = letter) -> None:
                    for number in range(100):
                        sender.send([b"%c%d:" % (letter, number), bytes([letter]) * 300], timeout=20)

                threads.enter_context(thread(write))
            expected = dict.fromkeys(b"abcd", 0)
            for _ in range(400):
                record = receiver.receive(timeout=20)
                letter = record[0]
                assert record == b"%c%d:" % (letter, expected[letter]) + bytes([letter]) * 300
                expected[letter] += 1


def test_nowait_does_not_wait_for_another_thread() -> None:
    with ring() as (channel, sender, receiver):
        with thread(lambda: receiver.receive(timeout=5)) as waiting:
            eventually(lambda: is_parked(channel, "receivers"))
            with pytest.raises(WouldBlock):
                receiver.receive_nowait()
            assert receiver.try_receive() is None
            sender.send(b"x")
            assert waiting.ended().value == b"x"
        fill(sender)
        with thread(lambda: sender.send(b"x" * 900)) as waiting:
            eventually(lambda: is_parked(channel, "senders"))
            with pytest.raises(WouldBlock):
                sender.send_nowait(b"x" * 900)
            assert not sender.try_send(b"x" * 900)
            receiver.close()
            waiting.ended()


def test_a_deadline_holds_while_another_thread_is_in_the_end() -> None:
    with ring() as (channel, _, receiver):
        with thread(receiver.receive) as waiting:
            eventually(lambda: is_parked(channel, "receivers"))
            started = time.monotonic()
            with pytest.raises(Timeout, match="another thread is using this end of 'ring'"):
                receiver.receive(timeout=0.05)
            assert 0.05 <= time.monotonic() - started < 5
            receiver.close()
            assert isinstance(waiting.ended().error, ClosedError)


def test_closing_ends_the_waits_of_all_threads_in_an_end() -> None:
    with ring() as (channel, _, receiver):
        with thread(receiver.receive) as item, thread(receiver.receive) as other:
            eventually(lambda: is_parked(channel, "receivers"))
            receiver.close()
            assert isinstance(item.ended().error, ClosedError)
            assert isinstance(other.ended().error, ClosedError)


@pytest.mark.parametrize("nbytes", [900, 5000])
def test_list_emptied_while_its_send_waits_is_sent_whole(nbytes: int) -> None:
    long_records = LongRecords(inline_limit=1024, pool_nbytes=1 << 20)
    with ring(capacity=1 << 15, long_records=long_records) as (channel, sender, receiver):
        fill(sender)
        parts = [os.urandom(nbytes) for _ in range(64 if nbytes == 5000 else 1)]
        expected = b"".join(bytearray(part) for part in parts)
        with thread(lambda: sender.send(parts)) as waiting:
            eventually(lambda: is_parked(channel, "senders"))
            parts.clear()
            rubbish = [b"\xff" * nbytes for _ in range(10_000)]
            while (record := receiver.receive(timeout=5))[4:20] == bytes(16):
                pass
            waiting.ended()
        assert len(rubbish) == 10_000
        assert record == expected


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_child_of_fork_has_none_of_its_parents_ends() -> None:
    with ring() as (channel, sender, receiver):
        sender.send(b"parent's")

        def use_them() -> None:
            for call in (
                lambda: sender.send(b"child's"),
                lambda: sender.send_nowait(b"child's"),
                lambda: sender.try_send(b"child's"),
                lambda: sender.reserve(5),
                receiver.receive,
                receiver.receive_nowait,
                receiver.receive_view,
                receiver.try_receive,
            ):
                with pytest.raises(ClosedError, match=r"belongs to the process before fork\(\)"):
                    call()
            sender.close()
            receiver.close()

        assert forked(use_them) == 0
        assert receiver.receive_nowait() == b"parent's"
        sender.send(b"still")
        assert receiver.receive_nowait() == b"still"
        assert [end["state"] for ends in ("senders", "receivers") for end in channel.snapshot()[ends]] == ["live"] * 2


def test_forked_child_may_close_an_end_that_its_parent_waits_in() -> None:
    with ring() as (channel, sender, receiver):
        with thread(receiver.receive) as waiting:
            eventually(lambda: is_parked(channel, "receivers"))

            def use_it() -> None:
                with pytest.raises(ClosedError, match="fork"):
                    receiver.receive(timeout=5)
                with pytest.raises(ClosedError, match="fork"):
                    receiver.receive_nowait()
                receiver.close()
                sender.close()

            assert forked(use_it, within=5) == 0
            sender.send(b"x")
            assert waiting.ended().value == b"x"


def test_a_child_of_fork_takes_an_end_of_its_own() -> None:
    with penstock.Ring() as channel, channel.open_receiver() as receiver:

        def send() -> None:
            with channel.open_sender(name="child") as sender:
                sender.send(b"from the child")

        assert forked(send) == 0
        assert receiver.receive(timeout=5) == b"from the child"
        with pytest.raises(EndOfChannel):
            receiver.receive(timeout=5)


# ── a wake-up at the worst moment ────────────────────────────────────────────────────────────────────────────────────
HELD_UP_US = 30_000


@pytest.mark.parametrize("point", ["wait.parked", "wait.woken", "send.written", "send.committed"])
def test_record_wakes_a_receiver_when_either_end_is_delayed(point: str) -> None:
    def measure() -> float:
        with ring(latency="eco") as (channel, sender, receiver):
            if point.startswith("wait"):
                _native.arm_point(point, "delay", 1, HELD_UP_US)
            with thread(lambda: receiver.receive(timeout=20)) as waiting:
                eventually(lambda: is_waiting(channel, "receivers"))
                if point.startswith("send"):
                    _native.arm_point(point, "delay", 1, HELD_UP_US)
                sent_at = time.monotonic()
                sender.send(b"x")
                assert waiting.ended().value == b"x"
            return waiting.ended_at - sent_at - HELD_UP_US / 1e6

    soon(measure, 0.02)


@pytest.mark.parametrize("point", ["wait.parked", "receive.released"])
def test_room_wakes_a_sender_that_falls_asleep(point: str) -> None:
    def measure() -> float:
        with ring(latency="eco") as (channel, sender, receiver):
            count = fill(sender)
            with thread(lambda: sender.send(b"x" * 960, timeout=20)) as waiting:
                if point == "wait.parked":
                    _native.arm_point(point, "delay", 1, HELD_UP_US)
                eventually(lambda: is_waiting(channel, "senders"))
                if point != "wait.parked":
                    _native.arm_point(point, "delay", 1, HELD_UP_US)
                read_at = time.monotonic()
                for _ in range(count):
                    receiver.receive(timeout=1)
                assert waiting.ended().error is None
            return waiting.ended_at - read_at - HELD_UP_US / 1e6

    soon(measure, 0.02)
