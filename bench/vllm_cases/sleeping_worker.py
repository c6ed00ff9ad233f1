"""The class of `sleeping`'s worker: its base class is vLLM's, so only vLLM's interpreter imports this."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from bench.vllm_cases.sleeping import Device, Lengths, step_seconds


class SleepingOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    def __init__(self, output: Any, ready_at: float) -> None:
        self._output = output
        self._ready_at = ready_at

    def get_output(self) -> Any:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._output


class SleepingWorker(CPUWorker):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sleeping = Device(step_seconds())
        self._lengths = Lengths()
        self._launched: Any = None

    def execute_model(self, scheduler_output: Any) -> Any:
        tokens = self._lengths.sampled(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = list(scheduler_output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=tokens,
        )
        self._launched = SleepingOutput(output, self._sleeping.launch())
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        launched, self._launched = self._launched, None
        return launched
