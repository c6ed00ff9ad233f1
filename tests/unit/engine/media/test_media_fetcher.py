"""Images on other hosts: which are asked, by which address, how long and how much; all hosts here are this machine."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.engine.media import media_fetcher
from penstock.engine.media.media_fetcher import AT_ONCE, AllowedHost, MediaFetcher, Target, is_public, is_remote
from penstock.engine.media.media_kind import IMAGE, MediaRefused
from penstock.server.options import ServerOptions
from tests.conftest import eventually
from tests.support.loops import in_a_loop

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(250)) * 8
MOST = 10_000
TRUSTING = ssl.create_default_context()  # takes long to make
WITHIN = 10.0  # seconds; until a thread that need not wait has gone on, on a busy machine
Script = Callable[[socket.socket], None]

# Of images.test, which is nowhere; until 2126.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUEbG0CqhxE34WQDS1MkwhTB3ImXkwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLaW1hZ2VzLnRlc3QwIBcNMjYxMTIyMDMxNzQ2WhgPMjEyNjEw
MjkwMzE3NDZaMBYxFDASBgNVBAMMC2ltYWdlcy50ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEbct41QQR2E+aWDZbn6VXo6cV2N+5dtOJj2sOzoS0O6k6DTUl
8TJDKCTIVGTKywPy5NrpHcYZJOLuy8VlQJLMuaNrMGkwHQYDVR0OBBYEFDITgaqZ
rMW0Fhcm+XGHfRzKAexCMB8GA1UdIwQYMBaAFDITgaqZrMW0Fhcm+XGHfRzKAexC
MA8GA1UdEwEB/wQFMAMBAf8wFgYDVR0RBA8wDYILaW1hZ2VzLnRlc3QwCgYIKoZI
zj0EAwIDSAAwRQIgRjH/7xiYry8ZeeKagkkSNuOcX+hs3lNpCx6eyux6E8ECIQDm
jpTdyCfs/lza7CDW4D/z1cjNT6euKDYo9qJWzYlh5Q==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgMTYijHU6GK4Zy09/
OaSYxb+2erLvnzKXTcdlKm+gMN2hRANCAARty3jVBBHYT5pYNlufpVejpxXY37l2
04mPaw7OhLQ7qToNNSXxMkMoJMhUZMrLA/Lk2ukdxhkk4u7LxWVAksy5
-----END PRIVATE KEY-----
"""


def whole(status: str = "200 OK", body: bytes = PNG, head: bytes = b"") -> Script:
    output = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n".encode() + head
    return lambda line: line.sendall(output + b"\r\n" + body)


def bare(*pieces: bytes, until_gone: bool = False) -> Script:
    def say(line: socket.socket) -> None:
        for piece in pieces:
            line.sendall(piece)
        if until_gone:
            line.recv(1)

    return say


