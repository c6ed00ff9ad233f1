"""The sampler: from logits to ids, on the device that has the logits, for all rows of a step at once.

A draw is a function of a sample's own seed and of how many tokens it has: neither the rest of the batch nor a
preemption changes it. `stop_conditions` decides which samples have ended, and the model runner reads the ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.protocol.columns import NOTHING, Index
from penstock.engine.protocol.messages import FinishReason, Ints, Logprobs, SamplingParams
from penstock.engine.worker.bad_words import BadWords
from penstock.engine.worker.cpu_kernels import SamplingRows
from penstock.engine.worker.grammars import TokenMasks
from penstock.engine.worker.input_batch import moved, unpacked

GREEDY = 1e-5  # below this temperature, the likeliest id is chosen
DRAWS = 23  # bits of a draw: a float32 below 1 times any sum stays below that sum
Pairs = tuple[torch.Tensor, torch.Tensor]  # rows of the batch, and ids
# An id for each row (int32), whether the row fails, and of those that fail which ones have finite logits; None: none.
Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class TopLogprobs(NamedTuple):
    """Log-probabilities of the rows that want them: the sampled id and the likeliest ids, padded to the same number."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
    rows: Index
    counts: Ints

    @classmethod
    def of(cls, logits: torch.Tensor, ids: torch.Tensor, rows: Index, counts: Ints) -> TopLogprobs:
        """`logits` and `ids`: of these rows. `counts`: 1 + the number of likeliest ids."""
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        sampled = ids.long()[:, None]
        values = logprobs.gather(1, sampled)
        ranks = (logprobs > values).sum(-1) + 1
        best, best_ids = torch.topk(logprobs, int(counts.max()) - 1, dim=-1)
        together = torch.cat([sampled, best_ids], 1).to(torch.int32)
        return cls(together, torch.cat([values, best], 1), ranks.to(torch.int32), rows, counts)

    def on_host(self) -> TopLogprobs:
        """Queues one copy to the host, which can be read when the device has done the work queued so far."""
        width = self.ids.shape[1]
        parts = [self.ids, self.values.view(torch.int32), self.ranks[:, None]]
        here = torch.cat(parts, 1).to("cpu", non_blocking=True)
        values = here[:, width : 2 * width].view(torch.float32)
        return TopLogprobs(here[:, :width], values, here[:, -1], self.rows, self.counts)

    def columns(self, size: int) -> Logprobs:
        """Returns log-probabilities of the model's own distribution, before penalties and filters, of `size` rows. The
        likeliest id has rank 1; rows that want none have count and rank 0."""
        counts, ranks = np.zeros(size, np.int32), np.zeros(size, np.int32)
        counts[self.rows] = self.counts
        ranks[self.rows] = self.ranks.numpy()
        is_due = np.arange(self.ids.shape[1]) < self.counts[:, None]
        return Logprobs(self.ids.numpy()[is_due], self.values.numpy()[is_due], ranks, counts)


class SampledTokens(NamedTuple):
    """The sampled tokens of a step, on the device of the sampler."""

    ids: torch.Tensor  # int32, one a row
    is_failed: torch.Tensor
    likely: TopLogprobs | None
    is_stuck: torch.Tensor | None = None  # of the rows that failed: the model's logits are finite; None: no row

    def failed(self, slots: Index) -> dict[int, FinishReason]:
        """Returns the slots of rows with ids that mean nothing, and the reasons."""
        is_failed = self.is_failed.numpy()
        if not is_failed.any():
            return {}
        stuck = [] if self.is_stuck is None else slots[self.is_stuck.numpy()].tolist()
        failed = dict.fromkeys(slots[is_failed].tolist(), FinishReason.ERROR)
        return {**failed, **dict.fromkeys(stuck, FinishReason.STUCK)}

    def logprobs(self) -> Logprobs | None:
        return None if self.likely is None else self.likely.columns(self.ids.shape[0])


