"""Messages between a server process and its media process, which makes the tensors of images on a device.

    server ── MediaSetup ───────────────►  media process
    server ◄── MediaReady ───────────────  media process, which has a pool of device memory
    server ── ProcessImage, the file ───►  media process
    server ◄── ImageLent, ImageStored ───  media process, which holds the tensors; or ImageRejected
    server ── ImageDone ────────────────►  media process: the server holds the tensors, or the request has gone

`video_messages` sends and receives packets.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.memory import Ref

WAYS = ("device", "peer", "store")  # of an image's tensors to workers


class MediaSetup(msgspec.Struct, frozen=True):
    """Handed to the media process in its first packet."""

    model: str
    devices: tuple[str, ...]  # of all workers of this node
    device: str  # of this process
    pool_nbytes: int
    store: str  # ticket
    threads: int
    log_format: str
    log_level: str


class MediaReady(msgspec.Struct, frozen=True, tag=True):
    pool: str  # ticket
    way: str  # of tensors in the pool


class ProcessImage(msgspec.Struct, frozen=True, tag=True):
    """An image to be processed, without the parts of its file that pixels do not need."""

    number: int
    key: bytes
    format: str
    width: int
    height: int
    orientation: int


class ImageLent(msgspec.Struct, frozen=True, tag=True):
    """The tensors lie in slices of the pool."""

    number: int
    is_new: bool  # False: the media process had the tensors
    layout: bytes  # of the value, with a reference in the place of each tensor
    numbers: bytes
    slices: tuple[Ref, ...]


class ImageStored(msgspec.Struct, frozen=True, tag=True):
    """The value lies in the store under the key of the image."""

    number: int
    is_new: bool


class ImageRejected(msgspec.Struct, frozen=True, tag=True):
    number: int
    status: int
    reason: str


class ImageDone(msgspec.Struct, frozen=True, tag=True):
    number: int


ToMediaProcess: TypeAlias = ProcessImage | ImageDone
ImageReply: TypeAlias = ImageLent | ImageStored | ImageRejected

SETUP = msgspec.msgpack.Decoder(MediaSetup)
READY = msgspec.msgpack.Decoder(MediaReady)
TO_MEDIA_PROCESS: msgspec.msgpack.Decoder[ToMediaProcess] = msgspec.msgpack.Decoder(ToMediaProcess)
REPLIES: msgspec.msgpack.Decoder[ImageReply] = msgspec.msgpack.Decoder(ImageReply)
