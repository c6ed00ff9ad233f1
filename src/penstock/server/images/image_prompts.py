"""Images in conversations: read, made what the model takes, and put where their placeholders stand in the prompt.

By threads of this process, and not by processes of their own: decoding, scaling and arithmetic let the interpreter go,
so the loop goes on; what is made is written once, straight into the store, under a lease that this process holds from
then on; and there is no second kind of death to tell of. A decoder that crashes takes this server with it, which comes
again, alone, while the others answer. `image_urls` gets the bytes, and the engine's client makes tensors of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.client.image_placeholders import ImagePlaceholders
from penstock.engine.client.image_processor import ImageProcessor, ImageRefused, ProcessedImage
from penstock.engine.cluster.logs import event
from penstock.engine.model_dir import load_tokenizer, takes_images
from penstock.engine.protocol.columns import Input
from penstock.engine.protocol.config import EngineConfig
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.server.images import image_urls
from penstock.server.images.image_fetcher import ImageFetcher, is_remote
from penstock.server.options import ServerOptions
from penstock.tensor import Scope, Store

THREADS = 8  # at most: each may hold some copies of an image of as many pixels as are allowed


class ImageRef(NamedTuple):
    """An image of a conversation."""

    where: str  # in the body: "messages[0].content[1]"
    url: str


class Prompt(NamedTuple):
    """Ids, and what stands in them instead of text. `scope` holds that: until the request ends which gets it."""

    ids: list[int]
    items: tuple[Input, ...] = ()
    scope: Scope | None = None

    def release(self) -> None:
        if self.scope is not None:
            self.scope.release()


class ImagePrompts:
    """Of one server process, for a model that takes images."""

    def __init__(self, config: EngineConfig, options: ServerOptions, store: Store | None, tokenizer: Any) -> None:
        """Raises ValueError where the model lacks what it takes."""
        self._store = store
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        self._max_tokens = config.max_model_len
        self._images = ImageProcessor(
            config.model,
            store,
            limits=options.image_limits,
            threads=threads,
            max_tokens=self._max_tokens,
        )
        self._places = ImagePlaceholders(self._images, load_tokenizer(config) if tokenizer is None else tokenizer)
        self._folders = [Path(folder).resolve(strict=True) for folder in options.allowed_local_media_path]
        self._fetcher = ImageFetcher(options.allowed_media_domains) if options.allowed_media_domains else None

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        self._images.close()

    async def prompt(self, ids: list[int], refs: Sequence[ImageRef]) -> Prompt:
        """With these images for the placeholders in it. Raises ApiError, which names the one that is wrong."""
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
        ids, places = self._places.spread(ids, loaded)
        return Prompt(ids, tuple((image.item, *place) for image, place in zip(loaded, places, strict=True)), scope)

    async def _load_all(self, refs: Sequence[ImageRef], scope: Scope) -> list[ProcessedImage]:
        """Side by side. The first that is refused, or too many of them, end it for all."""
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
        raw: bytes | Callable[[], bytes] = functools.partial(image_urls.read, ref.url, max_nbytes, self._folders)
        try:
            if self._fetcher is not None and is_remote(ref.url):
                raw = await self._fetcher.fetch(ref.url, max_nbytes)
            return await self._images.load(raw, scope)
        except ImageRefused as refused:
            raise ApiError(refused.status, f"{refused.reason} at $.{ref.where}", param=ref.where) from None


def build_image_prompts(
    config: EngineConfig, options: ServerOptions, store: Store | None, tokenizer: Any = None
) -> ImagePrompts | None:
    """None: the model takes no images, or lacks what it takes to make anything of them, and answers text alone.

    `tokenizer`: the model's, if it is loaded already: reading it takes long.
    """
    if not takes_images(config):
        return None
    try:
        return ImagePrompts(config, options, store, tokenizer)
    except ValueError as error:
        event("images are not taken", logging.WARNING, reason=error)
        return None