def is_penalized(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def has_ids(params: SamplingParams) -> bool:
    """Whether some ids have a bias, or are the only ones, or end bad words, or may not come before `min_tokens`."""
    return bool(params.allowed_token_ids is not None or params.logit_bias or params.min_tokens or params.bad_words_ids)


class Sampler:
    """Keeps the sampling parameters of every slot. They change only when samples join and leave."""

    def __init__(
        self, slots: int, vocabulary: int, eos_ids: Collection[int] = (), device: torch.device | str = "cpu"
    ) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = tuple(eos_ids)
        self._device = torch.device(device)
        self._temperatures = np.zeros(slots, np.float32)
        self._top_ps = np.ones(slots, np.float32)
        self._top_ks = np.full(slots, vocabulary, np.int64)
        self._min_ps = np.zeros(slots, np.float32)
        self._repetitions = np.ones(slots, np.float32)
        self._presences = np.zeros(slots, np.float32)
        self._frequencies = np.zeros(slots, np.float32)
        self._logprobs = np.zeros(slots, np.int32)  # 1 + the number of top log-probabilities; 0: none are wanted
        self._least = np.zeros(slots, np.int32)
        self._generated = np.zeros(slots, np.int64)
        self._seeds = np.zeros(slots, np.uint64)
        self._has_ids = np.zeros(slots, np.bool_)  # whether one of these three has an entry:
        self._allowed: list[Ints | None] = [None] * slots
        self._biases: list[tuple[Ints, npt.NDArray[np.float32]] | None] = [None] * slots
        self._ends: list[Ints] = [NOTHING] * slots  # that may not come before `min_tokens`
        self._bad_words: dict[int, BadWords] = {}  # by slot
        self._is_penalized = np.zeros(slots, np.bool_)
        self._places = np.zeros(slots, np.int64)  # of those that are, in the tables below
        self._free_places: list[int] = []
        self._counts = torch.zeros((0, vocabulary), dtype=torch.int32, device=self._device)  # of generated ids
        self._is_in_prompt = torch.zeros((0, vocabulary), dtype=torch.bool, device=self._device)
        self._batch: _Batch | None = None

    def join(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Ints,
        *,
        seed: int,
        sample: int = 0,
        generated: Ints = NOTHING,
    ) -> None:
        """`seed` is the request's; `sample` is the index among its `n`; `generated` are the ids before the sample was
        resumed."""
        self.leave(slot)
        self._temperatures[slot] = params.temperature if params.temperature >= GREEDY else 0
        self._top_ps[slot] = params.top_p
        self._top_ks[slot] = min(params.top_k, self._vocabulary) or self._vocabulary
        self._min_ps[slot] = params.min_p
        self._repetitions[slot] = params.repetition_penalty
        self._presences[slot] = params.presence_penalty
        self._frequencies[slot] = params.frequency_penalty
        self._logprobs[slot] = 0 if params.logprobs is None else min(params.logprobs, self._vocabulary) + 1
        self._least[slot] = params.min_tokens
        self._generated[slot] = generated.size
        self._seeds[slot] = seed_of(seed, sample)
        if params.allowed_token_ids is not None:
            self._allowed[slot] = self._known(params.allowed_token_ids)
        if params.logit_bias:
            biases = {token_id: bias for token_id, bias in params.logit_bias if 0 <= token_id < self._vocabulary}
            self._biases[slot] = self._known(biases), np.array(list(biases.values()), np.float32)
        if params.min_tokens:
            self._ends[slot] = self._known({*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)})
        if params.bad_words_ids:
            self._bad_words[slot] = BadWords(params.bad_words_ids, self._vocabulary, generated, self._device)
        self._has_ids[slot] = has_ids(params)
        if is_penalized(params):
            self._remember(slot, prompt, generated)
        self._batch = None

    def leave(self, slot: int) -> None:
        if self._is_penalized[slot]:
            self._free_places.append(int(self._places[slot]))
            self._is_penalized[slot] = False
        self._allowed[slot] = self._biases[slot] = None
        self._ends[slot] = NOTHING
        self._bad_words.pop(slot, None)
        self._has_ids[slot] = False
        self._least[slot] = 0
        self._batch = None

    def _known(self, ids: Collection[int]) -> Ints:
        return np.array([token_id for token_id in ids if 0 <= token_id < self._vocabulary], np.int32)

    def _remember(self, slot: int, prompt: Ints, generated: Ints) -> None:
        """Allocates the slot a row in the tables of prompt and generated ids, for penalties."""
        if not self._free_places:
            size = self._counts.shape[0]
            more = max(4, size)
            self._counts = torch.cat([self._counts, self._counts.new_zeros((more, self._vocabulary))])
            self._is_in_prompt = torch.cat([self._is_in_prompt, self._is_in_prompt.new_zeros((more, self._vocabulary))])
            self._free_places.extend(range(size, size + more))
        place = self._free_places.pop()
        self._places[slot], self._is_penalized[slot] = place, True
        self._counts[place] = 0
        if generated.size:
            ids, counts = np.unique(self._known(generated.tolist()), return_counts=True)
            self._counts[place, self._ids(ids)] = moved(counts.astype(np.int32), self._device)
        self._is_in_prompt[place] = False
        self._is_in_prompt[place, self._ids(self._known(prompt.tolist()))] = True

    def sample(self, logits: torch.Tensor, slots: Index, masks: TokenMasks | None = None) -> SampledTokens:
        """Samples one token for each row; row i is of `slots[i]`, and no slot occurs twice. `masks`: of grammars.

        While `slots` is the same array as in the step before, and no sample has joined or left, `_Batch` is reused.
        """
        batch = self._batch
        if batch is None or batch.slots is not slots:
            batch = self._batch = _Batch(self, slots)
        raw, is_failed_before = logits, None
        generated = self._generated[slots]
        is_early = generated < self._least[slots] if batch.has_least else None
        if batch.has_penalties or batch.has_ids or (is_early is not None and is_early.any()):
            is_failed_before = ~torch.isfinite(likeliest(logits)[0])
            logits = self._adjusted(batch, logits, is_early)
        elif masks is not None and batch.asking.size:
            logits = logits.clone()  # masks are written into the logits
        ids, is_failed, is_stuck = batch.rows.choose(logits, masks, _uniforms(self._seeds[slots], generated))
        if is_failed_before is not None:
            is_stuck = is_failed & ~is_failed_before
            is_failed = is_failed | is_failed_before
            ids = ids.masked_fill(is_failed, 0)
        self._generated[slots] = generated + 1
        if batch.has_penalties:
            unit = torch.ones((), dtype=torch.int32, device=self._device)
            self._counts.index_put_((batch.places, ids[batch.penalized].long()), unit, accumulate=True)
        for row, bad_words in batch.bad_words:
            bad_words.add(ids[row : row + 1])
        return SampledTokens(ids, is_failed, batch.likely(raw, ids) if batch.asking.size else None, is_stuck)

    def _adjusted(self, batch: _Batch, logits: torch.Tensor, is_early: npt.NDArray[np.bool_] | None) -> torch.Tensor:
        """Returns float32 logits with penalties, biases, allowed ids and, before `min_tokens`, without ends."""
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if batch.has_penalties:
            batch.penalize(logits, self._counts, self._is_in_prompt)
        if batch.has_ids:
            batch.restrict(logits)
        for row, bad_words in batch.bad_words:
            bad_words.ban(logits[row])
        if is_early is not None and is_early.any():
            slots = batch.slots
            rows, ends = self._pairs(slots, [self._ends[slot] for slot in slots.tolist()], is_early)
            logits[rows, ends] = -torch.inf
        return logits

    def _pairs(self, slots: Index, ids: list[Ints], is_selected: npt.NDArray[np.bool_]) -> Pairs:
        """Returns the indices (rows, ids) into the logits for the ids of the selected rows."""
        row_numbers: list[int] = np.flatnonzero(is_selected).tolist()
        rows = np.repeat(np.array(row_numbers, np.int64), [ids[row].size for row in row_numbers])
        return self._ids(rows), self._ids(np.concatenate([NOTHING, *(ids[row] for row in row_numbers)]))

    def _ids(self, numbers: npt.NDArray[np.int64] | Ints) -> torch.Tensor:
        return moved(numbers.astype(np.int64), self._device)


