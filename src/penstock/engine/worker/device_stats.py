"""Busy time, idle time and token counts of a device, as the worker of rank 0 measures them for the status board.

A simulated device knows its times exactly, so `publish` takes them from it.
"""

from __future__ import annotations

from collections import deque

from penstock.engine.cluster.status_board import Row, StatusBoard
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Step
from penstock.engine.worker.device import Device, SamplerOutput
from penstock.engine.worker.simulated_device import SimulatedRunner


class DeviceStats:
    """Counts each step when it is `launched`, and when its result is in (`done`)."""

    def __init__(self, device: Device) -> None:
        self._simulated = device if isinstance(device, SimulatedRunner) else None
        self._begun: deque[int | None] = deque()  # of each step in flight, when it was launched; None: it is empty
        self._free_at = 0  # when the last one was seen to be done
        self._is_awaited = False  # the last step had rows
        self.busy_ns = self.idle_ns = 0
        self.computed = self.sampled = 0

    def launched(self, schedule: BatchState, step: Step, began: int) -> None:
        """`schedule` has just applied the step; at `began` it was handed to the device."""
        rows = schedule.rows.size
        if self._is_awaited and rows and not self._begun:
            self.idle_ns += began - self._free_at
        self._is_awaited = rows > 0
        self._begun.append(began if rows else None)
        joined = 0 if step.joined is None else step.joined.slots.size
        joined += 0 if step.resumed is None else step.resumed.slots.size
        tokens = rows if step.advances is None else int(schedule.counts.sum())
        # A row that samples computes one token of its answer, and all other tokens of the step are of prompts. But a
        # row that has joined samples for the first time with the last token of its prompt.
        self.computed += tokens - schedule.sampled.size + joined

    def done(self, sampled: SamplerOutput, now: int) -> None:
        """Counts the result of the oldest step in flight."""
        began = self._begun.popleft()
        if began is not None:
            self.busy_ns += now - max(began, self._free_at)
        self._free_at = now
        self.sampled += sampled.ids.size

    def publish(self, row: Row) -> None:
        device = self._simulated
        row[StatusBoard.BUSY_NS] = self.busy_ns if device is None else int(device.busy * 1e9)
        row[StatusBoard.IDLE_NS] = self.idle_ns if device is None else int(device.idle * 1e9)
        row[StatusBoard.COMPUTED] = self.computed
        row[StatusBoard.SAMPLED] = self.sampled
