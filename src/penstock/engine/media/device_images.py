"""The media process of a server process: makes the tensors of images on a device, and holds the device's context.

    handle, value = await images.load(key, encoded, file, scope)     in the server, which computes nothing on the device

The media process is started at the first image. Its pool of device memory has the tensors. The server holds leases of
their slices in the scope of the request, without a CUDA context, and workers map the pool. Where not all workers reach
the pool, or it has no room, the media process writes the tensors to the store, under the key of the image. A media
process that dies is replaced, and the images that it had are processed once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, BinaryIO

from penstock import Missing
from penstock.codec.buffer import Buffer
from penstock.engine.cluster.logs import event
from penstock.engine.media import video_messages
from penstock.engine.media.encoded_image import EncodedImage
from penstock.engine.media.image_messages import (
    READY,
    REPLIES,
    ImageDone,
    ImageLent,
    ImageRejected,
    ImageReply,
    MediaReady,
    MediaSetup,
    ProcessImage,
)
from penstock.engine.media.media_budget import ByteSemaphore, MediaScope
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.video_decoders import start_host
from penstock.errors import PenstockError, StaleRef
from penstock.tensor import Handle, Store, read
from penstock.tensor.cuda import CudaPool

MAIN = "import sys; from penstock.engine.media.media_process import main; main(*map(int, sys.argv[1:]))"
REPLY_TIMEOUT = 60.0  # seconds from an image to its tensors


class MediaProcess:
    """One life of the media process."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes], ready: MediaReady) -> None:
        """Raises PenstockError if the process has died meanwhile."""
        self.pid = process.pid
        self.pool = CudaPool.attach(ready.pool, peer_name="server")
        self.way = ready.way
        self.has_ended = False
        self.reaping = threading.Thread(target=process.wait, daemon=True)  # a driver takes long to free a device
        self._line = line
        self._process = process
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[ImageReply]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line, self._receive)

    @contextlib.asynccontextmanager
    async def process(self, key: bytes, encoded: EncodedImage, file: BinaryIO) -> AsyncIterator[ImageReply]:
        """Yields the reply to an image. The media process holds the tensors within the block. Raises ConnectionError if
        the media process ends."""
        number = next(self._numbers)
        reply = self._replies[number] = self._loop.create_future()
        image = (encoded.format, encoded.width, encoded.height, encoded.orientation)
        try:
            self._send(ProcessImage(number, key, *image), file.fileno())
            try:
                yield await asyncio.wait_for(reply, REPLY_TIMEOUT)
            except asyncio.TimeoutError:
                event("media process killed", logging.ERROR, pid=self.pid, seconds=REPLY_TIMEOUT)
                self.end()
                raise MediaRefused(503, f"the device has not processed the image within {REPLY_TIMEOUT:g} s") from None
        finally:
            self._replies.pop(number, None)
            with contextlib.suppress(ConnectionError):
                self._send(ImageDone(number))

    def _send(self, message: ProcessImage | ImageDone, *fds: int) -> None:
        if self.has_ended:
            raise ConnectionResetError
        try:
            video_messages.send(self._line, message, fds)
        except OSError as error:  # BlockingIOError: a stopped process has not read some hundred messages
            self.end()
            raise ConnectionResetError(str(error)) from None

    def _receive(self) -> None:
        try:
            packet, _ = video_messages.receive(self._line)
        except OSError:
            packet = b""
        if not packet:
            event("media process died", logging.WARNING, pid=self.pid)
            return self.end()
        reply = REPLIES.decode(packet)
        future = self._replies.get(reply.number)  # None: the request has gone
        if future is not None and not future.done():
            future.set_result(reply)

    def end(self) -> None:
        """Kills the process. Scopes keep their leases, and workers the memory that they have mapped."""
        if self.has_ended:
            return
        self.has_ended = True
        self._loop.remove_reader(self._line)
        self._line.close()
        self._process.kill()
        self.reaping.start()
        self.pool.close()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ConnectionResetError())


