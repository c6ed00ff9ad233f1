"""Loads the videos of requests: found in the store by their content, or decoded by a process and put there by it."""

from __future__ import annotations

import asyncio
import functools
import mmap
import weakref
from collections.abc import Callable

from penstock import Missing
from penstock.engine.media.fair_thread_pool import FairThreadPool
from penstock.engine.media.media_budget import MediaBudget, admit
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.video_decoders import DecoderSettings, VideoDecoder, VideoDecoders
from penstock.engine.media.video_file import VideoLimits
from penstock.engine.media.video_messages import Inline
from penstock.engine.media.video_processor import ProcessedVideo
from penstock.engine.media.video_settings import VideoSettings
from penstock.engine.media.video_upload import VideoUpload
from penstock.tensor import Handle, Scope, Store, read

THREADS = 2  # that copy and hash files of videos


class VideoLoader:
    """The videos of one server process."""

    def __init__(
        self,
        settings: VideoSettings,
        store: Store | None,
        budget: MediaBudget,
        *,
        limits: VideoLimits,
        count: int,
        max_tokens: int,
        must_store: bool = False,
        changed: Callable[[int, int], None] | None = None,
        ended: Callable[[str, float], None] | None = None,
        log_format: str = "text",
        log_level: str = "info",
    ) -> None:
        """`count`: videos that are decoded at a time; `max_tokens`: a video with more is refused before it is decoded;
        `must_store`: a video for which the store has no room is refused; `changed`, `ended`: as of `VideoDecoders`."""
        self.limits = limits
        self._salt = settings.salt
        self._store = store
        self._budget = budget
        self._max_tokens = max_tokens
        self._must_store = must_store
        self._threads = FairThreadPool(THREADS, "videos")
        self._decoding: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()  # by key
        self._decoders = VideoDecoders(
            DecoderSettings(
                processor=settings,
                limits=limits,
                count=count,
                store=None if store is None else str(store.ticket),
                pixels_nbytes=budget.decoded.nbytes,
                log_format=log_format,
                log_level=log_level,
            ),
            changed or (lambda busy, waiting: None),
            ended or (lambda end, seconds: None),
        )

    def close(self) -> None:
        """Ends the decoders, and waits for the files that threads are copying."""
        self._decoders.close()
        self._threads.close()

    async def load(
        self, read_file: Callable[[], VideoUpload], scope: Scope, client: str
    ) -> tuple[ProcessedVideo, bool]:
        """Returns a video that the request's scope holds, and whether a decoder has put it into the store for it.

        `read_file` runs in a thread. If cancelled, the decoder is killed. Raises MediaRefused, the errors of
        `read_file`, and ClosedError if the scope was released meanwhile.
        """
        upload, key = await self._threads.run(scope, functools.partial(self._read, read_file))
        with upload:
            video = self._find(key, scope)
            if video is not None:
                return video, False
            lock = self._decoding.setdefault(key, asyncio.Lock())
            async with lock:  # the same video of several requests is decoded once
                video = self._find(key, scope)
                if video is not None:
                    return video, False
                async with self._decoders.decoder(client) as decoder:
                    return await self._decode(decoder, upload, key, scope, client)

    def _read(self, read_file: Callable[[], VideoUpload]) -> tuple[VideoUpload, bytes]:
        upload = read_file()
        try:
            return upload, upload.key(self._salt)
        except BaseException:
            upload.close()
            raise

    def _find(self, key: bytes, scope: Scope, *, is_decoded: bool = False) -> ProcessedVideo | None:
        """`is_decoded`: a decoder has looked the video up already, and counts."""
        if self._store is None:
            return None
        try:
            with (self._store.open if is_decoded else self._store.get)(key) as lease:
                return ProcessedVideo.of(scope.add(lease, key=key), lease.value())
        except Missing:
            return None

    async def _decode(
        self, decoder: VideoDecoder, upload: VideoUpload, key: bytes, scope: Scope, client: str
    ) -> tuple[ProcessedVideo, bool]:
        opened = await decoder.open(upload, key)
        if opened.tokens > self._max_tokens:
            reason = f"this model has at most {self._max_tokens} tokens, and the video takes {opened.tokens}"
            raise MediaRefused(400, reason)
        decoder.hold(await admit(self._budget.decoded, client, opened.nbytes, "decoding the video"))
        stored, fd = await decoder.decode()
        if isinstance(stored, Inline):
            assert fd is not None, "tensors that travel inline lie in a file"
            with open(fd, "rb") as file:
                room = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            take = functools.partial(self._take_inline, stored, room, key, scope)
            return await self._threads.run(scope, take), False
        video = self._find(key, scope, is_decoded=True)  # the decoder holds it meanwhile
        if video is None:
            raise MediaRefused(503, "the video was removed from the store before its request had it: send it again")
        return video, stored.is_new

    def _take_inline(self, stored: Inline, room: mmap.mmap, key: bytes, scope: Scope) -> ProcessedVideo:
        tree = read(stored.layout, room)
        item = scope.put(tree, key=key)  # the store may have room by now
        if item.is_inline and self._must_store:
            raise self._no_room(item)
        return ProcessedVideo.of(item, tree)

    def _no_room(self, item: Handle) -> MediaRefused:
        room = 0 if self._store is None else self._store.nbytes
        if item.nbytes > room:
            return MediaRefused(413, f"the store has {room} bytes, the tensors of this video have {item.nbytes}")
        return MediaRefused(503, f"the store has no room for {item.nbytes} bytes now: open requests fill it")
