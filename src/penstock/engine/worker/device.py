"""What a worker drives: a device that is given one step after the other, and says when each is done.

Leaves to `model_runner` and `simulated_device` what a device is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Bytes, FinishReason, Ints, Logprobs, Slots, Step


@dataclass(frozen=True)
class SamplerOutput:
    """What a step has sampled."""

    ids: Ints  # in the order of `BatchState.sampled`
    logprobs: Logprobs | None = None
    failed: Slots | None = None
    reasons: Bytes | None = None  # FinishReason of each that has failed; None: all ERROR


def failures(reasons: Mapping[int, FinishReason]) -> tuple[Slots | None, Bytes | None]:
    """The last two of `SamplerOutput`, of slots and why each has failed."""
    if not reasons:
        return None, None
    slots = sorted(reasons)
    return np.array(slots, np.uint16), np.array([reasons[slot] for slot in slots], np.uint8)


class PendingStep(Protocol):
    """A step that has been launched."""

    @property
    def done_at(self) -> float | None:
        """When it will be done, by `time.monotonic()`, if that is known beforehand."""

    def is_done(self) -> bool: ...

    def result(self) -> SamplerOutput:
        """Blocks until it is done."""


class Device(Protocol):
    @property
    def blocks(self) -> int:
        """How many the cache has room for."""

    @property
    def vocabulary(self) -> int:
        """Ids of prompts are below that."""

    @property
    def max_short_prompt(self) -> int | None:
        """Prompts of more tokens have other keys, from the first one on, than shorter ones (see `rope`); None: none."""

    def launch(self, schedule: BatchState, step: Step) -> PendingStep:
        """Begins the work of a step that `schedule` has just applied; what was launched before is done first."""
