"""Where ranks meet: the port listens from the beginning on, and only rank 0 gets its socket."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from penstock.engine.cluster.rendezvous import Rendezvous
from tests.conftest import spawn


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with contextlib.closing(Rendezvous.open()) as opened:
        yield opened


def test_rendezvous_port_is_reserved_until_rank_0_comes(rendezvous: Rendezvous) -> None:
    with pytest.raises(OSError, match="in use"):
        socket.create_server((rendezvous.host, rendezvous.port), reuse_port=False)


def test_only_rank_0_gets_the_listening_socket(rendezvous: Rendezvous) -> None:
    assert rendezvous.of_rank(0).listener is rendezvous.listener
    assert rendezvous.of_rank(1) == Rendezvous(rendezvous.host, rendezvous.port, None)


def test_the_interface_of_a_rendezvous_is_that_of_the_route_to_its_address(rendezvous: Rendezvous) -> None:
    assert rendezvous.interface == "lo"
    assert Rendezvous("127.0.0.2", rendezvous.port, None).interface in ("lo", None)  # a second address of lo


def accept(rendezvous: Rendezvous) -> None:
    assert rendezvous.listener is not None
    connection, _ = rendezvous.listener.accept()
    with connection:
        connection.sendall(b"rank 0")


def test_a_rank_that_connects_before_rank_0_has_started_waits_for_it(rendezvous: Rendezvous) -> None:
    with socket.create_connection((rendezvous.host, rendezvous.port), timeout=30) as early:
        with spawn(accept, rendezvous):
            rendezvous.close()  # as the launcher does, once rank 0 has its copy
            assert early.recv(16) == b"rank 0"


def test_a_rank_is_refused_when_rank_0_has_died(rendezvous: Rendezvous) -> None:
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((rendezvous.host, rendezvous.port), timeout=30)
