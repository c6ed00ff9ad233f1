"""Channels that carry messages: what was agreed on, what a build lacks, and what costs one message alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import operator
import threading
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock import Buffer, LayoutMismatch, LongRecords
from penstock.channel import Channel
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder, Schema
from tests.conftest import eventually
from tests.support.loops import in_a_loop


class Settings(msgspec.Struct, array_like=True, frozen=True):
    heat: float = 1.0
    words: tuple[str, ...] = ()


class Job(msgspec.Struct, array_like=True, frozen=True):
    number: int
    settings: Settings | None = None
    ids: NDArray[np.int32] | None = None
    image: Buffer | None = None


class Stop(msgspec.Struct, array_like=True, frozen=True):
    why: str = ""


WARM, COLD = Settings(1.2, ("a", "b")), Settings(0.1)


def opened(type: Any = Job | Stop, **options: Any) -> Channel[Any]:
    return penstock.Ring(type, on_receiver_death="ignore", on_sender_death="ignore", **options)


def test_received_message_is_not_changed_by_later_messages() -> None:
    with (
        opened(capacity=1 << 16) as channel,
        channel.open_sender() as sender,
        channel.open_receiver() as receiver,
    ):
        saved = []
        for size in (3, 300, 50_000):
            sender.send(Job(size, ids=np.arange(size, dtype=np.int32)))
            saved.append(receiver.receive(timeout=5).ids)
        for _ in range(200):
            sender.send(Job(0, ids=np.full(2000, 7, np.int32)))
            assert receiver.receive(timeout=5).ids[0] == 7
        for ids in saved:
            assert np.array_equal(ids, np.arange(len(ids)))
            with pytest.raises(ValueError, match="read-only"):
                ids[0] = 1


# ── the handshake ──
def test_attach_names_the_difference_of_two_builds() -> None:
    other = msgspec.defstruct("Job", [("number", int), ("settings", Settings | None, None)], array_like=True)
    with opened() as channel, pytest.raises(LayoutMismatch) as caught:
        penstock.attach(channel.ticket, other | Stop)
    text = str(caught.value)
    assert "'ring' carries other messages" in text and "Job has no 'ids: None | array[int32]' here" in text
    assert text.count(penstock.__version__) == 2
    assert all(Catalogue(cls, Stop).fingerprint in text for cls in (Job, other))


def test_schema_is_in_the_snapshot() -> None:
    with opened() as channel:
        schema = Schema.decode(channel.snapshot()["schema"])
    assert [message.name for message in schema.messages] == ["Job", "Stop"]
    assert dict(schema.messages[0].fields)["ids"] == "None | array[int32]"
    assert [struct.name for struct in schema.structs] == ["Settings"]


def test_oversized_schema_is_refused_with_its_size() -> None:
    many = (
        msgspec.defstruct(f"M{n}", [(f"f{k}_{'x' * 900}", int) for k in range(20)], array_like=True) for n in range(64)
    )
    with pytest.raises(
        ValueError, match=r"of these 64 classes takes 1,\d+,\d+ bytes; a channel has room for 1,048,576"
    ):
        penstock.Ring(functools.reduce(operator.or_, many))


# ── what goes wrong ──
def test_message_after_an_undecodable_message_is_received() -> None:
    with opened() as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        sender.send(Job("not a number", WARM))  # type: ignore[arg-type]
        sender.send(Job(2, WARM))
        with pytest.raises(penstock.DecodeError, match=r"Job: expected `int`, got `str` at \$\.number"):
            receiver.receive(timeout=5)
        assert receiver.receive(timeout=5) == Job(2, WARM)


def test_message_after_an_unencodable_message_is_sent() -> None:
    with opened() as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        for wrong in (Job(1, WARM, np.zeros(3)), Settings(), Job(1j)):  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                sender.send(wrong)
        sender.send(Job(2, WARM))
        assert receiver.receive(timeout=5) == Job(2, WARM)


def test_receive_nowait_returns_a_message_or_raises_would_block() -> None:
    with opened() as channel:
        sender, receiver = channel.open_sender(), channel.open_receiver()
        with pytest.raises(penstock.WouldBlock):
            receiver.receive_nowait()
        sender.send(Job(1))
        assert receiver.receive_nowait() == Job(1)
        with pytest.raises(penstock.WouldBlock):
            receiver.receive_nowait()
        sender.close()
        with pytest.raises(penstock.EndOfChannel):
            receiver.receive_nowait()


def test_threads_share_ends() -> None:
    with (
        opened(capacity=1 << 16) as channel,
        channel.open_sender() as sender,
        channel.open_receiver() as receiver,
    ):
        values = [Settings(float(i)) for i in range(50)]
        actual: list[Job] = []

        def send(which: int) -> None:
            for number in range(300):
                sender.send(
                    Job(which, values[(number * 7 + which) % 50], np.arange(number, dtype=np.int32)), timeout=20
                )

        def receive() -> None:
            for job in receiver:
                assert len(job.ids) == 0 or job.ids[-1] == len(job.ids) - 1
                actual.append(job)

        senders = [threading.Thread(target=send, args=(which,)) for which in range(4)]
        receivers = [threading.Thread(target=receive) for _ in range(3)]
        for thread in senders + receivers:
            thread.start()
        for thread in senders:
            thread.join()
        sender.close()
        for thread in receivers:
            thread.join()
        assert len(actual) == 1200
        for which in range(4):
            settings = sorted(job.settings.heat for job in actual if job.number == which)  # type: ignore[union-attr]
            assert settings == sorted(float((number * 7 + which) % 50) for number in range(300))


# ── event loops ──


def test_failed_send_releases_its_message() -> None:
    with opened(capacity=4096, long_records=LongRecords(inline_limit=1024)) as channel, channel.open_receiver():

        def held_by(send: Any) -> list[Any]:
            ids = np.zeros(200, np.int32)
            gone = weakref.ref(ids)
            with pytest.raises((penstock.WouldBlock, TypeError, penstock.Timeout)):
                while True:
                    send(Job(0, WARM, ids))
            with pytest.raises((penstock.WouldBlock, TypeError, penstock.Timeout)):
                send(Job(1, WARM, ids))
            del ids
            return [] if gone() is None else gc.get_referrers(gone())

        with channel.open_sender() as sender:
            assert held_by(sender.send_nowait) == []
            assert held_by(lambda message: sender.send(message, timeout=0.01)) == []
            assert held_by(lambda message: sender.send(Job(1, WARM, message.ids, 5))) == []


@in_a_loop
async def test_a_message_that_a_loop_did_not_send_is_not_sent_later() -> None:
    channel = opened(capacity=4096, long_records=LongRecords(inline_limit=1024))
    async with channel.open_async_sender() as sender:
        receiver = channel.open_receiver()
        with pytest.raises(penstock.WouldBlock):
            while True:
                sender.send_nowait(Stop("x" * 200))
        sending = asyncio.ensure_future(sender.send(Job(1)))
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(penstock.Timeout):
            await sender.send(Job(2), timeout=0.01)
        with pytest.raises(penstock.WouldBlock):
            while True:
                assert receiver.receive_nowait() == Stop("x" * 200)
        await sender.send(Job(3), timeout=5)
        assert receiver.receive(timeout=5) == Job(3)
        receiver.close()
    channel.close()


@in_a_loop
async def test_a_loop_that_waits_for_room_keeps_views_as_they_were() -> None:
    Viewed = msgspec.defstruct("Viewed", [("at", memoryview), ("more", list[bytes])], array_like=True)
    channel = opened(Viewed, capacity=4096, long_records=LongRecords(inline_limit=1024))
    async with channel.open_async_sender() as sender:
        receiver = channel.open_receiver()
        room = bytearray(b"a" * 450)
        sending = []
        for letter in b"bcdefghijk":
            room[:] = bytes([letter]) * 450
            sending.append(asyncio.ensure_future(sender.send(Viewed(memoryview(room), [bytes(room)]))))
            await asyncio.sleep(0)
        room[:] = bytes(450)
        for letter in b"bcdefghijk":
            actual = await asyncio.to_thread(receiver.receive, 5)
            assert bytes(actual.at) == actual.more[0] == bytes([letter]) * 450
            await asyncio.sleep(0)
        await asyncio.gather(*sending)
        receiver.close()
    channel.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_interrupt_of_the_codec_leaves_ends_usable(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        for call, cls, method in (
            (lambda: sender.send(Stop(), timeout=1), FrameEncoder, "encode"),
            (lambda: sender.send_nowait(Stop()), FrameEncoder, "encode"),
            (lambda: receiver.receive(timeout=1), FrameDecoder, "decode"),
            (lambda: receiver.receive_nowait(), FrameDecoder, "decode"),
        ):
            sender.send(Stop())
            uninterrupted = getattr(cls, method)

            def interrupted(*arguments: Any, uninterrupted: Any = uninterrupted) -> None:
                if moment == "after":
                    uninterrupted(*arguments)
                raise KeyboardInterrupt

            monkeypatch.setattr(cls, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
            monkeypatch.undo()
            sender.send(Stop(), timeout=1)
            while True:
                try:
                    receiver.receive_nowait()
                except penstock.WouldBlock:
                    break
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                other.submit(sender.send, Stop(), 1).result()
                other.submit(receiver.receive, 1).result()


def test_a_deadline_holds_while_another_thread_receives_messages() -> None:
    with opened() as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(receiver.receive, 20)
            eventually(lambda: channel.snapshot()["receivers"][0]["waiting_ns"] > 0)
            with pytest.raises(penstock.Timeout, match="another thread is using this end of 'ring'"):
                receiver.receive(0.05)
            with pytest.raises(penstock.WouldBlock, match="another thread is using this end of 'ring'"):
                receiver.receive_nowait()
            sender.send(Stop("x"))
            assert waiting.result() == Stop("x")


# A signal handler may use the end in the middle of a call of the thread that it interrupts.
def test_send_in_a_signal_handler_leaves_the_interrupted_message_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        part = FrameEncoder._part
        handled: list[int] = []

        def interrupted(encoder: FrameEncoder, kind: int, nbytes: int, at: Any) -> int:
            number = part(encoder, kind, nbytes, at)
            if not handled:
                handled.append(1)
                sender.send(Job(1, ids=np.arange(5000, dtype=np.int32)))
            return number

        monkeypatch.setattr(FrameEncoder, "_part", interrupted)
        sender.send(Job(2, ids=np.arange(3000, dtype=np.int32)))
        for number, size in ((1, 5000), (2, 3000)):
            job = receiver.receive(timeout=5)
            assert job.number == number and np.array_equal(job.ids, np.arange(size))


def test_receive_in_a_signal_handler_leaves_the_interrupted_message_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = FrameDecoder._hook
    handled: list[Job] = []

    def interrupted(decoder: FrameDecoder, hint: Any, value: Any) -> Any:
        if not handled:
            handled.append(Job(0))
            handled[0] = receiver.receive(timeout=5)
        return hook(decoder, hint, value)

    with opened() as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        monkeypatch.setattr(FrameDecoder, "_hook", interrupted)
        for number, size in ((1, 5000), (2, 3000)):
            sender.send(Job(number, ids=np.arange(size, dtype=np.int32)))
        first = receiver.receive(timeout=5)
        for job, number, size in ((first, 1, 5000), (handled[0], 2, 3000)):
            assert job.number == number and np.array_equal(job.ids, np.arange(size))
