"""Deaths on a channel: told once, within a tenth of a second, with how; no other peer is held up, nothing is lost."""

import contextlib
import time
from collections.abc import Iterator

import pytest

import penstock
from penstock import EndOfChannel, LongRecords, PeerDied, Timeout, WouldBlock, _native
from penstock.channel import Channel
from tests.conftest import eventually
from tests.support.processes import DYING, Program, assert_how, program, soon, state_of, thread

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)

# A process at one end. It says "ready", and does what it hears: "send BYTES", "receive", "hold", "exit STATUS".
END = """
channel = penstock.attach(sys.argv[1])
held = []
with getattr(channel, f"open_{sys.argv[2]}")(name="victim") as end:
    say("ready")
    while True:
        word, _, rest = hear().partition(" ")
        if word == "send":
            end.send(rest.encode())
        elif word == "receive":
            say(end.receive(timeout=20).decode())
        elif word == "hold":
            held.append(end.receive_view(timeout=20))
        elif word == "reserve":
            room = end.reserve(int(rest))
            memoryview(room)[:] = b"h" * int(rest)
            held.append(room)
        elif word == "close":
            break
        elif word == "exit":
            os._exit(int(rest))
        say("done")
"""


@contextlib.contextmanager
def victim(channel: Channel, role: str) -> Iterator[Program]:
    with program(END, channel.ticket, role, env=DYING) as other:
        assert other.hear() == "ready"
        yield other


def tell(other: Program, *words: object) -> None:
    other.say(*words)
    assert other.hear() == "done"


# ── a sender dies ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_parked_receiver_gets_its_senders_death_within_100_ms() -> None:
    def measure() -> float:
        with penstock.Ring(name="deltas") as channel, channel.open_receiver() as receiver:
            with victim(channel, "sender") as other:
                with thread(receiver.receive) as waiting:
                    eventually(lambda: channel.snapshot()["receivers"][0]["waiting_ns"] > 15_000_000)
                    killed_at = other.kill()
                    error = waiting.ended().error
                assert isinstance(error, PeerDied)
                assert (error.name, error.pid) == ("victim", other.pid)
                assert f"sender 0 of 'deltas', 'victim' (pid {other.pid}), died: {error.how};" in str(error)
                assert_how(error, "killed by SIGKILL", channel.peers)
                return waiting.ended_at - killed_at

    soon(measure)


def test_signal_of_a_peer_that_ended_before_the_watch_is_named() -> None:
    with (
        penstock.Ring() as channel,
        victim(channel, "sender") as other,
    ):  # this process is no peer yet, and watches none
        other.process.kill()  # and not waited for: it stays a zombie
        eventually(lambda: state_of(other.pid) == "Z")
        with channel.open_receiver():
            eventually(lambda: channel.peers()[0].state == "dead")
            assert channel.peers()[0].how == "killed by SIGKILL"


def test_a_spilled_reservation_of_a_dead_sender_is_given_back() -> None:
    with penstock.Ring(long_records=SMALL_POOL) as channel, channel.open_receiver() as receiver:
        with victim(channel, "sender") as other:
            tell(other, "reserve", 800_000)
            assert channel.snapshot()["pool"][0]["blocks"] == 1
            other.kill()
            with pytest.raises(PeerDied) as output:
                receiver.receive(timeout=5)
            # the latter on a busy machine: a process that died is cleared up within a time
            assert output.value.held in ("1 block (781.2 KiB), given back", "what has not been given back yet")
            eventually(lambda: channel.snapshot()["pool"][0]["blocks"] == 0)


def test_successor_of_a_dead_sender_goes_on_and_the_death_comes_once() -> None:
    channel = penstock.Ring()
    with channel.open_receiver() as receiver:
        for generation in range(3):
            with victim(channel, "sender") as other:
                tell(other, "send", "of", generation)
                assert receiver.receive(timeout=5) == b"of %d" % generation
                other.kill()
                with pytest.raises(PeerDied) as output:
                    receiver.receive(timeout=5)
                assert output.value.pid == other.pid
        with channel.open_sender() as sender:
            sender.send(b"new")
            assert receiver.receive(timeout=5) == b"new"
            with pytest.raises(WouldBlock):
                receiver.receive_nowait()