class _Batch:
    """Tensors of a batch that stay the same until a sample joins or leaves."""

    def __init__(self, sampler: Sampler, slots: Index) -> None:
        s, device = sampler, sampler._device

        def column(of: npt.NDArray[np.generic], rows: Index) -> torch.Tensor:
            return moved(of[slots[rows]], device)[:, None]

        self.slots = slots
        self.has_least = bool((s._least[slots] > 0).any())
        self.asking = np.flatnonzero(s._logprobs[slots])
        self.asking_rows = sampler._ids(self.asking)
        self.due = s._logprobs[slots[self.asking]]
        self.rows = (
            SamplingRows.of(slots, s._temperatures, s._top_ks, s._top_ps, s._min_ps)
            if device.type == "cpu"
            else _RandomRows(s, slots)
        )
        # ── penalties ──
        penalized = np.flatnonzero(s._is_penalized[slots])
        self.has_penalties = bool(penalized.size)
        self.penalized, self.places = sampler._ids(penalized), sampler._ids(s._places[slots[penalized]])
        self.repetitions = column(s._repetitions, penalized)
        self.presences, self.frequencies = column(s._presences, penalized), column(s._frequencies, penalized)
        # ── ids with a bias, and ids that are allowed alone ──
        listed: list[int] = slots.tolist() if s._has_ids[slots].any() else []
        allowed = [s._allowed[slot] for slot in listed]
        biases = [s._biases[slot] for slot in listed]
        is_limited = np.array([entry is not None for entry in allowed], np.bool_)
        is_biased = np.array([entry is not None for entry in biases], np.bool_)
        self.limited = sampler._ids(np.flatnonzero(is_limited))
        self.allowed = s._pairs(slots, [NOTHING if entry is None else entry for entry in allowed], is_limited)
        self.biased = s._pairs(slots, [NOTHING if entry is None else entry[0] for entry in biases], is_biased)
        self.biases = moved(
            np.concatenate([np.zeros(0, np.float32), *(entry[1] for entry in biases if entry is not None)]), device
        )
        bad_words = ((row, s._bad_words.get(slot)) for row, slot in enumerate(listed))
        self.bad_words = [(row, entry) for row, entry in bad_words if entry is not None]
        self.has_ids = bool(is_limited.any() or is_biased.any() or self.bad_words)

    def penalize(self, logits: torch.Tensor, counts: torch.Tensor, is_in_prompt: torch.Tensor) -> None:
        rows = logits[self.penalized]
        generated = counts[self.places]
        is_known = (generated > 0) | is_in_prompt[self.places]
        rows = torch.where(is_known, torch.where(rows > 0, rows / self.repetitions, rows * self.repetitions), rows)
        rows -= self.frequencies * generated
        rows -= self.presences * (generated > 0)
        logits[self.penalized] = rows

    def restrict(self, logits: torch.Tensor) -> None:
        logits.index_put_(self.biased, self.biases, accumulate=True)
        allowed_logits = logits[self.allowed]
        logits[self.limited] = -torch.inf
        logits[self.allowed] = allowed_logits

    def likely(self, logits: torch.Tensor, ids: torch.Tensor) -> TopLogprobs:
        return TopLogprobs.of(logits[self.asking_rows], ids[self.asking_rows], self.asking, self.due)


