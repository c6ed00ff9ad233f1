"""Where the bytes of media come from: data URLs, files in allowed directories, allowed hosts.

Bytes of files and hosts are admitted by the budget before they are read; those of a data URL have been, with the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.engine.media import media_urls
from penstock.engine.media.media_budget import MediaBudget
from penstock.engine.media.media_fetcher import MediaFetcher, is_remote
from penstock.engine.media.media_kind import MediaRef
from penstock.engine.media.video_upload import VideoUpload

THREADS = 2  # that look at files


class MediaSource:
    """The sources of one server process."""

    def __init__(self, folders: Sequence[str], hosts: Sequence[str], budget: MediaBudget) -> None:
        """Raises OSError for a folder that is not there, and ValueError for hosts."""
        self._folders = [Path(folder).resolve(strict=True) for folder in folders]
        self._fetcher = MediaFetcher(hosts) if hosts else None
        self._budget = budget
        self._threads = ThreadPoolExecutor(THREADS, "media files")

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def image(self, ref: MediaRef, max_nbytes: int, client: str) -> AsyncIterator[bytes | Callable[[], bytes]]:
        """Yields the bytes of an image, or a function that reads them in a thread. Raises MediaRefused."""
        async with self._admitted(ref, max_nbytes, client) as source:
            yield (
                source
                if isinstance(source, bytes)
                else functools.partial(media_urls.read, ref.url, source, self._folders)
            )

    @contextlib.asynccontextmanager
    async def video(self, ref: MediaRef, max_nbytes: int, client: str) -> AsyncIterator[Callable[[], VideoUpload]]:
        """Yields a function that reads a video in a thread, for a caller that closes it. Raises MediaRefused."""
        async with self._admitted(ref, max_nbytes, client) as source:
            yield functools.partial(self._upload, ref, source)

    @contextlib.asynccontextmanager
    async def _admitted(self, ref: MediaRef, max_nbytes: int, client: str) -> AsyncIterator[bytes | int]:
        """Yields the bytes that a host has sent; or how many may be read of a file or a data URL."""
        files = self._budget.files
        if self._fetcher is not None and is_remote(ref.url):
            max_nbytes = min(max_nbytes, files.nbytes)
            with await files.acquire(client, max_nbytes) as lease:
                raw = await self._fetcher.fetch(ref.url, max_nbytes, ref.kind, lease.shrink)
                lease.shrink(len(raw))
                yield raw
        elif media_urls.is_file(ref.url):
            max_nbytes = min(max_nbytes, files.nbytes)
            look = functools.partial(media_urls.file_nbytes, ref.url, max_nbytes, self._folders, ref.kind)
            nbytes = await asyncio.get_running_loop().run_in_executor(self._threads, look)
            with await files.acquire(client, nbytes):
                yield nbytes
        else:
            yield max_nbytes

    def _upload(self, ref: MediaRef, source: bytes | int) -> VideoUpload:
        upload = VideoUpload()
        try:
            if isinstance(source, bytes):
                upload.write(source)
            else:
                media_urls.copy(ref.url, source, self._folders, ref.kind, upload.write)
            upload.seal()
        except BaseException:
            upload.close()
            raise
        return upload
