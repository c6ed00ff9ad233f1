"""The handshake as a protocol: which sides fit, what each refusal says, and what a stranger can do."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from penstock import Broadcast, Inbox, Ring, Store
from penstock.bridge import (
    BridgeRefused,
    InboundChannel,
    InboundWords,
    LinkSpec,
    OutboundChannel,
    OutboundWords,
    StoreValues,
    link_offer,
)
from penstock.bridge.handshake import (
    MAGIC,
    MAX_KNOCKS,
    STRANGER_NBYTES,
    WRONG_SECRET,
    ConnectorHandshake,
    Handshake,
    Hello,
    KnockLog,
    ListenerHandshake,
    make_knock,
)
from tests.support.links import SECRET


class Step(msgspec.Struct, array_like=True):
    number: int


def renamed_step() -> type[msgspec.Struct]:
    class Step(msgspec.Struct, array_like=True):
        count: int

    return Step


def specs() -> tuple[LinkSpec, LinkSpec]:
    """Two sides that fit."""
    words = memoryview(bytearray(64)).cast("Q")
    home = LinkSpec(
        "group 2",
        3,
        "node 0",
        channels=[OutboundChannel("steps", Broadcast(Step, receivers=2)), InboundChannel("replies", Ring())],
        words=[InboundWords("row", words)],
        same={"model": "shapes", "block_size": "16"},
        info=b"from home",
    )
    away = replace(
        home,
        name="node 1",
        channels=[InboundChannel("steps", Ring(Step)), OutboundChannel("replies", Inbox(senders=2))],
        words=[OutboundWords("row", words)],
        info=b"from away",
    )
    return home, away


def shake(listener: Handshake, connector: Handshake) -> dict[str, str]:
    """Passes messages until none is left. Returns the refusals of the sides that have raised one."""
    refused: dict[str, str] = {}
    sides = {"listener": listener, "connector": connector}
    while listener.outbox or connector.outbox:
        for name, other in (("connector", "listener"), ("listener", "connector")):
            messages = list(sides[name].outbox)
            sides[name].outbox.clear()
            for message in messages:
                if other in refused:
                    continue
                try:
                    sides[other].receive(message)
                except BridgeRefused as refusal:
                    refused[other] = str(refusal)
    return refused


def both(home: LinkSpec, away: LinkSpec, secret: bytes = SECRET) -> dict[str, str]:
    return shake(ListenerHandshake([home], SECRET), ConnectorHandshake(away, secret))


def test_handshake_succeeds_between_sides_that_fit() -> None:
    home, away = specs()
    times = itertools.count(1_000, 10)
    listener = ListenerHandshake([home], SECRET, clock=lambda: next(times) + 5_000)
    connector = ConnectorHandshake(away, SECRET, clock=lambda: next(times))
    assert shake(listener, connector) == {}
    assert listener.spec is home
    assert listener.remote is not None and connector.remote is not None
    assert (listener.remote.name, listener.remote.info) == ("node 1", b"from away")
    assert (connector.remote.name, connector.remote.info) == ("node 0", b"from home")
    assert connector.remote.clock_offset_ns == pytest.approx(5_000, abs=30)
    assert listener.remote.clock_offset_ns == pytest.approx(-5_000, abs=30)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda away: replace(away, epoch=4), "the epoch is 3 here, 4 there"),
        (lambda away: replace(away, same={"model": "other", "block_size": "16"}), "model is shapes here, other there"),
        (lambda away: replace(away, same={"model": "shapes"}), "block_size is 16 here, not given there"),
        (lambda away: replace(away, channels=away.channels[:1]), "channel 'replies' is only here"),
        (
            lambda away: replace(away, channels=[*away.channels, OutboundChannel("more", Ring())]),
            "channel 'more' is only there",
        ),
        (
            lambda away: replace(away, channels=[OutboundChannel("steps", Ring(Step)), away.channels[1]]),
            "channel 'steps' is outbound at both sides",
        ),
        (
            lambda away: replace(away, channels=[InboundChannel("steps", Ring(renamed_step())), away.channels[1]]),
            "channel 'steps': Step has 'count: int' there, 'number: int' here",
        ),
        (
            lambda away: replace(away, channels=[InboundChannel("steps", Ring()), away.channels[1]]),
            "channel 'steps': it carries messages here, bytes there",
        ),
        (lambda away: replace(away, words=[]), "words 'row' are only here"),
        (
            lambda away: replace(away, words=[InboundWords("row", away.words[0].words)]),
            "words 'row' go the same way at both sides",
        ),
        (
            lambda away: replace(away, words=[OutboundWords("row", away.words[0].words[:3])]),
            "words 'row' are 8 here, 3 there",
        ),
        (lambda away: replace(away, heartbeat_s=1.5), "a silence of 2 s here is less than two heartbeats"),
        (lambda away: replace(away, silence_s=0.8), "a silence of 0.8 s there is less than two heartbeats"),
    ],
)
def test_mismatched_sides_refuse_each_other_with_the_differences(
    change: Callable[[LinkSpec], LinkSpec], reason: str
) -> None:
    home, away = specs()
    refused = both(home, change(away))
    assert reason in refused["listener"] and "link 'group 2' with 'node 1'" in refused["listener"]
    assert "the listener refuses: " in refused["connector"] and reason in refused["connector"]


def test_handshake_refuses_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = specs()
    listener = ListenerHandshake([home], SECRET)
    connector = ConnectorHandshake(away, SECRET)

    class Package:
        @property
        def __version__(self) -> str:
            return "9.9" if connector.outbox else "9.8"

    monkeypatch.setattr(link_offer, "penstock", Package())
    connector.outbox, hello = [*connector.outbox], connector.outbox[0]
    listener.receive(hello)
    connector.receive(listener.outbox.pop())  # its offer is made while its outbox is not empty
    connector.outbox.pop(0)
    listener.receive(connector.outbox.pop(0))
    with pytest.raises(BridgeRefused, match=r"penstock's version is '9.8' here, '9.9' there"):
        listener.receive(connector.outbox.pop(0))


def test_handshake_refuses_sides_that_disagree_on_values() -> None:
    home, away = specs()
    with Store(1 << 20) as store:
        refused = both(replace(home, values=StoreValues(store)), away)
    assert "whether values of a store cross is True here, False there" in refused["listener"]


def test_many_differences_are_cut_short() -> None:
    home, away = specs()
    refused = both(replace(home, same={f"fact {number}": "yes" for number in range(40)}), replace(away, same={}))
    assert "and 28 more" in refused["listener"] and len(refused["listener"]) < 1000


def test_unexpected_link_is_refused_with_the_expected_links() -> None:
    home, away = specs()
    refused = both(home, replace(away, link="group 7"))
    assert "link 'group 7' of 'node 1' is not awaited here, but 'group 2'" in refused["listener"]
    assert refused["listener"] in refused["connector"]


def test_listener_of_several_links_accepts_by_name() -> None:
    home, away = specs()
    listener = ListenerHandshake([replace(home, link="group 1"), home], SECRET)
    assert shake(listener, ConnectorHandshake(away, SECRET)) == {}
    assert listener.spec is home


# ── strangers ──
def test_wrong_secret_is_refused_before_the_listener_identifies_itself() -> None:
    home, away = specs()
    listener = ListenerHandshake([home], SECRET)
    connector = ConnectorHandshake(away, bytes(32))
    listener.receive(connector.outbox.pop())
    challenge = listener.outbox[0]
    assert b"node 0" not in challenge and b"group 2" not in challenge
    with pytest.raises(BridgeRefused, match=WRONG_SECRET):
        connector.receive(challenge)


def test_a_connector_that_repeats_the_listeners_own_proof_is_refused() -> None:
    home, _ = specs()
    listener = ListenerHandshake([home], SECRET)
    nonce = bytes(32)
    listener.receive(msgspec.msgpack.encode(Hello(MAGIC, nonce)))
    proof = msgspec.msgpack.decode(listener.outbox.pop(), type=Hello)
    with pytest.raises(BridgeRefused, match=WRONG_SECRET):
        listener.receive(msgspec.msgpack.encode(msgspec.structs.replace(proof, nonce=nonce)))
    refusal = msgspec.msgpack.decode(listener.outbox.pop(), type=Hello)
    assert refusal.refusal == WRONG_SECRET and not refusal.proof


def test_messages_of_another_handshake_are_refused() -> None:
    home, away = specs()
    listener, connector = ListenerHandshake([home], SECRET), ConnectorHandshake(away, SECRET)
    recorded = [*connector.outbox]
    listener.receive(connector.outbox.pop())
    connector.receive(listener.outbox.pop())
    recorded += connector.outbox
    again = ListenerHandshake([home], SECRET)
    again.receive(recorded[0])
    with pytest.raises(BridgeRefused, match=WRONG_SECRET):
        again.receive(recorded[1])


def test_a_changed_byte_of_any_message_is_refused() -> None:
    """A side that is done has read what the other one has sent: no bit of it can be another one."""
    home, away = (replace(spec, channels=(), words=()) for spec in specs())
    whole = [len(message) for message in _transcript(home, away, None)]
    assert len(whole) == 6
    for number, nbytes in enumerate(whole):
        for place in range(nbytes):
            listener, connector = _with_flipped_byte(home, away, number, place)
            assert listener.remote is None, f"byte {place} of message {number}"
            assert connector.remote is None or number == 5


def _with_flipped_byte(home: LinkSpec, away: LinkSpec, number: int, place: int) -> tuple[Handshake, Handshake]:
    sides = ListenerHandshake([home], SECRET), ConnectorHandshake(away, SECRET)
    _transcript(home, away, (number, place), sides)
    return sides


def _transcript(
    home: LinkSpec, away: LinkSpec, flip: tuple[int, int] | None, sides: tuple[Handshake, Handshake] | None = None
) -> list[bytes]:
    """The messages in their order; one of them with a changed byte."""
    listener, connector = sides or (ListenerHandshake([home], SECRET), ConnectorHandshake(away, SECRET))
    passed: list[bytes] = []
    while listener.outbox or connector.outbox:
        for source, target in ((connector, listener), (listener, connector)):
            while source.outbox:
                message = bytearray(source.outbox.pop(0))
                if flip is not None and flip[0] == len(passed):
                    message[min(flip[1], len(message) - 1)] ^= 0x11
                passed.append(bytes(message))
                try:
                    target.receive(bytes(message))
                except BridgeRefused:
                    return passed
    return passed


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1", b"\x93\x01\x02\x03", b"\xc1" * 40, b"\x91" * 2000])
def test_garbage_is_refused_in_words(garbage: bytes) -> None:
    home, _ = specs()
    listener = ListenerHandshake([home], SECRET)
    with pytest.raises(BridgeRefused, match="does not speak the protocol of a bridge"):
        listener.receive(garbage)
    assert listener.outbox


def test_a_side_that_has_proved_nothing_may_send_little() -> None:
    home, away = specs()
    listener, connector = ListenerHandshake([home], SECRET), ConnectorHandshake(away, SECRET)
    assert listener.max_nbytes == connector.max_nbytes == STRANGER_NBYTES
    listener.receive(connector.outbox.pop())
    assert listener.max_nbytes == STRANGER_NBYTES
    connector.receive(listener.outbox.pop())
    listener.receive(connector.outbox.pop(0))
    assert listener.max_nbytes > STRANGER_NBYTES


def test_a_secret_has_32_bytes() -> None:
    home, _ = specs()
    for secret in (b"", b"short", bytes(33)):
        with pytest.raises(ValueError, match="32 bytes"):
            ListenerHandshake([home], secret)


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    ring = Ring()
    with pytest.raises(ValueError, match="same name"):
        LinkSpec("x", channels=[OutboundChannel("a", ring), InboundChannel("a", ring)])
    with pytest.raises(ValueError, match="heartbeat"):
        LinkSpec("x", heartbeat_s=2.0)
    with pytest.raises(ValueError, match="up to 200 channels"):
        LinkSpec("x", channels=[OutboundChannel(str(number), ring) for number in range(201)])


# ── knocks ──
def test_a_knock_counts_once_and_only_with_the_secret() -> None:
    knocks, knock = KnockLog(SECRET), make_knock(SECRET)
    assert knocks.is_new(knock) and not knocks.is_new(knock)
    for forged in (b"", bytes(32), knock[:-1], make_knock(bytes(32)), knock[1:] + knock[:1]):
        assert not knocks.is_new(forged)


def test_a_knock_log_remembers_a_fixed_number_of_knocks() -> None:
    knocks, first = KnockLog(SECRET), make_knock(SECRET)
    assert knocks.is_new(first)
    for _ in range(MAX_KNOCKS - 1):
        assert knocks.is_new(make_knock(SECRET))
    assert not knocks.is_new(first)
    assert knocks.is_new(make_knock(SECRET)) and len(knocks._used) == MAX_KNOCKS
