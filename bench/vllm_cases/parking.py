"""A plugin of vLLM: readers of its queue park after 2 ms without a message, not after 1 s, as vLLM #52814 proposes."""

from __future__ import annotations

BUSY_LOOP_S = 0.002


def register() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    *defaults, seconds = SpinCondition.__init__.__defaults__
    if defaults or seconds not in (1, BUSY_LOOP_S):
        raise RuntimeError(f"busy_loop_s was to be the only default, 1 s, and there is {(*defaults, seconds)}")
    SpinCondition.__init__.__defaults__ = (BUSY_LOOP_S,)
