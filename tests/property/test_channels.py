"""Channels against lists: records of any size are sent, received, viewed, held; ends close, and others come."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock
from penstock import EndOfChannel, LongRecords, MemoryExhausted, WouldBlock
from penstock.channel import Channel
from penstock.lowlevel import BlockLease, ByteReceiver, ByteSender
from tests import tiers

CAPACITY = 4096
INLINE = 512
SPILL = 1 << 16
SIZES = st.one_of(
    st.integers(0, 70), st.integers(0, INLINE + 1), st.sampled_from([INLINE, INLINE + 1, 3000, 20_000, SPILL])
)
BOUNDED = {"capacity": CAPACITY, "long_records": LongRecords(inline_limit=INLINE, pool_nbytes=SPILL, max_records=16)}


class Reader:
    """A receiver, and what it must get of each sender, oldest first."""

    def __init__(self, receiver: ByteReceiver, lanes: int) -> None:
        self.receiver = receiver
        self.expected: list[list[bytes]] = [[] for _ in range(lanes)]
        self.held: list[tuple[BlockLease, bytes]] = []


class Channels(RuleBasedStateMachine):
    senders_count = 1
    receivers_count = 1

    def open(self) -> Channel:
        raise NotImplementedError

    @initialize(comes_first=st.booleans())
    def begin(self, comes_first: bool) -> None:
        self.channel = self.open()
        self.number = 0
        self.readers: dict[int, Reader] = {}
        self.absent: dict[int, list[list[bytes]]] = {  # expected, and not there yet: its records are kept
            index: [[] for _ in range(self.senders_count)] for index in range(self.receivers_count)
        }
        self.senders: dict[int, ByteSender] = {}
        if comes_first:
            self.come(0)
        for lane in range(self.senders_count):
            self.senders[lane] = self.channel.open_sender(lane)

    def come(self, index: int) -> None:
        if index in self.readers:
            return
        reader = Reader(self.channel.open_receiver(index), self.senders_count)
        if index in self.absent:
            reader.expected = self.absent.pop(index)
        self.readers[index] = reader

    def must_get(self) -> list[list[list[bytes]]]:
        return [reader.expected for reader in self.readers.values()] + list(self.absent.values())

    def was_sent(self, lane: int, record: bytes) -> None:
        for expected in self.must_get():
            expected[lane].append(record)

    @rule(lane=st.integers(0, 3), nbytes=SIZES, how=st.sampled_from(["bytes", "list", "reserve", "abort"]))
    def send(self, lane: int, nbytes: int, how: str) -> None:
        lane %= self.senders_count
        sender = self.senders[lane]
        self.number += 1
        record = self.number.to_bytes(4, "little") * (nbytes // 4) + bytes(nbytes % 4)
        try:
            if how == "bytes":
                sender.send_nowait(record)
            elif how == "list":
                sender.send_nowait([record[: nbytes // 3], memoryview(record)[nbytes // 3 :], b""])
            else:
                with sender.reserve(nbytes, timeout=0) as room:
                    memoryview(room)[:] = record
                    if how == "abort":
                        room.abort()
                        return
        except (WouldBlock, penstock.Timeout):
            on_their_way = any(any(expected) for expected in self.must_get())
            held = any(reader.held for reader in self.readers.values())
            assert on_their_way or held, "no room, and nothing is on its way"
            return
        except EndOfChannel:
            assert not self.readers
            assert not self.absent
            return
        except MemoryExhausted:
            assert nbytes > SPILL
            return
        assert self.must_get(), "sent to nobody"
        self.was_sent(lane, record)

    @rule(index=st.integers(0, 3), as_view=st.booleans())
    def receive(self, index: int, as_view: bool) -> None:
        reader = self.readers.get(index % self.receivers_count)
        if reader is None:
            return
        try:
            actual = reader.receiver.receive_view_nowait() if as_view else reader.receiver.receive_nowait()
        except WouldBlock:
            assert not any(reader.expected), "a record was lost"
            return
        record = reader.expected[reader.receiver.source].pop(0)
        if isinstance(actual, bytes):
            assert actual == record
        else:
            assert bytes(actual) == record
            reader.held.append((actual, record))

    @rule(data=st.data(), index=st.integers(0, 3))
    def let_go(self, data: st.DataObject, index: int) -> None:
        reader = self.readers.get(index % self.receivers_count)
        if reader is None or not reader.held:
            return
        lease, record = reader.held.pop(data.draw(st.integers(0, len(reader.held) - 1)))
        assert bytes(lease) == record
        lease.release()

    @precondition(lambda self: self.number > 3)
    @rule(index=st.integers(0, 3))
    def a_receiver_leaves(self, index: int) -> None:
        reader = self.readers.pop(index % self.receivers_count, None)
        if reader is None:
            return
        for lease, record in reader.held:
            assert bytes(lease) == record
            lease.release()
        reader.receiver.close()

    @rule(index=st.integers(0, 3))
    def a_receiver_comes(self, index: int) -> None:
        self.come(index % self.receivers_count)

    @invariant()
    def held_views_do_not_change(self) -> None:
        for reader in getattr(self, "readers", {}).values():
            for lease, record in reader.held[:1]:
                assert bytes(lease) == record

    def teardown(self) -> None:
        if not hasattr(self, "channel"):
            return
        for sender in self.senders.values():
            sender.close()
        for index in list(self.absent):
            self.come(index)
        for reader in self.readers.values():
            for record in reader.receiver:
                assert record == reader.expected[reader.receiver.source].pop(0)
            assert not any(reader.expected)
            for lease, record in reader.held:
                assert bytes(lease) == record
                lease.release()
            reader.receiver.close()
        snapshot = self.channel.snapshot()
        assert snapshot["pool"][0]["blocks"] == 0
        assert [receiver["nbytes_behind"] for receiver in snapshot["receivers"]] == [0] * self.receivers_count


class Ring(Channels):
    def open(self) -> Channel:
        return penstock.Ring(**BOUNDED)


class Broadcast(Channels):
    receivers_count = 3

    def open(self) -> Channel:
        return penstock.Broadcast(receivers=3, **BOUNDED)


class Inbox(Channels):
    senders_count = 3

    def open(self) -> Channel:
        return penstock.Inbox(senders=3, **BOUNDED)

    @rule(lane=st.integers(0, 2))
    def another_sender_follows(self, lane: int) -> None:
        self.senders.pop(lane).close()
        self.senders[lane] = self.channel.open_sender(lane)


def check(machine: Callable[[], RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=tiers.CHANNELS_EXAMPLES, stateful_step_count=50))


def test_a_ring_is_a_list() -> None:
    check(Ring)


def test_a_broadcast_is_a_list_for_each_receiver() -> None:
    check(Broadcast)


def test_an_inbox_is_a_list_for_each_sender() -> None:
    check(Inbox)
