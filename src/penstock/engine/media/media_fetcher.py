"""Fetches images and videos from allowed hosts: one request each, in a thread, to an address that was checked before.

A URL lets a client make this machine send a request to hosts that the client cannot reach. So the server's options name
the allowed hosts. A host's name is resolved once, and the connection goes to an address that was checked. Redirects are
not followed. Details of a failed connection are logged, and not sent to the client. http.client implements HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from penstock.engine.cluster.logs import event
from penstock.engine.media.media_kind import HEAD, IMAGE, UNKNOWN, VIDEO, MediaKind, MediaRefused
from penstock.engine.media.media_urls import too_long

AT_ONCE = 8  # fetches of a server process; further fetches wait
# Of a fetch, with the wait for its turn, for its host's name, and all that the host sends.
SECONDS = {IMAGE.noun: 10.0, VIDEO.noun: 30.0}
MAX_SAID = 200  # characters of an error in the log: it may have text of the host
MAX_ADDRESSES = 4  # addresses of a host that are tried
PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
HEADERS = {"User-Agent": "penstock", "Accept-Encoding": "identity", "Connection": "close"}
FAILED = "could not be fetched from its host"

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowedHost(NamedTuple):
    name: str
    port: int | None  # None: that of the scheme

    @classmethod
    def of(cls, text: str) -> AllowedHost:
        """'example.org', '10.0.0.7:8080', '[::1]'. Raises ValueError."""
        parts = urlsplit(f"//{text}")
        if not parts.hostname or parts.netloc != text or "@" in text or not _is_plain(text) or parts.port == 0:
            raise ValueError(f"expected a host as in example.org or 10.0.0.7:8080, not {text!r}")
        return cls(parts.hostname.lower(), parts.port)


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def is_public(address: Address) -> bool:
    """Returns whether the address is public: not of this machine or its network, multicast or reserved."""
    if isinstance(address, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else None
        inner = address.ipv4_mapped or address.sixtofour or nat64 or (address.teredo and address.teredo[1])
        if inner:  # packets are routed to the inner address
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


class MediaFetcher:
    """The fetches of one server process."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        seconds: float | None = None,
        resolve: Callable[..., list[Any]] = socket.getaddrinfo,
        is_open: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`seconds`: of a fetch; None: those of its kind. `is_open`: whether a host's name may resolve to an address. A
        host that is allowed by its address is not checked. Raises ValueError.
        """
        self._hosts = frozenset(map(AllowedHost.of, hosts))
        self._seconds = seconds
        self._resolve = resolve
        self._is_open = is_open
        self._tls = tls or ssl.create_default_context()
        self._threads = ThreadPoolExecutor(AT_ONCE, "fetch")

    def close(self) -> None:
        """Does not wait for running fetches, which end by their timeouts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(
        self,
        url: str,
        max_nbytes: int,
        kind: MediaKind = IMAGE,
        announced: Callable[[int], object] = lambda nbytes: None,
    ) -> bytes:
        """Returns the bytes of a medium. If cancelled, it closes its connection at once. Raises MediaRefused.

        `announced` gets the number of bytes that the host says it will send, in the event loop.
        """
        loop = asyncio.get_running_loop()
        seconds = SECONDS[kind.noun] if self._seconds is None else self._seconds
        target = self._parse_url(url, kind)
        fetch = _Fetch(target, max_nbytes, seconds, kind, lambda nbytes: loop.call_soon_threadsafe(announced, nbytes))
        doing = loop.run_in_executor(self._threads, self._run, fetch)
        try:
            return await asyncio.wait_for(doing, seconds)
        except asyncio.TimeoutError:
            raise MediaRefused(400, f"{fetch.failed} within {seconds:g} s") from None
        finally:
            fetch.end()

    def _parse_url(self, url: str, kind: MediaKind) -> Target:
        try:
            parts = urlsplit(url)
            name, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise MediaRefused(400, f"expected a URL with a host, got {url[:80]!r}") from None
        if not name or "@" in parts.netloc or not _is_plain(url) or parts.scheme not in PORTS:
            raise MediaRefused(400, f"expected a URL like https://HOST/PATH, percent-encoded, got {url[:80]!r}")
        usual = PORTS[parts.scheme]
        port = usual if port is None else port
        if AllowedHost(name, port) not in self._hosts and (port != usual or AllowedHost(name, None) not in self._hosts):
            way_out = f"send this one as data:{kind.example};base64,…"
            raise MediaRefused(400, f"{kind.noun}s are not fetched from this host: {way_out}")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = f"[{name}]" if ":" in name else name
        return Target(parts.scheme == "https", name, port, host if port == usual else f"{host}:{port}", target)

    def _run(self, fetch: _Fetch) -> bytes:
        """Resolves and fetches, in a thread. Raises MediaRefused."""
        target = fetch.target
        try:
            addresses = self._resolve(target.name, target.port, type=socket.SOCK_STREAM)
            is_literal = _address(target.name) is not None
            places = [
                (address[0], address[4])
                for address in addresses
                if is_literal or self._is_open(_address(address[4][0]))
            ]
            return fetch.run(places, self._tls if target.is_tls else None)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not fetch.is_over:
                failure = f"{type(error).__name__}: {error}"
                event(
                    f"{fetch.kind.noun} not fetched", logging.WARNING, host=target.host_header, error=failure[:MAX_SAID]
                )
            raise MediaRefused(400, fetch.failed) from None