def test_death_is_reported_before_records_of_the_next_sender() -> None:
    channel = penstock.Ring()
    with channel.open_receiver() as receiver:
        with victim(channel, "sender") as other:
            tell(other, "send old")
            tell(other, "send older")
            tell(other, "reserve", 100)  # no receiver sees that record
            other.kill()
            other.process.wait()
            eventually(lambda: channel.peers()[1].state == "dead")
            assert receiver.receive(timeout=5) == b"old"
        with channel.open_sender() as sender:
            sender.send(b"new")
            assert receiver.receive(timeout=5) == b"older"
            with pytest.raises(PeerDied) as output:
                receiver.receive(timeout=5)
            assert output.value.pid == other.pid
            assert receiver.receive(timeout=5) == b"new"
            assert receiver.try_receive() is None


def is_reaped(channel: Channel[bytes]) -> bool:
    """Returns whether the victim's ends are free: they are marked dead before what it held has been given back."""
    return {peer["name"]: peer["state"] for peer in channel.snapshot()["peers"]}["victim"] == "dead"


def test_inbox_reports_each_death_once_and_goes_on() -> None:
    channel = penstock.Inbox(senders=4)
    with channel.open_receiver() as receiver, channel.open_sender(0) as alive, contextlib.ExitStack() as others:
        victims = [others.enter_context(victim(channel, "sender")) for _ in range(3)]
        for number, other in enumerate(victims):
            tell(other, "send", number)
            other.kill()
            other.process.wait()
        output, records = [], []
        alive.send(b"alive")
        while len(output) + len(records) < 7:
            try:
                records.append(receiver.receive(timeout=5))
            except PeerDied as error:
                output.append(error.pid)
        assert sorted(output) == sorted(other.pid for other in victims)
        assert sorted(records) == [b"0", b"1", b"2", b"alive"]
        with pytest.raises(WouldBlock):
            receiver.receive_nowait()
        alive.send(b"still")
        assert receiver.receive(timeout=5) == b"still"
        alive.close()
        with pytest.raises(EndOfChannel):
            receiver.receive(timeout=5)


def test_busy_senders_do_not_delay_the_report_of_a_death() -> None:
    channel = penstock.Inbox(senders=2)
    with channel.open_receiver() as receiver, channel.open_sender(0) as alive, victim(channel, "sender") as other:
        for number in range(3):
            tell(other, "send", number)
        other.kill()
        other.process.wait()
        eventually(lambda: channel.snapshot()["senders"][1]["state"] == "dead")
        records = []
        with pytest.raises(PeerDied) as death:
            for _ in range(100):
                alive.send(b"more")  # there is always something to read
                records.append(receiver.receive(timeout=5))
        assert death.value.pid == other.pid
        assert [record for record in records if record != b"more"] == [b"0", b"1", b"2"]
        assert len(records) <= 10  # the dead one's, and as many of the other's in turn


def test_inbox_that_ignores_deaths_reports_none() -> None:
    channel = penstock.Inbox(senders=2, on_sender_death="ignore")
    with channel.open_receiver() as receiver, channel.open_sender(0) as alive, victim(channel, "sender") as other:
        tell(other, "send last words")
        other.kill()
        other.process.wait()
        eventually(lambda: channel.snapshot()["senders"][1]["state"] == "dead")
        assert receiver.receive(timeout=5) == b"last words"
        with pytest.raises(Timeout):
            receiver.receive(timeout=0.05)
        alive.send(b"alive")
        assert receiver.receive(timeout=5) == b"alive"


# ── a receiver dies ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_parked_sender_gets_its_receivers_death_within_100_ms() -> None:
    def measure() -> float:
        with penstock.Ring(name="steps", capacity=4096) as channel, channel.open_sender() as sender:
            with victim(channel, "receiver") as other:
                for _ in range(4):
                    sender.send(bytes(960))
                with thread(lambda: sender.send(bytes(960))) as waiting:
                    eventually(lambda: channel.snapshot()["senders"][0]["waiting_ns"] > 15_000_000)
                    killed_at = other.kill()
                    error = waiting.ended().error
                assert isinstance(error, PeerDied)
                assert f"receiver 0 of 'steps', 'victim' (pid {other.pid}), died: {error.how};" in str(error)
                assert_how(error, "killed by SIGKILL", channel.peers)
                with pytest.raises(PeerDied):
                    sender.send(b"nobody is left")
                return waiting.ended_at - killed_at

    soon(measure)


def test_death_of_the_holder_ends_a_wait_for_memory() -> None:
    with penstock.Ring(long_records=SMALL_POOL) as channel, channel.open_sender() as sender:
        with victim(channel, "receiver") as other:
            sender.send(bytes(700_000))
            tell(other, "hold")
            with thread(lambda: sender.send(bytes(700_000))) as waiting:
                eventually(lambda: channel.snapshot()["senders"][0]["waiting_ns"] > 15_000_000)
                other.kill()
                assert isinstance(waiting.ended().error, PeerDied)
            assert channel.snapshot()["pool"][0]["blocks"] == 0


