"""Connections that do not block: plain TCP, and TLS over it. Leaves to the link when to read and write."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

UNSENT_NBYTES = 256 << 10  # in the kernel, of what the remote side has not got: packets put later are behind no more
ENCRYPTED_NBYTES = 256 << 10  # that wait for the kernel
RECORD_NBYTES = 16 << 10  # of TLS
HALF = 16  # bytes of a knock in each label of a name
RECORD_HEAD = struct.Struct(">BBBH")
RECORD_TYPES, RECORD_VERSION = range(20, 24), 3  # its first two bytes
ABORTING = struct.pack("ii", 1, 0)  # SO_LINGER: what is unsent is dropped, and the remote side gets a reset


class OneSidedTls(OSError):
    """One side speaks TLS, and the other one does not."""


def record_nbytes(head: bytes) -> int:
    """Returns the length of the TLS record that begins so; 0: none does."""
    kind, version, _, nbytes = RECORD_HEAD.unpack(head)
    return RECORD_HEAD.size + int(nbytes) if kind in RECORD_TYPES and version == RECORD_VERSION else 0


class Knocked(ssl.SSLObject):
    """The TLS of a listener's side. The name of the server in ClientHello is the connector's knock."""

    has_knocked = False


def require_knocks(context: ssl.SSLContext, is_new: Callable[[bytes], bool]) -> None:
    """Has a listener's context refuse strangers before a signature is computed for them."""

    def check(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        assert isinstance(tls, Knocked), "the class that the context makes"
        try:
            tls.has_knocked = is_new(bytes.fromhex((name or "").replace(".", "")))
        except ValueError:
            tls.has_knocked = False
        return None if tls.has_knocked else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.sslobject_class = Knocked
    context.sni_callback = check


def configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # before Linux 3.12; then a frame waits behind more of a value
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)


class PlainWire:
    """TCP."""

    def __init__(self, connection: socket.socket) -> None:
        configure(connection)
        self._socket = connection
        self._sendmsg, self._recv_into = connection.sendmsg, connection.recv_into

    has_knocked = False  # by bytes that the handshake does not see
    wants_write = False  # besides what the caller has to send
    has_unread = False  # bytes that the descriptor does not show

    def fileno(self) -> int:
        return self._socket.fileno()

    def recv_into(self, room: memoryview) -> int | None:
        """Raises OSError if the connection is lost."""
        try:
            return self._recv_into(room)
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, buffers: list[Buffer]) -> int:
        """Raises OSError if the connection is lost."""
        try:
            return self._sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0

    def flush(self) -> None:
        pass

    def shut_down_writing(self) -> None:
        """The remote side reads the end when it has read all that was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, is_aborted: bool = False) -> None:
        """is_aborted: what has not been sent is dropped."""
        if is_aborted:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTING)
        self._socket.close()


class TlsWire:
    """TLS 1.3 over TCP. The handshake is made as the first bytes are read or sent."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, knock: bytes | None) -> None:
        """`knock`: of the connector; None: this is the listener's side."""
        self.plain = PlainWire(connection)
        self._arrived, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if knock is None else f"{knock[:HALF].hex()}.{knock[HALF:].hex()}"  # a label has 63 characters
        self._tls = context.wrap_bio(self._arrived, self._encrypted, server_side=knock is None, server_hostname=name)
        self._unsent: memoryview = memoryview(b"")
        self._room = memoryview(bytearray(4 * RECORD_NBYTES))
        self._has_arrived = False
        self._is_ended = False
        self._is_shaken = False
        self._lost: tuple[Any, ...] | None = None  # arguments of the OSError of a send that had taken bytes

    @property
    def has_knocked(self) -> bool:
        return isinstance(self._tls, Knocked) and self._tls.has_knocked

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent) or self._encrypted.pending > 0

    @property
    def has_unread(self) -> bool:
        return self._is_shaken and (self._tls.pending() > 0 or self._arrived.pending > 0)

    def fileno(self) -> int:
        return self.plain.fileno()

    def _shake(self) -> bool:
        """Goes on with the handshake. Returns whether it is done. Raises ssl.SSLError, an OSError, if it fails."""
        while not self._is_shaken:
            try:
                self._tls.do_handshake()
                self._is_shaken = True
            except ssl.SSLWantReadError:
                self.flush()
                if not self._feed():
                    break
            finally:
                self.flush()  # also what says why it fails
        return self._is_shaken

    def _feed(self) -> bool:
        """Reads what has arrived, encrypted. Returns whether there was something, or the end."""
        if self._is_ended:
            return False
        count = self.plain.recv_into(self._room)
        if count is None:
            return False
        if count == 0:
            self._raise_if_lost()  # the kernel tells of a reset once, and `send` has heard it
            self._is_ended = True
            self._arrived.write_eof()
        else:
            if not (self._has_arrived or self._room[0] in RECORD_TYPES):
                raise OneSidedTls
            self._has_arrived = True
            self._arrived.write(self._room[:count])
        return True

    def recv_into(self, room: memoryview) -> int | None:
        """Raises OSError if the connection is lost, the remote side shows no certificate of the authority, or does not
        speak TLS."""
        while True:
            if self._shake():
                try:
                    count: Any = self._tls.read(len(room), room)  # into the room, so it is a number
                    return int(count)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            if not self._feed():
                return 0 if self._is_ended else None

    def send(self, buffers: list[Buffer]) -> int:
        """Raises OSError if the connection is lost."""
        self._raise_if_lost()
        taken = 0
        if self._shake():
            for buffer in buffers:
                if self._encrypted.pending + len(self._unsent) >= ENCRYPTED_NBYTES:
                    break
                taken += self._tls.write(buffer)
        try:
            self.flush()
        except OSError as error:
            if not taken:
                raise
            # For the next call, as the remote side may have received a part of what was taken. Without its traceback,
            # which would hold the buffers.
            self._lost = error.errno, error.strerror
        return taken

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise OSError(*self._lost)

    def flush(self) -> None:
        """Sends what has been encrypted, as much as the connection takes."""
        self._raise_if_lost()
        while self._unsent or self._encrypted.pending:
            if not self._unsent:
                self._unsent = memoryview(self._encrypted.read())
            count = self.plain.send([self._unsent])
            if not count:
                return
            self._unsent = self._unsent[count:]

    def shut_down_writing(self) -> None:
        """The remote side reads the end when it has read all that was sent."""
        self.plain.shut_down_writing()

    def close(self, *, is_aborted: bool = False) -> None:
        """is_aborted: what has not been sent is dropped."""
        if not is_aborted and self._is_shaken:
            with contextlib.suppress(OSError):
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                self.flush()
        self.plain.close(is_aborted=is_aborted)
