"""A ring: one sender, one receiver, every record exactly once and in order, whatever its size and form."""

import ctypes
import os
import random
import re
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import ClosedError, EndOfChannel, LongRecords, Timeout, WouldBlock
from tests.support.channels import CAPACITY, SMALL_POOL, ring

RECORD = 32  # bytes of a record's header, and what its place in the ring is a multiple of
INLINE = 1024


def pattern(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


@pytest.mark.parametrize("nbytes", sorted({n + d for n in (0, 32, 64, 992, 1024) for d in (-1, 0, 1) if n + d >= 0}))
def test_sizes_around_alignment_and_the_inline_limit_arrive_whole(nbytes: int) -> None:
    with ring() as (_, sender, receiver):
        for number in range(12):  # a dozen, so that some lie across the end of the ring
            sender.send(pattern(number, nbytes), timeout=1)
            assert receiver.receive(timeout=1) == pattern(number, nbytes)


@pytest.mark.parametrize(
    "record",
    [
        b"abcdef",
        bytearray(b"abcdef"),
        memoryview(b"xabcdefx")[1:-1],
        np.frombuffer(b"abcdef", np.uint8),
        np.frombuffer(b"abcdef", np.uint16),
        np.frombuffer(b"abcdef", np.uint8).reshape(2, 3),
        [b"abcdef"],
        [b"abc", b"def"],
        (b"ab", bytearray(b"cd"), memoryview(b"ef")),
        [b"", b"abc", b"", np.frombuffer(b"def", np.uint8), b""],
        [bytes([letter]) for letter in b"abcdef"],
    ],
    ids=repr,
)
def test_buffers_and_lists_of_buffers_are_sent_as_one_record(record: object) -> None:
    with ring() as (_, sender, receiver):
        sender.send(record)
        assert receiver.receive(timeout=1) == b"abcdef"
        assert receiver.try_receive() is None


def test_many_parts_are_gathered_into_one_record_inline_and_spilled() -> None:
    with ring() as (_, sender, receiver):
        for count in (1, 10, 1000, 3000):
            parts = [b"%04d" % number for number in range(count)]
            sender.send(parts)
            assert receiver.receive(timeout=1) == b"".join(parts)


def pointers() -> list[Any]:
    """Returns buffers with addresses of this process."""

    class Pair(ctypes.Structure):
        _fields_ = (("O", ctypes.c_int), ("at", ctypes.POINTER(ctypes.c_int)))

    objects = np.array([object(), None], dtype=object)
    fields = np.zeros(2, [("O", "i4"), ("b", "O", (2,))])
    foreign = [(ctypes.c_char_p * 2)(b"a"), (ctypes.c_wchar_p * 1)("a"), (ctypes.c_void_p * 1)(), Pair()]
    return [objects, memoryview(objects), fields, fields[:0], *foreign]


WITH_GAPS = [memoryview(b"abcdef")[::2], np.arange(10)[::2], np.arange(6).reshape(2, 3).T]
WITHOUT_BUFFER = ["text", None, 5, {"a": 1}, iter([b"x"]), ["text"], [b"x", None], [[b"x"]]]


@pytest.mark.parametrize(
    ("records", "error", "text"),
    [
        (WITH_GAPS, (BufferError, ValueError), "contiguous"),
        (WITHOUT_BUFFER, TypeError, "bytes-like object|incompatible function arguments"),
        (pointers(), TypeError, "addresses of this process"),
    ],
    ids=["with gaps", "without a buffer", "of objects and pointers"],
)
def test_record_that_cannot_be_sent_is_refused(records: list[Any], error: Any, text: str) -> None:
    with ring() as (_, sender, receiver):
        for record in records:
            for wrapped in (record, [b"head", record]):
                with pytest.raises(error, match=text):
                    sender.send(wrapped)
        assert receiver.try_receive() is None
        sender.send(b"last")
        assert receiver.receive(timeout=1) == b"last"


@pytest.mark.parametrize("buffer", pointers(), ids=lambda buffer: memoryview(buffer).format)
def test_buffer_of_objects_or_pointers_is_refused(buffer: Any) -> None:
    with pytest.raises(TypeError, match="addresses of this process"):
        penstock.Buffer(buffer)


def test_buffers_of_numbers_are_sent_in_any_format() -> None:
    fields = np.zeros(2, [("O", "i4"), ("z", "f8", (2,))])
    arrays = [np.ones(2, dtype) for dtype in ("c8", "c16", "f2", ">i4", "M8[s]", "S3", "U2", "V5", "?")]
    foreign: list[Any] = [(ctypes.c_int * 2)(1, 2), memoryview(bytes(6)).cast("B", (2, 3))]
    with ring() as (_, sender, receiver):
        for buffer in (fields, *arrays, np.array(5), np.zeros((0, 3)), *foreign):
            sender.send(buffer)
            assert receiver.receive(timeout=1) == np.asarray(buffer).tobytes()


def test_refused_send_releases_its_buffers() -> None:
    with ring() as (_, sender, _):
        part = bytearray(b"part")
        with pytest.raises(TypeError):
            sender.send([part, None])
        part.extend(b"s")  # BufferError while anybody holds its buffer
        with pytest.raises(ValueError, match="C-contiguous"):
            sender.send([part, np.arange(10)[::2]])
        part.extend(b"!")
        assert part == b"parts!"


def test_send_releases_its_buffers() -> None:
    with ring() as (_, sender, receiver):
        part = bytearray(b"part")
        sender.send(part)
        sender.send([part, part])
        part.extend(b"s")
        assert [receiver.receive(timeout=1) for _ in range(2)] == [b"part", b"partpart"]


def test_receiver_reads_records_and_then_the_end_of_a_closed_sender() -> None:
    with ring() as (_, sender, receiver):
        sender.send(b"inline")
        sender.send(b"s" * 5000)
        sender.close()
        assert receiver.receive(timeout=1) == b"inline"
        assert receiver.receive_nowait() == b"s" * 5000
        for receive in (receiver.receive, receiver.receive_nowait, receiver.receive_view, receiver.receive_view_nowait):
            with pytest.raises(EndOfChannel, match="the sender of 'ring' has closed"):
                receive()


def test_send_raises_end_of_channel_after_the_receiver_closed() -> None:
    with ring() as (_, sender, receiver):
        sender.send(b"x")
        receiver.close()
        for send in (sender.send, sender.send_nowait):
            with pytest.raises(EndOfChannel, match="'ring' has no receiver left: all have closed"):
                send(b"y")
        with pytest.raises(EndOfChannel):
            sender.reserve(5)


def test_closed_end_raises_closed_error() -> None:
    with ring() as (_, sender, receiver):
        sender.close()
        receiver.close()
        sender.close()  # again: nothing happens
        receiver.close()
        assert sender.is_closed
        assert receiver.is_closed
        for call in (lambda: sender.send(b""), lambda: sender.send_nowait(b""), lambda: sender.reserve(1)):
            with pytest.raises(ClosedError, match="sender 0 of 'ring' is closed"):
                call()
        for call in (receiver.receive, receiver.receive_nowait, receiver.receive_view, receiver.receive_view_nowait):
            with pytest.raises(ClosedError, match="receiver 0 of 'ring' is closed"):
                call()
        with pytest.raises(ClosedError):
            next(receiver)


def test_with_block_closes_channel_and_ends() -> None:
    channel = penstock.Ring()
    with channel:
        with channel.open_sender() as sender:
            assert not sender.is_closed
        with channel.open_receiver() as receiver:
            assert not receiver.is_closed
        assert sender.is_closed
        assert receiver.is_closed
    with pytest.raises(ClosedError, match="channel 'ring' is closed"):
        channel.open_sender()


def test_opening_a_taken_end_is_refused_with_its_owner() -> None:
    channel = penstock.Ring(name="numbers")
    with channel.open_sender(name="first"), channel.open_receiver(name="second"):
        with pytest.raises(ValueError, match="sender 0 of 'numbers' is taken: 'first'"):
            channel.open_sender()
        with pytest.raises(ValueError, match="receiver 0 of 'numbers' is taken: 'second'"):
            channel.open_receiver(0)
        with pytest.raises(ValueError, match="expected a sender of 'numbers' from 0 to 0, got 1"):
            channel.open_sender(1)
        with pytest.raises(ValueError, match="expected a receiver of 'numbers' from 0 to 0, got 7"):
            channel.open_receiver(7)


def test_ring_has_no_second_sender_after_a_clean_close() -> None:
    channel = penstock.Ring()
    channel.open_sender().close()
    with pytest.raises(ValueError, match=r"was closed by .* and cannot be opened again"):
        channel.open_sender()


@pytest.mark.parametrize("index", [-1, -5, 2**31, 2**40])
def test_an_impossible_index_is_refused(index: int) -> None:
    channel = penstock.Ring()
    for end in (channel.open_sender, channel.open_receiver, channel.open_async_sender, channel.open_async_receiver):
        with pytest.raises(ValueError, match=str(index)):
            end(index)


def test_nowait_raises_when_no_record_or_no_room() -> None:
    with ring() as (_, sender, receiver):
        with pytest.raises(WouldBlock, match="no record now in 'ring'"):
            receiver.receive_nowait()
        with pytest.raises(WouldBlock, match="no record now in 'ring'"):
            receiver.receive_view_nowait()
        count = 0
        with pytest.raises(WouldBlock, match="no room now in 'ring'"):
            while True:
                sender.send_nowait(b"x" * 96)
                count += 1
        assert count == CAPACITY // (RECORD + 96)  # every byte of the ring can be used
        assert receiver.receive_nowait() == b"x" * 96
        sender.send_nowait(b"y" * 96)


def test_timeout_of_a_full_ring_names_receiver_distance_and_time() -> None:
    channel = penstock.Ring(name="steps", capacity=CAPACITY)
    with channel.open_sender() as sender, channel.open_receiver(name="worker"):
        for _ in range(32):
            sender.send(b"x" * 96)
        with pytest.raises(Timeout) as output:
            sender.send(b"y", timeout=0.05)
        error = output.value
        assert re.search(r"'steps' is full for \d", str(error))
        assert "receiver 0, 'worker' (pid" in str(error)
        assert "is 32 records (4.0 KiB) behind" in str(error)
        assert (error.receiver, error.pid) == (0, os.getpid())
        assert (error.records_behind, error.nbytes_behind) == (32, CAPACITY)
        assert error.ns_behind is not None
        assert 50_000_000 <= error.ns_behind < 10_000_000_000


def test_timeout_names_a_receiver_that_has_not_attached() -> None:
    channel = penstock.Ring(capacity=CAPACITY)
    with channel.open_sender() as sender:
        with pytest.raises(Timeout, match="receiver 0, which has not attached yet, is 4 records") as output:
            for _ in range(5):
                sender.send(b"x" * 900, timeout=0.02)
        assert output.value.pid == 0


def test_receive_timeout_names_the_awaited_sender() -> None:
    channel = penstock.Ring(name="deltas")
    with channel.open_receiver() as receiver:
        with pytest.raises(Timeout, match=r"no record for receiver 0 of 'deltas' within \d+\.\d ms; no sender is open"):
            receiver.receive(timeout=0.02)
        with channel.open_sender(name="core") as sender:
            with pytest.raises(Timeout, match=r"'core' \(pid \d+\) has not sent yet"):
                receiver.receive(timeout=0)
            sender.send(b"x")
            receiver.receive()
            with pytest.raises(Timeout, match=r"'core' \(pid \d+\) sent last .* ago"):
                receiver.receive_view(timeout=0.01)


@pytest.mark.parametrize("timeout", [float("nan"), "soon", b"", [1]], ids=repr)
def test_a_timeout_that_is_no_number_is_refused(timeout: object) -> None:
    with ring() as (_, sender, receiver):
        with pytest.raises((ValueError, TypeError)):
            sender.send(b"x", timeout=timeout)
        with pytest.raises((ValueError, TypeError)):
            receiver.receive(timeout=timeout)
        assert receiver.try_receive() is None


def test_negative_timeout_has_passed_and_a_very_long_one_is_none() -> None:
    with ring() as (_, sender, receiver):
        with pytest.raises(Timeout):
            receiver.receive(timeout=-3)
        sender.send(b"x", timeout=float("inf"))
        assert receiver.receive(timeout=1e300) == b"x"


def test_record_longer_than_the_pool_raises_and_the_next_is_sent() -> None:
    with ring() as (_, sender, receiver):
        with pytest.raises(penstock.MemoryExhausted, match=r"block of 1.0 MiB does not fit pool 'ring'") as output:
            sender.send(bytes((1 << 20) + 1))
        assert output.value.requested == (1 << 20) + 1
        assert output.value.free == output.value.largest == 1 << 20
        sender.send(b"next")
        assert receiver.receive(timeout=1) == b"next"


def test_sender_times_out_on_a_full_pool_and_names_the_holders() -> None:
    channel = penstock.Ring(name="images", long_records=SMALL_POOL)
    with channel.open_sender() as sender, channel.open_receiver(name="worker") as receiver:
        sender.send(bytes(700_000))
        view = receiver.receive_view(timeout=1)
        with pytest.raises(WouldBlock):
            sender.send_nowait(bytes(500_000))
        with pytest.raises(Timeout) as output:
            sender.send(bytes(500_000), timeout=0.02)
        assert "488.3 KiB" in str(output.value)  # 500,000 bytes
        assert "'worker'" in str(output.value)
        assert output.value.requested == 500_000  # type: ignore[attr-defined]
        view.release()
        sender.send(bytes(500_000), timeout=1)
        assert receiver.receive(timeout=1) == bytes(500_000)


def test_snapshot_counts_records_bytes_and_spills() -> None:
    channel = penstock.Ring(
        name="counted", capacity=CAPACITY, long_records=LongRecords(inline_limit=INLINE, pool_nbytes=1 << 20)
    )
    with channel.open_sender(name="a") as sender, channel.open_receiver(name="b") as receiver:
        for nbytes in (0, 10, 1024, 1025, 5000):
            sender.send(bytes(nbytes))
        receiver.receive(timeout=1)
        receiver.receive(timeout=1)
        observed = channel.snapshot()
        assert (observed["name"], observed["kind"], observed["lane_nbytes"], observed["inline_limit"]) == (
            "counted",
            "ring",
            4096,
            1024,
        )
        item, other = observed["senders"][0], observed["receivers"][0]
        assert (item["name"], item["state"], item["records"], item["nbytes"], item["spills"]) == (
            "a",
            "live",
            5,
            7059,
            2,
        )
        assert (other["name"], other["state"], other["records"], other["nbytes"]) == ("b", "live", 2, 10)
        assert (other["records_behind"], other["nbytes_behind"]) == (3, (32 + 1024) + 2 * (32 + 32))
        assert observed["pool"][0]["blocks"] == 2
        assert item["furthest_behind_nbytes"] == 32 + 64 + (32 + 1024) + 2 * 64
