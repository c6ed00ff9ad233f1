"""A link goes on after a reset of its connection: frames and values arrive once, in order, as they were sent."""

import contextlib
import errno
import functools
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Inbox, Ring, Store
from penstock.bridge import (
    InboundChannel,
    Lane,
    LinkSpec,
    Listener,
    OutboundChannel,
    PullChannels,
    Puller,
    StoreValues,
    Tls,
    connect,
    packets,
    resumption,
)
from penstock.bridge.link_errors import BridgeRefused, ProtocolError
from penstock.bridge.listener import _dial
from penstock.bridge.packets import MAX_UNACKED_NBYTES, PacketQueue, packet_head
from penstock.bridge.resumption import (
    ENDED,
    ENDED_S,
    LOSSES_S,
    MAX_LOSSES,
    REPLACED,
    ListenerResumer,
    LossLog,
    NewConnection,
    ResumeOffer,
)
from penstock.bridge.wire import TlsWire
from tests import tiers
from tests.conftest import eventually
from tests.support.certificates import make_certificates
from tests.support.links import SECRET, RunningLink
from tests.support.processes import program, threads
from tests.support.relay import TO_CONNECTOR, TO_LISTENER, Relay, relay
from tests.unit.bridge.test_packets import CutWire

LINK = LinkSpec("link", heartbeat_s=0.25, silence_s=2.0)
# With 20 runnable threads on two processors a handshake takes 2 s at times, and the link ends, as it should. So tests
# that have a link go on give a handshake more time. Tests of the limits do not.
PATIENT = replace(LINK, silence_s=10.0)
FRAMES = 60


def frame(number: int) -> bytes:
    """Every fifth is long, and passes in pieces; every third is not copied as it is sent."""
    return b"%8d" % number + bytes(400_000 if number % 5 == 4 else 150_000 if number % 3 == 2 else 50)


@contextlib.contextmanager
def resumable(
    home: LinkSpec, away: LinkSpec, tls: Tls | None = None
) -> Iterator[tuple[RunningLink, RunningLink, Relay]]:
    """Both sides run, with a relay between them; the listener stays open."""
    with Listener(("127.0.0.1", 0), secret=SECRET, tls=tls) as listener, relay(listener.address) as between:
        links = {}
        specs = replace(home, name="home"), replace(away, name="away")

        def accept() -> None:
            links["home"] = RunningLink(listener.accept(specs[0], timeout=20))

        accepting = threading.Thread(target=accept)
        accepting.start()
        away_link = RunningLink(connect(between.address, specs[1], secret=SECRET, tls=tls, timeout=20))
        accepting.join()
        try:
            yield links["home"], away_link, between
        finally:
            for link in (links["home"], away_link):
                link.link.stop("the test is over")
            for link in (links["home"], away_link):
                link.end()


class Traffic:
    """Frames both ways."""

    def __init__(self) -> None:
        self.there, self.here, self.back, self.home = Ring(), Ring(), Ring(), Ring()
        self.specs = (
            replace(PATIENT, channels=[OutboundChannel("there", self.there), InboundChannel("back", self.home)]),
            replace(PATIENT, channels=[OutboundChannel("back", self.back), InboundChannel("there", self.here)]),
        )

    def exchange(self, count: int = FRAMES, first: int = 0) -> None:
        """Sends frames to the other side and back, and compares them."""
        numbers = range(first, first + count)
        with self.there.open_sender() as sender, self.back.open_sender() as answer:
            with (
                threads(*(functools.partial(send, end, numbers) for end in (sender, answer))),
                self.here.open_receiver() as receiver,
                self.home.open_receiver() as answers,
            ):
                for number in numbers:
                    assert receiver.receive(10) == frame(number)
                    assert answers.receive(10) == frame(number)


def send(sender: Any, numbers: range) -> None:
    for number in numbers:
        sender.send(frame(number), timeout=10)


def certificates(folder: Path) -> Tls:
    make_certificates(folder, "ours")
    return Tls(f"{folder}/ours.pem", f"{folder}/ours.key", f"{folder}/ours-ca.pem")


