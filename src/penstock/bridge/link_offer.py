"""The offer of each side of a link in the handshake, and the differences of two offers."""

from __future__ import annotations

import os

import msgspec

import penstock
from penstock import _native
from penstock.bridge.link_spec import InboundChannel, LinkSpec, OutboundChannel
from penstock.codec.catalogue import schema_differences
from penstock.errors import LayoutMismatch

MAX_DIFFERENCES = 12  # in one text


class OfferedChannel(msgspec.Struct, array_like=True, frozen=True):
    name: str
    is_outbound: bool
    schema: bytes  # of its messages; empty: bytes
    lanes: int = 0  # of an inbound channel, for senders of the remote node
    window_nbytes: int = 0  # of an inbound channel


class OfferedWords(msgspec.Struct, array_like=True, frozen=True):
    name: str
    is_outbound: bool
    words: int


class LinkOffer(msgspec.Struct, array_like=True, frozen=True):
    """One side. Lanes of a link are the places of its channels, and words, in the offer of the side that sends them."""

    link: str
    epoch: int
    name: str
    pid: int
    version: str
    layout: int  # fingerprint of the shared memory's
    channels: tuple[OfferedChannel, ...]
    words: tuple[OfferedWords, ...]
    has_values: bool
    same: dict[str, str]
    info: bytes
    heartbeat_s: float
    silence_s: float

    @classmethod
    def of(cls, spec: LinkSpec) -> LinkOffer:
        return cls(
            spec.link,
            spec.epoch,
            spec.name,
            os.getpid(),
            penstock.__version__,
            _native.LAYOUT_FINGERPRINT,
            (*map(_offered, spec.outbound), *map(_offered, spec.inbound)),
            (
                *(OfferedWords(words.name, True, len(words.words)) for words in spec.outbound_words),
                *(OfferedWords(words.name, False, len(words.words)) for words in spec.inbound_words),
            ),
            spec.values is not None,
            dict(spec.same),
            spec.info,
            spec.heartbeat_s,
            spec.silence_s,
        )

    def outbound_channels(self) -> list[OfferedChannel]:
        """Returns the outbound channels of the local side, by lane."""
        return [channel for channel in self.channels if channel.is_outbound]

    def outbound_words(self) -> list[OfferedWords]:
        return [words for words in self.words if words.is_outbound]


def _offered(channel: OutboundChannel | InboundChannel) -> OfferedChannel:
    schema = bytes(channel.channel.schema)
    if isinstance(channel, OutboundChannel):
        return OfferedChannel(channel.name, True, schema)
    return OfferedChannel(channel.name, False, schema, len(channel.lanes), channel.window_nbytes)


def differences(here: LinkOffer, there: LinkOffer) -> list[str]:
    """Returns why the two sides do not fit, a sentence part each; empty: they do."""
    reasons = []
    for what in ("version", "layout", "link", "epoch", "has_values"):
        own, other = getattr(here, what), getattr(there, what)
        if own != other:
            reasons.append(f"{_NAMES[what]} is {own!r} here, {other!r} there")
    for what in sorted(here.same.keys() | there.same.keys()):
        own, other = here.same.get(what, "not given"), there.same.get(what, "not given")
        if own != other:
            reasons.append(f"{what} is {own} here, {other} there")
    reasons += _of_channels(here, there)
    reasons += _of_words(here, there)
    for side, peer, place in ((here, there, "here"), (there, here, "there")):
        if side.silence_s < 2 * peer.heartbeat_s:
            reasons.append(
                f"a silence of {side.silence_s:g} s {place} is less than two heartbeats of the other side, every "
                f"{peer.heartbeat_s:g} s"
            )
    if len(reasons) > MAX_DIFFERENCES:
        reasons[MAX_DIFFERENCES:] = [f"and {len(reasons) - MAX_DIFFERENCES} more"]
    return reasons


_NAMES = {
    "version": "penstock's version",
    "layout": "the layout of shared memory",
    "link": "the link",
    "epoch": "the epoch",
    "has_values": "whether values of a store cross",
}


def _of_channels(here: LinkOffer, there: LinkOffer) -> list[str]:
    reasons = []
    own = {channel.name: channel for channel in here.channels}
    other = {channel.name: channel for channel in there.channels}
    for name in sorted(own.keys() ^ other.keys()):
        reasons.append(f"channel '{name}' is only {'here' if name in own else 'there'}")
    for name in sorted(own.keys() & other.keys()):
        own_channel, peer_channel = own[name], other[name]
        if own_channel.is_outbound == peer_channel.is_outbound:
            reasons.append(f"channel '{name}' is {'outbound' if own_channel.is_outbound else 'inbound'} at both sides")
            continue
        try:
            schemas = own_channel.schema, peer_channel.schema
            reasons += [f"channel '{name}': {reason}" for reason in schema_differences(*schemas)]
        except LayoutMismatch as error:
            reasons.append(f"channel '{name}': {error}")
    return reasons


def _of_words(here: LinkOffer, there: LinkOffer) -> list[str]:
    reasons = []
    own = {words.name: words for words in here.words}
    other = {words.name: words for words in there.words}
    for name in sorted(own.keys() ^ other.keys()):
        reasons.append(f"words '{name}' are only {'here' if name in own else 'there'}")
    for name in sorted(own.keys() & other.keys()):
        if own[name].is_outbound == other[name].is_outbound:
            reasons.append(f"words '{name}' go the same way at both sides")
        elif own[name].words != other[name].words:
            reasons.append(f"words '{name}' are {own[name].words} here, {other[name].words} there")
    return reasons
