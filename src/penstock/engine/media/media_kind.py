"""The kinds of media in conversations, their formats, and how a medium is named and refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.errors import PenstockError

UNKNOWN = "something else"
HEAD = 16  # bytes of a file that show its format
MP4, MATROSKA = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"  # as FFmpeg names their readers
CONTAINERS = {MP4: "MP4 or MOV", MATROSKA: "WebM or Matroska"}


class MediaRefused(PenstockError):
    """An image or a video that is not processed. `status` is the HTTP status of the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class MediaKind(NamedTuple):
    noun: str
    article: str
    types: Mapping[str, str]  # media types, each with its format
    example: str  # of a media type
    format_of: Callable[[bytes], str]  # of the first bytes

    @property
    def described(self) -> str:
        return f"{self.article} {self.noun}"


class MediaRef(NamedTuple):
    """An image or a video of a conversation, as its request names it."""

    where: str  # in the body: "messages[0].content[1]"
    url: str
    kind: MediaKind


def container_of(head: bytes) -> str | None:
    """Returns the container's format by the first bytes of a video; None: it is none that is read."""
    if re.match(rb"....ftyp", head, re.DOTALL) or re.match(rb"....(?:moov|mdat|wide|free|skip)", head, re.DOTALL):
        return MP4
    return MATROSKA if head.startswith(b"\x1a\x45\xdf\xa3") else None


def _image_format(head: bytes) -> str:
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WebP"
    heads = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF"}
    return next((name for start, name in heads.items() if head.startswith(start)), UNKNOWN)


def _video_format(head: bytes) -> str:
    return CONTAINERS.get(container_of(head) or "", UNKNOWN)


IMAGE = MediaKind(
    "image",
    "an",
    {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WebP", "image/gif": "GIF"},
    "image/png",
    _image_format,
)
VIDEO = MediaKind(
    "video",
    "a",
    {
        **dict.fromkeys(("video/mp4", "video/quicktime", "video/x-m4v"), CONTAINERS[MP4]),
        **dict.fromkeys(("video/webm", "video/x-matroska"), CONTAINERS[MATROSKA]),
    },
    "video/mp4",
    _video_format,
)
