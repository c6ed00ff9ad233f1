"""What stands in prompts instead of text: each image is encoded once, when a step first needs it, and kept by its key.

Leaves to the store where an image's tensors lie, and to whoever filled it what they are: what the model's processor
makes of one image.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import Missing
from penstock.engine.batch import Batch
from penstock.engine.model import Model
from penstock.engine.protocol import Ints
from penstock.engine.schedule import Index, Input
from penstock.tensor import Item

Fetch = Callable[[bytes], Mapping[str, Tensor]]  # by key: pixel_values and what else belongs to them; or Missing
MOST_NBYTES = 1 << 28  # of encoded images that nobody needs at the moment


class Images:
    """Of all requests, by slot."""

    def __init__(self, model: Model, fetch: Fetch, slots: int) -> None:
        self._model = model
        self._fetch = fetch
        self._image_id = model.image_id or 0
        self._encoded: OrderedDict[bytes, Tensor] = OrderedDict()  # those last used last
        self._nbytes = 0
        self._inputs: dict[int, list[tuple[Input, Index]]] = {}  # with the positions at which the image stands
        self._ends = np.zeros(slots, np.intp)  # from here on there is only text
        self._offsets = np.zeros(slots, np.intp)  # of rope positions, from there on
        self._ropes: dict[int, Index] = {}  # and up to there [3, end]
        self._has_ropes = hasattr(model.stock.base_model, "get_rope_index")

    def join(self, slot: int, prompt: Ints, inputs: tuple[Input, ...]) -> None:
        self.leave(slot)
        if not inputs:
            return
        self._inputs[slot] = [
            (one, one[1] + np.flatnonzero(prompt[one[1] : one[1] + one[2]] == self._image_id)) for one in inputs
        ]
        self._ends[slot] = max(position + length for _, position, length in inputs)
        if self._has_ropes:
            self._find_ropes(slot, prompt, inputs)

    def leave(self, slot: int) -> None:
        self._inputs.pop(slot, None)
        self._ropes.pop(slot, None)
        self._ends[slot] = self._offsets[slot] = 0

    def _find_ropes(self, slot: int, prompt: Ints, inputs: tuple[Input, ...]) -> None:
        ids = torch.tensor(prompt, dtype=torch.int64)[None]
        try:
            grids = torch.cat([self._fetch(_key_of(item))["image_grid_thw"].reshape(-1, 3) for item, _, _ in inputs])
        except Missing:
            return  # it fails when it is computed
        positions, _ = self._model.stock.base_model.get_rope_index(
            ids, mm_token_type_ids=ids.eq(self._image_id).int(), image_grid_thw=grids.cpu()
        )
        ropes = positions[:, 0].numpy().astype(np.intp)
        self._ropes[slot] = ropes[:, : self._ends[slot]]
        self._offsets[slot] = ropes.max() + 1 - prompt.size

    def positions(self, batch: Batch) -> Index:
        """What the model is told of where tokens stand: [tokens], or [3, tokens] where it sees pictures as planes."""
        if not self._has_ropes:
            return batch.positions
        positions = np.tile(batch.positions + self._offsets[batch.slots], (3, 1))
        for slot, first, begin, end in self._rows_before_their_ends(batch):
            if slot in self._ropes:
                there = self._ropes[slot][:, begin:end]
                positions[:, first : first + there.shape[1]] = there
        return positions

    def embeds(self, batch: Batch, ids: Tensor) -> tuple[Tensor | None, set[int]]:
        """What stands for the tokens of the step (None: only they themselves); and slots that want an image that is
        not there, or is another than their prompt has room for."""
        failed: set[int] = set()
        places: list[Index] = []
        pieces: list[Tensor] = []
        for slot, first, begin, end in self._rows_before_their_ends(batch):
            for (item, _, _), there in self._inputs[slot]:
                low, high = np.searchsorted(there, (begin, end))
                if low == high:
                    continue
                encoded = self._encoding(item)
                if encoded is None or encoded.shape[0] != there.size:
                    failed.add(slot)
                    continue
                places.append(first + there[low:high] - begin)
                pieces.append(encoded[low:high])
        if not pieces:
            return None, failed
        self._make_room()
        where = torch.from_numpy(np.concatenate(places)).to(ids.device)
        with torch.inference_mode():
            embeds = self._model.embeds(ids).clone()
            embeds[where] = torch.cat(pieces).to(embeds.dtype)
        return embeds, failed

    def _rows_before_their_ends(self, batch: Batch) -> list[tuple[int, int, int, int]]:
        """Slot, first token in the step, first position, and the position after the last, of rows with images yet."""
        begins = batch.positions[batch.starts]
        rows = np.flatnonzero(begins < self._ends[batch.rows])
        return [
            (int(batch.rows[row]), int(batch.starts[row]), int(begins[row]), int(begins[row] + batch.counts[row]))
            for row in rows
        ]

    def _encoding(self, item: Item) -> Tensor | None:
        """Of an image [tokens, size], if there is such an image."""
        if item.key is None:
            return None
        key = item.key
        if key in self._encoded:
            self._encoded.move_to_end(key)
            return self._encoded[key]
        try:
            encoded = self._encode(self._fetch(key))
        except Missing:
            return None
        self._encoded[key] = encoded
        self._nbytes += encoded.nbytes
        return encoded

    @torch.inference_mode()
    def _encode(self, found: Mapping[str, Tensor]) -> Tensor:
        model = self._model
        given: dict[str, Any] = {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
            for name, tensor in found.items()
        }
        features = model.stock.get_image_features(**given, return_dict=True).pooler_output
        return torch.cat([one.flatten(0, -2) for one in features])

    def _make_room(self) -> None:
        while self._nbytes > MOST_NBYTES and len(self._encoded) > 1:
            self._nbytes -= self._encoded.popitem(last=False)[1].nbytes


def _key_of(item: Item) -> bytes:
    if item.key is None:
        raise Missing("an image without a key is kept nowhere")
    return item.key
