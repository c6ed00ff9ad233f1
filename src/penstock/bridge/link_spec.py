"""The description of one side of a link: channels, words and values, and the facts that must be equal at both sides.

A link joins two processes on two nodes. The handshake compares the descriptions of both sides.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.bridge.pull_channels import PullChannels
from penstock.channel import Channel
from penstock.tensor import Store

OnLocalDeath: TypeAlias = Literal["end", "forward"]
WINDOW_NBYTES = 1 << 20
MAX_CHANNELS = 200  # of one direction; the head of a packet has a byte for the number
SECRET_NBYTES = 32


@dataclass(frozen=True)
class Lane:
    """A sender of a channel: the index, and the name of the process as a sender.

    Examples:
        >>> InboundChannel("requests", Inbox(senders=3), [Lane(0, "server 0"), Lane(2, "server 1")]).lanes[1].index
        2
    """

    index: int | None = None  # None: the first that is free
    name: str = ""


@dataclass(frozen=True)
class OutboundChannel:
    """A channel of the local node with frames for the remote node: the process becomes a receiver of the channel.

    Args:
        name: of the channel in the link; the remote side has an `InboundChannel` of this name.
        channel: a Ring, Broadcast or Inbox.
        index: of the receiver; None for the first free receiver.
        peer_name: of the process as a receiver.
        on_death: what the death of one of the channel's senders means: "end" ends the link, "forward" calls `on_death`
            of both sides.

    Examples:
        >>> OutboundChannel("steps", Broadcast(receivers=3), index=2, peer_name="bridge").on_death
        'end'
    """

    name: str
    channel: Channel[Any]
    index: int | None = None
    peer_name: str = ""
    on_death: OnLocalDeath = "end"


@dataclass(frozen=True)
class InboundChannel:
    """A channel of the local node for frames of the remote node: the process becomes a sender, or several senders.

    Args:
        name: of the channel in the link; the remote side has an `OutboundChannel` of this name.
        channel: a Ring, Broadcast or Inbox that carries the same messages.
        lanes: the local sender for the frames of each sender of the channel on the remote node.
        on_death: what the death of one of the channel's receivers means: "end" ends the link; "forward" calls
            `on_death` of both sides, and frames for a receiver without a successor are dropped, and counted.
        window_nbytes: bytes of frames that the remote side may send ahead of the local side.

    Examples:
        >>> InboundChannel("steps", Broadcast(receivers=3)).window_nbytes
        1048576
    """

    name: str
    channel: Channel[Any]
    lanes: Sequence[Lane] = (Lane(),)
    on_death: OnLocalDeath = "end"
    window_nbytes: int = WINDOW_NBYTES


@dataclass(frozen=True)
class OutboundWords:
    """Words of 8 bytes that the remote side mirrors, such as a row of a status board.

    Args:
        name: in the link; the remote side has `InboundWords` of this name.
        words: a view of format "Q".
        period: most seconds between two scans for changes; the link scans more often while frames pass.

    Examples:
        >>> OutboundWords("row", memoryview(bytearray(64)).cast("Q"), period=0.05).name
        'row'
    """

    name: str
    words: memoryview[int]
    period: float = 0.1


@dataclass(frozen=True)
class InboundWords:
    """The mirror of words of the remote side. Each store writes an aligned word of 8 bytes.

    Args:
        name: in the link; the remote side has `OutboundWords` of this name.
        words: a writable view of format "Q".
        places: the words that are written; None: all.

    Examples:
        >>> InboundWords("row", memoryview(bytearray(64)).cast("Q"), places=[0, 1]).places
        [0, 1]
    """

    name: str
    words: memoryview[int]
    places: Sequence[int] | None = None


@dataclass(frozen=True)
class StoreValues:
    """A store of the local node, from which the remote side may pull values by key.

    Args:
        store: the store.
        pulls: the channels by which local processes request remote values; None: no process does.

    Examples:
        >>> StoreValues(Store(1 << 20), PullChannels.open(clients=2)).store.name
        'store'
    """

    store: Store
    pulls: PullChannels | None = None


class ChannelDeath(msgspec.Struct, frozen=True):
    """The death of a process at an end of a channel of the link: on the local or (`is_remote`) on the remote node.

    Examples:
        >>> LinkSpec("group 2", on_death=lambda death: print(death.channel, death.name, death.how)).epoch
        0
    """

    channel: str  # its name in the link
    index: int  # of the end among the channel's senders; of an inbound channel, its receivers
    name: str
    pid: int
    how: str
    is_remote: bool = False


@dataclass(frozen=True)
class Tls:
    """Certificates of one side. Each side requires from the remote side a certificate of a common authority.

    Args:
        certificate, key: paths of the local side's certificate and private key, in PEM.
        authority: path of the certificate of the authority that has signed both certificates, in PEM.

    Examples:
        >>> Tls("node.pem", "node.key", authority="cluster.pem").key
        'node.key'
    """

    certificate: str
    key: str
    authority: str

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Returns the context of one side. Raises OSError for a file that cannot be read or decoded."""
        for path in (self.certificate, self.key, self.authority):
            with open(path, "rb"):  # errors of ssl do not name the file
                pass
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # nodes are addressed by number; the secret says that it is the right link
        context.verify_mode = ssl.CERT_REQUIRED
        try:  # an empty password: OpenSSL would ask for that of a key at the terminal
            context.load_cert_chain(self.certificate, self.key, password=b"")
        except ssl.SSLError as error:
            raise OSError(
                f"expected a certificate and its private key without a passphrase, in PEM, in '{self.certificate}' and "
                f"'{self.key}': {error.reason or error}"
            ) from None
        try:
            context.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            raise OSError(f"expected a certificate in PEM in '{self.authority}': {error.reason or error}") from None
        return context


