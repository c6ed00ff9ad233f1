"""The interface between a worker and its device: the worker launches steps, and the device says when each is done.

`model_runner` implements it for a real device, `simulated_device` for a simulated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import (
    AdapterChange,
    AdapterState,
    FinishReason,
    Ints,
    Logprobs,
    PromptLogprobs,
    Step,
)
from penstock.engine.worker.grammars import GrammarCounts
from penstock.tensor import Handle


@dataclass(frozen=True)
class SamplerOutput:
    """The sampled tokens of a step that is done, and its failed rows."""

    ids: Ints  # in the order of `BatchState.sampled`
    logprobs: Logprobs | None = None
    failed: Mapping[int, FinishReason] = field(default_factory=dict)  # by slot
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    vectors: tuple[Handle, ...] = ()  # as in `StepDone`

    def result(self) -> SamplerOutput:
        """As that of a step that was pending."""
        return self


@dataclass
class EncodingCounts:
    """Encodings of images, of all ranks of a model."""

    encoded: int = 0  # by the model's vision encoder
    hits: int = 0  # in the store, where another engine or an earlier request has left them
    unshared: int = 0  # of those encoded, for which the store had no room, or another engine took too long


class PendingStep(Protocol):
    """A step that has been launched. One that is done already, as those of a CPU are, is a `SamplerOutput`."""

    def result(self) -> SamplerOutput:
        """Blocks until the step is done. Another thread than the one of `launch` may call it."""


class Device(Protocol):
    @property
    def blocks(self) -> int:
        """Returns the number of blocks of the KV cache."""

    @property
    def vocabulary(self) -> int:
        """Returns the size of the vocabulary: ids of prompts are below it."""

    @property
    def max_short_prompt(self) -> int | None:
        """Returns the most tokens of a prompt with short rotary frequencies (see `rope`); None: all prompts have them.
        Longer prompts have other keys from their first token on, and share no cached blocks with shorter ones."""

    @property
    def full_step_tokens(self) -> int | None:
        """Returns the number of tokens from which on a step takes time in proportion to its tokens; None: the more
        tokens in a step, the less time for each."""

    @property
    def model(self) -> int:
        """Returns `ModelFingerprint.word` of the files that the device has loaded; 0: it is simulated."""

    @property
    def dtype(self) -> str:
        """Returns the type of the model's numbers."""

    @property
    def kv_epoch(self) -> bytes | None:
        """Returns the epoch of the rank's pages, which the next life of the worker may adopt; None: it does not."""

    @property
    def encodings(self) -> EncodingCounts: ...

    @property
    def grammars(self) -> GrammarCounts: ...

    @property
    def tune_after(self) -> float | None:
        """Returns the seconds without a step after which `tune` is due; None: never."""

    @property
    def adapters(self) -> tuple[AdapterState, ...]:
        """Returns the LoRA adapters that the device has loaded, and those that it could not load."""

    def change_adapter(self, change: AdapterChange) -> str:
        """Loads or unloads an adapter, between two steps. Returns why that fails; "": it does not."""

    def tune(self) -> None:
        """Measures on an idle machine what other processes have disturbed. Blocks for less than a second or two."""

    def launch(self, batch: BatchState, step: Step) -> PendingStep:
        """Launches a step that `batch` has just applied. Steps run in the order in which they are launched."""