class Target(NamedTuple):
    """A URL in parts."""

    is_tls: bool
    name: str
    port: int
    host_header: str
    path: str  # with the query


class _Fetch:
    """One fetch, in a thread. The event loop may end it at any time."""

    def __init__(
        self, target: Target, max_nbytes: int, seconds: float, kind: MediaKind, announced: Callable[[int], object]
    ) -> None:
        self.target = target
        self.kind = kind
        self.failed = f"the {kind.noun} {FAILED}"
        self._announced = announced
        self.is_over = False
        self._max_nbytes = max_nbytes
        self._seconds = seconds
        self._lock = threading.Lock()
        self._dup: socket.socket | None = None  # of the connection: a socket that TLS has wrapped cannot be shut down

    def end(self) -> None:
        """Shuts the connection down: the thread stops waiting."""
        with self._lock:
            self.is_over = True
            if self._dup is not None:
                with contextlib.suppress(OSError):  # it has been ended from there
                    self._dup.shutdown(socket.SHUT_RDWR)

    def run(self, places: Sequence[tuple[int, Any]], tls: ssl.SSLContext | None) -> bytes:
        """`places`: families and addresses, all checked. Raises OSError, HTTPException, MediaRefused."""
        failed = OSError("the host has no allowed address")
        for family, address in places[:MAX_ADDRESSES]:
            with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as plain, self._watched(plain):
                try:
                    plain.settimeout(self._seconds / 2)  # so that the next address can be tried
                    plain.connect(address)
                    plain.settimeout(None)  # but for `end`
                except OSError as error:
                    failed = error
                    continue
                if tls is None:
                    return self._ask(plain)
                with tls.wrap_socket(plain, server_hostname=self.target.name) as secret:
                    return self._ask(secret)
        raise failed

    @contextlib.contextmanager
    def _watched(self, plain: socket.socket) -> Iterator[None]:
        with self._lock:
            if self.is_over:
                raise ConnectionAbortedError("the fetch was ended")
            self._dup = line = plain.dup()
        try:
            yield
        finally:
            with self._lock:
                line.close()
                self._dup = None

    def _ask(self, line: socket.socket) -> bytes:
        connection = http.client.HTTPConnection(self.target.name, self.target.port)
        connection.sock = line  # without it, http.client would resolve the name again
        connection.request("GET", self.target.path, headers={"Host": self.target.host_header, **HEADERS})
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise MediaRefused(400, f"{self.failed}: its status is {answer.status}, and redirects are not followed")
            if answer.getheader("Content-Encoding", "identity").lower() != "identity":
                raise MediaRefused(400, f"{self.failed}: its Content-Encoding was not requested")
            max_nbytes = self._max_nbytes
            if answer.length is not None and answer.length <= max_nbytes:
                self._announced(answer.length)
            raw = answer.read(max_nbytes + 1) if answer.length is None or answer.length <= max_nbytes else None
            if raw is None or len(raw) > max_nbytes:
                raise too_long(self.kind, max_nbytes)
            if answer.length:  # bytes of its Content-Length that have not come
                raise http.client.IncompleteRead(raw, answer.length)
        if self.kind.format_of(raw[:HEAD]) == UNKNOWN:
            types = ", ".join(self.kind.types)
            raise MediaRefused(400, f"expected {self.kind.described} of type {types} from its host, got something else")
        return raw


def _address(host: str) -> Any:
    """Returns the IP address; None: the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_plain(url: str) -> bool:
    """Returns whether a URL has only characters about which all parsers agree."""
    return url.isascii() and url.isprintable() and not set(url) & set(' "<>\\^`{|}')
