"""A step that a CUDA device computes, and its result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import FinishReason, Ints
from penstock.engine.worker.device import SamplerOutput
from penstock.engine.worker.prompt_logprobs import PendingPromptLogprobs
from penstock.engine.worker.sampler import TopLogprobs

STUCK = 2  # in the second column of `out`, in place of 1: every id was ruled out


class CudaPendingStep:
    """A step that has been launched."""

    def __init__(
        self,
        out: Tensor,
        slots: Index,
        likely: TopLogprobs | None,
        failed: dict[int, FinishReason],
        prompts: tuple[PendingPromptLogprobs, ...] = (),
        release: Callable[[], object] = lambda: None,
    ) -> None:
        """`failed`: slots that failed before sampling, with the reasons; `out` has those that failed in sampling.
        `release`: gives back what the step has read, and is called when the step is done, by any thread."""
        # The copies are queued now: later ones would wait for the steps launched in between.
        self._out = out.to("cpu", non_blocking=True)
        self._likely = None if likely is None else likely.on_host()
        self._slots = slots
        self._failed = failed
        self._prompts = prompts
        self._release = release
        self._device = out.device.index
        self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        self._event.record(torch.cuda.current_stream(out.device))

    def ids(self) -> Ints:
        """Returns the sampled ids. Blocks until the step is done."""
        self._wait()
        ids: Ints = self._out.numpy()[:, 0]
        return ids

    def result(self) -> SamplerOutput:
        """Blocks until the step is done."""
        self._wait()
        self._release()
        ids: Ints = self._out.numpy()
        failed = dict.fromkeys(self._slots[ids[:, 1] != 0].tolist(), FinishReason.ERROR)
        failed |= dict.fromkeys(self._slots[ids[:, 1] == STUCK].tolist(), FinishReason.STUCK)
        failed |= self._failed
        logprobs = None if self._likely is None else self._likely.columns(self._slots.size)
        prompts = tuple(prompt.result() for prompt in self._prompts)
        return SamplerOutput(ids[:, 0].copy(), logprobs, failed, prompts)

    def _wait(self) -> None:
        torch.cuda.set_device(self._device)  # of this thread: else the wait could begin a context on device 0
        self._event.synchronize()  # without the interpreter's lock
