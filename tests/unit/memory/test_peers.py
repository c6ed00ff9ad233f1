"""Peers: name, number and state; departures and deaths with causes, found at once without a send."""

import contextlib
import gc
import os
import signal
from collections.abc import Callable

import pytest

import penstock
from penstock import MemoryExhausted, PeerDied, _native, lowlevel
from penstock.lowlevel import Pool
from tests.conftest import eventually
from tests.support.processes import DYING, Program, forked, program, soon

PEER = """
pool = lowlevel.Pool.attach(sys.argv[1], peer_name=sys.argv[2])
say(pool.join().index)
while True:
    word = hear()
    if word == "peers":
        say([(peer.name, peer.state, peer.how) for peer in pool.peers()])
    elif word == "wait for a death":
        # Nobody asks: the table is read from outside, without looking after anybody.
        while all(peer["state"] not in ("dead",) for peer in penstock._native.snapshot(os.dup(pool.fd))["peers"]):
            time.sleep(0.0005)
        say(time.monotonic())
    elif word == "exit":
        os._exit(7)
    elif word == "leave":
        break
"""


def named(pool: Pool) -> dict[str, lowlevel.Peer]:
    return {peer.name: peer for peer in pool.peers()}


def test_peer_joins_at_first_use_and_is_listed_by_name_pid_and_number() -> None:
    pool = Pool.create(4096, peer_name="first")
    assert "first" not in [peer["name"] for peer in _native.snapshot(os.dup(pool.fd))["peers"]]
    assert pool.peer == lowlevel.Peer(index=0, epoch=1, pid=os.getpid(), name="first", state="live", how="")
    other = Pool.attach(pool.ticket)
    assert other.join("second").name == "second"
    assert [peer.name for peer in pool.peers()] == ["first", "second"]
    assert other.peers() == pool.peers()


def test_peer_without_a_name_is_named_after_its_pid() -> None:
    pool = Pool.create(4096)
    assert pool.peer.name == f"pid {os.getpid()}"


def test_join_twice_returns_the_same_peer() -> None:
    pool = Pool.create(4096)
    assert pool.join("a") == pool.join() == pool.peer
    assert len(pool.peers()) == 1


def test_slot_of_a_peer_that_left_is_reused_with_a_new_epoch() -> None:
    pool = Pool.create(4096, max_peers=2, peer_name="stays")
    pool.join()
    for generation in range(1, 6):
        other = Pool.attach(pool.ticket, peer_name=f"guest {generation}")
        peer = other.join()
        assert (peer.index, peer.epoch, peer.state) == (1, generation, "live")
        other.close()
        assert named(pool)[f"guest {generation}"].state == "left"
    assert len(pool.peers()) == 2


def test_join_is_refused_when_all_peer_slots_are_taken() -> None:
    pool = Pool.create(4096, max_peers=2, name="small")
    pool.join()
    other = Pool.attach(pool.ticket)
    other.join()
    with Pool.create(4096, max_peers=1, name="own") as own:
        own.join()
        with pytest.raises(MemoryExhausted, match="segment 'own' has 1 peer and no place"):
            Pool.attach(own.ticket).join()
    with pytest.raises(MemoryExhausted, match="segment 'small' has 2 peers and no place for one more: raise max_peers"):
        Pool.attach(pool.ticket).join()
    other.close()
    del other
    gc.collect()
    Pool.attach(pool.ticket).join()


@pytest.mark.parametrize("kind", ["", "async_"], ids=["synchronous", "asynchronous"])
def test_a_closed_end_has_left(kind: str) -> None:
    channel = penstock.Ring()
    ends = [getattr(channel, f"open_{kind}{end}")(name=end) for end in ("sender", "receiver")]
    assert [peer.state for peer in channel.peers()] == ["live", "live"]
    for end in ends:
        end.close()
    assert [peer.state for peer in channel.peers()] == ["left", "left"]


@pytest.mark.parametrize(
    ("end", "how", "is_listed"),
    [
        (lambda other: other.kill(signal.SIGKILL), "killed by SIGKILL", False),
        (lambda other: other.kill(signal.SIGABRT), "killed by SIGABRT", True),
        (lambda other: other.say("exit"), "exit status 7", True),
    ],
    ids=["SIGKILL", "SIGABRT", "exit 7"],
)
def test_dead_peer_has_the_cause_of_its_death(end: Callable[[Program], object], how: str, is_listed: bool) -> None:
    """A survivor watches a peer from its join on: the survivor need not have listed the peer."""
    pool = Pool.create(4096)
    pool.join("survivor")
    with program(PEER, pool.ticket, "victim", env=DYING) as other:
        assert other.hear() == "1"
        if is_listed:
            assert named(pool)["victim"].state == "live"
        end(other)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        eventually(lambda: named(pool)["victim"].state == "dead")
        peer = named(pool)["victim"]
        assert (peer.index, peer.pid, peer.how) == (1, other.pid, how)


