"""What the launcher and its server processes share: the listening socket, the certificate, and further arguments."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from dataclasses import dataclass

from penstock import Store, lowlevel
from penstock.server.options import ServerOptions

BACKLOG = 1024  # connections that no process has accepted yet
KERNEL_NBYTES = 256 << 10  # of an answer in the kernel, for a client that does not read


@dataclass(frozen=True)
class ServerArgs:
    """Handed to each server process while it is being spawned."""

    options: ServerOptions
    listener: socket.socket
    tally: lowlevel.Segment
    server_info: lowlevel.Segment  # kept open, as `penstock top` finds the server by it
    history_segment: lowlevel.Segment
    response_store: Store | None  # None: no response is stored


def listen(options: ServerOptions) -> socket.socket:
    """Returns the listening socket from which all server processes accept connections.

    The processes share one socket and do not have one each (SO_REUSEPORT): an idle process accepts the next connection,
    a connection in the queue survives the death of a process, and a stopped process gets none. Raises OSError, which
    names host and port.
    """
    try:
        return _unix_listener(options.uds) if options.uds else _listener(options)
    except OSError as error:
        if options.uds:
            number = error.errno or errno.ENAMETOOLONG  # which socket.bind leaves out
            raise OSError(number, f"cannot listen on {options.uds!r}: {error.strerror or error}") from None
        hint = ": another --port, or 0 for one that is free" if error.errno == errno.EADDRINUSE else ""
        text = f"cannot listen on port {options.port} of {options.host!r}: {error.strerror or error}{hint}"
        raise OSError(error.errno, text) from None


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Returns the context of the server's certificate; None: connections are not encrypted. Raises ValueError."""
    if not options.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])

    def no_passphrase() -> str:  # or the library would ask for it on the terminal
        raise ValueError("the key has a passphrase")

    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, no_passphrase)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = f"--ssl-certfile {options.ssl_certfile} and --ssl-keyfile {options.ssl_keyfile}"
        raise ValueError(f"{files} cannot be used: {error}") from None
    return context


def _unix_listener(path: str) -> socket.socket:
    """Takes the place of a socket to which no process listens any more, and of nothing else."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _listener(options: ServerOptions) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
            # Accepted sockets inherit these. The kernel ends a connection to a client that reads nothing for so long.
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_NBYTES),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.client_timeout * 1e3)),
        ):
            listener.setsockopt(level, name, value)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
