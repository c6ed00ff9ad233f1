"""The memory that a step without a graph allocates, measured when the model is loaded.

Several ranks agree before such a step whether each has the memory. Asking for that of the largest step would fail small
steps for which there is room, so the sizes below are measured, too, each half of the next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import Probe
from penstock.engine.worker.prompt_logprobs import MAX_ROWS
from penstock.engine.worker.sampler import TopLogprobs

LEAST_TOKENS = 16  # of a measured size
INPUT_NBYTES = 64  # of the input of a step, for each token and each slot
EMBEDS = 4  # copies of the embeddings of a token, while images are put in their places
ID_NBYTES = 40  # of one of the likeliest ids of a row, in all temporaries


class StepRoom:
    """The bytes of steps of one model, on one rank. All ranks measure together."""

    def __init__(self, model: LoadedModel, token_budget: int, slots: int) -> None:
        sizes = [token_budget]
        while sizes[-1] // 2 >= LEAST_TOKENS:
            sizes.append(sizes[-1] // 2)
        self._sizes = [(size, step_nbytes(model, size, slots)) for size in reversed(sizes)]
        ids = torch.zeros(MAX_ROWS, dtype=torch.int64, device=model.device)
        hidden = model.hidden(Probe(), ids, ids)
        rows, counts = np.arange(MAX_ROWS), np.ones(MAX_ROWS, np.int32)
        self._scores_nbytes = peak_nbytes(model.device, lambda: TopLogprobs.of(model.logits(hidden), ids, rows, counts))
        self._embeds_nbytes = EMBEDS * hidden[0].nbytes * (1 + model.deepstack_layers)
        self._slots = slots

    def nbytes(self, tokens: int, *, has_embeds: bool = False, likeliest: int | None = None) -> int:
        """Returns the bytes of a step of so many tokens. `has_embeds`: with images. `likeliest`: ids of which it
        computes log-probabilities at each token of prompts; None: of no token."""
        step = next((nbytes for size, nbytes in self._sizes if size >= tokens), self._sizes[-1][1])
        embeds = tokens * self._embeds_nbytes if has_embeds else 0
        scores = 0 if likeliest is None else self._scores_nbytes + MAX_ROWS * ID_NBYTES * likeliest
        return step + embeds + scores + INPUT_NBYTES * (tokens + self._slots)


def peak_nbytes(device: torch.device, compute: Callable[[], object]) -> int:
    """Returns the most bytes that a computation holds at a time."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    return torch.cuda.max_memory_allocated(device) - before


def step_nbytes(model: LoadedModel, tokens: int, slots: int) -> int:
    """Returns the bytes that a step allocates for a while, beside weights and cache: layers, logits (in float32, where
    penalties or biases change them), and log-probabilities."""

    def compute() -> None:
        ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
        logits = model.logits(model.hidden(Probe(), ids, ids)[: max(slots, MAX_ROWS)])
        torch.log_softmax(logits.float(), dim=-1)

    return peak_nbytes(model.device, compute)
