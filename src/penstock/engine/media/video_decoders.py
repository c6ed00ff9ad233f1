"""The decoders of a server process: a few videos at a time, each in a process that is killed at a time limit.

    async with decoders.decoder("client") as decoder:
        opened = await decoder.open(upload, key)
        stored = await decoder.decode()

`decoder_host` forks a decoder for each video. A decoder that crashes or is killed ends one request. When a client
leaves, the decoder is killed; place and bytes are free once the process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec

from penstock.engine.cluster.logs import event
from penstock.engine.media import video_messages
from penstock.engine.media.media_budget import ByteLease, ByteSemaphore
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.video_file import VideoLimits
from penstock.engine.media.video_messages import (
    TO_SERVER,
    Decode,
    Fork,
    Inline,
    Open,
    Opened,
    Rejected,
    Setup,
    Stored,
)
from penstock.engine.media.video_settings import VideoSettings
from penstock.engine.media.video_upload import VideoUpload

T = TypeVar("T")

START_TIMEOUT = 120.0  # seconds; for the imports of the decoder host on a cold disk
MAIN = "import sys; from penstock.engine.media.decoder_host import main; main(*map(int, sys.argv[1:]))"
END_TIMEOUT = 1.0  # seconds that a decoder has to end by itself when its video has been taken
WORKING_NBYTES = 512 << 20  # of a decoder: FFmpeg's own frames and buffers, beside those that the budget counts
# Libraries of arrays start threads at import, and a fork copies one thread only.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}


class DecoderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What decoders get, and how many there are."""

    processor: VideoSettings
    limits: VideoLimits
    count: int  # videos that are decoded at a time
    store: str | None  # ticket of the store
    pixels_nbytes: int  # of a video's frames and tensors, at most: the budget of its stage
    log_format: str = "text"
    log_level: str = "info"

    def setup(self) -> Setup:
        processor, limits = msgspec.msgpack.encode(self.processor), msgspec.msgpack.encode(self.limits)
        nbytes = WORKING_NBYTES + self.pixels_nbytes
        return Setup(processor, limits, self.store, nbytes, self.log_format, self.log_level)


class VideoDecoder:
    """The decoder of one video, with the leases held until its process has ended."""

    def __init__(self, line: socket.socket, pidfd: int | None, seconds: float) -> None:
        self._line = line
        self._pidfd = pidfd
        self._limit = seconds
        self._left = seconds
        self._loop: asyncio.AbstractEventLoop | None = None  # that waits for its end
        self._alarm: asyncio.TimerHandle | None = None
        self.end = "refused"  # how it ends, as VIDEO_ENDS has it
        self._leases: list[ByteLease] = []

    def hold(self, lease: ByteLease) -> None:
        """Holds bytes, or a place, until the process has ended."""
        self._leases.append(lease)

    async def open(self, upload: VideoUpload, key: bytes) -> Opened:
        """Returns what the container says. Raises MediaRefused."""
        reply, _ = await self._ask(Open(key), upload.fd)
        assert isinstance(reply, Opened), "what a decoder answers first"
        return reply

    async def decode(self) -> tuple[Stored | Inline, int | None]:
        """Returns where the tensors are; of Inline the file, too, which the caller closes. Raises MediaRefused."""
        reply, fds = await self._ask(Decode())
        assert isinstance(reply, Stored | Inline), "what a decoder answers last"
        return reply, fds[0] if fds else None

    async def _ask(self, message: Open | Decode, *fds: int) -> tuple[object, list[int]]:
        began = time.monotonic()
        try:
            video_messages.send(self._line, message, fds)
            packet, received = await asyncio.wait_for(receive(self._line), self._left)
        except asyncio.TimeoutError:
            self.end = "timeout"
            event("video decoder killed", logging.WARNING, seconds=self._limit)
            reason = f"decoding a video takes at most {self._limit:g} s of a decoder, this one takes longer"
            raise MediaRefused(400, reason) from None
        except ConnectionError:
            packet, received = b"", []
        self._left -= time.monotonic() - began
        if not packet:
            self.end = "died"
            event("video decoder died", logging.WARNING)
            raise MediaRefused(400, "the decoder of this video has crashed: the file may be damaged")
        reply = TO_SERVER.decode(packet)
        if isinstance(reply, Rejected):
            raise MediaRefused(reply.status, reply.reason)
        return reply, received

    def close(self, *, is_taken: bool) -> None:
        """Ends the process, and then releases place and bytes. `is_taken`: the decoder may end by itself."""
        self._line.close()
        if self._pidfd is None:
            return self.forget()
        self._loop = asyncio.get_running_loop()
        if is_taken:
            self._alarm = self._loop.call_later(END_TIMEOUT, self._kill)
        else:
            self._kill()
        self._loop.add_reader(self._pidfd, self.forget)

    def _kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Gives back what is held for a process that has ended. May be called again, also when its loop is closed."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._pidfd is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._release()

    def _release(self) -> None:
        for lease in self._leases:
            lease.release()
        self._leases.clear()


