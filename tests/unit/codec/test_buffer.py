"""Buffers, as what a channel carries and as fields of messages: what holds room in the channel, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock import AsyncReceiver, AsyncSender, Buffer, ClosedError, LongRecords, WouldBlock
from tests.support import channels
from tests.support.channels import SMALL_POOL
from tests.support.loops import in_a_loop

SIZES = [0, 1, 1000, 5000]  # the last one lies in the pool


class Image(msgspec.Struct, array_like=True, frozen=True):
    number: int
    pixels: Buffer
    mask: NDArray[np.int32] | None = None


def ring(type: Any = Buffer, **options: Any) -> contextlib.AbstractContextManager[Any]:
    return channels.ring(type, **options)


def in_use(channel: penstock.Ring[Any]) -> int:
    """Returns the bytes that received records take in the ring and in the pool."""
    state = channel.snapshot()
    return int(state["receivers"][0]["nbytes_behind"]) + int(state["pool"][0]["taken_nbytes"])


# ── sending and receiving ──
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_channel_of_buffers_gives_the_record_as_a_read_only_buffer(nbytes: int) -> None:
    record = random.Random(nbytes).randbytes(nbytes)
    with ring() as (_, sender, receiver):
        for sent in (record, bytearray(record), Buffer(record), np.frombuffer(record, np.uint8)):
            sender.send(sent)
            with receiver.receive(timeout=1) as buffer:
                assert type(buffer) is Buffer
                assert bytes(buffer) == bytes(buffer.view) == record
                assert (len(buffer), buffer.nbytes, buffer.view.readonly) == (nbytes, nbytes, True)
            sender.send_nowait(sent)
            with receiver.receive_nowait() as buffer:
                assert buffer == Buffer(record)
        with pytest.raises(WouldBlock):
            receiver.receive_nowait()


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_list_of_buffers_is_sent_as_one_record(nbytes: int) -> None:
    part = bytes(nbytes)
    record = b"head" + part + b"tail" + part
    pieces: list[list[Any] | tuple[Any, ...]] = [
        [b"head", part, b"tail", part],
        (b"head", bytearray(part), Buffer(b"tail"), Buffer(part)),
        [Buffer(record)],
        [record, Buffer(b"")],
    ]
    long_records = LongRecords(inline_limit=4096, pool_nbytes=1 << 20)
    with ring(capacity=1 << 16, long_records=long_records) as (_, sender, receiver):
        for sent in pieces:
            for send in (sender.send, sender.send_nowait):
                send(sent)
                with receiver.receive(timeout=1) as buffer:
                    assert bytes(buffer) == record
        sender.send([])
        assert bytes(receiver.receive(timeout=1)) == b""


def test_a_received_buffer_is_sent_on_as_it_is() -> None:
    with ring() as (_, sender, receiver), ring() as (_, passing, last):
        for nbytes in SIZES:
            sender.send(b"x" * nbytes)
            with receiver.receive(timeout=1) as buffer:
                passing.send([b"on: ", buffer])
                passing.send(buffer)
            assert bytes(last.receive(timeout=1)) == b"on: " + b"x" * nbytes
            assert bytes(last.receive(timeout=1)) == b"x" * nbytes


def test_buffers_are_told_apart_by_their_bytes() -> None:
    assert Buffer(b"abc") == Buffer(bytearray(b"abc")) != Buffer(b"abd")
    assert Buffer(b"abc") != b"abc"
    assert bytes(Buffer(np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2])) == np.array([0, 2, 3, 5], "i2").tobytes()
    assert Buffer(np.zeros((2, 3))).view.format == "B"
    assert (repr(Buffer(b"abc")), repr(Buffer(np.zeros(0)))) == ("Buffer(3 bytes)", "Buffer(0 bytes)")
    with pytest.raises(TypeError):
        hash(Buffer(b"abc"))
    for wrong in ("text", 5, None):
        with pytest.raises(TypeError):
            Buffer(wrong)  # type: ignore[arg-type]


# ── room ──
@pytest.mark.parametrize("nbytes", [100, 5000])
def test_a_buffer_keeps_its_room_until_it_is_released(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):
        sender.send(b"x" * nbytes)
        buffer = receiver.receive(timeout=1)
        assert in_use(channel) >= nbytes
        buffer.release()
        assert in_use(channel) == 0
        buffer.release()  # again: nothing happens
        assert in_use(channel) == 0
        assert repr(buffer) == "Buffer(released)"


@pytest.mark.parametrize("nbytes", [100, 5000])
def test_a_buffer_that_is_dropped_gives_its_room_back(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):
        sender.send(b"x" * nbytes)
        buffer: Any = receiver.receive(timeout=1)
        cycle = [buffer]
        cycle.append(cycle)
        del buffer
        assert in_use(channel) > 0
        del cycle
        gc.collect()
        assert in_use(channel) == 0


@pytest.mark.parametrize("nbytes", [1000, 5000])
def test_views_of_a_released_buffer_keep_its_room_until_the_last_is_gone(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):
        sender.send(np.arange(nbytes // 8, dtype=np.int64))
        buffer = receiver.receive(timeout=1)
        view, array = buffer.view[8:16], np.frombuffer(buffer.view, np.int64)
        buffer.release()
        buffer.release()
        with pytest.raises(ClosedError):
            buffer.view  # noqa: B018
        assert bytes(view) == (1).to_bytes(8, "little") and array[-1] == nbytes // 8 - 1
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        assert in_use(channel) > 0
        del array
        assert in_use(channel) > 0
        view.release()
        assert in_use(channel) == 0


@pytest.mark.parametrize("nbytes", [1000, 5000])
def test_a_with_block_releases_though_a_view_of_it_lives(nbytes: int) -> None:
    with ring() as (channel, sender, receiver):
        sender.send(bytes(nbytes))
        with receiver.receive(timeout=1) as buffer:
            view = buffer.view
        assert repr(buffer) == "Buffer(released)"
        assert in_use(channel) > 0
        assert bytes(view) == bytes(nbytes)
        del view
        assert in_use(channel) == 0
        sender.send(bytes(nbytes))
        with pytest.raises(ZeroDivisionError), receiver.receive(timeout=1):
            1 / 0  # noqa: B018
        assert in_use(channel) == 0


def test_released_buffer_raises_closed_error() -> None:
    with ring() as (_, sender, receiver):
        sender.send(b"x" * 5000)
        buffer = receiver.receive(timeout=1)
        buffer.release()
        for use in (
            lambda: buffer.view,
            lambda: buffer.nbytes,
            lambda: len(buffer),
            lambda: bytes(buffer),
            lambda: buffer == Buffer(b"x"),
            lambda: Buffer(b"x") == buffer,
            lambda: copy.deepcopy(buffer),
            lambda: sender.send(buffer),
            lambda: sender.send([b"x", buffer]),
        ):
            with pytest.raises(ClosedError, match="the buffer has been released"):
                use()


@pytest.mark.parametrize("nbytes", [1000, 5000])
def test_buffer_outlives_its_receiver_and_its_channel(nbytes: int) -> None:
    channel = penstock.Ring(Buffer, long_records=LongRecords(inline_limit=2000))
    sender, receiver = channel.open_sender(), channel.open_receiver()
    sender.send(b"x" * nbytes)
    buffer = receiver.receive(timeout=1)
    receiver.close()
    sender.close()
    channel.close()
    del sender, receiver, channel
    gc.collect()
    assert bytes(buffer) == b"x" * nbytes
    buffer.release()


def test_a_copy_of_a_buffer_does_not_keep_its_room() -> None:
    with ring() as (channel, sender, receiver):
        sender.send(b"x" * 5000)
        with receiver.receive(timeout=1) as buffer:
            copied = copy.deepcopy(buffer)
        assert in_use(channel) == 0
        assert bytes(copied) == b"x" * 5000


# ── event loops ──
def in_loop(work: Any, **options: Any) -> None:
    async def main() -> None:
        channel = penstock.Ring(Buffer, **{"capacity": 4096, "long_records": SMALL_POOL, **options})
        async with channel.open_async_sender() as sender, channel.open_async_receiver() as receiver:
            await asyncio.wait_for(work(channel, sender, receiver), 30)
        assert sender.is_closed and receiver.is_closed

    asyncio.run(main())


def test_async_ends_send_and_receive_buffers() -> None:
    async def work(channel: penstock.Ring[Any], sender: AsyncSender[Any], receiver: AsyncReceiver[Any]) -> None:
        with pytest.raises(WouldBlock):
            receiver.receive_nowait()
        waiting = asyncio.ensure_future(receiver.receive(timeout=20))
        await asyncio.sleep(0)
        await sender.send([b"one ", Buffer(b"record")])
        buffer = await waiting
        assert type(buffer) is Buffer and bytes(buffer) == b"one record" and buffer.view.readonly
        assert (receiver.source, receiver.index, sender.index) == (0, 0, 0)
        buffer.release()
        buffer.release()
        with pytest.raises(ClosedError):
            buffer.view  # noqa: B018
        assert in_use(channel) == 0
        for nbytes in SIZES:
            sender.send_nowait(Buffer(b"x" * nbytes))
            with receiver.receive_nowait() as buffer:
                assert bytes(buffer) == b"x" * nbytes
                view = buffer.view[:1]
            assert in_use(channel) > 0
            del view
            assert in_use(channel) == 0
        with pytest.raises(penstock.Timeout):
            await receiver.receive(timeout=0.01)
        for number in range(3):
            await sender.send(b"%d" % number)
        sender.close()
        assert [bytes(buffer) async for buffer in receiver] == [b"0", b"1", b"2"]
        with pytest.raises(penstock.EndOfChannel):
            await receiver.receive()

    in_loop(work)


@pytest.mark.parametrize("type", [bytes, Buffer])
@in_a_loop
async def test_async_send_that_waits_sends_the_bytes_of_its_call(type: Any) -> None:
    channel = penstock.Ring(type, capacity=4096)
    async with channel.open_async_sender() as sender:
        receiver = channel.open_receiver()
        with pytest.raises(WouldBlock):
            while True:
                sender.send_nowait(b"full" * 200)
        room = bytearray(b"?" * 450)
        sending = []
        for letter in b"abcdefgh":
            room[:] = bytes([letter]) * 450
            sent = (room, memoryview(room), [memoryview(room)[:5], room[5:]], np.frombuffer(room, "u2"))[letter % 4]
            sending.append(asyncio.ensure_future(sender.send(sent)))
            await asyncio.sleep(0)
        room[:] = bytes(450)
        letters = list(b"abcdefgh")
        while letters:
            actual = bytes(await asyncio.to_thread(receiver.receive, 5))
            if actual != b"full" * 200:
                assert actual == bytes([letters.pop(0)]) * 450
            await asyncio.sleep(0)
        await asyncio.gather(*sending)
        receiver.close()


def test_a_buffer_that_is_released_while_it_waits_to_be_sent_is_sent() -> None:
    async def work(channel: penstock.Ring[Any], sender: AsyncSender[Any], receiver: AsyncReceiver[Any]) -> None:
        for _ in range(4):
            await sender.send(b"x" * 960)
        first = await receiver.receive(timeout=5)
        sending = [asyncio.ensure_future(sender.send([b"on: ", first])), asyncio.ensure_future(sender.send(first))]
        await asyncio.sleep(0)
        first.release()
        for _ in range(3):
            (await receiver.receive(timeout=5)).release()
        assert bytes(await receiver.receive(timeout=5)) == b"on: " + b"x" * 960
        assert bytes(await receiver.receive(timeout=5)) == b"x" * 960
        await asyncio.gather(*sending)

    in_loop(work)


# ── a field of a message ──
@pytest.mark.parametrize("nbytes", [0, 10, 2000, 63 << 10])
def test_a_buffer_in_a_short_message_does_not_keep_room_in_the_channel(nbytes: int) -> None:
    with ring(Image, capacity=1 << 20, long_records=LongRecords(pool_nbytes=4 << 20)) as (channel, sender, receiver):
        sender.send(Image(1, Buffer(b"x" * nbytes)))
        message = receiver.receive(timeout=1)
        assert message == Image(1, Buffer(b"x" * nbytes)) and message.pixels.view.readonly
        assert in_use(channel) == 0
        message.pixels.release()
        with pytest.raises(ClosedError):
            bytes(message.pixels)


@pytest.mark.parametrize("way", ["released", "dropped"])
def test_buffer_of_a_long_message_stays_in_the_pool_while_in_use(way: str) -> None:
    with ring(Image, capacity=1 << 20, long_records=LongRecords(pool_nbytes=4 << 20)) as (channel, sender, receiver):
        pixels, mask = random.Random(1).randbytes(100_000), np.arange(20_000, dtype=np.int32)
        sender.send(Image(1, Buffer(pixels), mask))
        message = receiver.receive(timeout=1)
        assert in_use(channel) >= 180_000
        view = message.pixels.view[5:10]
        array = message.mask
        if way == "released":
            message.pixels.release()
            message.pixels.release()
            with pytest.raises(ClosedError):
                message.pixels.view  # noqa: B018
        else:
            assert bytes(message.pixels) == pixels
        del message
        assert in_use(channel) >= 180_000
        assert bytes(view) == pixels[5:10] and np.array_equal(array, mask)
        del view
        assert in_use(channel) >= 180_000
        del array
        assert in_use(channel) == 0


def test_buffer_of_a_message_can_be_sent_on() -> None:
    with ring(Image) as (_, sender, receiver), ring() as (_, passing, last):
        for nbytes in (10, 200_000):
            sender.send(Image(1, Buffer(b"x" * nbytes)))
            first = receiver.receive(timeout=1)
            sender.send(Image(2, first.pixels))
            assert receiver.receive(timeout=1) == Image(2, Buffer(b"x" * nbytes))
            passing.send(first.pixels)
            assert last.receive(timeout=1) == first.pixels
            first.pixels.release()
            with pytest.raises(ClosedError, match="the buffer has been released"):
                sender.send(first)


# ── another process ──


def test_bytes_and_buffers_have_the_same_wire_format() -> None:
    with penstock.Ring() as channel, channel.open_sender() as sender:
        sender.send(b"bytes")
        with penstock.attach(channel.ticket, Buffer) as attached, attached.open_receiver() as receiver:
            assert receiver.receive(timeout=1) == Buffer(b"bytes")
    with penstock.Ring(Buffer) as channel, channel.open_sender() as sender:
        sender.send(Buffer(b"buffer"))
        with penstock.attach(channel.ticket) as attached, attached.open_receiver() as receiver:
            assert receiver.receive(timeout=1) == b"buffer"


def test_a_buffer_is_not_pickled() -> None:
    with ring() as (_, sender, receiver):
        sender.send(b"x")
        for unique in (receiver.receive(timeout=1), sender, receiver):
            with pytest.raises(TypeError):
                pickle.dumps(unique)
