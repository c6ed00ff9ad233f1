"""What a CUDA device keeps of each slot: block table, tokens and how many are computed, parameters, ids for penalties.

A step brings the changes alone, in one copy: a decode step in which no sample joins, leaves or gets a block has none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints, SamplingParams, Step
from penstock.engine.worker.cuda import kernels, launcher
from penstock.engine.worker.input_batch import pinned

# Kinds of writes, and the numbers of each write before its data
TABLE, TOKENS, COMPUTED, ROWS, PARAMS, COUNTS = (
    kind.value
    for kind in (kernels.TABLE, kernels.TOKENS, kernels.COMPUTED, kernels.ROWS, kernels.PARAMS, kernels.COUNTS)
)
FIELDS = kernels.WRITE_FIELDS.value


class Write(NamedTuple):
    kind: int
    slot: int
    first: int
    data: Ints


class JoinedSample(NamedTuple):
    """A sample that joins, as the device needs it."""

    prompt: Ints
    text: Ints  # of the prompt: ids that penalties count
    generated: Ints  # ids before the sample was resumed
    params: SamplingParams
    is_penalized: bool  # by kernels
    seed: int  # of the sample, see `sampler.seed_of`
    rope_offsets: Index | Ints  # of each axis, see `EncoderCache.offsets`


class DeviceState:
    def __init__(
        self, slots: int, max_blocks: int, block_size: int, device: torch.device, vocabulary: int, *, samples: bool
    ) -> None:
        """`max_blocks`: of a request. `samples`: the rank samples, and the device counts ids for penalties."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.table = zeros(slots, max_blocks)
        self.tokens = zeros(slots, max_blocks * block_size + 1)
        self.computed = zeros(slots)
        self.rows = torch.full((slots,), -1, dtype=torch.int32, device=device)  # of a decode step: slots, then -1
        self.params = zeros(slots, kernels.PARAMS_SIZE.value)
        self.counts = zeros(slots if samples else 0, vocabulary)
        self.block_size = block_size
        self.vocabulary = vocabulary
        self._device = device
        self._joined: dict[int, list[Write]] = {}  # of slots, which the device does not have yet
        self._block_counts = np.zeros(slots, np.intp)  # of each slot on the device
        self._computed = np.full(slots, -1, np.int64)
        self._rows: Index | None = None
        self._num_rows = 0  # entries of `rows` that may differ from -1
        self._news = zeros(FIELDS * (2 * slots + 1) + 3 * slots)  # of a decode step without joins: no allocation

    @staticmethod
    def nbytes(slots: int, max_blocks: int, block_size: int, vocabulary: int) -> int:
        per_slot: int = max_blocks * (block_size + 1) + vocabulary + int(kernels.PARAMS_SIZE.value) + 2 * FIELDS + 3
        return 4 * slots * per_slot

    def compile(self) -> None:
        """Compiles the kernels that write: no step waits for the compiler."""
        self._write([Write(ROWS, 0, 0, np.full(1, -1, np.int32))])
        self.store(self.table.new_zeros((1, 2)), self.rows[:1])

    def join(self, slot: int, sample: JoinedSample) -> None:
        params = params_row(sample, self.vocabulary)
        writes = [
            Write(TOKENS, slot, 0, np.concatenate((sample.prompt, sample.generated))),
            Write(PARAMS, slot, 0, params),
        ]
        if sample.is_penalized and self.counts.shape[0]:
            text, generated = (ids[(ids >= 0) & (ids < self.vocabulary)] for ids in (sample.text, sample.generated))
            writes.append(Write(COUNTS, slot, text.size, np.concatenate((text, generated))))
        self._joined[slot] = writes

    def news_nbytes(self) -> int:
        """Returns the most bytes that the next `update` brings to the device."""
        writes = [write for joined in self._joined.values() for write in joined]
        slots = self.rows.shape[0]
        numbers = sum(write.data.size for write in writes) + self.table.numel() + 3 * slots
        nbytes: int = 4 * (numbers + FIELDS * (len(writes) + 3 * slots))
        return nbytes

    def follow(self, step: Step) -> None:
        """Forgets blocks that the step replaces."""
        for news in (step.joined, step.resumed):
            if news is not None:
                self._block_counts[news.slots] = 0

    def forget(self) -> None:
        """Forgets blocks and progress of all slots: a step has failed in the middle."""
        self._block_counts[:] = 0
        self._computed[:] = -1
        self._rows = None

    def update(self, batch: BatchState, rows: Index, *, is_decoding: bool) -> None:
        """Brings slots of the device to what `batch`, which has just applied a step, has. `is_decoding`: each of these
        rows computes one token by `advance`; otherwise the step's tokens come from the host, and count as computed."""
        writes = self._writes(batch, rows, is_decoding)
        if writes:
            self._write(writes)
            self._joined.clear()

    def _writes(self, batch: BatchState, rows: Index, is_decoding: bool) -> list[Write]:
        writes = [write for joined in self._joined.values() for write in joined]
        counts = batch.block_counts[rows]
        for slot in rows[counts != self._block_counts[rows]].tolist():
            first, count = int(self._block_counts[slot]), int(batch.block_counts[slot])
            if count > first:
                writes.append(Write(TABLE, slot, first, batch.table[slot, first:count]))
            self._block_counts[slot] = count
        computed = batch.computed[rows]  # after the step
        due = computed - 1 if is_decoding else computed
        for slot, value in _pairs(rows, due, self._computed[rows] != due):
            writes.append(Write(COMPUTED, slot, 0, np.array([value], np.int32)))
        self._computed[rows] = computed
        if is_decoding and (self._rows is None or not np.array_equal(self._rows, rows)):
            padded = np.full(max(rows.size, self._num_rows), -1, np.int32)
            padded[: rows.size] = rows
            writes.append(Write(ROWS, 0, 0, padded))
            self._rows, self._num_rows = rows, rows.size
        return writes

    def _write(self, writes: list[Write]) -> None:
        sizes = [write.data.size for write in writes]
        offsets = np.cumsum([0, *sizes[:-1]])
        count = len(writes)
        news = pinned(FIELDS * count + sum(sizes), self._device)
        numbers = news.numpy()
        numbers[: FIELDS * count].reshape(FIELDS, count)[:] = (
            [write.kind for write in writes],
            [write.slot for write in writes],
            [write.first for write in writes],
            sizes,
            offsets,
        )
        np.concatenate([write.data for write in writes], out=numbers[FIELDS * count :], casting="same_kind")
        if news.numel() <= self._news.numel():  # kernels of earlier steps have read it before the copy, in stream order
            on_device = self._news[: news.numel()].copy_(news, non_blocking=True)
        else:
            on_device = news.to(self._device, non_blocking=True)
        launcher.launch(
            kernels.write_state, (count,),
            on_device, count, self.table, self.tokens, self.computed, self.rows, self.params, self.counts,
            self.table.stride(0), self.tokens.stride(0), self.vocabulary, SIZE=256,
        )  # fmt: skip

    def store(self, out: Tensor, slots: Tensor) -> None:
        """Appends sampled ids, the first column of `out`, to the tokens of their slots."""
        count = out.shape[0]
        launcher.launch(
            kernels.store_ids, (-(-count // 256),),
            out, slots, self.computed, self.tokens, count, self.tokens.stride(0), SIZE=256,
        )  # fmt: skip


def params_row(sample: JoinedSample, vocabulary: int) -> Ints:
    """Returns the parameters of a slot, as kernels read them."""
    own = sample.params
    row = np.zeros(kernels.PARAMS_SIZE.value, np.int32)
    floats = row.view(np.float32)
    floats[kernels.TEMPERATURE.value] = own.temperature
    floats[kernels.TOP_P.value] = own.top_p
    floats[kernels.MIN_P.value] = own.min_p
    floats[kernels.REPETITION.value] = own.repetition_penalty
    floats[kernels.PRESENCE.value] = own.presence_penalty
    floats[kernels.FREQUENCY.value] = own.frequency_penalty
    row[kernels.TOP_K.value] = min(own.top_k, vocabulary) or vocabulary
    row[kernels.IS_PENALIZED.value] = sample.is_penalized
    row[kernels.PROMPT_SIZE.value] = sample.prompt.size
    seed, rope = kernels.SEED.value, kernels.ROPE.value
    row[seed : seed + 2] = np.array([sample.seed], np.uint64).view(np.int32)
    row[rope : rope + sample.rope_offsets.size] = sample.rope_offsets
    return row


def _pairs(rows: Index, values: Ints, is_selected: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(rows[is_selected].tolist(), values[is_selected].tolist(), strict=True))