def must_have_resumed(*links: RunningLink, times: int = 1) -> None:
    for link in links:
        assert link.is_running or link.outcome() == "all channels have ended"
        assert link.link.stats().resumptions >= times


def count_resumptions(*links: RunningLink) -> list[int]:
    return [link.link.stats().resumptions for link in links]


# ── resets ──
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("sides", [(), (TO_CONNECTOR,)], ids=["both", "connector"])
def test_link_goes_on_after_a_reset(sides: tuple[int, ...], is_encrypted: bool, tmp_path: Path) -> None:
    traffic, pauses = Traffic(), []
    home, away = (replace(spec, on_resume=lambda pause, _: pauses.append(pause)) for spec in traffic.specs)
    with resumable(home, away, certificates(tmp_path) if is_encrypted else None) as (first, second, between):
        sending = threading.Thread(target=traffic.exchange)
        sending.start()
        eventually(lambda: between.nbytes[TO_CONNECTOR] > 500_000)
        between.reset(*sides)
        sending.join()
        eventually(lambda: len(pauses) == 2)
        must_have_resumed(first, second)
        print(f"pauses of {', '.join(f'{pause * 1e3:.1f}' for pause in pauses)} ms")


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("direction", [TO_LISTENER, TO_CONNECTOR], ids=["to the listener", "to the connector"])
def test_link_goes_on_after_damaged_packets(direction: int, is_encrypted: bool, tmp_path: Path) -> None:
    tls = certificates(tmp_path) if is_encrypted else None
    for _ in range(tiers.DAMAGES):
        traffic = Traffic()
        reasons: list[str] = []
        specs = [replace(spec, on_resume=lambda _, reason, log=reasons: log.append(reason)) for spec in traffic.specs]
        with resumable(*specs, tls) as (home, away, between):
            between.flips[direction] = 1
            traffic.exchange(12)
            eventually(lambda reasons=reasons: len(reasons) == 2)
            must_have_resumed(home, away)
            assert is_encrypted or any("CRC" in reason for reason in reasons)


def test_link_dies_as_damaged_when_a_packet_comes_damaged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the memory of the sender were bad."""
    traffic = Traffic()
    with resumable(*traffic.specs) as (home, away, _), traffic.there.open_sender() as sender:

        def head(kind: int, lane: int, source: int, payload: Any, nbytes: int) -> bytes:
            return packet_head(kind, lane, source, b"other" if kind == packets.FRAME else payload, nbytes)

        monkeypatch.setattr(packets, "packet_head", head)
        sender.send(b"frame")
        assert away.death().kind == "damaged" and away.link.stats().resumptions == 1
        assert home.death().kind == "damaged"


def test_link_goes_on_after_each_of_many_resets_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a connection that both sides have: connections may be reset as often as that, and no more often."""
    monkeypatch.setattr(resumption, "LOSSES_S", 0.0)
    traffic = Traffic()
    with resumable(*traffic.specs) as (home, away, between):
        is_over = threading.Event()

        def strike() -> None:
            for number in range(tiers.LINK_RESETS):
                eventually(lambda number=number: min(count_resumptions(home, away)) >= number, within=20)
                between.reset()
            is_over.set()

        striking = threading.Thread(target=strike)
        first = 0
        with traffic.there.open_sender() as sender, traffic.here.open_receiver() as receiver:
            striking.start()
            while not is_over.is_set():
                send(sender, range(first, first + 5))
                for number in range(first, first + 5):
                    assert receiver.receive(10) == frame(number)
                first += 5
            striking.join()
        eventually(lambda: min(count_resumptions(home, away)) >= tiers.LINK_RESETS)
        must_have_resumed(home, away, times=tiers.LINK_RESETS)
        print(f"{home.link.stats().resumptions} resumptions, {first} frames")


