"""The interface between a worker and its device: the worker launches steps, and the device says when each is done.

`model_runner` implements it for a real device, `simulated_device` for a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import (
    AdapterChange,
    AdapterState,
    FinishReason,
    Ints,
    Logprobs,
    PromptLogprobs,
    Step,
)
from penstock.engine.worker.grammars import GrammarCounts, Grammars, TokenMasks
from penstock.tensor import Handle, Lease

if TYPE_CHECKING:  # these import torch
    from torch import Tensor

    from penstock.engine.worker.prompt_logprobs import PendingPromptLogprobs
    from penstock.engine.worker.sampler import SampledTokens


@dataclass(frozen=True)
class SamplerOutput:
    """The sampled tokens of a step, and its failed rows."""

    ids: Ints  # in the order of `BatchState.sampled`
    logprobs: Logprobs | None = None
    failed: Mapping[int, FinishReason] = field(default_factory=dict)  # by slot
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    vectors: tuple[Handle, ...] = ()  # as in `StepDone`


@dataclass
class EncodingCounts:
    """Encodings of images, of all ranks of a model."""

    encoded: int = 0  # by the model's vision encoder
    hits: int = 0  # in the store, where another engine or an earlier request has left them
    unshared: int = 0  # of those encoded, for which the store had no room, or another engine took too long


class PendingStep(Protocol):
    """A step that has been launched."""

    def is_done(self) -> bool: ...

    def result(self) -> SamplerOutput:
        """Blocks until the step is done. Another thread than the one of `launch` may call it."""


class TorchPendingStep:
    """A step of a CPU: it is done when `launch` returns."""

    def __init__(
        self,
        ids: Tensor,
        slots: Index,
        chosen: SampledTokens | None,
        failed: dict[int, FinishReason],
        prompts: tuple[PendingPromptLogprobs, ...] = (),
        vectors: tuple[Handle, ...] = (),
    ) -> None:
        """`failed`: slots that failed before sampling, with the reasons; `chosen` has those that failed in sampling."""
        self._prompts, self._vectors = prompts, vectors
        self.device_ids = ids
        self._slots = slots
        self._chosen = chosen
        self._failed = failed

    def is_done(self) -> bool:
        return True

    def ids(self) -> Ints:
        """Returns the sampled ids."""
        ids: Ints = self.device_ids.numpy()
        return ids

    def result(self) -> SamplerOutput:
        failed, logprobs = self._failed, None
        if self._chosen is not None:
            failed = {**self._chosen.failed(self._slots), **failed}
            logprobs = self._chosen.logprobs()
        prompts = tuple(part.result() for part in self._prompts)
        return SamplerOutput(self.ids(), logprobs, failed, prompts, self._vectors)


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
    def grammars(self) -> LazyGrammars: ...

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


class LazyGrammars:
    """The grammars of a batch. Before the first grammar no thread begins, and no process imports llguidance."""

    def __init__(
        self, directory: Path, vocabulary: int, end_ids: Collection[int], open_handle: Callable[[Handle], Lease]
    ) -> None:
        self._arguments = directory, vocabulary, end_ids, open_handle
        self._grammars: Grammars | None = None

    @property
    def counts(self) -> GrammarCounts | None:
        """Returns None before the first grammar."""
        return None if self._grammars is None else self._grammars.counts

    def launch(self, batch: BatchState, step: Step) -> Future[TokenMasks] | None:
        """Begins the masks of a step that `batch` has just applied. Returns None if no sampling row has a grammar."""
        if self._grammars is None:
            if step.joined is None or not step.joined.grammars:
                return None
            self._grammars = Grammars(*self._arguments)
        self._grammars.follow(batch, step)
        return self._grammars.begin(batch.sampled)

    def sampled(self, ids: Callable[[], Ints]) -> None:
        """`ids` returns what the step has sampled, and may block until the device has."""
        if self._grammars is not None:
            self._grammars.sampled(ids)
