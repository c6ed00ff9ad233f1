"""Where the ranks of a group meet for torch.distributed: a port that listens before any rank is started.

The launcher opens it for each incarnation of a group, and passes the listening socket to rank 0, which serves the store
of torch.distributed on it. A port that was only found free could belong to another process by the time rank 0 uses it.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass, replace

LOOPBACK = "127.0.0.1"  # where all ranks of a group are on one node
LOOPBACK_INTERFACE = "lo"
SIOCGIFADDR = 0x8915  # linux/sockios.h; of an interface's address
IFREQ = struct.Struct("16s4x4s232x")  # its name, and an address of IPv4 in the answer


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of one group's ranks, as one process knows it."""

    host: str
    port: int
    listener: socket.socket | None  # in the launcher and in rank 0; connections wait there until rank 0 accepts them

    @classmethod
    def open(cls, host: str = LOOPBACK) -> Rendezvous:
        """Listens on a free port of an address of this machine. Raises OSError."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
        return cls(host, listener.getsockname()[1], listener)

    @property
    def interface(self) -> str | None:
        """Returns the network interface by which this machine reaches the meeting point; None: it has no address of
        IPv4, or only a second one, by which it could be found."""
        if self.host == LOOPBACK:
            return LOOPBACK_INTERFACE
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if _address_of(probe, name) == own), None)

    def of_rank(self, rank: int) -> Rendezvous:
        """Returns what this rank is given."""
        return self if rank == 0 else replace(self, listener=None)

    def close(self) -> None:
        """Closes this process's copy of the socket. Rank 0, once started, has its own: when it dies, ranks that connect
        later are refused."""
        if self.listener is not None:
            self.listener.close()


def _address_of(probe: socket.socket, interface: str) -> str:
    """Returns the first IPv4 address of an interface; empty: it has none."""
    request = struct.pack("256s", interface.encode())
    try:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
    except OSError:
        return ""
    return socket.inet_ntoa(IFREQ.unpack(answer)[1])
