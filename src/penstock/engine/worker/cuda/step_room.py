"""The memory of steps: a lower bound before weights are read, and what a step without a graph allocates, measured when
the model is loaded.

Several ranks agree before such a step whether each has the memory. Asking for that of the largest step would fail small
steps for which there is room, so the sizes below are measured, too, each half of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import Probe
from penstock.engine.worker.prompt_logprobs import MAX_ROWS
from penstock.engine.worker.sampler import TopLogprobs
from penstock.engine.worker.tensor_parallel import TPGroup

STEPS = 2  # that have memory at a time: graphs keep the memory of the largest recorded step
LEAST_TOKENS = 16  # of a measured size
INPUT_NBYTES = 64  # of the input of a step, for each token and each slot
EMBEDS = 4  # copies of the embeddings of a token, while images are put in their places
LACKING = ("out of memory", "ALLOC_FAILED")  # in errors of CUDA, Triton, NCCL and cuBLAS
WIDE = (".q_proj", ".o_proj", ".up_proj")  # layers of a decoder
ID_NBYTES = 40  # of one of the likeliest ids of a row, in all temporaries


class MemoryNeeds(NamedTuple):
    """What a device has to have room for, beside weights."""

    utilization: float  # of the device's memory
    step_tokens: int  # of the largest step
    slots: int
    request_tokens: int  # with keys and values; 0: the number of blocks is chosen
    reserved: int  # bytes
    state_nbytes: Callable[[int], int]  # of what is kept by slot, for the size of a vocabulary

    def require(self, stock: Any, ranks: TPGroup, device: torch.device) -> None:
        """Raises ValueError on all ranks if a device has no room for the weights, which have not been read, one request
        and the largest step."""
        parts = {"of weights": sum(parameter.nbytes for parameter in stock.parameters())}
        step = least_step_nbytes(stock, self.step_tokens, self.slots)
        if self.request_tokens:
            request = self.request_tokens * kv_nbytes_of_token(stock)
            vocabulary = stock.config.get_text_config().vocab_size
            parts[f"for keys and values of {self.request_tokens} tokens"] = request
            parts[f"for the state of {self.slots} slots"] = self.state_nbytes(vocabulary)
            parts["for graphs and images"] = self.reserved + (STEPS - 1) * step
        parts[f"at least for a step of {self.step_tokens} tokens"] = step
        room = self.unused_nbytes(device)
        if not ranks.least(int(sum(parts.values()) < room)):
            sizes = ", ".join(f"{nbytes / 2**30:.2f} GiB {purpose}" for purpose, nbytes in parts.items())
            raise ValueError(
                f"no room for one request: {sizes} are needed, and {max(0, room) / 2**30:.2f} GiB of the device are "
                "free for them: raise --gpu-memory-utilization or --tensor-parallel-size, lower --max-model-len, "
                "--max-num-batched-tokens or --max-num-seqs, or end other processes"
            )

    def free_nbytes(self, model: LoadedModel, reserved: int) -> tuple[float, str]:
        """Returns the bytes that are left for keys and values, and what to do if they are too few. `reserved`: bytes
        that are allocated later, and stay. Raises ValueError as `require_step` does."""
        step = require_step(model, self.step_tokens, self.slots)
        torch.cuda.empty_cache()
        reserved += STEPS * step + self.state_nbytes(model.vocab_size)
        hint = (
            f" ({step / 2**20:.1f} MiB are for a step of {self.step_tokens} tokens): raise --gpu-memory-utilization or "
            "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"
        )
        return self.unused_nbytes(model.device) - reserved, hint

    def unused_nbytes(self, device: torch.device) -> float:
        """Returns the bytes of this share of the device that nothing uses now."""
        unused, total = torch.cuda.mem_get_info(device)
        return self.utilization * total - (total - unused)


def kv_nbytes_of_token(stock: Any) -> int:
    """Returns the bytes of a token's keys and values on this rank, by the shapes of projections: the least."""
    layers = dict(stock.get_decoder().named_modules())
    sizes = [layer.weight.shape[0] for name, layer in layers.items() if name.endswith((".k_proj", ".v_proj"))]
    return int(sum(sizes)) * int(stock.dtype.itemsize)


def least_step_nbytes(stock: Any, tokens: int, slots: int) -> int:
    """Returns a lower bound of `step_nbytes`, by shapes: input and output of the widest layer that computes all tokens,
    or logits in float32 and their log-probabilities."""
    layers = dict(stock.get_decoder().named_modules())
    names = [name for name in layers if name.endswith(WIDE) and ".experts." not in name]
    widest = max((sum(layers[name].weight.shape) for name in names), default=0)
    logits = 2 * 4 * sampled_rows(tokens, slots) * stock.config.get_text_config().vocab_size
    return max(tokens * int(widest) * int(stock.dtype.itemsize), int(logits))


def sampled_rows(tokens: int, slots: int) -> int:
    """Returns the most rows of a step of which logits are computed at a time."""
    return min(tokens, max(slots, MAX_ROWS))


def require_step(model: LoadedModel, tokens: int, slots: int) -> int:
    """Returns `step_nbytes`. Raises ValueError on all ranks if one of them has no memory for the step."""
    nbytes, why = 0, "another rank has none"
    try:
        with model.ranks.alone():  # a rank that ran out of memory would leave the other ranks waiting
            nbytes = step_nbytes(model, tokens, slots)
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0]
    if not model.ranks.least(nbytes):
        raise ValueError(
            f"no room for one request: a step of {tokens} tokens has no memory beside the weights ({why}): lower "
            "--max-num-batched-tokens or --max-num-seqs, raise --tensor-parallel-size, or end other processes"
        )
    if model.ranks.size > 1:  # libraries allocate memory at the first operation of all ranks
        nbytes = max(nbytes, step_nbytes(model, tokens, slots))
    return nbytes


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of the device has failed: libraries and the driver raise other errors than torch."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in LACKING)


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
        logits = model.logits(model.hidden(Probe(), ids, ids)[: sampled_rows(tokens, slots)])
        torch.log_softmax(logits.float(), dim=-1)

    return peak_nbytes(model.device, compute)
