"""A device that keeps its state by kernels, and computes no model. Each step compares the state with the core's."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import NOTHING, Index
from penstock.engine.protocol.messages import Ints, SamplingParams, Step
from penstock.engine.worker.cuda import kernels, launcher
from penstock.engine.worker.cuda.state import DeviceState, JoinedSample
from penstock.engine.worker.cuda.step_graphs import DecodeSteps
from penstock.engine.worker.cuda.steps import CudaSteps
from penstock.engine.worker.device import SamplerOutput
from penstock.engine.worker.input_batch import build_batch
from penstock.engine.worker.paged_attention import KVCache, KVCacheShape
from penstock.engine.worker.tensor_parallel import TPGroup
from tests.support.attention_cases import multiprocessors
from tests.support.models import BLOCK_SIZE, WORDS, Asked, ask

SLOTS = 6
BLOCKS = 24
VOCABULARY = 300
MAX_SHORT_PROMPT = 25
PENALTY = 1.5
GUARD = 5  # in front of numbers of slots: a kernel that writes for slot -1 writes there


class StateDevice:
    """Stands for a model runner, for `ask`. Each step checks the state."""

    blocks, block_size, max_short_prompt = BLOCKS, BLOCK_SIZE, None

    def __init__(self, seed: int) -> None:
        cpu = torch.device("cpu")
        self._chance = random.Random(seed)
        self.state = DeviceState(SLOTS, BLOCKS, BLOCK_SIZE, cpu, VOCABULARY, samples=True)
        self._computed, self._tokens = (
            torch.full((SLOTS + 1, *numbers.shape[1:]), GUARD, dtype=torch.int32)
            for numbers in (self.state.computed, self.state.tokens)
        )
        self.state.computed, self.state.tokens = self._computed[1:], self._tokens[1:]
        self._offsets = np.arange(SLOTS) * 3
        self.written_steps = self.quiet_steps = self.mixed_steps = 0
        self._words: dict[int, list[int]] = {}  # tokens of slots
        self._inputs: list[Any] = []
        model: Any = SimpleNamespace(
            ranks=TPGroup(),
            device=cpu,
            hidden=self._hidden,
            logits=lambda hidden, result: hidden,
            max_short_prompt=MAX_SHORT_PROMPT,
        )
        memory = KVCache({0: KVCacheShape(1, 16, 16)}, BLOCKS, BLOCK_SIZE, torch.float32, cpu)
        sampler: Any = SimpleNamespace(sample=lambda _: None)  # ids are drawn here
        self._decode = DecodeSteps(model, memory, self.state, sampler, None, None, 1)

    def _hidden(self, attention: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._inputs = [ids, positions, attention._rows.lengths, attention.places]
        return ids

    def launch(self, batch: BatchState, step: Step) -> Any:
        self.state.follow(step)
        if step.joined is not None:
            for slot in step.joined.slots.tolist():
                tokens = np.concatenate((batch.prompts[slot], batch.generated[slot]))
                self._words[slot] = tokens.tolist()
                self._join(slot, batch.prompts[slot], batch.generated[slot])
        if batch.counts[batch.rows].any():
            self._compute(batch)
        slots = batch.sampled
        ids = torch.tensor([self._chance.choice(WORDS) for _ in slots], dtype=torch.int32)
        if slots.size:
            self._store(slots, ids)
        return SamplerOutput(ids.numpy())

    def _join(self, slot: int, prompt: Ints, generated: Ints) -> None:
        params = SamplingParams(frequency_penalty=PENALTY)
        offsets = self._offsets[slot : slot + 1]
        self.state.join(slot, JoinedSample(prompt, prompt, generated, params, slot % 2 == 0, 7, offsets))

    def _compute(self, batch: BatchState) -> None:
        if not CudaSteps.is_decoding(batch):
            self.mixed_steps += 1
            self.state.update(batch, batch.rows, is_decoding=False)
            self._check_slots(batch, batch.rows)
            return
        rows = batch.sampled
        with mock.patch.object(launcher, "launch", wraps=launcher.launch) as launch:
            self.state.update(batch, rows, is_decoding=True)
        self.written_steps += launch.call_count
        self.quiet_steps += not launch.call_count
        with multiprocessors(1):
            self._decode._compute(SLOTS)
        self._check_slots(batch, rows)
        expected = build_batch(batch)
        order = np.argsort(expected.rows)[np.argsort(np.argsort(rows))]
        tokens = [
            self._words[slot][position] for slot, position in zip(expected.slots, expected.positions, strict=True)
        ]
        lengths = np.array([batch.prompts[slot].size for slot in expected.rows])
        positions = expected.positions + self._offsets[expected.slots]
        is_long = np.maximum(lengths, expected.positions + 1) > MAX_SHORT_PROMPT
        ropes = np.where(is_long, ~positions, positions)
        columns = [np.array(tokens), ropes, expected.lengths, expected.places]
        for own, column, padding in zip(self._inputs, columns, (0, 0, 0, -1), strict=True):
            assert own[: rows.size].tolist() == column[order].tolist()
            assert own[rows.size :].tolist() == [padding] * (SLOTS - rows.size)
        assert self.state.rows.tolist() == [*rows.tolist(), *[-1] * (SLOTS - rows.size)]

    def _check_slots(self, batch: BatchState, rows: Index) -> None:
        for slot in rows.tolist():
            assert int(self.state.computed[slot]) == batch.computed[slot]
            blocks = batch.blocks_of(slot)
            assert self.state.table[slot, : blocks.size].tolist() == blocks.tolist()
            words = self._words[slot]
            assert self.state.tokens[slot, : len(words)].tolist() == words
            self._check_params(slot, batch.prompts[slot], batch.generated[slot])
        assert (self._computed[0] == GUARD).all() and (self._tokens[0] == GUARD).all()

    def _check_params(self, slot: int, prompt: Ints, generated: Ints) -> None:
        params = self.state.params[slot]
        assert params[kernels.PROMPT_SIZE.value] == prompt.size and params[kernels.SEED.value] == 7
        assert params[kernels.FREQUENCY.value].view(torch.float32) == PENALTY
        assert bool(params[kernels.IS_PENALIZED.value]) == (slot % 2 == 0)
        if slot % 2 == 0:
            counts = np.bincount(generated, minlength=VOCABULARY)
            counts[np.unique(prompt)] += kernels.IN_PROMPT.value
            assert self.state.counts[slot].tolist() == counts.tolist()

    def _store(self, slots: Index, ids: torch.Tensor) -> None:
        """Appends the ids, beside padding."""
        nothing = torch.tensor([-1, -1], dtype=torch.int32)
        padded = torch.cat((ids, torch.tensor([3, 4], dtype=torch.int32)))
        self.state.store(
            torch.stack((padded, torch.full_like(padded, 99)), 1),
            torch.cat((torch.from_numpy(slots.astype(np.int32)), nothing)),
        )
        for slot, word in zip(slots.tolist(), ids.tolist(), strict=True):
            self._words[slot].append(word)


def check_state(seed: int, requests: int = 14) -> StateDevice:
    chance = random.Random(seed)
    beginning = chance.choices(WORDS, k=30)
    drawn = []
    for _ in range(requests):
        prompt = beginning[: chance.randint(0, 20)] + chance.choices(WORDS, k=chance.randint(1, 20))
        drawn.append(Asked(prompt, [], chance.randint(1, 25)))
    device: Any = StateDevice(seed)
    result = ask(device, drawn, slots=SLOTS, budget=9)
    assert [len(answer) for answer in result.answers] == [request.tokens for request in drawn]
    device.preemptions, device.cached_tokens = result.preemptions, result.cached_tokens
    return device


def check_long_write() -> None:
    """Writes more tokens than a program writes at a time."""
    state = DeviceState(2, 200, BLOCK_SIZE, torch.device("cpu"), VOCABULARY, samples=True)
    batch: Any = SimpleNamespace(
        block_counts=np.array([0, 150]), table=np.arange(400).reshape(2, 200), computed=np.array([0, 600])
    )
    prompt, generated = np.arange(598, dtype=np.int32), np.array([5, 6, 5], np.int32)
    state.counts[1] = 9  # of the sample before
    state.join(1, JoinedSample(prompt, prompt[:290], generated, SamplingParams(), True, 0, NOTHING))
    state.update(batch, np.array([1]), is_decoding=False)
    assert state.tokens[1].tolist() == [*range(598), 5, 6, 5, *[0] * 200] and not state.tokens[0].any()
    assert state.table[1].tolist() == [*range(200, 350), *[0] * 50] and not state.table[0].any()
    assert state.computed.tolist() == [0, 600]
    in_prompt = kernels.IN_PROMPT.value
    counts = [*[in_prompt] * 5, in_prompt + 2, in_prompt + 1, *[in_prompt] * 283, *[0] * 10]
    assert state.counts[1].tolist() == counts and not state.counts[0].any()