class VideoDecoders:
    """Used by one event loop. The decoder host is started at the first video, and again where it has died."""

    def __init__(
        self,
        settings: DecoderSettings,
        changed: Callable[[int, int], None],
        ended: Callable[[str, float], None],
    ) -> None:
        """`changed` gets the number of videos that are being decoded, and of those that wait, after each change;
        `ended` how a video's decoder ended, as VIDEO_ENDS has it, and after how many seconds."""
        self._settings = settings
        self._places = ByteSemaphore(settings.count, changed)
        self._ended = ended
        self._lock = asyncio.Lock()  # of the host's socket: one fork at a time
        self._host: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._open: weakref.WeakSet[VideoDecoder] = weakref.WeakSet()

    @contextlib.asynccontextmanager
    async def decoder(self, client: str) -> AsyncIterator[VideoDecoder]:
        """Waits for a place, and yields a decoder. Raises MediaRefused if none can be started."""
        place = await self._places.acquire(client, 1)
        try:
            async with self._lock:
                line, pidfd = await self._fork()
        except BaseException:
            place.release()
            raise
        decoder = VideoDecoder(line, pidfd, self._settings.limits.decoder_seconds)
        decoder.hold(place)
        self._open.add(decoder)
        began = time.monotonic()
        try:
            yield decoder
            decoder.end = "decoded"
        except asyncio.CancelledError:
            decoder.end = "cancelled"
            raise
        finally:
            decoder.close(is_taken=decoder.end == "decoded")
            self._ended(decoder.end, time.monotonic() - began)

    async def _fork(self) -> tuple[socket.socket, int | None]:
        """Returns the socket of a new decoder, and its pidfd; None: it has ended already."""
        for is_last in (False, True):
            try:
                host = self._line or await self._start()
                return await self._fork_from(host)
            except ConnectionError:  # the host has died
                self._drop_host()
                if is_last:
                    break
            except BaseException:  # cancelled before the host has answered: its answer would be taken for another's
                self._drop_host()
                raise
        event("video decoders do not start", logging.ERROR)
        raise MediaRefused(500, "no video decoder can be started: the server's log says why")

    async def _fork_from(self, host: socket.socket) -> tuple[socket.socket, int | None]:
        line, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with peer:
                line.setblocking(False)
                video_messages.send(host, Fork(), [peer.fileno()])
            packet, fds = await receive(host)
            if not packet:
                raise ConnectionResetError
        except BaseException:
            line.close()
            raise
        return line, fds[0] if fds else None

    async def _start(self) -> socket.socket:
        """Starts the decoder host. Raises ConnectionError if it ends before it can fork."""
        began = time.monotonic()
        self._line, self._host, _ = await start_host(MAIN, self._settings.setup())
        event("video decoders started", seconds=time.monotonic() - began)
        return self._line

    def _drop_host(self) -> None:
        line, host = self._line, self._host
        self._line = self._host = None
        if line is not None:
            line.close()
        if host is not None:
            host.kill()  # its decoders end with it
            host.wait()

    def close(self) -> None:
        """Ends the host, and all decoders with it."""
        self._drop_host()
        for decoder in tuple(self._open):
            decoder.forget()


async def start_host(main: str, setup: msgspec.Struct) -> tuple[socket.socket, subprocess.Popen[bytes], bytes]:
    """Starts a process that runs the statements `main`, and returns its socket and its first packet.

    The process ends with the thread that calls this. Raises ConnectionError if the process ends before the packet.
    """
    line, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    with peer:
        command = [sys.executable, "-c", main, str(peer.fileno()), str(os.getpid())]
        environment = {**os.environ, **ONE_THREAD, "PYTHONSAFEPATH": "1"}
        host = subprocess.Popen(command, pass_fds=[peer.fileno()], env=environment, cwd="/")
    try:
        video_messages.send(line, setup)
        packet, _ = await asyncio.wait_for(receive(line), START_TIMEOUT)
        if not packet:
            raise ConnectionResetError
    except BaseException as error:
        line.close()
        host.kill()
        host.wait()
        if isinstance(error, asyncio.TimeoutError):
            raise ConnectionResetError from None
        raise
    return line, host, packet


async def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Waits for a packet. It is empty when the other end has been closed. Raises ConnectionError."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(line, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(line)
    packet, fds = video_messages.receive(line)
    for fd in fds:
        os.set_inheritable(fd, False)
    return packet, fds
