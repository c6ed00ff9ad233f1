"""Images in conversations: reads and processes them, and expands their placeholders in the prompt.

Threads of this process do the work, and not separate processes: decoding, scaling and arithmetic release the
interpreter, so the event loop goes on; tensors are written once, straight into the store, under a lease of this
process; and no other process can die. A decoder that crashes ends this server process, which the launcher restarts
while other servers answer. `media_urls` gets the bytes, and the engine's client processes them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.client.image_processor import ImageProcessor, ImageRefused, ProcessedImage
from penstock.engine.client.media_placeholders import MediaPlaceholders
from penstock.engine.cluster.logs import event, tensor_event
from penstock.engine.model_dir import load_tokenizer, takes_images
from penstock.engine.protocol.columns import Input
from penstock.engine.protocol.config import EngineConfig
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.server.media import media_urls
from penstock.server.media.media_fetcher import MediaFetcher, is_remote
from penstock.server.options import ServerOptions
from penstock.tensor import Scope, ScopeStats, Store

THREADS = 8  # at most: each may hold several copies of an image of the maximum size


class ImageRef(NamedTuple):
    """An image of a conversation."""

    where: str  # in the body: "messages[0].content[1]"
    url: str


class Prompt(NamedTuple):
    """Ids, and the images in them. `scope` holds the images, until the request ends to which it is passed."""

    ids: list[int]
    items: tuple[Input, ...] = ()
    scope: Scope | None = None

    def release(self) -> None:
        if self.scope is not None:
            self.scope.release()


class ImagePrompts:
    """Builds prompts with images, in one server process, for a model that takes images."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        store: Store | None,
        tokenizer: Any,
        count: Callable[[ScopeStats], None],
    ) -> None:
        """`count` gets, for each request, how its images travel. Raises ValueError if the model's directory has no
        image processor, or its tokenizer no image token."""
        self._store = store
        self._count = count
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        self._max_tokens = config.max_model_len
        self._images = ImageProcessor(
            config.model,
            store,
            limits=options.image_limits,
            threads=threads,
            max_tokens=self._max_tokens,
            must_store=config.tensor_transport == "store",
        )
        self._places = MediaPlaceholders(load_tokenizer(config) if tokenizer is None else tokenizer, self._images)
        self._folders = [Path(folder).resolve(strict=True) for folder in options.allowed_local_media_path]
        self._fetcher = MediaFetcher(options.allowed_media_domains) if options.allowed_media_domains else None

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        self._images.close()

    async def prompt(self, ids: list[int], refs: Sequence[ImageRef]) -> Prompt:
        """Returns the prompt with the placeholders of these images expanded. Raises ApiError with the image's field."""
        max_images = self._images.limits.count
        if len(refs) > max_images:
            message = f"a request has at most {max_images} images, this one has {len(refs)}"
            raise ApiError(400, message, param=refs[max_images].where)
        try:
            self._places.require(ids, len(refs))
        except ValueError as error:
            message = f"{error}: the model's chat template writes it where an image stands, and no text may"
            raise ApiError(400, message, param="messages") from None
        # In the store, not inline: the next request with the same image finds even a small one there.
        scope = Scope(self._store, inline_nbytes=0)
        try:
            loaded = await self._load_all(refs, scope)
        except BaseException:
            scope.release()
            raise
        finally:
            self._count(scope.stats())
        for image in loaded:
            tensor_event("tensors sent", image.item)
        ids, inputs = self._places.spread(ids, loaded)
        return Prompt(ids, inputs, scope)

    async def _load_all(self, refs: Sequence[ImageRef], scope: Scope) -> list[ProcessedImage]:
        """Loads all images concurrently. The first that is refused, or too many tokens in all, cancels the others."""
        tasks = [asyncio.ensure_future(self._load(ref, scope)) for ref in refs]
        tokens = 0
        try:
            for loaded in asyncio.as_completed(tasks):
                tokens += (await loaded).tokens
                if tokens > self._max_tokens:
                    raise context_length_exceeded(
                        self._max_tokens, tokens, Limit(self._max_tokens - 1, "messages", None), at_least=True
                    )
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _load(self, ref: ImageRef, scope: Scope) -> ProcessedImage:
        max_nbytes = self._images.limits.nbytes
        raw: bytes | Callable[[], bytes] = functools.partial(media_urls.read, ref.url, max_nbytes, self._folders)
        try:
            if self._fetcher is not None and is_remote(ref.url):
                raw = await self._fetcher.fetch(ref.url, max_nbytes)
            return await self._images.load(raw, scope)
        except ImageRefused as refused:
            raise ApiError(refused.status, f"{refused.reason} at $.{ref.where}", param=ref.where) from None


def build_image_prompts(
    config: EngineConfig,
    options: ServerOptions,
    store: Store | None,
    tokenizer: Any = None,
    count: Callable[[ScopeStats], None] = lambda stats: None,
) -> ImagePrompts | None:
    """Returns None if the model takes no images, or lacks files for them: then it serves text alone.

    `tokenizer`: the model's, if it is loaded already: loading it takes long. `count`: see `ImagePrompts`.
    """
    if not takes_images(config):
        return None
    try:
        return ImagePrompts(config, options, store, tokenizer, count)
    except ValueError as error:
        event("images are not taken", logging.WARNING, reason=error)
        return None
