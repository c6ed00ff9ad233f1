"""A tap: it sees the records of a channel as they pass, whole or not at all, and leaves no trace."""

import itertools
import os
import random
import signal
import time
import zlib

import pytest

import penstock
from penstock import CorruptRecord, LayoutMismatch, LongRecords, _native, lowlevel
from penstock.channel import Channel
from tests.support.processes import program

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)

CAPACITY = 4096
Record = tuple[int, int, int, bytes | None]


def small(**options: object) -> penstock.Ring:
    return penstock.Ring(**{"capacity": CAPACITY, "long_records": SMALL_POOL, **options})


def tap_of(channel: Channel, from_start: bool = False) -> _native.Tap:
    return _native.Tap(channel._segment, from_start)


def frames(records: list[Record]) -> list[bytes | None]:
    return [frame for _, _, _, frame in records]


def all_of(tap: _native.Tap) -> list[Record]:
    return list(itertools.chain.from_iterable(iter(tap.read, [])))


def contents(channel: Channel) -> bytes:
    """Every byte of the segment."""
    fd = channel._segment.fd
    return os.pread(fd, os.fstat(fd).st_size, 0)


# ── what it sees ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_tap_sees_what_is_sent_with_its_number_and_when() -> None:
    channel = small()
    tap = tap_of(channel)
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        began = time.monotonic_ns()
        for number in range(3):
            sender.send(b"record %d" % number)
        ended = time.monotonic_ns()
        data = tap.read()
        assert [(lane, sequence, frame) for lane, sequence, _, frame in data] == [
            (0, number, b"record %d" % number) for number in range(3)
        ]
        times = [committed_ns for _, _, committed_ns, _ in data]
        assert times == sorted(times) and began <= times[0] and times[-1] <= ended
        assert [receiver.receive() for _ in range(3)] == frames(data)
        assert tap.read() == [] and tap.missed == 0


def test_a_tap_sees_every_lane_of_an_inbox_each_in_order() -> None:
    channel = penstock.Inbox(senders=5, capacity=CAPACITY)
    tap = tap_of(channel)
    senders = [channel.open_sender(index) for index in range(5)]
    with channel.open_receiver():
        for number in range(10):
            for sender in senders[number % 5 :]:
                sender.send(b"%d %d" % (sender.index, number))
    observed = all_of(tap)
    for index in range(5):
        expected = [b"%d %d" % (index, number) for number in range(10) if number % 5 <= index]
        assert [frame for lane, _, _, frame in observed if lane == index] == expected
        assert [sequence for lane, sequence, _, _ in observed if lane == index] == list(range(len(expected)))
    assert tap.missed == 0


def test_a_busy_lane_does_not_keep_another_from_being_seen() -> None:
    channel = penstock.Inbox(senders=2, capacity=CAPACITY)
    tap = tap_of(channel)
    with channel.open_sender(0) as busy, channel.open_sender(1) as rare:
        for _ in range(50):
            busy.send(b"busy")
        rare.send(b"rare")
    assert b"rare" in frames(tap.read(4))


def test_tap_reads_at_most_the_requested_number_of_records() -> None:
    channel = small()
    tap = tap_of(channel)
    with channel.open_sender() as sender:
        for number in range(10):
            sender.send(b"%d" % number)
        assert [frames(tap.read(most)) for most in (0, 1, 4, 100)] == [
            [],
            [b"0"],
            [b"1", b"2", b"3", b"4"],
            [b"5", b"6", b"7", b"8", b"9"],
        ]


def test_tap_begins_with_the_next_or_the_oldest_unread_record() -> None:
    channel = small()
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        for number in range(10):
            sender.send(b"%d" % number)
        for _ in range(4):
            receiver.receive()
        late, early = tap_of(channel), tap_of(channel, from_start=True)
        sender.send(b"10")
        assert frames(late.read()) == [b"10"]
        assert frames(early.read()) == [b"%d" % number for number in range(4, 11)]
        assert (late.missed, early.missed) == (0, 0)


