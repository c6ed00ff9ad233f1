"""Links begin over TCP: refusals, their counts, and connections that delay no other connection."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from penstock import Timeout
from penstock.bridge import BridgeRefused, Link, LinkSpec, Listener, Tls, connect
from penstock.bridge.handshake_pool import HANDSHAKE_S, MAX_HANDSHAKES
from penstock.bridge.link_errors import RefusalKind
from tests.conftest import eventually
from tests.support.certificates import make_certificates
from tests.support.links import SECRET

HERE = ("127.0.0.1", 0)
HOME = LinkSpec("group 0", 1, "home")
AWAY = LinkSpec("group 0", 1, "away")


class Accepting:
    """A thread that waits for a link."""

    def __init__(self, listener: Listener, *awaited: LinkSpec, timeout: float = 10.0) -> None:
        self._found: Link | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(listener, awaited, timeout))
        self._thread.start()

    def _run(self, listener: Listener, awaited: tuple[LinkSpec, ...], timeout: float) -> None:
        try:
            self._found = listener.accept(*awaited, timeout=timeout)
        except BaseException as error:
            self._found = error

    def link(self) -> Link:
        self._thread.join(20)
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None, "accept still waits"
        return self._found


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(HERE, secret=SECRET) as listener:
        yield listener


def test_a_link_begins_at_any_free_port(listener: Listener) -> None:
    assert listener.address[0] == "127.0.0.1" and listener.address[1] > 0
    accepting = Accepting(listener, HOME)
    with connect(listener.address, AWAY, secret=SECRET, timeout=10) as away, accepting.link() as home:
        assert (home.remote.name, away.remote.name) == ("away", "home")
        assert home.remote.pid == os.getpid() and home.remote.address is not None
        assert not listener.refusals


def test_connector_waits_for_a_listener() -> None:
    with Listener(HERE, secret=SECRET) as first:
        address = first.address
    links: list[Link] = []
    thread = threading.Thread(target=lambda: links.append(connect(address, AWAY, secret=SECRET, timeout=10)))
    thread.start()
    with Listener(address, secret=SECRET) as listener:
        home = Accepting(listener, HOME).link()
        thread.join(10)
        for link in (home, *links):
            link.close()
    assert len(links) == 1


def test_a_link_that_does_not_come_is_a_timeout_on_either_side(listener: Listener) -> None:
    with pytest.raises(Timeout, match="no other side of 'group 0' came to"):
        listener.accept(HOME, timeout=0.05)
    with pytest.raises(Timeout, match=r"no link 'group 0' with 127.0.0.1:\d+ within 0.2 s: the listener said nothing"):
        connect(listener.address, AWAY, secret=SECRET, timeout=0.2)
    address = listener.address
    listener.close()
    with pytest.raises(Timeout, match="refused"):
        connect(address, AWAY, secret=SECRET, timeout=0.1)


def test_strangers_are_refused_with_a_reason_and_the_node_connects(listener: Listener) -> None:
    accepting = Accepting(listener, HOME)
    with pytest.raises(BridgeRefused, match="the secret is another one"):
        connect(listener.address, AWAY, secret=bytes(32), timeout=5)
    with pytest.raises(BridgeRefused, match="the epoch is 1 here, 2 there"):
        connect(listener.address, replace(AWAY, epoch=2), secret=SECRET, timeout=5)
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stranger.recv(1 << 16) == b"", "it is told nothing"
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(b"\x04\0\0\0junk")
        assert b"does not speak the protocol of a bridge" in stranger.recv(1 << 16)
    with connect(listener.address, AWAY, secret=SECRET, timeout=5), accepting.link():
        assert sum(listener.refusals.values()) >= 4
        assert {"secret", "unfit", "foreign"} <= set(listener.refusals) <= set(get_args(RefusalKind))
        assert "127.0.0.1:" in listener.last_refusal


def test_silent_strangers_delay_no_link_and_are_dropped(listener: Listener) -> None:
    with socket.create_connection(listener.address) as silent:
        accepting = Accepting(listener, HOME)
        assert silent.recv(1) == b"", "it is closed after a while"
        with connect(listener.address, AWAY, secret=SECRET, timeout=10), accepting.link():
            assert listener.refusals["silent"] == 1
    with contextlib.ExitStack() as strangers:
        for _ in range(MAX_HANDSHAKES - 1):
            strangers.enter_context(socket.create_connection(listener.address))
        accepting = Accepting(listener, HOME)
        began = time.monotonic()
        with connect(listener.address, AWAY, secret=SECRET, timeout=10), accepting.link():
            assert time.monotonic() - began < HANDSHAKE_S


def test_stranger_announcing_a_long_message_is_refused_before_reading(listener: Listener) -> None:
    accepting = Accepting(listener, HOME)
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall((1 << 30).to_bytes(4, "little"))
        assert stranger.recv(1) == b""
    with connect(listener.address, AWAY, secret=SECRET, timeout=10), accepting.link():
        assert "expected a message of up to 256 bytes, got one of 1073741824" in listener.last_refusal


def test_listener_goes_on_after_a_connection_lost_in_the_handshake(listener: Listener) -> None:
    accepting = Accepting(listener, HOME)
    socket.create_connection(listener.address).close()
    with connect(listener.address, AWAY, secret=SECRET), accepting.link():
        eventually(lambda: listener.refusals["closed"] == 1)


# ── TLS ──
@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate of it, and one of another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "ours", "theirs")
    return folder


def tls(folder: Path, name: str, authority: str) -> Tls:
    return Tls(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / f"{authority}-ca.pem"))


def test_a_side_without_a_certificate_of_the_authority_is_refused(certificates: Path) -> None:
    own, foreign = tls(certificates, "ours", "ours"), tls(certificates, "theirs", "ours")
    with Listener(HERE, secret=SECRET, tls=own) as listener:
        accepting = Accepting(listener, HOME, timeout=20)
        with pytest.raises((BridgeRefused, Timeout)):
            connect(listener.address, AWAY, secret=SECRET, tls=foreign, timeout=1)
        with pytest.raises(BridgeRefused, match="TLS: self-signed certificate in"):
            connect(
                listener.address,
                AWAY,
                secret=SECRET,
                tls=replace(own, authority=tls(certificates, "x", "theirs").authority),
            )
        with connect(listener.address, AWAY, secret=SECRET, tls=own, timeout=5), accepting.link():
            assert sum(listener.refusals.values()) >= 2


@pytest.mark.parametrize("is_home", [True, False], ids=["home", "away"])
def test_tls_of_one_side_is_refused_in_words_by_both_and_counted(certificates: Path, is_home: bool) -> None:
    own = tls(certificates, "ours", "ours")
    with Listener(HERE, secret=SECRET, tls=own if is_home else None) as listener:
        accepting = Accepting(listener, HOME, timeout=20)
        with pytest.raises(BridgeRefused, match="one side speaks TLS and the other one does not: give certificates"):
            connect(listener.address, AWAY, secret=SECRET, tls=None if is_home else own, timeout=5)
        with connect(listener.address, AWAY, secret=SECRET, tls=own if is_home else None), accepting.link():
            assert listener.refusals["tls"] == 1


def test_certificates_that_cannot_be_used_are_an_error_that_names_the_file(certificates: Path) -> None:
    own = tls(certificates, "ours", "ours")
    for changed, text in (
        ({"key": str(certificates / "none.key")}, r"No such file or directory: '.*none.key'"),
        ({"key": str(certificates / "theirs.key")}, "expected a certificate and its private key .*: KEY_VALUES_MIS"),
        ({"certificate": own.key}, "expected a certificate and its private key without a passphrase"),
        ({"authority": own.key}, r"expected a certificate in PEM in '.*ours.key'"),
    ):
        with pytest.raises(OSError, match=text):
            replace(own, **changed).context(is_server=True)
