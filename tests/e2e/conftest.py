"""What several modules of this folder share."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.command import serving
from tests.support.kept_fork_server import kept_fork_server  # noqa: F401

STORES = ("--mm-encoder-tp-mode", "store", "--tensor-transport", "store")


@pytest.fixture(scope="session")
def shipped_on_two_ranks() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The model that ships, with two servers, and its port. A start takes ten seconds of processor time."""
    with serving("-tp", "2", "--api-server-count", "2", *STORES) as server:
        yield server


@pytest.fixture(autouse=True)
def shared_fork_server(kept_fork_server: None) -> None:  # noqa: F811
    """Launchers of this process share fork servers."""