# ── long records ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_tap_sees_a_long_record_that_is_still_unread() -> None:
    channel = small()
    tap = tap_of(channel)
    long = random.Random(1).randbytes(300_000)
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        sender.send(long)
        assert frames(tap.read()) == [long]
        assert receiver.receive() == long


def test_tap_returns_none_for_a_released_long_record() -> None:
    channel = small()
    tap = tap_of(channel)
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        for number in range(3):
            sender.send(bytes(5000))
            sender.send(b"short %d" % number)
            receiver.receive()
            receiver.receive()
        assert frames(tap.read()) == [None, b"short 0", None, b"short 1", None, b"short 2"]
        assert tap.missed == 0


# ── what it misses ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("seed_of_sizes", range(5))
def test_tap_counts_missed_records(seed_of_sizes: int) -> None:
    channel = small()
    tap = tap_of(channel)
    sizes = random.Random(seed_of_sizes)
    observed: list[Record] = []
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        for number in range(3000):
            sender.send(b"%d " % number + bytes(sizes.randrange(1000)))
            receiver.receive()
            if sizes.random() < 0.1:
                observed += tap.read()
    observed += all_of(tap)
    assert len(observed) + tap.missed == 3000
    assert observed and tap.missed
    assert [int((frame or b"").split()[0]) for _, _, _, frame in observed] == [
        sequence for _, sequence, _, _ in observed
    ]


def test_lapped_tap_begins_again_at_the_slowest_receiver() -> None:
    channel = penstock.Broadcast(receivers=2, capacity=CAPACITY)
    tap = tap_of(channel)
    with channel.open_sender() as sender, channel.open_receiver() as fast, channel.open_receiver() as slow:
        for _ in range(200):
            sender.send(bytes(100))
            fast.receive()
            slow.receive()
        for number in range(10):
            sender.send(b"%d" % number)
            fast.receive()
        assert frames(tap.read()) == [b"%d" % number for number in range(10)]
        assert tap.missed == 200


def test_under_full_load_a_tap_never_returns_a_torn_record(seed: int) -> None:
    channel = small(capacity=16384)
    tap = tap_of(channel)
    sent = """
        import random, zlib
        channel = penstock.attach(sys.argv[1])
        sizes = random.Random(int(sys.argv[2]))
        bodies = [sizes.randbytes(sizes.choice((3, 90, 700, 2000, 9000))) for _ in range(64)]
        sums = [zlib.crc32(body).to_bytes(4, "little") for body in bodies]
        count, behind = 0, 0
        with channel.open_sender() as sender, channel.open_receiver() as receiver:
            ends = time.monotonic() + 2.0
            while time.monotonic() < ends:
                for number in sizes.choices(range(64), k=100):
                    while not sender.try_send([sums[number], count.to_bytes(8, "little"), bodies[number]]):
                        receiver.receive()
                        behind -= 1
                    count, behind = count + 1, behind + 1
                    if sizes.random() < 0.9:  # now close behind, now with all the ring between
                        receiver.receive()
                        behind -= 1
            while behind:
                receiver.receive()
                behind -= 1
        say(count)
    """
    whole = gone = 0
    with program(sent, channel.ticket, seed) as running:
        while True:
            records = tap.read(random.choice((1, 10, 1000)))
            for _, sequence, _, frame in records:
                if frame is None:
                    gone += 1
                    continue
                assert int.from_bytes(frame[4:12], "little") == sequence, f"seed {seed}"
                assert zlib.crc32(frame[12:]).to_bytes(4, "little") == frame[:4], f"seed {seed}: record {sequence}"
                whole += 1
            if not records and running.process.poll() is not None:
                break
        count = int(running.hear())
    assert whole + gone + tap.missed == count
    assert whole > 100