@pytest.mark.parametrize("direction", [TO_LISTENER, TO_CONNECTOR], ids=["to the listener", "to the connector"])
def test_link_goes_on_after_a_reset_at_any_byte(direction: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(tiers.LINK_CUTS):
        traffic = Traffic()
        with resumable(*traffic.specs) as (home, away, between):
            eventually(lambda between=between: between.nbytes[1 - direction] > 0)
            nbytes = chance.choice([300, 3_000, 900_000])
            between.reset_at = direction, between.nbytes[direction] + chance.randrange(nbytes)
            traffic.exchange(12)
            eventually(lambda between=between: between.reset_at is None)
            eventually(lambda home=home, away=away: home.link.stats().resumptions and away.link.stats().resumptions)


def test_value_arrives_whole_after_resets_within_it() -> None:
    value = np.random.default_rng(1).integers(0, 255, 16 << 20, dtype=np.uint8)
    pulls = PullChannels.open(1)
    with Store(1 << 26, name="home") as home, Store(1 << 26, name="away") as away:
        home.put(value, key=bytes(32)).release()
        specs = replace(PATIENT, values=StoreValues(home)), replace(PATIENT, values=StoreValues(away, pulls))
        with resumable(*specs) as (first, second, between):
            puller = Puller(pulls, 0, away)
            before = between.nbytes[TO_CONNECTOR]
            between.reset_at = TO_CONNECTOR, before + 3_000_001

            def strike() -> None:
                eventually(lambda: between.nbytes[TO_CONNECTOR] > before + 8_000_000, within=20)
                between.reset(TO_CONNECTOR)

            striking = threading.Thread(target=strike)
            striking.start()
            with puller.get(bytes(32), timeout=20) as lease:
                assert np.array_equal(lease.value(), value)
            striking.join()
            must_have_resumed(first, second)
            assert second.link.stats().values_received == 1
            puller.close()
    pulls.close()


def test_each_sender_of_an_inbox_keeps_its_order_over_resets() -> None:
    source, target = Inbox(senders=3), Inbox(senders=3)
    home = replace(PATIENT, channels=[OutboundChannel("frames", source)])
    away = replace(PATIENT, channels=[InboundChannel("frames", target, [Lane(0), Lane(1), Lane(2)])])
    with resumable(home, away) as (*_, between), target.open_receiver() as receiver:
        senders = [source.open_sender(index) for index in range(3)]
        records: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for number in range(100):
            for sender in senders:
                sender.send(b"%d" % number)
            if number % 20 == 10:
                between.reset()
        for _ in range(300):
            record = receiver.receive(10)
            records[receiver.source].append(int(record))
        assert all(numbers == list(range(100)) for numbers in records.values())
        for sender in senders:
            sender.close()


def test_stop_ends_both_sides_in_peace_after_a_reset() -> None:
    with resumable(LINK, LINK) as (home, away, between):
        between.reset()
        home.link.stop("enough")
        assert home.outcome() == "enough"
        assert away.outcome() == "enough"


def test_tls_counts_what_it_took_before_the_connection_was_lost(tmp_path: Path) -> None:
    """The other side may have received a part, and says so when the link goes on."""
    tls = certificates(tmp_path)
    ours, remote = socket.socketpair()
    with ours, remote:
        wire = TlsWire(ours, tls.context(is_server=False), knock=bytes(32))
        other = TlsWire(remote, tls.context(is_server=True), knock=None)
        for _ in range(4):
            for side in (wire, other):
                assert side.recv_into(memoryview(bytearray(1))) is None
        sends = iter([1_000])

        def send(buffers: list[Any]) -> int:
            for nbytes in sends:
                return ours.send(buffers[0][:nbytes])
            raise ConnectionResetError(errno.ECONNRESET, "reset")

        wire.plain.send = send  # type: ignore[method-assign]
        assert wire.send([bytes(5_000)]) == 5_000
        remote.shutdown(socket.SHUT_WR)  # as after a reset: the kernel has told of it already
        for call in (wire.flush, lambda: wire.send([b"x"]), lambda: wire.recv_into(memoryview(bytearray(1)))):
            with pytest.raises(ConnectionResetError):
                call()


FULL_CONNECTOR = """
    from penstock.bridge import LinkSpec, connect

    def fill():
        \"\"\"Takes the descriptors that are left: the limit of a busy process.\"\"\"
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1]))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)

    spec = LinkSpec("link", name="away", heartbeat_s=0.25, silence_s=10.0, on_resume=lambda *_: say("resumed"))
    link = connect(("127.0.0.1", int(hear())), spec, secret=bytes(range(32)), timeout=20)
    threading.Thread(target=lambda: say(link.run())).start()
    wait_for(lambda: link.stats().nbytes_received)
    fill()
    say("full")
"""


def test_connector_goes_on_when_it_has_no_descriptor_but_the_lost_one() -> None:
    home = replace(PATIENT, name="home")
    with Listener(("127.0.0.1", 0), secret=SECRET) as listener, relay(listener.address) as between:
        with program(FULL_CONNECTOR) as away:
            away.say(between.address[1])
            link = RunningLink(listener.accept(home, timeout=20))
            assert away.hear() == "full"
            between.reset()
            assert away.hear() == "resumed"
            link.link.stop("enough")
            assert (link.outcome(), away.hear()) == ("enough", "enough")
            link.end()


# ── the limits ──
@pytest.mark.parametrize("is_connecting", [True, False], ids=["connector", "listener"])
def test_link_dies_when_no_connection_comes_in_time(is_connecting: bool) -> None:
    spec = replace(LINK, heartbeat_s=0.05, silence_s=0.4)
    with resumable(spec, spec) as (home, away, between):
        between.refuses = True
        began = time.monotonic()
        between.reset()
        death = (away if is_connecting else home).death()
        assert death.kind == "closed" and "killed" in death.how and "no new connection within" in death.how
        assert time.monotonic() - began < 5
        for link in (home, away):
            link.death()


def test_both_sides_end_when_each_new_connection_is_reset() -> None:
    """Within its handshake. So no packet comes, and nothing waits longer than `silence_s`."""
    with resumable(LINK, LINK) as (home, away, between):
        between.resets_handshakes = True
        between.reset()
        for link in (home, away):
            death = link.death()
            assert death.kind == "closed" and "no new connection within" in death.how


def test_both_sides_end_when_connections_are_lost_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though packets come over each of them."""
    monkeypatch.setattr(resumption, "MAX_LOSSES", 10)
    monkeypatch.setattr(resumption, "LOSSES_S", 600.0)  # of a busy machine
    spec = replace(LINK, silence_s=5.0)
    with resumable(spec, spec) as (home, away, between):
        for number in range(10):
            eventually(lambda number=number: min(count_resumptions(home, away)) >= number, within=20)
            between.reset()
        deaths = [link.death() for link in (home, away)]
        assert [death.kind for death in deaths] == ["closed", "closed"]
        assert any("10 connections were lost within" in death.how for death in deaths)
        assert max(count_resumptions(home, away)) <= 9


def test_link_dies_when_another_process_comes_in_the_place_of_its_own() -> None:
    spec = replace(LINK, silence_s=10.0)
    with Listener(("127.0.0.1", 0), secret=SECRET) as listener:
        links: list[RunningLink] = []
        accepting = threading.Thread(target=lambda: links.append(RunningLink(listener.accept(spec, timeout=20))))
        accepting.start()
        with connect(listener.address, spec, secret=SECRET) as link:
            accepting.join()
            link._wire.close(is_aborted=True)
            with contextlib.suppress(TimeoutError), connect(listener.address, spec, secret=SECRET, timeout=0.5):
                raise AssertionError("no accept awaits it")
        assert REPLACED in links[0].death(5).how
        links[0].end()


def test_link_ends_when_it_reads_its_loss_after_another_process_has_come() -> None:
    """As on a busy machine: the link has not been scheduled since the reset."""
    resumer = ListenerResumer("link", lambda: None)
    resumer.replace()
    assert resumer.await_connection(0, lambda: 10.0, time.sleep) == REPLACED
    with pytest.raises(BridgeRefused, match=REPLACED):
        resumer.suspend()


def test_link_that_has_ended_takes_no_connection() -> None:
    resumer, wire = ListenerResumer("link", lambda: None), CutWire([])
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(resumer.await_connection, 7, lambda: 10.0, lambda _: time.sleep(0.05))
        suspension = resumer.suspend()
        resumer.replace()
        assert suspension.received == 7 and not resumer.resume(suspension, NewConnection(wire, 0))
        assert waiting.result() == REPLACED


def test_listener_has_the_connector_try_later_while_its_link_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "SUSPEND_S", 0.01)
    resumer = ListenerResumer("link", lambda: None)
    with pytest.raises(TimeoutError, match="did not drop its connection"):
        resumer.suspend()
    assert resumer.is_wanted


def test_another_process_cannot_go_on_with_a_link() -> None:
    """It has the secret, and does not know the name of the session."""
    with resumable(LINK, LINK) as (home, away, between), pytest.raises(BridgeRefused, match=ENDED):
        offer = ResumeOffer(bytes(32), 0)
        _dial(between.target, LINK, SECRET, None, offer, time.monotonic() + 10)
    assert home.link.stats().resumptions == away.link.stats().resumptions == 0


def test_loss_log_counts_losses_of_some_seconds_and_time_since_a_packet() -> None:
    log = LossLog(2.0)
    assert log.has_progressed(0)
    for number in range(MAX_LOSSES):
        assert not log.storm
        log.add(number * 0.1, nbytes=0, silent_for=0.5)
    assert log.storm and not log.has_progressed(0)
    assert log.deadline(has_ended=False) == 1.5
    log.add(2 * LOSSES_S, nbytes=1, silent_for=0.5)
    assert not log.storm
    assert log.deadline(has_ended=False) == 2 * LOSSES_S + 1.5
    assert log.deadline(has_ended=True) == 2 * LOSSES_S + ENDED_S


def test_listener_that_goes_on_with_another_link_refuses_an_ended_session() -> None:
    with resumable(LINK, LINK) as (home, away, between):
        between.refuses = True
        between.reset()
        home.link.stop("enough")
        assert home.outcome() == "enough"
        between.refuses = False
        death = away.death()
        assert death.kind == "closed" and "the link has ended here, or was of another process" in death.how


def test_link_accepts_another_one_while_it_runs() -> None:
    with Listener(("127.0.0.1", 0), secret=SECRET) as listener:
        links: list[RunningLink] = []
        for name in ("first", "second", "third"):
            with ThreadPoolExecutor() as threads:
                away = threads.submit(connect, listener.address, LinkSpec(name), secret=SECRET)
                eventually(away.running)  # the connection comes before it is awaited
                home = listener.accept(LinkSpec(name), timeout=20)
                links += [RunningLink(home), RunningLink(away.result())]
        assert all(link.is_running for link in links)
        for link in links:
            link.link.stop("enough")
        for link in links:
            assert link.outcome() == "enough"
            link.end()


# ── what is kept ──
def test_queue_has_no_room_while_too_much_is_not_acknowledged() -> None:
    queue, wire = PacketQueue(), CutWire([1 << 30])
    while queue.has_room:
        queue.put(packets.FRAME, payload=bytes(packets.MAX_PAYLOAD))
        queue.flush(wire)
    assert MAX_UNACKED_NBYTES <= queue.nbytes_sent < MAX_UNACKED_NBYTES + 2 * packets.MAX_PAYLOAD
    queue.acknowledge(queue.nbytes_sent)
    assert queue.has_room


def test_rewinding_before_an_acknowledgement_is_an_error() -> None:
    queue, wire = PacketQueue(), CutWire([1 << 20])
    queue.put(packets.FRAME, payload=b"frame")
    queue.flush(wire)
    queue.acknowledge(queue.nbytes_sent)
    with pytest.raises(ProtocolError, match="has received 0 bytes, and had acknowledged 21"):
        queue.rewind(0)


def test_acknowledgement_of_an_unsent_packet_is_an_error() -> None:
    for nbytes in (1, 12, 14, 1 << 40):
        queue, wire = PacketQueue(), CutWire([1 << 20])
        queue.put(packets.FRAME, payload=b"frame")
        queue.flush(wire)
        with pytest.raises(ProtocolError, match="acknowledged"):
            queue.acknowledge(nbytes)
