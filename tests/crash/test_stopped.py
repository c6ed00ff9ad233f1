"""SIGSTOP is not death: a stopped peer is named as such, keeps what it holds, and goes on when it may."""

from __future__ import annotations

import os
import re
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import penstock
from penstock import _native
from tests.conftest import eventually
from tests.crash.scenes import Scene
from tests.crash.zygote import Child, Zygote


def is_stopped(child: Child) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(child: Child) -> None:
    child.kill(signal.SIGSTOP)
    eventually(lambda: is_stopped(child))


def sleepy_receiver(talk: Connection, where: str) -> None:
    with penstock.attach(where).receiver(name="sleeper") as end:
        talk.send(("ready",))
        talk.send(("got", [int(record) for record in end]))


def holder(talk: Connection, where: str, point: str) -> None:
    """Takes and gives back blocks until it is stopped at the point, holding a lock."""
    pool = penstock.Pool.attach(where, peer_name="holder")
    kept = pool.take(1000)
    talk.send(("ready", list(_ref(pool, kept))))
    talk.recv()
    _native.arm_point(point, "stop", 1)
    for _ in range(100):
        pool.take(100).release()
    talk.send(("went on",))
    talk.recv()
    kept.release()
    pool.close()
    talk.send(("closed",))


def _ref(pool: penstock.Pool, lease: penstock.Lease) -> tuple[int, ...]:
    ref = pool.share(lease)
    return ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes


def test_a_full_ring_names_the_stopped_receiver_and_it_resumes(zygote: Zygote) -> None:
    with penstock.open_ring(capacity=4096) as ring, ring.sender() as sender:
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
        with scene.channel.receiver() as receiver:
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


def test_a_stopped_receiver_of_a_broadcast_keeps_what_it_holds_and_misses_nothing(zygote: Zygote) -> None:
    with Scene(zygote, "broadcast") as scene:
        scene.fill()
        scene.must_flow()
        one = next(one for one in scene.cast if one.role == "receiver" and one.index == 1)
        stop(one)
        stalled = scene.board.received(one.actor)
        sender = scene.others("receiver")[0]
        eventually(
            lambda: (
                (before := scene.board.sent(sender.actor)) == (time.sleep(0.2), scene.board.sent(sender.actor))[1]
                and before
            ),
            20,
        )
        (peer,) = [peer for peer in scene.channel.peers() if peer.pid == one.pid]
        assert peer.state == "stopped"
        assert scene.channel.snapshot()["receivers"][1]["state"] == "live"
        assert scene.board.received(one.actor) <= stalled + 1
        one.kill(signal.SIGCONT)
        scene.must_flow()
        scene.finish()


@pytest.mark.parametrize("point", ["block.locked", "pool.locked"])
def test_a_peer_that_is_stopped_with_a_lock_keeps_it_and_nobody_dies_of_that(zygote: Zygote, point: str) -> None:
    pool = penstock.Pool.create(1 << 20, name="pool", peer_name="survivor")
    own = pool.take(1000)
    child = zygote.child(holder, str(pool.ticket), point)
    try:
        ref = penstock.Ref(*child.hear("ready")[1])
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
    pool = penstock.Pool.attach(where, peer_name="leaver")
    talk.send(("ready",))
    leases = [pool.take(100) for _ in range(8)]
    talk.send(("taken",))
    talk.recv()
    pool.close()
    del leases  # gives back, and leaves, while somebody is stopped with a lock
    talk.send(("left",))


def test_leaving_while_somebody_is_stopped_with_a_lock_is_no_crash(zygote: Zygote) -> None:
    pool = penstock.Pool.create(1 << 20, name="pool", peer_name="survivor")
    pool.join()
    stopped = zygote.child(holder, str(pool.ticket), "block.locked")
    other = zygote.child(leaver, str(pool.ticket))
    try:
        stopped.hear("ready")
        other.hear("taken")
        stopped.talk.send("go")
        eventually(lambda: is_stopped(stopped), 20)
        other.talk.send("go")
        other.hear("left")
        other.gone_at()
        stopped.kill(signal.SIGCONT)
        stopped.hear("went on")
        stopped.talk.send("go")
        stopped.hear("closed")
        stopped.gone_at()
        eventually(lambda: pool.stats().blocks == 0)
    finally:
        stopped.close()
        other.close()
        pool.close()


def test_one_that_dies_while_it_is_stopped_is_dead(zygote: Zygote) -> None:
    with Scene(zygote, "broadcast") as scene:
        scene.fill()
        scene.must_flow()
        victim = next(one for one in scene.cast if one.role == "receiver")
        stop(victim)
        victim.kill()
        scene.must_be_told(victim, scene.bury(victim))
        scene.must_be_reaped(victim)
        scene.add("receiver", victim.index).hear("ready")
        scene.must_flow()
        scene.finish()
        assert os.getpid()
