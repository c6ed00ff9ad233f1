"""Launchers of this process share fork servers."""

from tests.support.kept_fork_server import kept_fork_server  # noqa: F401
