"""Strangers at a listener, below, at and beyond its limits: a node joins, and nothing grows."""

import contextlib
import os
import queue
import random
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from penstock.bridge import Link, LinkSpec, Listener, Tls, connect
from penstock.bridge.handshake import make_knock
from penstock.bridge.handshake_pool import MAX_HANDSHAKES
from penstock.bridge.link_errors import RefusalKind
from penstock.bridge.wire import TlsWire
from tests.conftest import eventually
from tests.support.certificates import make_certificates
from tests.support.links import SECRET, RunningLink
from tests.support.processes import program
from tests.support.relay import relay
from tests.support.strangers import first_hello, flood
from tests.tiers import FLOODS, REFUSALS, only_in_all

HERE = ("127.0.0.1", 0)
HOME, AWAY = LinkSpec("group 0", 1, "home"), LinkSpec("group 0", 1, "away")
JOIN_S = 30.0  # a watchdog. A node joins within 1 s; a listener with 16 handshakes at a time took 20 s and more
MAX_HELLOS = 1_000  # strangers that each have a processor of the listener read a ClientHello
CROWD_S = 20.0  # until processes of strangers have started


class Home:
    """A listener that a thread has accept so many links, one after the other."""

    def __init__(self, listener: Listener, joins: int) -> None:
        self.listener = listener
        self.joins = joins
        self._links: queue.Queue[Link] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for _ in range(self.joins):
            self._links.put(self.listener.accept(HOME, timeout=CROWD_S + 3 * JOIN_S))

    def require_joins(self, address: tuple[str, int] | None = None, tls: Tls | None = None) -> None:
        for _ in range(self.joins):
            with connect(address or self.listener.address, AWAY, secret=SECRET, tls=tls, timeout=JOIN_S):
                self.leave()

    def leave(self) -> None:
        self._links.get(timeout=JOIN_S).close()

    def close(self) -> None:
        self._thread.join()


# A node in another process.
CONNECTOR = """
    from penstock.bridge import LinkSpec, connect
    address, spec = (sys.argv[1], int(sys.argv[2])), LinkSpec("group 0", 1, "away")
    while hear() == "join":
        with connect(address, spec, secret=bytes(range(32)), timeout=30):
            say("joined")
"""


@contextlib.contextmanager
def home(tls: Tls | None = None, joins: int = 3) -> Iterator[Home]:
    with Listener(HERE, secret=SECRET, tls=tls) as listener:
        side = Home(listener, joins)
        try:
            yield side
        finally:
            side.close()


def require_crowd(listener: Listener) -> None:
    """Waits until the listener has given up more strangers than it holds."""
    eventually(lambda: sum(listener.refusals.values()) > MAX_HANDSHAKES, within=CROWD_S)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "ours")
    return tls_of(folder)


def tls_of(folder: Path) -> Tls:
    return Tls(str(folder / "ours.pem"), str(folder / "ours.key"), str(folder / "ours-ca.pem"))


def client_hello(tls: Tls, knock: bytes) -> bytes:
    """The first bytes of a connector with TLS."""
    ours, remote = socket.socketpair()
    with remote:
        wire = TlsWire(ours, tls.context(is_server=False), knock=knock)
        wire.send([b""])
        data = remote.recv(1 << 16)
        wire.close(is_aborted=True)
    return data


# ── a node joins ──
@pytest.mark.parametrize("count", FLOODS)
@pytest.mark.parametrize("is_dripping", [False, True], ids=["silent", "dripping"])
def test_node_joins_among_strangers(count: int, is_dripping: bool) -> None:
    data = first_hello() if is_dripping else b""
    with home() as side, flood(side.listener.address, count, data, is_dripping=is_dripping):
        if count > MAX_HANDSHAKES:
            require_crowd(side.listener)
        side.require_joins()


@pytest.mark.parametrize("way", ["silent", *only_in_all("hello", "dripping")])
def test_node_joins_over_tls_at_a_long_round_trip(way: str, tls: Tls) -> None:
    data = b"" if way == "silent" else client_hello(tls, bytes(32))
    count = min(FLOODS[-1], MAX_HELLOS) if way == "hello" else FLOODS[-1]
    with (
        home(tls) as side,
        relay(side.listener.address) as path,
        flood(side.listener.address, count, data, is_dripping=way == "dripping"),
    ):
        path.delay_s = 0.05  # in each direction
        require_crowd(side.listener)
        side.require_joins(path.address, tls)


@pytest.mark.parametrize("with_tls", [False, *only_in_all(True)], ids=["plain", "tls"])
def test_node_joins_among_recorded_knocks(with_tls: bool, tls: Tls) -> None:
    """A knock counts once: strangers that send a recorded knock stay strangers."""
    knock = make_knock(SECRET)
    own = tls if with_tls else None
    data = client_hello(tls, knock) if with_tls else first_hello(knock)
    with home(own, joins=1) as side, flood(side.listener.address, FLOODS[-1], data):
        require_crowd(side.listener)
        side.require_joins(tls=own)


@pytest.mark.parametrize("spare", [1024, *only_in_all(512), 40], ids=str)
def test_node_joins_when_descriptors_are_few(spare: int) -> None:
    """`spare`: the limit of descriptors beyond those that the process has; 1024: the limit itself."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with home() as side, program(CONNECTOR, *side.listener.address) as node, flood(side.listener.address, FLOODS[-1]):
        limit = spare if spare == 1024 else len(os.listdir("/proc/self/fd")) + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            require_crowd(side.listener)
            for _ in range(side.joins):
                node.say("join")
                assert node.hear() == "joined"
                side.leave()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("with_tls", [False, *only_in_all(True)], ids=["plain", "tls"])
def test_link_goes_on_among_strangers(with_tls: bool, tls: Tls) -> None:
    own = tls if with_tls else None
    specs = replace(HOME, silence_s=JOIN_S), replace(AWAY, silence_s=JOIN_S)
    with Listener(HERE, secret=SECRET, tls=own) as listener, relay(listener.address) as path:
        with ThreadPoolExecutor() as threads:
            accepting = threads.submit(listener.accept, specs[0], timeout=JOIN_S)
            away = RunningLink(connect(path.address, specs[1], secret=SECRET, tls=own, timeout=JOIN_S))
            home = RunningLink(accepting.result())
        with flood(listener.address, FLOODS[-1]):
            require_crowd(listener)
            path.reset()
            eventually(lambda: home.link.stats().resumptions and away.link.stats().resumptions, within=JOIN_S)
        for side in (home, away):
            side.end()


def test_dripping_bytes_do_not_extend_a_handshake() -> None:
    with home(joins=1) as side, flood(side.listener.address, 1, first_hello(), is_dripping=True):
        eventually(lambda: side.listener.refusals["silent"] > 0, within=CROWD_S)
        side.require_joins()


# ── nothing grows ──
def test_refusals_have_fixed_keys(seed: int) -> None:
    chance = random.Random(seed)
    with home(joins=1) as side:
        for number in range(REFUSALS):
            with socket.create_connection(side.listener.address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(struct.pack("<I", 257 * number) + chance.randbytes(257))
        eventually(lambda: sum(side.listener.refusals.values()) >= REFUSALS)
        assert set(side.listener.refusals) <= set(get_args(RefusalKind))
        assert len(side.listener.last_refusal) < 1_000
        side.require_joins()


def test_client_hello_carries_the_knock(tls: Tls) -> None:
    """A listener with TLS tells nodes from strangers before it computes a signature."""
    knock = make_knock(SECRET)
    assert knock[:16].hex().encode() in client_hello(tls, knock)
