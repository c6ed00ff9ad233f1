"""The images and videos of the batch: where they stand in prompts, and their encodings, cached by key.

Here and in `encoding_exchange` a video is an image of several frames; only the positions of its tokens differ.

An image is encoded when a step first needs it (`encoding_exchange`). If a rank does not find an image, all ranks treat
it as missing: so the request fails on all ranks alike. Prompt embeddings are an input that is encoded already: they
stand at all of their positions, and an image only where the prompt has image tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.engine.model_dir import VIDEO
from penstock.engine.protocol.columns import Index, Input
from penstock.engine.protocol.messages import FinishReason, Ints
from penstock.engine.worker.encoding_exchange import (
    STATE_OF,
    WHY,
    EncoderOptions,
    EncodingExchange,
    PromptImage,
)
from penstock.engine.worker.image_encoder import NO_INPUTS, DeviceInputs, ImageEncoder, Open, Part, Unusable, misfit
from penstock.engine.worker.input_batch import InputBatch, moved, queued
from penstock.engine.worker.model import InputEmbeds, LoadedModel
from penstock.tensor import Handle

# An image's key; without a key, the `id()` of its item while a slot has it. Of a part: with the part.
Name: TypeAlias = "bytes | int | tuple[bytes | int, Part]"
MAX_GRIDS = 1 << 14  # images with a cached grid (`image_grid_thw`); above, the grid used least recently is dropped
THERE = len(WHY)  # an image that no rank fails


MAX_TOKENS = 2048  # of a video that are encoded at a time: a step encodes little more than the tokens that it computes
IMAGE_TYPE, VIDEO_TYPE = 1, 2  # of tokens, as transformers numbers them; 0: text


class Grid(NamedTuple):
    """The patches of an image or a video."""

    sizes: Tensor  # [1, 3]: in time, height and width
    seconds: float | None  # of a video, from one of its times to the next; None: an image


class ImageChunk(NamedTuple):
    """The tokens of an image that a step computes."""

    slot: int
    image: PromptImage
    places: Index  # of the tokens, in the step
    low: int  # first token, in the image
    high: int  # end

    @property
    def is_last(self) -> bool:
        return self.high == self.image.length


class EncoderCache:
    """The images of all slots, and a cache of their encodings.

    Encodings in the store are held from the step that needs them to the next one, or for as long as a chunk of their
    image is left. Others are kept in this process, up to `cache_nbytes`. All ranks do the same.
    """

    def __init__(
        self,
        model: LoadedModel,
        open_handle: Open,
        slots: int,
        options: EncoderOptions,
        inputs: DeviceInputs = NO_INPUTS,
    ) -> None:
        self._model = model
        self._encoder = ImageEncoder(model, open_handle, inputs)
        self.exchange = EncodingExchange(self._encoder, model.ranks, options)
        self._cache_nbytes = options.cache_nbytes
        ids = {model.image_id: IMAGE_TYPE, model.video_id: VIDEO_TYPE}
        self._token_types = {id_: type_ for id_, type_ in ids.items() if id_ is not None}
        self._encoded: OrderedDict[Name, Tensor] = OrderedDict()  # those last used last
        self._nbytes = 0
        self._shared: dict[Name, Tensor] = {}  # in the store, held
        self._unfinished: set[Name] = set()  # images with tokens that the last step has left
        self._grids: OrderedDict[bytes | int, Grid] = OrderedDict()  # kept, so a cached image need not be opened
        # Images with the positions of their tokens. While no slot has any, steps need not call this object.
        self.by_slot: dict[int, list[tuple[PromptImage, Index]]] = {}
        self._ends = np.zeros(slots, np.intp)  # position after the last image; only text follows
        self._rope_ends = np.zeros(slots, np.intp)  # position after the prompt, where it has images
        self._takes_videos = model.stock.config.model_type in VIDEO
        self._has_ropes = hasattr(model.stock.base_model, "get_rope_index")
        self.num_position_axes = 3 if self._has_ropes else 1  # of a token's rope position
        self._offsets = np.zeros((self.num_position_axes, slots), np.intp)  # of rope positions, from `_rope_ends` on
        self._mrope_positions: dict[int, Index] = {}  # rope positions before `_rope_ends`: [3, end]
        self._broken: dict[int, FinishReason] = {}  # slots without known token positions

    def join(self, slot: int, prompt: Ints, inputs: tuple[Input, ...]) -> None:
        self.leave(slot)
        if not inputs:
            return
        self._ends[slot] = max(position + length for _, position, length in inputs)
        if self._has_ropes and self._types(prompt).any():
            try:
                self._find_ropes(slot, prompt, inputs)
            except Unusable as unusable:
                self._broken[slot] = unusable.why
        self.by_slot[slot] = [image for entry in inputs for image in self._parts(slot, prompt, *entry)]

    def _parts(
        self, slot: int, prompt: Ints, item: Handle, position: int, length: int
    ) -> Iterable[tuple[PromptImage, Index]]:
        """Yields an input, or the parts of a long video, with the positions of their tokens."""
        there, is_encoded = self._places(prompt, position, length)
        count = 1
        if there.size > MAX_TOKENS and self._takes_videos and not is_encoded and slot not in self._broken:
            count = self._count_parts(prompt, item, there)
        if count == 1 or there.size % count:
            yield PromptImage(item, there.size, is_encoded), there
            return
        each = there.size // count  # tokens
        step = max(1, MAX_TOKENS // each)
        for begin in range(0, count, step):
            places = there[begin * each : (begin + step) * each]
            yield PromptImage(item, places.size, part=Part(begin, min(begin + step, count))), places

    def _count_parts(self, prompt: Ints, item: Handle, there: Index) -> int:
        """Returns the times of a video, or the tiles of an image, each of which stands by itself in the prompt."""
        if self._has_ropes:
            grid = self._grid(item)
            return 1 if grid.seconds is None else int(grid.sizes[0, 0])
        return 1 + int(np.count_nonzero(np.diff(there) > 1))

    def _places(self, prompt: Ints, position: int, length: int) -> tuple[Index, bool]:
        """Returns the positions of an image's tokens; without any, the input is prompt embeddings, and has them all.
        And whether it is."""
        there = np.flatnonzero(self._types(prompt[position : position + length]))
        is_encoded = not there.size
        return position + (np.arange(length) if is_encoded else there), is_encoded

    def _types(self, ids: Ints) -> Ints:
        types: Ints = np.zeros(ids.size, np.int32)
        for token_id, type_ in self._token_types.items():
            types[ids == token_id] = type_
        return types

    def ids_of_text(self, slot: int, prompt: Ints) -> Ints:
        """Returns the prompt without the ids that stand for prompt embeddings, as no text has these tokens."""
        places = [there for image, there in self.by_slot.get(slot, ()) if image.is_encoded]
        return np.delete(prompt, np.concatenate(places)) if places else prompt

    def leave(self, slot: int) -> None:
        for image, _ in self.by_slot.pop(slot, ()):
            if image.item.key is None and not self._is_wanted(image.item):
                self._grids.pop(id(image.item), None)
                encoded = self._encoded.pop(_name(image), None)
                self._nbytes -= 0 if encoded is None else encoded.nbytes
        self._mrope_positions.pop(slot, None)
        self._broken.pop(slot, None)
        self._ends[slot] = self._rope_ends[slot] = 0
        self._offsets[:, slot] = 0
        if not self.by_slot:  # no step needs an encoding before a slot with images joins
            self._shared, self._unfinished = {}, set()

    def _is_wanted(self, item: Handle) -> bool:
        """Returns whether another sample of the request still has this image."""
        return any(image.item is item for images in self.by_slot.values() for image, _ in images)

    # ── where tokens stand ──
    def _find_ropes(self, slot: int, prompt: Ints, inputs: tuple[Input, ...]) -> None:
        grids = [self._grid(item) for item, _, _ in sorted(inputs, key=lambda entry: entry[1])]
        images = [grid.sizes for grid in grids if grid.seconds is None]
        videos = [grid.sizes for grid in grids if grid.seconds is not None]
        seconds = [grid.seconds for grid in grids if grid.seconds is not None]
        try:
            positions, _ = self._model.stock.base_model.get_rope_index(
                torch.tensor(prompt, dtype=torch.int64)[None],
                mm_token_type_ids=torch.from_numpy(self._types(prompt))[None],
                image_grid_thw=torch.cat(images) if images else None,
                video_grid_thw=torch.cat(videos) if videos else None,
                second_per_grid_ts=torch.tensor(seconds) if seconds else None,
            )
        except Exception as error:
            raise misfit(error) from None
        ropes = positions[:, 0].numpy().astype(np.intp)
        self._mrope_positions[slot] = ropes
        self._rope_ends[slot] = prompt.size
        self._offsets[:, slot] = ropes[:, -1] + 1 - prompt.size  # as `generate`: times of a video may reach beyond it

    def _grid(self, item: Handle) -> Grid:
        name = _item_name(item)
        if name not in self._grids:
            self._grids[name] = _read_grid(self._open(item))
            if len(self._grids) > MAX_GRIDS:
                self._grids.popitem(last=False)
        else:
            self._grids.move_to_end(name)
        return self._grids[name]

    def positions(self, input_batch: InputBatch) -> Index:
        """Returns the positions of tokens: [tokens], or [3, tokens] where a position has three axes."""
        if not self._has_ropes:
            return input_batch.positions
        positions = input_batch.positions + self._offsets[:, input_batch.slots]
        for slot, first, begin, end in _rows_before(self._rope_ends, input_batch):
            there = self._mrope_positions[slot][:, begin:end]
            positions[:, first : first + there.shape[1]] = there
        return positions

    def forget_encodings(self) -> None:
        """Frees the encodings of this process: those that are needed again are computed again."""
        self._encoded.clear()
        self._nbytes = 0

    def release_copied(self) -> None:
        """Releases images in the store that a CUDA device has copied. Any thread may call it."""
        self._encoder.release_copied()

    def begin_step(self) -> None:
        """Releases encodings that only the step before has needed. A step without images needs nothing else."""
        self._shared = {name: tensor for name, tensor in self._shared.items() if name in self._unfinished}
        self._unfinished = set()

    def is_text(self, slots: Index, positions: Index | Ints) -> bool:
        """Whether no token at these positions belongs to an image, and no slot fails."""
        return not self._broken and bool((positions >= self._ends[slots]).all())

    def offsets(self, slot: int) -> Index:
        """Returns, for each axis, rope positions minus positions, from the last token of the prompt on."""
        return self._offsets[:, slot]

    # ── what stands there ──
    def embeds(self, input_batch: InputBatch, ids: Tensor) -> tuple[InputEmbeds | None, dict[int, FinishReason]]:
        """Returns the embeddings of the step's tokens, with those of images in their places (None: the step has no
        image tokens); and the slots that fail, as an image is missing or has another length than its placeholder."""
        failed = {slot: self._broken[slot] for slot in self._broken.keys() & set(input_batch.rows.tolist())}
        self.begin_step()
        chunks = list(self._chunks(input_batch))
        self._unfinished = {_name(chunk.image) for chunk in chunks if not chunk.is_last}
        self._encode(chunks, failed)
        places: list[Index] = []
        pieces: list[Tensor] = []
        for chunk in chunks:
            encoded = self._encoding(chunk.image)
            if encoded is not None and encoded.shape[0] == chunk.image.length:
                places.append(chunk.places)
                piece = encoded[chunk.low : chunk.high]
                pieces.append(piece if piece.device == ids.device else queued(piece, ids.device))
            else:
                failed.setdefault(chunk.slot, FinishReason.MISFIT)
        if not pieces:
            return None, failed
        self._make_room()
        where = moved(np.concatenate(places), ids.device)
        embeds = self._model.embeds(ids).clone()
        own, *added = torch.split(torch.cat(pieces).to(embeds.dtype), embeds.shape[-1], dim=-1)
        embeds[where] = own
        return InputEmbeds(embeds, where, tuple(added)), failed

    def _chunks(self, input_batch: InputBatch) -> Iterable[ImageChunk]:
        """Yields what the step computes of each image."""
        for slot, first, begin, end in _rows_before(self._ends, input_batch):
            for image, there in self.by_slot[slot]:
                low, high = (int(index) for index in np.searchsorted(there, (begin, end)))
                if low < high:
                    yield ImageChunk(slot, image, first + there[low:high] - begin, low, high)

    def _encode(self, chunks: list[ImageChunk], failed: dict[int, FinishReason]) -> None:
        """Encodes the images that are not cached, and adds the slots of those that cannot be encoded to `failed`."""
        images = {
            (_name(chunk.image), chunk.image.length): chunk.image
            for chunk in chunks
            if self._encoding(chunk.image) is None
        }
        if images:
            self._exchange(images, chunks, failed)
        if self._shared:
            begun = [(_name(chunk.image), chunk.image.length) for chunk in chunks if chunk.low == 0]
            shared = [name for name in begun if name[0] in self._shared]
            self.exchange.count_repeats(len(shared) - len(images.keys() & set(shared)))

    def _exchange(
        self, images: dict[tuple[Name, int], PromptImage], chunks: list[ImageChunk], failed: dict[int, FinishReason]
    ) -> None:
        reasons: dict[tuple[Name, int], FinishReason] = {}
        for (name, length), encoding in zip(images, self.exchange.run(list(images.values())), strict=True):
            if isinstance(encoding, FinishReason):
                reasons[name, length] = encoding
            elif encoding.is_shared:
                self._shared[name] = encoding.tensor
            else:
                self._encoded[name] = encoding.tensor
                self._nbytes += encoding.tensor.nbytes
        for chunk in chunks:
            reason = reasons.get((_name(chunk.image), chunk.image.length))
            if reason is not None:
                failed[chunk.slot] = reason

    def _encoding(self, image: PromptImage) -> Tensor | None:
        """Returns the encoding of an image [tokens, size] that is held or kept; None: there is none."""
        name = _name(image)
        if name in self._encoded:
            self._encoded.move_to_end(name)
            return self._encoded[name]
        return self._shared.get(name)

    def _make_room(self) -> None:
        while self._nbytes > self._cache_nbytes and len(self._encoded) > 1:
            self._nbytes -= self._encoded.popitem(last=False)[1].nbytes

    # ── opening ──
    def _open(self, item: Handle) -> Mapping[str, Any]:
        """Returns an image's value. Raises Unusable on all ranks if it does so on one."""
        value: Mapping[str, Any] = {}
        state = THERE
        try:
            value = self._encoder.open(item)
        except Unusable as unusable:
            state = STATE_OF[unusable.why]
        state = self._model.ranks.least(state)  # a rank alone would wait for the others, and add up nonsense
        if state != THERE:
            raise Unusable(WHY[state])
        return value


