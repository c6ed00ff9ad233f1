"""Messages between a server process and the processes that decode its videos, in the order in which a video meets them.

    server ── Fork, a socket ──────────►  decoder host, which forks a decoder
    server ◄── its pidfd ───────────────  decoder host
    server ── Open, the file ──────────►  decoder
    server ◄── Opened, or Rejected ─────  decoder, which has read the container
    server ── Decode ──────────────────►  decoder, once the budget has room for what Opened says
    server ◄── Stored, Inline, Rejected   decoder, which has decoded and processed the frames
    server closes the socket              the decoder ends

Each message is a whole packet of a Unix socket; descriptors travel beside packets.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

MAX_PACKET = 64 << 10
MAX_FDS = 2


class Setup(msgspec.Struct, frozen=True):
    """Handed to the decoder host in its first packet."""

    settings: bytes  # `VideoSettings`, in msgpack
    limits: bytes  # `VideoLimits`
    store: str | None  # ticket of the store; None: tensors travel inline
    memory_nbytes: int  # that a decoder may allocate after the fork
    log_format: str
    log_level: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Beside it: the decoder's socket."""


class HostReady(msgspec.Struct, frozen=True, tag=True):
    """The decoder host has started, or has forked: then the decoder's pidfd is beside it, unless it has ended."""


class Open(msgspec.Struct, frozen=True, tag=True):
    key: bytes  # of the video in the store


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The facts of the container, and the plan of the model's processor."""

    frames: int
    seconds: float
    width: int
    height: int
    kept_frames: int  # that the model gets
    tokens: int
    nbytes: int  # of the kept frames and of their tensors, while they are made


class Decode(msgspec.Struct, frozen=True, tag=True):
    pass


class Stored(msgspec.Struct, frozen=True, tag=True):
    """The tensors lie in the store under the key; the decoder holds them until the socket is closed."""

    is_new: bool  # False: another process had put them meanwhile


class Inline(msgspec.Struct, frozen=True, tag=True):
    """The store has no room, or there is none: the tensors lie in the file beside this message."""

    layout: bytes
    nbytes: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    status: int
    reason: str


ToDecoder: TypeAlias = Open | Decode
ToServer: TypeAlias = HostReady | Opened | Stored | Inline | Rejected

_ENCODER = msgspec.msgpack.Encoder()
TO_DECODER: msgspec.msgpack.Decoder[ToDecoder] = msgspec.msgpack.Decoder(ToDecoder)
TO_SERVER: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
SETUP = msgspec.msgpack.Decoder(Setup)


def send(line: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    socket.send_fds(line, [_ENCODER.encode(message)], list(fds))


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Returns a packet and the descriptors beside it. The packet is empty when the other end has been closed."""
    packet, fds, _, _ = socket.recv_fds(line, MAX_PACKET, MAX_FDS)
    return packet, fds
