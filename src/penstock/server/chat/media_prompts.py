"""Images and videos in conversations: loads them, and expands their placeholders in the prompt.

Threads of this process decode images: decoding, scaling and arithmetic release the interpreter, so the event loop goes
on; the work of an image is bounded before it is decoded; tensors are written once, straight into the store. A video can
make its decoder work without end, so each is decoded in a process of its own (`video_decoders`). `media_source` gets
the bytes, `media_budget` bounds how many are held at a time, and the engine's client processes images.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.cluster.logs import event, tensor_event
from penstock.engine.media.image_processor import ImageProcessor, ProcessedImage
from penstock.engine.media.media_budget import MediaBudget, MediaScope, admit
from penstock.engine.media.media_kind import IMAGE, VIDEO, MediaKind, MediaRef, MediaRefused
from penstock.engine.media.media_placeholders import MediaPlaceholders
from penstock.engine.media.media_source import MediaSource
from penstock.engine.media.video_loader import VideoLoader
from penstock.engine.media.video_processor import ProcessedVideo
from penstock.engine.media.video_settings import VideoSettings
from penstock.engine.model_dir import load_tokenizer, takes_images, takes_videos
from penstock.engine.protocol.columns import Input
from penstock.engine.protocol.config import EngineConfig
from penstock.installing import how_to_install
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters
from penstock.tensor import Scope, Store

if TYPE_CHECKING:  # imported where images are processed on a device
    from penstock.engine.media.device_images import DeviceImages

THREADS = 8  # for images, at most: each may hold several copies of an image of the maximum size


class Prompt(NamedTuple):
    """Ids, and the media in them. `scope` holds these, until the request ends to which it is passed."""

    ids: list[int]
    items: tuple[Input, ...] = ()
    scope: Scope | None = None
    text_end: str = ""  # of a chat's prompt; or of a continued message

    def release(self) -> None:
        if self.scope is not None:
            self.scope.release()


class MediaPrompts:
    """Builds prompts with images and videos, in one server process, for a model that takes them."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        store: Store | None,
        tokenizer: Any,
        budget: MediaBudget,
        row: ProcessCounters | None,
        server: int,
    ) -> None:
        """Raises ValueError if the model's directory has no image processor, or its tokenizer no image token."""
        self._store = store
        self._budget = budget
        self._row = row
        self._max_tokens = config.max_model_len
        self._images = ImageProcessor(
            config.model,
            store,
            limits=options.image_limits,
            threads=_threads(),
            max_tokens=self._max_tokens,
            must_store=config.tensor_transport == "store",
            device=self._device_images(config, server),
        )
        self._without_videos = "this model takes none"
        self._videos: VideoLoader | None = None
        settings = self._video_settings(config)
        if tokenizer is None:
            tokenizer = load_tokenizer(config)
        self._places = MediaPlaceholders(tokenizer, self._images, settings)
        if settings is not None:
            self._videos = VideoLoader(
                settings,
                store,
                budget,
                limits=options.video_limits,
                count=config.max_concurrent_videos,
                max_tokens=self._max_tokens,
                must_store=config.tensor_transport == "store",
                changed=None if row is None else row.set_decoders,
                ended=None if row is None else row.count_video,
                log_format=config.log_format,
                log_level=config.log_level,
            )
        self._source = MediaSource(options.allowed_local_media_path, options.allowed_media_domains, budget)

    def _device_images(self, config: EngineConfig, server: int) -> DeviceImages | None:
        """Returns None if images are processed on CPUs."""
        if config.image_processor_device == "cpu":
            return None
        # Imported here: other servers need neither the modules of CUDA nor those of video decoders for it.
        from penstock.engine.media.device_images import DeviceImages
        from penstock.engine.media.image_messages import MediaSetup

        assert self._store is not None, "a config without a store has no such device"
        setup = MediaSetup(
            model=config.model,
            devices=tuple(config.device_names),
            device=config.device_names[server % len(config.device_names)],
            pool_nbytes=config.store_nbytes // config.api_server_count,
            store=str(self._store.ticket),
            threads=_threads(),
            log_format=config.log_format,
            log_level=config.log_level,
        )
        return DeviceImages(setup, self._store, None if self._row is None else self._row.count_device_image)

    def _video_settings(self, config: EngineConfig) -> VideoSettings | None:
        """Returns None if the model takes no videos, or files or packages for them are missing."""
        if not takes_videos(config):
            return None
        try:
            if importlib.util.find_spec("av") is None:
                raise ValueError(f"PyAV is not installed: {how_to_install('video')}")
            return VideoSettings.from_model(config.model)
        except ValueError as error:
            event("videos are not taken", logging.WARNING, reason=str(error))
            self._without_videos = "this server takes none, as its log says"
            return None

    def close(self) -> None:
        self._source.close()
        self._images.close()
        if self._videos is not None:
            self._videos.close()

    def prepare(self, text: str) -> str:
        """Returns a rendered conversation with videos as it is to be tokenized."""
        return self._places.prepare(text)

    async def prompt(self, ids: list[int], refs: Sequence[MediaRef], client: str = "") -> Prompt:
        """Returns the prompt with the placeholders of these media expanded. Raises ApiError with the field of one."""
        images = self._require_count(IMAGE, refs, self._images.limits.count)
        videos = self._require_videos(refs)
        try:
            self._places.require(ids, images, videos)
        except ValueError as error:
            message = f"{error}: the model's chat template writes it where the medium stands, and no text may"
            raise ApiError(400, message, param="messages") from None
        # In the store, not inline: the next request with the same image finds even a small one there.
        scope = MediaScope(self._store, inline_nbytes=0)
        try:
            loaded = await self._load_all(refs, scope, client)
        except BaseException:
            scope.release()
            raise
        finally:
            if self._row is not None:
                self._row.count_items(scope.stats())
        for medium in loaded:
            tensor_event("tensors sent", medium.item)
        inline_nbytes = sum(medium.item.nbytes for medium in loaded if medium.item.is_inline)
        scope.hold(self._budget.decoded.take(inline_nbytes))
        ids, inputs = self._places.spread(ids, loaded)
        return Prompt(ids, inputs, scope)

    def _require_count(self, kind: MediaKind, refs: Sequence[MediaRef], most: int) -> int:
        """Returns the number of media of a kind. Raises ApiError if there are too many."""
        own = [ref for ref in refs if ref.kind is kind]
        if len(own) > most:
            message = f"a request has at most {most} {kind.noun}s, this one has {len(own)}"
            raise ApiError(400, message, param=own[most].where)
        return len(own)

    def _require_videos(self, refs: Sequence[MediaRef]) -> int:
        if self._videos is not None:
            return self._require_count(VIDEO, refs, self._videos.limits.count)
        for ref in refs:
            if ref.kind is VIDEO:
                message = f"expected text or an image, got a video at $.{ref.where}: {self._without_videos}"
                raise ApiError(400, message, param=ref.where)
        return 0

    async def _load_all(
        self, refs: Sequence[MediaRef], scope: MediaScope, client: str
    ) -> list[ProcessedImage | ProcessedVideo]:
        """Loads all media concurrently. The first that is refused, or too many tokens in all, cancels the others."""
        tasks = [asyncio.ensure_future(self._load(ref, scope, client)) for ref in refs]
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

    async def _load(self, ref: MediaRef, scope: MediaScope, client: str) -> ProcessedImage | ProcessedVideo:
        try:
            if ref.kind is IMAGE:
                return await self._load_image(ref, scope, client)
            assert self._videos is not None, "refused before"
            async with self._source.video(ref, self._videos.limits.nbytes, client) as read_file:
                video, is_new = await self._videos.load(read_file, scope, client)
            scope.puts_elsewhere += is_new
            return video
        except MediaRefused as refused:
            raise ApiError(refused.status, f"{refused.reason} at $.{ref.where}", param=ref.where) from None

    async def _load_image(self, ref: MediaRef, scope: Scope, client: str) -> ProcessedImage:
        async def admitted(nbytes: int) -> AbstractContextManager[object]:
            return await admit(self._budget.decoded, client, nbytes, "decoding the image")

        async with self._source.image(ref, self._images.limits.nbytes, client) as raw:
            return await self._images.load(raw, scope, admitted)


def _threads() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)))


def build_media_prompts(
    config: EngineConfig,
    options: ServerOptions,
    store: Store | None,
    tokenizer: Any = None,
    budget: MediaBudget | None = None,
    row: ProcessCounters | None = None,
    server: int = 0,
) -> MediaPrompts | None:
    """Returns None if the model takes no images, or lacks files for them: then it serves text alone.

    `tokenizer`: the model's, if it is loaded already: loading it takes long. `budget`: None for one of the options;
    `row`: counts how media travel; `server`: the number of this process.
    """
    if not takes_images(config):
        return None
    try:
        budget = MediaBudget(options.media_nbytes_in_flight) if budget is None else budget
        return MediaPrompts(config, options, store, tokenizer, budget, row, server)
    except ValueError as error:
        event("images are not taken", logging.WARNING, reason=error)
        return None
