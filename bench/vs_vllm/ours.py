"""What we send, as ways to be compared. Leaves to the engine's protocol and schedule what the messages are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bench.vs_vllm.rounds import Local, Round, Way, whole
from bench.vs_vllm.workload import BLOCK, TEMPERATURE, TOP_P, Decode
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.codec.sequence import SequenceCheck
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import (
    DELTAS,
    INBOX,
    RESULTS,
    STEPS,
    Delta,
    SamplingParams,
    Step,
    StepDone,
    Submit,
)
from penstock.tools.capture.frame_fields import FrameLayout

LEADER = 0x9A7B_5C3D  # as many bytes as almost all have that are drawn
LATER = 1_000_000  # steps that came before, so that numbers have the length that they have in the long run
LEAST = 100  # messages of one round; each takes microseconds
MAX_BLOCKS = 1 << 20


class Coder:
    """A sender's and a receiver's half of one channel."""

    def __init__(self, type: Any) -> None:
        self.catalogue = Catalogue.of(type)
        self.encode = FrameEncoder(self.catalogue).encode
        self.decode = FrameDecoder(self.catalogue).decode


def way(coder: Coder, make: Callable[[int], Sequence[Any]]) -> Way:
    return Many(Local(make, coder.encode, coder.decode))


class Many:
    """The same in longer rounds: what is short is measured more often."""

    def __init__(self, local: Local) -> None:
        self._local = local

    def perform(self, messages: int) -> Round:
        return self._local.perform(max(messages, LEAST))


# ── a decode step ────────────────────────────────────────────────────────────────────────────────────────────────────
class Steps:
    """A core and a worker; both states are applied to, the core's untimed."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._requests = len(decode.running)
        self._coder = Coder(STEPS)
        self._core, self._worker = (BatchState(self._requests, MAX_BLOCKS, BLOCK) for _ in range(2))
        self._plan = StepBuilder(self._core)
        params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
        for row, item in enumerate(decode.running):
            blocks = np.array(item.blocks, np.int32)
            # What it has generated comes as if it were prompt. The step in which it joins computes one, as all do.
            known = np.array([*item.prompt, *item.output][: item.computed], np.int32)
            self._plan.join(row, known, params, blocks, computed=item.computed - 1)
        self._number = LATER
        first = self._finish()
        self._worker.apply(self._coder.decode(whole(self._coder.encode(first))))
        self._sequence = SequenceCheck()
        self._sequence.begin(first)

    def _finish(self) -> Step:
        """The step that is planned, applied to the core's state."""
        self._number += 1
        step = self._plan.build(LEADER, self._number)
        self._core.apply(step)
        return step

    def make(self, messages: int) -> list[Any]:
        return [self._next() for _ in range(messages)]

    def _next(self) -> Any:
        advance = self._decode.step()
        if advance.due:
            slots = np.array(list(advance.due), np.intp)
            self._plan.append_one_each(slots, np.array(list(advance.due.values()), np.int32))
        step = self._finish()
        self._decode.finish(advance)
        return step

    def decode(self, frame: bytes) -> None:
        step = self._coder.decode(frame)
        self._sequence.check(step)
        self._worker.apply(step)

    def perform(self, messages: int) -> Round:
        return Local(self.make, self._coder.encode, self.decode).perform(messages)

    def states(self) -> tuple[BatchState, BatchState]:
        """The core's and the worker's."""
        return self._core, self._worker


class Steady(Steps):
    """No request needs a block, in any number of steps: all blocks were given before."""

    def _next(self) -> Any:
        return self._finish()

    def perform(self, messages: int) -> Round:
        return super().perform(max(messages, LEAST))


# ── the others ───────────────────────────────────────────────────────────────────────────────────────────────────────
def advances(decode: Decode) -> Iterator[tuple[int, list[int]]]:
    number = LATER
    while True:
        advance = decode.step()
        yield number, advance.sampled
        decode.finish(advance)
        number += 1


def worker_outputs(decode: Decode) -> Way:
    following = advances(decode)

    def make(messages: int) -> list[Any]:
        result = (next(following) for _ in range(messages))
        return [StepDone(LEADER, number, np.array(sampled, np.int32)) for number, sampled in result]

    return way(Coder(RESULTS), make)


def api_outputs(decode: Decode) -> Way:
    """Text too: four bytes a token, which the others have not got in theirs."""
    following = advances(decode)
    rows = len(decode.running)
    requests = np.arange(LATER, LATER + rows, dtype=np.int32)
    lengths = np.full(rows, 4, np.int32)
    text = b" the" * rows

    def make(messages: int) -> list[Any]:
        result = (np.array(next(following)[1], np.int32) for _ in range(messages))
        return [Delta(rows, np.concatenate((requests, lengths, sampled)), text) for sampled in result]

    return way(Coder(DELTAS), make)


def requests(prompt: Sequence[int]) -> Way:
    ids = np.array(prompt, np.int32)
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)

    def make(messages: int) -> list[Any]:
        return [Submit(0, LATER + index, ids, params) for index in range(messages)]

    return way(Coder(INBOX), make)


def params_nbytes() -> int:
    """Of default sampling parameters, in a request."""
    coder = Coder(INBOX)
    frame = whole(coder.encode(Submit(0, 1, np.arange(4, dtype=np.int32), SamplingParams())))
    pieces = FrameLayout(coder.catalogue.schema.encode()).take_apart(frame).pieces
    return sum(len(content) for name, content in pieces if name.startswith("params"))
