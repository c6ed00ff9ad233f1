"""Vectors and scores of prompts, in place of sampled ids."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import Scope, Store
from penstock._native import KEY_NBYTES
from penstock.engine.model_dir import classifier_ids, pooling_of
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker.device import SamplerOutput
from penstock.tensor import Handle


class Pooler:
    """Makes embeddings: the hidden state of the last position, or what an encoder makes of all. Or scores: the
    probability of one id before another one as the next token.

    A vector is put into the store under a random key, and no process holds it: the server that opens the vector gives
    the key up. Until then the store may need the room, as for any value, and the server submits the prompt again.
    """

    def __init__(
        self, store: Store | None, classes: tuple[int, int] | None = None, *, is_normalized: bool = True
    ) -> None:
        """`store`: None if vectors travel in messages. `classes`: the ids of no and yes; None: embeddings are made, of
        length 1 if `is_normalized`."""
        self._store = store
        self._classes = classes
        self._is_normalized = is_normalized

    @classmethod
    def of(cls, config: EngineConfig, store: Store | None) -> Pooler | None:
        """Returns the pooler of an engine; None: the engine generates."""
        if not config.pooling:
            return None
        if config.pooling == "embed":
            return cls(store, is_normalized=pooling_of(config).is_normalized)
        return cls(store, None if config.is_encoder else classifier_ids(config))

    @property
    def needs_logits(self) -> bool:
        return self._classes is not None

    def vectors(self, outputs: Tensor) -> Tensor:
        """Returns a row of float32 for each row: of logits for scores, of hidden states for embeddings."""
        outputs = outputs.float()
        if self._classes is None:
            return F.normalize(outputs, dim=-1) if self._is_normalized else outputs
        no, yes = self._classes
        return torch.sigmoid(outputs[:, yes] - outputs[:, no])[:, None]

    def step(self, vectors: Tensor | None, slots: Index, failed: dict[int, FinishReason]) -> SamplerOutput:
        """Returns the result of a step. `vectors`: of these slots; None: on a rank that sends no result."""
        ids = np.zeros(slots.size, np.int32)
        if vectors is None:
            return SamplerOutput(ids, failed=failed)
        wrong = slots[~torch.isfinite(vectors).all(-1).numpy()].tolist()
        failed = {**dict.fromkeys(wrong, FinishReason.ERROR), **failed}
        return SamplerOutput(ids, failed=failed, vectors=self.put(vectors))

    def put(self, vectors: Tensor) -> tuple[Handle, ...]:
        """Puts each row into the store. A row without room there travels in the messages."""
        with Scope(self._store, inline_nbytes=0) as scope:
            return tuple(scope.put(row, key=os.urandom(KEY_NBYTES)) for row in vectors.numpy())
