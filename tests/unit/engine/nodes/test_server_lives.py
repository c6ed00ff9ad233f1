"""The death of a server ends a link, unless the server had died before the link began."""

import contextlib
from collections.abc import Iterator

import pytest

from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import Cluster, all_processes
from penstock.engine.nodes.group_bridge import ServerLives
from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice

CONFIG = EngineConfig(simulated=SimulatedDevice(), api_server_count=2, nodes=Nodes(count=2, address="127.0.0.1"))
PLACE = next(
    place for place, member in enumerate(all_processes(CONFIG)) if (member.kind, member.index) == ("server", 1)
)


@contextlib.contextmanager
def status_board(process: ProcessEntry) -> Iterator[tuple[Cluster, StatusBoard]]:
    """`process`: that of server 1, when the link begins."""
    cluster = Cluster.open(CONFIG)
    board = StatusBoard(cluster.board, writable=True)
    board.live(PLACE, process)
    yield cluster, board
    board.close()
    cluster.close()


@pytest.mark.parametrize(
    ("name", "is_new"), [("server 0.1 #2", True), ("server 0.1 #3", True), ("server 0.1 #1", False)]
)
def test_a_death_is_new_if_the_server_has_lived_since(name: str, is_new: bool) -> None:
    with status_board(ProcessEntry(2, 4711)) as (cluster, board):
        assert ServerLives(cluster.config, board).is_new_death(1, name) is is_new


def test_a_death_before_the_link_is_not_new() -> None:
    with status_board(ProcessEntry(2, 0)) as (cluster, board):
        assert not ServerLives(cluster.config, board).is_new_death(1, "server 0.1 #2")


def test_a_death_without_a_name_is_new_if_the_server_has_a_successor_since() -> None:
    with status_board(ProcessEntry(2, 4711)) as (cluster, board):
        lives = ServerLives(cluster.config, board)
        assert not lives.is_new_death(1, "?")
        board.live(PLACE, ProcessEntry(3, 4712))
        assert lives.is_new_death(1, "?")


def test_the_death_of_the_launcher_ends_no_link() -> None:
    with status_board(ProcessEntry(2, 4711)) as (cluster, board):
        assert not ServerLives(cluster.config, board).is_new_death(cluster.launcher_lane, "launcher")
