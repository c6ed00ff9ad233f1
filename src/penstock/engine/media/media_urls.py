"""The bytes of an image or a video by its URL: a data URL has them, a file:// URL names a file in an allowed directory.

`media_fetcher` fetches them from other hosts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit

from penstock.engine.media.base64_text import base64_chunks, decode_base64, decoded_nbytes
from penstock.engine.media.media_kind import HEAD, IMAGE, MediaKind, MediaRefused

LONGEST_HEAD = 256  # characters, before the comma of a data URL
CHUNK = 1 << 20  # bytes of a file that are copied at a time
BAD_BASE64 = "the data of the URL is not base64"


def read(url: str, max_nbytes: int, folders: Sequence[Path]) -> bytes:
    """Reads an image in this thread. `folders`: allowed directories, without symbolic links in their own paths.
    Raises MediaRefused."""
    if _is_file(url, IMAGE):
        with _open_file(url, max_nbytes, folders, IMAGE) as file:
            return file.read(max_nbytes)
    with _base64_errors():
        raw = decode_base64(url, _data_begin(url, max_nbytes, IMAGE))
    _require_format(url, raw, IMAGE)
    return raw


def copy(url: str, max_nbytes: int, folders: Sequence[Path], kind: MediaKind, write: Callable[[bytes], object]) -> None:
    """Writes the bytes of a medium in chunks, with one chunk in memory at a time."""
    if _is_file(url, kind):
        with _open_file(url, max_nbytes, folders, kind) as file:
            left = max_nbytes
            while chunk := file.read(min(CHUNK, left)):
                write(chunk)
                left -= len(chunk)
        return
    head = b""
    with _base64_errors():
        for chunk in base64_chunks(url, _data_begin(url, max_nbytes, kind)):
            head = head or chunk[:HEAD]
            write(chunk)
    _require_format(url, head, kind)


def file_nbytes(url: str, max_nbytes: int, folders: Sequence[Path], kind: MediaKind) -> int:
    """Returns the size of the file that a URL names; 0 for a data URL. Raises MediaRefused."""
    if not _is_file(url, kind):
        return 0
    with _open_file(url, max_nbytes, folders, kind) as file:
        return os.fstat(file.fileno()).st_size


def is_file(url: str) -> bool:
    return url[:5].lower() == "file:"


def _is_file(url: str, kind: MediaKind) -> bool:
    scheme = url.partition(":")[0].lower() if ":" in url[:16] else ""
    if scheme in ("http", "https"):
        way_out = f"send this one as data:{kind.example};base64,…"
        raise MediaRefused(400, f"{kind.noun}s are not fetched from other hosts: {way_out}")
    if scheme not in ("data", "file"):
        raise MediaRefused(400, f"expected a URL that begins with data:, got {url[:40]!r}")
    return scheme == "file"


# ── carried in the URL ───────────────────────────────────────────────────────────────────────────────────────────────
def _data_begin(url: str, max_nbytes: int, kind: MediaKind) -> int:
    """Returns where the base64 of a data URL begins."""
    comma = url.find(",", 0, LONGEST_HEAD)
    media_type, *parameters = url[len("data:") : max(comma, 0)].lower().split(";")
    if comma < 0 or parameters[-1:] != ["base64"]:
        raise MediaRefused(400, f"expected data:{kind.example};base64,…, got {url[:40]!r}")
    if media_type not in kind.types:
        raise MediaRefused(400, f"expected {kind.described} of type {', '.join(kind.types)}, got {media_type!r}")
    if decoded_nbytes(url, comma + 1) > max_nbytes:
        raise too_long(kind, max_nbytes)
    return comma + 1


def _require_format(url: str, head: bytes, kind: MediaKind) -> None:
    """Raises MediaRefused if the first bytes are of another format than the data URL says."""
    announced, actual = kind.types[url[len("data:") :].partition(";")[0].lower()], kind.format_of(head)
    if announced != actual:
        article = "an" if announced.startswith("MP") else "a"
        raise MediaRefused(400, f"expected {article} {announced} {kind.noun}, as its URL says, got {actual}")


def too_long(kind: MediaKind, max_nbytes: int, actual: object = "more") -> MediaRefused:
    return MediaRefused(413, f"{kind.described} has at most {max_nbytes} bytes, this one has {actual}")


@contextlib.contextmanager
def _base64_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise MediaRefused(400, f"{BAD_BASE64}: {error}") from None


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def _open_file(url: str, max_nbytes: int, folders: Sequence[Path], kind: MediaKind) -> Iterator[BinaryIO]:
    """Opens a file of at most `max_nbytes`, of which no more are to be read: it may grow."""
    if not folders:
        raise MediaRefused(400, "files are not open to clients here: see --allowed-local-media-path")
    path = _path_of(url)
    _require_beneath(os.path.realpath(path), folders)  # before opening, as opening a device may have effects
    try:
        with open(path, "rb", opener=_open) as file:
            # Checks the file that was opened, as links may have changed meanwhile.
            _require_beneath(os.readlink(f"/proc/self/fd/{file.fileno()}"), folders)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MediaRefused(400, "the file cannot be read: it is no regular file")
            if status.st_size > max_nbytes:
                raise too_long(kind, max_nbytes, status.st_size)
            yield file
    except OSError as error:
        raise MediaRefused(400, f"the file cannot be read: {error.strerror}") from None


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
    raise MediaRefused(400, f"expected file:///and an absolute path, got {url[:80]!r}")


def _require_beneath(path: str, folders: Sequence[Path]) -> None:
    """Raises MediaRefused if the path is in no allowed directory, whether or not the file exists."""
    if not any(Path(path).is_relative_to(folder) for folder in folders):
        raise MediaRefused(400, "the file is not beneath a folder that is open to clients")
