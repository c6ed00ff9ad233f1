"""Idle times, slow receivers, too many processes, and hours made short. No test of speed: the bounds are loose."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import struct
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import LongRecords, lowlevel
from penstock.channel import Channel
from tests import tiers
from tests.conftest import eventually, spawn
from tests.crash.zygote import Zygote

NUMBER = struct.Struct("<Qd")


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


# ── idle, then a burst ───────────────────────────────────────────────────────────────────────────────────────────────
def note_arrivals(talk: Connection, where: str, index: int) -> None:
    """Says of each record how long it took, and how many were lost: none may be."""
    late = []
    with penstock.attach(where).open_receiver(index) as receiver:
        talk.send(("ready",))
        for due, record in enumerate(receiver):
            number, sent = NUMBER.unpack(record)
            late.append(time.monotonic() - sent)
            assert number == due, f"record {number} where {due} was due"
    talk.send(("late", late))


@pytest.mark.timeout(tiers.limit(120, soak=7200))
@pytest.mark.parametrize("receivers", [1, 4, 16])
def test_burst_after_a_pause_wakes_all_receivers(zygote: Zygote, seed: int, receivers: int) -> None:
    import random

    chance = random.Random(seed)
    with penstock.Broadcast(receivers=receivers) as channel, channel.open_sender() as sender:
        children = [zygote.child(note_arrivals, str(channel.ticket), index) for index in range(receivers)]
        try:
            for child in children:
                child.hear("ready")
            number = 0
            for _ in range(tiers.PATIENCE_BURSTS):
                time.sleep(chance.random() * 0.2)
                for _ in range(chance.choice((1, 1, 5, 50))):
                    sender.send(NUMBER.pack(number, time.monotonic()))
                    number += 1
            sender.close()
            for child in children:
                late = sorted(child.hear("late")[1])
                assert len(late) == number
                # A wake-up that is lost would be found by a look 80 ms later, every time; a busy machine is late too,
                # but not for most.
                assert late[len(late) // 2] < 0.05, f"half of the records took more than {late[len(late) // 2]:.3f} s"
        finally:
            for child in children:
                child.close()


# ── a slow receiver ──────────────────────────────────────────────────────────────────────────────────────────────────
def read_slowly(talk: Connection, where: str, index: int, is_slow: bool) -> None:
    channel = penstock.attach(where)
    with channel.open_receiver(index, name="slow" if is_slow else f"quick {index}") as receiver:
        talk.send(("ready",))
        if is_slow:
            talk.send(("first", receiver.receive()))
            talk.recv()
        count = int(is_slow)
        for record in receiver:
            assert NUMBER.unpack(record)[0] == count
            count += 1
            if not is_slow:
                talk.send(("count", count)) if count % 10 == 0 else None
    talk.send(("all", count))


def test_slow_receiver_blocks_the_sender_by_name_and_others_read_on(zygote: Zygote) -> None:
    with penstock.Broadcast(receivers=3, capacity=4096) as channel, channel.open_sender() as sender:
        children = [zygote.child(read_slowly, str(channel.ticket), index, index == 1) for index in range(3)]
        slow = children[1]
        try:
            for child in children:
                child.hear("ready")
            sender.send(NUMBER.pack(0, 0.0))
            slow.hear("first")
            number = 1
            with pytest.raises(penstock.Timeout) as caught:
                while True:
                    sender.send(NUMBER.pack(number, 0.0), timeout=0.5)
                    number += 1
            error = caught.value
            words = rf"receiver 1, 'slow' \(pid {slow.pid}\), is {error.records_behind} records \([\d.]+ \w+\) behind"
            assert re.search(words, str(error)), error
            assert (error.receiver, error.pid) == (1, slow.pid)
            assert number - 1 <= error.records_behind <= number
            assert error.nbytes_behind is not None and 0 < error.nbytes_behind <= 4096
            assert error.ns_behind is not None and error.ns_behind >= 0.4e9
            for child in (children[0], children[2]):  # they have read everything that was published
                eventually(lambda child=child: ("count", number // 10 * 10) in child.heard(), 20)
            slow.talk.send("go")
            for later in range(number, number + 200):
                sender.send(NUMBER.pack(later, 0.0), timeout=20)
            sender.close()
            for child in children:
                assert child.hear("all")[1] == number + 200
        finally:
            for child in children:
                child.close()


# ── more processes than processors ───────────────────────────────────────────────────────────────────────────────────
def count_all(talk: Connection, where: str, index: int) -> None:
    with penstock.attach(where).open_receiver(index) as receiver:
        talk.send(("ready",))
        talk.send(("all", sum(1 for _ in receiver)))


@pytest.mark.parametrize("latency", ["auto", "spin"])
def test_sixty_four_receivers_on_few_processors_all_get_on(zygote: Zygote, latency: Any) -> None:
    receivers = 64 if latency == "auto" else 16
    records = 300
    with penstock.Broadcast(receivers=receivers, capacity=16384, latency=latency, max_peers=80) as channel:
        with channel.open_sender() as sender:
            children = [zygote.child(count_all, str(channel.ticket), index) for index in range(receivers)]
            try:
                for child in children:
                    child.hear("ready")
                for number in range(records):
                    sender.send(NUMBER.pack(number, 0.0) * 8, timeout=60)
                sender.close()
                for child in children:
                    assert child.hear("all", within=60)[1] == records
            finally:
                for child in children:
                    child.close()


# ── for ever, made short ─────────────────────────────────────────────────────────────────────────────────────────────
def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_process_that_sends_and_receives_for_long_does_not_grow() -> None:
    with (
        penstock.Ring(long_records=LongRecords(pool_nbytes=16 << 20)) as ring,
        ring.open_sender() as sender,
        ring.open_receiver() as receiver,
    ):
        pool = lowlevel.Pool.create(1 << 20)

        def once(number: int) -> None:
            sender.send(bytes(number % 3000), timeout=10)
            if number % 10 == 0:
                sender.send(bytes(100_000), timeout=10)
                receiver.receive()
                assert len(receiver.receive_view()) == 100_000
            else:
                receiver.receive()
            with pool.take(1 + number % 5000) as lease:
                pool.open(pool.share(lease)).release()
            if number % 100 == 0:
                with contextlib.suppress(penstock.Timeout):
                    receiver.receive(timeout=0.0)

        for number in range(5000):
            once(number)
        descriptors, memory = len(os.listdir("/proc/self/fd")), resident()
        deadline = time.monotonic() + tiers.PATIENCE_SECONDS
        number = 0
        while time.monotonic() < deadline:
            once(number)
            number += 1
        assert number > 1000
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert resident() - memory < 2 << 20, f"{resident() - memory} bytes more after {number} rounds"
        pool.close()


def test_ends_that_come_and_go_leave_nothing_in_a_process_that_stays() -> None:
    with penstock.Broadcast(receivers=2) as channel, channel.open_sender() as sender, channel.open_receiver(0) as stays:
        threads = threading.active_count()
        for number in range(300):
            with channel.open_receiver(1):
                sender.send(b"x" * (1 + number))
                assert len(stays.receive(timeout=10)) == 1 + number
            if number == 50:
                descriptors, memory = len(os.listdir("/proc/self/fd")), resident()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert resident() - memory < 2 << 20
        assert threading.active_count() == threads


# ── what a steady trickle costs ──────────────────────────────────────────────────────────────────────────────────────
def read_and_tell(channel: Channel) -> None:
    with channel.open_receiver() as receiver:
        receiver.receive()
        began, used = time.monotonic(), time.process_time()
        for _ in receiver:
            pass
        share = (time.process_time() - used) / (time.monotonic() - began)
    assert share < 0.6, f"a receiver of 1000 records a second used {share:.0%} of a processor"


@pytest.mark.parametrize("latency", ["eco", "auto"])
def test_a_thousand_records_a_second_do_not_keep_a_processor_busy(latency: Any) -> None:
    statuses: list[int | None] = []
    while 0 not in statuses:  # a busy machine makes pairs of records that come together, or far apart
        assert len(statuses) < 3, "the receiver used more each time; its figures are above"
        with (
            penstock.Ring(latency=latency) as ring,
            spawn(read_and_tell, ring) as process,
            ring.open_sender() as sender,
        ):
            sender.send(b"first", timeout=20)
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                sender.send(b"x" * 200, timeout=20)
                time.sleep(0.001)
            sender.close()
            process.join()
            statuses.append(process.exitcode)


def wait_long(channel: Channel) -> None:
    with channel.open_receiver() as receiver:
        used = time.process_time()
        with pytest.raises(penstock.Timeout):
            receiver.receive(timeout=3)
        assert time.process_time() - used < 0.1, "a receiver that waits uses a processor"


def test_idle_waiters_use_no_processor_time() -> None:
    with penstock.Ring() as ring, spawn(wait_long, ring) as process:
        process.join()
        assert process.exitcode == 0