class _RandomRows:
    """Chooses ids by operations of torch, with tensors of the rows that draw at random."""

    def __init__(self, s: Sampler, slots: Index) -> None:
        def column(of: npt.NDArray[np.generic], rows: Index) -> torch.Tensor:
            return moved(of[slots[rows]], s._device)[:, None]

        self._vocabulary, self._device = s._vocabulary, s._device
        self._random = random = np.flatnonzero(s._temperatures[slots])
        self._rows = s._ids(random)
        random_slots = slots[random]
        self._temperatures = column(s._temperatures, random)
        self._min_ps = column(s._min_ps, random)
        self._has_min_p = bool((s._min_ps[random_slots] > 0).any())
        is_cut = (s._top_ks[random_slots] < s._vocabulary) | (s._top_ps[random_slots] < 1)
        cut = random[is_cut]
        self._cut = s._ids(np.flatnonzero(is_cut))  # in `random`
        self._top_ks, self._top_ps = column(s._top_ks, cut), column(s._top_ps, cut)
        self._max_k = int(s._top_ks[slots[cut]].max(initial=0))

    def choose(self, logits: torch.Tensor, masks: TokenMasks | None, draws: npt.NDArray[np.float32]) -> Chosen:
        is_failed_before = None
        if masks is not None and masks.rows.size:
            is_failed_before = ~torch.isfinite(likeliest(logits)[0])
            rows = moved(masks.rows, self._device)
            is_allowed = unpacked(masks.bits, self._vocabulary, self._device)
            logits = logits.index_put((rows,), logits[rows].masked_fill(~is_allowed, -torch.inf))
        maxima, ids = likeliest(logits)
        is_failed = ~torch.isfinite(maxima)
        if self._random.size:
            rows = self._rows
            drawn = moved(draws[self._random], self._device)
            ids[rows] = self._draw(logits[rows].float(), maxima[rows].float(), drawn)
        is_stuck = None if is_failed_before is None else is_failed & ~is_failed_before
        return ids.masked_fill(is_failed, 0).to(torch.int32), is_failed, is_stuck

    def _draw(self, logits: torch.Tensor, maxima: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Returns an id for each row, drawn from the likeliest `top_k`, of these from as many as make up `top_p`, of
        these from ids at least `min_p` times as likely as the likeliest, and from ids as likely as the last of them."""
        weights = torch.exp((logits - maxima[:, None]) / self._temperatures)  # 1 for the likeliest
        if self._max_k:
            cut = weights[self._cut]
            weights[self._cut] = cut.masked_fill(cut < self._least_weights(cut), 0)
        if self._has_min_p:
            weights = weights.masked_fill(weights < self._min_ps, 0)
        # In the order of the ids, however the candidates were found: a draw means the same in any batch.
        sums = weights.cumsum(-1)
        chosen = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)
        return chosen[:, 0].clamp_(max=sums.shape[1] - 1)  # a failed row's sum is no number

    def _least_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns, for each row with `top_k` or `top_p`, the weight of the last id that is kept."""
        if self._max_k < weights.shape[1] // 4:
            best = torch.topk(weights, self._max_k).values
        else:
            best = torch.sort(weights, dim=-1, descending=True).values
        ranks = torch.arange(best.shape[1], device=weights.device)
        best = best.masked_fill(ranks >= self._top_ks, 0)
        sums = best.cumsum(-1)
        is_left = (ranks < self._top_ks) & (sums - best < self._top_ps * sums[:, -1:])
        last = is_left.sum(-1, keepdim=True).clamp_(min=1) - 1
        return best.gather(1, last)


def likeliest(logits: torch.Tensor) -> Pairs:
    """Returns the greatest logit of each row, and the first id that has it; NaN is the greatest."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        values, ids = logits.max(dim=-1)
        return values, ids
    ids = torch.from_numpy(logits.numpy().argmax(-1))  # NumPy compares vectors, torch single numbers
    return logits.gather(1, ids[:, None])[:, 0], ids


# ── randomness ───────────────────────────────────────────────────────────────────────────────────────────────────────
def seed_of(seed: int, sample: int) -> int:
    """64 bits that differ for every seed and sample of a request."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=8).digest(), "little")


def _uniforms(seeds: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """One number of [0, 1) for each seed and count (the mixing of splitmix64)."""
    mixed = seeds + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    draws: npt.NDArray[np.float32] = (mixed >> np.uint64(64 - DRAWS)).astype(np.float32) / np.float32(1 << DRAWS)
    return draws
