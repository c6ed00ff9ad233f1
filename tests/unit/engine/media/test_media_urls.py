"""What the URL of an image may say, and which files it may name."""

import base64
import os
from pathlib import Path

import pytest

from penstock.engine.media import base64_text, media_urls
from penstock.engine.media.base64_text import CHUNK
from penstock.engine.media.media_kind import IMAGE, MediaRefused
from penstock.engine.media.media_urls import file_nbytes, read

RAWS = {
    "image/png": b"\x89PNG\r\n\x1a\n" + bytes(range(200)),
    "image/jpeg": b"\xff\xd8\xff" + bytes(range(100)),
    "image/webp": b"RIFF\0\0\0\0WEBP" + bytes(50),
    "image/gif": b"GIF89a" + bytes(50),
}
PNG = RAWS["image/png"]
MOST = 10_000


def data_url(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def refusal(url: str, *folders: Path, most: int = MOST) -> MediaRefused:
    with pytest.raises(MediaRefused) as caught:
        read(url, most, folders)
    assert len(caught.value.reason) < 200, "it says again what was sent"
    return caught.value


# ── carried in the URL ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", RAWS)
def test_a_data_url_carries_an_image_of_the_type_it_names(kind: str) -> None:
    raw = RAWS[kind]
    assert read(data_url(raw, kind), MOST, []) == raw
    assert read(data_url(raw, kind.upper()).replace("data", "DATA"), MOST, []) == raw
    assert read(data_url(raw, f"{kind};charset=x"), MOST, []) == raw


def test_long_data_url_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHUNK % 4 == 0
    monkeypatch.setattr(base64_text, "CHUNK", 8)
    for nbytes in range(20, 40):
        assert read(data_url(PNG[:nbytes]), MOST, []) == PNG[:nbytes]
    url = data_url(PNG)
    assert "not base64: more comes after" in refusal(url[:42] + "AAA=" + url[46:]).reason


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,iVBORw0KGg", "not base64"),
        ("data:image/png;base64,iVBO!w0KGgo=", "not base64"),
        ("data:image/png;base64,iVBO\nRw0KGgo=", "not base64"),
        ("data:image/png;base64,iVBOé", "not base64"),
        ("data:image/png;base64,", "expected a PNG image, as its URL says, got something else"),
        (data_url(PNG, "image/webp"), "expected a WebP image, as its URL says, got PNG"),
        (data_url(b"<html>", "image/png"), "got something else"),
        (data_url(PNG, "text/html"), "got 'text/html'"),
        (data_url(PNG, "image/svg+xml"), "got 'image/svg+xml'"),
        (data_url(PNG, ""), "got ''"),
        ("data:image/png,abc", "expected data:image/png;base64"),
        ("data:image/png;base64", "expected data:image/png;base64"),
        ("data:" + "x" * 10_000 + ";base64,AAAA", "expected data:image/png;base64"),
        ("http://169.254.169.254/latest", "images are not fetched from other hosts"),
        ("HTTPS://example.com/a.png", "images are not fetched from other hosts"),
        ("ftp://example.com/a.png", "expected a URL that begins with data:"),
        ("iVBORw0KGgo=" * 1000, "expected a URL that begins with data:"),
        ("", "expected a URL that begins with data:"),
    ],
)
def test_invalid_data_url_is_refused(url: str, reason: str) -> None:
    error = refusal(url)
    assert error.status == 400 and reason in error.reason


def test_data_url_that_is_too_long_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(data_url(PNG), len(PNG), [])
    monkeypatch.setattr(media_urls, "decode_base64", None)
    assert refusal(data_url(PNG), most=len(PNG) - 3).status == 413


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`open` may be read, `secret` and `openly` may not."""
    for name in ("open", "open/deep", "secret", "openly"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a b.png").write_bytes(PNG)
    return tmp_path.resolve()


def test_a_file_beneath_an_open_folder_is_read(folder: Path) -> None:
    (folder / "open" / "link.png").symlink_to(folder / "open" / "deep" / "a b.png")
    inside = folder / "open"
    for url in (
        f"file://{inside}/a%20b.png",
        f"file://localhost{inside}/deep/a b.png",
        f"FILE://{inside}/deep/../a b.png",
        f"file://{inside}/link.png",
    ):
        assert read(url, MOST, [folder / "secret", inside]) == PNG


def test_file_outside_the_open_folders_is_not_read(folder: Path) -> None:
    inside = folder / "open"
    (inside / "out.png").symlink_to(folder / "secret" / "a b.png")
    (inside / "out").symlink_to(folder / "secret")
    (inside / "up").symlink_to("..")
    for path in (
        f"{folder}/secret/a b.png",
        f"{folder}/openly/a b.png",
        f"{inside}/../secret/a b.png",
        f"{inside}/%2e%2e/secret/a b.png",
        f"{inside}/..%2fsecret/a b.png",
        f"{inside}/out.png",
        f"{inside}/out/a b.png",
        f"{inside}/up/secret/a b.png",
        f"{inside}/../nowhere.png",
        "/etc/passwd",
        "/proc/self/environ",
        "/dev/zero",
        "/",
    ):
        error = refusal(f"file://{path}", inside)
        assert (error.status, error.reason) == (400, "the file is not beneath a folder that is open to clients"), path


def test_a_file_that_becomes_a_link_while_it_is_looked_at_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = folder / "open"
    (inside / "out.png").symlink_to(folder / "secret" / "a b.png")
    monkeypatch.setattr(os.path, "realpath", lambda path: str(inside / "a b.png"))  # as it was a moment ago
    assert "not beneath" in refusal(f"file://{inside}/out.png", inside).reason


def test_path_that_is_no_regular_file_is_refused_without_waiting(folder: Path) -> None:
    inside = folder / "open"
    os.mkfifo(inside / "pipe")
    for path, reason in (
        ("nowhere.png", "No such file"),
        ("deep", "Is a directory"),
        ("pipe", "no regular file"),
        ("a%20b.png/x", "Not a directory"),
        ("a" * 300, "File name too long"),
    ):
        error = refusal(f"file://{inside}/{path}", inside)
        assert error.status == 400 and reason in error.reason


def test_a_file_that_is_too_long_is_not_read(folder: Path) -> None:
    assert refusal(f"file://{folder}/open/a b.png", folder, most=len(PNG) - 1).status == 413
    assert read(f"file://{folder}/open/a b.png", len(PNG), [folder]) == PNG


@pytest.mark.parametrize("url", ["file://a%20b.png", "file:a.png", "file://host/a.png", "file:///a%00b", "file://[/a"])
def test_file_url_with_a_host_or_without_a_path_is_refused(url: str, folder: Path) -> None:
    assert "expected file:///and an absolute path" in refusal(url, folder).reason
    assert "files are not open to clients here" in refusal(url).reason


def test_file_nbytes_is_the_size_of_a_file_and_0_of_a_data_url(folder: Path) -> None:
    file = folder / "open" / "a b.png"
    assert file_nbytes(file.as_uri(), MOST, [folder / "open"], IMAGE) == len(PNG)
    assert file_nbytes(data_url(PNG), MOST, [folder / "open"], IMAGE) == 0