class DeviceImages:
    """The images of one server process that are processed on a device. Used by one event loop."""

    def __init__(self, setup: MediaSetup, store: Store, counted: Callable[[str], None] | None = None) -> None:
        """`counted` gets the way of each image's tensors, as WAYS has it."""
        self._setup = setup
        self._store = store
        self._counted = counted or (lambda way: None)
        self._starting: asyncio.Task[MediaProcess] | None = None
        self._small, self._large = (ByteSemaphore(setup.threads) for _ in range(2))

    async def load(
        self, key: bytes, encoded: EncodedImage, file: BinaryIO, scope: MediaScope, *, is_large: bool
    ) -> tuple[Handle, Mapping[str, Any]]:
        """Returns handle and value of an image in a file. The scope holds the tensors, and the value refers to them.

        Raises MediaRefused, and ClosedError if the scope was released meanwhile.
        """
        places = self._large if is_large else self._small
        with await places.acquire(str(id(scope)), 1):
            for _ in range(2):
                try:
                    process = await self._running()
                    async with process.process(key, encoded, file) as reply:
                        return self._take(process, reply, key, scope)
                except ConnectionError:
                    continue
        raise MediaRefused(503, "the media process died twice while it had the image: send it again")

    def _take(
        self, process: MediaProcess, reply: ImageReply, key: bytes, scope: MediaScope
    ) -> tuple[Handle, Mapping[str, Any]]:
        if isinstance(reply, ImageRejected):
            raise MediaRefused(reply.status, reply.reason)
        if isinstance(reply, ImageLent):
            try:
                leases = [process.pool.books.open(ref) for ref in reply.slices]
            except StaleRef as error:
                raise ConnectionResetError(str(error)) from None
            handle = scope.add_leases(Handle(key, reply.layout, Buffer(reply.numbers)), leases)
            scope.puts_elsewhere += reply.is_new
            self._counted(process.way)
            return handle, read(reply.layout, reply.numbers)
        try:
            with self._store.open(key) as lease:
                handle = scope.add(lease, key=key)
                scope.puts_elsewhere += reply.is_new
                self._counted("store")
                return handle, lease.value()
        except Missing:
            raise MediaRefused(503, "the image was removed from the store before its request had it") from None

    @staticmethod
    def memory_file(data: bytes) -> BinaryIO:
        """Returns an open file of memory."""
        file: BinaryIO = os.fdopen(os.memfd_create("image", os.MFD_CLOEXEC), "wb")
        file.write(data)
        file.flush()
        return file

    # ── the process ──
    async def _running(self) -> MediaProcess:
        """Returns the media process, and starts one if there is none. Raises MediaRefused if none starts."""
        starting = self._starting
        if starting is None or (starting.done() and (starting.exception() or starting.result().has_ended)):
            starting = self._starting = asyncio.ensure_future(self._start())
        try:
            return await asyncio.shield(starting)  # the next image needs the process, too
        except ConnectionError:
            raise MediaRefused(500, "no media process can be started: the server's log says why") from None

    async def _start(self) -> MediaProcess:
        began = time.monotonic()
        try:
            line, process, packet = await start_host(MAIN, self._setup)
            try:
                started = MediaProcess(line, process, READY.decode(packet))
            except PenstockError as error:
                line.close()
                process.kill()
                process.wait()
                raise ConnectionResetError(str(error)) from None
        except ConnectionError as error:
            event("media process does not start", logging.ERROR, error=error)
            raise
        event("media process started", pid=process.pid, device=self._setup.device, seconds=time.monotonic() - began)
        return started

    def close(self) -> None:
        """Ends the media process."""
        starting, self._starting = self._starting, None
        if starting is not None and not starting.cancel() and starting.exception() is None:
            starting.result().end()
            starting.result().reaping.join()