def _read_grid(value: Mapping[str, Any]) -> Grid:
    for name, seconds in (("image_grid_thw", None), ("video_grid_thw", value.get("second_per_grid_ts", 1.0))):
        grid = value.get(name)
        if isinstance(grid, Tensor):
            if grid.numel() != 3 or not isinstance(seconds, float | None):
                raise misfit(ValueError(f"expected a {name} of three numbers, got {tuple(grid.shape)}"))
            return Grid(grid.reshape(1, 3).clone(), seconds)
    raise misfit(ValueError("expected an image_grid_thw or a video_grid_thw"))


def _item_name(item: Handle) -> bytes | int:
    return id(item) if item.key is None else item.key


def _name(image: PromptImage) -> Name:
    name = _item_name(image.item)
    return name if image.part is None else (name, image.part)


def _rows_before(ends: Index, input_batch: InputBatch) -> list[tuple[int, int, int, int]]:
    """Returns slot, first token in the step, first position and end position of the rows that have not passed the end
    of their slot."""
    begins = input_batch.positions[input_batch.starts]
    rows = np.flatnonzero(begins < ends[input_batch.rows])
    return [
        (
            int(input_batch.rows[row]),
            int(input_batch.starts[row]),
            int(begins[row]),
            int(begins[row] + input_batch.counts[row]),
        )
        for row in rows
    ]