@dataclass(frozen=True)
class LinkSpec:
    """One side of a link.

    Args:
        link: name of the link, equal at both sides.
        epoch: of the service above, equal at both sides: a process left over from an earlier epoch is refused.
        name: of the local side, in errors of the remote side.
        channels, words: all that cross; the remote side has the counterparts.
        values: the store; None: no values cross.
        same: facts that must be equal at both sides, as text.
        info: for the remote side to read, as `link.remote.info`.
        heartbeat_s: seconds between two heartbeats of the local side.
        silence_s: seconds without a byte of the remote side after which the link is dead. At least twice the other
            side's heartbeat.
        on_death: is called, in the thread of the link, with each `ChannelDeath` that does not end the link.
        on_resume: is called, in the thread of the link, on a new connection, with the seconds without a connection, and
            with the reason.

    Raises:
        ValueError: two channels have one name, or a heartbeat does not fit the silence.

    Examples:
        >>> spec = LinkSpec("group 2", epoch=3, channels=[OutboundChannel("steps", Ring())], same={"model": "shapes"})
        >>> [channel.name for channel in spec.outbound], spec.inbound
        (['steps'], [])
    """

    link: str
    epoch: int = 0
    name: str = ""
    channels: Sequence[OutboundChannel | InboundChannel] = ()
    words: Sequence[OutboundWords | InboundWords] = ()
    values: StoreValues | None = None
    same: Mapping[str, str] = field(default_factory=dict)
    info: bytes = b""
    heartbeat_s: float = 0.5
    silence_s: float = 2.0
    on_death: Callable[[ChannelDeath], None] | None = None
    on_resume: Callable[[float, str], None] | None = None

    def __post_init__(self) -> None:
        for what, names in (
            ("channels", [channel.name for channel in self.channels]),
            ("words", [words.name for words in self.words]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"two {what} of link '{self.link}' have the same name: {sorted(names)}")
            if len(names) > MAX_CHANNELS:
                raise ValueError(f"a link has up to {MAX_CHANNELS} {what}, not {len(names)}")
        if not 0 < self.heartbeat_s < self.silence_s:
            raise ValueError(
                f"a heartbeat every {self.heartbeat_s:g} s does not fit a silence of {self.silence_s:g} s: it is to be "
                "above 0, and shorter"
            )

    @property
    def outbound(self) -> list[OutboundChannel]:
        return [channel for channel in self.channels if isinstance(channel, OutboundChannel)]

    @property
    def inbound(self) -> list[InboundChannel]:
        return [channel for channel in self.channels if isinstance(channel, InboundChannel)]

    @property
    def outbound_words(self) -> list[OutboundWords]:
        return [words for words in self.words if isinstance(words, OutboundWords)]

    @property
    def inbound_words(self) -> list[InboundWords]:
        return [words for words in self.words if isinstance(words, InboundWords)]


class RemoteSide(msgspec.Struct, frozen=True):
    """The remote side of a link, by the handshake.

    Examples:
        >>> RemoteSide("node 1", 4711, "0.1.0", b"", clock_offset_ns=-20_000).name
        'node 1'
    """

    name: str
    pid: int  # on its node
    version: str  # of its penstock
    info: bytes
    clock_offset_ns: int  # remote less local time.monotonic_ns(), within half a round trip
    address: tuple[str, int] | None = None


class LinkStats(msgspec.Struct):
    """Counts of one side of a link, since it began.

    Examples:
        >>> LinkStats().frames_sent
        0
    """

    frames_sent: int = 0
    frames_received: int = 0
    nbytes_sent: int = 0  # of all packets, heads included; what is sent again counts once
    nbytes_received: int = 0
    frames_dropped: int = 0  # their receiver has died, and has no successor
    values_sent: int = 0
    values_declined: int = 0  # not sent: the remote side had no room, or the values already
    values_received: int = 0
    value_nbytes_received: int = 0
    values_missing: int = 0  # pulled, and not at the remote side
    round_trip_ns: int = 0  # of the last heartbeat that was answered
    clock_offset_ns: int = 0  # remote less local time.monotonic_ns(), within half the best round trip
    backlog_nbytes: int = 0  # of frames that wait here for room in a channel
    heard_s: float = 0.0  # since the last byte of the remote side
    resumptions: int = 0  # connections that were lost, and made again
