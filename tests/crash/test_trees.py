"""Whole trees that are killed, children of fork(), and pids that are given to another process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import penstock
from penstock import LongRecords, _native, lowlevel
from tests import tiers
from tests.conftest import eventually
from tests.crash.scenes import TOLD_WITHIN, TOLD_WITHIN_WHEN_BUSY, is_busy
from tests.crash.zygote import Zygote
from tests.support.processes import state_of

BLOCK_NBYTES = 8 << 20


def shared_nbytes() -> int:
    """What memory files of the whole machine hold: ours have no other place to be seen."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


def cluster(talk: Connection, depth: int = 2) -> None:
    """A parent with segments, and children and grandchildren in its group that use them."""
    os.setpgid(0, 0)
    pool = lowlevel.Pool.create(BLOCK_NBYTES, name="cluster")
    channel = penstock.Broadcast(receivers=4, name="cluster", long_records=LongRecords(pool_nbytes=64 << 20))
    warnings.simplefilter("ignore")  # newer Pythons warn of fork() with threads
    for _ in range(3):
        if os.fork() == 0:
            receiver = channel.open_receiver()
            mine = lowlevel.Pool.attach(pool.ticket)
            lease = mine.take(1000)
            talk.send(("child", os.getpid()))
            for _ in receiver:
                pass
            del lease
            os._exit(0)
    sender = channel.open_sender()
    memoryview(pool.take(BLOCK_NBYTES // 2))[::4096] = bytes(BLOCK_NBYTES // 2 // 4096)
    while True:
        sender.send(bytes(100_000))


def test_a_tree_that_is_killed_again_and_again_leaves_nothing(zygote: Zygote) -> None:
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    before = [set(os.listdir(place)) for place in places]
    memory = shared_nbytes()
    for _ in range(tiers.TREE_DEATHS):
        child = zygote.child(cluster)
        descendants = [child.hear("child")[1] for _ in range(3)]
        os.killpg(child.pid, signal.SIGKILL)
        child.gone_at()
        eventually(lambda pids=descendants: all(state_of(pid) in ("", "Z", "X") for pid in pids), 20)
        child.close()
        names = [name for place, old in zip(places, before) for name in set(os.listdir(place)) - old]
        assert not [name for name in names if "penstock" in name], names
    eventually(lambda: shared_nbytes() < memory + 4 * BLOCK_NBYTES, 20)  # others use the machine too


# ── fork() ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def forking_user(talk: Connection) -> None:
    """Forks a child in the middle of everything, which uses, drops and collects what it inherited, and exits."""
    warnings.simplefilter("ignore")
    pool = lowlevel.Pool.create(1 << 20, name="forked")
    lease = pool.take(1000)
    memoryview(lease)[:] = b"p" * 1000
    channel = penstock.Ring(name="forked")
    sender, receiver = channel.open_sender(), channel.open_receiver()
    sender.send(b"before")
    view = receiver.receive_view()
    peers = len(pool.peers())
    pid = os.fork()
    if pid == 0:
        errors = []
        for use in (lambda: sender.send(b"x"), receiver.receive, lambda: receiver.receive_nowait()):
            try:
                use()
                errors.append("no error")
            except penstock.ClosedError:
                pass
        sender.close()
        receiver.close()
        del lease, view, sender, receiver, channel
        gc.collect()
        own = pool.take(100)  # the handle goes on, as another peer
        talk.send(("child", errors, len(pool.peers())))
        own.release()
        pool.close()
        gc.collect()
        sys.exit(0)  # with all destructors
    _, status = os.waitpid(pid, 0)
    sender.send(b"after")
    assert bytes(memoryview(view)) == b"before"
    del view
    assert receiver.receive(timeout=10) == b"after"
    assert bytes(memoryview(lease)) == b"p" * 1000
    stats = pool.stats()
    talk.send(("parent", status, peers, stats.blocks, [holder.blocks for holder in stats.holders]))
    del lease
    eventually(lambda: pool.stats().blocks == 0)
    talk.send(("done",))


def test_a_child_of_fork_disturbs_nothing_of_its_parents(zygote: Zygote) -> None:
    child = zygote.child(forking_user)
    try:
        assert child.hear("child") == ("child", [], 2)
        assert child.hear("parent") == ("parent", 0, 1, 1, [1])
        child.hear("done")
    finally:
        child.close()


def fork_and_die(talk: Connection, where: str) -> None:
    """Its child outlives it with everything it inherited; it is dead all the same."""
    warnings.simplefilter("ignore")
    sender = penstock.attach(where).open_sender(name="parent")
    sender.send(b"x")
    if os.fork() == 0:
        talk.send(("child", os.getpid()))
        time.sleep(60)
        os._exit(0)
    time.sleep(60)


def test_a_parent_is_dead_though_its_child_lives(zygote: Zygote) -> None:
    with penstock.Ring() as ring, ring.open_receiver() as receiver:
        child = zygote.child(fork_and_die, str(ring.ticket))
        try:
            assert receiver.receive(timeout=20) == b"x"
            orphan = child.hear("child")[1]
            child.kill()
            gone_at = child.gone_at()
            with pytest.raises(penstock.PeerDied, match="'parent'") as caught:
                receiver.receive(timeout=20)
            late = time.monotonic() - gone_at
            assert caught.value.pid == child.pid
            assert late < (TOLD_WITHIN_WHEN_BUSY if is_busy() else TOLD_WITHIN), f"told after {late:.3f} s"
            os.kill(orphan, signal.SIGKILL)
        finally:
            child.close()


# ── identities ───────────────────────────────────────────────────────────────────────────────────────────────────────
PEERS_OFFSET, SLOT_NBYTES = 4096, 128  # layout.h: where the table of peers lies


def test_reused_pid_does_not_keep_a_dead_process_alive(zygote: Zygote) -> None:
    import mmap

    pool = lowlevel.Pool.create(1 << 20, name="pool")
    lease = pool.take(100)
    with mmap.mmap(pool.fd, PEERS_OFFSET + 32 * SLOT_NBYTES) as control:
        start = _native.start_ticks(os.getpid())
        forged = (1 << 60) | (os.getpid() << 38) | (start - 1)  # live; our pid; a process that started earlier
        at = PEERS_OFFSET + 1 * SLOT_NBYTES
        control[at : at + 8] = forged.to_bytes(8, "little")
        own = int.from_bytes(control[PEERS_OFFSET : PEERS_OFFSET + 8], "little")
        assert own == (1 << 60) | (os.getpid() << 38) | start
    other = lowlevel.Pool.attach(pool.ticket)  # each process that joins makes the others look
    other.join()
    eventually(lambda: {peer.index: peer.state for peer in pool.peers()}[1] == "dead")
    assert {peer.index: peer.state for peer in pool.peers()}[0] == "live"
    lease.release()
    other.close()
    pool.close()
