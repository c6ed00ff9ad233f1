"""The images of the batch: where they stand in prompts, and their encodings, cached by key.

An image is encoded when a step first needs it (`encoding_exchange`). Prompt embeddings are an input that is encoded
already: they stand at all of their positions, and an image only where the prompt has image tokens. If a rank does not
find an input, all ranks treat it as missing: so the request fails on all ranks alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.engine.protocol.columns import Index, Input
from penstock.engine.protocol.messages import FinishReason, Ints
from penstock.engine.worker.encoding_exchange import (
    STATE_OF,
    WHY,
    EncoderOptions,
    EncodingExchange,
    PromptImage,
)
from penstock.engine.worker.image_encoder import ImageEncoder, Open, Unusable, misfit
from penstock.engine.worker.input_batch import InputBatch, moved
from penstock.engine.worker.model import LoadedModel
from penstock.tensor import Handle

Name: TypeAlias = "bytes | int"  # an image's key; without a key, the `id()` of its item while a slot has it
MAX_GRIDS = 1 << 14  # images with a cached grid (`image_grid_thw`); above, the grid used least recently is dropped
THERE = len(WHY)  # an image that no rank fails


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

    def __init__(self, model: LoadedModel, open_handle: Open, slots: int, options: EncoderOptions) -> None:
        self._model = model
        self._encoder = ImageEncoder(model, open_handle)
        self.exchange = EncodingExchange(self._encoder, model.ranks, options)
        self._cache_nbytes = options.cache_nbytes
        self._image_id = -1 if model.image_id is None else model.image_id
        self._encoded: OrderedDict[Name, Tensor] = OrderedDict()  # those last used last
        self._nbytes = 0
        self._shared: dict[Name, Tensor] = {}  # in the store, held
        self._unfinished: set[Name] = set()  # images with tokens that the last step has left
        self._grids: OrderedDict[Name, Tensor] = OrderedDict()  # [1, 3]: kept, so a cached image need not be opened
        self._inputs: dict[int, list[tuple[Input, Index]]] = {}  # with the positions at which the image stands
        self._ends = np.zeros(slots, np.intp)  # position after the last image; only text follows
        self._offsets = np.zeros(slots, np.intp)  # of rope positions, from `_ends` on
        self._mrope_positions: dict[int, Index] = {}  # rope positions before `_ends`: [3, end]
        self._broken: dict[int, FinishReason] = {}  # slots without known token positions
        self._has_ropes = hasattr(model.stock.base_model, "get_rope_index")

    def join(self, slot: int, prompt: Ints, inputs: tuple[Input, ...]) -> None:
        self.leave(slot)
        if not inputs:
            return
        self._inputs[slot] = [(entry, self._places(prompt, *entry[1:])) for entry in inputs]
        self._ends[slot] = max(position + length for _, position, length in inputs)
        if self._has_ropes and self._image_id in prompt:
            try:
                self._find_ropes(slot, prompt, inputs)
            except Unusable as unusable:
                self._broken[slot] = unusable.why

    def _places(self, prompt: Ints, position: int, length: int) -> Index:
        """Returns the positions of an image's tokens; without any, the input is prompt embeddings, and has them all."""
        there = np.flatnonzero(prompt[position : position + length] == self._image_id)
        return position + (there if there.size else np.arange(length))

    def ids_of_text(self, slot: int, prompt: Ints) -> Ints:
        """Returns the prompt without the ids that stand for prompt embeddings, as no text has these tokens."""
        places = [there for _, there in self._inputs.get(slot, ()) if self._image_id not in prompt[there]]
        return np.delete(prompt, np.concatenate(places)) if places else prompt

    def leave(self, slot: int) -> None:
        for (item, _, _), _ in self._inputs.pop(slot, ()):
            if item.key is None and not self._is_wanted(item):
                self._forget(id(item))
        self._mrope_positions.pop(slot, None)
        self._broken.pop(slot, None)
        self._ends[slot] = self._offsets[slot] = 0

    def _is_wanted(self, item: Handle) -> bool:
        """Returns whether another sample of the request still has this image."""
        return any(other is item for inputs in self._inputs.values() for (other, _, _), _ in inputs)

    def _forget(self, name: Name) -> None:
        self._grids.pop(name, None)
        encoded = self._encoded.pop(name, None)
        self._nbytes -= 0 if encoded is None else encoded.nbytes

    # ── where tokens stand ──
    @property
    def num_position_axes(self) -> int:
        """Returns the number of axes of a token's rope position."""
        return 3 if self._has_ropes else 1

    def _find_ropes(self, slot: int, prompt: Ints, inputs: tuple[Input, ...]) -> None:
        ids = torch.tensor(prompt, dtype=torch.int64)[None]
        grids = torch.cat([self._grid(item) for item, _, _ in inputs])
        try:
            positions, _ = self._model.stock.base_model.get_rope_index(
                ids, mm_token_type_ids=ids.eq(self._image_id).int(), image_grid_thw=grids
            )
        except Exception as error:
            raise misfit(error) from None
        ropes = positions[:, 0].numpy().astype(np.intp)
        self._mrope_positions[slot] = ropes[:, : self._ends[slot]]
        self._offsets[slot] = ropes.max() + 1 - prompt.size

    def _grid(self, item: Handle) -> Tensor:
        name = _name(item)
        if name not in self._grids:
            grid = self._open(item).get("image_grid_thw")
            if grid is None or grid.numel() != 3:
                raise misfit(ValueError("expected an image_grid_thw of three numbers"))
            self._grids[name] = grid.reshape(1, 3).clone()
            if len(self._grids) > MAX_GRIDS:
                self._grids.popitem(last=False)
        else:
            self._grids.move_to_end(name)
        return self._grids[name]

    def positions(self, batch: InputBatch) -> Index:
        """Returns the positions of tokens: [tokens], or [3, tokens] where a position has three axes."""
        if not self._has_ropes:
            return batch.positions
        positions = np.tile(batch.positions + self._offsets[batch.slots], (self.num_position_axes, 1))
        for slot, first, begin, end in self._rows_before_their_ends(batch):
            if slot in self._mrope_positions:
                there = self._mrope_positions[slot][:, begin:end]
                positions[:, first : first + there.shape[1]] = there
        return positions

    # ── what stands there ──
    def embeds(self, batch: InputBatch, ids: Tensor) -> tuple[Tensor | None, dict[int, FinishReason]]:
        """Returns the embeddings of the step's tokens, with those of images in their places (None: the step has no
        image tokens); and the slots that fail, as an image is missing or has another length than its placeholder."""
        failed = {slot: self._broken[slot] for slot in self._broken.keys() & set(batch.rows.tolist())}
        self._shared = {name: tensor for name, tensor in self._shared.items() if name in self._unfinished}
        chunks = list(self._chunks(batch))
        self._unfinished = {_name(chunk.image.item) for chunk in chunks if not chunk.is_last}
        self._encode(chunks, failed)
        places: list[Index] = []
        pieces: list[Tensor] = []
        for chunk in chunks:
            encoded = self._encoding(chunk.image)
            if encoded is not None and encoded.shape[0] == chunk.image.length:
                places.append(chunk.places)
                pieces.append(encoded[chunk.low : chunk.high].to(ids.device))
            else:
                failed.setdefault(chunk.slot, FinishReason.MISFIT)
        if not pieces:
            return None, failed
        self._make_room()
        where = moved(np.concatenate(places), ids.device)
        embeds = self._model.embeds(ids).clone()
        embeds[where] = torch.cat(pieces).to(embeds.dtype)
        return embeds, failed

    def _chunks(self, batch: InputBatch) -> Iterable[ImageChunk]:
        """Yields what the step computes of each image."""
        for slot, first, begin, end in self._rows_before_their_ends(batch):
            for (item, _, _), there in self._inputs[slot]:
                low, high = (int(found) for found in np.searchsorted(there, (begin, end)))
                if low < high:
                    yield ImageChunk(slot, PromptImage(item, there.size), first + there[low:high] - begin, low, high)

    def _encode(self, chunks: list[ImageChunk], failed: dict[int, FinishReason]) -> None:
        """Encodes the images that are not cached, and adds the slots of those that cannot be encoded to `failed`."""
        images = {
            (_name(chunk.image.item), chunk.image.length): chunk.image
            for chunk in chunks
            if self._encoding(chunk.image) is None
        }
        if not images:
            return
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
            reason = reasons.get((_name(chunk.image.item), chunk.image.length))
            if reason is not None:
                failed[chunk.slot] = reason

    def _rows_before_their_ends(self, batch: InputBatch) -> list[tuple[int, int, int, int]]:
        """Returns slot, first token in the step, first position and end position of the rows that have not passed all
        their images."""
        begins = batch.positions[batch.starts]
        rows = np.flatnonzero(begins < self._ends[batch.rows])
        return [
            (int(batch.rows[row]), int(batch.starts[row]), int(begins[row]), int(begins[row] + batch.counts[row]))
            for row in rows
        ]

    def _encoding(self, image: PromptImage) -> Tensor | None:
        """Returns the encoding of an image [tokens, size] that is held or kept; None: there is none."""
        name = _name(image.item)
        if name in self._encoded:
            self._encoded.move_to_end(name)
            return self._encoded[name]
        return self._shared.get(name)

    def _make_room(self) -> None:
        while self._nbytes > self._cache_nbytes and len(self._encoded) > 1:
            self._nbytes -= self._encoded.popitem(last=False)[1].nbytes

    # ── opening ──
    def _open(self, item: Handle) -> dict[str, Tensor]:
        """Returns an image's tensors. Raises Unusable on all ranks if it does so on one."""
        tensors: dict[str, Tensor] = {}
        state = THERE
        try:
            tensors = self._encoder.open(item)
        except Unusable as unusable:
            state = STATE_OF[unusable.why]
        state = self._model.ranks.least(state)  # a rank alone would wait for the others, and add up nonsense
        if state != THERE:
            raise Unusable(WHY[state])
        return tensors


def _name(item: Handle) -> Name:
    return id(item) if item.key is None else item.key