class Elsewhere:
    """A host that answers every client with its script."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.script: Script = whole()
        self.heads: list[str] = []
        self.open = 0
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(line,)))
                self._threads[-1].start()

    def _serve(self, line: socket.socket) -> None:
        self.open += 1
        try:
            with contextlib.suppress(OSError), line:
                line.settimeout(6 * WITHIN)  # so that it is not what ends a connection
                if self._tls is None:
                    return self._answer(line)
                with self._tls.wrap_socket(line, server_side=True) as secret:
                    self._answer(secret)
        finally:
            self.open -= 1

    def _answer(self, line: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += line.recv(65536) or b"\r\n\r\n"
        self.heads.append(head.decode("latin-1"))
        self.script(line)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for item in (self._accepting, *self._threads):
            item.join(WITHIN)

    def until(self, many: int) -> None:
        eventually(lambda: self.open == many, WITHIN)


@pytest.fixture
def host() -> Iterator[Elsewhere]:
    with contextlib.closing(Elsewhere()) as result:
        yield result


def fetched(url: str, hosts: tuple[str, ...], most: int = MOST, **options: Any) -> bytes:
    async def fetch() -> bytes:
        with contextlib.closing(MediaFetcher(hosts, **{"tls": TRUSTING, **options})) as fetcher:
            return await fetcher.fetch(url, most)

    return asyncio.run(fetch())


FAILED = f"the image {media_fetcher.FAILED}"


def refusal(url: str, hosts: tuple[str, ...], **options: Any) -> MediaRefused:
    with pytest.raises(MediaRefused) as caught:
        fetched(url, hosts, **options)
    assert len(caught.value.reason) < 200, "it says again what was sent"
    return caught.value


def resolved(*result: str) -> Callable[..., list[Any]]:
    """Says these addresses for every name."""

    def resolve(name: str, port: int, **_: Any) -> list[Any]:
        return [socket.getaddrinfo(item, port, type=socket.SOCK_STREAM)[0] for item in result]

    return resolve


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_image_on_a_host_that_is_open_is_fetched_by_one_plain_request(host: Elsewhere) -> None:
    place = f"127.0.0.1:{host.port}"
    assert fetched(f"http://{place}/a%20b.png?x=1&y=2#z", (place,)) == PNG
    (head,) = host.heads
    assert head.startswith(f"GET /a%20b.png?x=1&y=2 HTTP/1.1\r\nHost: {place}\r\n")
    assert "Accept-Encoding: identity" in head and "authorization" not in head.lower()
    assert fetched(f"HTTP://{place}", ("example.org", place)) == PNG
    assert host.heads[1].startswith("GET / HTTP/1.1\r\n")


def test_allowed_domain_admits_no_other_spelling_of_its_host(host: Elsewhere) -> None:
    place = f"127.0.0.1:{host.port}"
    for url in (
        f"http://localhost:{host.port}/",
        f"http://127.1:{host.port}/",
        f"http://2130706433:{host.port}/",
        f"http://[::ffff:127.0.0.1]:{host.port}/",
        f"http://127.0.0.1.:{host.port}/",
        "http://127.0.0.1/",
        "https://127.0.0.1:1/",
        f"http://{place}@example.com/",
        f"http://example.org@{place}/",
        f"http://example.com\\@{place}/",
        f"http://{place}\\.example.com/",
        f"http://example.com#@{place}/",
        f"http://sub.{place}/",
        f"http://{place}/a b",
        f"http://{place}/\r\nX: y",
        f"http://{place}/\té",
        "http:///x",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:x/",
    ):
        error = refusal(url, (place, "example.org"), resolve=resolved("127.0.0.1"))
        assert error.status == 400 and (
            "expected a URL" in error.reason or "not fetched from this host" in error.reason
        )
    assert host.heads == []


def test_a_host_without_a_port_is_open_at_the_ports_of_its_schemes_alone() -> None:
    def resolve(name: str, port: int, **_: Any) -> list[Any]:
        request.append((name, port))
        return []

    request: list[tuple[str, int]] = []
    for url in (
        "http://example.org/a",
        "https://Example.org:443/a",
        "https://example.org/a",
        "http://example.org:8080",
    ):
        refusal(url, ("EXAMPLE.org",), resolve=resolve)
    assert request == [("example.org", 80), ("example.org", 443), ("example.org", 443)]


@pytest.mark.parametrize("address", ["", "a/b", "http://a", "u@a", "a b", "a:x", "a:99999", "a:0", "*.a?", "é", "[::1"])
def test_invalid_allowed_host_is_refused_at_start(address: str) -> None:
    with pytest.raises(ValueError):
        ServerOptions(allowed_media_domains=(address,))


def test_hosts_are_told_apart_by_name_and_port() -> None:
    assert AllowedHost.of("Example.org") == ("example.org", None)
    assert AllowedHost.of("10.0.0.7:8080") == ("10.0.0.7", 8080)
    assert AllowedHost.of("[::1]:80") == ("::1", 80)
    assert is_remote("HTTPS://x") and is_remote("http://x") and not is_remote("data:image/png;base64,http://")


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "address",
    [
        *"127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1".split(),
        *("255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%1", "fc00::1"),
        *("fec0::1", "ff02::1", "2001:db8::1", "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"),
        *("2001:0:c000:221:0:0:f5ff:fffe",),
    ],
)
def test_private_address_is_not_connected_to(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_address_is_connected_to(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_host_with_an_internal_address_is_refused_without_revealing_it(host: Elsewhere) -> None:
    name = f"images.test:{host.port}"
    inside = refusal(f"http://{name}/", (name,), resolve=resolved("127.0.0.1", "10.0.0.1"))

    def nowhere(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    unknown = refusal(f"http://{name}/", (name,), resolve=nowhere)
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        place = "{}:{}".format(*closed.getsockname())
        deaf = refusal(f"http://{place}/", (place,))
    assert inside.reason == unknown.reason == deaf.reason and inside.status == 400
    assert "127" not in inside.reason and host.heads == []


def test_fetch_connects_to_the_address_that_was_checked(host: Elsewhere) -> None:
    name = f"images.test:{host.port}"
    looked: list[str] = []
    resolve = resolved("10.0.0.1", "127.0.0.1", "127.0.0.1")

    def is_open(address: Any) -> bool:
        looked.append(str(address))
        return address.is_loopback  # as if it were of the internet

    assert fetched(f"http://{name}/", (name,), resolve=resolve, is_open=is_open) == PNG
    assert looked == ["10.0.0.1", "127.0.0.1", "127.0.0.1"] and f"Host: {name}" in host.heads[0]


def test_fetcher_tries_the_next_address_of_a_host(host: Elsewhere) -> None:
    name = f"images.test:{host.port}"
    resolve, every = resolved("::1", "127.0.0.1"), lambda _: True
    assert fetched(f"http://{name}/", (name,), resolve=resolve, is_open=every) == PNG


def test_behind_tls_the_host_must_be_the_one_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "pem").write_text(CERTIFICATE)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(tmp_path / "pem")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "pem"))
    values: dict[str, Any] = {"resolve": resolved("127.0.0.1"), "is_open": lambda _: True}
    with contextlib.closing(Elsewhere(ours)) as host:
        right, wrong = f"images.test:{host.port}", f"other.test:{host.port}"
        assert fetched(f"https://{right}/x", (right,), tls=trusting, **values) == PNG
        assert refusal(f"https://{wrong}/x", (wrong,), tls=trusting, **values).reason == FAILED
        assert refusal(f"https://{right}/x", (right,), **values).reason == FAILED  # no authority has signed it
        assert len(host.heads) == 1
        host.script = bare(b"HTTP/1.1 200 OK\r\n", until_gone=True)
        late = refusal(f"https://{right}/x", (right,), tls=trusting, seconds=1.0, **values)
        assert "within 1 s" in late.reason
        host.until(0)


# ── what it answers ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (whole("302 Found", head=b"location: http://127.0.0.1:1/\r\n"), 400, "status is 302, and redirects are not"),
        (whole("404 Not Found"), 400, "status is 404"),
        (whole("206 Partial Content"), 400, "status is 206"),
        (whole(body=b"<html>secret</html>"), 400, "got something else"),
        (whole(body=b""), 400, "got something else"),
        (whole(head=b"content-encoding: gzip\r\n"), 400, "Content-Encoding"),
        (whole(body=PNG * 10), 413, "has at most 10000 bytes"),
        (bare(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", until_gone=True), 413, "at most 10000 bytes"),
        (bare(b"HTTP/1.1 200 OK\r\n\r\n", *[PNG] * 20), 413, "at most 10000 bytes"),
        (
            bare(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"7d8\r\n" + PNG + b"\r\n"] * 9),
            413,
            "most",
        ),
        (bare(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + PNG), 400, FAILED),
        (bare(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"), 400, FAILED),
        (bare(b"SSH-2.0-OpenSSH_9.0\r\n"), 400, FAILED),
        (bare(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200), 400, FAILED),
        (bare(), 400, FAILED),
    ],
)
def test_fetched_body_that_is_no_image_or_too_long_is_refused(
    host: Elsewhere, script: Script, status: int, reason: str
) -> None:
    host.script = script
    place = f"127.0.0.1:{host.port}"
    error = refusal(f"http://{place}/x", (place,))
    assert error.status == status and reason in error.reason and "secret" not in error.reason
    assert len(host.heads) == 1


def test_image_of_exactly_the_limit_is_taken(host: Elsewhere) -> None:
    place = f"127.0.0.1:{host.port}"
    assert fetched(f"http://{place}/x", (place,), most=len(PNG)) == PNG
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(item), item) for item in (PNG[:7], PNG[7:]))
    host.script = bare(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert fetched(f"http://{place}/x", (place,), most=len(PNG)) == PNG


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_host_that_drips_wins_no_time(host: Elsewhere) -> None:
    def drip(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            line.sendall(b"a: b\r\n")
            time.sleep(0.05)

    place = f"127.0.0.1:{host.port}"
    for script in (drip, bare(until_gone=True), bare(b"HTTP/1.1 200 OK\r\n\r\n", until_gone=True)):
        host.script = script
        assert "within 0.3 s" in refusal(f"http://{place}/x", (place,), seconds=0.3).reason
        host.until(0)
    assert "within 0.3 s" in refusal(f"https://{place}/x", (place,), seconds=0.3).reason  # it never shakes hands
    host.until(0)


@in_a_loop
async def test_cancelled_fetch_closes_its_connection(host: Elsewhere) -> None:
    host.script = bare(b"HTTP/1.1 200 OK\r\n", until_gone=True)
    place = f"127.0.0.1:{host.port}"
    with contextlib.closing(MediaFetcher((place,), seconds=60.0)) as fetcher:
        asking = [asyncio.ensure_future(fetcher.fetch(f"http://{place}/", MOST)) for _ in range(AT_ONCE + 2)]
        await asyncio.to_thread(host.until, AT_ONCE)  # and the others wait for their turn
        for item in asking:
            item.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.to_thread(host.until, 0)
        assert len(host.heads) == AT_ONCE, "one that nobody waits for has begun"
        host.script = whole()
        assert await fetcher.fetch(f"http://{place}/", MOST) == PNG


def test_a_fetch_that_was_ended_before_it_began_connects_to_no_host(host: Elsewhere) -> None:
    fetch = media_fetcher._Fetch(Target(False, "127.0.0.1", host.port, "", "/"), MOST, 5.0, IMAGE, lambda nbytes: None)
    fetch.end()
    with pytest.raises(ConnectionAbortedError, match="the fetch was ended"):
        fetch.run([(socket.AF_INET, ("127.0.0.1", host.port))], None)
    assert not host.heads
