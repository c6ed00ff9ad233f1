"""Vectors and scores of prompts, made of the last position, in place of sampled ids."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import Scope, Store
from penstock._native import KEY_NBYTES
from penstock.tensor import Handle


class Pooler:
    """Makes embeddings: the hidden state of the last position, of length 1. Or scores: the probability of one id before
    another one as the next token.

    A vector is put into the store under a random key, and no process holds it: the server that opens the vector gives
    the key up. Until then the store may need the room, as for any value, and the server submits the prompt again.
    """

    def __init__(self, store: Store | None, classes: tuple[int, int] | None = None) -> None:
        """`store`: None if vectors travel in messages. `classes`: the ids of no and yes; None: embeddings are made."""
        self._store = store
        self._classes = classes

    @property
    def needs_logits(self) -> bool:
        return self._classes is not None

    def vectors(self, outputs: Tensor) -> Tensor:
        """Returns a row of float32 for each row: of logits for scores, of hidden states for embeddings."""
        outputs = outputs.float()
        if self._classes is None:
            return F.normalize(outputs, dim=-1)
        no, yes = self._classes
        return torch.sigmoid(outputs[:, yes] - outputs[:, no])[:, None]

    def put(self, vectors: Tensor) -> tuple[Handle, ...]:
        """Puts each row into the store. A row without room there travels in the messages."""
        with Scope(self._store, inline_nbytes=0) as scope:
            return tuple(scope.put(row, key=os.urandom(KEY_NBYTES)) for row in vectors.numpy())
