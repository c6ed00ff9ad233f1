"""An image or a video of a conversation, as its request names it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.media.media_kind import MediaKind


class MediaRef(NamedTuple):
    where: str  # in the body: "messages[0].content[1]"
    url: str
    kind: MediaKind
