"""Packets as bytes: whatever the cuts, what was put is what is handled; what is no packet is an error."""

import random

import pytest

from penstock.bridge import packets
from penstock.bridge.link_errors import ProtocolError
from penstock.bridge.packets import HEAD, MAX_PAYLOAD, SIZES, PacketQueue, PacketReader, packet_head


class CutWire:
    """A connection to itself, which takes and gives as many bytes at a time as the test says."""

    def __init__(self, sizes: list[int]) -> None:
        self.bytes = bytearray()
        self.is_closed = False
        self._sizes = sizes
        self._calls = 0

    def _size(self) -> int:
        self._calls += 1
        return self._sizes[self._calls % len(self._sizes)]

    def send(self, buffers: list[memoryview]) -> int:
        taken = b"".join(buffers)[: self._size()]
        self.bytes += taken
        return len(taken)

    def recv_into(self, room: memoryview) -> int | None:
        count = min(self._size(), len(room), len(self.bytes))
        if not count:
            return 0 if self.is_closed and not self.bytes else None
        room[:count] = self.bytes[:count]
        del self.bytes[:count]
        return count


class Recorder:
    """Handles packets by writing them down. Pieces go into a place, as those of a long frame do."""

    def __init__(self) -> None:
        self.packets: list[tuple[int, int, int, bytes]] = []
        self.placed_nbytes = 0
        self._place = bytearray()

    def handle(self, kind: int, lane: int, source: int, payload: memoryview) -> None:
        self.packets.append((kind, lane, source, bytes(payload)))

    def place(self, kind: int, lane: int, source: int, nbytes: int) -> memoryview | None:
        self._place = bytearray(nbytes)
        return memoryview(self._place)

    def placed(self, kind: int, lane: int, source: int, nbytes: int) -> None:
        assert len(self._place) == nbytes
        self.placed_nbytes += nbytes
        self.packets.append((kind, lane, source, bytes(self._place)))
        self._place.clear()  # fails while a view of it lives


def some_packets(chance: random.Random) -> list[tuple[int, int, int, bytes]]:
    random_packets = []
    for _ in range(40):
        kind = chance.choice([packets.FRAME, packets.FRAME_PART, packets.VALUE_PART, packets.HEARTBEAT, packets.END])
        least, most = SIZES[kind]
        nbytes = chance.choice([least, most, min(most, least + chance.randrange(300))])
        random_packets.append((kind, chance.randrange(256), chance.randrange(1 << 16), chance.randbytes(nbytes)))
    return random_packets


@pytest.mark.parametrize("sizes", [[1 << 20], [7, 300_000], [1, 8, 9, 100_000, 1 << 20], [MAX_PAYLOAD + HEAD.size]])
def test_packets_arrive_as_they_were_put_however_the_bytes_are_cut(sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    sent = some_packets(chance)
    queue, wire, recorder = PacketQueue(), CutWire(sizes), Recorder()
    reader = PacketReader(recorder)
    total = sum(HEAD.size + len(payload) for *_, payload in sent)
    for kind, lane, source, payload in sent:
        queue.put(kind, lane, source, payload)
    assert queue.nbytes == total
    while queue.nbytes or wire.bytes or reader.is_within_packet:
        queue.flush(wire)
        reader.read(wire)
    assert recorder.packets == sent
    assert (queue.nbytes_sent, reader.nbytes) == (total, total)


def test_parts_are_read_into_their_buffers() -> None:
    queue, wire, recorder = PacketQueue(), CutWire([100_000]), Recorder()
    reader = PacketReader(recorder)
    pieces = [bytes([number]) * MAX_PAYLOAD for number in range(3)]
    for piece in pieces:
        queue.put(packets.FRAME_PART, payload=piece)
    queue.put(packets.FRAME_PART, payload=b"short")
    while queue.nbytes or wire.bytes:
        queue.flush(wire)
        reader.read(wire)
    assert [payload for *_, payload in recorder.packets] == [*pieces, b"short"]
    assert recorder.placed_nbytes == 3 * MAX_PAYLOAD + len(b"short")


def test_end_of_the_connection_is_reported_after_the_last_packet() -> None:
    queue, wire, recorder = PacketQueue(), CutWire([1 << 20]), Recorder()
    reader = PacketReader(recorder)
    assert reader.read(wire) is False
    queue.put(packets.FRAME, payload=b"last")
    queue.flush(wire)
    wire.is_closed = True
    assert reader.read(wire) is True
    assert reader.read(wire) is None
    assert recorder.packets == [(packets.FRAME, 0, 0, b"last")]


def test_a_packet_that_is_cut_off_is_not_handled() -> None:
    for cut in range(1, HEAD.size + 4):
        queue, wire, recorder = PacketQueue(), CutWire([1 << 20]), Recorder()
        reader = PacketReader(recorder)
        queue.put(packets.FRAME, payload=b"frame")
        queue.flush(wire)
        del wire.bytes[cut:]
        wire.is_closed = True
        assert reader.read(wire) is True and reader.is_within_packet
        assert reader.read(wire) is None
        assert not recorder.packets


@pytest.mark.parametrize("kind", [0, *SIZES, 15, 127, 255])
def test_a_head_that_no_packet_has_is_an_error(kind: int) -> None:
    least, most = SIZES.get(kind, (1, 0))
    for nbytes in {least - 1, most + 1, 1 << 31} - set(range(least, most + 1)) - {-1}:
        wire = CutWire([1 << 20])
        wire.bytes += packet_head(kind, 0, 0, b"", nbytes)
        with pytest.raises(ProtocolError, match="no packet begins with"):
            PacketReader(Recorder()).read(wire)
