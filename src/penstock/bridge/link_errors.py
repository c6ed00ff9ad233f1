"""How a link between two nodes fails: refused before the begin, or dead. Each text names the failing side."""

from __future__ import annotations

from typing import Literal, TypeAlias

from penstock.errors import PeerDied, PenstockError

LossKind: TypeAlias = Literal["closed", "silent", "unheard", "ended", "damaged", "protocol", "local"]
RefusalKind: TypeAlias = Literal["silent", "dropped", "closed", "lost", "foreign", "secret", "tls", "unfit"]


class BridgeRefused(PenstockError):
    """The two sides do not fit: secret, build, epoch or configuration differ. The text has every difference.

    `kind` is one of
        foreign    the remote side does not speak the protocol of a bridge, or speaks a different version
        secret     the secrets differ
        tls        only one side speaks TLS, or a certificate is not of the authority
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
    """The link has ended before both sides were done. All frames under way are lost.

    `name` and `pid` are of the remote process, `how` says what happened, and `kind` is one of
        closed     the connection ended without a word, and was not made again: the remote process or node was killed;
                   or connections were lost too often
        silent     no byte came for `silence_s`: the remote process is stopped, or the network is cut
        unheard    the remote side receives no byte: the network is cut in one direction
        ended      the remote side ended the link because of a death or a failure on the remote node
        damaged    a packet arrived twice with a wrong checksum
        protocol   the remote side sent bytes that break the protocol
        local      a death or a failure on the local node; the remote side raises "ended"

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
    """The remote side has closed the connection, as the kernel does for a process that ends."""


class ProtocolError(Exception):
    """The remote side sent bytes that break the protocol."""

    kind: Literal["protocol", "damaged"] = "protocol"
    how = "broke the protocol"


class DamagedPacket(ProtocolError):
    """A packet has a wrong checksum: the network, or a relay, has changed bytes."""

    kind = "damaged"
    how = "sent a packet that was damaged on its way"


class RemoteFailure(Exception):
    """The remote side has ended the link, or is taken for dead."""

    def __init__(self, kind: LossKind, how: str) -> None:
        super().__init__(how)
        self.kind, self.how = kind, how


class LocalFailure(Exception):
    """A death or a failure on the local node that ends the link."""