def test_broadcast_reports_each_death_once_and_goes_on() -> None:
    channel = penstock.Broadcast(receivers=3, capacity=4096)
    with channel.open_sender() as sender, channel.open_receiver(0) as alive, contextlib.ExitStack() as others:
        victims = [others.enter_context(victim(channel, "receiver")) for _ in range(2)]
        for number in range(4):
            sender.send(b"%d" % number * 900)
            alive.receive(timeout=5)
        tell(victims[0], "hold")
        for other in victims:
            other.kill()
            other.process.wait()
        output, sent = [], 0
        while sent < 50:
            try:
                sender.send(b"%d" % sent * 400, timeout=5)
            except PeerDied as error:
                output.append(error.pid)
                continue
            assert alive.receive(timeout=5) == b"%d" % sent * 400
            sent += 1
        assert sorted(output) == sorted(other.pid for other in victims)


def test_broadcast_that_ignores_deaths_reports_none() -> None:
    channel = penstock.Broadcast(receivers=2, capacity=4096, on_receiver_death="ignore")
    with channel.open_sender() as sender, channel.open_receiver(0) as alive, victim(channel, "receiver") as other:
        for number in range(4):
            sender.send(b"%d" % number * 960)
            assert alive.receive(timeout=5) == b"%d" % number * 960
        tell(other, "hold")
        other.kill()
        for number in range(50):
            sender.send(b"%d" % number * 400, timeout=5)
            assert alive.receive(timeout=5) == b"%d" % number * 400
        assert channel.snapshot()["receivers"][1]["state"] == "dead"


def test_blocks_of_a_dead_receiver_are_given_back() -> None:
    channel = penstock.Broadcast(receivers=2, long_records=SMALL_POOL, on_receiver_death="ignore")
    with channel.open_sender() as sender, channel.open_receiver(0) as alive, victim(channel, "receiver") as other:
        for _ in range(4):
            sender.send(bytes(200_000))
        tell(other, "hold")  # one is held, three have not been looked at
        for _ in range(4):
            alive.receive(timeout=5)
        assert channel.snapshot()["pool"][0]["blocks"] == 4
        other.kill()
        eventually(lambda: channel.snapshot()["pool"][0]["blocks"] == 0)


@pytest.mark.parametrize(
    ("delay_us", "held"),
    [(2_000, "1 block (195.3 KiB), given back"), (300_000, "what has not been given back yet")],
    ids=["counted soon", "counted late"],
)
def test_death_names_held_blocks_once_they_are_counted(delay_us: int, held: str) -> None:
    channel = penstock.Ring(long_records=SMALL_POOL)
    with channel.open_sender() as sender, victim(channel, "receiver") as other:
        sender.send(bytes(200_000))
        tell(other, "hold")
        _native.arm_point("reap.marked", "delay", 1, delay_us)  # the end is marked, the block not yet counted
        other.kill()
        with pytest.raises(PeerDied) as output:
            for _ in range(5000):
                sender.send(b"x", timeout=5)
                time.sleep(0.001)
        assert output.value.held == held
        eventually(lambda: channel.snapshot()["pool"][0]["blocks"] == 0)
        table = {peer["name"]: peer for peer in channel.snapshot()["peers"]}
        assert table["victim"]["reaped_blocks"] == 1


def test_successor_of_a_dead_receiver_gets_records_from_then_on() -> None:
    channel = penstock.Ring()
    with channel.open_sender() as sender:
        with victim(channel, "receiver") as other:
            sender.send(b"1")
            other.say("receive")
            assert (other.hear(), other.hear()) == ("1", "done")
            sender.send(b"lost")
            other.kill()
            eventually(lambda: is_reaped(channel))
        with channel.open_receiver() as receiver:
            with pytest.raises(PeerDied) as output:
                sender.send(b"2")
            assert output.value.pid == other.pid
            sender.send(b"2")
            assert receiver.receive(timeout=5) == b"2"
            assert receiver.try_receive() is None


def test_each_sender_of_an_inbox_gets_a_death_once() -> None:
    channel = penstock.Inbox(senders=2)
    with channel.open_sender() as item, channel.open_sender() as other_sender:
        with victim(channel, "receiver") as other:
            other.kill()
            eventually(lambda: is_reaped(channel))
        with channel.open_receiver() as receiver:
            for sender in (item, other_sender):
                with pytest.raises(PeerDied):
                    sender.send(b"x")
                sender.send(b"y")
            assert [receiver.receive(timeout=5) for _ in range(2)] == [b"y", b"y"]
