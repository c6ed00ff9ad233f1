"""Endings that a pidfd tells late, or never: of a process with much memory, and of one that replaces itself by exec."""

import os
import time
from pathlib import Path

import pytest

import penstock
from penstock import MemoryExhausted, PeerDied
from penstock.channel import Channel
from penstock.lowlevel import Pool
from tests.conftest import eventually
from tests.support.processes import DYING, assert_how, program, soon

PEERS, PEER_NBYTES, WATCHER = 4096, 128, 112  # native/layout.h: where slots begin, their size, the robust futex in one
OWNER_DIED = 0x40000000

# A peer of a channel and of a pool, that holds a block of it.
PEER = """
channel = penstock.attach(sys.argv[1])
pool = lowlevel.Pool.attach(sys.argv[2], peer_name="peer")
lease = pool.take(1 << 20)
sender = channel.open_sender(name="peer")
sender.send(b"ready")
"""
EXEC = """
hear()
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
"""


def states(shared: "Channel | Pool") -> dict[str, str]:
    return {peer.name: peer.state for peer in shared.peers()}


def test_exec_is_a_death_within_100_ms_and_returns_blocks() -> None:
    def measure() -> float:
        pool = Pool.create(1 << 20, peer_name="survivor")
        pool.join()
        with penstock.Ring() as channel, channel.open_receiver() as receiver:
            with program(PEER + EXEC, channel.ticket, pool.ticket) as other:
                assert receiver.receive(timeout=10) == b"ready"
                with pytest.raises(MemoryExhausted):
                    pool.take(1 << 20)
                started = time.monotonic()
                other.say("exec")
                with pytest.raises(PeerDied, match=r"replaced by another program \(exec\)"):
                    receiver.receive(timeout=10)
                took = time.monotonic() - started
                pool.take(1 << 20, timeout=5).release()
                assert states(pool) == {"survivor": "live", "peer": "dead"}
                assert other.process.poll() is None
                return took

    soon(measure)


def test_a_lock_that_another_thread_held_at_an_exec_is_taken_over() -> None:
    pool = Pool.create(2 << 20, peer_name="survivor", max_peers=2)
    pool.join()
    with penstock.Ring() as channel, channel.open_receiver() as receiver:
        with program(PEER + EXEC, channel.ticket, pool.ticket) as other:
            assert receiver.receive(timeout=10) == b"ready"
            peer = next(peer for peer in pool.peers() if peer.name == "peer")
            lock = (peer.index + 1) | peer.epoch << 9
            os.pwrite(pool.fd, lock.to_bytes(4, "little"), PEERS + 2 * PEER_NBYTES)
            with pytest.raises(penstock.Timeout, match=rf"held by 'peer' \(pid {other.pid}\)"):
                pool.take(64)
            other.say("exec")
            eventually(lambda: states(pool)["peer"] == "dead")
            pool.take(2 << 20).release()


def test_next_peer_notices_an_exec_that_had_no_survivor() -> None:
    pool = Pool.create(1 << 20, peer_name="next")
    channel = penstock.Ring()
    with program(PEER + 'say("ready")' + EXEC, channel.ticket, pool.ticket) as other:
        assert other.hear() == "ready"
        other.say("exec")
        eventually(lambda: Path(f"/proc/{other.pid}/cmdline").read_bytes().endswith(b"time.sleep(60)\0"))
        pool.take(1 << 20, timeout=5).release()
        eventually(lambda: states(pool) == {"next": "live", "peer": "dead"})  # its block comes back first
        assert other.process.poll() is None


def test_a_process_that_joins_again_after_an_exec_is_another_peer() -> None:
    again = """
import sys
from penstock import lowlevel
pool = lowlevel.Pool.attach(sys.argv[1], peer_name="after")
with pool.take(100) as lease:
    print("again", flush=True)
    sys.stdin.readline()
    print(len(bytes(lease)), flush=True)
sys.stdin.readline()
"""
    source = f"""
pool = lowlevel.Pool.attach(sys.argv[1], peer_name="before")
lease = pool.take(1000)
say("ready")
hear()
os.execv(sys.executable, [sys.executable, "-c", {again!r}, sys.argv[1]])
"""
    pool = Pool.create(1 << 20, peer_name="survivor")
    pool.join()
    with program(source, pool.ticket, env=DYING) as other:
        assert other.hear() == "ready"
        other.say("exec")
        assert other.hear() == "again"
        eventually(lambda: states(pool) == {"survivor": "live", "before": "dead", "after": "live"})
        time.sleep(0.3)
        other.say("look")
        assert other.hear() == "100"
        assert states(pool)["after"] == "live"
        other.kill()
        eventually(lambda: states(pool)["after"] == "dead")
        assert pool.stats().blocks == 0


def test_large_process_is_dead_before_its_memory_and_blocks_are_freed() -> None:
    source = """
weights = bytearray(1 << 30)
for at in range(0, len(weights), 4096):
    weights[at] = 1
say("large")
hear()
"""

    def measure() -> float:
        pool = Pool.create(1 << 20, peer_name="survivor")
        pool.join()
        with penstock.Ring() as channel, channel.open_receiver() as receiver:
            with program(PEER + source, channel.ticket, pool.ticket) as other:
                assert receiver.receive(timeout=10) == b"ready"
                assert other.hear() == "large"
                killed_at = other.kill()
                with pytest.raises(PeerDied) as output:
                    receiver.receive(timeout=10)
                took = time.monotonic() - killed_at
                if output.value.held == "what has not been given back yet":
                    if states(pool)["peer"] == "dying":
                        assert pool.stats().blocks == 1 or states(pool)["peer"] == "dead"
                assert_how(output.value, "killed by SIGKILL", channel.peers)
                eventually(lambda: states(pool)["peer"] == "dead")
                assert pool.stats().blocks == 0
                return took

    soon(measure)


@pytest.mark.parametrize("word", [0, OWNER_DIED, OWNER_DIED | 0x80000000, 0xFFFFFFFF, 1], ids=hex)
def test_forged_robust_futex_mark_is_no_death(word: int) -> None:
    source = """
pool = lowlevel.Pool.attach(sys.argv[1], peer_name="peer")
lease = pool.take(100)
say("ready")
hear()
say(len(bytes(lease)))
hear()
"""
    pool = Pool.create(1 << 20, peer_name="survivor")
    pool.join()
    with program(source, pool.ticket, env=DYING) as other:
        assert other.hear() == "ready"
        assert states(pool)["peer"] == "live"
        slot = next(peer.index for peer in pool.peers() if peer.name == "peer")
        os.pwrite(pool.fd, word.to_bytes(4, "little"), PEERS + slot * PEER_NBYTES + WATCHER)
        guest = Pool.attach(pool.ticket, peer_name="guest")
        with program("lowlevel.Pool.attach(sys.argv[1]).join(); hear()", pool.ticket):  # so that all look again
            guest.join()
            time.sleep(0.3)
            assert states(pool)["peer"] == "live"
            other.say("look")
            assert other.hear() == "100"
        other.kill()
        eventually(lambda: states(pool)["peer"] == "dead")
        assert pool.stats().blocks == 0