# ── a tap leaves no trace ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_tap_changes_no_byte_of_the_segment_and_joins_nothing() -> None:
    channel = penstock.Inbox(senders=2, capacity=CAPACITY, long_records=SMALL_POOL)
    with channel.open_sender(0) as sender, channel.open_receiver() as receiver:
        sender.send(b"first")
        receiver.receive()
        sender.send(b"second")
        sender.send(bytes(100_000))
        before, peers = contents(channel), channel.peers()
        pages = os.fstat(channel._segment.fd).st_blocks
        for from_start in (False, True):
            tap = tap_of(channel, from_start)
            assert len(tap.read()) == 2 * from_start
            del tap
        assert contents(channel) == before
        assert channel.peers() == peers
        assert os.fstat(channel._segment.fd).st_blocks == pages


def test_tap_does_not_claim_pages_of_a_released_record() -> None:
    channel = penstock.Ring()
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        tap = tap_of(channel)
        sender.send(bytes(8 << 20))
        receiver.receive()
        assert channel.trim() > 0
        pages = os.fstat(channel._segment.fd).st_blocks
        assert frames(tap.read()) == [None]
        assert os.fstat(channel._segment.fd).st_blocks == pages


def test_observed_segment_cannot_be_joined_or_written() -> None:
    channel = small()
    segment = _native.Segment.adopt(os.dup(channel._segment.fd), is_observer=True)
    with channel.open_sender() as sender:
        tap = _native.Tap(segment)
        sender.send(b"seen")
        assert frames(tap.read()) == [b"seen"]
    with pytest.raises(ValueError, match="looked at only"):
        _native.Attachment(segment)
    with pytest.raises(ValueError, match="looked at only"):
        segment.bytes(is_writable=True)


def test_tap_of_a_pool_is_refused() -> None:
    pool = lowlevel.Pool.create(1 << 16)
    with pytest.raises(LayoutMismatch, match="expected a channel"):
        _native.Tap(pool._segment)


# ── ends that come and go, and memory that lies ──────────────────────────────────────────────────────────────────────
def test_tap_sees_all_records_of_a_killed_sender_and_its_successor() -> None:
    channel = small()
    tap = tap_of(channel)
    first = """
        channel = penstock.attach(sys.argv[1])
        sender = channel.open_sender(name="first")
        for number in range(5):
            sender.send(b"first %d" % number)
        reserved = sender.reserve(500)
        memoryview(reserved)[:] = b"x" * 500
        say("ready")
        hear()
    """
    with program(first, channel.ticket) as running:
        assert running.hear() == "ready"
        assert len(tap.read(2)) == 2
        running.kill(signal.SIGKILL)
        running.process.wait()
    assert frames(tap.read()) == [b"first %d" % number for number in (2, 3, 4)]
    with channel.open_sender(name="next") as sender:
        for number in range(5):
            sender.send(b"next %d" % number)
    data = tap.read()
    assert frames(data) == [b"next %d" % number for number in range(5)]
    assert [sequence for _, sequence, _, _ in data] == list(range(5, 10))
    assert tap.read() == [] and tap.missed == 0


def test_a_tap_outlives_both_ends_and_the_channel() -> None:
    channel = small()
    tap = tap_of(channel)
    with channel.open_sender() as sender, channel.open_receiver():
        sender.send(b"last words")
    channel.close()
    del channel, sender
    assert frames(tap.read()) == [b"last words"]


def test_corrupt_record_is_an_error_after_the_records_before_it() -> None:
    channel = small()
    tap = tap_of(channel)
    with channel.open_sender() as sender:
        for word in (b"before", b"victim", b"after"):
            sender.send(word)
        at = contents(channel).index(b"victim")
        os.pwrite(channel._segment.fd, bytes(32), at - 32)  # where its header is
        assert frames(tap.read()) == [b"before"]
        with pytest.raises(CorruptRecord, match="not a record"):
            tap.read()
        assert tap.read() == [] and tap.missed == 2
        sender.send(b"later")
        assert frames(tap.read()) == [b"later"]
        assert tap.missed == 2
