"""The peers of a segment, as plain values for observers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PeerState = Literal["live", "stopped", "unknown", "dying", "dead", "left"]


class Peer(msgspec.Struct, frozen=True):
    """One attached process. A slot (`index`) that is taken again by another process has a new `epoch`.

    `stopped` (SIGSTOP) is not dead: a stopped peer keeps everything it holds. So does one of which it is `unknown`
    whether it lives, because a system call failed.

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
