"""SIGSTOP is not death: a stopped peer is named as such, keeps what it holds, and goes on when it may."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import _native, lowlevel
from tests import tiers
from tests.conftest import eventually
from tests.crash.scenes import Scene
from tests.crash.zygote import Child, Zygote
from tests.support.processes import state_of, thread


def is_stopped(child: Child) -> bool:
    return state_of(child.pid) == "T"


def stop(child: Child) -> None:
    child.kill(signal.SIGSTOP)
    eventually(lambda: is_stopped(child))


def sleepy_receiver(talk: Connection, where: str) -> None:
    with penstock.attach(where).open_receiver(name="sleeper") as end:
        talk.send(("ready",))
        talk.send(("got", [int(record) for record in end]))


def holder(talk: Connection, where: str, point: str) -> None:
    """Takes and gives back blocks until it is stopped at the point, holding a lock."""
    pool = lowlevel.Pool.attach(where, peer_name="holder")
    lease = pool.take(1000)
    talk.send(("ready", list(_ref(pool, lease))))
    talk.recv()
    _native.arm_point(point, "stop", 1)
    for _ in range(100):
        pool.take(100).release()
    talk.send(("went on",))
    talk.recv()
    lease.release()
    pool.close()
    talk.send(("closed",))


def _ref(pool: lowlevel.Pool, lease: lowlevel.BlockLease) -> tuple[int, ...]:
    ref = pool.share(lease)
    return ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes


def test_a_full_ring_names_the_stopped_receiver_and_it_resumes(zygote: Zygote) -> None:
    with penstock.Ring(capacity=4096) as ring, ring.open_sender() as sender:
        child = zygote.child(sleepy_receiver, str(ring.ticket))
        try:
            child.hear("ready")
            stop(child)
            sent = 0
            with pytest.raises(penstock.Timeout) as caught:
                while True:
                    sender.send(str(sent).encode(), timeout=0.3)
                    sent += 1
            assert re.search(rf"receiver 0, 'sleeper' \(pid {child.pid}, stopped\)", str(caught.value)), caught.value
            assert (caught.value.receiver, caught.value.pid, caught.value.records_behind) == (0, child.pid, sent)
            assert caught.value.ns_behind is not None and caught.value.ns_behind > 0.25e9
            (peer,) = [peer for peer in ring.peers() if peer.pid == child.pid]
            assert peer.state == "stopped"
            child.kill(signal.SIGCONT)
            for number in range(sent, sent + 500):
                sender.send(str(number).encode(), timeout=20)
            sender.close()
            assert child.hear("got")[1] == list(range(sent + 500))
        finally:
            child.close()


def test_a_receiver_that_waits_is_told_that_the_sender_is_stopped(zygote: Zygote) -> None:
    with Scene(zygote, "ring") as scene:
        with scene.channel.open_receiver() as receiver:
            sender = scene.add("sender", 0)
            sender.hear("ready")
            receiver.receive(timeout=20)
            stop(sender)
            with pytest.raises(penstock.Timeout, match=rf"\(pid {sender.pid}, stopped\) sent last"):
                while True:
                    receiver.receive(timeout=0.3)
            sender.kill(signal.SIGCONT)
            assert len(receiver.receive(timeout=20)) > 0
            scene.board.end()
            with pytest.raises(penstock.EndOfChannel):
                while True:
                    receiver.receive(timeout=20)
            sender.hear("closed")
            scene.bury(sender)
        scene.must_be_empty()


def test_stopped_receiver_keeps_its_blocks_and_misses_no_record(zygote: Zygote) -> None:
    with Scene(zygote, "broadcast") as scene:
        scene.fill()
        scene.must_flow()
        receiver = next(receiver for receiver in scene.cast if receiver.role == "receiver" and receiver.index == 1)
        stop(receiver)
        stalled = scene.board.received(receiver.actor)
        sender = scene.others("receiver")[0]
        eventually(
            lambda: (
                (before := scene.board.sent(sender.actor)) == (time.sleep(0.2), scene.board.sent(sender.actor))[1]
                and before
            ),
            20,
        )
        (peer,) = [peer for peer in scene.channel.peers() if peer.pid == receiver.pid]
        assert peer.state == "stopped"
        assert scene.channel.snapshot()["receivers"][1]["state"] == "live"
        assert scene.board.received(receiver.actor) <= stalled + 1
        receiver.kill(signal.SIGCONT)
        scene.must_flow()
        scene.finish()


@pytest.mark.parametrize("point", ["block.locked", "pool.locked"])
def test_peer_stopped_with_a_lock_keeps_it_and_no_peer_dies(zygote: Zygote, point: str) -> None:
    pool = lowlevel.Pool.create(1 << 20, name="pool", peer_name="survivor")
    own = pool.take(1000)
    child = zygote.child(holder, str(pool.ticket), point)
    try:
        ref = lowlevel.Ref(*child.hear("ready")[1])
        opened = pool.open(ref)
        child.talk.send("go")
        eventually(lambda: is_stopped(child), 20)
        if point == "pool.locked":
            with pytest.raises(penstock.Timeout, match=rf"'holder' \(pid {child.pid}, stopped\)"):
                pool.take(100)
        opened.release()
        own.release()
        (peer,) = [peer for peer in pool.peers() if peer.pid == child.pid]
        assert peer.state == "stopped"
        child.kill(signal.SIGCONT)
        child.hear("went on")
        pool.take(100, timeout=20).release()
        child.talk.send("go")
        child.hear("closed")
        child.gone_at()
        eventually(lambda: pool.stats().blocks == 0)
    finally:
        child.close()
        pool.close()


def leaver(talk: Connection, where: str) -> None:
    pool = lowlevel.Pool.attach(where, peer_name="leaver")
    talk.send(("ready",))
    leases = [pool.take(100) for _ in range(8)]
    talk.send(("taken",))
    talk.recv()
    pool.close()
    del leases  # gives back, and leaves, while a peer is stopped with a lock
    talk.send(("left",))


def test_leaving_while_somebody_is_stopped_with_a_lock_is_no_crash(zygote: Zygote) -> None:
    pool = lowlevel.Pool.create(1 << 20, name="pool", peer_name="survivor")
    pool.join()
    other = zygote.child(leaver, str(pool.ticket))
    try:
        other.hear("taken")
        with stopped_within_a_lock(zygote, holder, str(pool.ticket), "block.locked"):
            other.talk.send("go")
            other.hear("left")
            other.gone_at()
        eventually(lambda: pool.stats().blocks == 0)
    finally:
        other.close()
        pool.close()


def test_receiver_killed_while_stopped_is_reported_dead_and_replaced(zygote: Zygote) -> None:
    with Scene(zygote, "broadcast") as scene:
        scene.fill()
        scene.must_flow()
        victim = next(player for player in scene.cast if player.role == "receiver")
        stop(victim)
        victim.kill()
        scene.must_be_told(victim, scene.bury(victim))
        scene.must_be_reaped(victim)
        scene.add("receiver", victim.index).hear("ready")
        scene.must_flow()
        scene.finish()
        assert os.getpid()


# ── deadlines, while a peer is stopped with a lock ───────────────────────────────────────────────────────────────────
def stopping_sender(talk: Connection, where: str, point: str) -> None:
    """Sends a long record, and is stopped at the point, within a lock."""
    sender = penstock.attach(where).open_sender(1, name="holder")
    talk.send(("ready",))
    talk.recv()
    _native.arm_point(point, "stop", 1)
    sender.send(bytes(200_000))
    talk.send(("went on",))
    talk.recv()
    sender.close()


def stopping_reader(talk: Connection, where: str) -> None:
    """Is stopped while it gives a long record back, within the lock of its block."""
    receiver = penstock.attach(where).open_receiver(0, name="holder")
    lease = receiver.receive_view(timeout=20)
    talk.send(("ready",))
    talk.recv()
    _native.arm_point("block.locked", "stop", 1)
    lease.release()
    talk.send(("went on",))
    talk.recv()


def stopping_putter(talk: Connection, where: str) -> None:
    store = penstock.Store.attach(where, peer_name="holder")
    store.put(b"x", key=bytes([2] * 32)).release()
    talk.send(("ready",))
    talk.recv()
    _native.arm_point("store.locked", "stop", 1)
    store.put(b"x", key=bytes([1] * 32)).release()
    talk.send(("went on",))
    talk.recv()


def go_on(child: Child) -> None:
    child.kill(signal.SIGCONT)
    child.hear("went on")


@contextlib.contextmanager
def stopped_within_a_lock(zygote: Zygote, target: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    child = zygote.child(target, *arguments)
    try:
        child.hear("ready")
        child.talk.send("go")
        eventually(lambda: is_stopped(child), 20)
        yield child
        if is_stopped(child):
            go_on(child)
        child.talk.send("go")
        child.gone_at()
        child.heard()  # raises if the child has failed
    finally:
        child.close()


LONG = b"y" * 200_000
A_DEADLINE = 0.3  # s: of 0 and 0.1, and no test of speed; it was 2 s


def must_say(call: Callable[[], object], kind: type[BaseException], child: Child) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=rf"a lock of .* is held by 'holder' \(pid {child.pid}, stopped\)"):
        call()
    assert time.monotonic() - began < A_DEADLINE


def test_sender_keeps_its_deadline_while_a_stopped_peer_has_the_pool(zygote: Zygote) -> None:
    with (
        penstock.Inbox(senders=3, name="inbox") as inbox,
        inbox.open_receiver() as receiver,
        inbox.open_sender(0) as sender,
    ):
        with stopped_within_a_lock(zygote, stopping_sender, str(inbox.ticket), "pool.locked") as child:
            must_say(lambda: sender.send_nowait(LONG), penstock.WouldBlock, child)
            must_say(lambda: sender.send(LONG, timeout=0.1), penstock.Timeout, child)
            must_say(lambda: sender.send(LONG, timeout=0), penstock.Timeout, child)
            must_say(lambda: sender.reserve(len(LONG), timeout=0.1), penstock.Timeout, child)
            began = time.monotonic()
            assert not sender.try_send(LONG)
            assert time.monotonic() - began < A_DEADLINE
            sender.send(b"short", timeout=0)  # needs no lock
        assert {receiver.receive(timeout=20)[:5] for _ in range(2)} == {b"short", bytes(5)}
        sender.send(LONG, timeout=20)
        assert receiver.receive(timeout=20) == LONG


def test_a_pool_keeps_deadlines_while_a_peer_is_stopped_within_its_lock(zygote: Zygote) -> None:
    with lowlevel.Pool.create(1 << 20, name="pool") as pool:
        with stopped_within_a_lock(zygote, holder, str(pool.ticket), "pool.locked") as child:
            for timeout in (0, 0.1):
                must_say(lambda timeout=timeout: pool.take(100, timeout=timeout), penstock.Timeout, child)
            go_on(child)
            pool.take(100).release()


def test_a_store_keeps_deadlines_while_a_peer_is_stopped_within_its_lock(zygote: Zygote) -> None:
    with penstock.Store(1 << 20, name="store") as store:
        with stopped_within_a_lock(zygote, stopping_putter, str(store.ticket)) as child:
            for timeout in (0, 0.1):
                must_say(
                    lambda timeout=timeout: store.put(b"x" * 1000, key=bytes(32), timeout=timeout),
                    penstock.Timeout,
                    child,
                )
        assert store.get(bytes([1] * 32)) is not None


def test_receiver_keeps_its_deadline_while_a_stopped_peer_has_a_record(zygote: Zygote) -> None:
    with penstock.Broadcast(receivers=2, on_receiver_death="ignore") as channel, channel.open_sender() as sender:
        receiver = channel.open_receiver(1)
        sender.send(LONG)
        with stopped_within_a_lock(zygote, stopping_reader, str(channel.ticket)) as child:
            must_say(receiver.receive_nowait, penstock.WouldBlock, child)
            must_say(lambda: receiver.receive(timeout=0), penstock.Timeout, child)
            must_say(lambda: receiver.receive_view(timeout=0.1), penstock.Timeout, child)
            began = time.monotonic()
            assert receiver.try_receive() is None
            assert time.monotonic() - began < A_DEADLINE
        assert receiver.receive(timeout=20) == LONG
        receiver.close()


def test_an_event_loop_goes_on_while_a_peer_is_stopped_within_a_lock(zygote: Zygote) -> None:
    async def longest_pause(call: Callable[[], Coroutine[Any, Any, Any]]) -> float:
        pauses = [time.monotonic()]
        task = asyncio.ensure_future(call())
        while not task.done():
            await asyncio.sleep(0.005)
            pauses.append(time.monotonic())
        assert isinstance(task.exception(), penstock.Timeout)
        assert "'holder'" in str(task.exception())
        assert pauses[-1] - pauses[0] < A_DEADLINE
        return max(after - before for before, after in itertools.pairwise(pauses))

    async def send() -> float:
        return await longest_pause(lambda: inbox.open_async_sender(2).send(LONG, timeout=0.1))

    async def receive() -> float:
        receiver = channel.open_async_receiver(1)
        sender.send(LONG)
        with stopped_within_a_lock(zygote, stopping_reader, str(channel.ticket)):
            pause = await longest_pause(lambda: receiver.receive(timeout=0.1))
        assert await receiver.receive(timeout=20) == LONG
        receiver.close()
        return pause

    with penstock.Inbox(senders=3, name="inbox") as inbox, inbox.open_receiver():
        with stopped_within_a_lock(zygote, stopping_sender, str(inbox.ticket), "pool.locked"):
            assert asyncio.run(send()) < 0.09
    with penstock.Broadcast(receivers=2, on_receiver_death="ignore") as channel, channel.open_sender() as sender:
        assert asyncio.run(receive()) < 0.09


# What has no deadline of its own ends by itself; what has one keeps it.
SHAPE = {"kind": 2, "max_peers": 8, "max_blocks": 16, "has_grants": 1, "pool_nbytes": 1 << 20, "buckets": 16}
LOCK_BOUND = 2.0  # s; native/pool.h, LOCK_NS


def native_holder(talk: Connection, where: str, point: str, ref: tuple[int, ...]) -> None:
    """Takes a block, opens one, and looks a key up, until it is stopped at the point."""
    by = _native.Attachment(_native.Segment.attach(*map(int, where.split())), "holder")
    store = _native.Store(by)
    talk.send(("ready",))
    talk.recv()
    _native.arm_point(point, "stop", 1)
    if point == "block.locked":
        by.open(*ref)
    elif point == "pool.locked":
        by.take(100, 0)
    else:
        store.get(bytes(32))
    talk.send(("went on",))
    talk.recv()


class Shelf:
    """A store of two keys, 1 and 2; a lease of the value of key 1, and one that is being written under key 3."""

    def __init__(self) -> None:
        self.segment = _native.Segment.create("shelf", SHAPE)
        self.by = _native.Attachment(self.segment, "survivor")
        self.store = _native.Store(self.by)
        for name in (1, 2):
            _, lease = self.store.begin(self.key(name), 200_000)
            self.store.commit(lease)
        self.held = self.store.get(self.key(1))
        _, self.filling = self.store.begin(self.key(3), 200_000)

    @staticmethod
    def key(name: int) -> bytes:
        return bytes([name] * 32)

    @contextlib.contextmanager
    def stopped(self, zygote: Zygote, point: str, ref: tuple[int, ...] = ()) -> Iterator[Child]:
        where = " ".join(map(str, self.segment.ticket()))
        with stopped_within_a_lock(zygote, native_holder, where, point, ref) as child:
            yield child


OF_A_BLOCK = ["open", "grant", "revoke", "get", "remove", "clear"]
OF_THE_STORE = ["commit", "get", "get of no key", "abandon", "remove", "clear"]


def in_each_tier(point: str, call: str, *others: str) -> list[Any]:
    """Each takes two seconds: `make test` has one call for each lock."""
    return [(point, call), *tiers.only_in_all(*((point, other) for other in others))]


@pytest.mark.parametrize(
    ("point", "what"),
    in_each_tier("block.locked", *OF_A_BLOCK)
    + in_each_tier("store.locked", *OF_THE_STORE)
    + in_each_tier("pool.locked", "take", "begin of no key"),
)
def test_call_without_deadline_ends_after_two_seconds_at_a_lock(zygote: Zygote, point: str, what: str) -> None:
    shelf = Shelf()
    ref = shelf.held.ref_numbers()
    with shelf.stopped(zygote, point, ref) as child:
        call: Callable[[], object] = {
            "open": lambda: shelf.by.open(*ref),
            "grant": lambda: shelf.by.grant(*ref, 1),
            "revoke": lambda: shelf.by.revoke(*ref, 1),
            "get": lambda: shelf.store.get(shelf.key(1)),
            "get of no key": lambda: shelf.store.get(shelf.key(9)),
            "commit": lambda: shelf.store.commit(shelf.filling),
            "abandon": lambda: shelf.store.abandon(shelf.filling),
            "remove": lambda: shelf.store.remove(shelf.key(1)),
            "clear": shelf.store.clear,
            "begin of no key": lambda: shelf.store.begin(None, 900_000, None),
            "take": lambda: shelf.by.take(100, None),
        }[what]
        began = time.monotonic()
        with pytest.raises(
            penstock.Timeout,
            match=rf"'holder' \(pid {child.pid}, stopped\) for 2\.\d s: let it go on \(kill -CONT {child.pid}\)",
        ):
            call()
        assert LOCK_BOUND <= time.monotonic() - began < LOCK_BOUND + A_DEADLINE
    assert shelf.store.get(shelf.key(1)) is not None or what == "clear"  # of what did not happen, nothing did


def test_put_keeps_its_deadline_while_a_stopped_peer_has_the_value(zygote: Zygote) -> None:
    shelf = Shelf()
    with shelf.stopped(zygote, "block.locked", shelf.held.ref_numbers()) as child:
        for timeout in (0, 0.1):
            must_say(lambda timeout=timeout: shelf.store.begin(shelf.key(1), 10, timeout), penstock.Timeout, child)


def test_value_locked_by_a_stopped_peer_keeps_no_other_value_out(zygote: Zygote) -> None:
    shelf = Shelf()
    with shelf.stopped(zygote, "block.locked", shelf.held.ref_numbers()):
        with thread(lambda: shelf.store.get(shelf.key(1))) as waiting:
            for _ in range(20):
                began = time.monotonic()
                assert shelf.store.get(shelf.key(2)) is not None
                assert time.monotonic() - began < A_DEADLINE
                time.sleep(0.02)
            assert isinstance(waiting.ended().error, penstock.Timeout)


def test_eviction_passes_over_a_value_locked_by_a_stopped_peer(zygote: Zygote) -> None:
    shelf = Shelf()
    ref = shelf.held.ref_numbers()
    shelf.held.release()
    for name in (3, 4, 5):
        shelf.filling.release()
        _, shelf.filling = shelf.store.begin(shelf.key(name), 200_000)
        shelf.store.commit(shelf.filling)
    with shelf.stopped(zygote, "block.locked", ref):  # the one that has not been used for longest
        began = time.monotonic()
        is_new, _ = shelf.store.begin(shelf.key(6), 200_000, 0)
        assert is_new and time.monotonic() - began < A_DEADLINE
    assert [shelf.store.get(shelf.key(name)) is not None for name in (1, 2)] == [True, False]


def test_release_of_an_unfinished_write_waits_for_no_stopped_peer(zygote: Zygote) -> None:
    shelf = Shelf()
    with shelf.stopped(zygote, "block.locked", shelf.filling.ref_numbers()) as child:
        began = time.monotonic()
        shelf.filling.release()
        assert time.monotonic() - began < A_DEADLINE
        go_on(child)
    is_new, _ = shelf.store.begin(shelf.key(3), 10, 20)
    assert is_new


# ── what a stopped peer's lock has put off ───────────────────────────────────────────────────────────────────────────
def test_a_release_that_was_put_off_is_done_soon_after_the_peer_goes_on(zygote: Zygote) -> None:
    with penstock.Broadcast(receivers=2, on_receiver_death="ignore") as channel, channel.open_sender() as sender:
        receiver = channel.open_receiver(1)
        sender.send(LONG)
        lease = receiver.receive_view(timeout=20)
        with stopped_within_a_lock(zygote, stopping_reader, str(channel.ticket)) as child:
            lease.release()
            assert channel.snapshot()["pool"][0]["blocks"] == 1
            go_on(child)
            eventually(lambda: channel.snapshot()["pool"][0]["blocks"] == 0, within=1)
        receiver.close()


@pytest.mark.parametrize("state", ["nothing", "a record that it received"])
def test_closed_place_is_free_soon_after_a_stopped_peer_goes_on(zygote: Zygote, state: str) -> None:
    with penstock.Broadcast(receivers=2, on_receiver_death="ignore") as channel, channel.open_sender() as sender:
        receiver = channel.open_receiver(1, name="closed")
        held = []
        if state != "nothing":
            sender.send(LONG)
            held.append(receiver.receive_view(timeout=20))
        sender.send(LONG)  # pending for it
        with stopped_within_a_lock(zygote, stopping_reader, str(channel.ticket)) as child:
            began = time.monotonic()
            receiver.close()
            assert time.monotonic() - began < A_DEADLINE
            with pytest.raises(ValueError, match="receiver 1 of 'broadcast' is taken: 'closed'"):
                channel.open_receiver(1)
            go_on(child)
            eventually(lambda: channel.snapshot()["receivers"][1]["state"] == "closed", within=1)
            held.clear()
            eventually(lambda: [peer.state for peer in channel.peers() if peer.name == "closed"] == ["left"], within=1)
            with channel.open_receiver(1) as successor:
                sender.send(b"for both", timeout=20)
                assert successor.receive(timeout=20) == b"for both"
        eventually(lambda: channel.snapshot()["pool"][0]["blocks"] == 0)


def test_idle_process_retries_nothing_once_deferred_work_is_done(zygote: Zygote) -> None:
    with penstock.Broadcast(receivers=2, on_receiver_death="ignore") as channel, channel.open_sender() as sender:
        receiver = channel.open_receiver(1)
        sender.send(LONG)
        with stopped_within_a_lock(zygote, stopping_reader, str(channel.ticket)) as child:
            receiver.close()
            go_on(child)
            eventually(lambda: channel.snapshot()["receivers"][1]["state"] == "closed", within=1)
        eventually(lambda: switches_within(0.4) == 0)


def switches_within(seconds: float) -> int:
    """How often other threads of this process had a processor in this time."""

    def count() -> int:
        tasks = [path for path in Path("/proc/self/task").iterdir() if int(path.name) != os.getpid()]
        lines = [line for path in tasks for line in (path / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    before = count()
    time.sleep(seconds)
    return count() - before
