"""A device that sleeps in place of the model: a worker class and a plugin of vLLM, for the processors of a GPU server.

The worker's main thread has no more to do than to launch, as on a GPU; vLLM's own thread for results waits until the
device would be ready. Steps run one after the other. vLLM schedules a step ahead, as it does by default on a GPU and
never on a CPU. Not in it: what a worker does to prepare inputs, and what a driver spins while it waits for an event.
"""

from __future__ import annotations

import os
import time
from typing import Any

VARIABLE = "PENSTOCK_BENCH_STEP_MS"
WORKER = "bench.vllm_cases.sleeping_worker.SleepingWorker"
TOKEN = 100  # that every step samples for every request


def step_seconds() -> float:
    return float(os.environ[VARIABLE]) / 1e3


def register() -> None:
    """Has vLLM schedule ahead. Its platform for CPUs turns that off, whatever its options say."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    if getattr(platform, "is_ahead", False):
        return
    check = platform.check_and_update_config

    def check_and_stay_ahead(cls: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_stay_ahead)
    platform.is_ahead = True


class Device:
    """The time at which the results of each step are there."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._free_at = 0.0

    def launch(self) -> float:
        """Returns when the results of a step that is launched now are there."""
        self._free_at = max(self._free_at, time.monotonic()) + self._step
        return self._free_at


class Lengths:
    """The prompt length of each request: a step samples a token for each request with a computed prompt."""

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}

    def sampled(self, scheduled: Any) -> list[list[int]]:
        """Returns the tokens of each request of a step, in the order of `num_scheduled_tokens`."""
        for request in scheduled.finished_req_ids:
            self._prompts.pop(request, None)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        return [
            [TOKEN] if computed[request] + tokens >= self._prompts[request] else []
            for request, tokens in scheduled.num_scheduled_tokens.items()
        ]
