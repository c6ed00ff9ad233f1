"""How a link between two nodes fails: refused before it begins, or dead. Each text names the side that did it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from penstock.errors import PeerDied, PenstockError

LossKind: TypeAlias = Literal["closed", "silent", "unheard", "ended", "damaged", "protocol", "local"]
RefusalKind: TypeAlias = Literal["silent", "dropped", "closed", "lost", "foreign", "secret", "tls", "unfit"]


class BridgeRefused(PenstockError):
    """The two sides do not fit: another secret, build, epoch or configuration. The text has every difference.

    `kind` is one of
        foreign    the other side does not speak the protocol of a bridge, or another version of the protocol
        secret     the other side has another secret
        tls        one side speaks TLS, and the other side does not; or a certificate is not of the authority
        unfit      build, epoch or configuration differ

    Examples:
        >>> BridgeRefused("the epoch is 1 here, 2 there").kind
        'unfit'
    """

    kind: RefusalKind = "unfit"

    @classmethod
    def of(cls, kind: RefusalKind, text: str) -> BridgeRefused:
        error = cls(text)
        error.kind = kind
        return error


class LinkDied(PeerDied):
    """The link has ended, and not because both sides were done. What it had under way is lost.

    `name` and `pid` are of the process at the other side, `how` says what happened, and `kind` is one of
        closed     its connection ended without a word, and was not made again: its process, or its node, was killed; or
                   connections were lost too often
        silent     no byte came from it for `silence_s`: it is stopped, or the network between is cut
        unheard    it says that no byte came to it from here: the network is cut in that direction
        ended      it ended the link because of a death or a failure on its node
        damaged    a packet arrived twice with bytes that were not sent: the checksum does not match
        protocol   it sent what no side of a link sends
        local      a death or a failure on this node; the other side raises "ended"

    Examples:
        >>> LinkDied("it has died").kind
        'closed'
    """

    kind: LossKind = "closed"

    @classmethod
    def of(cls, kind: LossKind, link: str, name: str, pid: int, how: str) -> LinkDied:
        what = f"on this side: {how}" if kind == "local" else f"'{name}' (pid {pid} there) {how}"
        error = cls(f"link '{link}' has died: {what}")
        error.kind, error.name, error.pid, error.how = kind, name, pid, how
        return error


class ConnectionClosed(OSError):
    """The other side has closed the connection, as the kernel does for a process that ends."""


class ProtocolError(Exception):
    """The other side sent what no side of a link sends."""

    kind: Literal["protocol", "damaged"] = "protocol"
    how = "broke the protocol"


class DamagedPacket(ProtocolError):
    """A packet does not have its checksum: the network, or a relay in it, has changed bytes."""

    kind = "damaged"
    how = "sent a packet that was damaged on its way"


class RemoteFailure(Exception):
    """The other side has ended the link, or is taken for dead."""

    def __init__(self, kind: LossKind, how: str) -> None:
        super().__init__(how)
        self.kind, self.how = kind, how


class LocalFailure(Exception):
    """A death or a failure on this node that ends the link."""
