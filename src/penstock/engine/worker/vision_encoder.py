"""The vision encoder: each image is encoded once, when a step first needs it, and the encoding is cached by its key.

Prompt embeddings are an input that is encoded already: they stand at all of their positions, and an image only where
the prompt has image tokens. An input is opened for as long as it takes to encode it. All ranks encode it in the same
step, and if one of them does not find it, all treat it as missing: so the request fails on all ranks alike. The server
has put the tensors, of an image the output of the model's image processor, into the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from penstock import DecodeError, Missing
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import EMBEDS, Index, Input
from penstock.engine.protocol.messages import FinishReason, Ints
from penstock.engine.worker.input_batch import InputBatch, moved
from penstock.engine.worker.model import LoadedModel
from penstock.tensor import Handle, Lease

Open = Callable[[Handle], Lease]  # raises Missing
Name: TypeAlias = "bytes | int"  # an image's key; without a key, the `id()` of its item while a slot has it
MAX_NBYTES = 1 << 28  # of encoded images that are kept from one step to the next
MAX_GRIDS = 1 << 14  # images with a cached grid (`image_grid_thw`); above, the grid used least recently is dropped

MISSING, MISFIT, THERE = range(3)  # the state of an image on a rank; the least of all ranks counts
WHY = {MISSING: FinishReason.MISSING, MISFIT: FinishReason.MISFIT}
OURS = (torch.OutOfMemoryError, torch.distributed.DistError)  # any other error of the encoder is the image's fault


class Unusable(Exception):
    """An image is missing from the store, or does not fit the model. All ranks raise it alike."""

    def __init__(self, why: FinishReason) -> None:
        super().__init__(why.name)
        self.why = why


class EncoderCache:
    """The images of all slots, and a cache of their encodings."""

    def __init__(self, model: LoadedModel, open_handle: Open, slots: int) -> None:
        self._model = model
        self._open_handle = open_handle
        self._image_id = -1 if model.image_id is None else model.image_id
        self._encoded: OrderedDict[Name, Tensor] = OrderedDict()  # those last used last
        self._nbytes = 0
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
            raise self._misfit(error) from None
        ropes = positions[:, 0].numpy().astype(np.intp)
        self._mrope_positions[slot] = ropes[:, : self._ends[slot]]
        self._offsets[slot] = ropes.max() + 1 - prompt.size

    def _grid(self, item: Handle) -> Tensor:
        name = _name(item)
        if name not in self._grids:
            grid = self._open(item).get("image_grid_thw")
            if grid is None or grid.numel() != 3:
                raise self._misfit(ValueError("expected an image_grid_thw of three numbers"))
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
        places: list[Index] = []
        pieces: list[Tensor] = []
        for slot, first, begin, end in self._rows_before_their_ends(batch):
            for (item, _, _), there in self._inputs[slot]:
                low, high = np.searchsorted(there, (begin, end))
                if low == high:
                    continue
                try:
                    encoded = self._encoding(item)
                except Unusable as unusable:
                    failed[slot] = unusable.why
                    continue
                if encoded.shape[0] != there.size:
                    failed[slot] = FinishReason.MISFIT
                    continue
                places.append(first + there[low:high] - begin)
                pieces.append(encoded[low:high])
        if not pieces:
            return None, failed
        self._make_room()
        where = moved(np.concatenate(places), ids.device)
        embeds = self._model.embeds(ids).clone()
        embeds[where] = torch.cat(pieces).to(embeds.dtype)
        return embeds, failed

    def _rows_before_their_ends(self, batch: InputBatch) -> list[tuple[int, int, int, int]]:
        """Returns slot, first token in the step, first position and end position of the rows that have not passed all
        their images."""
        begins = batch.positions[batch.starts]
        rows = np.flatnonzero(begins < self._ends[batch.rows])
        return [
            (int(batch.rows[row]), int(batch.starts[row]), int(begins[row]), int(begins[row] + batch.counts[row]))
            for row in rows
        ]

    def _encoding(self, item: Handle) -> Tensor:
        """Returns the encoding of an image [tokens, size]. Raises Unusable."""
        name = _name(item)
        if name in self._encoded:
            self._encoded.move_to_end(name)
            return self._encoded[name]
        tensors = self._open(item)
        try:
            encoded = self._encode(tensors)
        except OURS:
            raise
        except Exception as error:
            raise self._misfit(error) from None
        self._encoded[name] = encoded
        self._nbytes += encoded.nbytes
        return encoded

    def _encode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        model = self._model
        if EMBEDS in tensors:
            return self._cast(tensors[EMBEDS])
        inputs: dict[str, Any] = {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        features = model.stock.get_image_features(**inputs, return_dict=True).pooler_output
        return torch.cat([feature.flatten(0, -2) for feature in features])

    def _cast(self, embeds: Tensor) -> Tensor:
        """Returns prompt embeddings in the model's dtype: a copy, as the value is open for this step only.
        Raises ValueError."""
        if embeds.dtype == torch.int16:  # the server has no torch, and NumPy no bfloat16
            embeds = embeds.view(torch.bfloat16)
        cast = embeds.to(self._model.device, self._model.dtype, copy=True)
        if cast.ndim != 2 or cast.shape[1] != self._model.hidden_size:
            raise ValueError(f"expected embeddings of size {self._model.hidden_size}, got {list(cast.shape)}")
        if not cast.isfinite().all():
            raise ValueError(f"a number of the prompt embeddings is too large for {cast.dtype}")
        return cast

    def _make_room(self) -> None:
        while self._nbytes > MAX_NBYTES and len(self._encoded) > 1:
            self._nbytes -= self._encoded.popitem(last=False)[1].nbytes

    # ── opening ──
    def _open(self, item: Handle) -> dict[str, Tensor]:
        """Returns an image's tensors; the image is held as long as one of them lives. Raises Unusable."""
        tensors: dict[str, Tensor] = {}
        state = MISFIT
        try:
            value = self._open_handle(item).value("torch")
            if isinstance(value, Mapping):
                tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
                state = THERE
        except Missing:
            state = MISSING
        except (DecodeError, ValueError) as error:
            event("not an input of a prompt", error=error)
        state = self._model.ranks.least(state)  # a rank alone would wait for the others, and add up nonsense
        if state != THERE:
            raise Unusable(WHY[state])
        return tensors

    def _misfit(self, error: Exception) -> Unusable:
        event("input does not fit the model", error=f"{type(error).__name__}: {error}")
        return Unusable(FinishReason.MISFIT)


def _name(item: Handle) -> Name:
    return id(item) if item.key is None else item.key
