"""The peers of a segment, as plain values for observers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PeerState = Literal["live", "stopped", "unknown", "dying", "dead", "left"]


class Peer(msgspec.Struct, frozen=True):
    """An attached process. When another process takes the slot (`index`), the slot gets a new `epoch`.

    A `stopped` peer (SIGSTOP) is not dead, and keeps all leases. So does an `unknown` peer: a system call failed, and
    whether the peer lives is not known.

    Examples:
        >>> pool = Pool.create(1 << 20, peer_name="worker 0")
        >>> [(peer.name, peer.state) for peer in pool.peers()]
        [('worker 0', 'live')]
    """

    index: int
    epoch: int
    pid: int
    name: str
    state: PeerState
    how: str = ""

    @classmethod
    def of(cls, native: dict[str, Any]) -> Peer:
        return cls(*(native[field] for field in cls.__struct_fields__))
