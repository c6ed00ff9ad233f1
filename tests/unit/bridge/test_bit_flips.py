"""Bits that flip on the way between two nodes: a link ends, and nothing wrong is delivered."""

import contextlib
import random
import threading
from dataclasses import dataclass, replace

import pytest

from penstock import EndOfChannel, PenstockError, Ring, Store
from penstock.bridge import InboundChannel, LinkSpec, OutboundChannel, PullChannels, Puller, StoreValues
from penstock.bridge.wire import PlainWire
from tests.conftest import eventually
from tests.support.links import WITHIN, RunningLink, joined
from tests.tiers import BIT_FLIPS

LINK = LinkSpec("link", heartbeat_s=0.05, silence_s=1.0)
SIZES = (0, 1, 9, 300, 5_000, 20_000, 300_000)  # of frames: copied behind their head, sent beside it, and in pieces
VALUE_NBYTES = 600_000
KEY = bytes(32)


class FlippingWire(PlainWire):
    """Flips one bit of the byte at `flip_at`, of all that is read."""

    flip_at: int | None = None
    bit = 0
    nbytes = 0
    has_flipped = False

    def recv_into(self, room: memoryview) -> int | None:
        count = super().recv_into(room)
        if count:
            if self.flip_at is not None and 0 <= (index := self.flip_at - self.nbytes) < count:
                room[index] ^= 1 << self.bit
                self.has_flipped = True
            self.nbytes += count
        return count


@dataclass
class Outcome:
    wires: list[FlippingWire]
    links: list[RunningLink]
    sent: list[list[bytes]]  # by the side that sends
    received: list[list[bytes]]
    nbytes: list[int]  # that each side has read since the handshake
    values: list[bytes]


def drain(receiver: object, into: list[bytes]) -> None:
    with contextlib.suppress(EndOfChannel):
        while (record := receiver.try_receive()) is not None:  # type: ignore[attr-defined]
            into.append(bytes(record))


def pull(puller: Puller, values: list[bytes]) -> None:
    with contextlib.suppress(PenstockError):
        with puller.get(KEY, WITHIN) as lease:
            values.append(bytes(lease.value()))


def exchange(chance: random.Random, side: int = 0, offset: int | None = None) -> Outcome:
    """Sends frames both ways, and a value from home to the other node. `side` reads a flipped bit at `offset`."""
    rings = [Ring(capacity=1 << 20) for _ in range(4)]
    pulls = PullChannels.open(1)
    with Store(1 << 21) as home, Store(1 << 21) as away:
        value = chance.randbytes(VALUE_NBYTES)
        home.put(value, key=KEY).release()
        specs = [
            replace(LINK, name="home", values=StoreValues(home),
                    channels=[OutboundChannel("down", rings[0]), InboundChannel("up", rings[3])]),
            replace(LINK, name="away", values=StoreValues(away, pulls),
                    channels=[InboundChannel("down", rings[1]), OutboundChannel("up", rings[2])]),
        ]  # fmt: skip
        wires: list[FlippingWire] = []
        pair = joined(*specs, make_wire=lambda connection: wires.append(FlippingWire(connection)) or wires[-1])
        before = [wire.nbytes for wire in wires]
        if offset is not None:
            wires[side].flip_at, wires[side].bit = before[side] + offset, chance.randrange(8)
        outcome = Outcome(wires, [], [[], []], [[], []], [], [])
        puller = Puller(pulls, 0, away)
        with (
            rings[0].open_sender() as down,
            rings[2].open_sender() as up,
            rings[1].open_receiver() as from_home,
            rings[3].open_receiver() as from_away,
        ):
            outcome.links = [RunningLink(link) for link in pair]
            pulling = threading.Thread(target=pull, args=(puller, outcome.values))
            pulling.start()
            for sender, frames in zip((down, up), outcome.sent, strict=True):
                for nbytes in chance.sample(SIZES, len(SIZES)):
                    frames.append(chance.randbytes(nbytes))
                    sender.send(frames[-1], WITHIN)

            def is_over() -> bool:
                drain(from_home, outcome.received[0])
                drain(from_away, outcome.received[1])
                is_whole = outcome.received == outcome.sent and not pulling.is_alive()
                return is_whole or not any(link.is_running for link in outcome.links)

            eventually(is_over, WITHIN)
            if wires[side].has_flipped:
                eventually(lambda: not outcome.links[side].is_running, WITHIN)
            outcome.nbytes = [wire.nbytes - first for wire, first in zip(wires, before, strict=True)]
            for link in outcome.links:
                link.end()
            pulling.join(WITHIN)
            drain(from_home, outcome.received[0])
            drain(from_away, outcome.received[1])
        puller.close()
        assert outcome.values in ([], [value])
    pulls.close()
    return outcome


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("side", [0, 1], ids=["to home", "to the other node"])
def test_flipped_bits_end_a_link_and_deliver_nothing_wrong(side: int, seed: int) -> None:
    chance = random.Random(seed)
    whole = exchange(chance)
    assert whole.received == whole.sent and len(whole.values) == 1, "without a flip all arrives"
    flips = 0
    while flips < BIT_FLIPS:
        # Half of the flips fall among the first packets: else nearly all would fall into long payloads.
        offset = chance.randrange(whole.nbytes[side] if chance.random() < 0.5 else 2_000)
        outcome = exchange(chance, side, offset)
        for sent, received in zip(outcome.sent, outcome.received, strict=True):
            assert received == sent[: len(received)]
        if outcome.wires[side].has_flipped:
            flips += 1
            assert outcome.links[side].death().kind == "damaged"
