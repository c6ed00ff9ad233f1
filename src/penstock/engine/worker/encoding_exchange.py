"""Encodes the images of a step once for all ranks, and in `store` mode once for all engines.

| mode | image i of a step is encoded by | how the other ranks get it |
|---|---|---|
| `weights` | each rank, for itself | |
| `data` | rank i mod size | broadcast among the ranks |
| `store` | the same rank, if no engine has encoded it | they view the encoding in the store of encodings |

In `store` mode an image without a key, or without room in the store, travels as in `data` mode.

Each rank first encodes its own images, then all ranks agree on the outcomes (`TPGroup.least_of_each`), then each gets
the images of the others. So no rank waits for another rank with a key in its hands: a key is held for as long as one
image takes to be encoded, which waits for nothing. An engine that finds a key being written by another engine encodes
its other images first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from logging import WARNING
from typing import NamedTuple

import torch
from torch import Tensor

from penstock import Empty, Lease, MemoryExhausted, Store, Timeout
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker.device import EncodingCounts
from penstock.engine.worker.image_encoder import ImageEncoder, Part, Unusable
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.tensor import Handle

# The state of an image on a rank. The least of all ranks counts: one that fails an image fails it on all of them.
LACKING, MISSING, MISFIT, OWN, ENCODED, FOUND, OF_ANOTHER = range(7)
WHY = {LACKING: FinishReason.ERROR, MISSING: FinishReason.MISSING, MISFIT: FinishReason.MISFIT}
STATE_OF = {why: state for state, why in WHY.items()}
MAX_NBYTES = 1 << 28  # of encodings that a worker keeps in its own memory from one step to the next


class EncoderOptions(NamedTuple):
    """How images are encoded."""

    mode: str = "weights"
    store: Store | None = None  # of encodings, in `store` mode
    cache_nbytes: int = MAX_NBYTES  # of encodings in the worker's own memory
    salt: bytes = b""  # a hash of the model: encodings of another model have other keys
    timeout: float = 15.0  # seconds of a step in which to wait for encodings of other engines


class PromptImage(NamedTuple):
    """An image of a prompt, or a part of a video, which is encoded by itself."""

    item: Handle
    length: int  # tokens of its place
    is_encoded: bool = False  # prompt embeddings: each rank reads them for itself
    part: Part | None = None  # None: the whole of it


class Encoding(NamedTuple):
    """The encoding of an image, [length, size]."""

    tensor: Tensor
    is_shared: bool  # it lies in the store, and is held there as long as the tensor lives


class EncodingExchange:
    """The part of one rank in encoding the images of a step."""

    def __init__(self, encoder: ImageEncoder, ranks: TPGroup, options: EncoderOptions) -> None:
        self._encoder = encoder
        self._ranks = ranks
        self._options = options
        self._is_divided = options.mode != "weights"
        self.counts = EncodingCounts()  # of all ranks, as each of them sees it

    def run(self, images: Sequence[PromptImage]) -> list[Encoding | FinishReason]:
        """Returns the encoding of each image, or why there is none. All ranks call it with the same images, and get the
        same.

        The rank that has encoded an image holds it in the store as long as its tensor lives: to the next step at least,
        or another rank could find it evicted.
        """
        rank, size = self._ranks.rank, self._ranks.size
        step = size if self._is_divided else 1
        own = {number: image for number, image in enumerate(images) if image.is_encoded or number % step == rank % step}
        outcomes = self._outcomes(own)
        self._take_room(images, outcomes)
        own_states = [outcomes[number][0] if number in outcomes else OF_ANOTHER for number in range(len(images))]
        results: list[Encoding | FinishReason] = []
        for number, state in enumerate(self._ranks.least_of_each(own_states)):
            image = images[number]
            self._count(image, state)
            if state in WHY:
                results.append(WHY[state])
                continue
            tensor = outcomes[number][1] if number in outcomes else None
            if state != OWN:
                results.append(Encoding(self._view(image) if tensor is None else tensor, is_shared=True))
                continue
            if tensor is None:
                tensor = self._encoder.empty(image.length)
            if self._is_divided and not image.is_encoded:
                self._ranks.broadcast(tensor, number % size)
            results.append(Encoding(tensor, is_shared=False))
        return results

    def _outcomes(self, images: dict[int, PromptImage]) -> dict[int, tuple[int, Tensor | None]]:
        """Encodes this rank's images: first those that no engine is encoding."""
        deadline = time.monotonic() + self._options.timeout
        outcomes: dict[int, tuple[int, Tensor | None]] = {}
        busy: dict[int, PromptImage] = {}
        for number, image in images.items():
            try:
                outcomes[number] = self._outcome(image, 0.0)
            except Timeout:
                busy[number] = image
        for number, image in busy.items():
            try:
                outcomes[number] = self._outcome(image, max(0.0, deadline - time.monotonic()))
            except Timeout as late:
                event("image is encoded once more", why=str(late))
                self._count_miss()
                outcomes[number] = self._encoded(image)
        return outcomes

    def _take_room(self, images: Sequence[PromptImage], outcomes: dict[int, tuple[int, Tensor | None]]) -> None:
        """Allocates the encodings that other ranks send. Without memory for one, the image fails on all ranks; later,
        the sender would wait for this rank."""
        if not self._is_divided or self._options.store is not None:
            return
        for number, image in enumerate(images):
            if number not in outcomes:
                try:
                    outcomes[number] = OF_ANOTHER, self._encoder.empty(image.length)
                except torch.OutOfMemoryError as error:
                    outcomes[number] = self._lacking(str(error)), None

    def _outcome(self, image: PromptImage, timeout: float) -> tuple[int, Tensor | None]:
        """Encodes an image, unless an engine has done so. Raises Timeout while another engine does."""
        store = self._options.store
        if store is None or image.item.key is None or image.is_encoded:
            return self._encoded(image)
        layout = Empty((image.length, self._encoder.size), self._encoder.dtype)
        try:
            loan = store.loan(self._key(image), layout, timeout=timeout)
        except MemoryExhausted as full:
            event("an encoding has no room in the store", why=str(full))
            self._count_miss()
            return self._encoded(image)
        if isinstance(loan, Lease):
            return FOUND, loan.value("torch")
        with loan:  # gives the key up if the image cannot be encoded
            state, encoded = self._encoded(image)
            if encoded is None:
                return state, None
            loan.value("torch").copy_(encoded)
            return ENCODED, loan.commit().value("torch")

    def _encoded(self, image: PromptImage) -> tuple[int, Tensor | None]:
        try:
            return OWN, self._encoder.encode(image.item, image.length, image.part)
        except Unusable as unusable:
            return STATE_OF[unusable.why], None
        except torch.OutOfMemoryError as error:
            if self._ranks.size == 1:
                raise
            why = str(error)
        # The other ranks wait for the outcomes of this rank. The error, gone here, held tensors of the encoder.
        return self._lacking(why), None

    def _lacking(self, why: str) -> int:
        event("out of memory", WARNING, images=1, why=why.partition("\n")[0])
        torch.cuda.empty_cache()
        return LACKING

    def _view(self, image: PromptImage) -> Tensor:
        """Returns the encoding that another rank has in the store, and holds there."""
        store = self._options.store
        assert store is not None, "only the store makes an encoding ENCODED or FOUND"
        tensor: Tensor = store.open(self._key(image)).value("torch")  # the rank that has looked it up counts
        return tensor

    def _count_miss(self) -> None:
        """Counts an encoding that the store was to have."""
        if self._options.store is not None:
            self._options.store.count(misses=1)

    def count_repeats(self, number: int) -> None:
        """Counts encodings in the store that the ranks hold already: other requests of the step have looked them up."""
        if self._options.store is not None and self._ranks.rank == 0:
            self._options.store.count(hits=number)

    def _key(self, image: PromptImage) -> bytes:
        """Returns a key of the image, the model, its dtype, and the shape, so that a value has the expected one."""
        assert image.item.key is not None, "an image without a key is not in the store"
        of = f"{self._encoder.dtype} {image.length} {self._encoder.size} {image.part} ".encode()
        return hashlib.sha256(of + self._options.salt + image.item.key).digest()

    def _count(self, image: PromptImage, state: int) -> None:
        counts = self.counts
        if image.is_encoded:
            return
        if state == FOUND:
            counts.hits += 1
        elif state in (OWN, ENCODED):
            counts.encoded += 1 if self._is_divided else self._ranks.size
            counts.unshared += state == OWN and self._options.store is not None and image.item.key is not None
