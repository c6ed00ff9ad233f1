"""The bytes of an image by its URL: a data URL has them, a file:// URL names a file in an allowed directory.

`media_fetcher` fetches images from other hosts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from penstock.engine.client.image_processor import ImageRefused
from penstock.server.base64_text import decode_base64, decoded_nbytes

TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WebP", "image/gif": "GIF"}
LONGEST_HEAD = 256  # characters, before the comma of a data URL
BAD_BASE64 = "the data of the URL is not base64"


def read(url: str, max_nbytes: int, folders: Sequence[Path]) -> bytes:
    """Reads an image in this thread. `folders`: allowed directories, without symbolic links in their own paths.
    Raises ImageRefused."""
    scheme = url.partition(":")[0].lower() if ":" in url[:16] else ""
    if scheme == "data":
        return _decode_data_url(url, max_nbytes)
    if scheme == "file":
        return _in_a_file(url, max_nbytes, folders)
    if scheme in ("http", "https"):
        raise ImageRefused(400, "images are not fetched from other hosts: send this one as data:image/png;base64,…")
    raise ImageRefused(400, f"expected a URL that begins with data:, got {url[:40]!r}")


# ── carried in the URL ───────────────────────────────────────────────────────────────────────────────────────────────
def _decode_data_url(url: str, max_nbytes: int) -> bytes:
    comma = url.find(",", 0, LONGEST_HEAD)
    kind, *parameters = url[len("data:") : max(comma, 0)].lower().split(";")
    if comma < 0 or parameters[-1:] != ["base64"]:
        raise ImageRefused(400, f"expected data:image/png;base64,…, got {url[:40]!r}")
    if kind not in TYPES:
        raise ImageRefused(400, f"expected an image of type {', '.join(TYPES)}, got {kind!r}")
    begin = comma + 1
    if decoded_nbytes(url, begin) > max_nbytes:
        raise ImageRefused(413, f"an image has at most {max_nbytes} bytes, this one has more")
    try:
        raw = decode_base64(url, begin)
    except ValueError as error:
        raise ImageRefused(400, f"{BAD_BASE64}: {error}") from None
    if kind_of(raw) != TYPES[kind]:
        raise ImageRefused(400, f"expected a {TYPES[kind]} image, as its URL says, got {kind_of(raw)}")
    return raw


def kind_of(raw: bytes) -> str:
    """Returns the image format, by its first bytes."""
    if raw.startswith(b"RIFF") and raw[8:12] == b"WEBP":
        return "WebP"
    heads = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF"}
    return next((kind for head, kind in heads.items() if raw.startswith(head)), "something else")


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _in_a_file(url: str, max_nbytes: int, folders: Sequence[Path]) -> bytes:
    if not folders:
        raise ImageRefused(400, "files are not open to clients here: see --allowed-local-media-path")
    path = _path_of(url)
    _require_beneath(os.path.realpath(path), folders)  # before opening, as opening a device may have effects
    try:
        with open(path, "rb", opener=_open) as file:
            # Checks the file that was opened, as links may have changed meanwhile.
            _require_beneath(os.readlink(f"/proc/self/fd/{file.fileno()}"), folders)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageRefused(400, "the file cannot be read: it is no regular file")
            if status.st_size > max_nbytes:
                raise ImageRefused(413, f"an image has at most {max_nbytes} bytes, this one has {status.st_size}")
            return file.read(max_nbytes)
    except OSError as error:
        raise ImageRefused(400, f"the file cannot be read: {error.strerror}") from None


def _open(path: str, flags: int) -> int:
    """Opens without blocking: the path may be a pipe or a device."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _path_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        path = os.fsdecode(unquote_to_bytes(parts.path))
        if parts.netloc in ("", "localhost") and path.startswith("/") and "\0" not in path:
            return path
    except ValueError:
        pass
    raise ImageRefused(400, f"expected file:///and an absolute path, got {url[:80]!r}")


def _require_beneath(path: str, folders: Sequence[Path]) -> None:
    """Raises ImageRefused if the path is in no allowed directory, whether or not the file exists."""
    if not any(Path(path).is_relative_to(folder) for folder in folders):
        raise ImageRefused(400, "the file is not beneath a folder that is open to clients")
