"""A bridge between the channels of two nodes: frames, words and values by key over one TCP connection, a link.

Leaves to its user which channels cross, and what follows when a link has died.
"""

from penstock.bridge.link import Link
from penstock.bridge.link_errors import BridgeRefused, LinkDied
from penstock.bridge.link_spec import (
    ChannelDeath,
    InboundChannel,
    InboundWords,
    Lane,
    LinkSpec,
    LinkStats,
    OutboundChannel,
    OutboundWords,
    RemoteSide,
    StoreValues,
    Tls,
)
from penstock.bridge.listener import Listener, connect
from penstock.bridge.pull_channels import PullChannels, Puller

__all__ = [
    "BridgeRefused",
    "ChannelDeath",
    "InboundChannel",
    "InboundWords",
    "Lane",
    "Link",
    "LinkDied",
    "LinkSpec",
    "LinkStats",
    "Listener",
    "OutboundChannel",
    "OutboundWords",
    "PullChannels",
    "Puller",
    "RemoteSide",
    "StoreValues",
    "Tls",
    "connect",
]
