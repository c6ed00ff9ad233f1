"""Options of the API server: frozen, and validated when they are created. `EngineConfig` has those of the engine."""

from __future__ import annotations

import os
import re

import msgspec

from penstock.engine.client.image_processor import ImageLimits
from penstock.server.media.media_fetcher import AllowedHost
from penstock.server.videos.video_file import VideoLimits

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `penstock serve` that concern HTTP, media and limits."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    api_keys: tuple[str, ...] = ()  # a request must carry one of them; none: no key is needed
    served_model_name: tuple[str, ...] = ()  # the first is a label of metrics; none: the name of the model's directory
    max_open_requests: int = 1024  # of one server process, those included that are being read
    max_body_nbytes: int = 64 << 20
    client_timeout: float = 30.0  # seconds for which a client may read nothing, or pause while it sends
    image_limits: ImageLimits = ImageLimits()
    video_limits: VideoLimits = VideoLimits()
    media_nbytes_in_flight: int = 2 << 30  # of images, videos and long bodies: `MediaBudget`
    allowed_local_media_path: tuple[
        str, ...
    ] = ()  # clients may name media beneath them by file:// URLs; none: no files
    allowed_media_domains: tuple[
        str, ...
    ] = ()  # clients may name media on them by http:// and https:// URLs; none: on no host
    allowed_origins: tuple[str, ...] = ()  # of pages that may ask from a browser, or "*"; none: only this server's own
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_open_requests", 1, 1 << 20),
            ("max_body_nbytes", 1, 1 << 40),
            ("client_timeout", 0.1, 1e6),
            ("media_nbytes_in_flight", 16 << 20, 1 << 44),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is between {low} and {high}, not {getattr(self, name)}")
        if not all(self.api_keys):
            raise ValueError("expected api_keys that are not empty, got an empty one")
        for folder in self.allowed_local_media_path:
            if not os.path.isdir(folder):
                raise ValueError(f"allowed_local_media_path is a folder, not {folder!r}")
        for host in self.allowed_media_domains:
            AllowedHost.of(host)
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"allowed_origins are as in https://example.org:8443, or '*', not {origin!r}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "allow_credentials needs allowed_origins by name: with '*' any page could use its reader's credentials"
            )
