"""The kinds of media in conversations, and their formats: what URLs may say, and what the first bytes of a file say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.engine.media.video_file import MATROSKA, MP4, container_of

UNKNOWN = "something else"
CONTAINERS = {MP4: "MP4 or MOV", MATROSKA: "WebM or Matroska"}


class MediaKind(NamedTuple):
    noun: str
    article: str
    types: Mapping[str, str]  # media types, each with its format
    example: str  # of a media type
    format_of: Callable[[bytes], str]  # of the first bytes

    @property
    def described(self) -> str:
        return f"{self.article} {self.noun}"


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
