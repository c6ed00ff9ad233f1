"""Where the ranks of a group meet for torch.distributed: a port that listens before any rank is started.

The launcher opens it for each incarnation of a group, and passes the listening socket to rank 0, which serves the store
of torch.distributed on it. A port that was only found free could belong to another process by the time rank 0 uses it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

LOOPBACK = "127.0.0.1"  # all ranks of a group are on one node


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of one group's ranks, as one process knows it."""

    host: str
    port: int
    listener: socket.socket | None  # in the launcher and in rank 0; connections wait there until rank 0 accepts them

    @classmethod
    def open(cls) -> Rendezvous:
        """Listens on a free port. Raises OSError."""
        listener = socket.create_server((LOOPBACK, 0))
        return cls(LOOPBACK, listener.getsockname()[1], listener)

    def of_rank(self, rank: int) -> Rendezvous:
        """Returns what this rank is given."""
        return self if rank == 0 else replace(self, listener=None)

    def close(self) -> None:
        """Closes this process's copy of the socket. Rank 0, once started, has its own: when it dies, ranks that connect
        later are refused."""
        if self.listener is not None:
            self.listener.close()