def test_process_that_is_not_the_parent_notices_a_death() -> None:
    def measure() -> float:
        pool = Pool.create(4096)  # we do not join
        with program(PEER, pool.ticket, "victim") as victim, program(PEER, pool.ticket, "other") as other:
            victim.hear()
            other.hear()
            other.say("wait for a death")
            killed_at = victim.kill()
            return float(other.hear()) - killed_at

    soon(measure)


def test_next_peer_notices_a_death_that_had_no_survivor() -> None:
    pool = Pool.create(4096)
    with program(PEER, pool.ticket, "victim") as victim:
        assert victim.hear() == "0"
        victim.kill()
        victim.process.wait()
    pool.join("next")
    assert named(pool)["victim"].state == "dead"


def test_blocks_of_a_dead_peer_are_free_when_the_peer_is_dead() -> None:
    source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="victim")
        leases = [pool.take(100) for _ in range(10)]
        say("ready")
        hear()
    """
    pool = Pool.create(4096)
    pool.join("survivor")
    with program(source, pool.ticket) as other:
        assert other.hear() == "ready"
        assert pool.stats().blocks == 10
        other.kill()
        eventually(lambda: named(pool)["victim"].state == "dead")
        assert pool.stats().blocks == 0
        table = {peer["name"]: peer for peer in _native.snapshot(os.dup(pool.fd))["peers"]}
        assert (table["victim"]["reaped_blocks"], table["victim"]["reaped_nbytes"]) == (10, 1000)
        assert table["survivor"]["reaps"] == 1


def test_stopped_peer_is_named_and_keeps_its_blocks() -> None:
    source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="sleeper")
        lease = pool.take(100)
        say("ready")
        hear()
        say(len(bytes(lease)))
    """
    pool = Pool.create(4096)
    pool.join("survivor")
    with program(source, pool.ticket) as other:
        assert other.hear() == "ready"
        other.kill(signal.SIGSTOP)
        eventually(lambda: named(pool)["sleeper"].state == "stopped")
        assert pool.stats().blocks == 1
        with pytest.raises(MemoryExhausted, match=r"'sleeper'.*stopped"):
            pool.take(4096)
        other.kill(signal.SIGCONT)
        eventually(lambda: named(pool)["sleeper"].state == "live")
        other.say("go on")
        assert other.hear() == "100"


def test_process_identity_is_pid_and_start_time() -> None:
    pid, start = _native.process_identity()
    assert (pid, start) == (os.getpid(), _native.start_ticks(os.getpid()))
    with pytest.raises(OSError, match=r"pid 4194305: reading /proc/PID/stat: No such file"):
        _native.start_ticks(2**22 + 1)

    def in_the_child() -> None:
        assert _native.process_identity() == (os.getpid(), _native.start_ticks(os.getpid()))
        assert os.getpid() != pid

    assert forked(in_the_child) == 0
    assert _native.process_identity() == (pid, start)


def test_peer_with_parentheses_in_its_process_name_is_watched() -> None:
    source = """
        open("/proc/self/comm", "w").write(") R 1 (x")
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="odd")
        pool.join()
        say("ready")
        hear()
    """
    pool = Pool.create(4096)
    pool.join()
    with program(source, pool.ticket) as other:
        assert other.hear() == "ready"
        assert named(pool)["odd"].state == "live"
        other.kill()
        eventually(lambda: named(pool)["odd"].state == "dead")


def test_death_is_noticed_in_each_segment_of_the_process() -> None:
    source = """
        ends = []
        for ticket in sys.argv[1:]:
            ends.append(penstock.attach(ticket).open_sender(name="victim"))
        say("ready")
        hear()
    """
    channels = [penstock.Ring(name=f"ring {number}") for number in range(5)]
    receivers = [channel.open_receiver() for channel in channels]
    with program(source, *(channel.ticket for channel in channels)) as other:
        assert other.hear() == "ready"
        other.kill()
        for receiver in receivers:
            with pytest.raises(PeerDied):
                receiver.receive(timeout=5)
    for receiver in receivers:
        receiver.close()


def test_watcher_sleeps_after_a_death_when_a_forked_child_has_its_files() -> None:
    source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="parent")
        pool.join()
        hear()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say("forked")
        hear()
        wait_for(lambda: any(peer.state == "dead" for peer in pool.peers()))
        before = time.process_time()
        time.sleep(0.4)
        say(time.process_time() - before)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    """
    pool = Pool.create(4096)
    with program(source, pool.ticket) as parent, program(PEER, pool.ticket, "victim") as victim:
        victim.hear()
        eventually(lambda: "parent" in named(pool))
        parent.say("fork")
        assert parent.hear() == "forked"
        victim.kill()
        parent.say("measure")
        assert float(parent.hear()) < 0.12  # it was 0.3


def test_one_thread_watches_all_peers() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    pools = [Pool.create(4096) for _ in range(5)]
    others: list[Program] = []
    with contextlib.ExitStack() as stack:
        for pool in pools:
            pool.join()
            others.append(stack.enter_context(program(PEER, pool.ticket, "other")))
        for other in others:
            other.hear()
        for pool in pools:
            pool.peers()
        assert threads() <= before + 5  # the watchdogs of the programs, and nothing of ours
