"""The process that makes the tensors of a server's images on a device: `device_images` starts it, and talks to it.

Threads decode images, as in a server. The main thread alone uses the device, with one image at a time. The pool keeps
tensors for the next request with the same image until their room is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from penstock import Empty, Lease, MemoryExhausted, Timeout, standard_streams
from penstock._native import MAX_PEERS
from penstock.engine.cluster import logs
from penstock.engine.cluster.cuda_devices import cuda_devices
from penstock.engine.cluster.logs import event
from penstock.engine.media import video_messages
from penstock.engine.media.decoder_process import ROOM_TIMEOUT, end_early, serve_parent
from penstock.engine.media.device_processor import DeviceFeatures, DeviceProcessor
from penstock.engine.media.encoded_image import EncodedImage
from penstock.engine.media.image_messages import (
    SETUP,
    TO_MEDIA_PROCESS,
    WAYS,
    ImageDone,
    ImageLent,
    ImageRejected,
    ImageReply,
    ImageStored,
    MediaReady,
    MediaSetup,
    ProcessImage,
)
from penstock.engine.media.image_processor import LARGE_PIXELS, decode_image, no_room, read_processor, refuse_shape
from penstock.engine.media.media_kind import MediaRefused
from penstock.tensor import Store, plan
from penstock.tensor.cuda import CudaPool, CudaTensors, DeviceError, driver_of
from penstock.tensor.cuda.device_scope import entry_of
from penstock.tensor.cuda.order import wait_for
from penstock.tensor.cuda.pool import SHARE_TIMEOUT

Pixels = npt.NDArray[np.uint8]


def main(fd: int, parent: int) -> NoReturn:
    """Serves the process at the other end of the socket `fd`, until that is closed."""
    line = serve_parent(fd, parent)
    end_early()
    setup = SETUP.decode(video_messages.receive(line)[0])
    logs.configure("media process", setup.log_format, setup.log_level)
    with _ending_at_errors():
        asyncio.run(_serve(line, setup))
    _end(0)


async def _serve(line: socket.socket, setup: MediaSetup) -> None:
    images, is_over = _Images(line, setup), asyncio.Event()

    def receive() -> None:
        packet, fds = video_messages.receive(line)
        if packet:
            images.receive(TO_MEDIA_PROCESS.decode(packet), fds)
        else:
            is_over.set()

    asyncio.get_running_loop().add_reader(line, receive)
    video_messages.send(line, MediaReady(str(images.pool.ticket), images.way))
    await is_over.wait()
    _end(0)  # threads may be decoding


@contextlib.contextmanager
def _ending_at_errors() -> Iterator[None]:
    """Ends the process at an error, and its server starts another: after some errors, a device fails all calls."""
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):  # the server has ended
        _end(0)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        event("media process failed", logging.ERROR, error=failure, trace=traceback.format_exc())
        _end(1)


def _end(status: int) -> NoReturn:
    standard_streams.flush()
    os._exit(status)


Cached: TypeAlias = tuple[ImageLent, tuple[Any, ...]]  # the tensors lie in the pool as long as these objects live


class _Images:
    def __init__(self, line: socket.socket, setup: MediaSetup) -> None:
        """Raises NoDevice, ValueError, and MemoryExhausted if the device has no room for the pool."""
        devices = cuda_devices()
        readers, number = devices.uuids_of(setup.devices), devices.number_of(setup.device)
        assert number is not None, "the device is of a worker"
        torch.cuda.set_device(number)
        _, processor, self._count = read_processor(Path(setup.model))
        self._processor = DeviceProcessor(processor, torch.device("cuda", number))
        self._driver = driver_of(number)
        peers = min(MAX_PEERS, 8 + 2 * len(setup.devices))
        self.pool = CudaPool.create(
            setup.pool_nbytes, name="images", peer_name="media process", max_peers=peers, driver=self._driver
        )
        self._store = Store.attach(setup.store, peer_name="media process")
        self._tensors = CudaTensors(self.pool, self._store)
        is_own = all(uuid == self._driver.uuid for uuid in readers)
        self.way = WAYS[0 if is_own else 1 if all(uuid in self._driver.readers for uuid in readers) else 2]
        self._line = line
        self._threads = ThreadPoolExecutor(2 * setup.threads, "images")  # as many as the server sends at a time
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lent: dict[int, Cached | Lease] = {}  # until the server holds them
        self._cache: OrderedDict[bytes, Cached] = OrderedDict()  # by key, the image used least recently first

    def receive(self, message: ProcessImage | ImageDone, fds: list[int]) -> None:
        number = message.number
        if isinstance(message, ProcessImage):
            with open(fds[0], "rb") as file:
                file.seek(0)  # the server has written the file
                self._tasks[number] = asyncio.ensure_future(self._answer(message, file.read()))
            return
        self._lent.pop(number, None)
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()

    async def _answer(self, image: ProcessImage, data: bytes) -> None:
        with _ending_at_errors():
            try:
                reply = self._find(image)
                if reply is None:
                    loop = asyncio.get_running_loop()
                    pixels = await loop.run_in_executor(self._threads, _pixels_of, image, data)
                    reply = self._find(image) or self._make(image, pixels)  # perhaps for another request by now
            except MediaRefused as refused:
                reply = ImageRejected(image.number, refused.status, refused.reason)
            video_messages.send(self._line, reply)

    def _find(self, image: ProcessImage) -> ImageReply | None:
        """Returns the reply to an image that the pool has."""
        cached = self._cache.get(image.key)
        if cached is None:
            return None
        self._cache.move_to_end(image.key)
        self._lent[image.number] = cached
        return msgspec.structs.replace(cached[0], number=image.number, is_new=False)

    # ── the device ──
    def _make(self, image: ProcessImage, pixels: Pixels) -> ImageReply:
        try:
            with refuse_shape(image.width, image.height):
                features = self._processor.process(pixels)
            return self._lend(image, features) or self._store_value(image, features)
        except torch.OutOfMemoryError:
            raise MediaRefused(503, "the device has no memory to process the image now: send it again") from None
        finally:
            if image.width * image.height > LARGE_PIXELS:  # workers may need the memory
                torch.cuda.empty_cache()

    def _lend(self, image: ProcessImage, features: DeviceFeatures) -> ImageLent | None:
        """Puts the tensors into the pool. Returns None if not all workers reach the pool, or it has no room."""
        if self.way == "store" or sum(tensor.nbytes for tensor in features.tensors.values()) > self.pool.nbytes:
            return None
        copies = {}
        for name, tensor in features.tensors.items():
            copies[name] = self._take(tensor)
            if copies[name] is None:
                return None
        refs = {name: self._tensors.share(copy, ()) for name, copy in copies.items()}
        ticket = str(self.pool.ticket)
        planned = plan(self._value(features, {name: entry_of(ticket, ref) for name, ref in refs.items()}))
        numbers = bytearray(planned.nbytes)
        planned.write(numbers)
        slices = tuple(ref.where for ref in refs.values())
        reply = ImageLent(image.number, True, planned.layout, bytes(numbers), slices)
        self._cache[image.key] = self._lent[image.number] = reply, tuple(copies.values())
        return reply

    def _take(self, tensor: torch.Tensor) -> Any:
        """Returns a copy of a tensor in the pool. The images used least recently make room, if any."""
        while True:
            try:
                copy = self._tensors.empty(tensor.shape, tensor.dtype)
            except MemoryExhausted:
                if not self._cache:
                    return None
                self._cache.popitem(last=False)
            else:
                self._driver.copy(copy, tensor)
                return copy

    def _store_value(self, image: ProcessImage, features: DeviceFeatures) -> ImageStored:
        """Puts the tensors into the store. Raises MediaRefused if it has no room."""
        empty = {name: Empty(tensor.shape, tensor.dtype) for name, tensor in features.tensors.items()}
        planned = plan(self._value(features, empty), is_filled_later=True)
        try:
            loan = self._store.loan(image.key, planned, timeout=ROOM_TIMEOUT)
        except (MemoryExhausted, Timeout):
            raise no_room(planned.nbytes, self._store) from None
        if isinstance(loan, Lease):  # another server has stored the image
            self._lent[image.number] = loan
            return ImageStored(image.number, is_new=False)
        with loan:
            self._copy_to_host(features, loan.value("torch"))
            self._lent[image.number] = loan.commit()
        return ImageStored(image.number, is_new=True)

    def _copy_to_host(self, features: DeviceFeatures, value: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in features.tensors.items():
            self._driver.copy(value[name], tensor)
        if not wait_for([self._driver.record(self._driver.stream())], SHARE_TIMEOUT):
            raise DeviceError(f"the device has not copied an image to the store within {SHARE_TIMEOUT:g} s")

    def _value(self, features: DeviceFeatures, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of an image, as `ImageProcessor` makes it, with other tensors."""
        tokens = self._count({**features.tensors, **features.small})
        return {**tensors, **features.small, "tokens": tokens, "rows": features.rows, "columns": features.columns}


def _pixels_of(image: ProcessImage, data: bytes) -> Pixels:
    size = image.width, image.height
    return np.array(decode_image(EncodedImage(image.format, *size, 1, 1, image.orientation, data)))
